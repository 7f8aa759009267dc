"""A model in whole tensors in one process, and a copy in host memory that is published."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tensorhub
from tensorhub import Box
from tensorhub.integrations.whole import StagedPublisher, Whole


@pytest.fixture
def publish(server):
    """`publish(version, shards)` publishes a mapping and its boxes for each shard, each in a thread."""
    opened, pool = {}, ThreadPoolExecutor(4)

    def begin(version, shards, **options):
        def one(shard):
            tensors, boxes = shards[shard]
            if shard not in opened:
                opened[shard] = tensorhub.open(
                    "policy", replica="trainer", shard=shard, shards=len(shards), server=server
                )
                opened[shard].register(tensors, boxes=boxes)
            opened[shard].unpublish()
            opened[shard].publish(version, **options)

        list(pool.map(one, range(len(shards))))

    yield begin
    list(pool.map(lambda worker: worker.close(timeout=10), opened.values()))
    pool.shutdown()


def halves(name="w"):
    """A vector of eight, cut in two."""
    return [
        ({"mine": torch.full((4,), float(shard))}, {"mine": [Box(name, (8,), (4 * shard,), (4,))]})
        for shard in range(2)
    ]


ONE = [({"w": torch.ones(4)}, {})]


def test_what_was_published_without_boxes_is_refused(server, publish):
    publish(1, [({"w": torch.ones(4)}, None), ({"w": torch.ones(4)}, None)])
    with (
        Whole("policy", replica="rollout-0", server=server) as whole,
        pytest.raises(tensorhub.UsageError, match=r"policy@1 was published without boxes"),
    ):
        whole.update()


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
            publish(4, ONE)
            assert waiting.result(30) == 4
        assert torch.equal(dict(whole)["w"], torch.ones(4))


def test_what_cannot_join_leaves_nothing_behind(server, publish):
    publish(1, halves())
    taken = tensorhub.open("policy", replica="rollout-0", server=server)
    whole = Whole("policy", replica="rollout-0", server=server, timeout=2.0)
    with pytest.raises((tensorhub.ShardTaken, tensorhub.DeadlineExceeded)):
        whole.update(timeout=10)
    assert {each.name for each in tensorhub.connect(server).replicas("policy")} == {"trainer", "rollout-0"}
    taken.close()
    assert whole.update(timeout=30) == 1
    assert torch.equal(dict(whole)["w"], torch.tensor([0.0] * 4 + [1.0] * 4))
    whole.close()


def model(step):
    return {
        "weight": torch.full((3,), step + 0.5),
        "half": torch.full((3,), step + 0.5, dtype=torch.float16),
        "ids": torch.arange(1001, 1004) + step,
        "most": torch.tensor([2**31 - 1], dtype=torch.int32),
        "flags": torch.tensor([True, False]),
        "turn": torch.tensor([1 + 2j]),
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_only_floating_point_numbers_are_cast_and_another_dtype_is_refused_by_name(server, dtype):
    with contextlib.closing(StagedPublisher("policy", replica="trainer", server=server, dtype=dtype)) as trainer:
        for step in (0, 1, 2):  # the first makes the copies, all others fill them
            wanted = model(step)
            if step == 2:
                changed = {**wanted, "ids": torch.full((3,), 1.75)}
                with pytest.raises(tensorhub.UsageError, match=r"'ids' is torch.float32 now, and was torch.int64"):
                    trainer.publish(iter(changed.items()))
                assert trainer.version is None, "half of another version is in its tensors"
            assert trainer.publish(iter(wanted.items())) == step
            found = tensorhub.load(f"policy@{step}", server=server)
            assert sorted(found) == sorted(wanted)
            for name, tensor in wanted.items():
                floats = dtype is not None and name in ("weight", "half")
                assert found[name].dtype == (dtype if floats else tensor.dtype), name
                assert torch.equal(found[name], tensor.to(found[name].dtype)), name
