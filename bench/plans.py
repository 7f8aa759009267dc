"""What a plan costs from any layout to any layout: time and memory on one core, and what travels.

No byte of a model is needed for it: boxes, digests of tiles (their numbers stand for them) and arithmetic. Measured is
what one worker does: a shard of the publisher makes the grid, once for each set of layouts; a reader decodes the
layouts of all shards of its source, once for each layout; and for each version derives its manifest and makes its plan.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tensorhub.protocol.manifest import TileManifest
from tensorhub.protocol.names import Digest
from tensorhub.reshard.grid import BoxTable, Cutting, Grid, tiles_of
from tensorhub.reshard.plan import Plan, Source, derive_manifest, plan_reads
from tensorhub.reshard.wire import decode_table, encode_grid, encode_table, grid_digest, layout_digest

from .cut_models import (
    KIMI,
    QWEN,
    SMALL,
    Cut,
    Model,
    experts_and_fsdp,
    fsdp,
    table_of_rank,
    tensor_parallel,
    tensors_of,
)
from .section import Goal, Options, Section, seconds_text, size_text

MAX_S = 5.0  # of one core, for a reader's plan: a transfer of that model takes longer


@dataclass(frozen=True)
class Case:
    """A pair of layouts."""

    model: Model
    trainer: Cut
    trainers: int
    reader: Cut
    readers: int
    text: str


@dataclass
class Costs:
    """Seconds of CPU, bytes and counts of one case."""

    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def timed(self, name: str, work: Callable[[], object]) -> object:
        before = time.process_time()
        found = work()
        self.seconds[name] = time.process_time() - before
        return found


def cases(options: Options) -> list[Case]:
    """The models that the field measures with. The last one has 4.5 million boxes, which take a minute to make."""
    if options.is_tiny:
        return [Case(SMALL, fsdp(3), 3, tensor_parallel(SMALL, 2), 2, "FSDP3 → TP2")]
    engines = tensor_parallel(KIMI, 32, shares_experts=True)
    found = [
        Case(QWEN, fsdp(16), 16, tensor_parallel(QWEN, 8), 8, "FSDP16 → TP8, every expert cut twice"),
        Case(KIMI, experts_and_fsdp(16, 64, KIMI.experts), 64, engines, 32, "EP16 × FSDP4 → EP32"),
        Case(KIMI, fsdp(64), 64, engines, 32, "FSDP64 of every expert → EP32"),
    ]
    return found[:2] if options.is_quick else found


def run(options: Options) -> list[Section]:
    """One row for each pair of layouts."""
    section = Section(
        "plans",
        "Plans from layout to layout: one core",
        (
            *(
                "model",
                "layouts",
                "boxes of all shards",
                "tiles",
                "grid",
                "layouts decoded",
                "manifest derived",
                "plan",
            ),
            *("peak", "layout of a shard", "grid, encoded", "manifest of a reader"),
        ),
    )
    figures = []
    for case in cases(options):
        options.tell(f"{case.model.name}, {case.text}")
        costs = _measure(case)
        seconds, sizes, counts = costs.seconds, costs.sizes, costs.counts
        section.rows.append(
            [
                *(case.model.name, case.text, f"{counts['boxes']:,}", f"{counts['tiles']:,}"),
                *(seconds_text(seconds[name]) for name in ("grid", "decode", "derive", "plan")),
                *(size_text(sizes[name]) for name in ("peak", "layout", "grid", "manifest")),
            ]
        )
        figures.append(
            {"model": case.model.name, "layouts": case.text, "seconds": seconds, "sizes": sizes, "counts": counts}
        )
        total = seconds["derive"] + seconds["plan"]
        what = f"a reader's manifest and plan, {case.model.name}, {case.text}"
        section.goals.append(Goal(what, f"≤ {seconds_text(MAX_S)}", seconds_text(total), total <= MAX_S))
    section.figures = {"cases": figures}
    section.notes += [
        "CPU seconds of one thread; grid: once for each set of layouts; decoding: for each layout; the rest: a version",
        "peak: memory while a reader derives and plans, beyond the decoded layouts and manifests of all its sources",
    ]
    return [section]


def _measure(case: Case) -> Costs:
    costs = Costs()
    tensors = list(tensors_of(case.model))
    trainer, readers = (
        [encode_table(table_of_rank(tensors, cut, rank)) for rank in range(count)]
        for cut, count in ((case.trainer, case.trainers), (case.reader, case.readers))
    )
    costs.sizes["layout"] = max(map(len, trainer))
    published: list[BoxTable] = costs.timed("decode", lambda: [decode_table(data) for data in trainer])  # type: ignore[assignment]
    wanted = [decode_table(data) for data in readers]
    costs.counts["boxes"] = sum(map(len, published))
    grid: Grid = costs.timed("grid", lambda: _grid(published, wanted))  # type: ignore[assignment]
    costs.counts["tiles"] = grid.tile_count
    costs.sizes["grid"] = len(encode_grid(grid))
    sources = [Source(f"trainer[{n}]", table, _manifest(table, grid)) for n, table in enumerate(published)]
    before = _reset_peak()
    tiles = tiles_of(wanted[0], grid)
    names = {"layout": layout_digest(wanted[0]), "grid": Digest("grid")}
    manifest: TileManifest = costs.timed("derive", lambda: derive_manifest(tiles, sources, **names))  # type: ignore[assignment]
    plan: Plan = costs.timed("plan", lambda: plan_reads(tiles, sources))  # type: ignore[assignment]
    costs.sizes["peak"] = _peak() - before
    costs.sizes["manifest"] = len(manifest.encode())
    costs.sizes["read"] = int(plan.size_bytes.sum())
    costs.counts |= {"tiles of the reader": len(tiles), "copies": len(plan.copies)}
    return costs


def _grid(published: list[BoxTable], wanted: list[BoxTable]) -> Grid:
    cutting = Cutting()
    for table in published:
        cutting.add_publisher(table)
    for table in wanted:
        cutting.add_other(table)
    grid = cutting.grid()
    grid_digest(grid)
    return grid


def _manifest(table: BoxTable, grid: Grid) -> TileManifest:
    """With each tile's number in place of its digest: the same in every shard that has the tile."""
    tiles = tiles_of(table, grid)
    digests = np.zeros((len(tiles), 2), np.int64)
    digests[:, 0] = tiles.number
    return TileManifest(Digest("layout"), Digest("grid"), "xxh3-128", len(tiles), digests.tobytes())


def _reset_peak() -> int:
    """Forget the highest resident memory so far; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")
