"""Reads from memory that the source hands over: when it is mapped, when it is not, and what a lying source can do."""

import ctypes
import os
import random
import resource
import socket
import threading
from array import array
from collections.abc import Sequence
from functools import partial

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport import sealed
from tensorhub.transport.base import Terms
from tensorhub.transport.local import memory, transport
from tensorhub.transport.local.memory import Seal
from tensorhub.transport.sealed import Sealed, Unmappable
from tensorhub.transport.tcp.wire import HEADER, Wire

from . import kit
from .kit import DEADLINE_S, MIB, Local, Target, content, full, read_all, start_read

pytestmark = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
CHUNK = 64 * 1024
SIZE = 40 * CHUNK + 777


@pytest.fixture
def local(local: Local) -> Local:
    kit.use(kit.KINDS["local-mapped-3"])
    return partial(local, thread_bytes=1024)


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:tensorhub" in line for line in file)


def way_of(local: Local, **reader: object) -> str:
    """Read all of it, and how that was done."""
    right = content(SIZE)
    source, target = local(), Target(right, CHUNK)
    source.export(full("k", right, CHUNK))
    read, ended = start_read(local(**reader), source.endpoint, "k", target)
    assert ended.wait() is None
    assert target.buffer == right
    return read.path.partition(",")[0]


def test_what_can_be_mapped_is_unless_the_reader_would_not(local: Local) -> None:
    assert way_of(local) == "mapped"
    assert way_of(local, maps=False) == "process_vm_readv"


def test_a_reader_without_descriptors_does_without(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops what there is no room for, and says so."""
    before, came = resource.getrlimit(resource.RLIMIT_NOFILE), list[list[int]]()

    def short(wire: Wire, received: memory.Received) -> tuple[int, int, int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            header = memory.receive_header(wire, received)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        came.append(list(received.descriptors()))
        return header

    monkeypatch.setattr(transport, "receive_header", short)
    assert way_of(local) == "process_vm_readv"
    assert came
    assert not any(came), "with a second stream or, where the first has brought all by then, without"


def test_a_source_that_can_send_no_descriptor_hands_nothing_over(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def sendmsg(self, *_: object) -> int:
            raise OSError(109, "too many references")

    def offer(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
        sock, wire.sock = wire.sock, Full()  # type: ignore[assignment]
        try:
            memory.offer(wire, seal, regions)
        finally:
            wire.sock = sock

    def none(size_bytes: int) -> Sealed:
        raise Unmappable("no descriptor left")

    monkeypatch.setattr(transport, "offer", offer)
    assert way_of(local) == "process_vm_readv"
    monkeypatch.setattr(transport, "Sealed", none)
    assert way_of(local) == "process_vm_readv"


# -- sources that lie --------------------------------------------------------------------------------------------------


def send(wire: Wire, body: bytes, descriptors: Sequence[int]) -> None:
    frame = HEADER.pack(memory.MAPPED, len(body), 0) + body
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    wire.sock.sendmsg([frame], control)


def file_of(size: int, seals: int) -> int:
    descriptor = os.memfd_create("lie", sealed.ALLOW_SEALING | sealed.CLOEXEC)
    os.ftruncate(descriptor, size)
    if seals:
        sealed.fcntl.fcntl(descriptor, sealed.ADD_SEALS, seals)
    return descriptor


def regions_body(seal: Seal, regions: Sequence[Sealed], grown: int = 0) -> bytes:
    pairs = [memory.REGION.pack(each.address, each.size_bytes + grown) for each in regions]
    return seal.value + b"".join(pairs)


def unsealed(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    lie = file_of(regions[0].size_bytes, 0)
    send(wire, regions_body(seal, regions), [seal.page.descriptor, lie])  # type: ignore[union-attr]
    os.ftruncate(lie, 0)
    os.close(lie)


def too_long(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    send(wire, regions_body(seal, regions, 1 << 62), [seal.page.descriptor, regions[0].descriptor])  # type: ignore[union-attr]


def no_seal_page(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    lie = file_of(0, sealed.SEAL_SHRINK)
    send(wire, regions_body(seal, regions), [lie, regions[0].descriptor])
    os.close(lie)


def too_many(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    send(wire, regions_body(seal, regions), [regions[0].descriptor] * 100)


def none_at_all(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    send(wire, regions_body(seal, regions), [])


def test_what_is_no_such_memory_is_left(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stays alive, keeps nothing of it, and reads as it would have without."""
    for lie in (unsealed, too_long, no_seal_page, too_many, none_at_all):
        monkeypatch.setattr(transport, "offer", lie)
        assert way_of(local) == "process_vm_readv", lie


def elsewhere(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    """Good memory, which the content is not in."""
    other = Sealed(4096)
    memory.offer(wire, seal, [other])


def broken_seal(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    seal.break_()
    memory.offer(wire, seal, regions)


def huge_frame(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
    wire.sock.sendmsg([HEADER.pack(memory.MAPPED, 1 << 31, 0)])


def test_who_contradicts_himself_is_left(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    right, source = content(SIZE), local()
    for lie in (elsewhere, broken_seal, huge_frame):
        monkeypatch.setattr(transport, "offer", lie)
        source.export(full("k", right, CHUNK))
        target = Target(right, CHUNK)
        assert isinstance(read_all(local(silence_s=0.5), source.endpoint, "k", target), SourceLost), lie
        assert not any(target.buffer)


def test_another_content_is_corrupt_and_never_counts(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed memory of the right size with other bytes: the digests decide."""
    right, source = content(SIZE), local()
    wrong = Sealed(SIZE)

    def offer(wire: Wire, seal: Seal, regions: Sequence[Sealed]) -> None:
        body = regions_body(seal, regions)
        send(wire, body, [seal.page.descriptor, wrong.descriptor])  # type: ignore[union-attr]

    monkeypatch.setattr(transport, "offer", offer)
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    error = read_all(local(), source.endpoint, "k", target)
    assert error is not None
    assert error.code == "corrupt-transfer"
    assert target.progress.prefix == 0
    assert not target.order


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_a_mapping_lasts_as_long_as_its_read(local: Local) -> None:
    right = content(SIZE)
    source, reader = local(), local()
    export = full("k", right, CHUNK)
    before = kit.Progress(export.progress.chunk_count)
    source.export(kit.Export("k", b"manifest", CHUNK, export.stream, before))
    mine = mappings()
    for ending in ("stop", "withdraw", "whole"):
        target = Target(right, CHUNK)
        here = mappings()
        read, ended = start_read(reader, source.endpoint, "k", target)
        kit.until(lambda read=read: read.path.startswith("mapped"), "it is mapped")  # type: ignore[misc]
        assert mappings() > here or ending == "whole"
        if ending == "stop":
            read.stop()
            assert ended.wait() is None
        elif ending == "withdraw":
            assert source.withdraw("k", timeout_s=DEADLINE_S)
            assert isinstance(ended.wait(), SourceLost)
            source.export(full("k", right, CHUNK))
        else:
            assert ended.wait() is None
            assert target.buffer == right
    assert mappings() <= mine + 2, "only the last target, and the page with the last export's seal"


class Unchecked(Target):
    """A sink that takes bytes as they come: only the seal keeps wrong ones out."""

    def terms(self) -> Terms | None:
        self.told_bytes = 0
        return Terms(None, self.progress, (self.stop_flag,))

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        """Anything."""


def test_what_nobody_checks_is_the_same(local: Local) -> None:
    """Without digests bytes are copied in the same way, into pieces of any length that begin anywhere."""
    right, source, reader = content(SIZE), local(), local()
    source.export(full("k", right, CHUNK))
    for piece_bytes in (0, 1001, 130):
        target = Unchecked(right, CHUNK, piece_bytes=piece_bytes)
        read, ended = start_read(reader, source.endpoint, "k", target)
        assert ended.wait() is None
        assert read.path.startswith("mapped")
        assert target.buffer == right


def test_what_is_overwritten_after_withdraw_never_counts(local: Local) -> None:
    """Round after round somebody reads, and is overtaken by the owner at another moment."""
    right, chance = content(2 * MIB), random.Random(7)
    good = bytes(right)
    source, reader = local(), local()
    address = ctypes.addressof(ctypes.c_char.from_buffer(right))
    stored = 0
    for _ in range(20):
        source.export(full("k", right, CHUNK))
        target = Unchecked(right, CHUNK)
        _, ended = start_read(reader, source.endpoint, "k", target)
        assert target.progress.wait(chance.randrange(30), DEADLINE_S)
        assert source.withdraw("k", timeout_s=DEADLINE_S)
        ctypes.memset(address, 0xEE, len(right))
        ended.wait()
        for chunk in range(target.progress.chunk_count):
            if target.progress.has(chunk):
                part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                assert bytes(target.buffer[part]) == good[part]
                stored += 1
        right[:] = good
    assert stored, "some got something"


def test_a_writer_that_does_not_wait_gets_nothing_wrong_accepted(local: Local) -> None:
    """An owner that breaks its word and writes while it is read: what counts is what was announced."""
    right = content(SIZE)
    good = bytes(right)
    source, reader = local(), local()
    address, is_over = ctypes.addressof(ctypes.c_char.from_buffer(right)), threading.Event()

    def spoil() -> None:
        chance = random.Random(3)
        while not is_over.is_set():
            at = chance.randrange(SIZE)
            ctypes.memset(address + at, good[at] ^ 1, 1)
            ctypes.memset(address + at, good[at], 1)

    target_of = [Target(right, CHUNK) for _ in range(20)]
    writer = threading.Thread(target=spoil)
    writer.start()
    try:
        for target in target_of:
            source.export(full("k", right, CHUNK))
            read_all(reader, source.endpoint, "k", target)
            for chunk in target.order:
                part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                assert bytes(target.buffer[part]) == good[part]
    finally:
        is_over.set()
        writer.join()
