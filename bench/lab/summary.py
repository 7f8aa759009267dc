"""The events of a run, condensed into the figures that are shown and judged. Pure."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from .events import AnyEvent, Computed, Kept, Published, Seen, Updated
from .idle import MIN_SHARE
from .interpreter import SLICE_S, Slices

TRAINER = "trainer"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy's run. Stall counts from the moment when everybody had the first version and was told to go."""

    strategy: str
    title: str
    seconds: float
    idle_share: float
    own_cpu_s: float  # processor time of the laboratory itself; the rest of what was not idle was others'
    rollouts: int  # that ever lived
    versions: int  # published after the first
    updates: int  # to another version, of all rollouts together
    rollout_stall_s: float
    trainer_stall_s: float
    update_s: list[float]  # each update's stall, sorted
    unpublish_s: list[float]  # each unpublish of the trainer, sorted
    join_s: list[float]  # how long each rollout that joined later took to have its first version, sorted
    lag: float  # versions behind the trainer that a rollout ran, on average over its updates and looks
    from_trainer: float  # copies of each version that the trainer sent, on average; 0 where nobody counted
    wan_copies: dict[int, float]  # by version: what crossed between sites, in whole copies
    hashes_compared: int
    hashes_wrong: list[str]
    failures: list[str]  # updates that had to be tried again
    slices: dict[str, Slices] = {}  # of the interpreter, by worker
    is_faulty: bool = False  # somebody was killed on purpose, and the figures are not for comparison

    @property
    def is_valid(self) -> bool:
        """The links were the bottleneck, not the processor."""
        return self.idle_share >= MIN_SHARE

    @property
    def total_stall_s(self) -> float:
        return self.rollout_stall_s + self.trainer_stall_s

    @property
    def slice_ratio(self) -> float:
        """What the slices of the interpreter took, over what was asked; 0 where there were none."""
        count = sum(each.moving + each.still for each in self.slices.values())
        return sum(each.moving_s + each.still_s for each in self.slices.values()) / SLICE_S / count if count else 0.0

    @property
    def moving_ratio(self) -> float:
        """What they took while weights moved, over what as many of the same workers took while none did; 0: unknown."""
        both = [each for each in self.slices.values() if each.moving and each.still]
        usual_s = sum(each.moving_s / each.ratio for each in both)
        return sum(each.moving_s for each in both) / usual_s if usual_s else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values: the smallest that at least this share do not exceed; 0 of none."""
    if not values:
        return 0.0
    return values[min(len(values) - 1, max(0, -int(-share * len(values) // 1) - 1))]


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return fmean(values) if values else 0.0


def summarise(
    events: Iterable[AnyEvent],
    *,
    strategy: str,
    title: str,
    size_bytes: int,
    began_at: float,
    seconds: float,
    idle_share: float,
    own_cpu_s: float = 0.0,
) -> Outcome:
    """Condense a run; `events` in any order."""
    events = sorted(events, key=lambda event: event.time)
    published = [event for event in events if isinstance(event, Published)]
    after = [event for event in published if event.time >= began_at]
    updates = [event for event in events if isinstance(event, Updated)]
    counted = [event for event in updates if not event.is_first]
    compared, wrong = compare_hashes(published, updates)
    return Outcome(
        strategy=strategy,
        title=title,
        seconds=seconds,
        idle_share=idle_share,
        own_cpu_s=own_cpu_s,
        rollouts=len({event.process for event in updates}),
        versions=len(after),
        updates=sum(bool(event.sha256) for event in counted),
        rollout_stall_s=sum(event.stall_s for event in counted),
        trainer_stall_s=sum(event.unpublish_s + event.publish_s for event in after),
        update_s=sorted(event.stall_s for event in counted if event.sha256),
        unpublish_s=sorted(event.unpublish_s for event in after),
        join_s=sorted(event.stall_s for event in updates if event.is_first and event.ended >= began_at),
        lag=mean_lag(published, counted),
        from_trainer=copies_from_trainer(updates, size_bytes),
        wan_copies=wan_copies(events, size_bytes),
        hashes_compared=compared,
        hashes_wrong=wrong,
        failures=[f"{event.process}: {event.error}" for event in events if isinstance(event, Kept)],
        slices=slices_of(events),
    )


def slices_of(events: Iterable[AnyEvent]) -> dict[str, Slices]:
    """All slices of the interpreter, of each worker."""
    found: dict[str, Slices] = {}
    for event in events:
        if isinstance(event, Computed):
            found[event.process] = found.get(event.process, Slices()) + event.slices
    return found


def compare_hashes(published: Sequence[Published], updates: Sequence[Updated]) -> tuple[int, list[str]]:
    """How many hashes of rollouts were compared with the trainer's of the same version, and which differ."""
    announced = {event.version: event.sha256 for event in published}
    taken = [event for event in updates if event.sha256]
    wrong = [
        f"{event.process}, version {event.version}: {event.sha256:.16}…, not {announced.get(event.version)!s:.16}…"
        for event in taken
        if announced.get(event.version) != event.sha256
    ]
    return len(taken), wrong


def mean_lag(published: Sequence[Published], updates: Sequence[Updated]) -> float:
    """How many versions newer the newest one was, when a rollout began to compute."""
    lags, newest, index = [], 0, 0
    for event in sorted(updates, key=lambda event: event.ended):
        while index < len(published) and published[index].time <= event.ended:
            newest = published[index].version
            index += 1
        lags.append(float(max(0, newest - event.version)))
    return mean(lags)


def copies_from_trainer(updates: Sequence[Updated], size_bytes: int) -> float:
    """Of each version that any rollout got: what the trainer sent, in copies, as the rollouts counted it."""
    latest: dict[str, dict[str, int]] = {}
    for event in updates:
        if event.bytes_by_source:
            latest[event.process] = event.bytes_by_source
    sent = sum(found.get(TRAINER, 0) for found in latest.values())
    versions = len({event.version for event in updates if event.sha256})
    return sent / size_bytes / versions if versions else 0.0


def wan_copies(events: Iterable[AnyEvent], size_bytes: int) -> dict[int, float]:
    """What crossed between sites of each version, as last seen."""
    found: dict[int, int] = {}
    for event in events:
        if isinstance(event, Seen):
            for version, count in event.cross_site_bytes.items():
                found[version] = max(found.get(version, 0), count)
    return {version: count / size_bytes for version, count in sorted(found.items())}
