"""Invented runs of the demo, plain and with vLLM, written down as their processes would have done."""

from collections.abc import Sequence

import msgspec

from bench.demo.events import (
    SERVER,
    TRAINER,
    AnyEvent,
    Ended,
    Fault,
    Generated,
    Kept,
    Made,
    Published,
    Refilled,
    Trained,
    Updated,
)
from bench.demo.summary import Likelihoods

MIB = 1 << 20
STEPS = 20
POLICY_BYTES = 4 * MIB
COMPUTED_S = 0.15  # in each step


def sha(version: int) -> str:
    """The hash of a version."""
    return f"{version:064x}"


def published(time: float, version: int) -> Published:
    return Published(time=time, process=TRAINER, version=version, sha256=sha(version), stall_s=0.01)


def trained(time: float, version: int, reward: float) -> Trained:
    return Trained(time=time, process=TRAINER, version=version, reward=reward, lag=1.0, computed_s=COMPUTED_S)


def updated(time: float, who: str, version: int, sources: dict[str, int], *, is_first: bool = False) -> Updated:
    return Updated(
        time=time,
        process=who,
        version=version,
        sha256=sha(version),
        stall_s=0.02,
        bytes_by_source=sources,
        is_first=is_first,
    )


def generated(time: float, who: str, version: int) -> Generated:
    return Generated(time=time, process=who, version=version, sha256=sha(version), reward=0.5, samples=256)


def good_run() -> list[AnyEvent]:
    """All goes as it should: rewards rise, one dies, one joins from another rollout, the server comes back."""
    events: list[AnyEvent] = [published(0.0, 0)]
    for version in range(1, STEPS + 1):
        events += [published(version, version), trained(version + 0.1, version, 0.0 if version <= 8 else 1.0)]
    for who in ("rollout-0", "rollout-1"):
        events.append(updated(0.2, who, 0, {TRAINER: POLICY_BYTES}, is_first=True))
        last = STEPS if who == "rollout-0" else 2
        for version in range(last):
            events.append(generated(version + 0.3, who, version))
            events.append(updated(version + 1.2, who, version + 1, {TRAINER: (version + 2) * POLICY_BYTES}))
        events.append(generated(last + 0.3, who, last))
    events += [
        Fault(time=2.6, process="rollout-1", what="killed", version=2),
        Fault(time=3.5, process="rollout-2", what="started late", version=3),
        updated(4.5, "rollout-2", 4, {"rollout-0": POLICY_BYTES}, is_first=True),
        generated(4.6, "rollout-2", 4),
        Fault(time=6.5, process=SERVER, what="killed", version=6),
        Kept(time=6.9, process="rollout-2", version=4, stall_s=5.0, error="ServerUnreachable: nobody is there"),
        generated(6.95, "rollout-2", 4),
        Fault(time=7.5, process=SERVER, what="restarted", version=6),
        updated(20.4, "rollout-2", STEPS, {"rollout-0": POLICY_BYTES, TRAINER: POLICY_BYTES}),
        generated(20.5, "rollout-2", STEPS),
        Ended(time=20.6, process="rollout-2"),
        Ended(time=20.7, process=TRAINER),
    ]
    return in_order(events)


def in_order(events: Sequence[AnyEvent]) -> list[AnyEvent]:
    """By time, as the reader gives them."""
    return sorted(events, key=lambda event: event.time)


REFILLED = 12  # the version: with vLLM the trainer is killed at 12.6, between two versions, and refilled from rollouts
LIKELY = Likelihoods(batches=40, versions=21, most_off=2e-6, next_off=2e-3, wrong=[])


def good_engine_run() -> list[AnyEvent]:
    """Each version is hashed before it is published, and nothing is published while the trainer is away."""
    run = good_run()
    run += [
        Made(time=event.time - 0.05, process=TRAINER, version=event.version, sha256=event.sha256)
        for event in run
        if isinstance(event, Published)
    ]
    source = {"rollout-0": POLICY_BYTES // 2}
    run += [
        Fault(time=12.6, process=TRAINER, what="killed", version=12),
        Fault(time=12.61, process=TRAINER, what="restarted", version=12),
        Refilled(time=12.9, process=TRAINER, version=REFILLED, sha256=sha(REFILLED), bytes_by_source=source),
    ]
    return in_order(run)


def without_updates(run: Sequence[AnyEvent]) -> list[AnyEvent]:
    """The same, when every rollout keeps its first version, and a trainer can only go on from one of those."""

    def kept(event: AnyEvent) -> AnyEvent | None:
        version = {"rollout-2": 4}.get(event.process, 0)
        match event:
            case Updated(is_first=False):
                return None
            case Generated() | Updated():
                return msgspec.structs.replace(event, version=version, sha256=sha(version))
            case Refilled():
                return msgspec.structs.replace(event, version=4, sha256=sha(4))
            case Trained():
                return msgspec.structs.replace(event, reward=0.01)
            case _:
                return event

    return [event for event in map(kept, run) if event is not None]
