"""Copying to a host copy without the interpreter: the same bytes and the same errors as by Python."""

import threading

import numpy as np
import pytest

from bench.lab.interpreter import hold
from tensorhub.memory import host_copies
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import HostMemory, on_host
from tensorhub.memory.registration import Registration, register
from tensorhub.memory.room import SPARE_BYTES, STEP_BYTES, Room
from tensorhub.memory.streams import Freed
from tensorhub.protocol.errors import Closed, CorruptTransfer, HostMemoryFull
from tensorhub.transport.native import load

pytestmark = pytest.mark.skipif(load.library() is None, reason=f"no native mover: {load.why_not()}")

CHUNK_BYTES = 64 * 1024


def tensors(*sizes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {f"t{at}": random.integers(0, 256, size, dtype=np.uint8) for at, size in enumerate(sizes)}


def offload(
    source: Registration, target: Registration, *, manifest=None, verify: bool = True, is_over=lambda: False
) -> bool:
    """As `runtime.copies` does it."""
    found = manifest if manifest is not None else build_manifest(source, CHUNK_BYTES)
    assert host_copies.can_offload(source.stream, target.stream, found)
    sink = FillSink(target, found.root())
    sink.begin(found.encode())
    return host_copies.offload(source.stream, target.stream, found, verify=verify, judge=sink.accept, is_over=is_over)


def content(registration: Registration) -> bytes:
    with registration.stream.reading(0, registration.size_bytes) as views:
        return b"".join(views)


@pytest.mark.parametrize(
    "sizes", [(1,), (CHUNK_BYTES,), (3 * CHUNK_BYTES + 17, 5), tuple([4096] * 700), tuple(range(1, 3000))]
)
def test_what_arrives_is_what_was_there(sizes: tuple[int, ...]) -> None:
    source = register(tensors(*sizes))
    target = on_host(source)
    assert offload(source, target)
    assert content(target) == content(source)


@pytest.mark.parametrize("verify", [True, False])
def test_a_byte_that_was_changed_is_named(*, verify: bool) -> None:
    held = tensors(5 * CHUNK_BYTES)
    source = register(held)
    manifest = build_manifest(source, CHUNK_BYTES)
    held["t0"][3 * CHUNK_BYTES + 1] ^= 1
    if verify:
        with pytest.raises(CorruptTransfer, match="chunk 3 "):
            offload(source, on_host(source), manifest=manifest)
    else:
        assert offload(source, on_host(source), manifest=manifest, verify=False)


def test_memory_that_was_freed_is_an_error() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    held = {name: torch.ones(10 << 20) for name in ("kept", "freed")}  # so large that no allocator keeps it
    source = register(held)
    manifest = build_manifest(source, CHUNK_BYTES)
    held["freed"].untyped_storage().resize_(0)
    with pytest.raises((Freed, CorruptTransfer)):
        offload(source, on_host(source), manifest=manifest)


def test_room_is_looked_at_as_it_goes() -> None:
    source = register({"w": np.zeros(3 * STEP_BYTES, dtype=np.uint8)})
    left = [1 << 40]
    looks = []

    def look() -> Room:
        looks.append(None)
        if len(looks) > 2:  # the beginning, and the first part
            left[0] = SPARE_BYTES
        return Room(left[0], "a test's limit")

    target = HostMemory(source, None, look=look).take()
    with pytest.raises(HostMemoryFull):
        offload(source, target, manifest=build_manifest(source, STEP_BYTES // 4))


def test_a_copy_that_is_given_up_ends() -> None:
    source = register(tensors(5 * CHUNK_BYTES))
    with pytest.raises(Closed):
        offload(source, on_host(source), is_over=lambda: True)


def test_it_goes_on_while_another_thread_holds_the_interpreter() -> None:
    """Two thousand chunks within what a chunk each would take, did it wait for the interpreter."""
    source = register(tensors(32 << 20))
    manifest = build_manifest(source, 16 * 1024)
    target = on_host(source)
    turns, is_over = [0], threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            hold(0.005)
            turns[0] += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        before = turns[0]
        assert offload(source, target, manifest=manifest)
        took = turns[0] - before
    finally:
        is_over.set()
        thread.join()
    assert content(target) == content(source)
    assert took < manifest.chunk_count / 4


def test_where_the_kernel_refuses_python_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorhub.transport.native import shapes

    source = register(tensors(CHUNK_BYTES))
    library = load.library()
    monkeypatch.setattr(library, "offload", lambda _: shapes.LOST)
    assert not offload(source, on_host(source))
