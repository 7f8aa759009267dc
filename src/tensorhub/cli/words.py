"""Numbers as people read them: sizes, rates, spans of time, lists of shards."""

from collections.abc import Sequence

from ..core.errors import printable

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def plain_text(text: str) -> str:
    """As it is, but for what a terminal would obey in place of showing it: `\\x1b`. Line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def size_text(size_bytes: float) -> str:
    """`0 B`, `1023 B`, `1.5 GiB`."""
    step = 0
    while step + 1 < len(UNITS) and abs(size_bytes) >= 1023.95:
        size_bytes, step = size_bytes / 1024, step + 1
    return f"{size_bytes:.0f} B" if step == 0 else f"{size_bytes:.1f} {UNITS[step]}"


def time_text(seconds: float) -> str:
    """`0.3 s`, `59 s`, `3 min 05 s`, `2 h 10 min`, `4 d 03 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def shards_text(shards: Sequence[int]) -> str:
    """`3`, `0-3`, `0-1, 4`."""
    runs: list[list[int]] = []
    for shard in sorted(shards):
        if runs and shard == runs[-1][-1] + 1:
            runs[-1].append(shard)
        else:
            runs.append([shard])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def count_text(count: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def some_text(names: Sequence[str], most: int) -> str:
    """The first few of many names: `a, b and 7 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
