"""How a read goes, as its reader reports it: whether anything arrives at all, and how fast.

A read moves on with each chunk, and with each sixteenth of one that has arrived. So a slow link with large chunks does
not look like a source that sends nothing, or next to nothing. The rate is that of the last few seconds.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

Tier = tuple[bool, bool]  # how far a read comes: (from another site, from another host)

PARTS = 16  # of a chunk: less than one of them counts as nothing
LEAST_PART_BYTES = 1 << 12  # of what has no chunks yet: a handshake, a manifest


@dataclass
class Pace:
    """The pace of one read. It is unknown until the reader has reported twice."""

    moved_at: float = -inf  # when it last moved on, or began
    told_at: float = -inf  # when its reader last reported
    waited_at: float = -inf  # when its source last had nothing more for it
    done: int = 0
    arrived_bytes: int = 0
    rate: float | None = None  # bytes/s over the last few seconds; None: not known yet
    unsure: float = 0.0  # how much higher it may be, where only whole chunks are seen
    is_stuck: bool = False  # too slow, and no other source would help: those who read behind it need not wait
    _part_bytes: int = 0  # that had come when it last moved on
    _first: int | None = None  # chunks in place when it began
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    def rest(self, now: float) -> None:
        """It can bring nothing now, or its reader could not report: what came before is no measure."""
        self.moved_at = self.told_at = now
        self.rate, self._part_bytes = None, self.arrived_bytes
        self._marks.clear()

    def wait(self, now: float) -> None:
        """Its source has nothing more for it now, which does not count as standing still."""
        self.moved_at = self.waited_at = now

    def note(self, now: float, *, arrived_bytes: int, done: int, chunk_bytes: int, over_s: float) -> None:
        """What its reader has just reported. The rate is taken over `over_s`; `chunk_bytes` is 0 while unknown."""
        self._first = done if self._first is None else self._first
        quantum_bytes = 0 if arrived_bytes else chunk_bytes
        arrived_bytes = arrived_bytes or (done - self._first) * chunk_bytes
        is_other = arrived_bytes < self.arrived_bytes or done < self.done  # another transport, another fill
        self.arrived_bytes = arrived_bytes
        if is_other or not self._marks or self.told_at < now - over_s:
            self.rest(now)  # it began at some time after its reader's report before: nobody is blamed for that
        part_bytes = max(LEAST_PART_BYTES if not chunk_bytes else 1, chunk_bytes // PARTS)
        if done > self.done or arrived_bytes >= self._part_bytes + part_bytes:
            self.moved_at, self._part_bytes = now, arrived_bytes
        self.done, self.told_at = done, now
        marks = self._marks
        marks.append((now, arrived_bytes))
        while len(marks) > 2 and marks[1][0] <= now - over_s:
            marks.popleft()
        took_s = now - marks[0][0]
        if took_s >= over_s:
            self.rate = (arrived_bytes - marks[0][1]) / took_s
            self.unsure = quantum_bytes / took_s

    def is_still(self, now: float, patience_s: float) -> bool:
        """It has not moved on for that long, and its reader has said so since."""
        return now - self.moved_at >= patience_s and self.told_at - self.moved_at >= patience_s / 2


@dataclass
class Capacity:
    """The most that a source has brought to all its readers together, of late."""

    best: float = 0.0
    at: float = 0.0

    def note(self, now: float, total: float, memory_s: float) -> None:
        if total >= self.best or now - self.at > memory_s:
            self.best, self.at = total, now

    def forget(self, now: float) -> None:
        """It was tried in vain."""
        self.best, self.at = 0.0, now


def is_too_slow(pace: Pace, others: float, times: float) -> bool:
    """So far below the others that sharing a link does not explain it."""
    return pace.rate is not None and (pace.rate + pace.unsure) * times < others


def usual(rates: list[float]) -> float | None:
    """What most get, the better half of two."""
    return sorted(rates)[len(rates) // 2] if rates else None
