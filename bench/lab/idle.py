"""How idle the processor was: below a certain share, the links were not the bottleneck, and a figure means nothing.

What niced processes had counts as idle: they give way at once to the laboratory's, which are not.
"""

import resource
from pathlib import Path

MIN_SHARE = 0.15


class Idle:
    """Share of all cores' time that nobody used, or only niced processes, from its making until asked."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        _, nice, _, idle, waiting, *_ = words = [int(word) for word in _first_line().split()[1:9]]
        return nice + idle + waiting, sum(words)

    def share(self) -> float:
        """From 0 to 1."""
        idle, total = self._now()
        return (idle - self._before[0]) / max(1, total - self._before[1])


def own_cpu_s() -> float:
    """Seconds of processor of this process, and of all its children that have ended and theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _first_line() -> str:
    return Path("/proc/stat").read_text().splitlines()[0]
