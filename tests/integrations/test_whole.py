"""All shards of a model in one process, put together, and what is said where that cannot be done."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tensorhub
from tensorhub.integrations.whole import CUT, Whole


@pytest.fixture
def server():
    with tensorhub.serve() as found:
        yield found.address


@pytest.fixture
def publish(server):
    """`publish(version, shards, metadata)` publishes a mapping for each shard, each in a thread."""
    opened, pool = {}, ThreadPoolExecutor(4)

    def begin(version, shards, metadata):
        def one(shard):
            if shard not in opened:
                opened[shard] = tensorhub.open(
                    "policy", replica="trainer", shard=shard, shards=len(shards), server=server
                )
                opened[shard].register(shards[shard])
            opened[shard].unpublish()
            opened[shard].publish(version, metadata=metadata)

        list(pool.map(one, range(len(shards))))

    yield begin
    list(pool.map(lambda worker: worker.close(timeout=10), opened.values()))
    pool.shutdown()


def test_each_tensor_is_put_together_along_the_dimension_that_its_publisher_says(server, publish):
    full = {
        "a.rows": torch.arange(35.0).reshape(7, 5),
        "b.columns": torch.arange(12.0).reshape(2, 6),
        "c.all": torch.arange(3.0),
        "d.few": torch.arange(1.0).reshape(1, 1),
    }
    cut = {"a.rows": 0, "b.columns": 1, "d.few": 0}
    shards = [
        {name: tensor if name not in cut else part(tensor, cut[name], shard) for name, tensor in full.items()}
        for shard in range(3)
    ]
    publish(1, shards, {CUT: "01r0"})
    with Whole("policy", replica="rollout-0", server=server) as whole:
        assert whole.update() == 1
        found = dict(whole)
        assert found.keys() == full.keys()
        for name, tensor in full.items():
            assert torch.equal(found[name], tensor), name


def part(tensor, dimension, shard):
    """As torch cuts: the last ones have less, or nothing."""
    parts = tensor.chunk(3, dimension)
    found = parts[shard] if shard < len(parts) else tensor.narrow(dimension, 0, 0)
    return found.contiguous()


@pytest.mark.parametrize("metadata", [{}, {CUT: "?"}])
def test_shards_that_nobody_can_put_together_are_refused_by_name(server, publish, metadata):
    publish(1, [{"w": torch.ones(4)}, {"w": torch.ones(4)}], metadata)
    with Whole("policy", replica="rollout-0", server=server) as whole:
        assert whole.update() == 1
        with pytest.raises(tensorhub.UsageError, match=r"how the 2 shards of 'w' are put together"):
            dict(whole)


def test_it_waits_for_a_first_version_and_holds_none_before(server, publish):
    with Whole("policy", replica="rollout-0", server=server) as whole:
        began = time.monotonic()
        with pytest.raises(tensorhub.VersionUnavailable):
            whole.update(timeout=0.5)
        assert time.monotonic() - began < 10
        assert whole.version is None
        with pytest.raises(tensorhub.UsageError, match="holds no version of policy"):
            dict(whole)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(whole.update, timeout=30)
            publish(4, [{"w": torch.ones(4)}], {})
            assert waiting.result(30) == 4
        assert torch.equal(dict(whole)["w"], torch.ones(4))


def test_a_closed_one_begins_anew(server, publish):
    publish(1, [{"w": torch.ones(4)}], {})
    whole = Whole("policy", replica="rollout-0", server=server)
    whole.close()
    assert whole.update() == 1
    whole.close()
    assert whole.version is None
    assert whole.update() == 1
    whole.close()


def test_what_cannot_join_leaves_nothing_behind(server, publish):
    publish(1, [{"w": torch.ones(4)}, {"w": torch.ones(4)}], {CUT: "0"})
    taken = tensorhub.open("policy", replica="rollout-0", shard=1, shards=2, server=server)
    whole = Whole("policy", replica="rollout-0", server=server, timeout=2.0)
    with pytest.raises((tensorhub.ShardTaken, tensorhub.DeadlineExceeded)):
        whole.update(timeout=10)
    assert {each.name for each in tensorhub.connect(server).replicas("policy")} == {"trainer", "rollout-0"}
    taken.close()
    assert whole.update(timeout=30) == 1
    assert torch.equal(dict(whole)["w"], torch.ones(8))
    whole.close()


def test_a_word_on_other_tensors_is_refused(server, publish):
    publish(1, [{"w": torch.ones(4)}, {"w": torch.ones(4)}], {CUT: "00"})
    with Whole("policy", replica="rollout-0", server=server) as whole:
        whole.update()
        with pytest.raises(tensorhub.UsageError, match="tells of 2 tensors"):
            dict(whole)
