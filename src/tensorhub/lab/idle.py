"""How idle the processor was: below a certain share, the links were not the bottleneck, and a figure means nothing."""

from pathlib import Path

LEAST_SHARE = 0.15


class Idle:
    """Share of all cores' time that nobody used, from its making until asked."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        words = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return words[3] + words[4], sum(words)

    def share(self) -> float:
        """From 0 to 1."""
        idle, total = self._now()
        return (idle - self._before[0]) / max(1, total - self._before[1])
