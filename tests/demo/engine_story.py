"""An invented run of the demo with vLLM: as a plain one, and the trainer is killed and refilled from rollouts."""

import msgspec

from bench.demo.events import TRAINER, AnyEvent, Fault, Generated, Made, Published, Refilled, Trained, Updated
from bench.demo.summary import Likelihoods, Summary, summarise

from .story import POLICY_BYTES, STEPS, good_run, in_order, sha

REFILLED = 12  # the version: the trainer is killed at 12.6, between two versions
LIKELY = Likelihoods(batches=40, versions=21, most_off=2e-6, next_off=2e-3, wrong=[])


def good_engine_run() -> list[AnyEvent]:
    """Each version is hashed before it is published, and nothing is published while the trainer is away."""
    run = good_run()
    run += [
        Made(time=event.time - 0.05, process=TRAINER, version=event.version, sha256=event.sha256)
        for event in run
        if isinstance(event, Published)
    ]
    run += [
        Fault(time=12.6, process=TRAINER, what="killed", version=12),
        Fault(time=12.61, process=TRAINER, what="restarted", version=12),
        Refilled(
            time=12.9,
            process=TRAINER,
            version=REFILLED,
            sha256=sha(REFILLED),
            bytes_by_source={"rollout-0": POLICY_BYTES // 2},
        ),
    ]
    return in_order(run)


def without_updates() -> list[AnyEvent]:
    """The same, when every rollout keeps its first version. The trainer can only go on from one of those."""
    first = {"rollout-2": 4}

    def kept(event: AnyEvent) -> AnyEvent | None:
        version = first.get(event.process, 0)
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

    return [event for event in map(kept, good_engine_run()) if event is not None]


def summary_of(events: list[AnyEvent], *, updates: bool = True, likelihoods: Likelihoods | None = LIKELY) -> Summary:
    """As the demo makes it."""
    found = in_order(events)
    told = {"steps": STEPS, "seed": 0, "seconds": 12.0}
    return summarise(found, **told, updates=updates, engine="vllm", likelihoods=likelihoods)
