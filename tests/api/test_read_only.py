"""Tensors whose memory may only be read: they can be published, and whoever would fill them is told, and lives."""

import warnings

import numpy as np
import pytest

import tensorhub
from runtime.kit import in_threads

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
@pytest.mark.parametrize("is_mapped", [True, False])
def test_what_cannot_be_written_is_named_before_anything_is_given_up(join, fixed, transports, is_mapped):
    there = tensorhub.empty(COUNT, "float32") if is_mapped else torch.empty(COUNT)
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


def test_what_can_be_read_can_be_published(join, fixed):
    trainer, _ = join("t", tensors={"w": fixed})
    trainer.publish(1)
    reader, _ = join("r", tensors={"w": torch.zeros(COUNT)})
    assert reader.replicate(1, timeout=20) == 1
    reader.check()
