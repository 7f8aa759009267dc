"""For any tensors at all: the stream is their memory, each byte once, and nothing else makes the layout."""

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub.memory.digests import ALGORITHM, build_manifest, digest
from tensorhub.memory.registration import Registration, register

Image = Callable[[Registration], bytes]
Views = list[tuple[int, int, int, bool]]  # storage, start, stop in elements of 4 bytes, transposed

fast = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def views_of_storages(draw: st.DrawFn) -> tuple[list[int], Views]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    views: Views = []
    for _ in range(draw(st.integers(1, 12))):
        storage = draw(st.integers(0, len(sizes) - 1))
        start = draw(st.integers(0, sizes[storage]))
        views.append((storage, start, draw(st.integers(start, sizes[storage])), draw(st.booleans())))
    return sizes, views


def build(sizes: list[int], views: Views) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    storages = [np.random.default_rng(index).integers(0, 1 << 32, size, np.uint32) for index, size in enumerate(sizes)]
    tensors = {}
    for index, (storage, start, stop, is_transposed) in enumerate(views):
        view = storages[storage][start:stop]
        if is_transposed and view.size % 2 == 0:
            view = view.reshape(2, -1).T
        tensors[f"t{index}"] = view
    return storages, tensors


@fast
@given(views_of_storages())
def test_the_stream_covers_each_registered_byte_once(image: Image, made: tuple[list[int], Views]) -> None:
    sizes, views = made
    _, tensors = build(sizes, views)
    registration = register(tensors)
    covered = {(storage, at) for storage, start, stop, _ in views for at in range(start, stop)}
    assert registration.size_bytes == 4 * len(covered)
    addresses = [a for piece in registration.pieces for a in range(piece.address, piece.address + piece.size_bytes)]
    assert len(set(addresses)) == len(addresses) == registration.size_bytes
    at = 0
    for piece in registration.pieces:
        assert piece.start == at
        at = piece.stop
    stream = image(registration)
    for spec, tensor in zip(registration.layout.tensors, tensors.values(), strict=True):
        assert stream[spec.offset_bytes : spec.offset_bytes + spec.size_bytes] == tensor.T.tobytes(order="A")


@fast
@given(views_of_storages())
def test_a_stream_s_image_written_elsewhere_gives_equal_tensors(
    image: Image, put: Callable[[object, int, bytes], None], made: tuple[list[int], Views]
) -> None:
    storages, tensors = build(*made)
    others, copies = build(*made)
    for other in others:
        other[:] = 0
    source, target = register(tensors), register(copies)
    assert source.layout == target.layout
    data = image(source)
    third = len(data) // 3
    for start, stop in [(third, 2 * third), (2 * third, len(data)), (0, third)]:
        put(target.stream, start, data[start:stop])
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, copies[name])
    covered = {(storage, at) for storage, start, stop, _ in made[1] for at in range(start, stop)}
    for index, (storage, other) in enumerate(zip(storages, others, strict=True)):
        for at in range(storage.size):
            assert other[at] == (storage[at] if (index, at) in covered else 0), (
                "a byte that is not registered was written"
            )


@fast
@given(views_of_storages(), st.data())
def test_any_range_is_that_part_of_the_whole(image: Image, made: tuple[list[int], Views], data: st.DataObject) -> None:
    registration = register(build(*made)[1])
    whole = image(registration)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    with registration.stream.reading(start, stop) as views:
        assert all(view.nbytes and view.format == "B" for view in views)
        assert b"".join(views) == whole[start:stop]


@fast
@given(views_of_storages(), st.integers(1, 200), st.data())
def test_a_root_changes_with_any_byte(made: tuple[list[int], Views], chunk_bytes: int, data: st.DataObject) -> None:
    registration = register(build(*made)[1])
    before = build_manifest(registration, chunk_bytes, threads=1)
    assert before.algorithm == ALGORITHM
    if not registration.size_bytes:
        return
    at = data.draw(st.integers(0, registration.size_bytes - 1))
    with registration.stream.writing(at, at + 1) as views:
        views[0][0] ^= 1 << data.draw(st.integers(0, 7))
    after = build_manifest(registration, chunk_bytes, threads=1)
    assert after.root() != before.root()
    assert [c for c in range(before.chunk_count) if before.digest_of(c) != after.digest_of(c)] == [at // chunk_bytes]


@fast
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_a_digest_does_not_depend_on_how_bytes_are_cut(parts: list[bytes]) -> None:
    assert digest([memoryview(part) for part in parts]) == digest([memoryview(b"".join(parts))])
