"""Pieces of another layout beside as many bytes of the same layout, in one run, by rows of several lengths.

The source's rows lie between others (`gathered`), or the reader's do (`scattered`). Every tile is verified. Beside them
what a plain program gets that knows the addresses, and what is done today: full tensors are gathered, and sent whole.
"""

import random
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from math import inf

from tensorhub.transport.nixl.agent import MODULES

from .peers_run import GATHERED_FIRST, run_peer
from .processes import Child, Failed
from .section import Goal, Options, Samples, Section, size_text

RUNS = (256, 1024, 4096, 65536)
HAS_NIXL = any(map(find_spec, MODULES))
KINDS = ("local", "tcp", *(["nixl"] if HAS_NIXL else []))
GOALS = {65536: 0.8, 4096: 0.65}
WAYS = {"local": "local", "copied": "local, from a host copy", "tcp": "tcp"} | ({"nixl": "nixl"} if HAS_NIXL else {})
OTHERS = (("local", "plain program"), ("tcp", "plain program"), ("gloo", "full tensors first"))
CONTESTANTS = (*product(WAYS, ("pieces", "same layout")), *OTHERS)
BESIDE = (("local", "pieces"), ("local", "plain program"), ("tcp", "pieces"), ("tcp", "plain program"), OTHERS[-1])


class Sides:
    """A source and a reader with different layouts."""

    def __init__(self, size_bytes: int, run_bytes: int, *, is_gathered: bool) -> None:
        self.size_bytes = size_bytes
        self.source = Child("source", module="bench.pieces_child")
        self.reader = Child("reader", module="bench.pieces_child")
        try:
            for child in (self.source, self.reader):
                child.wait_started()
            shape = {"size_bytes": size_bytes, "run_bytes": run_bytes}
            self.source.do("cut", is_wide=is_gathered, is_publisher=True, **shape)
            self.reader.do("cut", is_wide=not is_gathered, is_publisher=False, **shape)
            found = self.source.do("serve", kinds=list(KINDS), size_bytes=size_bytes)
            self.endpoints, self.root = found["endpoints"], found["root"]
            self.reader.do("know", cut=found["cut"], cut_root=found["cut_root"])
            self.reader.do("know_rows", **self.source.do("serve_rows"))
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

    def read(self, way: str, what: str) -> dict[str, float]:
        """One transfer."""
        kind = "local" if way == "copied" else way
        suffix = "copied" if way == "copied" else ""
        asked = {"kind": kind, "endpoint": self.endpoints[kind]}
        if what == "pieces":
            return self.reader.do("read_pieces", key="pieces" + suffix, **asked)
        if what == "same layout":
            return self.reader.do(
                "read_plain", key="plain" + suffix, root=self.root, size_bytes=self.size_bytes, **asked
            )
        found = self.reader.do("read_rows", kind=kind)
        if self.reader.do("digest_rows") != self.source.do("digest_rows"):
            raise Failed("the plain program has brought other bytes")
        return found


def run(options: Options) -> list[Section]:
    """The part."""
    size_bytes = options.size_bytes if options.is_tiny else min(options.size_bytes, 256 << 20)
    rows, beside, goals, figures = [], [], [], []
    for run_bytes, is_gathered in product(RUNS[-1:] if options.is_tiny else RUNS, (True, False)):
        text = f"{size_text(run_bytes)}, {'gathered' if is_gathered else 'scattered'}"
        found = measure(
            options, size_bytes, run_bytes, is_gathered=is_gathered, tell=lambda what, t=text: f"{t}: {what}"
        )
        figures += [samples.figures() for samples in found.values()]
        beside.append([text, *(_rate(found[contestant]) for contestant in BESIDE)])
        cells = []
        for way in WAYS:
            pieces, same = found[way, "pieces"], found[way, "same layout"]
            ratio, cpu = pieces.rate / (same.rate or inf), _cpu(same) / (_cpu(pieces) or inf)
            cells += [_rate(pieces), _rate(same), f"{ratio:.2f}", f"{cpu:.2f}"]
            if run_bytes in GOALS and way in ("local", "tcp"):
                wanted, got = f"≥ {GOALS[run_bytes]}", f"{ratio:.2f} (by CPU: {cpu:.2f})"
                is_known = bool(pieces.seconds and same.seconds)
                is_met = ratio >= GOALS[run_bytes] if is_known else None
                goals.append(Goal(f"pieces by {way}, rows of {text}", wanted, got, is_met))
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
    others = Section("pieces_beside", "The same beside others, GiB/s", ("rows", *map(", ".join, BESIDE)), beside)
    others.notes.append("neither a plain program nor gloo verifies anything; what arrived is compared all the same")
    return [section, others]


def _rate(samples: Samples) -> str:
    return f"{samples.rate:.2f}" if samples.seconds else f"– {samples.error}"


def _cpu(samples: Samples) -> float:
    """Of both sides, for a GiB."""
    return samples.cpu_per_gib(samples.reader_cpu_s) + samples.cpu_per_gib(samples.source_cpu_s)


def measure(
    options: Options, size_bytes: int, run_bytes: int, *, is_gathered: bool, tell: Callable[[str], str]
) -> dict[tuple[str, str], Samples]:
    """Of all contestants."""
    found = {(way, what): Samples(f"{way}, {what}, {run_bytes} B", size_bytes, kind=what) for way, what in CONTESTANTS}
    arguments = ["--row", str(run_bytes), *(["--gathered"] if is_gathered else [])]
    with Sides(size_bytes, run_bytes, is_gathered=is_gathered) as sides:
        for number in range(options.rounds + 1):
            order = list(found)
            random.Random(number).shuffle(order)
            for way, what in order:
                samples = found[way, what]
                options.tell(tell(f"round {number} of {options.rounds}, {samples.name}"))
                if way == "gloo":
                    if number % 2:  # seconds, to start them
                        run_peer(GATHERED_FIRST, samples, options, *arguments)
                    continue
                try:
                    before = sides.source.do("cpu")
                    taken = sides.read(way, what)
                    source_cpu_s = sides.source.do("cpu") - before
                except Failed as error:
                    samples.error = str(error)
                    continue
                if number:
                    samples.add(taken["seconds"], taken["cpu_s"], source_cpu_s)
    return found
