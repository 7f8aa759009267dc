"""What a read of tiles refuses, before a byte is written; with tensor and part, wherever they are to blame."""

import numpy as np
import pytest

from memory.cutting import Shard
from tensorhub.memory.room import Room
from tensorhub.protocol.messages import Failure
from tensorhub.protocol.names import Ticket
from tensorhub.runtime import tile_reads
from tensorhub.transport.native import load
from tensorhub.worker.events import AcrossOpened, PartEnded, ReadTouched

from .fleet import Fleet, V, told


def reader_of(fleet, *boxes, dtype=np.uint8, shape=(8, 8)):
    """A reader with one array for each box: (global name, global shape, at, size)."""
    shard = Shard()
    for number, (name, whole, at, size) in enumerate(boxes):
        memory = np.zeros(size, dtype)
        shard.add_array(f"local{number}", memory, [(name, whole, (at, size), memory)])
    return fleet.node("odd", shard.finish())


async def refused(fleet, reader, sources=None) -> Failure:
    reader.open(sources or fleet.tickets())
    ended = await reader.ended()
    assert not ended.complete
    assert not reader.of(ReadTouched)
    assert all(not array.any() for array in reader.shard.arrays.values())
    assert not reader.data.is_reading
    return ended.failure


def test_a_shard_without_a_byte_is_filled_as_any_other():
    async def story(fleet):
        fleet.publish()
        reader = reader_of(fleet)
        await reader.fill(fleet.tickets())
        assert reader.of(ReadTouched) == [ReadTouched(Ticket(1))]
        assert reader.data.content.root == reader.root

    told(story, Fleet.of_rows)


def test_a_part_that_no_source_has():
    """As if a layer, or half of it, was left out."""

    async def story(fleet):
        fleet.publish()
        found = await refused(fleet, fleet.readers[0], {1: fleet.publishers[0]})
        assert found.code == "layout-mismatch"
        assert "no source has 'layers/0.w'[2048:4096, 1024:2048]" in found.message

    told(story, Fleet.of_rows)


@pytest.mark.parametrize(
    ("box", "dtype", "text"),
    [
        (("layers/1.w", (4096, 2048), (0, 0), (4096, 2048)), np.uint8, "tensor 'layers/1.w': uint8[4096, 2048] exists"),
        (("layers/0.w", (4000, 2048), (0, 0), (4000, 2048)), np.uint8, "has global shape [4000, 2048] here"),
        (("layers/0.w", (4096, 2048), (0, 0), (4096, 2048)), np.int8, "has dtype int8 here and uint8"),
    ],
)
def test_tensors_that_are_others(box, dtype, text):
    async def story(fleet):
        fleet.publish()
        found = await refused(fleet, reader_of(fleet, box, dtype=dtype))
        assert found.code == "layout-mismatch"
        assert text in found.message
        assert box[0] in found.message

    told(story, Fleet.of_rows)


def test_a_layout_that_came_after_the_version_is_filled_and_others_are_sent_elsewhere():
    """It reads tiles that cover its boxes, and keeps parts: those nobody can verify who reads from it."""

    async def story(fleet):
        fleet.publish()
        box = ("layers/0.w", (4096, 2048), (1, 0), (4001, 2048))
        late, later = reader_of(fleet, box), reader_of(fleet, box)
        await late.fill(fleet.tickets())
        assert late.shard.wrong(fleet.model) == []
        ended = await later.follow(9, late)
        assert ended.failure.code == "source-lost"
        assert "can show only parts of some tiles" in ended.failure.message
        assert not later.of(ReadTouched)
        later.told.clear()
        await later.fill(fleet.tickets(11))
        assert later.shard.wrong(fleet.model) == []
        assert later.root == late.root
        await fleet.readers[0].fill(fleet.tickets(21))  # with what both have alike
        known = late.data.content.manifest
        assert known.changed(late.registration) == []
        late.shard.arrays["local0"][2000, 500] ^= 1
        assert known.names(known.changed(late.registration), late.registration) == ["local0"]

    told(story, Fleet.of_rows)


def test_a_part_that_two_sources_have_with_other_content():
    async def story(fleet):
        fleet.publish()
        liar = fleet.others[0]
        liar.shard.arrays["w"][7, 1100] ^= 1
        liar.publish(fleet.grid)
        found = await refused(fleet, fleet.readers[0], {**fleet.tickets(), 3: liar})
        assert found.code == "version-conflict"
        assert "'layers/0.w'[" in found.message
        assert "has other content at m/other[0] than at m/t[0]" in found.message

    told(story, Fleet.of_rows)


def test_a_host_copy_for_which_there_is_no_room_any_more_ends_the_read_and_blames_no_source(monkeypatch):
    """Whoever writes on is killed. The mover looks now and then, and may have written all of this before it does."""
    monkeypatch.setattr(load, "library", lambda: None)

    async def story(fleet):
        fleet.publish()
        (reader,) = fleet.readers
        reader.open(fleet.tickets(), to_host=True)
        (opened,) = await reader.until(AcrossOpened)
        copy = reader.data.copies.content(V, opened.root).registration.stream
        copy._footing._look = lambda: Room(0, "a test's limit")
        reader.start(1)
        ended = await reader.ended()
        assert ended.failure.code == "host-memory-full"
        assert not any(each.failure for each in reader.of(PartEnded))

    told(story, Fleet.of_rows)


@pytest.mark.parametrize("where", ["version_from", "Across"])
def test_whatever_goes_wrong_while_it_is_worked_out_ends_the_read(where, monkeypatch):
    """No memory, or our own bug: else the call would wait for its deadline."""

    async def story(fleet):
        def fails(*_, **__):
            raise MemoryError

        fleet.publish()
        (reader,) = fleet.readers
        monkeypatch.setattr(tile_reads, where, fails)
        found = await refused(fleet, reader)
        assert "cannot be worked out: MemoryError()" in found.message

    told(story, Fleet.of_rows)
