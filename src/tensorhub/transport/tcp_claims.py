"""Which chunks a stream asks for next: its share of what nobody has asked for yet, as far ahead as its link is fast.

It must never: hand out a chunk twice.
"""

import threading
from collections.abc import Sequence

from .tcp_settings import MAX_WANT_RANGES, TcpSettings


class Claims:
    """The wanted chunks that no stream has asked for yet, in order."""

    def __init__(self, wanted: Sequence[int], streams: int) -> None:
        self._wanted = wanted
        self.streams = streams  # those with a higher index ask for no more
        self._next = 0
        self._lock = threading.Lock()

    def take(self, most: int) -> Sequence[int]:
        """Up to `most` chunks; towards the end fewer, so that all streams finish together."""
        with self._lock:
            fair = -(-(len(self._wanted) - self._next) // self.streams)
            first, self._next = self._next, self._next + max(0, min(most, fair))
            return self._wanted[first : self._next]


class Ahead:
    """How many chunks one stream asks for ahead: two at least, doubled while they arrive sooner than `ahead_s`."""

    def __init__(self, settings: TcpSettings, chunk_bytes: int) -> None:
        self._aim_s = settings.ahead_s
        self._most = max(2, min(settings.ahead_bytes // chunk_bytes, MAX_WANT_RANGES))
        self.chunks = max(2, min(self._most, settings.stream_bytes // chunk_bytes))

    def adjust(self, took_s: float) -> None:
        """A chunk came `took_s` after it was asked for."""
        if took_s < self._aim_s:
            self.chunks = min(self.chunks * 2, self._most)
        elif took_s > 2 * self._aim_s:
            self.chunks = max(self.chunks // 2, 2)


def as_ranges(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """The same chunks in the same order as [start, stop) ranges."""
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return ranges
