"""What a shard is made of, and how two layouts differ, in words."""

from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.manifest import (
    DIGEST_BYTES,
    Layout,
    Manifest,
    TensorSpec,
    chunk_count,
    contiguous_strides,
    decode_layout,
    decode_manifest,
    difference_hint,
    item_bytes,
    layout_difference,
)
from tensorhub.protocol.messages import Holding, LayoutInfo, Orders
from tensorhub.protocol.names import Digest, Version
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server

from .kit import called, hello, report, worker

DTYPES = ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn", "float4_e2m1fn_x2"]
W = TensorSpec("w", "float32", (2, 3), (3, 1), 0, 24)
B = TensorSpec("b", "bfloat16", (4,), (1,), 24, 8)


def layout(*tensors: TensorSpec, size_bytes: int = 32) -> Layout:
    return Layout(tensors, size_bytes)


def changed(spec: TensorSpec, **more: object) -> TensorSpec:
    return msgspec.structs.replace(spec, **more)


DIFFERENCES = {
    "dtype": (layout(W, changed(B, dtype="float16")), "tensor 'b' has dtype bfloat16 here and float16 there"),
    "shape": (layout(changed(W, shape=(3, 2)), B), "tensor 'w' has shape [2, 3] here and [3, 2] there"),
    "strides": (layout(changed(W, strides=(1, 2)), B), "tensor 'w' has strides [3, 1] here and [1, 2] there"),
    "order": (layout(B, W), "order differs: tensor 0 is 'w' here and 'b' there"),
    "name": (layout(W, changed(B, name="c")), "tensor 'b': bfloat16[4] exists here but not there"),
    "fewer": (layout(W), "tensor 'b': bfloat16[4] exists here but not there"),
    "sharing": (layout(W, changed(B, offset_bytes=0)), "tensor 'b' shares memory with other tensors in another way"),
    "size": (layout(W, B, size_bytes=40), "the layouts differ in their total size"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_the_first_difference_names_the_tensor(what: str) -> None:
    theirs, words = DIFFERENCES[what]
    mine = layout(W, B)
    assert mine.digest() != theirs.digest()
    assert words in (layout_difference(mine, theirs) or "")
    assert layout_difference(theirs, mine) is not None


@pytest.mark.parametrize(
    ("mine", "theirs", "said", "hint"),
    [
        ("w x.b", "module.w module.x.b", "names there have 'module.' in addition", "inside, model.module, or"),
        ("w 0.b", "w 0._orig_mod.b", "names there have '_orig_mod.' in addition", "replace('_orig_mod.', '')"),
        ("_orig_mod.module.w", "w", "have '_orig_mod.' and 'module.' in", "inside, model._orig_mod.module, or"),
        (
            "base_model.model.model.w",
            "model.w",
            "here have 'base_model.model.' in",
            "inside, model.base_model.model, or",
        ),
        (
            "_orig_mod.w",
            "module.w",
            "names here have '_orig_mod.' in addition, and names there have 'module.'",
            "; reg",
        ),
        ("w", "v", "", "register the same tensors"),
        ("a.w v", "w v", "", "register the same tensors"),
        ("_orig_mod.w", "v", "", "register the same tensors"),
    ],
)
def test_what_all_names_of_one_side_have_in_addition_is_said(mine: str, theirs: str, said: str, hint: str) -> None:
    ours, others = (layout(*(changed(W, name=name) for name in names.split())) for names in (mine, theirs))
    text = layout_difference(ours, others) or ""
    assert said in text
    assert ("in addition" in text) == bool(said)
    assert hint in difference_hint(ours, others)


def test_where_only_order_strides_or_ties_differ_boxes_are_the_hint() -> None:
    mine, apart = layout(W, B), changed(B, offset_bytes=8)
    for what in ("strides", "order", "sharing"):
        theirs = DIFFERENCES[what][0]
        assert difference_hint(mine, theirs).startswith("register(..., boxes={} on both sides)")
        assert "which say what each shard has" in difference_hint(mine, theirs, shards=2)  # {}: each has all of it
    for what in ("dtype", "shape", "name", "fewer"):
        assert "boxes" not in difference_hint(mine, DIFFERENCES[what][0])
    assert "memory of its own" in difference_hint(layout(W, apart), mine), "boxes would refuse to fill that"
    assert "boxes={}" in difference_hint(mine, layout(W, apart))


specs = st.builds(
    TensorSpec,
    st.sampled_from("wxyz"),
    st.sampled_from(["float32", "int8"]),
    st.tuples(st.integers(0, 3)),
    st.just((1,)),
    st.integers(0, 8),
    st.integers(0, 8),
)
layouts = st.builds(Layout, st.lists(specs, max_size=4).map(tuple), st.integers(0, 16))


@given(layouts, layouts)
def test_a_difference_is_found_exactly_when_there_is_one(mine: Layout, theirs: Layout) -> None:
    assert (layout_difference(mine, theirs) is None) == (mine == theirs) == (mine.digest() == theirs.digest())


def manifest(size_bytes: int = 10, chunk_bytes: int = 4) -> Manifest:
    digests = b"d" * (DIGEST_BYTES * chunk_count(size_bytes, chunk_bytes))
    return Manifest(Digest("layout"), size_bytes, chunk_bytes, "xxh3-128", digests)


def changed_manifest(**more: object) -> Manifest:
    return msgspec.structs.replace(manifest(), **more)


@given(st.integers(0, 100), st.integers(1, 40))
def test_chunks_cover_the_stream_without_gap_or_overlap(size_bytes: int, chunk_bytes: int) -> None:
    found = manifest(size_bytes, chunk_bytes)
    ranges = [found.chunk_range(chunk) for chunk in range(found.chunk_count)]
    assert [start for start, _ in ranges] == list(range(0, size_bytes, chunk_bytes))
    assert [stop for _, stop in ranges] == [*[start for start, _ in ranges[1:]], *([size_bytes] if ranges else [])]


def test_the_root_covers_everything() -> None:
    others = [
        changed_manifest(salt="x"),
        changed_manifest(layout=Digest("other")),
        changed_manifest(digests=b"e" * 48),
        changed_manifest(chunk_bytes=5),
        changed_manifest(size_bytes=11),
        changed_manifest(algorithm="none"),
    ]
    roots = [found.root() for found in [manifest(), *others]]
    assert len(dict.fromkeys(roots)) == len(roots)


def test_it_travels() -> None:
    assert decode_manifest(manifest().encode()) == manifest()
    assert manifest().digest_of(1) == b"d" * DIGEST_BYTES


@pytest.mark.parametrize(
    "wrong", [{"digests": b"short"}, {"chunk_bytes": 0}, {"size_bytes": -1}, {"chunk_bytes": 1 << 31}]
)
def test_one_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="manifest with"):
        decode_manifest(changed_manifest(**wrong).encode())


@given(st.binary(max_size=60))
def test_bytes_from_a_stranger_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="manifest"):
        decode_manifest(data)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=4))
def test_a_layout_travels(tensors: list[tuple[str, list[int]]]) -> None:
    specs, at = [], 0
    for number, (dtype, shape) in enumerate(tensors):
        size_bytes = prod(shape) * item_bytes(dtype)
        specs.append(
            TensorSpec(f"t{number}", dtype, tuple(shape), contiguous_strides(shape), size_bytes and at, size_bytes)
        )
        at += size_bytes
    found = layout(*specs, size_bytes=at)
    assert decode_layout(found.encode()) == found
    info = LayoutInfo.of(found)
    assert (info.digest(), info.decode()) == (found.digest(), found)


def one(shape: tuple[int, ...], strides: tuple[int, ...], size_bytes: int, **more: object) -> bytes:
    """A shard of one tensor."""
    spec = changed(TensorSpec("w", "float32", shape, strides, 0, size_bytes), **more)
    return layout(spec, size_bytes=size_bytes).encode()


NO_LAYOUTS = {
    "objects": one((2,), (1,), 16, dtype="object"),
    "a dtype and more": one((2,), (1,), 8, dtype="float32\x1b[2J"),
    "elements too wide": one((1,), (1,), 64, dtype="float512"),
    "fewer bytes than elements": one((1000,), (1,), 4),
    "more bytes than elements": one((1,), (1,), 4000),
    "no stride": one((2,), (), 8),
    "a step backwards": one((2,), (-1,), 8),
    "a stride out of its memory": one((2, 2), (1 << 40, 1), 16),
    "elements in one place": one((2, 2), (0, 1), 16),
    "gaps": one((2,), (2,), 8),
    "a stride of a single element": one((1,), (1 << 61,), 4),
    "strides beyond 64 bits": one((0, 1 << 40, 1 << 40), (1 << 62, 1 << 40, 1), 0),
    "more elements than any memory": one((1 << 40, 1 << 40), (1 << 40, 1), 1 << 62),
    "many dimensions": one((1,) * 65, (1,) * 65, 4),
    "a place behind the end": layout(W, changed(B, offset_bytes=1 << 61)).encode(),
    "a place for no bytes": layout(W, B, TensorSpec("e", "int8", (0,), (1,), 3, 0)).encode(),
    "a hole": layout(W, changed(B, offset_bytes=26), size_bytes=34).encode(),
    "a longer stream": layout(W, B, size_bytes=1 << 62).encode(),
    "one name twice": layout(W, B, changed(B, offset_bytes=32), size_bytes=40).encode(),
    "a name for a terminal": one((2,), (1,), 8, name="\x1b]0;owned\x07"),
    "a name for a book": one((2,), (1,), 8, name="w" * 5_000),
    "a negative size": layout(TensorSpec("w", "int8", (1,), (1,), 0, -5)).encode(),
    "a negative place": layout(TensorSpec("w", "int8", (1,), (1,), -1, 5)).encode(),
    "a huge shape": layout(TensorSpec("w", "int8", (2**63,), (1,), 0, 5)).encode(),
    "other fields": msgspec.msgpack.encode({"tensors": 5}),
    "half of one": layout(W, B).encode()[:20],
    "a deep nest": b"\x91" * 100_000,
}


@pytest.mark.parametrize("data", NO_LAYOUTS.values(), ids=NO_LAYOUTS)
def test_what_no_worker_could_register_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="layout") as raised:
        decode_layout(data)
    assert str(raised.value).isprintable()


def test_a_layout_that_is_none_is_a_mismatch_of_which_nothing_is_repeated() -> None:
    server = Server(settings=Settings(), now=0.0, first_number=1, fresh=True)
    publisher, reader = worker("trainer"), worker("rollout")
    server.handle(hello(publisher), sender="a", now=0.0)
    server.handle(LayoutInfo.of(layout(W, B)), sender="a", now=0.0)
    theirs = layout(W, B).digest()
    publishing = called(1, "publish", 1, root=Digest("root"))
    server.handle(report(1, layout=theirs, call=publishing), sender="a", now=0.0)
    held = Holding(Version(1), Digest("root"), True)
    server.handle(report(2, layout=theirs, buffer=held, finished=1, newest=Version(1)), sender="a", now=0.0)
    strange = LayoutInfo(msgspec.Raw(NO_LAYOUTS["a negative size"]))
    server.handle(hello(reader), sender="b", now=0.0)
    server.handle(strange, sender="b", now=0.0)
    answers = server.handle(report(1, layout=strange.digest(), call=called(1, "replicate")), sender="b", now=0.0)
    server.check_invariants()
    errors = [answer.answer.error for _, answer in answers if isinstance(answer, Orders) and answer.answer]
    assert [error.code for error in errors if error] == ["layout-mismatch"]
    assert "differ from those of version 1" in errors[0].message
