"""The events of a run, condensed into the facts that the report shows and the checks judge. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec

from .events import TRAINER, AnyEvent, Fault, Generated, Kept, Made, Published, Refilled, Trained, Updated
from .progress import RECENT, Progress

START_STEPS, END_STEPS = 5, RECENT  # over which the reward at the start and at the end is averaged


class Stall(msgspec.Struct, frozen=True):
    """Seconds that a process could not compute because of updates, the first fill not counted."""

    updates: int
    total_s: float
    median_s: float
    most_s: float


class RolloutSummary(msgspec.Struct, frozen=True):
    """One rollout's life."""

    name: str
    fate: str  # "to the end", "was killed", "joined late"
    first_version: int | None
    held_version: int | None  # at its end, as the live table shows it
    last_version: int | None  # that it ran
    versions_run: int
    samples: int
    stall: Stall
    kept: int  # updates that failed for now
    bytes_by_source: dict[str, int]
    first_bytes_by_source: dict[str, int]  # of the first fill alone


class FaultSummary(msgspec.Struct, frozen=True):
    """Something that the director did, and whether the run went on afterwards."""

    seconds: float  # after the beginning
    process: str
    what: str
    version: int
    published_after: int  # versions
    updates_after: int  # by rollouts, to versions published later


class RefillSummary(msgspec.Struct, frozen=True):
    """A trainer that was started again."""

    version: int  # that it goes on from
    newest: int  # held by rollouts that lived, as they had said before
    is_proved: bool  # it hashed what it had got, and that was published under this number
    bytes_by_source: dict[str, int]
    published_after: int  # versions
    seconds: float  # from its end to the first version it published


class TrainingTime(msgspec.Struct, frozen=True):
    """What the trainer did all the time, in seconds."""

    computed_s: float  # gradients and optimizer steps that are part of the result
    lost_s: float  # the same of versions that no rollout had got when their trainer was killed
    published_s: float  # in unpublish and publish
    other_s: float  # it started, waited for samples, was gone, or served the last version

    @property
    def ratio(self) -> float:
        """The effective training time ratio: productive time over wall-clock time (arXiv 2410.21680)."""
        total_s = self.computed_s + self.lost_s + self.published_s + self.other_s
        return self.computed_s / total_s if total_s else 0.0


class Likelihoods(msgspec.Struct, frozen=True):
    """Log-probabilities that engines gave, beside those of transformers with the weights that were published."""

    batches: int
    versions: int
    most_off: float  # with the weights of the version that the engine named, the worst token of all
    next_off: float  # with the version before or after, whichever is nearer: the worst token of a batch, median
    wrong: list[str]


class Summary(msgspec.Struct, frozen=True):
    """The whole run."""

    steps: int
    seed: int
    updates: bool
    seconds: float
    last_version: int | None
    reward_start: float
    reward_end: float
    mean_lag: float
    trainer_stall: Stall
    trainer_copies: float  # that the trainer sent of each version that some rollout fetched, on average
    rollouts: list[RolloutSummary]
    faults: list[FaultSummary]
    hashes_compared: int
    hashes_wrong: list[str]
    ran_unproved: list[str]
    engine: str = ""  # that generated; "": the demo's own code
    refills: list[RefillSummary] = []
    likelihoods: Likelihoods | None = None
    training_time: TrainingTime | None = None


def summarise(
    events: Iterable[AnyEvent],
    *,
    steps: int,
    seed: int,
    updates: bool,
    seconds: float,
    engine: str = "",
    likelihoods: Likelihoods | None = None,
) -> Summary:
    """Condense a run. `events` in the order of time."""
    events = list(events)
    published = [event for event in events if isinstance(event, Published)]
    rewards = [event.reward for event in events if isinstance(event, Trained)]
    replicas = sorted({event.process for event in events if isinstance(event, Updated)})
    compared, wrong = compare_hashes(events)
    progress = Progress(steps)
    progress.take(events)
    rollouts = [_rollout(name, events, progress.rollouts[name].version) for name in replicas]
    return Summary(
        steps=steps,
        seed=seed,
        updates=updates,
        seconds=seconds,
        last_version=max((event.version for event in published), default=None),
        reward_start=_mean(rewards[:START_STEPS]),
        reward_end=_mean(rewards[-END_STEPS:]),
        mean_lag=_mean([event.lag for event in events if isinstance(event, Trained)]),
        trainer_stall=_stall([event.stall_s for event in published if event.version > 0]),
        trainer_copies=_trainer_copies(rollouts, {e.version for e in events if isinstance(e, Updated)}),
        rollouts=rollouts,
        faults=[_fault(event, events) for event in events if isinstance(event, Fault)],
        hashes_compared=compared,
        hashes_wrong=wrong,
        ran_unproved=ran_unproved(events),
        engine=engine,
        refills=[_refill(event, events) for event in events if isinstance(event, Refilled)],
        likelihoods=likelihoods,
        training_time=_training_time(events, seconds),
    )


def compare_hashes(events: Sequence[AnyEvent]) -> tuple[int, list[str]]:
    """How many hashes of rollouts were compared with the trainer's of the same version, and which differ."""
    announced = {event.version: event.sha256 for event in events if isinstance(event, Made | Published)}
    taken = [event for event in events if isinstance(event, Updated | Generated | Refilled)]
    wrong = [
        f"{event.process}, version {event.version}: {event.sha256:.16}…, not {announced.get(event.version)!s:.16}…"
        for event in taken
        if announced.get(event.version) != event.sha256
    ]
    return len(taken), wrong


def ran_unproved(events: Sequence[AnyEvent]) -> list[str]:
    """Batches that a rollout generated with another version than the one it had hashed last before running it."""
    proved: dict[str, tuple[int, str]] = {}
    found = []
    for event in events:
        match event:
            case Updated():
                proved[event.process] = (event.version, event.sha256)
            case Generated() if proved.get(event.process) != (event.version, event.sha256):
                found.append(f"{event.process} ran version {event.version}")
            case _:
                pass
    return found


def _rollout(name: str, events: Sequence[AnyEvent], held_version: int | None) -> RolloutSummary:
    mine = [event for event in events if event.process == name]
    updated = [event for event in mine if isinstance(event, Updated)]
    generated = [event for event in mine if isinstance(event, Generated)]
    kept = [event for event in mine if isinstance(event, Kept)]
    faults = {event.what for event in mine if isinstance(event, Fault)}
    later = [event.stall_s for event in updated if not event.is_first] + [event.stall_s for event in kept]
    return RolloutSummary(
        name=name,
        fate="was killed" if "killed" in faults else "joined late" if "started late" in faults else "to the end",
        first_version=updated[0].version if updated else None,
        held_version=held_version,
        last_version=generated[-1].version if generated else None,
        versions_run=len({event.version for event in generated}),
        samples=sum(event.samples for event in generated),
        stall=_stall(later),
        kept=len(kept),
        bytes_by_source=updated[-1].bytes_by_source if updated else {},
        first_bytes_by_source=updated[0].bytes_by_source if updated else {},
    )


def _trainer_copies(rollouts: Sequence[RolloutSummary], fetched: set[int]) -> float:
    policy_bytes = max((sum(rollout.first_bytes_by_source.values()) for rollout in rollouts), default=0)
    sent_bytes = sum(bytes_from(rollout.bytes_by_source, trainer=True) for rollout in rollouts)
    return sent_bytes / (policy_bytes * len(fetched)) if policy_bytes else 0.0


def _fault(fault: Fault, events: Sequence[AnyEvent]) -> FaultSummary:
    later = [event for event in events if event.time > fault.time]
    published = {event.version for event in later if isinstance(event, Published)}
    return FaultSummary(
        seconds=fault.time - events[0].time,
        process=fault.process,
        what=fault.what,
        version=fault.version,
        published_after=len(published),
        updates_after=sum(isinstance(event, Updated) and event.version in published for event in later),
    )


def _refill(refill: Refilled, events: Sequence[AnyEvent]) -> RefillSummary:
    before = [event for event in events if event.time < refill.time]
    killed = {event.process for event in before if isinstance(event, Fault) and event.what == "killed"}
    died = max((e.time for e in before if isinstance(e, Fault) and e.process == refill.process), default=refill.time)
    held = {e.process: e.version for e in before if isinstance(e, Updated) and e.process not in killed}
    made = {(e.version, e.sha256) for e in before if isinstance(e, Made | Published)}
    later = [e.time for e in events if isinstance(e, Published) and e.time > refill.time]
    return RefillSummary(
        version=refill.version,
        newest=max(held.values(), default=-1),
        is_proved=(refill.version, refill.sha256) in made,
        bytes_by_source=refill.bytes_by_source,
        published_after=len(later),
        seconds=min(later, default=refill.time) - died,
    )


def _training_time(events: Sequence[AnyEvent], seconds: float) -> TrainingTime:
    trained = [event for event in events if isinstance(event, Trained)]
    refills = [event for event in events if isinstance(event, Refilled)]
    lost = [each for each in trained if any(each.time < it.time and each.version > it.version for it in refills)]
    lost_s = sum(each.computed_s for each in lost)
    computed_s = sum(each.computed_s for each in trained) - lost_s
    published_s = sum(event.stall_s for event in events if isinstance(event, Published) and event.version > 0)
    return TrainingTime(computed_s, lost_s, published_s, seconds - computed_s - lost_s - published_s)


def _stall(seconds: list[float]) -> Stall:
    return Stall(len(seconds), sum(seconds), median(seconds or [0.0]), max(seconds, default=0.0))


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def bytes_from(by_source: dict[str, int], *, trainer: bool) -> int:
    """Bytes received from the trainer, or from everybody else."""
    return sum(size for source, size in by_source.items() if (source == TRAINER) is trainer)
