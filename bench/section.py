"""What a part of the benchmarks hands in: a table, its figures for the JSON, what is said below it, and its goals."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

MIB, GIB = 1 << 20, 1 << 30


@dataclass
class Options:
    """What the caller chose. `scale` shrinks sizes for a check that everything still runs."""

    rounds: int = 5
    is_tiny: bool = False  # every part in a few seconds; the figures mean nothing
    is_quick: bool = False  # what takes minutes is left out
    size_bytes: int = 256 * MIB
    largest_bytes: int = 2 * GIB
    readers: tuple[int, ...] = (1, 2, 4, 8)
    rate_mbit: int = 400
    link_bytes: int = 64 * MIB
    peers: tuple[str, ...] = ()  # virtual environments of the peers
    updates: int = 200
    fleets: tuple[int, ...] = (64, 512, 2048, 8192)  # workers whose reports are handed to the decisions directly
    crowds: tuple[int, ...] = (100, 500, 2000)  # workers with real connections
    max_cpu_s: float = 60.0  # of the server for one figure; what would take more is extrapolated
    has_star: bool = True
    say: "object" = None

    def tell(self, text: str) -> None:
        """What is going on, for whoever waits."""
        if callable(self.say):
            self.say(text)


@dataclass
class Goal:
    """What the figures should be. `met` is None where it could not be measured."""

    what: str
    wanted: str
    got: str
    met: bool | None


@dataclass
class Section:
    """One part's result."""

    key: str
    title: str
    columns: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    skipped: str = ""  # why nothing was measured


@dataclass
class Samples:
    """Repeated transfers of one contestant."""

    name: str
    size_bytes: int
    kind: str = ""  # "plain", "tensorhub" or "peer"
    seconds: list[float] = field(default_factory=list)
    reader_cpu_s: list[float] = field(default_factory=list)
    source_cpu_s: list[float] = field(default_factory=list)
    note: str = ""
    error: str = ""

    def add(self, seconds: float, reader_cpu_s: float, source_cpu_s: float) -> None:
        self.seconds.append(seconds)
        self.reader_cpu_s.append(reader_cpu_s)
        self.source_cpu_s.append(source_cpu_s)

    @property
    def rate(self) -> float:
        """GiB/s, by the median."""
        return self.size_bytes / median(self.seconds) / GIB if self.seconds else 0.0

    def cpu_per_gib(self, which: Sequence[float]) -> float:
        return median(which) / (self.size_bytes / GIB) if which else 0.0

    def figures(self) -> dict[str, object]:
        found: dict[str, object] = {"name": self.name, "kind": self.kind, "size_bytes": self.size_bytes}
        if self.error:
            return {**found, "error": self.error}
        return {
            **found,
            "seconds": [round(value, 6) for value in self.seconds],
            "gib_per_s": round(self.rate, 3),
            "reader_cpu_s_per_gib": round(self.cpu_per_gib(self.reader_cpu_s), 4),
            "source_cpu_s_per_gib": round(self.cpu_per_gib(self.source_cpu_s), 4),
            "note": self.note,
        }


def size_text(size_bytes: float) -> str:
    """For people."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


@contextmanager
def closing_all(things: list[object]) -> Iterator[None]:
    """Kill processes in the reverse order of their start."""
    try:
        yield
    finally:
        for thing in reversed(things):
            thing.kill()  # type: ignore[attr-defined]
