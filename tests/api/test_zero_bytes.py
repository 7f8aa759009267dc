"""A shard of zero bytes is published, read and given back as any other, though nobody ever writes a byte of it."""

from functools import partial

import numpy as np
import pytest

from runtime.kit import in_threads


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


def test_it_is_kept_as_a_host_copy_when_its_last_reader_gives_it_back(join):
    trainer, _ = join("t", tensors=nothing())
    reader, _ = join("r", tensors=nothing(), retain=1)
    trainer.publish(1)
    assert reader.replicate(1) == 1
    trainer.close()
    reader.unpublish()
    late, _ = join("late", tensors=nothing())
    assert late.replicate(1) == 1
    assert reader.replicate(1) == 1


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
