"""Any layout to any layout: grids, tiles, plans and derived manifests, and what boxes from a peer may cost."""

import mmap
import tracemalloc
import zlib
from collections.abc import Callable
from operator import add
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.memory.registration import Registration, register
from tensorhub.memory.streams import Freed, HostStream, Piece, StagedStream, StagingRing
from tensorhub.protocol.errors import CorruptTransfer, LayoutMismatch, UsageError, VersionConflict
from tensorhub.protocol.layout import Box, GlobalTensor
from tensorhub.protocol.manifest import TileManifest
from tensorhub.reshard import plan, wire
from tensorhub.reshard.copies import (
    COLUMNS,
    COUNT,
    COUNTS,
    RUN,
    SOURCE,
    SOURCE_STRIDE,
    SOURCE_STRIDES,
    Copies,
    check_coverage,
    check_disjoint,
)
from tensorhub.reshard.grid import BoxTable, Cutting, Grid, Tiles, grid_of, table_of_columns, tiles_of
from tensorhub.reshard.plan import Source, derive_manifest, plan_reads
from tensorhub.reshard.read import Offer, grid_for, tiled_version, version_from, whole_layout
from tensorhub.reshard.wire import (
    TiledShard,
    decode_grid,
    decode_table,
    decode_tiled_shard,
    encode_grid,
    encode_table,
    grid_digest,
    layout_digest,
    publish_tiled_shard,
)

from .cutting import Model, Shard, draw_layout, draw_model, fill_across
from .kit import FakeDevice

# --- Grids, ties, overlaps, late layouts: each rule of the tiles by an example; and what comes from a peer is judged.


MIB = 1 << 20


def shard_of(arrays: dict[str, np.ndarray], boxes: dict[str, list[Box]] | None = None) -> Shard:
    """Registered arrays, plain where no boxes are given."""
    shard = Shard(dict(arrays), dict(boxes or {}))
    return shard.finish()


def source_of(shard: Shard, grid: Grid, name: str = "trainer[0]") -> Source:
    return Source(name, shard.table, publish_tiled_shard(shard.registration, tiles_of(shard.table, grid)).manifest)


def matrix(rows: int, columns: int, start: int = 0) -> np.ndarray:
    return (np.arange(rows * columns, dtype=np.int32) + start).reshape(rows, columns)


def tied(rows: int, start: int = 0) -> Shard:
    data = matrix(rows, 4, start)
    return shard_of({"embed": data, "head": data})


def test_tensors_that_were_published_apart_and_differ_cannot_be_tied() -> None:
    publisher = shard_of({"embed": matrix(8, 4), "head": matrix(8, 4, 1)})
    reader = tied(8)
    grid = grid_of([publisher.table], [reader.table])
    with pytest.raises(
        VersionConflict, match=r"'embed'\[0:8, 0:4\] and 'head'\[0:8, 0:4\] lie in the same memory here"
    ):
        derive_manifest(tiles_of(reader.table, grid), [source_of(publisher, grid)], layout="l", grid=grid_digest(grid))


def test_a_tie_that_nobody_can_judge_is_refused() -> None:
    cut = {"a": [Box("embed", (8, 4), (0, 0), (3, 4))], "b": [Box("embed", (8, 4), (3, 0), (5, 4))]}
    publisher = shard_of({"a": matrix(3, 4), "b": matrix(5, 4, 12), "head": matrix(8, 4)}, cut)
    reader = tied(8)
    grid = grid_of([publisher.table])  # the reader came later
    with pytest.raises(LayoutMismatch, match="not cut alike in what was published"):
        plan_reads(tiles_of(reader.table, grid), [source_of(publisher, grid)])


def test_memory_that_is_shared_in_part_is_not_read_into() -> None:
    flat, square = np.zeros(64, np.int32), np.zeros((8, 8), np.int32)
    shard = shard_of({"flat": flat, "view": flat[10:20]})
    grid = grid_of([shard.table])
    with pytest.raises(LayoutMismatch, match="share a part of their memory"):
        plan_reads(tiles_of(shard.table, grid), [source_of(shard, grid)])
    with pytest.raises(LayoutMismatch, match=r"'flat'\[0:64\] and 'view'\[0:10\] share a part of their memory"):
        check_disjoint(shard.table)
    with pytest.raises(LayoutMismatch, match=r"'a'\[0:64\] and 'b'\[0:64\]"):
        check_disjoint(shard_of({"a": flat, "b": flat.view(np.float32)}).table)
    wide = [Box("a", (8, 5), (0, 0), (8, 5), 0, (8, 1)), Box("b", (8, 4), (0, 0), (8, 4), 4, (8, 1))]
    steps = [Box("a", (2, 8), (0, 0), (2, 8), 0, (32, 1)), Box("b", (4, 8), (0, 0), (4, 8), 8, (8, 1))]
    for boxes in (wide, steps):
        with pytest.raises(LayoutMismatch, match=r"boxes '[ab]'\[.* and '[ab]'\[.* share a part"):
            check_disjoint(shard_of({"w": square}, {"w": boxes}).table)
    columns = [Box("a", (8, 4), (0, 0), (8, 4), 0, (8, 1)), Box("b", (8, 4), (0, 0), (8, 4), 4, (8, 1))]
    turned = [Box("a", (4, 8), (0, 0), (4, 8), 0, (1, 8)), Box("b", (4, 8), (0, 0), (4, 8), 4, (1, 8))]
    rows = [Box("a", (4, 8), (0, 0), (4, 8), 0, (16, 1)), Box("b", (4, 8), (0, 0), (4, 8), 8, (16, 1))]
    for boxes in (columns, turned, rows):
        check_disjoint(shard_of({"w": square}, {"w": boxes}).table)


def test_a_part_that_no_shard_has_is_named() -> None:
    first, last = (shard_of({"here": matrix(4, 4)}, {"here": [Box("w", (9, 4), (at, 0), (4, 4))]}) for at in (0, 5))
    whole = shard_of({"w": matrix(9, 4)})
    check_coverage([whole.table], whole.table.tensors)
    with pytest.raises(LayoutMismatch, match=r"no shard of the replica has 'w'\[4:5, 0:4\]"):
        check_coverage([first.table, last.table])
    with pytest.raises(LayoutMismatch, match="'other'"):
        check_coverage([whole.table], [*whole.table.tensors, GlobalTensor("other", "int32", (2,))])
    with pytest.raises(LayoutMismatch, match=r"'other'.* neither whole nor in part"):
        tiles_of(shard_of({"other": matrix(1, 2)}).table, grid_of([whole.table]))
    grid = grid_of([first.table, last.table], [whole.table])
    with pytest.raises(LayoutMismatch, match="'w'"):
        plan_reads(tiles_of(whole.table, grid), [source_of(first, grid), source_of(last, grid)])


def test_nothing_is_derived_from_manifests_of_different_versions() -> None:
    shard = shard_of({"w": matrix(8, 4)})
    grid = grid_of([shard.table])
    tiles, name = tiles_of(shard.table, grid), grid_digest(grid)
    good = source_of(shard, grid)
    unverified = Source("b", shard.table, TileManifest("l", name, "none", 1, b"", "salt"))
    with pytest.raises(UsageError, match="not of one version"):
        derive_manifest(tiles, [good, unverified], layout="l", grid=name)
    with pytest.raises(UsageError, match=r"has the grid .*, the version h"):
        derive_manifest(tiles, [good], layout="l", grid="h")
    short = Source("d", shard.table, TileManifest("l", name, "xxh3-128", 0, b""))
    with pytest.raises(UsageError, match="manifest of d has 0 tiles"):
        derive_manifest(tiles, [short], layout="l", grid=name)
    with pytest.raises(UsageError, match="'none', which is unknown here"):
        derive_manifest(tiles, [unverified], layout="l", grid=name)


def test_odd_tables_and_grids_from_peers_are_refused() -> None:
    shard = shard_of({"w": matrix(8, 4)}, {"w": [Box("v", (16, 4), (8, 0), (8, 4))]})
    plain = msgspec.msgpack.decode(zlib.decompress(encode_table(shard.table)))
    columns = np.frombuffer(plain[2], "<i8").reshape(8, 1)
    for row, values in (
        (0, (-1, 1)),
        (1, (-1, 1, 1 << 62)),
        (2, (-1, 9, 1 << 61)),
        (4, (0, -1, 9, 1 << 62)),
        (6, (-16, 0, 17, 1 << 62)),
    ):
        for value in values:
            changed = columns.copy()
            changed[row] = value
            with pytest.raises(UsageError, match="outside of stream or tensor"):
                decode_table(zlib.compress(msgspec.msgpack.encode([*plain[:2], changed.tobytes()])))
    for odd in (b"", b"no", zlib.compress(b"no"), encode_table(shard.table)[:-1], encode_grid(grid_of([shard.table]))):
        with pytest.raises(UsageError, match="malformed"):
            decode_table(odd)
    grid = grid_of([shard.table])
    plain = msgspec.msgpack.decode(zlib.decompress(encode_grid(grid)))
    for index, value in (
        (1, 3),
        (2, b""),
        (3, bytes(16)),
        (4, bytes(len(plain[4]))),
        (0, [["v"], [["int32", [17, 4]]], bytes(4)]),
    ):
        changed = [*plain[:index], value, *plain[index + 1 :]]
        with pytest.raises(UsageError, match="malformed"):
            decode_grid(zlib.compress(msgspec.msgpack.encode(changed)))


# --- What boxes from a peer may cost at most, whatever they say: memory is bounded before it is taken.


TENSORS = msgspec.msgpack.encode([["w"], [["float32", [1 << 20]]], bytes(4)])


def repeated(boxes: int) -> bytes:
    """One element of one tensor, again and again."""
    columns = np.zeros((5, boxes), "<i8")
    columns[3] = 1
    return msgspec.msgpack.encode([TENSORS, 1 << 22, columns.tobytes()])


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that were taken at once, of what Python and numpy take."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def regular(boxes: int, dimensions: int) -> BoxTable:
    """Rows of one tensor, all alike."""
    columns = np.zeros((boxes, 2 + 3 * dimensions), np.int64)
    columns[:, 1] = np.arange(boxes) * 4096
    columns[:, 2] = np.arange(boxes) * 4
    columns[:, 2 + dimensions : 2 + 2 * dimensions] = 1
    return table_of_columns(
        (GlobalTensor("w", "bfloat16", (4 * boxes,) + (1,) * (dimensions - 1)),), boxes * 4096, columns
    )


def test_small_boxes_of_a_reader_cost_the_publisher_little_and_it_publishes(caplog):
    mine = register({"w": np.zeros((64, 64), np.float32)}, boxes={}).boxes
    bomb = zlib.compress(repeated(400_000), 9)  # 16 kB, which would be 16 MB
    theirs = {bomb: "m/rollout-3[1]"}
    known = encode_grid(grid_for([mine], [mine]))
    assert peak_of(lambda: grid_for([mine], [mine, bomb], theirs)) < 5 * MIB
    assert encode_grid(grid_for([mine], [mine, bomb], theirs)) == known
    assert "the boxes of m/rollout-3[1] are left out of account" in caplog.text
    assert "128 times" in caplog.text


def test_the_publishers_own_boxes_are_named_if_they_are_nonsense():
    mine = register({"w": np.zeros((64, 64), np.float32)}, boxes={}).boxes
    with pytest.raises(UsageError, match=r"the boxes of m/t\[1\]: malformed layout"):
        grid_for([mine, b"nonsense"], [], {b"nonsense": "m/t[1]"})


def test_what_a_source_shows_is_judged_by_its_digest_before_a_table_is_made(monkeypatch):
    registration = register({"w": np.zeros((64, 64), np.float32)}, boxes={})
    good = tiled_version(registration, grid_for([registration.boxes], []), MIB)
    _, grid, manifest = msgspec.msgpack.decode(good.encode())
    bomb = msgspec.msgpack.encode([zlib.compress(repeated(400_000), 9), grid, manifest])
    found = []

    def refused() -> None:
        with pytest.raises(CorruptTransfer, match="128 times") as caught:
            decode_tiled_shard(bomb, good.root())
        found.append(caught)

    assert peak_of(refused) < 5 * MIB
    other = register({"w": np.zeros((32, 128), np.float32)}, boxes={})
    monkeypatch.setattr(wire, "layout_digest", None)  # nothing is made of either, and digested again
    monkeypatch.setattr(wire, "_check_cuts", None)
    for shown in ([other.boxes, grid, manifest], [registration.boxes, other_grid(other), manifest]):
        with pytest.raises(CorruptTransfer, match=r"m/t-1: .* a layout with another digest"):
            Offer("m/t-1", good.root(), msgspec.msgpack.encode(shown)).shard  # noqa: B018


def other_grid(registration) -> bytes:
    return encode_grid(grid_for([registration.boxes], []))


def test_no_layout_is_inflated_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(wire, "MAX_PLAIN_BYTES", 1 * MIB)
    plain = repeated(400_000)
    packing = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    loose = packing.compress(plain) + packing.flush()  # 2 MB
    for decode in (decode_table, decode_grid):

        def refused(decode=decode) -> None:
            with pytest.raises(UsageError, match="unpack to more than 1048576 B"):
                decode(loose)

        assert peak_of(refused) < 6 * MIB


def test_who_registers_more_than_that_is_told_so(monkeypatch):
    monkeypatch.setattr(wire, "MAX_PLAIN_BYTES", 10_000)
    rows = {"w": [Box("w", (1000, 4), (row, 0), (1, 4), 4 * row) for row in range(1000)]}
    with pytest.raises(UsageError, match=r"1000 boxes of 1 tensors take .* 10000 B are the limit"):
        register({"w": np.zeros((1000, 4), np.float32)}, boxes=rows)


@pytest.mark.parametrize("dimensions", [2, 64])
def test_no_honest_layout_is_too_regular(dimensions):
    table = regular(5000, dimensions)
    again = decode_table(encode_table(table))
    assert (again.offset == table.offset).all()
    cutting = Cutting()
    cutting.add_publisher(table)
    grid = cutting.grid()
    assert (decode_grid(encode_grid(grid)).cuts == grid.cuts).all()


def test_more_tensors_than_any_shard_has_are_refused(monkeypatch):
    tensors = tuple(GlobalTensor(name, "uint8", (4,)) for name in "abcd")
    table = table_of_columns(tensors, 4, np.array([[0, 0, 0, 4, 1]]))
    encoded = encode_table(table)
    monkeypatch.setattr(wire, "MAX_TENSORS", 3)
    for refused in (lambda: decode_table(encoded), lambda: encode_table(table)):
        with pytest.raises(UsageError, match="4 tensors of up to 1 dimensions are too many for one shard: 3"):
            refused()


def test_cuts_of_no_tensor_lead_nowhere(monkeypatch):
    """All cuts are looked up by one binary search, so that those of a kind that is not in use count too."""
    tensors = wire._pack_tensors((GlobalTensor("w", "float32", (1024,)),))
    cuts = [0, 1 << 62, 0, 256, 512, 768, 1024]
    columns = (wire._bytes_of(np.array(numbers, "<i8")) for numbers in ([1], [2, 5], cuts))
    data = wire._deflated(msgspec.msgpack.encode(wire._Grid(tensors, 1, *columns)), "it")
    with pytest.raises(UsageError, match="cuts that are not those of its tensors"):
        decode_grid(data)


def test_a_reader_cannot_make_the_publisher_cut_as_often_as_it_likes(caplog):
    """A stride of 4 MiB asks for a cut at each row, and nothing says that the memory is really there."""
    mine = register({"w": np.zeros((1 << 16, 1), np.float32)}, boxes={}).boxes
    boxes = 512
    columns = np.zeros((8, boxes), "<i8")
    columns[4:6] = [[1 << 16], [1]]
    columns[6] = 4 << 20
    tensors = msgspec.msgpack.encode([["w"], [["float32", [1 << 16, 1]]], bytes(4)])
    bomb = zlib.compress(msgspec.msgpack.encode([tensors, 1 << 62, columns.tobytes()]), 1)
    found = []
    assert peak_of(lambda: found.append(grid_for([mine], [bomb], {bomb: "m/r[0]"}))) < 20 * MIB
    assert encode_grid(found[0]) == encode_grid(grid_for([mine], []))
    assert "m/r[0]" in caplog.text


@pytest.mark.long
def test_a_reader_that_ties_everything_and_cuts_one_of_it_finely_costs_little():
    """All cuts of one tensor for each of those that it is tied to would be 52 MB."""
    count, rows = 200, 1 << 15
    arrays = {f"w{n:03}": np.zeros((rows, 1), np.uint8) for n in range(count)}
    mine = register(arrays, boxes={}).boxes
    cut = [Box("w000", (rows, 1), (row, 0), (1, 1), row) for row in range(rows)]
    fine = register({"w": arrays["w000"]}, boxes={"w": cut}).boxes
    tied = register(dict.fromkeys(arrays, arrays["w000"]), boxes={}).boxes
    known = encode_grid(grid_for([mine], []))
    found = []
    assert peak_of(lambda: found.append(grid_for([mine], [tied, fine]))) < 40 * MIB
    assert encode_grid(found[0]) == known  # so fine a cut is not taken


def crumbs(extent: int, offered: np.ndarray, *, tiles: int, algorithm: str) -> tuple[Registration, Offer]:
    """A reader of one matrix, and a source whose grid cuts it into single elements."""
    registration = register({"w": np.zeros((extent, extent), np.uint8), "x": offered}, boxes={})
    mine = register({"x": offered}, boxes={}).table if tiles == 1 else registration.table
    tensors = (GlobalTensor("w", "uint8", (extent, extent)), GlobalTensor("x", "uint8", (1, 1)))
    cuts = np.concatenate([np.arange(extent + 1)] * 2 + [np.arange(2)] * 2)
    starts = np.array([[0, extent + 1], [2 * extent + 2, 2 * extent + 4]])
    grid = Grid(tensors, np.array([0, 1]), cuts, starts, np.array([[extent, extent], [1, 1]]))
    digests = b"" if algorithm == "none" else bytes(16 * tiles)
    names = (wire.layout_digest(mine), wire.grid_digest(grid))
    manifest = TileManifest(*names, algorithm, tiles, digests, "salt" if algorithm == "none" else "")
    return registration, Offer("m/t[0]", manifest.root(), TiledShard(mine, grid, manifest).encode())


@pytest.mark.parametrize(
    ("tiles", "algorithm", "error", "text"),
    [
        (1024 * 1024 + 1, "none", CorruptTransfer, "m/t.*have 1048577 tiles, .* with 0 B of digests"),
        (7, "xxh3-128", CorruptTransfer, "m/t.*have 1048577 tiles, of which its manifest names 7"),
        (1, "xxh3-128", LayoutMismatch, "1048577 tiles are wanted, and m/t.* have 1 of that version"),
    ],
)
def test_a_grid_of_crumbs_costs_a_reader_little(tiles, algorithm, error, text):
    """A few kB of cuts in each of two dimensions are a million tiles."""
    registration, offer = crumbs(1024, np.zeros((1, 1), np.uint8), tiles=tiles, algorithm=algorithm)

    def refused() -> None:
        with pytest.raises(error, match=text):
            version_from(registration, [offer], MIB)

    assert peak_of(refused) < 10 * MIB


def table_bytes(names: list[str], dtype: str, shape: list[int], size_bytes: int, *columns: int) -> bytes:
    """A table whose tensors are all alike, with one row."""
    tensors = msgspec.msgpack.encode([names, [[dtype, shape]], bytes(4 * len(names))])
    return wire._deflated(msgspec.msgpack.encode([tensors, size_bytes, np.array(columns, "<i8").tobytes()]), "it")


IMPOSSIBLE = {
    "objects": table_bytes(["w"], "object", [4], 16, 0, 0, 0, 4, 1),
    "a dtype and more": table_bytes(["w"], "float32\x1b[2J", [4], 16, 0, 0, 0, 4, 4),
    "strides of no elements that pass 64 bits": table_bytes(["w"], "int8", [0, 1 << 40, 1 << 40], 0),
    "a sum that passes 64 bits": table_bytes(["w"], "int8", [2], 1 << 62, 0, 1 << 62, 0, 2, 1 << 62),
    "a name for a terminal": table_bytes(["\x1b]0;owned\x07"], "int8", [4], 4, 0, 0, 0, 4, 1),
    "a name for a book": table_bytes(["w" * 5_000], "int8", [4], 4, 0, 0, 0, 4, 1),
    "more than all memory": table_bytes([f"w{n}" for n in range(40)], "float32", [1 << 57], 4, 0, 0, 0, 1, 0),
}


@pytest.mark.parametrize("data", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_boxes_that_cannot_be_make_no_layout(data: bytes) -> None:
    """`load` lays memory out as they say."""
    with pytest.raises(UsageError, match=r"table of|tensors of this version have|workers can exchange") as raised:
        whole_layout([data])
    assert str(raised.value).isprintable()


def test_a_grid_of_fewer_dimensions_than_its_tensors_is_malformed() -> None:
    tensors = wire._pack_tensors((GlobalTensor("w", "float32", (4, 4, 4)),))
    columns = (wire._bytes_of(np.array(numbers, "<i8")) for numbers in ([0], [2], [0, 4]))
    data = wire._deflated(msgspec.msgpack.encode(wire._Grid(tensors, 1, *columns)), "it")
    with pytest.raises(UsageError, match="malformed grid: 1 dimensions"):
        decode_grid(data)


# --- Any layout to any layout: what a plan moves is what plain indexing says, verified, and nothing else is touched.


many = settings(max_examples=25, deadline=None)
chances = st.integers(0, 1 << 32).map(Random)
BAND_BYTES = 48  # so that even these small tensors are cut further


def fine_grid(publisher: list[Shard], *others: list[Shard]) -> Grid:
    cutting = Cutting(BAND_BYTES, fewest_tiles=1 << 20)
    for shard in publisher:
        cutting.add_publisher(shard.table)
    for layout in others:
        for shard in layout:
            cutting.add_other(shard.table)
    return cutting.grid()


def manifest_of(shard: Shard, grid: Grid) -> TileManifest:
    return publish_tiled_shard(shard.registration, tiles_of(shard.table, grid)).manifest


def sources_of(publisher: list[Shard], grid: Grid) -> list[Source]:
    return [source_of(shard, grid, f"trainer[{n}]") for n, shard in enumerate(publisher)]


def derived(shard: Shard, grid: Grid, sources: list[Source]) -> tuple[Tiles, TileManifest]:
    tiles = tiles_of(shard.table, grid)
    names = {"layout": layout_digest(shard.table), "grid": grid_digest(grid)}
    return tiles, derive_manifest(tiles, sources, **names)


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
@given(chances, st.sampled_from(("late", "early", "tied", "spread")))
def test_what_arrives_is_what_plain_indexing_says_and_nothing_else_changes(chance: Random, kind: str) -> None:
    model, publisher, reader = two_layouts(chance, has_tie=kind == "tied")
    grid = fine_grid(publisher) if kind == "late" else fine_grid(publisher, reader)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "spread":  # as where much else lies between
            patch.setattr(plan, "SPREAD", 0)
        sources = sources_of(publisher, grid)
    for shard in reader:
        tiles, manifest = derived(shard, grid, sources)
        reads = plan_reads(tiles, sources)
        if kind != "late":
            assert int(reads.size_bytes.sum()) <= int(shard.table.bytes_of_boxes.sum()), "no byte is read for nothing"
        before = shard.outside()
        fill_across(shard.registration, tiles, manifest, sources, publisher)
        assert shard.wrong(model) == []
        assert all((a == b).all() for a, b in zip(before, shard.outside(), strict=True))
        if kind != "late":
            assert manifest == manifest_of(shard, grid), "what was derived is that of the bytes"


@many
@given(chances)
def test_grids_do_not_depend_on_the_order_of_layouts(chance: Random) -> None:
    model = draw_model(chance)
    layouts = [draw_layout(chance, model, chance.randint(1, 3)) for _ in range(4)]
    grid = fine_grid(*layouts)
    shuffled = [layouts[0], *chance.sample(layouts[1:], 3)]
    assert grid_digest(fine_grid(*(chance.sample(one, len(one)) for one in shuffled))) == grid_digest(grid)
    assert grid_digest(decode_grid(encode_grid(grid))) == grid_digest(grid)
    for layout in layouts:
        for shard in layout:
            tiles = tiles_of(shard.table, grid)
            assert tiles.is_whole.all(), "each boundary of each layout is a cut"
            assert int(tiles.size_bytes.sum()) == int(shard.table.bytes_of_boxes.sum())
            assert tiles.slot.tolist() == list(range(len(tiles)))


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
    grid = fine_grid([*publisher, *copy], reader)
    with pytest.raises(VersionConflict, match=box.name):
        derived(reader[0], grid, sources_of([*publisher, *copy], grid))


@many
@given(chances)
def test_a_byte_that_is_not_what_was_published_never_arrives(chance: Random) -> None:
    model, publisher, reader = two_layouts(chance)
    grid = fine_grid(publisher, reader)
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
        try:
            fill_across(shard.registration, tiles, manifest, sources, publisher)
        except CorruptTransfer as error:
            caught += box.name in str(error)
        else:
            assert shard.wrong(model) == []
    assert caught or times > 1  # the part lay elsewhere too, and was read from there


@many
@given(chances)
def test_sources_of_the_same_tiles_share_the_bytes(chance: Random) -> None:
    model = draw_model(chance)
    one = draw_layout(chance, model, 1)
    copies = [*one, *draw_layout(chance, model, 1), *draw_layout(chance, model, 1)]
    for shard in copies:
        shard.fill(model)
    reader = draw_layout(chance, model, 1)[0]
    grid = fine_grid(copies, [reader])
    sources = sources_of(copies, grid)
    tiles, manifest = derived(reader, grid, sources)
    plan = plan_reads(tiles, sources)
    fill_across(reader.registration, tiles, manifest, sources, copies)
    assert reader.wrong(model) == []
    loads = np.bincount(plan.source, plan.size_bytes, 3)
    assert sum(loads) == sum(array.nbytes for array in model.values())
    assert max(loads) - min(loads) <= 2 * int(plan.size_bytes.max())


def test_runs_of_a_device_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BLOCK_BYTES", 300)
    device = FakeDevice([("cuda:0", 40_000)])
    stream = StagedStream(device.pieces, device, StagingRing(4096, 4))
    image = np.frombuffer(device.image, np.uint8)
    for run, count, stride, counts, strides in ((4, 50, 12, 3, 1000), (16, 7, 64, 1, 0), (800, 2, 900, 2, 5000)):
        row = [0] * COLUMNS
        row[SOURCE], row[RUN], row[COUNT], row[COUNTS] = 5, run, count, counts
        row[SOURCE_STRIDE], row[SOURCE_STRIDES] = stride, strides
        wanted = np.lib.stride_tricks.as_strided(image[5:], (counts, count, run), (strides, stride, 1)).tobytes()
        room = np.zeros(len(wanted), np.uint8)
        plan.copy_runs(stream, Copies(np.array([row]), np.zeros(1, np.int64)), room)
        assert room.tobytes() == wanted


def test_short_runs_of_memory_that_is_gone_are_told(tmp_path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(10 * mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 10 * mmap.PAGESIZE) as pages:
        memory = np.frombuffer(pages, np.uint8)
        stream = HostStream([Piece(0, len(memory), memory.ctypes.data, "cpu", 1, (memory,))])
        file.truncate(5 * mmap.PAGESIZE)
        row = [0] * COLUMNS
        row[RUN], row[COUNT], row[SOURCE_STRIDE], row[COUNTS] = 4, 10, mmap.PAGESIZE, 1
        with pytest.raises(Freed):
            plan.copy_runs(stream, Copies(np.array([row]), np.zeros(1, np.int64)), np.zeros(40, np.uint8))
        del stream, memory
