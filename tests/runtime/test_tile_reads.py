"""Reads of tiles by a data plane: real sources of one cut, readers of another, no server."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from memory.cutting import Shard
from tensorhub.memory.host_memory import Room
from tensorhub.protocol.messages import Failure
from tensorhub.protocol.names import Ticket
from tensorhub.reshard import read
from tensorhub.runtime import tile_reads
from tensorhub.transport.local.transport import LocalTransport
from tensorhub.transport.native import load
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.worker.events import (
    CopiedIn,
    ReadAdvanced,
    ReadEnded,
    ReadOpened,
    ReadTouched,
    ServingStopped,
)

from .fleet import Fleet, V

# --- Reads of tiles as a data plane carries them out: several real sources of one cut, readers of another, no server.


MIB = 1 << 20


@pytest.mark.parametrize("transport", [TcpTransport, LocalTransport])
@pytest.mark.parametrize("seed", range(4))
async def test_every_element_is_where_plain_indexing_says(seed, transport):
    with contextlib.closing(Fleet(seed, publishers=1 + seed % 3, readers=1 + seed % 2, make=transport)) as fleet:
        fleet.publish()
        for reader in fleet.readers:
            outside = reader.shard.outside()
            await reader.fill(fleet.publishers)
            assert reader.shard.wrong(fleet.model) == []
            assert all((a == b).all() for a, b in zip(outside, reader.shard.outside(), strict=True))
            last = reader.of(ReadAdvanced)[-1]
            assert last.done == last.chunks


async def test_nothing_is_written_before_it_is_started():
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        reader = await opened(fleet)
        assert not reader.of(ReadTouched)
        assert not reader.shard.arrays["w"].any()
        reader.start()
        ended = await reader.ended()
        assert ended == ReadEnded(Ticket(1), complete=True)
        assert reader.of(ReadTouched) == [ReadTouched(Ticket(1))]
        assert reader.told[-1] is ended
        assert reader.shard.wrong(fleet.model) == []
        assert sum(reader.data.received.by_replica.values()) == 4 * MIB
        assert set(reader.data.received.by_replica) == {"t"}


async def test_a_second_reader_of_that_layout_reads_behind_the_first_and_takes_nothing_from_the_publishers():
    with contextlib.closing(Fleet.of_rows(readers=2)) as fleet:
        valves = [node.publish(fleet.grid, valve=2) for node in fleet.publishers]
        first, second = fleet.readers
        first.open(fleet.publishers)
        (opened,) = await first.until(ReadOpened)
        first.root = opened.root
        first.start()
        await first.until(ReadTouched)
        second.data.start_read(second.grant(9, first, root=opened.root))
        await second.until(ReadTouched)  # while the first one is still being filled
        assert not first.of(ReadEnded)
        for valve in valves:
            valve.open()
        assert (await first.ended()).complete
        assert (await second.ended()).complete
        assert second.shard.wrong(fleet.model) == []
        assert dict(second.data.received.by_replica) == {"r0": 4 * MIB}
        assert second.data.content.root == first.data.content.root == opened.root


async def opened(fleet):
    """The only reader, once it knows what it is going to read."""
    (reader,) = fleet.readers
    reader.open(fleet.publishers)
    await reader.until(ReadOpened)
    return reader


async def started(fleet):
    """The same, and told to go on."""
    reader = await opened(fleet)
    reader.start()
    return reader


async def half_read(fleet):
    """A reader whose second source stands still with pieces on their way, and what lets it go on."""
    fleet.publishers[0].publish(fleet.grid)
    valve = fleet.publishers[1].publish(fleet.grid, valve=2)
    for node in fleet.others:
        node.publish(fleet.grid)
    reader = await started(fleet)
    await reader.seen(valve.held.is_set)
    return reader, valve


@pytest.mark.parametrize("how", ["dies", "withdraws", "is to be left"])
async def test_a_source_that_is_lost_in_mid_read_ends_it_and_the_next_read_brings_the_rest(how):
    """What is in place is not brought again."""
    with contextlib.closing(Fleet.of_rows()) as fleet:
        reader, valve = await half_read(fleet)
        closing, lost = None, fleet.publishers[1]
        if how == "dies":
            closing = asyncio.ensure_future(asyncio.to_thread(lost.transport.close))
        elif how == "withdraws":
            lost.data.stop_serving(V)
        else:
            assert reader.data.stop_read(Ticket(1)) is True
        ended = await reader.ended()
        valve.open()
        assert not ended.complete
        assert (ended.failure is None) == (how == "is to be left")
        assert ended.source == (None if how == "is to be left" else lost.me)
        fill, before = reader.data.content.fill, sum(reader.data.received.by_replica.values())
        left = fill.missing
        assert left > 0
        await reader.fill([fleet.publishers[0], fleet.others[1]], 7)
        assert reader.shard.wrong(fleet.model) == []
        assert sum(reader.data.received.by_replica.values()) - before == 4 * MIB * left // len(fill.tiles)
        if closing is not None:
            await closing
        if how == "withdraws":
            await lost.seen(lambda: lost.of(ServingStopped))


async def test_a_source_that_shows_something_else_is_refused_before_a_byte_moves():
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        (reader,) = fleet.readers
        wrong = fleet.publishers[1]
        reader.open(fleet.publishers, root=fleet.publishers[0].root)
        over = await reader.ended()
        assert (over.source, over.failure.code) == (wrong.me, "corrupt-transfer")
        assert not reader.of(ReadOpened)
        assert not reader.shard.arrays["w"].any()


async def test_nobody_waits_for_a_plan(monkeypatch):
    """The loop goes on while a thread plans: all workers of a process share it, and it keeps their leases."""
    real, planning, goes_on = read.plan_reads, threading.Event(), threading.Event()

    def slowly(*arguments):
        planning.set()
        assert goes_on.wait(20)
        return real(*arguments)

    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        reader = await opened(fleet)
        monkeypatch.setattr(read, "plan_reads", slowly)
        reader.start()
        await reader.seen(planning.is_set)
        timer = threading.Timer(5, goes_on.set)  # so that a loop that does wait is found out, and not waited for
        timer.start()
        assert reader.data.incoming.fill.missing > 0
        assert not goes_on.is_set()
        timer.cancel()
        goes_on.set()
        assert (await reader.ended()).complete
        assert reader.shard.wrong(fleet.model) == []


async def test_stopping_before_the_first_byte_writes_nothing_and_says_so():
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        reader = await opened(fleet)
        assert reader.data.stop_read(Ticket(1)) is False
        reader.start()
        assert await reader.ended() == ReadEnded(Ticket(1), complete=False)
        assert not reader.shard.arrays["w"].any()
        assert not reader.of(ReadTouched)
        assert not reader.data.is_reading


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
async def test_no_progress_is_told_of_what_was_stopped_before_it_was_started(to_host, is_known, monkeypatch):
    """The machine makes the host copy when the read is opened: before that it knows none to have progress."""
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        (reader,) = fleet.readers
        exporting = asyncio.Event()
        if not is_known:  # it can be served, and the read has not been told yet
            real = reader.data.tiles.export
            monkeypatch.setattr(reader.data.tiles, "export", lambda *of, **_: real(*of[:2], exporting.set))
        reader.open(fleet.publishers, to_host=to_host)
        if is_known:
            await reader.until(ReadOpened)
        else:
            async with asyncio.timeout(20):
                await exporting.wait()
        assert reader.data.stop_read(Ticket(1)) is False
        assert not (await reader.ended()).complete
        assert not reader.of(ReadAdvanced)
        assert not reader.data.copies.has(V)  # what nobody counts is not kept


async def test_a_host_copy_that_was_stopped_before_it_was_started_is_in_nobodys_way():
    """The same number may come again with other content."""
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        (reader,) = fleet.readers
        reader.open(fleet.publishers, to_host=True)
        await reader.until(ReadOpened)
        reader.data.stop_read(Ticket(1))
        assert not (await reader.ended()).complete
        for node in fleet.publishers:
            node.data.stop_serving(V)
            await node.until(ServingStopped)
            node.shard.arrays["w"][:] = 7
            node.publish(fleet.grid)
        await reader.fill(fleet.publishers, 11, to_host=True)
        reader.data.copies.copy_in(V, reader.registration, lambda known: None)
        await reader.seen(lambda: reader.of(CopiedIn))
        assert (reader.shard.arrays["w"] == 7).all()


# --- What a read of tiles refuses, before a byte is written; with tensor and part, wherever they are to blame.


def reader_of(fleet, *boxes, dtype=np.uint8, shape=(8, 8)):
    """A reader with one array for each box: (global name, global shape, at, size)."""
    shard = Shard()
    for number, (name, whole, at, size) in enumerate(boxes):
        memory = np.zeros(size, dtype)
        shard.add_array(f"local{number}", memory, [(name, whole, (at, size), memory)])
    return fleet.node("odd", shard.finish())


async def refused(fleet, reader, sources=None) -> Failure:
    reader.open(sources or fleet.publishers)
    ended = await reader.ended()
    assert not ended.complete
    assert not reader.of(ReadTouched)
    assert all(not array.any() for array in reader.shard.arrays.values())
    assert not reader.data.is_reading
    return ended.failure


async def test_a_shard_without_a_byte_is_filled_as_any_other():
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        reader = reader_of(fleet)
        await reader.fill(fleet.publishers)
        assert reader.of(ReadTouched) == [ReadTouched(Ticket(1))]
        assert reader.data.content.root == reader.root


@pytest.mark.parametrize(
    ("box", "dtype", "text"),
    [
        (("layers/1.w", (4096, 2048), (0, 0), (4096, 2048)), np.uint8, "tensor 'layers/1.w': uint8[4096, 2048] exists"),
        (("layers/0.w", (4000, 2048), (0, 0), (4000, 2048)), np.uint8, "has global shape [4000, 2048] here"),
        (("layers/0.w", (4096, 2048), (0, 0), (4096, 2048)), np.int8, "has dtype int8 here and uint8"),
    ],
)
async def test_tensors_that_are_others(box, dtype, text):
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        found = await refused(fleet, reader_of(fleet, box, dtype=dtype))
        assert found.code == "layout-mismatch"
        assert text in found.message
        assert box[0] in found.message


async def test_a_layout_that_came_after_the_version_is_filled_and_others_are_sent_elsewhere():
    """It reads tiles that cover its boxes, and keeps parts: those nobody can verify who reads from it."""
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        box = ("layers/0.w", (4096, 2048), (1, 0), (4001, 2048))
        late, later = reader_of(fleet, box), reader_of(fleet, box)
        await late.fill(fleet.publishers)
        assert late.shard.wrong(fleet.model) == []
        ended = await later.follow(9, late)
        assert (ended.failure.code, ended.source) == ("transfer", late.me)
        assert "can show only parts of some tiles" in ended.failure.message
        assert not later.of(ReadTouched)
        await later.fill(fleet.publishers, 11)
        assert later.shard.wrong(fleet.model) == []
        assert later.root == late.root
        await fleet.readers[0].fill(fleet.publishers, 21)  # with what both have alike
        known = late.data.content.manifest
        assert known.changed(late.registration) == []
        late.shard.arrays["local0"][2000, 500] ^= 1
        assert known.names(known.changed(late.registration), late.registration) == ["local0"]


async def test_a_part_that_two_sources_have_with_other_content():
    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        liar = fleet.others[0]
        liar.shard.arrays["w"][7, 1100] ^= 1
        liar.publish(fleet.grid)
        found = await refused(fleet, fleet.readers[0], [*fleet.publishers, liar])
        assert found.code == "version-conflict"
        assert "'layers/0.w'[" in found.message
        assert "has other content at m/other[0] than at m/t[0]" in found.message


async def test_a_host_copy_for_which_there_is_no_room_any_more_ends_the_read_and_blames_no_source(monkeypatch):
    """Whoever writes on is killed. The mover looks now and then, and may have written all of this before it does."""
    monkeypatch.setattr(load, "library", lambda: None)

    with contextlib.closing(Fleet.of_rows()) as fleet:
        fleet.publish()
        (reader,) = fleet.readers
        reader.open(fleet.publishers, to_host=True)
        (opened,) = await reader.until(ReadOpened)
        copy = reader.data.copies.content(V, opened.root).registration.stream
        copy._footing._look = lambda: Room(0, "a test's limit")
        reader.start()
        ended = await reader.ended()
        assert ended.failure.code == "host-memory-full"
        assert ended.source is None


@pytest.mark.parametrize("where", ["version_from", "Across"])
async def test_whatever_goes_wrong_while_it_is_worked_out_ends_the_read(where, monkeypatch):
    """No memory, or our own bug: else the call would wait for its deadline."""
    with contextlib.closing(Fleet.of_rows()) as fleet:

        def fails(*_, **__):
            raise MemoryError

        fleet.publish()
        (reader,) = fleet.readers
        monkeypatch.setattr(tile_reads, where, fails)
        found = await refused(fleet, reader)
        assert "cannot be worked out: MemoryError()" in found.message
