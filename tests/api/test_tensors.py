"""Tensors that may only be read, that have no bytes, that others map, and how many versions of them are kept."""

import logging
import warnings
from functools import partial

import numpy as np
import pytest

import tensorhub
from runtime.kit import in_threads
from tensorhub.transport import sealed

torch = pytest.importorskip("torch")

COUNT = 3_000_000  # several chunks


@pytest.fixture
def fixed(tmp_path):
    """A torch tensor of ones over a file that is mapped for reading."""
    np.save(tmp_path / "ones.npy", np.ones(COUNT, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that this is undefined behaviour
        return torch.from_numpy(np.load(tmp_path / "ones.npy", mmap_mode="r"))


@pytest.mark.parametrize("transports", ["local", "tcp"])
def test_what_cannot_be_written_is_named_before_anything_is_given_up(join, fixed, transports):
    there = tensorhub.empty(COUNT, "float32")
    there.fill_(2.0)
    trainer, _ = join("t", tensors={"w": there, "b": torch.zeros(3)}, transports=transports)
    trainer.publish(1)
    reader, _ = join("r", tensors={"w": fixed, "b": torch.ones(3)}, transports=transports)
    with pytest.raises(
        tensorhub.UsageError, match=r"cannot be written, so nothing can be read into them: 'w'"
    ) as raised:
        reader.replicate(1, timeout=20)
    assert "Register a copy" in raised.value.hint
    assert reader.version is None
    own = torch.empty(COUNT)
    reader.register({"w": own, "b": torch.ones(3)})
    assert reader.replicate(1, timeout=20) == 1
    assert (own == 2).all()


@pytest.mark.parametrize("boxes", [None, {}])
def test_the_other_shards_of_a_replica_hear_what_to_do_about_it(join, fixed, boxes):
    trainers = [join("t", shard=shard, shards=2, tensors={"w": torch.ones(COUNT)}, boxes=boxes)[0] for shard in (0, 1)]
    in_threads(*(lambda trainer=trainer: trainer.publish(1) for trainer in trainers))
    readers = [
        join("r", shard=shard, shards=2, tensors={"w": fixed if shard else torch.zeros(COUNT)}, boxes=boxes)[0]
        for shard in (0, 1)
    ]
    found = in_threads(*(lambda reader=reader: reader.replicate(1, timeout=20) for reader in readers))
    assert [type(error) for error in found] == [tensorhub.UsageError] * 2, found
    assert all("Register a copy" in error.hint for error in found)


def nothing():
    return {"w": np.zeros(0, dtype=np.float32), "b": np.zeros((3, 0), dtype=np.int8)}


@pytest.mark.parametrize("prefetch", ["never", "always"])
def test_who_has_read_it_goes_on_and_others_read_it_there(join, prefetch):
    trainer, _ = join("t", tensors=nothing())
    reader, _ = join("r", tensors=nothing(), prefetch=prefetch)
    trainer.publish(1, metadata={"step": 1})
    assert reader.replicate("latest") == 1
    assert (reader.version, reader.metadata) == (1, {"step": 1})
    reader.check()
    with trainer.mutating(version=2, metadata={"step": 2}):
        pass
    assert reader.update() == 2
    assert (reader.version, reader.metadata) == (2, {"step": 2})
    trainer.close()
    late, _ = join("late", tensors=nothing())
    assert late.replicate("latest") == 2
    assert late.metadata == {"step": 2}
    late.close()
    reader.unpublish()
    assert reader.version is None
    assert reader.publish(3) == 3


def test_one_shard_of_zero_bytes_goes_with_a_shard_that_has_some(join):
    def group(replica, value):
        some = np.full(1000, value, dtype=np.float32)
        tensors = (nothing(), {"w": some})
        return [join(replica, tensors=each, shard=i, shards=2)[0] for i, each in enumerate(tensors)], some

    trainers, source = group("t", 1.0)
    readers, target = group("r", 0.0)
    for version in (1, 2):
        source[:] = version
        assert in_threads(*(partial(each.publish, version) for each in trainers)) == [version] * 2
        assert in_threads(*(each.update for each in readers)) == [version] * 2
        assert (target == version).all()
        assert in_threads(*(each.unpublish for each in trainers)) == [None, None]
        assert [each.version for each in readers] == [version] * 2
    assert in_threads(*(each.unpublish for each in readers)) == [None, None]


pytestmark = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")


def test_it_is_mapped_and_may_be_written_to_after_the_drain(join, caplog):
    caplog.set_level(logging.DEBUG, "tensorhub.runtime.content")
    theirs = {f"w{index}": tensorhub.empty((300, 1000)) for index in range(20)}
    trainer, _ = join("t", tensors=theirs)
    mine = {name: np.zeros((300, 1000), dtype=np.float32) for name in theirs}
    reader, _ = join("r", tensors=mine)
    for version in (1, 2, 3):
        with trainer.mutating(version=version):
            for index, tensor in enumerate(theirs.values()):
                tensor.copy_(torch.full((300, 1000), 100.0 * version + index))
        assert reader.update("latest") == version
        assert all((array == 100 * version + index).all() for index, array in enumerate(mine.values()))
    ways = [record.getMessage() for record in caplog.records if "has read" in record.getMessage()]
    assert len(ways) == 3
    assert all("(mapped" in way for way in ways)


def test_a_trainer_far_ahead_keeps_as_many_versions_as_it_asked_for(server, join):
    """And the newest one that was safe outside it, whose holder has gone: as when the only engine was stopped."""
    trainer, array = join("trainer", retain=3)
    trainer.publish(0)
    rollout, _ = join("rollout", reliable=False)
    rollout.replicate(0)
    rollout.close()
    for version in range(1, 8):
        with trainer.mutating(version=version, timeout=20):
            array += 1
    kept = [each.version for each in tensorhub.connect(server.address).versions("m") if each.is_retained]
    assert sorted(kept) == [0, 5, 6, 7]


def test_who_has_no_room_for_a_copy_is_told_what_may_be_taken_and_loses_nothing(join):
    trainer, array = join("trainer", 1.0, host_bytes=100)
    trainer.publish(0)
    with pytest.raises(tensorhub.HostMemoryFull, match="host_bytes is 100 B, and copies may take 0 B") as raised:
        trainer.unpublish(timeout=10)
    assert raised.value.hint.startswith("raise host_bytes")
    assert trainer.version == 0
    reader, read = join("reader")
    assert reader.replicate() == 0, "it is still served"
    assert (read == array).all()
    with trainer.mutating(version=1):  # and now another replica keeps it
        array += 1
    assert trainer.statistics()["host_bytes"] == 0
