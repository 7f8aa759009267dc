"""Grids, ties, overlaps, late layouts: each rule of the tiles by an example; and what comes from a peer is judged."""

import zlib

import msgspec
import numpy as np
import pytest

from tensorhub.protocol.errors import LayoutMismatch, UsageError, VersionConflict
from tensorhub.protocol.layout import Box
from tensorhub.protocol.manifest import TileManifest
from tensorhub.reshard import read as across
from tensorhub.reshard.copies import COUNT, COUNTS, RUN, SOURCE, carry_out, check_coverage, check_disjoint, copies_of
from tensorhub.reshard.derive import Source, derive_manifest, digests_of, tied_tiles
from tensorhub.reshard.exported import publish_cut
from tensorhub.reshard.grid import Cutting, Grid, Tiles, chunks_of, grid_of, tiles_of
from tensorhub.reshard.plan import Plan, carry_out_plan, plan_reads
from tensorhub.reshard.read import Across, Leg, grid_for
from tensorhub.reshard.wire import decode_grid, decode_table, encode_grid, encode_table, grid_digest, layout_digest

from .cutting import Shard

MIB = 1 << 20


def shard_of(arrays: dict[str, np.ndarray], boxes: dict[str, list[Box]] | None = None) -> Shard:
    """Registered arrays, plain where no boxes are given."""
    shard = Shard(dict(arrays), dict(boxes or {}))
    return shard.finish()


def source_of(shard: Shard, grid: Grid, name: str = "trainer[0]") -> Source:
    tiles = tiles_of(shard.table, grid)
    return Source(name, shard.table, TileManifest("l", "g", "xxh3-128", len(tiles), digests_of(tiles, shard.memory)))


def read(reader: Shard, publisher: Shard, grid: Grid) -> None:
    tiles, source = tiles_of(reader.table, grid), source_of(publisher, grid)
    manifest = derive_manifest(tiles, [source], layout="l", grid="g")
    carry_out_plan(plan_reads(tiles, [source]), manifest, [publisher.memory], reader.memory)


def matrix(rows: int, columns: int, start: int = 0) -> np.ndarray:
    return (np.arange(rows * columns, dtype=np.int32) + start).reshape(rows, columns)


def test_a_large_tensor_is_cut_into_runs_of_at_most_one_chunk() -> None:
    shard = shard_of({"w": np.zeros((4096, 4096), np.float32)})  # 64 MiB
    grid = grid_of([shard.table])
    tiles = tiles_of(shard.table, grid)
    assert len(tiles) == 16
    assert tiles.size.tolist() == [[256, 4096]] * 16
    chunks = chunks_of(tiles)
    assert len(chunks) == 16
    assert chunks.is_run.all()


def test_a_tensor_whose_planes_are_too_long_is_cut_inside_of_them() -> None:
    shard = shard_of({"w": np.zeros((3, 1024, 2048), np.float32)})  # planes of 8 MiB
    grid = grid_of([shard.table])
    assert tiles_of(shard.table, grid).size.tolist() == [[1, 512, 2048]] * 6


def test_who_stores_transposed_has_runs_of_one_chunk_too() -> None:
    plain = shard_of({"w": np.zeros((4096, 2048), np.float32)})
    turned = shard_of({"w": np.zeros((2048, 4096), np.float32).T})
    grid = grid_of([plain.table], [turned.table])
    for shard in (plain, turned):
        tiles = tiles_of(shard.table, grid)
        chunks = chunks_of(tiles)
        assert chunks.is_run.all()
        assert int(chunks.size_bytes.max()) <= 4 * MIB
        assert int(tiles.size_bytes.min()) >= 512 << 10


def test_cuts_of_unlike_layouts_fall_together() -> None:
    whole = shard_of({"w": np.zeros((8192, 4096), np.float32)})
    halves = [
        shard_of({"p": np.zeros((8192, 2048), np.float32)}, {"p": [Box("w", (8192, 4096), (0, at), (8192, 2048))]})
        for at in (0, 2048)
    ]
    grid = grid_of([whole.table], [half.table for half in halves])
    assert grid.tile_count == 8192 // 256 * 2


def test_where_all_cuts_would_make_crumbs_only_the_publishers_count() -> None:
    data = matrix(256, 256)
    rows = shard_of({"w": data})
    columns = shard_of(
        {f"c{at}": np.zeros((256, 1), np.int32) for at in range(256)},
        {f"c{at}": [Box("w", (256, 256), (0, at), (256, 1))] for at in range(256)},
    )
    pieces = shard_of(
        {f"r{at}": np.zeros((1, 256), np.int32) for at in range(256)},
        {f"r{at}": [Box("w", (256, 256), (at, 0), (1, 256))] for at in range(256)},
    )
    grid = grid_of([rows.table], [columns.table, pieces.table])
    assert grid.tile_count == 1
    read(columns, rows, grid)
    assert all((columns.arrays[f"c{at}"][:, 0] == data[:, at]).all() for at in range(256))


def tied(rows: int, start: int = 0) -> Shard:
    data = matrix(rows, 4, start)
    return shard_of({"embed": data, "head": data})


def test_tied_tensors_are_read_once_and_compared() -> None:
    publisher, reader = tied(8), tied(8, 999)
    apart = shard_of({"embed": np.zeros((8, 4), np.int32), "head": np.zeros((8, 4), np.int32)})
    halved = shard_of(
        {"a": np.zeros((3, 4), np.int32), "b": np.zeros((5, 4), np.int32)},
        {"a": [Box("head", (8, 4), (0, 0), (3, 4))], "b": [Box("head", (8, 4), (3, 0), (5, 4))]},
    )
    grid = grid_of([publisher.table], [reader.table, apart.table, halved.table])
    tiles = tiles_of(reader.table, grid)
    assert len(tiles) == 4, "both tensors are cut where any layout cuts one of them"
    plan = plan_reads(tiles, [source_of(publisher, grid)])
    assert plan.bytes_from(1) == [8 * 4 * 4]
    assert plan.fetch_of.tolist() in ([0, 1, 0, 1], [0, 0, 1, 1])
    for shard in (reader, apart, halved):
        read(shard, publisher, grid)
    assert (reader.arrays["head"] == publisher.arrays["embed"]).all()
    assert (apart.arrays["head"] == publisher.arrays["embed"]).all()


def test_tensors_that_were_published_apart_and_differ_cannot_be_tied() -> None:
    publisher = shard_of({"embed": matrix(8, 4), "head": matrix(8, 4, 1)})
    reader = tied(8)
    grid = grid_of([publisher.table], [reader.table])
    with pytest.raises(
        VersionConflict, match=r"'embed'\[0:8, 0:4\] and 'head'\[0:8, 0:4\] lie in the same memory here"
    ):
        derive_manifest(tiles_of(reader.table, grid), [source_of(publisher, grid)], layout="l", grid="g")


def test_a_tie_that_nobody_can_judge_is_refused() -> None:
    cut = {"a": [Box("embed", (8, 4), (0, 0), (3, 4))], "b": [Box("embed", (8, 4), (3, 0), (5, 4))]}
    publisher = shard_of({"a": matrix(3, 4), "b": matrix(5, 4, 12), "head": matrix(8, 4)}, cut)
    reader = tied(8)
    grid = grid_of([publisher.table])  # the reader came later
    with pytest.raises(LayoutMismatch, match="not cut alike in what was published"):
        plan_reads(tiles_of(reader.table, grid), [source_of(publisher, grid)])


def test_who_holds_a_tile_in_part_is_no_source_of_it() -> None:
    publisher = shard_of({"w": matrix(8, 4)})
    cut = {"a": [Box("w", (8, 4), (0, 0), (3, 4))], "b": [Box("w", (8, 4), (3, 0), (5, 4))]}
    late = shard_of({"a": matrix(3, 4, 99), "b": matrix(5, 4, 99)}, cut)
    grid = grid_of([publisher.table])
    read(late, publisher, grid)
    assert (late.arrays["b"] == matrix(8, 4)[3:]).all()
    tiles = tiles_of(late.table, grid)
    with pytest.raises(UsageError, match="holds only in part"):
        digests_of(tiles, late.memory)
    relay = Source("late[0]", late.table, TileManifest("l", "g", "xxh3-128", len(tiles), bytes(16 * len(tiles))))
    for reader in (late, shard_of({"w": matrix(8, 4, 50)})):
        with pytest.raises(LayoutMismatch, match=r"no source has 'w'\[0:8, 0:4\]"):
            plan_reads(tiles_of(reader.table, grid), [relay])


def test_a_part_that_lies_twice_at_one_source_is_the_same() -> None:
    boxes = {name: [Box("w", (8, 4), (0, 0), (8, 4))] for name in "ab"}
    publisher = shard_of({"a": matrix(8, 4), "b": matrix(8, 4)}, boxes)
    reader = shard_of({"w": matrix(8, 4, 99)})
    grid = grid_of([publisher.table], [reader.table])
    read(reader, publisher, grid)
    assert (reader.arrays["w"] == matrix(8, 4)).all()
    publisher.arrays["b"][7, 3] = -1
    with pytest.raises(VersionConflict, match=r"'w'\[0:8, 0:4\] lies twice at trainer\[0\], with different content"):
        read(reader, publisher, grid)


def test_memory_that_is_shared_in_part_is_not_read_into() -> None:
    flat = np.zeros(64, np.int32)
    shard = shard_of({"flat": flat, "view": flat[10:20]})
    grid = grid_of([shard.table])
    with pytest.raises(LayoutMismatch, match="share a part of their memory"):
        plan_reads(tiles_of(shard.table, grid), [source_of(shard, grid)])
    with pytest.raises(LayoutMismatch, match=r"'flat'\[0:64\] and 'view'\[0:10\] share a part of their memory"):
        check_disjoint(shard.table)
    square = np.zeros((8, 8), np.int32)
    boxes = [Box("a", (8, 5), (0, 0), (8, 5), 0, (8, 1)), Box("b", (8, 4), (0, 0), (8, 4), 4, (8, 1))]
    with pytest.raises(LayoutMismatch, match=r"'a'\[0:8, 0:5\] and 'b'\[0:8, 0:4\] share a part"):
        check_disjoint(shard_of({"w": square}, {"w": boxes}).table)
    dtypes = shard_of({"a": flat, "b": flat.view(np.float32)})
    with pytest.raises(LayoutMismatch, match=r"'a'\[0:64\] and 'b'\[0:64\]"):
        check_disjoint(dtypes.table)


def test_columns_and_interleaved_rows_share_nothing() -> None:
    square = np.zeros((8, 8), np.int32)
    columns = [Box("a", (8, 4), (0, 0), (8, 4), 0, (8, 1)), Box("b", (8, 4), (0, 0), (8, 4), 4, (8, 1))]
    turned = [Box("a", (4, 8), (0, 0), (4, 8), 0, (1, 8)), Box("b", (4, 8), (0, 0), (4, 8), 4, (1, 8))]
    rows = [Box("a", (4, 8), (0, 0), (4, 8), 0, (16, 1)), Box("b", (4, 8), (0, 0), (4, 8), 8, (16, 1))]
    steps = [Box("a", (2, 8), (0, 0), (2, 8), 0, (32, 1)), Box("b", (4, 8), (0, 0), (4, 8), 8, (8, 1))]
    for boxes in (columns, turned, rows):
        check_disjoint(shard_of({"w": square}, {"w": boxes}).table)
    with pytest.raises(LayoutMismatch):
        check_disjoint(shard_of({"w": square}, {"w": steps}).table)


def test_each_way_to_differ_is_its_own_error() -> None:
    publisher = shard_of({"w": matrix(8, 4), "embed": matrix(10, 4)})
    grid = grid_of([publisher.table])
    source = source_of(publisher, grid)
    for arrays, boxes, message in (
        (
            {"w": matrix(8, 4), "x": matrix(2, 2)},
            {},
            r"tensor 'x': int32\[2, 2\] exists here, and in what was published",
        ),
        ({"w": matrix(9, 4)}, {}, r"'w' has global shape \[9, 4\] here and \[8, 4\] in what was published"),
        ({"w": matrix(8, 4).view(np.float32)}, {}, "'w' has dtype float32 here and int32 in what was published"),
        ({"embed": matrix(16, 4)}, {}, r"'embed' has global shape \[16, 4\] here and \[10, 4\]"),
    ):
        reader = shard_of(arrays, boxes)
        with pytest.raises(LayoutMismatch, match=message):
            plan_reads(tiles_of(reader.table, grid), [source])
    padded = shard_of({"p": np.full((16, 4), -1, np.int32)}, {"p": [Box("embed", (10, 4), (0, 0), (10, 4))]})
    read(padded, publisher, grid)
    assert (padded.arrays["p"][:10] == matrix(10, 4)).all()
    assert (padded.arrays["p"][10:] == -1).all()


def test_holes_are_described_as_one_part() -> None:
    cuts = {name: [Box("w", (8, 8), at, (4, 4))] for name, at in (("a", (0, 0)), ("b", (0, 4)), ("d", (4, 4)))}
    shard = shard_of({name: np.zeros((4, 4), np.int32) for name in cuts}, cuts)
    with pytest.raises(LayoutMismatch, match=r"no shard of the replica has 'w'\[4:8, 0:4\]\n"):
        check_coverage([shard.table])
    other = shard_of(
        {"a": np.zeros((4, 4), np.int32), "v": np.zeros(4, np.int32)}, {"a": [Box("w", (8, 8), (4, 0), (4, 4))]}
    )
    check_coverage([shard.table, other.table])
    with pytest.raises(LayoutMismatch, match=r"'v': int32\[4\] of the version is in no box of rollout-3, nor 1 other"):
        check_coverage([shard_of({"x": np.zeros(3, np.uint8)}).table], other.table.tensors, who="rollout-3")


def test_a_third_loop_is_unrolled() -> None:
    source = np.arange(2 * 3 * 4 * 5, dtype=np.uint8)
    target = np.zeros(2 * 3 * 4 * 5, np.uint8)
    columns = (np.array([[2, 3, 4, 5]]), np.array([1]), np.array([0]), np.array([[60, 20, 5, 1]]))
    copies = copies_of(*columns, np.array([0]), np.array([[1, 2, 6, 24]]), np.array([7]))
    assert copies.of.tolist() == [7] * 6
    assert (copies.rows[:, RUN] * copies.rows[:, COUNT] * copies.rows[:, COUNTS]).tolist() == [20] * 6
    carry_out(copies, source, target)
    assert (target.reshape(5, 4, 3, 2) == source.reshape(2, 3, 4, 5).transpose(3, 2, 1, 0)).all()
    buffer = np.zeros_like(target)
    carry_out(copies.gathering(), source, buffer)
    assert (buffer == source).all(), "gathering visits elements in row-major order"
    copies.rows[0, SOURCE] = 101
    with pytest.raises(IndexError, match="copies of bytes"):
        carry_out(copies, source, target)


def test_nothing_is_derived_from_manifests_of_different_versions() -> None:
    shard = shard_of({"w": matrix(8, 4)})
    grid = grid_of([shard.table])
    tiles = tiles_of(shard.table, grid)
    good = source_of(shard, grid)
    unverified = Source("b", shard.table, TileManifest("l", "g", "none", 1, b"", "salt"))
    with pytest.raises(UsageError, match="not of one version"):
        derive_manifest(tiles, [good, unverified], layout="l", grid="g")
    with pytest.raises(UsageError, match="has the grid g, the version h"):
        derive_manifest(tiles, [good], layout="l", grid="h")
    with pytest.raises(UsageError, match="whose manifest is unknown"):
        derive_manifest(tiles, [Source("c", shard.table)], layout="l", grid="g")
    short = Source("d", shard.table, TileManifest("l", "g", "xxh3-128", 0, b""))
    with pytest.raises(UsageError, match="manifest of d has 0 tiles"):
        derive_manifest(tiles, [short], layout="l", grid="g")
    assert derive_manifest(tiles, [unverified], layout="l", grid="g").salt == "salt"


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


def test_what_a_reader_has_said_that_is_no_table_of_boxes_makes_no_cuts(caplog):
    """Else whoever publishes would suffer for it."""
    mine = encode_table(shard_of({"w": np.zeros((8, 8), np.float32)}).table)
    assert encode_grid(grid_for([mine], [b"from another release"])) == encode_grid(grid_for([mine], []))
    assert "the boxes of a reader are left out of account: malformed layout" in caplog.text
    with pytest.raises(UsageError, match="malformed layout"):
        grid_for([b"from another release"], [])


def test_tied_parts_of_different_tiles_are_not_taken_for_different_content() -> None:
    """ "a" was published in one tile, "b" in two: half of "a" is no tile, and half of "b" is one."""
    one = matrix(8, 4)
    cut = {"a": [Box("a", (8, 4), (0, 0), (8, 4))], "b": [Box("b", (8, 4), (0, 0), (4, 4))]}
    rest = [Box("b", (8, 4), (4, 0), (4, 4))]
    publisher = shard_of({"a": one, "b": one[:4].copy(), "c": one[4:].copy()}, {**cut, "c": rest})
    grid = grid_of([publisher.table])
    tied = [Box(name, (8, 4), (0, 0), (4, 4)) for name in ("a", "b")]
    late = shard_of({"t": matrix(4, 4, 99)}, {"t": tied})
    with pytest.raises(LayoutMismatch, match="not cut alike in what was published"):
        tied_tiles(tiles_of(late.table, grid))


def test_the_next_version_is_planned_anew_only_where_a_layout_or_the_grid_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[int] = []

    def plan(tiles: Tiles, sources: list[Source]) -> Plan:
        planned.append(len(tiles))
        return plan_reads(tiles, sources)

    monkeypatch.setattr(across, "plan_reads", plan)
    publisher = shard_of({"w": matrix(64, 64)}, {"w": [Box("w", (64, 64), (0, 0), (64, 64), 0, (64, 1))]})
    reader = shard_of({"w": matrix(64, 32)}, {"w": [Box("w", (64, 64), (0, 32), (64, 32), 0, (32, 1))]})

    def legs_of(grid: Grid) -> list[Leg]:
        cut, tiles = publish_cut(publisher.registration, tiles_of(publisher.table, grid)), tiles_of(reader.table, grid)
        source = Source("trainer[0]", cut.table, cut.manifest)
        layout = layout_digest(reader.table)
        manifest = derive_manifest(tiles, [source], layout=layout, grid=grid_digest(grid))
        return Across(reader.registration, tiles, manifest).legs([source])

    grid = grid_of([publisher.table, reader.table])
    (first,) = legs_of(grid)
    publisher.arrays["w"] += 1
    (second,) = legs_of(grid)
    assert second.batches is first.batches
    assert second.terms().digests != first.terms().digests
    assert planned == [1]
    cutting = Cutting(1 << 10, fewest_tiles=1 << 20)
    cutting.add_publisher(publisher.table)
    cutting.add_other(reader.table)
    legs_of(cutting.grid())
    assert planned == [1, 16]
