"""What boxes from a peer may cost at most, whatever they say: memory is bounded before it is taken."""

import tracemalloc
import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from tensorhub.memory.registration import Registration, register
from tensorhub.protocol.errors import CorruptTransfer, LayoutMismatch, UsageError
from tensorhub.protocol.layout import Box, GlobalTensor
from tensorhub.protocol.manifest import TileManifest
from tensorhub.reshard import exported, read, wire
from tensorhub.reshard.exported import Cut, decode_cut
from tensorhub.reshard.grid import BoxTable, Cutting, Grid, table_of_columns
from tensorhub.reshard.read import Offer, grid_for, tiled_version, version_from, whole_layout
from tensorhub.reshard.wire import decode_grid, decode_table, encode_grid, encode_table

MIB = 1 << 20
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
            decode_cut(bomb, good.root())
        found.append(caught)

    assert peak_of(refused) < 5 * MIB
    other = register({"w": np.zeros((32, 128), np.float32)}, boxes={})
    monkeypatch.setattr(exported, "layout_digest", None)  # nothing is made of either, and digested again
    monkeypatch.setattr(wire, "_check_cuts", None)
    for shown in ([other.boxes, grid, manifest], [registration.boxes, other_grid(other), manifest]):
        with pytest.raises(CorruptTransfer, match=r"m/t-1: .* a layout with another digest"):
            Offer("m/t-1", good.root(), msgspec.msgpack.encode(shown)).cut  # noqa: B018


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


@pytest.mark.parametrize("dimensions", [1, 2, 8, 64])
def test_no_honest_layout_is_too_regular(dimensions):
    table = regular(5000, dimensions)
    again = decode_table(encode_table(table))
    assert (again.offset == table.offset).all()
    cutting = Cutting()
    cutting.add_publisher(table)
    grid = cutting.grid()
    assert (decode_grid(encode_grid(grid)).cuts == grid.cuts).all()


def test_a_large_honest_shard_is_taken():
    """Four times the boxes of any shard that was measured."""
    table = regular(280_000, 2)
    assert len(decode_table(encode_table(table))) == len(table)


def test_a_table_costs_little_more_than_twice_what_it_is_plain():
    data, plain = encode_table(regular(200_000, 2)), 200_000 * 64
    assert peak_of(lambda: decode_table(data)) < 3.2 * plain


def test_more_tensors_than_any_shard_has_are_refused(monkeypatch):
    tensors = tuple(GlobalTensor(name, "uint8", (4,)) for name in "abcd")
    table = table_of_columns(tensors, 4, np.array([[0, 0, 0, 4, 1]]))
    encoded = encode_table(table)
    monkeypatch.setattr(wire, "MAX_TENSORS", 3)
    for refused in (lambda: decode_table(encoded), lambda: encode_table(table)):
        with pytest.raises(UsageError, match="4 tensors of up to 1 dimensions are too many for one shard: 3"):
            refused()


def test_long_names_of_a_peer_are_not_kept(monkeypatch):
    monkeypatch.setattr(wire, "MAX_KEPT_BYTES", 1_000)
    wire._tensors_of.cache_clear()
    for length, kept in ((100, 1), (4_000, 0)):
        tensors = (GlobalTensor("n" * length, "uint8", (4,)),)
        decode_table(encode_table(table_of_columns(tensors, 4, np.array([[0, 0, 0, 4, 1]]))))
        assert wire._tensors_of.cache_info().currsize == kept


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


def test_a_reader_that_ties_everything_costs_little():
    """Each tensor takes the cuts of all that it is tied to, but not once for each of them."""
    count = 600
    arrays = {f"w{n:03}": np.zeros((2, 2), np.float32) for n in range(count)}
    mine = register(arrays, boxes={}).boxes
    one = np.zeros((2, 2), np.float32)
    tied = register(dict.fromkeys(arrays, one), boxes={}).boxes
    assert peak_of(lambda: grid_for([mine], [tied])) < 8 * MIB


def test_a_reader_that_ties_everything_and_cuts_one_of_it_finely_costs_little():
    """All cuts of one tensor for each of those that it is tied to would be 315 MB."""
    count, rows = 600, 1 << 16
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
    return registration, Offer("m/t[0]", manifest.root(), Cut(mine, grid, manifest).encode())


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


def test_readers_cannot_make_a_grid_that_does_not_travel(monkeypatch, caplog):
    mine = register({"w": np.zeros((64, 4), np.float32)}, boxes={}).boxes
    rows = [Box("w", (64, 4), (row, 0), (1, 4), 4 * row) for row in range(64)]
    theirs = register({"w": np.zeros((64, 4), np.float32)}, boxes={"w": rows}).boxes
    known = encode_grid(grid_for([mine], []))
    assert encode_grid(grid_for([mine], [theirs])) != known
    monkeypatch.setattr(read, "MAX_CUTS", 50)
    assert encode_grid(grid_for([mine], [theirs])) == known
    assert "all readers are left out of account" in caplog.text


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
