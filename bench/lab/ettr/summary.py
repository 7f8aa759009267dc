"""The effective training time ratio of a run, and what became of each failure, from the events alone. Pure.

The ratio is productive time over wall-clock time (Kokolis et al., "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters", arXiv 2410.21680; RobustRL, arXiv 2512.22492, reports it for reinforcement learning). Here:

    productive   the time of computing of each step that is part of the result, once. What was computed and lost does
                 not count, nor does it when it is computed again and again; publishing and saving do not count either
    wall clock   from the start of the first process until the last step is done, the first start included
"""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from .events import AnyEvent, Began, Done, Ended, Held, Kept, Killed, Listening, Saved, Started
from .plan import SERVER, TRAINER, Role


class Recovery(msgspec.Struct, frozen=True):
    """What came after a failure. Seconds from the kill; None: it never came."""

    role: Role
    step: int
    next_step_s: float | None  # until a step was done that nobody had done before
    back_s: float | None  # until who was killed did its work again


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    title: str
    step_s: float
    start_s: float
    steps: int  # that are part of the result
    wall_s: float
    repeated_s: float  # computed, lost, and computed again
    cut_s: float  # computing that was cut short
    steps_repeated: int
    restarts: dict[str, int]  # processes started again, by role
    recoveries: list[Recovery]
    publish_s: list[float]  # of each step, sorted
    saved_s: float  # all checkpoint files together
    updates_failed: int
    hashes_compared: int
    hashes_wrong: list[str]
    idle_share: float = 1.0  # of the processor
    missing: list[str]  # who does not hold the last step in the end

    @property
    def useful_s(self) -> float:
        """Productive time."""
        return self.steps * self.step_s

    @property
    def ratio(self) -> float:
        """The effective training time ratio; 0 of a run in which nothing was done."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    @property
    def other_s(self) -> float:
        """Neither: processes start, fill and wait, versions are published, files written."""
        return self.wall_s - self.useful_s - self.repeated_s - self.cut_s


def summarise(
    events: Iterable[AnyEvent], *, title: str, step_s: float, start_s: float, steps: int, expected: Sequence[str]
) -> Outcome:
    """Condense a run; `events` in any order, `expected` the hash of each step from 0 on."""
    events = sorted(events, key=lambda event: event.time)
    done = [event for event in events if isinstance(event, Done)]
    results = {event.step for event in done}
    ended = max((event.time for event in done), default=0.0)
    compared, wrong = compare_hashes(events, expected)
    return Outcome(
        title=title,
        step_s=step_s,
        start_s=start_s,
        steps=len(results),
        wall_s=ended - events[0].time if done else 0.0,
        repeated_s=(len(done) - len(results)) * step_s,
        cut_s=sum(cut_short(events, step_s)),
        steps_repeated=len(done) - len(results),
        restarts=restarts_of(events),
        recoveries=[recovery(event, events) for event in events if isinstance(event, Killed)],
        publish_s=sorted(event.publish_s for event in done),
        saved_s=sum(event.seconds for event in events if isinstance(event, Saved)),
        updates_failed=sum(isinstance(event, Kept) for event in events),
        hashes_compared=compared,
        hashes_wrong=wrong,
        missing=without_last(events, steps),
    )


def cut_short(events: Sequence[AnyEvent], step_s: float) -> list[float]:
    """How long each step had been computed that was begun and never done, because its trainer was killed."""
    found, began = [], None
    for event in events:
        match event:
            case Began():
                began = event
            case Done():
                began = None
            case Started(process=process, is_again=True) if process == TRAINER and began is not None:
                found.append(min(step_s, event.time - began.time))
                began = None
            case _:
                pass
    return found


def restarts_of(events: Iterable[AnyEvent]) -> dict[str, int]:
    """How many processes of each role were started again."""
    found = {"trainer": 0, "rollout": 0, "server": 0}
    for event in events:
        if isinstance(event, Started) and event.is_again:
            found[event.process.partition("-")[0]] += 1
    return found


def recovery(killed: Killed, events: Sequence[AnyEvent]) -> Recovery:
    """What became of one failure."""
    before = {event.step for event in events if isinstance(event, Done) and event.time <= killed.time}
    after = [event for event in events if event.time > killed.time]
    news = [event.time for event in after if isinstance(event, Done) and event.step not in before]
    if killed.role == SERVER:
        listens = min((event.time for event in after if isinstance(event, Listening)), default=float("inf"))
        back = [event.time for event in after if isinstance(event, Done) and event.time > listens]
    else:
        mine = [event for event in after if event.process == killed.process]
        back = [event.time for event in mine if isinstance(event, Held) and event.is_first]
    seconds = [min(times) - killed.time if times else None for times in (news, back)]
    return Recovery(killed.role, killed.step, *seconds)


def compare_hashes(events: Iterable[AnyEvent], expected: Sequence[str]) -> tuple[int, list[str]]:
    """How many hashes were compared with what the step has to be, and which differ."""
    taken = [event for event in events if isinstance(event, Held)]
    wrong = [
        f"{event.process}, step {event.step}: {event.sha256:.16}…"
        for event in taken
        if not 0 <= event.step < len(expected) or event.sha256 != expected[event.step]
    ]
    return len(taken), wrong


def without_last(events: Sequence[AnyEvent], steps: int) -> list[str]:
    """Who has not said, before it ended, that it holds the last step."""
    names = {event.process for event in events if isinstance(event, Started)} - {SERVER}
    ended = {event.process for event in events if isinstance(event, Ended)}
    last = {event.process: event.step for event in events if isinstance(event, Held)}
    return sorted(name for name in names if name not in ended or last.get(name) != steps)


def spread(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Median and largest; None of none."""
    known = [value for value in values if value is not None]
    return (median(known), max(known)) if known else None
