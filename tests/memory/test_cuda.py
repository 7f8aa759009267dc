"""Registered memory on a real CUDA device."""

import ctypes
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import xxhash
from msgspec.structs import replace

from tensorhub.cli.doctor import _Child
from tensorhub.memory import cuda, cuda_device
from tensorhub.memory.cuda import CudaStream
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import HostMemory, check_filled, copy_directly, pinned_bytes
from tensorhub.memory.registration import Registration, register
from tensorhub.memory.streams import StagingRing
from tensorhub.memory.xxh3 import MIN_BYTES, Chunks, Spans
from tensorhub.protocol.errors import CorruptTransfer
from tensorhub.protocol.layout import Box
from tensorhub.reshard.grid import Cutting, table_of, tiles_of
from tensorhub.reshard.plan import Source, derive_manifest
from tensorhub.reshard.read import Across
from tensorhub.reshard.wire import grid_digest, layout_digest, publish_tiled_shard
from tensorhub.transport.cuda import Pages, Ring
from tensorhub.transport.sealed import Sealed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def tensors(device: str, *, is_zero: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    made = {"big": torch.randn(3_000_000), "half": torch.randn(33, 77).bfloat16().t(), "host": torch.randn(1000)}
    made |= {f"t{index}": torch.randn(index % 5) for index in range(500)}
    placed = {name: tensor if name == "host" else tensor.to(device) for name, tensor in made.items()}
    return {name: tensor.zero_() if is_zero else tensor for name, tensor in placed.items()}


def test_the_digest_waits_for_kernels_that_still_run() -> None:
    weight = torch.zeros(1 << 22, device="cuda")
    registration = register({"w": weight})
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    weight += 1
    assert build_manifest(registration, 1 << 20) == build_manifest(register({"w": torch.ones(1 << 22)}), 1 << 20)


def test_four_threads_fill_a_device_and_a_bad_chunk_is_found_there() -> None:
    source, target_tensors = register(tensors("cpu")), tensors("cuda", is_zero=True)
    target = register(target_tensors)
    manifest = build_manifest(source, 1 << 18)
    sink = FillSink(target, manifest.root())
    wanted = sink.begin(manifest.encode())

    def move(chunk: int, *, is_bad: bool = False) -> None:
        start, stop = manifest.chunk_range(chunk)
        with source.stream.views_to_read(start, stop) as given:
            data = b"".join(given)
        with target.stream.views_to_write(start, stop) as views:
            at = 0
            for view in views:
                view[:] = bytes(view.nbytes) if is_bad else data[at : at + view.nbytes]
                at += view.nbytes
            sink.accept(chunk, views)
        sink.stored(chunk)

    target_tensors["big"][:1000] = 7.0
    torch.cuda.synchronize()
    with pytest.raises(CorruptTransfer):
        move(0, is_bad=True)
    assert bool((target_tensors["big"][:1000] == 0.0).all()), "it was judged where it lies"
    assert not sink.progress.has(0)
    threads = [threading.Thread(target=lambda w: [move(c) for c in wanted[w::4]], args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sink.progress.is_complete
    for name, expected in tensors("cpu").items():
        assert torch.equal(target_tensors[name].cpu(), expected)


def test_many_small_tensors_come_and_go_in_few_copies(image: Callable[[Registration], bytes]) -> None:
    made = {f"t{at}": torch.arange(1024, device="cuda") + at for at in range(2000)}
    source, target = register(made), register({name: torch.zeros_like(tensor) for name, tensor in made.items()})
    right = image(source)
    assert right == b"".join(tensor.cpu().numpy().tobytes() for tensor in made.values())
    chunk_bytes = 1 << 22
    for start in range(0, source.size_bytes, chunk_bytes):
        stop = min(start + chunk_bytes, source.size_bytes)
        with target.stream.views_to_write(start, stop) as views:
            at = start
            for view in views:
                view[:] = right[at : at + view.nbytes]
                at += view.nbytes
    assert image(target) == right


def test_streams_of_this_library_are_its_own_and_of_the_lowest_priority() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mine = cuda_device.stream_of(device, "to host")
    assert isinstance(mine, torch.cuda.ExternalStream)
    assert mine.priority == 0
    assert mine.cuda_stream not in {torch.cuda.Stream().cuda_stream for _ in range(64)}  # type: ignore[no-untyped-call]
    assert mine is cuda_device.stream_of(device, "to host")


def test_addresses_without_memory_are_told_from_others() -> None:
    registration = register(tensors("cuda"))
    assert cuda._can_tell("cuda:0")
    assert cuda.unmapped(registration.pieces) == []
    driver, reserved, size_bytes = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_size_t(2 << 20)
    nothing = ctypes.c_uint64(0)
    assert driver.cuMemAddressReserve(ctypes.byref(reserved), size_bytes, ctypes.c_size_t(0), nothing, nothing) == 0
    try:
        piece = replace(registration.pieces[0], address=reserved.value)
        assert cuda.unmapped([piece]) == [piece], "as an engine's that sleeps"
    finally:
        driver.cuMemAddressFree(reserved, size_bytes)


def test_a_block_larger_than_a_slot_takes_several(image: Callable[[Registration], bytes]) -> None:
    registration = register({"w": torch.arange(100_000, device="cuda")})
    stream = CudaStream(registration.pieces, StagingRing(1 << 16, 13))
    with stream.views_to_read(0, 800_000) as views:
        assert b"".join(views) == torch.arange(100_000).numpy().tobytes()


def test_the_device_makes_the_digests_of_the_host() -> None:
    assert cuda_device.why_not(torch.cuda.current_device()) is None
    on_device, on_host = register(tensors("cuda")), register(tensors("cpu"))
    assert on_device.device == "cpu+cuda:0"
    assert isinstance(on_device.stream, CudaStream)
    for chunk_bytes in (1 << 20, 100_000, 4096):
        theirs = build_manifest(on_host, chunk_bytes)
        assert on_device.stream.device_digests(chunk_bytes), "hashed where it is"
        assert build_manifest(on_device, chunk_bytes) == theirs


def test_every_length_has_the_digest_of_the_host() -> None:
    whole = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    there = whole.cuda()
    for size_bytes in range(MIN_BYTES + 1):  # what is shorter than the long path of xxh3 is the host's
        given = register({"w": there[:size_bytes]}), register({"w": whole[:size_bytes]})
        assert build_manifest(given[0], 4096) == build_manifest(given[1], 4096), size_bytes
    for size_bytes in [*range(MIN_BYTES, 5001), *(k * 1024 + d for k in (8, 16, 64, 1023) for d in (-1, 0, 1, 64))]:
        inside = size_bytes % 17
        spans = Spans([0], [there.data_ptr() + inside], size_bytes)
        found = cuda_device.device_digests(0, spans, Chunks(0, size_bytes, size_bytes))
        assert found == xxhash.xxh3_128_digest(whole[inside : inside + size_bytes].numpy().tobytes()), size_bytes


@pytest.mark.parametrize("is_pinned", [False, True])
def test_bytes_go_through_a_ring(is_pinned: bool) -> None:
    given = register({f"t{index}": torch.randn(1000 * index + 7, device="cuda") for index in range(60)})
    taken = register({f"t{index}": torch.zeros(1000 * index + 7, device="cuda") for index in range(60)})
    assert isinstance(given.stream, CudaStream)
    assert isinstance(taken.stream, CudaStream)
    chunk_bytes, slot_bytes, size_bytes = 1 << 16, 1 << 20, given.stream.size_bytes
    pages = Pages(2 * slot_bytes) if is_pinned else None
    if pages is None:
        memory = given.stream.make_ring(2 * slot_bytes)
    else:
        memory = given.stream.pin_ring(pages.address, 2 * slot_bytes)
    ring = Ring(memory, slot_bytes, 2, pages)
    digests = b""
    for start in range(0, size_bytes, slot_bytes):
        stop = min(start + slot_bytes, size_bytes)
        slot = ring.next(start, stop)
        given.stream.copy_to(slot, start, stop, chunk_bytes)
        digests += taken.stream.copy_from(slot, start, stop, chunk_bytes, digests=True)
    ring.close()
    assert b"".join(each for _, each in given.stream.device_digests(chunk_bytes)) == digests
    assert build_manifest(taken, chunk_bytes) == build_manifest(given, chunk_bytes)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("allocator", "path"),
    [
        ("backend:native", "device to device"),
        ("backend:cudaMallocAsync", "device to device, through a ring on the device"),
    ],
)
def test_processes_read_from_each_other_by_the_way_that_their_memory_allows(allocator: str, path: str) -> None:
    before = torch.cuda.mem_get_info()[0]
    source = _Child("source", "cuda", str(1 << 28), environ={"PYTORCH_CUDA_ALLOC_CONF": allocator})
    with source, _Child("reader", "cuda") as reader:
        reader.tell(source.answer(60.0))
        found = reader.answer(60.0)
    assert found.get("path") == path, found
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20), "the device's memory is given back"


def scattered(memory: torch.Tensor, size_bytes: int, mean_bytes: int, rng: random.Random) -> tuple[Spans, list[slice]]:
    """A stream that lies in pieces of `memory`, with gaps between them, at any alignment."""
    starts, places, at, used = [], [], 0, 0
    while at < size_bytes:
        length = min(rng.randint(1, 2 * mean_bytes), size_bytes - at)
        used += rng.randint(0, 40)
        starts.append(at)
        places.append(slice(used, used + length))
        at, used = at + length, used + length
    assert used <= memory.nbytes
    return Spans(starts, [memory.data_ptr() + place.start for place in places], size_bytes), places


@pytest.mark.parametrize("chunk_bytes", [4096, 100_003, 1 << 20])
@pytest.mark.parametrize("mean_bytes", [30, 3000, 300_000])
def test_what_lies_in_many_segments_is_copied_and_digested(mean_bytes: int, chunk_bytes: int) -> None:
    size_bytes, rng = 3_000_001, random.Random(mean_bytes + chunk_bytes)
    memory = torch.randint(0, 256, (6 * size_bytes,), dtype=torch.uint8, device="cuda")
    other = torch.full_like(memory, 0xEE)
    source, places = scattered(memory, size_bytes, mean_bytes, rng)
    target, others = scattered(other, size_bytes, 3 * mean_bytes, rng)
    torch.cuda.synchronize()
    found = cuda_device.device_digests(0, source, Chunks(0, size_bytes, chunk_bytes), target)
    host, copied = memory.cpu().numpy(), other.cpu().numpy()
    data = b"".join(host[place].tobytes() for place in places)
    expected = [data[at : at + chunk_bytes] for at in range(0, size_bytes, chunk_bytes)]
    assert [found[16 * at :][:16] for at, each in enumerate(expected) if len(each) >= MIN_BYTES] == [
        xxhash.xxh3_128_digest(each) for each in expected if len(each) >= MIN_BYTES
    ]
    assert b"".join(copied[place].tobytes() for place in others) == data
    for place in others:
        copied[place] = 0xEE
    assert bool((copied == 0xEE).all()), "nothing beside the target was written"


def test_windows_that_run_beside_each_other_do_not_disturb_each_other() -> None:
    size_bytes, chunk_bytes = (5 << 28) + 12_345, 4 << 20  # two windows and a half
    whole = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda")
    spans = Spans([0], [whole.data_ptr()], size_bytes)
    data = memoryview(whole.cpu().numpy())
    expected = b"".join(xxhash.xxh3_128_digest(data[at : at + chunk_bytes]) for at in range(0, size_bytes, chunk_bytes))
    for _ in range(20):
        assert cuda_device.device_digests(0, spans, Chunks(0, size_bytes, chunk_bytes)) == expected


def test_two_threads_and_the_kernels_of_the_user_go_side_by_side() -> None:
    """Each thread meets the device for the first time."""
    whole = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    spans, chunks = Spans([0], [whole.data_ptr()], whole.nbytes), Chunks(0, whole.nbytes, 1 << 20)
    expected = cuda_device.device_digests(0, spans, chunks)
    found: list[bytes] = []
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    threads = [
        threading.Thread(target=lambda: found.append(cuda_device.device_digests(0, spans, chunks))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [expected] * 2


def test_a_host_copy_is_registered_copied_both_ways_frozen_and_given_back() -> None:
    """Freezing maps the same pages anew, while they are registered."""
    made = tensors("cuda")
    registration = register(made)
    stream, manifest = registration.stream, build_manifest(registration, 1 << 18)
    assert isinstance(stream, CudaStream)
    pool = HostMemory(registration, None)
    copy = pool.take()

    def move(copy: Registration, *, to_host: bool) -> bool:
        nothing = lambda start, stop: None  # noqa: E731
        return copy_directly(stream, copy, pool, 1 << 18, to_host=to_host, on_chunk=nothing, is_over=lambda: False)

    assert move(copy, to_host=True), pool.why_pageable
    assert build_manifest(copy, 1 << 18) == manifest
    assert pinned_bytes() == registration.size_bytes
    owner = copy.pieces[0].owners[0]
    assert isinstance(owner, Sealed)
    assert owner.freeze()
    for tensor in made.values():
        tensor.zero_()
    registration.settle()
    assert move(copy, to_host=False), pool.why_pageable
    fill = FillSink(registration, manifest.root())
    fill.begin(manifest.encode())
    check_filled(fill, stream, copy.stream)
    assert build_manifest(registration, 1 << 18) == manifest
    pool.give(copy)
    del copy, owner
    assert not pinned_bytes()
    torch.zeros(1, device="cuda").add_(1).item()  # the device is as it was


def test_memory_is_prepared_in_the_background_and_copied_at_the_bus_rate() -> None:
    weight = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    registration = register({"w": weight})
    stream, manifest = registration.stream, build_manifest(registration, 4 << 20)
    assert isinstance(stream, CudaStream)
    pool = HostMemory(registration, None)
    pool.prepare(stream.registrar())
    assert pool._preparing is not None
    pool._preparing.join()
    assert pinned_bytes() == 1 << 30, pool.why_pageable
    copy, rates = pool.take(), []
    fill = FillSink(copy, manifest.root())
    fill.begin(manifest.encode())

    def look(start: int, stop: int) -> None:
        with copy.stream.views_to_read(start, stop) as views:
            fill.accept(start // manifest.chunk_bytes, views)

    for to_host in (True, False) * 2:
        began, each = time.monotonic(), look if to_host else lambda start, stop: None
        assert copy_directly(stream, copy, pool, 4 << 20, to_host=to_host, on_chunk=each, is_over=lambda: False)
        if not to_host:
            check_filled(fill, stream, copy.stream)
        rates.append(1 / (time.monotonic() - began))
    print(f"GiB/s to the host, back, and again: {', '.join(f'{rate:.1f}' for rate in rates)}")


SHAPE = (3000, 1026)  # a row of the right half is 1026 bytes long


@pytest.mark.parametrize("is_turned", [False, True], ids=["columns", "transposed columns"])
def test_rows_of_two_shards_become_columns_of_one(is_turned: bool) -> None:
    torch.manual_seed(6)
    whole = torch.randint(-9999, 9999, SHAPE, dtype=torch.int16)
    rows = [register({"w": part.cuda()}) for part in (whole[:1700], whole[1700:])]
    boxes = [Box("w", SHAPE, (at, 0), (size, 1026), 0, (1026, 1)) for at, size in ((0, 1700), (1700, 1300))]
    here = torch.zeros((513, 3000) if is_turned else (3000, 513), dtype=torch.int16, device="cuda")
    reader = register({"w": here})
    mine = Box("w", SHAPE, (0, 513), (3000, 513), 0, (1, 3000) if is_turned else (513, 1))
    tables = [table_of(its.layout, {"w": [box]}) for its, box in zip(rows, boxes, strict=True)]
    table = table_of(reader.layout, {"w": [mine]})
    cutting = Cutting(1 << 18, fewest_tiles=1 << 20)
    for its in tables:
        cutting.add_publisher(its)
    cutting.add_other(table)
    grid = cutting.grid()
    cuts = [publish_tiled_shard(its, tiles_of(cut, grid)) for its, cut in zip(rows, tables, strict=True)]
    sources = [Source(f"trainer[{at}]", cut.table, cut.manifest) for at, cut in enumerate(cuts)]
    tiles = tiles_of(table, grid)
    manifest = derive_manifest(tiles, sources, layout=layout_digest(table), grid=grid_digest(grid))
    for tile_sink in Across(reader, tiles, manifest).tile_sinks(sources):
        ends = [its.stream._cuda.spans()[0][1] for its in (rows[tile_sink.number], reader)]
        terms = tile_sink.terms()
        landing = cuda_device.CudaLanding(0, lambda: None, *ends, tile_sink.batches, terms.scatter, is_hashing=True)
        half = len(tile_sink.batches) // 2
        landing.gather(range(half))
        landing.gather(range(half, len(tile_sink.batches)))
        assert landing.digests() == terms.digests[: 16 * terms.scatter.first_tile[half]]
        landing.scatter()
        assert landing.digests() == terms.digests[16 * terms.scatter.first_tile[half] :]
        landing.scatter()
        landing.close()
    assert torch.equal((here.t() if is_turned else here).cpu(), whole[:, 513:])
