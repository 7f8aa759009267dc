"""Any layout to any layout: what a plan moves is what plain indexing says, verified, and nothing else is touched."""

from operator import add
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.protocol.errors import CorruptTransfer, LayoutMismatch, VersionConflict
from tensorhub.protocol.layout import Box
from tensorhub.protocol.manifest import TileManifest
from tensorhub.reshard.copies import COUNT, COUNTS, RUN, SOURCE, SOURCE_STRIDE, SOURCE_STRIDES, check_coverage
from tensorhub.reshard.derive import Source, derive_manifest, digests_of
from tensorhub.reshard.grid import Cutting, Grid, Tiles, chunks_of, tiles_of
from tensorhub.reshard.plan import Plan, carry_out_plan, plan_reads
from tensorhub.reshard.wire import decode_grid, decode_table, encode_grid, encode_table, grid_digest, layout_digest

from .cutting import Model, Shard, draw_layout, draw_model

many = settings(max_examples=60, deadline=None)
chances = st.integers(0, 1 << 32).map(Random)
BAND_BYTES = 48  # so that even these small tensors are cut further


def grid_for(publisher: list[Shard], *others: list[Shard]) -> Grid:
    cutting = Cutting(BAND_BYTES, fewest_tiles=1 << 20)
    for shard in publisher:
        cutting.add_publisher(shard.table)
    for layout in others:
        for shard in layout:
            cutting.add_other(shard.table)
    return cutting.grid()


def manifest_of(shard: Shard, grid: Grid) -> TileManifest:
    tiles = tiles_of(shard.table, grid)
    return TileManifest(
        layout_digest(shard.table), grid_digest(grid), "xxh3-128", len(tiles), digests_of(tiles, shard.memory)
    )


def sources_of(publisher: list[Shard], grid: Grid) -> list[Source]:
    return [Source(f"trainer[{n}]", shard.table, manifest_of(shard, grid)) for n, shard in enumerate(publisher)]


def derived(shard: Shard, grid: Grid, sources: list[Source]) -> tuple[Tiles, TileManifest]:
    tiles = tiles_of(shard.table, grid)
    names = {"layout": layout_digest(shard.table), "grid": grid_digest(grid)}
    return tiles, derive_manifest(tiles, sources, **names)


def read(shard: Shard, plan: Plan, manifest: TileManifest, publisher: list[Shard]) -> None:
    carry_out_plan(plan, manifest, [source.memory for source in publisher], shard.memory)


def two_layouts(chance: Random, *, has_tie: bool = False) -> tuple[Model, list[Shard], list[Shard]]:
    model = draw_model(chance, has_tie=has_tie)
    publisher, reader = (draw_layout(chance, model, chance.randint(1, 4)) for _ in range(2))
    for shard in publisher:
        shard.spoil(chance)
        shard.fill(model)
    for shard in reader:
        shard.spoil(chance)
    return model, publisher, reader


@many
@given(chances, st.sampled_from(("late", "early", "tied")))
def test_what_arrives_is_what_plain_indexing_says_and_nothing_else_changes(chance: Random, kind: str) -> None:
    model, publisher, reader = two_layouts(chance, has_tie=kind == "tied")
    grid = grid_for(publisher) if kind == "late" else grid_for(publisher, reader)
    sources = sources_of(publisher, grid)
    for shard in reader:
        tiles, manifest = derived(shard, grid, sources)
        plan = plan_reads(tiles, sources, BAND_BYTES)
        if kind != "late":
            assert int(plan.size_bytes.sum()) <= int(shard.table.bytes_of_boxes.sum()), "no byte is read for nothing"
        before = shard.outside()
        read(shard, plan, manifest, publisher)
        assert shard.wrong(model) == []
        assert all((a == b).all() for a, b in zip(before, shard.outside(), strict=True))


@many
@given(chances)
def test_a_derived_manifest_is_that_of_the_bytes(chance: Random) -> None:
    model, publisher, reader = two_layouts(chance, has_tie=chance.random() < 0.5)
    grid = grid_for(publisher, reader)
    sources = sources_of(publisher, grid)
    for shard in reader:
        _, manifest = derived(shard, grid, sources)
        shard.fill(model)
        assert manifest == manifest_of(shard, grid)
        assert manifest.root() == manifest_of(shard, grid).root()


@many
@given(chances)
def test_readers_serve_other_layouts_as_the_publisher_would(chance: Random) -> None:
    model, publisher, reader = two_layouts(chance, has_tie=chance.random() < 0.5)
    third = draw_layout(chance, model, chance.randint(1, 3))
    grid = grid_for(publisher, reader, third)
    sources = sources_of(publisher, grid)
    for shard in reader:
        shard.fill(model)
    relays = [Source(f"rollout[{n}]", one.table, derived(one, grid, sources)[1]) for n, one in enumerate(reader)]
    for shard in third:
        tiles, manifest = derived(shard, grid, relays)
        assert manifest == derived(shard, grid, sources)[1]
        read(shard, plan_reads(tiles, relays), manifest, reader)
        assert shard.wrong(model) == []


@many
@given(chances)
def test_grids_do_not_depend_on_the_order_of_layouts(chance: Random) -> None:
    model = draw_model(chance)
    layouts = [draw_layout(chance, model, chance.randint(1, 3)) for _ in range(4)]
    grid = grid_for(*layouts)
    shuffled = [layouts[0], *chance.sample(layouts[1:], 3)]
    assert grid_digest(grid_for(*(chance.sample(one, len(one)) for one in shuffled))) == grid_digest(grid)
    assert grid_digest(decode_grid(encode_grid(grid))) == grid_digest(grid)
    for layout in layouts:
        for shard in layout:
            tiles = tiles_of(shard.table, grid)
            assert tiles.is_whole.all(), "each boundary of each layout is a cut"
            assert int(tiles.size_bytes.sum()) == int(shard.table.bytes_of_boxes.sum())
            assert tiles.slot.tolist() == list(range(len(tiles)))


@many
@given(chances)
def test_tables_travel_unchanged(chance: Random) -> None:
    for shard in draw_layout(chance, draw_model(chance), 2):
        again = decode_table(encode_table(shard.table))
        assert layout_digest(again) == layout_digest(shard.table)
        assert again.tensors == shard.table.tensors
        assert (again.alias_of == shard.table.alias_of).all()


@many
@given(chances, st.integers(1, 200))
def test_chunks_are_runs_of_whole_tiles(chance: Random, chunk_bytes: int) -> None:
    _, publisher, reader = two_layouts(chance)
    grid = grid_for(publisher, reader)
    for shard in reader:
        tiles = tiles_of(shard.table, grid)
        chunks = chunks_of(tiles, chunk_bytes)
        assert sorted(chunks.order.tolist()) == list(range(len(tiles)))
        sizes = tiles.size_bytes
        for c in range(len(chunks)):
            members = chunks.order[chunks.first[c] : chunks.first[c + 1]]
            assert int(chunks.size_bytes[c]) == int(sizes[members].sum())
            assert int(chunks.size_bytes[c]) <= chunk_bytes or len(members) == 1 or chunks.is_run[c]
            if chunks.is_run[c]:
                assert chunks.stop[c] - chunks.start[c] == chunks.size_bytes[c]
        runs = np.flatnonzero(chunks.is_run)
        assert (chunks.start[runs[1:]] >= chunks.stop[runs[:-1]]).all()


@many
@given(chances)
def test_a_part_that_is_left_out_is_named_before_a_byte_moves(chance: Random) -> None:
    _, publisher, reader = two_layouts(chance)
    check_coverage([shard.table for shard in publisher])
    boxes = [(shard, name, n) for shard in publisher for name, its in shard.boxes.items() for n in range(len(its))]
    shard, name, n = chance.choice(boxes)
    left_out = shard.boxes[name].pop(n)
    shard.finish()
    others = [box for one in publisher for its in one.boxes.values() for box in its]
    if any(box.name == left_out.name and (box.at, box.size) == (left_out.at, left_out.size) for box in others):
        check_coverage([shard.table for shard in publisher])  # somebody else has it
        return
    is_named = any(box.name == left_out.name for box in others)
    if is_named:
        with pytest.raises(LayoutMismatch, match=f"no shard of the replica has '{left_out.name}'") as caught:
            check_coverage([shard.table for shard in publisher])
        for start, count in zip(left_out.at, left_out.size, strict=True):
            assert f"{start}:{start + count}" in str(caught.value)
    wanted = [tensor for one in reader for tensor in one.table.tensors]
    with pytest.raises(LayoutMismatch, match=left_out.name):
        check_coverage([shard.table for shard in publisher], wanted)
    grid = grid_for(publisher, reader)
    sources = sources_of(publisher, grid)
    for one in reader:
        tiles = tiles_of(one.table, grid) if is_named or not one.has(left_out.name) else None
        if any(box.name == left_out.name and _overlap(box, left_out) for box, _ in one.views):
            with pytest.raises(LayoutMismatch, match=left_out.name):
                plan_reads(tiles or tiles_of(one.table, grid), sources)
        elif tiles is not None:
            plan_reads(tiles, sources)


def _overlap(one, other) -> bool:  # type: ignore[no-untyped-def]
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(one.at, one.size, other.at, other.size, strict=True))


@many
@given(chances)
def test_a_part_that_lies_twice_with_different_content_is_a_conflict(chance: Random) -> None:
    model = draw_model(chance)
    publisher = draw_layout(chance, model, 2)
    for shard in publisher:
        shard.fill(model)
    copy = draw_layout(chance, model, 1)
    copy[0].fill(model)
    box, view = chance.choice(copy[0].views)
    if not view.size:
        return
    place = tuple(chance.randrange(count) for count in view.shape)
    changed = np.frombuffer(bytes(byte ^ 1 for byte in view[place].tobytes()), view.dtype)[0]
    view[place] = changed
    reader = draw_layout(chance, model, 1)
    grid = grid_for([*publisher, *copy], reader)
    with pytest.raises(VersionConflict, match=box.name):
        derived(reader[0], grid, sources_of([*publisher, *copy], grid))


@many
@given(chances)
def test_a_byte_that_is_not_what_was_published_never_arrives(chance: Random) -> None:
    model, publisher, reader = two_layouts(chance)
    grid = grid_for(publisher, reader)
    sources = sources_of(publisher, grid)
    box, view = chance.choice([one for shard in publisher for one in shard.views])
    index = [chance.randrange(count) for count in view.shape]
    place = (*(slice(at, at + 1) for at in index), ...)
    view[place] = np.frombuffer(bytes(byte ^ 1 for byte in view[place].tobytes()), view.dtype)[0]
    changed = Box(box.name, box.global_shape, tuple(map(add, box.at, index)), (1,) * len(index))
    times = sum(other.name == box.name and _overlap(other, changed) for shard in publisher for other, _ in shard.views)
    caught = 0
    for shard in reader:
        tiles, manifest = derived(shard, grid, sources)
        plan = plan_reads(tiles, sources)
        if _reads(plan, publisher, view[place]):
            with pytest.raises(CorruptTransfer, match=box.name):
                read(shard, plan, manifest, publisher)
            caught += 1
        else:
            read(shard, plan, manifest, publisher)
            assert shard.wrong(model) == []
    assert caught or times > 1  # the part lay elsewhere too, and was read from there


def _reads(plan: Plan, publisher: list[Shard], element: np.ndarray) -> bool:
    """Whether a plan reads a certain element of one of the sources' memory."""
    address = element.__array_interface__["data"][0]
    for source, shard in enumerate(publisher):
        of_source = np.flatnonzero(plan.source == source)
        for row in plan.copies.rows[np.isin(plan.copies.of, of_source)].tolist():
            for outer in range(row[COUNTS]):
                for inner in range(row[COUNT]):
                    at = row[SOURCE] + outer * row[SOURCE_STRIDES] + inner * row[SOURCE_STRIDE]
                    first = shard.memory(at, at + row[RUN]).__array_interface__["data"][0]
                    if first <= address < first + row[RUN]:
                        return True
    return False


@many
@given(chances)
def test_sources_of_the_same_tiles_share_the_bytes(chance: Random) -> None:
    model = draw_model(chance)
    one = draw_layout(chance, model, 1)
    copies = [*one, *draw_layout(chance, model, 1), *draw_layout(chance, model, 1)]
    for shard in copies:
        shard.fill(model)
    reader = draw_layout(chance, model, 1)[0]
    grid = grid_for(copies, [reader])
    sources = sources_of(copies, grid)
    tiles, manifest = derived(reader, grid, sources)
    plan = plan_reads(tiles, sources)
    read(reader, plan, manifest, copies)
    assert reader.wrong(model) == []
    loads = plan.bytes_from(3)
    assert sum(loads) == sum(array.nbytes for array in model.values())
    assert max(loads) - min(loads) <= 2 * int(plan.size_bytes.max())
