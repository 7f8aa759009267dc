"""What the machine wants of memory and transport, with a transport whose every step the test decides."""

import asyncio
import ctypes
import weakref
from dataclasses import replace as replace_fields

import numpy as np
import pytest
from msgspec.structs import replace

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.registration import register
from tensorhub.protocol.errors import HostMemoryFull, SessionLost, SourceLost, TransportMissing
from tensorhub.protocol.messages import Grant, Report, Source
from tensorhub.protocol.names import Digest, Ticket, Version, worker_id
from tensorhub.runtime import content, dataplane
from tensorhub.runtime.connection import decode_to_server, encode
from tensorhub.runtime.content import Meter, Routes
from tensorhub.runtime.dataplane import DataPlane
from tensorhub.runtime.metrics import RATE, READ, Record
from tensorhub.transport import sealed
from tensorhub.transport.local.memory import format_endpoint, here
from tensorhub.transport.sealed import Sealed, Shared
from tensorhub.worker.events import (
    CopiedIn,
    CopyCounted,
    CopyDropped,
    NotShared,
    ReadAdvanced,
    ReadEnded,
    ReadMeasured,
    ReadOpened,
    ReadTouched,
    ServingStopped,
)

needs_sealed = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
ME, SOURCE = worker_id("m", "r", 0), worker_id("m", "t", 0)
CHUNK, CHUNKS = 100, 200


class FakeRead:
    def __init__(self, sink, on_end):
        self.sink, self.on_end = sink, on_end
        self.received_bytes = 0
        self.is_stopped = False

    path = "by hand"

    @property
    def arrived_bytes(self):
        return self.received_bytes

    def stop(self):
        self.is_stopped = True

    def take(self, data, chunk):
        """As a transport does: write, let it be judged, then count it."""
        start, stop = chunk * CHUNK, (chunk + 1) * CHUNK
        self.sink.touch()
        with self.sink.stream.views_to_write(start, stop) as views:
            for view in views:
                view[:] = data[start : start + view.nbytes]
                start += view.nbytes
            self.received_bytes += CHUNK
            self.sink.accept(chunk, views)
        self.sink.stored(chunk)


class FakeTransport:
    def __init__(self):
        self.exports, self.reads, self.withdrawals = {}, [], 0
        self.may_withdraw = True

    endpoint = "fake://here"

    def why_not(self, endpoint):
        return "it is on the moon" if "moon" in endpoint else None

    def export(self, export):
        self.exports[export.key] = export

    def withdraw_unread(self, key):
        return False

    def withdraw(self, key, *, timeout_s):
        self.withdrawals += 1
        if self.may_withdraw:
            self.exports.pop(key, None)
        return self.may_withdraw

    def read(self, endpoint, key, sink, on_end):
        self.reads.append(FakeRead(sink, on_end))
        return self.reads[-1]

    def statistics(self):
        return {"sent_bytes": 5}

    def close(self):
        self.may_withdraw = True


class Story:
    """A data plane in a running loop, what it told, and content to read."""

    def __init__(self):
        self.told = []
        self.transport, self.better = FakeTransport(), FakeTransport()
        transports = {"better": self.better, "fake": self.transport}
        self.data = DataPlane(ME, transports, verify="full", tell=self.told.append)
        self.source = np.random.default_rng(1).integers(0, 256, CHUNK * CHUNKS, dtype=np.uint8)
        self.target = np.zeros(CHUNK * CHUNKS, dtype=np.uint8)
        self.data.registration = register({"w": self.target})
        self.manifest = build_manifest(register({"w": self.source}), CHUNK)
        self.data.trust(float("inf"))

    def grant(self, ticket, *, root=None, endpoints=("fake://there",), source=SOURCE, from_host=False):
        root = self.manifest.root() if root is None else root
        return Grant(Ticket(ticket), Version(3), (Source(source, from_host, endpoints, root),), "why not")

    def start(self, ticket, **options):
        self.data.start_read(self.grant(ticket, **options))
        return self.transport.reads[-1] if self.transport.reads else None

    async def until_ended(self, ticket):
        async with asyncio.timeout(5):
            while ReadEnded(Ticket(ticket)) not in self.told:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until(self, kind):
        async with asyncio.timeout(5):
            while not any(isinstance(event, kind) for event in self.told):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return [event for event in self.told if isinstance(event, kind)]


def shared_memory(data):
    """A whole copy as another worker of this host would hand it over."""
    made = Sealed(data.nbytes, may_freeze=True)
    ctypes.memmove(made.address, data.ctypes.data, data.nbytes)
    assert made.freeze()
    shared = Shared(made.descriptor, data.nbytes)
    return shared, shared.address


def start_to_share(s, ticket=10):
    s.data.register(s.data.registration)
    s.data.start_read(replace(s.grant(ticket, from_host=True), to_host=True, shares=True))
    read = s.transport.reads[-1]
    assert read.sink.shares
    return read


@needs_sealed
async def test_a_host_copy_that_is_shared_is_looked_through_and_served():
    s = Story()
    read = start_to_share(s)
    memory = shared_memory(s.source)
    read.sink.share(*memory)
    assert read.sink.begin(s.manifest.encode()) == ()
    read.on_end(None)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10), complete=True)]
    assert s.transport.exports["m/3/0/host"].progress.is_complete
    assert s.transport.exports["m/3/0/host"].stream.addresses().pairs[0] == memory[1]
    assert not s.target.any()
    assert s.data.received.by_replica == {}
    assert await s.until(CopyCounted) == [CopyCounted(Version(3))]  # who made it has let it go
    told = [type(event) for event in s.told if isinstance(event, ReadEnded | CopyCounted)]
    assert told == [ReadEnded, CopyCounted]  # of a copy that it has not heard of yet the machine would forget it
    assert s.data.copies.used_bytes == s.source.nbytes
    s.data.copy_in(Version(3))
    assert await s.until(CopiedIn) == [CopiedIn(Version(3))]
    assert (s.target == s.source).all()
    s.data.copies.drop(Version(3))
    await s.until(CopyDropped)
    assert s.data.copies.used_bytes == 0


async def test_a_host_copy_that_cannot_be_mapped_is_read_at_once():
    s = Story()
    read = start_to_share(s)
    assert read.sink.begin(s.manifest.encode()) == ()
    assert s.transport.exports == {}
    read.on_end(None)
    assert await s.until(NotShared) == [NotShared(Ticket(10))]
    again = s.transport.reads[-1]
    assert again is not read
    for chunk in again.sink.begin(s.manifest.encode()):
        again.take(s.source, chunk)
    again.on_end(None)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10), complete=True)]
    assert s.transport.exports["m/3/0/host"].progress.is_complete


async def test_a_read_that_could_not_be_mapped_and_has_no_room_is_over(monkeypatch):
    def no_content(*arguments):
        raise HostMemoryFull("no room")

    s = Story()
    monkeypatch.setattr(dataplane, "NO_ROOM_S", 0.01)
    monkeypatch.setattr(s.data.copies, "content", no_content)
    read = start_to_share(s)
    assert read.sink.begin(s.manifest.encode()) == ()
    former = s.data._reading
    read.on_end(None)
    await s.until(NotShared)
    assert not s.data.is_reading
    assert former.measuring.cancelled()
    assert s.data.stop_read(Ticket(10)) is False
    (ended,) = await s.until(ReadEnded)
    assert (ended.complete, ended.failure.code) == (False, "host-memory-full")
    await asyncio.sleep(0)
    assert len([event for event in s.told if isinstance(event, ReadEnded)]) == 1


@needs_sealed
async def test_a_copy_that_cannot_be_looked_through_ends_its_read(monkeypatch):
    s = Story()

    def share(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr(s.data.copies, "map_shared", share)
    read = start_to_share(s)
    read.sink.share(*shared_memory(s.source))
    assert read.sink.begin(s.manifest.encode()) == ()
    read.on_end(None)
    (ended,) = await s.until(ReadEnded)
    assert not ended.complete
    assert "no room" in ended.failure.message


@needs_sealed
@pytest.mark.parametrize("wrong", ["bytes", "told to stop", "lease"])
async def test_a_host_copy_that_does_not_count_is_not_kept(wrong):
    s = Story()
    read = start_to_share(s)
    data = s.source.copy()
    data[777] ^= 1 if wrong == "bytes" else 0
    read.sink.share(*shared_memory(data))
    assert read.sink.begin(s.manifest.encode()) == ()
    if wrong == "lease":
        s.data.trust(float("-inf"))
    read.on_end(None)
    if wrong == "told to stop":
        await asyncio.sleep(0)
        s.data.stop_read(Ticket(10))
    (ended,) = await s.until(ReadEnded)
    assert not ended.complete
    assert (ended.failure.code if ended.failure else "") == ("corrupt-transfer" if wrong == "bytes" else "")
    assert s.transport.exports == {}
    assert s.data.copies.used_bytes == 0
    assert not s.data.is_reading


async def test_a_read_that_fills_everything_is_complete_and_readable_by_others():
    s = Story()
    read = s.start(10)
    assert s.transport.exports == {}
    wanted = read.sink.begin(s.manifest.encode())
    assert s.transport.exports["m/3/0"].progress.prefix == 0  # others may read behind it from now on
    for chunk in wanted:
        read.take(s.source, chunk)
    read.on_end(None)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10), complete=True)]
    assert (s.target == s.source).all()
    assert s.data.received.by_replica == {"t": s.source.nbytes}
    assert s.data.content.manifest == s.manifest
    advances = [event for event in s.told if isinstance(event, ReadAdvanced)]
    assert len(advances) < 10  # not one for each of the 200 chunks
    assert advances[-1] == ReadAdvanced(Ticket(10), CHUNKS, CHUNKS)
    assert s.told.index(advances[-1]) < len(s.told) - 1


async def test_after_many_sources_what_was_received_still_fits_a_report():
    s = Story()
    for ticket in range(1, 41):
        source = worker_id("m", f"policy-rollout-of-pool-7-{ticket:05d}-{'x' * 24}", 0)
        s.data.start_read(s.grant(ticket, source=source))
        s.transport.reads[-1].received_bytes = 2**30
        s.transport.reads[-1].on_end(SourceLost("gone"))
        await asyncio.sleep(0)  # the loop's next turn
        assert not s.data.is_reading
    assert sum(s.data.received.by_replica.values()) == 40 * 2**30
    report = Report(1, received_bytes=s.data.received.by_replica)
    assert decode_to_server(encode(report)) == report


async def test_what_is_only_opened_writes_nothing_and_can_be_opened_here_too():
    s = Story()
    s.data.open_read(s.grant(10))
    (read,) = s.transport.reads
    assert read.sink.begin(s.manifest.encode()) == ()
    assert s.transport.exports["m/3/0"].progress.prefix == 0  # others may open it here
    read.on_end(None)
    assert await s.until(ReadOpened) == [ReadOpened(Ticket(10))]
    assert not s.target.any()
    s.data.start_read(s.grant(10))
    read = s.transport.reads[-1]
    for chunk in read.sink.begin(s.manifest.encode()):
        read.take(s.source, chunk)
    read.on_end(None)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10), complete=True)]
    order = [type(event) for event in s.told if isinstance(event, ReadOpened | ReadTouched | ReadEnded)]
    assert order == [ReadOpened, ReadTouched, ReadEnded]
    assert (s.target == s.source).all()


async def _opened(s):
    """A read that has the manifest, whose thread waits: (the read, what `begin` returns there)."""
    s.data.open_read(s.grant(10))
    (read,) = s.transport.reads
    beginning = asyncio.create_task(asyncio.to_thread(read.sink.begin, s.manifest.encode()))
    assert await s.until(ReadOpened) == [ReadOpened(Ticket(10))]
    return read, beginning


@pytest.mark.parametrize("is_cut", [False, True])
async def test_what_was_opened_goes_on_over_its_connection_or_anew_where_that_is_gone(monkeypatch, is_cut):
    s = Story()
    monkeypatch.setattr(content, "KEPT_OPEN_S", 30.0)
    read, beginning = await _opened(s)
    s.data.start_read(s.grant(10))
    assert len(await beginning) == CHUNKS
    assert s.transport.reads == [read]
    if is_cut:
        read.on_end(SourceLost("it needed the connection for others"))
        async with asyncio.timeout(5):
            while len(s.transport.reads) == 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        read = s.transport.reads[-1]
        read.sink.begin(s.manifest.encode())
    for chunk in range(CHUNKS):
        read.take(s.source, chunk)
    read.on_end(None)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10), complete=True)]
    assert (s.target == s.source).all()


async def test_what_was_opened_and_is_not_wanted_any_more_does_not_wait(monkeypatch):
    s = Story()
    monkeypatch.setattr(content, "KEPT_OPEN_S", 30.0)
    read, beginning = await _opened(s)
    assert s.data.stop_read(Ticket(10)) is False
    with pytest.raises(SessionLost, match="told to stop"):
        await beginning
    read.on_end(None)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10))]
    assert read.is_stopped


async def test_what_was_withdrawn_is_served_again():
    s = Story()
    s.data.registration = register({"w": s.source})
    s.data.prepare(s.manifest)
    s.data.start_serving(Version(2), s.manifest.root())
    s.data.stop_serving(Version(2))
    await s.until(ServingStopped)
    assert s.transport.exports == {}
    s.data.prepare(build_manifest(register({"w": s.target}), CHUNK))  # of a publish that came to nothing
    s.data.start_serving(Version(2), s.manifest.root())
    assert s.transport.exports["m/2/0"].progress.is_complete
    assert s.transport.exports["m/2/0"].manifest == s.manifest.encode()


async def test_what_is_opened_twice_in_vain_is_withdrawn_twice_one_after_the_other():
    s = Story()
    wrong = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    s.data.open_read(s.grant(10))
    s.transport.may_withdraw = False
    for ticket in (11, 12):
        s.data.stop_read(Ticket(ticket - 1))
        s.transport.reads[-1].on_end(None)
        await s.until_ended(ticket - 1)
        s.data.open_read(s.grant(ticket, root=Digest(f"{ticket}")))
    s.transport.may_withdraw = True
    async with asyncio.timeout(5):
        while len(s.transport.reads) == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert len(s.transport.reads) == 2, "only the last one is wanted"
    assert s.better.withdrawals == 2, "and it waited for both"
    assert not wrong


async def test_what_was_opened_in_vain_does_not_take_with_it_what_is_served_under_the_same_key():
    s = Story()
    s.data.open_read(s.grant(10))
    s.data.stop_read(Ticket(10))
    s.transport.reads[-1].on_end(None)
    await s.until_ended(10)
    s.transport.may_withdraw = False
    s.data.prepare(s.manifest)  # a host copy of the same version came first, and was copied in
    s.data.start_serving(Version(3), s.manifest.root())
    assert s.transport.exports == {}
    s.transport.may_withdraw = True
    async with asyncio.timeout(5):
        while not s.transport.exports:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert s.transport.exports["m/3/0"].progress.is_complete


async def test_a_stopped_read_is_no_failure_and_takes_nothing_more():
    s = Story()
    read = s.start(10)
    read.sink.begin(s.manifest.encode())
    read.take(s.source, 0)
    assert s.data.stop_read(Ticket(9)) is False
    assert not read.is_stopped
    assert s.data.stop_read(Ticket(10)) is True
    assert read.is_stopped
    with pytest.raises(Exception, match="told to stop") as caught:
        read.take(s.source, 1)
    read.on_end(caught.value)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10))]
    assert s.data.content.progress.prefix == 1


async def test_the_end_of_the_lease_is_nobodys_fault():
    s = Story()
    read = s.start(10)
    read.sink.begin(s.manifest.encode())
    s.data.trust(0.0)
    with pytest.raises(Exception, match="lease") as caught:
        read.take(s.source, 0)
    read.on_end(caught.value)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10))]


async def test_a_lease_that_ends_while_a_chunk_is_judged_takes_the_chunk_with_it(monkeypatch):
    s = Story()
    assert DataPlane(ME, {}, verify="full", tell=s.told.append).lease.is_over, "it has never heard from a server"
    read = s.start(10)
    read.sink.begin(s.manifest.encode())
    fill = s.data.incoming.fill
    judge = fill.accept

    def slowly(chunk, views):
        judge(chunk, views)
        s.data.trust(0.0)

    monkeypatch.setattr(fill, "accept", slowly)
    with pytest.raises(SessionLost, match="lease"):
        read.take(s.source, 0)
    assert fill.progress.prefix == 0
    assert 0 in fill.begin(s.manifest.encode())


async def test_a_read_that_ends_early_without_a_word_is_a_failure():
    s = Story()
    read = s.start(10)
    read.sink.begin(s.manifest.encode())
    read.on_end(None)
    (ended,) = await s.until(ReadEnded)
    assert ended.failure.code == "source-lost"


async def test_a_manifest_that_comes_after_the_stop_makes_nothing_readable():
    """The fill learns its manifest in a transport's thread, at a time of its own."""
    s = Story()
    read = s.start(10)
    s.data.stop_serving(Version(3))
    assert await s.until(ServingStopped) == [ServingStopped(Version(3))]
    with pytest.raises(Exception, match="withdrew"):
        read.sink.begin(s.manifest.encode())
    assert s.transport.exports == {}


async def test_a_stop_ends_the_export_of_a_fill_and_its_waiting_readers():
    s = Story()
    read = s.start(10)
    read.sink.begin(s.manifest.encode())
    progress = s.transport.exports["m/3/0"].progress
    s.data.stop_serving(Version(3))
    assert progress.failed is not None
    await s.until(ServingStopped)
    assert s.transport.exports == {}
    with pytest.raises(Exception, match="withdrew"):
        read.take(s.source, 0)


async def test_serving_stops_only_when_nobody_reads_any_more():
    s = Story()
    s.data.prepare(s.manifest)
    s.data.start_serving(Version(3), s.manifest.root())
    assert s.transport.exports["m/3/0"].progress.is_complete
    s.transport.may_withdraw = False
    s.data.stop_serving(Version(3))
    async with asyncio.timeout(5):
        while s.transport.withdrawals < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert s.told == []
    s.transport.may_withdraw = True
    await s.until(ServingStopped)


@pytest.mark.usefixtures("no_collector")
async def test_a_read_is_let_go_when_it_ends_and_a_fill_when_it_is_withdrawn():
    """By whoever held them, at once: what is held in a circle, or by a timer, piles up over many updates."""
    s = Story()
    read = s.start(10)
    sink, fill = weakref.ref(read.sink), weakref.ref(s.data.incoming.fill)
    for chunk in read.sink.begin(s.manifest.encode()):
        read.take(s.source, chunk)
    read.on_end(None)
    read.on_end = None  # as transports do
    await s.until(ReadEnded)
    s.transport.reads.clear()
    del read
    assert sink() is None
    assert fill() is not None
    s.data.stop_serving(Version(3))
    await s.until(ServingStopped)
    assert fill() is None


BOTH = ("better://there", "fake://there")
ELSEWHERE = format_endpoint(replace_fields(here(), boot="0123-4567"), "some-socket")


def test_which_ways_there_are_to_a_source_and_why_there_is_none():
    def ways(*endpoints):
        source = Source(SOURCE, False, endpoints, Digest("r"))
        return [way.endpoint for way in Routes(ME, {"tcp": FakeTransport()}).to(source, Version(1))]

    assert ways(ELSEWHERE, "tcp://10.0.0.7:4000") == ["tcp://10.0.0.7:4000"]
    with pytest.raises(SourceLost, match=r"m/t\[0\] cannot be reached from here: .*127\.0\.0\.1.*TENSORHUB_HOST"):
        ways(ELSEWHERE, "tcp://127.0.0.1:4000")
    with pytest.raises(TransportMissing, match="share no transport: here tcp, there local"):
        ways(ELSEWHERE)


async def test_a_transport_that_cannot_work_between_these_two_is_left_for_the_next_within_the_same_grant(caplog):
    caplog.set_level("INFO", "tensorhub.runtime.content")
    s = Story()
    s.data.start_read(s.grant(10, endpoints=BOTH))
    (first,) = s.better.reads
    assert s.transport.reads == []
    first.sink.begin(s.manifest.encode())
    first.take(s.source, 0)
    first.on_end(TransportMissing("the kernel does not let us", hint="ask it"))
    async with asyncio.timeout(5):
        while not s.transport.reads:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    (second,) = s.transport.reads
    assert not any(isinstance(event, ReadEnded) for event in s.told)
    for chunk in second.sink.begin(s.manifest.encode()):
        assert chunk != 0
        second.take(s.source, chunk)
    second.on_end(None)
    assert await s.until(ReadEnded) == [ReadEnded(Ticket(10), complete=True)]
    assert s.data.received.by_replica == {"t": s.source.nbytes}
    assert s.data.received.by_transport == {"better": CHUNK, "fake": s.source.nbytes - CHUNK}
    s.told.clear()
    s.data.start_read(s.grant(11, endpoints=BOTH))
    assert (len(s.better.reads), len(s.transport.reads)) == (1, 2)
    (measured, *_) = await s.until(ReadMeasured)
    assert (measured.transport, measured.path) == ("fake", "by hand")
    assert "the kernel does not let us" in measured.why
    s.data.start_read(s.grant(12, endpoints=("better://another peer",)))
    assert len(s.better.reads) == 2
    assert [text for record in caplog.records if " no " in (text := record.getMessage())] == [
        f"{ME}: no better from {SOURCE}: the kernel does not let us (ask it)"
    ]


async def test_a_way_that_failed_for_one_version_is_tried_for_the_next_where_there_is_no_other():
    s = Story()

    def begin(ticket, version, *endpoints):
        s.told.clear()
        s.data.start_read(replace(s.grant(ticket, endpoints=endpoints), version=Version(version)))

    begin(10, 3, "better://there")
    s.better.reads[0].on_end(TransportMissing("its tensors were freed"))
    await s.until(ReadEnded)
    begin(11, 3, "better://there")
    (ended,) = await s.until(ReadEnded)
    assert "its tensors were freed" in ended.failure.message
    begin(12, 4, "better://there", "fake://there")
    assert (len(s.better.reads), len(s.transport.reads)) == (1, 1), "there is another way"
    s.transport.reads[0].on_end(None)
    await s.until(ReadEnded)
    begin(13, 5, "better://there")
    assert len(s.better.reads) == 2


async def test_a_source_that_is_lost_is_not_tried_on_another_way():
    s = Story()
    s.data.start_read(s.grant(10, endpoints=BOTH))
    s.better.reads[0].on_end(SourceLost("gone"))
    (ended,) = await s.until(ReadEnded)
    assert ended.failure.code == "source-lost"
    assert s.transport.reads == []
    assert s.data.received.by_replica == {}  # it was none


async def test_a_way_that_its_endpoint_excludes_is_not_tried():
    s = Story()
    s.data.start_read(s.grant(10, endpoints=("better://moon", "fake://there")))
    assert (len(s.better.reads), len(s.transport.reads)) == (0, 1)
    (measured, *_) = await s.until(ReadMeasured)
    assert measured.why == "better: it is on the moon"
    s.transport.reads[0].on_end(None)
    await s.until(ReadEnded)
    s.told.clear()
    s.data.start_read(s.grant(11, endpoints=("better://moon",)))
    (ended,) = await s.until(ReadEnded)
    assert ended.failure.code == "transport-missing"
    assert "moon" in ended.failure.message


def test_the_rate_is_that_of_the_last_second():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock, read = Clock(), FakeRead(None, None)
    meter = Meter(read, clock)
    for tenth in range(1, 51):
        clock.now, read.received_bytes = tenth / 10, tenth * 100 if tenth <= 30 else 3000
        rate = meter.look().rate_bytes_per_s
        assert rate == (1000 if tenth <= 30 else max(0, round(1000 - (tenth - 30) * 100)))
    record = Record()
    assert meter.ended(record, "tcp").rate_bytes_per_s == 600
    assert (record.observed[READ]["tcp",].sum, record.observed[RATE]["tcp",].sum) == (5.0, 600)
    meter.goes_on()  # what it waited for before does not count
    clock.now = 7.0
    assert meter.ended(record, "tcp").rate_bytes_per_s == 1500
