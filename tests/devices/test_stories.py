"""Weights on a device, told end to end: what is killed, stopped, freed, overwritten or spoiled while they are read.

Real workers beside a real server, their tensors on a stand-in for a device (`device.py`). At each end the fixture
`fleet` looks that no process has died but the killed one, and that the device's memory is free again.
"""

from contextlib import suppress
from dataclasses import replace

import pytest

from processes.process import eventually

from .conftest import TENSORS_BYTES, Refused, Way

pytestmark = pytest.mark.processes

WAYS = {
    "cuda": Way("cuda", "memory"),
    "cuda ring": Way("cuda", "ring", cannot=("share",)),
    "cuda pinned": Way("cuda", "pinned", cannot=("open",)),
    "tcp": Way("tcp"),
}
NO_SOURCE = ("VersionUnavailable", "DeadlineExceeded", "SourceLost")  # the reader is told that nobody has it
NOT_TAKEN = (*NO_SOURCE, "CorruptTransfer")


LONG = {"cuda pinned": pytest.mark.long, "tcp": pytest.mark.long}  # as "cuda ring", and as other tests of tcp


@pytest.fixture(params=[pytest.param(name, marks=LONG.get(name, ())) for name in WAYS])
def way(request):
    return WAYS[request.param]


def only(*ways):
    """Of these ways alone."""
    found = [pytest.param(name, marks=LONG.get(name, ())) for name in ways]
    return pytest.mark.parametrize("way", found, indirect=True)


every_way = pytest.mark.parametrize("way", WAYS, indirect=True)


def held_midway(fleet, name, call="weights.replicate(1)"):
    """A new worker that stands still in the middle of a read, and its call."""
    reader = fleet.join(name)
    reader.do("hold()")
    reading = reader.begin(call)
    reader.do("wait_held()")
    return reader, reading


def goes_on(fleet, reader, trainer, version):
    """What comes next is right, and takes no more memory than the tensors of those who live."""
    trainer.do("weights.unpublish()")
    assert trainer.do(f"publish({version})") == version
    assert reader.do("weights.update()") == version
    reader.check(version)


@only(*WAYS)
def test_versions_one_after_another(fleet):
    trainer, reader = fleet.join("trainer", "rollout")
    for version in (1, 2, 3):
        trainer.do("weights.unpublish()")
        assert trainer.do(f"publish({version})") == version
        assert reader.do("weights.update()") == version
        reader.check(version)
    trainer.check(3)
    assert list(reader.do("weights.statistics()['bytes_by_transport']")) == [fleet.way.transports]
    assert reader.do("' '.join(device.opened)") == fleet.way.opens
    eventually(lambda: fleet.used_bytes() == 2 * TENSORS_BYTES, "rings are given back")


def test_a_killed_source_beside_another_one(fleet):
    trainer, other = fleet.join("trainer", "other")
    trainer.do("publish(1)")
    other.do("weights.replicate(1)")
    reader, reading = held_midway(fleet, "rollout")
    fleet.source_of("rollout").kill()
    reader.do("release()")
    assert reading.value() == 1
    reader.check(1)
    eventually(lambda: fleet.used_bytes() == 2 * TENSORS_BYTES, "the memory of the killed source is free")


@only("cuda")
def test_a_stopped_source_is_read_to_the_end(fleet):
    trainer = fleet.join("trainer")
    trainer.do("publish(1)")
    reader, reading = held_midway(fleet, "rollout")
    trainer.stop()
    reader.do("release()")
    assert reading.value() == 1
    reader.check(1)
    trainer.go_on()


@only("cuda ring", "cuda pinned", "tcp")
def test_a_stopped_source_is_left_for_another_one(fleet):
    trainer, other = fleet.join("trainer", "other")
    trainer.do("publish(1)")
    other.do("weights.replicate(1)")
    reader, reading = held_midway(fleet, "rollout")
    source = fleet.source_of("rollout")
    source.stop()
    reader.do("release()")
    assert reading.value() == 1
    reader.check(1)
    source.go_on()


@pytest.mark.long
def test_a_stopped_reader_takes_nothing_of_what_comes_after(fleet):
    """Its source waits for it no longer than for a silent one, and then writes over what it reads.

    What is missing of the version comes from the copy that the source has made on its host.
    """
    if fleet.way.transports == "cuda":
        fleet.way = replace(fleet.way, transports="cuda,tcp")
    trainer = fleet.join("trainer")
    trainer.do("publish(1)")
    reader, reading = held_midway(fleet, "rollout")
    reader.stop()
    trainer.do("weights.unpublish()")
    trainer.do("write(2)")
    reader.go_on()
    reader.do("release()")
    assert reading.value() == 1
    reader.check(1)
    assert trainer.do("publish(2)") == 2
    assert reader.do("weights.update()") == 2
    reader.check(2)


def test_a_reader_whose_tensors_are_freed_is_told_so(fleet):
    trainer, reader = fleet.join("trainer", "rollout")
    trainer.do("publish(1)")
    reader.do("hold('begin', 0, after=2)")
    reading = reader.begin("weights.replicate(1, timeout=3)")
    reader.do("wait_held()")
    reader.do("free()")
    reader.do("release()")
    with pytest.raises(Refused) as refused:
        reading.value()
    assert refused.value.kind == "UsageError"
    assert "'a', 'b'" in str(refused.value)
    reader.do("register()")
    assert reader.do("weights.replicate(1)") == 1
    reader.check(1)
    eventually(lambda: fleet.used_bytes() == 2 * TENSORS_BYTES, "what was freed is free")


@every_way
def test_a_killed_reader_keeps_nothing_of_its_source(fleet):
    trainer = fleet.join("trainer")
    trainer.do("publish(1)")
    reader, _ = held_midway(fleet, "rollout")
    reader.kill()
    trainer.do("weights.unpublish()")
    trainer.do("register()")
    eventually(lambda: fleet.used_bytes() == TENSORS_BYTES, "the memory that the reader had opened is free")
    goes_on(fleet, fleet.join("late"), trainer, 2)


@pytest.mark.long
@only("cuda")
def test_a_reader_that_dies_after_its_source_has_closed(fleet):
    """It was stopped, so it has not let the memory go. The process of the source lives on."""
    trainer, reader = fleet.join("trainer", "rollout")
    trainer.do("publish(1)")
    reader.do("weights.replicate(1)")
    reader.stop()
    trainer.do("weights.close(timeout=3)")
    trainer.do("forget()")
    assert trainer.do("used()") != []
    reader.kill()
    eventually(lambda: trainer.do("used()") == [], "the memory that the reader had opened is free")


def test_memory_that_is_freed_while_it_is_read(fleet):
    """A reader that has it open reads on; nobody takes a wrong byte, and what comes after is right."""
    trainer = fleet.join("trainer")
    trainer.do("publish(1)")
    reader, reading = held_midway(fleet, "rollout", "weights.replicate(1, timeout=3)")
    trainer.do("free()")
    reader.do("release()")
    if fleet.way.opens == "memory":
        assert reading.value() == 1
        reader.check(1)
    else:
        with pytest.raises(Refused) as refused:
            reading.value()
        assert refused.value.kind in NOT_TAKEN
    with pytest.raises(Refused, match="NotDrained"):
        trainer.do("weights.check()")
    with suppress(Refused):  # where nobody else was heard to have it, that it is lost
        trainer.do("weights.unpublish()")
    trainer.do("register()")
    goes_on(fleet, reader, trainer, 2)
    eventually(lambda: fleet.used_bytes() == 2 * TENSORS_BYTES, "what was freed is free")


def test_bytes_that_are_overwritten_while_they_are_read_are_not_taken(fleet):
    trainer = fleet.join("trainer")
    trainer.do("publish(1)")
    reader, reading = held_midway(fleet, "rollout", "weights.replicate(1, timeout=3)")
    trainer.do("write(2)")  # without unpublish
    reader.do("release()")
    with pytest.raises(Refused) as refused:
        reading.value()
    assert refused.value.kind == "CorruptTransfer"
    assert reader.do("weights.version") is None
    with pytest.raises(Refused, match="NotDrained"):
        trainer.do("weights.check()")


@pytest.mark.long
def test_a_reader_that_is_closed_in_the_middle_lets_its_source_go(fleet):
    trainer = fleet.join("trainer")
    trainer.do("publish(1)")
    reader, reading = held_midway(fleet, "rollout")
    closing = reader.begin("weights.close(timeout=3)")
    reader.do("release()")
    closing.value()
    with pytest.raises(Refused):
        reading.value()
    trainer.do("weights.unpublish()")
    reader.do("forget()")
    eventually(lambda: fleet.used_bytes() == TENSORS_BYTES, "the reader keeps nothing of the device")


SPOILED = [
    pytest.param("cuda", "reader", "arrive", id="cuda-between copy and digest"),
    pytest.param("cuda ring", "source", "arrive", id="cuda ring-on its way to the ring"),
    pytest.param("tcp", "source", "depart", id="tcp-to the host"),
    pytest.param("tcp", "reader", "arrive", id="tcp-to the device"),
]


@pytest.mark.parametrize(("way", "end", "kind"), SPOILED, indirect=["way"])
def test_a_byte_that_is_spoiled_on_its_way_is_read_again(fleet, end, kind):
    trainer, other, reader = fleet.join("trainer", "other", "rollout")
    trainer.do("publish(1)")
    other.do("weights.replicate(1)")
    for peer in [trainer, other] if end == "source" else [reader]:
        peer.do(f"flip({kind!r})")
    assert reader.do("weights.replicate(1)") == 1
    reader.check(1)
    assert any(peer.do("spoiled.is_set()") for peer in (trainer, other, reader))
