"""Filling registered tensors: what is accepted, what is refused and whose fault it is, and how a fill goes on."""

import weakref

import msgspec
import numpy as np
import pytest

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.registration import Registration, register
from tensorhub.protocol.errors import CorruptTransfer, InvariantViolation, LayoutMismatch, SessionLost, UsageError
from tensorhub.protocol.manifest import Manifest

from .kit import image_of, scatter

CHUNK = 1000


def tensors(seed: int | None) -> dict[str, np.ndarray]:
    """Equal shapes each time; random bytes from a seed, zeros without."""
    shapes = {"a": (37, 11), "b": (), "c": (0, 4), "d": (2000,)}
    if seed is None:
        return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def source() -> Registration:
    return register(tensors(7))


@pytest.fixture
def manifest(source: Registration) -> Manifest:
    return build_manifest(source, CHUNK)


@pytest.fixture
def filled() -> dict[str, np.ndarray]:
    return tensors(None)


def move(source: Registration, sink: FillSink, chunk: int, *, flip: int | None = None) -> None:
    """What a transport does with one chunk; `flip` damages this byte of it on the way."""
    start, stop = chunk * sink.chunk_bytes, min((chunk + 1) * sink.chunk_bytes, sink.stream.size_bytes)
    with source.stream.views_to_read(start, stop) as given:
        data = bytearray(b"".join(given))
    if flip is not None:
        data[flip] ^= 1
    with sink.stream.views_to_write(start, stop) as views:
        scatter(data, views)
        sink.accept(chunk, views)
    sink.stored(chunk)


def test_a_fill_gives_the_source_s_bytes(
    source: Registration, manifest: Manifest, filled: dict[str, np.ndarray]
) -> None:
    target, prefixes = register(filled), []
    sink = FillSink(target, manifest.root(), on_stored=prefixes.append)
    wanted = sink.begin(manifest.encode())
    assert list(wanted) == list(range(manifest.chunk_count))
    assert sink.chunk_bytes == CHUNK
    for chunk in reversed(wanted):
        move(source, sink, chunk)
    assert image_of(target) == image_of(source)
    assert np.array_equal(filled["a"], tensors(7)["a"])
    assert sink.progress.is_complete
    assert prefixes == [0] * (manifest.chunk_count - 1) + [manifest.chunk_count]
    assert build_manifest(target, CHUNK).root() == manifest.root()


def test_a_damaged_chunk_is_named_not_counted_and_wanted_again(
    source: Registration, manifest: Manifest, filled: dict[str, np.ndarray]
) -> None:
    sink = FillSink(register(filled), manifest.root())
    sink.begin(manifest.encode())
    with pytest.raises(
        CorruptTransfer, match=r"chunk 1 \(bytes 1000 to 2000: 'a', 'b', 'd'\) is not what was published"
    ) as caught:
        move(source, sink, 1, flip=999)
    assert manifest.digest_of(1).hex() in str(caught.value)
    assert not sink.progress.has(1)
    with pytest.raises(InvariantViolation):
        sink.stored(1)
    assert 1 in sink.begin(manifest.encode())
    move(source, sink, 1)
    assert sink.progress.has(1)


def test_a_chunk_of_the_wrong_length_or_number_is_corrupt(manifest: Manifest, filled: dict[str, np.ndarray]) -> None:
    for verify in ("full", "none"):
        sink = FillSink(register(filled), manifest.root(), verify=verify)
        sink.begin(manifest.encode())
        with pytest.raises(CorruptTransfer, match="came with 3 B instead of 1000 B"):
            sink.accept(0, [memoryview(b"abc")])
        for chunk in (-1, manifest.chunk_count):
            with pytest.raises(CorruptTransfer, match="was received, of content that has"):
                sink.accept(chunk, [memoryview(bytes(CHUNK))])


def test_other_content_is_refused_before_a_byte_is_written(manifest: Manifest, filled: dict[str, np.ndarray]) -> None:
    other = build_manifest(register(tensors(8)), CHUNK)
    sink = FillSink(register(filled), manifest.root())
    with pytest.raises(CorruptTransfer, match="root digest") as caught:
        sink.begin(other.encode())
    assert other.root() in str(caught.value)
    assert manifest.root() in str(caught.value)
    for nonsense in (b"", b"\xff" * 100, manifest.encode()[:-1]):
        with pytest.raises(CorruptTransfer, match="malformed manifest"):
            sink.begin(nonsense)
    assert len(sink.begin(manifest.encode())) == manifest.chunk_count


def test_another_layout_is_named_by_both_digests(manifest: Manifest) -> None:
    target = register({"a": np.zeros(manifest.size_bytes, dtype=np.uint8)})
    with pytest.raises(LayoutMismatch) as caught:
        FillSink(target, manifest.root()).begin(manifest.encode())
    assert manifest.layout in str(caught.value)
    assert target.layout.digest() in str(caught.value)


def test_unverifiable_content_is_refused_unless_asked_for(source: Registration, filled: dict[str, np.ndarray]) -> None:
    manifest = build_manifest(source, CHUNK, verify="none", salt="trainer/7")
    target = register(filled)
    with pytest.raises(UsageError, match="cannot be verified") as caught:
        FillSink(target, manifest.root()).begin(manifest.encode())
    assert 'verify="none"' in (caught.value.hint or "")
    sink = FillSink(target, manifest.root(), verify="none")
    for chunk in sink.begin(manifest.encode()):
        move(source, sink, chunk)
    assert image_of(target) == image_of(source)


def test_an_algorithm_of_a_newer_release_is_refused(manifest: Manifest, filled: dict[str, np.ndarray]) -> None:
    newer = msgspec.structs.replace(manifest, algorithm="xxh9-128")
    with pytest.raises(UsageError, match="xxh9-128"):
        FillSink(register(filled), newer.root()).begin(newer.encode())


def test_a_new_sink_takes_over_the_progress_of_a_revoked_one(
    source: Registration, manifest: Manifest, filled: dict[str, np.ndarray]
) -> None:
    target = register(filled)
    first = FillSink(target, manifest.root())
    first.begin(manifest.encode())
    move(source, first, 0)
    with first.stream.views_to_write(CHUNK, 2 * CHUNK) as late:
        first.revoke(SessionLost("the lease has ended"))
        for call in (lambda: first.accept(1, late), lambda: first.stored(0), lambda: first.begin(manifest.encode())):
            with pytest.raises(SessionLost):
                call()
    second = FillSink(target, manifest.root(), progress=lambda count: first.progress)
    assert list(second.begin(manifest.encode())) == list(range(1, manifest.chunk_count))


@pytest.mark.usefixtures("no_collector")
def test_what_ran_into_a_revoked_sink_is_not_held_by_it(
    source: Registration, manifest: Manifest, filled: dict[str, np.ndarray]
) -> None:
    sink = FillSink(register(filled), manifest.root())
    sink.revoke(SessionLost("the lease has ended", hint="ask again"))

    class Read:
        def go_on(self) -> None:
            sink.begin(manifest.encode())

    def read_once() -> "weakref.ref[Read]":
        read = Read()
        with pytest.raises(SessionLost, match="the lease has ended") as caught:
            read.go_on()
        assert caught.value.hint == "ask again"
        del caught
        return weakref.ref(read)

    assert read_once()() is None
