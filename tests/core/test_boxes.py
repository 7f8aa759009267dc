"""Boxes: what may be said of a tensor, and what is refused by name."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorhub.protocol.errors import LayoutMismatch, UsageError
from tensorhub.protocol.layout import (
    Box,
    GlobalTensor,
    Placement,
    Replicated,
    Sharded,
    StridedSharded,
    boxes_of,
    boxes_of_placements,
    checked,
    refuse_difference,
    runs_of_placements,
    whole,
)
from tensorhub.protocol.manifest import Layout, TensorSpec, TileManifest, decode_tile_manifest

QKV = TensorSpec("qkv", "bfloat16", (12, 4), (4, 1), 0, 96)
TWO = Layout((QKV, TensorSpec("norm", "float32", (4,), (1,), 96, 16)), 112)


def refused(message: str, box: Box) -> None:
    with pytest.raises(UsageError, match=message):
        checked(box, QKV)


def test_a_plain_tensor_is_one_box_the_whole_of_its_name() -> None:
    boxes = [box for _, box in boxes_of(TWO)]
    assert boxes == [whole(tensor) for tensor in TWO.tensors]
    assert boxes[0] == Box("qkv", (12, 4), (0, 0), (12, 4), 0, (4, 1), "bfloat16")


def test_what_is_left_out_is_filled_in() -> None:
    assert checked(Box("q", (32, 4), (8, 0), (8, 4)), QKV) == Box("q", (32, 4), (8, 0), (8, 4), 0, (4, 1), "bfloat16")


def test_several_boxes_lie_in_one_tensor_and_others_stay_plain() -> None:
    parts = [Box("l/q", (16, 4), (0, 0), (8, 4)), Box("l/k", (2, 4), (0, 0), (2, 4), 32)]
    assert [(spec.name, box.name) for spec, box in boxes_of(TWO, {"qkv": parts})] == [
        ("qkv", "l/q"),
        ("qkv", "l/k"),
        ("norm", "norm"),
    ]
    assert [spec.name for spec, _ in boxes_of(TWO, {"qkv": []})] == ["norm"]


def test_a_box_beyond_the_global_tensor_is_padding() -> None:
    with pytest.raises(UsageError, match=r"'qkv': box 'q'\[28:36, 0:4\] is not inside of the global shape") as caught:
        checked(Box("q", (32, 4), (28, 0), (8, 4)), QKV)
    assert caught.value.hint == "padding belongs to no box: say the size without it"


def test_a_box_beyond_the_tensor_it_lies_in() -> None:
    refused(r"box 'q'\[0:8, 0:4\] takes elements 20 to 52, and the tensor has 48", Box("q", (8, 4), (0, 0), (8, 4), 20))
    refused("takes elements -1", Box("q", (8, 4), (0, 0), (8, 4), -1))


def test_a_box_is_made_of_integers_and_as_many_as_dimensions() -> None:
    refused("a name and integers", Box("q", (8, 4), (0, 0), (8.0, 4)))  # type: ignore[arg-type]
    refused("a name and integers", Box(3, (8, 4), (0, 0), (8, 4)))  # type: ignore[arg-type]
    refused("2 dimensions, but 1 in `at`", Box("q", (8, 4), (0,), (8, 4)))
    refused("out of range", Box("q", (1 << 41, 4), (0, 0), (8, 4)))


def test_boxes_of_one_name_agree() -> None:
    given = {"qkv": [Box("w", (8, 4), (0, 0), (8, 4)), Box("w", (9, 4), (8, 0), (1, 4), 32)]}
    with pytest.raises(UsageError, match=r"'qkv' is said to have a part of 'w': bfloat16\[8, 4\], and tensor 'qkv'"):
        boxes_of(TWO, given)
    with pytest.raises(UsageError, match="tensor 'v', which is not registered"):
        boxes_of(TWO, {"v": []})


def test_two_sides_mean_the_same_tensor() -> None:
    mine = GlobalTensor("embed", "bfloat16", (1000, 4))
    with pytest.raises(
        LayoutMismatch, match=r"'embed' has global shape \[1000, 4\] here and \[1024, 4\] there"
    ) as caught:
        refuse_difference(mine, GlobalTensor("embed", "bfloat16", (1024, 4)), here="here", there="there")
    assert caught.value.hint == "give the whole shape, without padding; at= and size= of a Box say which part is here"
    for other in ((1024, 8), (1000, 4, 1), (1000,)):  # that is no padding
        with pytest.raises(LayoutMismatch, match="'embed' has global shape") as caught:
            refuse_difference(mine, GlobalTensor("embed", "bfloat16", other), here="here", there="there")
        assert caught.value.hint is None
    with pytest.raises(LayoutMismatch, match="'embed' has dtype bfloat16 here and float32 there"):
        refuse_difference(mine, GlobalTensor("embed", "float32", (1000, 4)), here="here", there="there")


def test_placements_that_cannot_be() -> None:
    for mesh, coordinate, placements, message in (
        ((2,), (0, 0), [Sharded(0)], "mesh of 1 dimensions"),
        ((2,), (2,), [Sharded(0)], "rank 2 of a mesh dimension of 2"),
        ((2,), (0,), [Sharded(2)], "cut in dimension 2, which it has not"),
        ((2,), (0,), [StridedSharded(0, 0)], "split_factor 0"),
    ):
        with pytest.raises(UsageError, match=message):
            boxes_of_placements("w", (4, 4), mesh, coordinate, placements)


def test_a_strided_shard_of_many_pieces_is_as_many_boxes() -> None:
    runs = runs_of_placements("w", (12, 2), (2, 2), (1, 0), [StridedSharded(0, 3), Replicated()])
    assert runs == [[(2, 2), (6, 2), (10, 2)], [(0, 2)]]
    boxes = boxes_of_placements("w", (12, 2), (2, 2), (1, 0), [StridedSharded(0, 3), Replicated()])
    assert [(box.at, box.size, box.offset) for box in boxes] == [
        ((2, 0), (2, 2), 0),
        ((6, 0), (2, 2), 4),
        ((10, 0), (2, 2), 8),
    ]


def pieces_of(indices: list[int], count: int) -> list[list[int]]:
    """As `torch.chunk` cuts: pieces of ceil(length / count), the last ones shorter or empty."""
    each = max(1, -(-len(indices) // count))
    return [indices[each * piece : each * (piece + 1)] for piece in range(count)]


def indices_of(extent: int, mesh: list[int], coordinate: list[int], placements: list[Placement]) -> list[int]:
    """What the placements mean, one index after another."""
    found = list(range(extent))
    for count, rank, placement in zip(mesh, coordinate, placements, strict=True):
        match placement:
            case Sharded():
                found = pieces_of(found, count)[rank]
            case StridedSharded(split_factor=factor):
                found = [each for piece in pieces_of(found, factor) for each in pieces_of(piece, count)[rank]]
    return found


PLACEMENTS = st.one_of(
    st.just(Replicated()), st.just(Sharded(0)), st.builds(StridedSharded, st.just(0), st.integers(1, 5))
)


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), PLACEMENTS), max_size=3))
@example(12, [(2, 1, StridedSharded(0, 3)), (2, 0, Sharded(0))])
@example(6, [(1, 0, StridedSharded(0, 2))])  # every piece: one run
def test_placements_mean_what_cutting_index_by_index_gives(extent: int, cuts: list[tuple[int, int, Placement]]) -> None:
    mesh, coordinate = [count for count, _, _ in cuts], [rank % count for count, rank, _ in cuts]
    placements = [placement for _, _, placement in cuts]
    (runs,) = runs_of_placements("w", (extent,), mesh, coordinate, placements)
    found = [first + each for first, count in runs for each in range(count)]
    assert found == indices_of(extent, mesh, coordinate, placements)
    assert all(count > 0 for _, count in runs)
    assert all(first + count != following for (first, count), (following, _) in pairwise(runs)), "two runs that are one"


def test_a_manifest_of_tiles_travels_and_is_judged() -> None:
    manifest = TileManifest("layout", "grid", "xxh3-128", 2, bytes(range(32)))
    assert decode_tile_manifest(manifest.encode()) == manifest
    assert manifest.digest_of(1) == bytes(range(16, 32))
    assert manifest.root() != TileManifest("layout", "other", "xxh3-128", 2, bytes(range(32))).root()
    for wrong in (
        TileManifest("l", "g", "xxh3-128", 3, bytes(32)),
        TileManifest("l", "g", "none", 1, bytes(16)),
        TileManifest("l", "g", "xxh3-128", -1, b""),
        TileManifest("l", "g", "none", -1, b""),
    ):
        with pytest.raises(UsageError, match="manifest of"):
            decode_tile_manifest(wrong.encode())
    nothing = TileManifest("l", "g", "xxh3-128", 0, b"")  # of a shard that has no part of any tensor
    assert decode_tile_manifest(nothing.encode()) == nothing
    with pytest.raises(UsageError, match="malformed"):
        decode_tile_manifest(b"\x93")
