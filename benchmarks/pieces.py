"""Pieces of another layout beside as many bytes of the same layout, in one run, by rows of several lengths.

The source's rows lie between others (`gathered`), or the reader's do (`scattered`). Every tile is verified.
"""

import random
from collections.abc import Callable
from itertools import product

from .processes import Child, Failed
from .section import Goal, Options, Samples, Section, size_text

RUNS = (256, 1024, 4096, 65536)
KINDS = ("local", "tcp")
GOALS = {65536: 0.8, 4096: 0.65}
WAYS = {"local": "local", "copied": "local, from a host copy", "tcp": "tcp"}


class Sides:
    """A source and a reader that are cut in other ways."""

    def __init__(self, size_bytes: int, run_bytes: int, *, is_gathered: bool) -> None:
        self.size_bytes = size_bytes
        self.source = Child("source", module="benchmarks.pieces_child")
        self.reader = Child("reader", module="benchmarks.pieces_child")
        try:
            for child in (self.source, self.reader):
                child.wait_started()
            shape = {"size_bytes": size_bytes, "run_bytes": run_bytes}
            self.source.do("cut", is_wide=is_gathered, is_publisher=True, **shape)
            self.reader.do("cut", is_wide=not is_gathered, is_publisher=False, **shape)
            found = self.source.do("serve", kinds=list(KINDS), size_bytes=size_bytes)
            self.endpoints, self.root = found["endpoints"], found["root"]
            self.reader.do("know", cut=found["cut"], cut_root=found["cut_root"])
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.source.kill()
        self.reader.kill()

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def read(self, way: str, *, is_pieces: bool) -> dict[str, float]:
        """One transfer."""
        kind = "tcp" if way == "tcp" else "local"
        suffix = "copied" if way == "copied" else ""
        asked = {"kind": kind, "endpoint": self.endpoints[kind]}
        if is_pieces:
            return self.reader.do("read_pieces", key="pieces" + suffix, **asked)
        return self.reader.do("read_plain", key="plain" + suffix, root=self.root, size_bytes=self.size_bytes, **asked)


def run(options: Options) -> list[Section]:
    """The part."""
    size_bytes = options.size_bytes if options.is_tiny else min(options.size_bytes, 256 << 20)
    rows, goals, figures = [], [], []
    for run_bytes, is_gathered in product(RUNS, (True, False)):
        text = f"{size_text(run_bytes)}, {'gathered' if is_gathered else 'scattered'}"
        found = measure(
            options, size_bytes, run_bytes, is_gathered=is_gathered, tell=lambda what, t=text: f"{t}: {what}"
        )
        cells = []
        for way in WAYS:
            pieces, plain = found[way, True], found[way, False]
            figures += [pieces.figures(), plain.figures()]
            if not pieces.seconds or not plain.seconds:
                cells += ["–", pieces.error or plain.error, "", ""]
                continue
            ratio = pieces.rate / plain.rate
            cpu = _cpu(plain) / max(1e-9, _cpu(pieces))
            cells += [f"{pieces.rate:.2f}", f"{plain.rate:.2f}", f"{ratio:.2f}", f"{cpu:.2f}"]
            if run_bytes in GOALS and way != "copied":
                least = GOALS[run_bytes]
                goals.append(
                    Goal(
                        f"pieces by {way}, rows of {text}",
                        f"≥ {least}",
                        f"{ratio:.2f} (by CPU: {cpu:.2f})",
                        ratio >= least,
                    )
                )
        rows.append([text, *cells])
    columns = [f"{WAYS[way]}: {what}" for way in WAYS for what in ("GiB/s", "same layout", "ratio", "by CPU")]
    section = Section(
        "pieces",
        f"Pieces of another layout, {size_text(size_bytes)}, verified, beside the same layout",
        ("rows", *columns),
        rows,
        {"size_bytes": size_bytes, "samples": figures},
    )
    section.goals = goals
    section.notes.append("by CPU: seconds of CPU of both sides, the same layout's by those of pieces")
    section.notes.append(
        "medians, in mixed order; the first transfer of each way is not counted; plans made beforehand"
    )
    return [section]


def _cpu(samples: Samples) -> float:
    """Of both sides, for a GiB."""
    return samples.cpu_per_gib(samples.reader_cpu_s) + samples.cpu_per_gib(samples.source_cpu_s)


def measure(
    options: Options, size_bytes: int, run_bytes: int, *, is_gathered: bool, tell: Callable[[str], str]
) -> dict[tuple[str, bool], Samples]:
    """Of each way, pieces and the same layout."""
    found = {
        (way, is_pieces): Samples(f"{way}, {'pieces' if is_pieces else 'same layout'}, {run_bytes} B", size_bytes)
        for way, is_pieces in product(WAYS, (True, False))
    }
    with Sides(size_bytes, run_bytes, is_gathered=is_gathered) as sides:
        for number in range(options.rounds + 1):
            order = list(found)
            random.Random(number).shuffle(order)
            for way, is_pieces in order:
                samples = found[way, is_pieces]
                options.tell(tell(f"round {number} of {options.rounds}, {samples.name}"))
                try:
                    before = sides.source.do("cpu")
                    taken = sides.read(way, is_pieces=is_pieces)
                    source_cpu_s = sides.source.do("cpu") - before
                except Failed as error:
                    samples.error = str(error)
                    continue
                if number:
                    samples.add(taken["seconds"], taken["cpu_s"], source_cpu_s)
    return found
