"""`register(..., dtype=...)`: masters change while what was published of them is read, and are filled by widening."""

import contextlib
import threading

import numpy as np
import pytest
import torch

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub.memory.cast import Casts
from tensorhub.runtime import dataplane
from tensorhub.runtime.driver import Driver

SIZE = 200_000


@pytest.fixture
def masters(join):
    """`masters(replica, value)` opens a worker that publishes float32 masters in bfloat16; returns both.

    `in_place` is what it publishes beside them as it is, of which nothing is copied.
    """

    def joined(replica="t", value=0.0, *, dtype="bfloat16", in_place=True, **options):
        master = torch.full((SIZE,), value) + torch.arange(SIZE) / 1024
        weights, _ = join(replica, tensors={"only": torch.zeros(1)}, **options)
        weights.register({"w": master, **({"steps": torch.arange(3)} if in_place else {})}, dtype=dtype)
        return weights, master

    return joined


@pytest.fixture
def engine(join):
    """`engine(replica)` opens a worker with tensors of bfloat16; returns it and the tensor."""

    def joined(replica="r", *, in_place=True, **options):
        target = torch.zeros(SIZE, dtype=torch.bfloat16)
        steps = {"steps": torch.zeros(3, dtype=torch.int64)} if in_place else {}
        weights, _ = join(replica, tensors={"w": target, **steps}, **options)
        return weights, target

    return joined


def test_masters_change_while_the_version_is_held_and_read(masters, engine):
    """What is read is what was published, whenever it is read."""
    trainer, master = masters()
    trainer.publish(1)
    expected = master.bfloat16()
    for step in range(5):
        master += 1.7
        rollout, target = engine(f"r{step}")
        assert rollout.replicate() == 1
        assert torch.equal(target, expected)
        rollout.close()
    trainer.check()
    with pytest.raises(tensorhub.VersionConflict, match="holds version 1, but these tensors were changed since: 'w'"):
        trainer.publish(1)
    assert trainer.version == 1
    trainer.unpublish()
    assert trainer.publish(2) == 2
    rollout, target = engine("late")
    assert rollout.replicate() == 2
    assert torch.equal(target, master.bfloat16())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_the_same_masters_may_be_published_again(masters, dtype):
    """Also what is no number, of which a cast may change the payload."""
    trainer, master = masters(dtype=dtype)
    master[5], master[7] = float("nan"), float("inf")
    assert trainer.publish(1) == 1
    assert trainer.publish(1) == 1
    master[6] = float("nan")
    with pytest.raises(tensorhub.VersionConflict, match="'w'"):
        trainer.publish(1)


def test_masters_outside_of_all_boxes_may_differ(join):
    padded = np.ones((4, 100), np.float32)
    weights, _ = join("t", tensors={"only": np.zeros(1)})
    weights.register(
        {"w": padded},
        dtype="float16",
        boxes={"w": [tensorhub.Box("w", (4, 60), at=(0, 0), size=(4, 60), strides=(100, 1))]},
    )
    weights.publish(1)
    padded[:, 60:] = 7
    assert weights.publish(1) == 1
    padded[3, 59] = 7
    with pytest.raises(tensorhub.VersionConflict, match="'w'"):
        weights.publish(1)


@pytest.fixture
def drained(monkeypatch):
    """An event: until it is set the last readers of what is withdrawn do not end, wherever that is."""
    ended = threading.Event()
    real = dataplane.withdraw_everywhere

    def withdraw(*arguments, **named):
        assert ended.wait(30)
        real(*arguments, **named)

    monkeypatch.setattr(dataplane, "withdraw_everywhere", withdraw)
    monkeypatch.setattr(dataplane, "withdraw_unread", lambda *_: False)
    yield ended
    ended.set()


def test_unpublish_does_not_wait_for_readers_and_the_next_publish_does(masters, engine, drained):
    trainer, master = masters(in_place=False)
    trainer.publish(1)
    trainer.unpublish(timeout=20)
    master += 1  # while it is read
    with pytest.raises(tensorhub.DeadlineExceeded, match="waits for those who still read the version before"):
        trainer.publish(2, timeout=0.3)
    drained.set()
    assert trainer.publish(2, timeout=20) == 2
    rollout, target = engine("other", in_place=False)
    assert rollout.replicate() == 2
    assert torch.equal(target, master.bfloat16())


def test_the_block_of_mutating_runs_while_the_version_before_is_read(masters, engine, drained):
    trainer, master = masters(in_place=False)
    trainer.publish(1)
    with trainer.mutating(version=2, timeout=20):
        master += 1
        drained.set()
    rollout, target = engine("other", in_place=False)
    assert rollout.replicate() == 2
    assert torch.equal(target, master.bfloat16())


def test_what_lies_in_place_beside_masters_does_not_change_while_it_is_read(masters, drained):
    trainer, _ = masters(dtype={"w": torch.bfloat16})
    trainer.publish(1)
    with pytest.raises(tensorhub.DeadlineExceeded):
        trainer.unpublish(timeout=0.5)
    with pytest.raises(tensorhub.DeadlineExceeded), trainer.mutating(version=2, timeout=0.5):
        pytest.fail("the block changes what readers may be reading")
    drained.set()
    with trainer.mutating(version=2, timeout=20):
        pass
    assert trainer.version == 2


def test_what_goes_wrong_with_the_readers_is_raised_by_the_next_call(masters, drained):
    trainer, master = masters(in_place=False)
    trainer.publish(1)
    trainer.unpublish(timeout=0.5)
    master += 1
    with pytest.raises(tensorhub.DeadlineExceeded):
        trainer.publish(2, timeout=20)
    drained.set()
    eventually(lambda: _unpublished(trainer), "it can be unpublished after all")
    assert trainer.publish(2) == 2


def _unpublished(weights):
    with contextlib.suppress(tensorhub.NotDrained, tensorhub.DeadlineExceeded):
        weights.unpublish(timeout=2)
        return weights.version is None


def test_a_restarted_trainer_is_filled_by_widening(masters, engine):
    trainer, master = masters()
    trainer.publish(1)
    published = master.bfloat16()
    rollout, _ = engine()
    rollout.replicate()
    trainer.close()
    again, fresh = masters("again", -1.0)
    assert again.replicate() == 1
    assert torch.equal(fresh, published.float())
    fresh += 1
    with again.mutating(version=2):
        fresh += 1
    assert rollout.update() == 2
    assert again.update() == 2  # what is held is kept, and the masters with it
    assert torch.equal(fresh, published.float() + 1 + 1)


@pytest.fixture
def cut_off(monkeypatch):
    """A block in which casting back begins and is given up at once, as at the end of its time."""
    real = Casts.give_back

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(Casts, "give_back", lambda casts, _: real(casts, lambda: True))
            yield

    return block()


@pytest.fixture
def failing_late(monkeypatch):
    """A block in which calls do all that they do, and fail: a sibling did, or time ran out before the last word."""
    real = Driver.call

    async def fail(driver, called):
        await real(driver, called)
        raise tensorhub.DeadlineExceeded("no word of it")

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(Driver, "call", fail)
            yield

    return block()


def test_masters_that_were_filled_in_part_are_not_taken_for_what_is_held(masters, cut_off):
    """Also after that was published here, as it is held: nothing was cast then."""
    trainer, master = masters()
    trainer.publish(1)
    other, half = masters("o", -1.0)
    with cut_off, pytest.raises(tensorhub.Closed):
        other.replicate()
    assert other.version is None
    with pytest.raises(tensorhub.UsageError, match="casting back was cut off"), other.mutating(version=2):
        pytest.fail("the block ran")
    assert other.update() == other.version == 1
    assert torch.equal(half, master.bfloat16().float())


def test_masters_that_were_filled_in_part_are_published_only_after_their_owner_has_said_so(masters, cut_off):
    trainer, _ = masters()
    trainer.publish(1)
    other, half = masters("o", -1.0)
    with cut_off, pytest.raises(tensorhub.Closed):
        other.replicate()
    other.unpublish()
    for come_back in (lambda: None, other.resume):
        come_back()
        with pytest.raises(tensorhub.UsageError, match="casting back was cut off"):
            other.publish(2)
        other.suspend()
    half.fill_(3.0)  # as from a checkpoint
    trainer.close()
    other.register({"w": half, "steps": torch.arange(3)}, dtype="bfloat16")
    assert other.publish(2) == other.version == 2


def test_masters_are_no_version_where_the_call_failed_after_its_fill(masters, failing_late):
    trainer, master = masters()
    trainer.publish(1)
    other, late = masters("o", -1.0)
    before = late.clone()
    with failing_late, pytest.raises(tensorhub.DeadlineExceeded, match="no word of it"):
        other.replicate()
    assert (other.version, other.metadata) == (None, None)
    assert torch.equal(late, before)
    with pytest.raises(tensorhub.UsageError, match="not cast back"), other.mutating(version=2):
        pytest.fail("the block ran")
    other.unpublish()
    with pytest.raises(tensorhub.UsageError, match="not cast back"):
        other.publish(2)
    assert other.update() == other.version == 1
    assert torch.equal(late, master.bfloat16().float())
    trainer.close()
    with other.mutating(version=2):
        late += 1
    assert other.version == 2


def test_masters_that_would_lose_numbers_refuse_to_be_filled(masters, join):
    trainer, _ = masters()
    trainer.publish(1)
    other, _ = join("o", tensors={"only": torch.zeros(1)})
    other.register({"w": torch.zeros(SIZE, dtype=torch.float16), "steps": torch.arange(3)}, dtype={"w": "bfloat16"})
    for verb in (other.replicate, other.update):
        with pytest.raises(tensorhub.UsageError, match="'w' of float16 cannot hold every number of bfloat16") as found:
            verb()
        assert "without dtype=" in found.value.hint
    assert other.version is None


def test_shards_of_one_replica(masters, server):
    """All shards call together, and one of them has no masters."""
    opened = [tensorhub.open("m", replica="t", shard=i, shards=2, server=server.address) for i in range(2)]
    readers = [tensorhub.open("m", replica="r", shard=i, shards=2, server=server.address) for i in range(2)]
    master, plain = torch.randn(SIZE), np.ones(100, np.float32)
    opened[0].register({"w": master}, dtype="bfloat16")
    opened[1].register({"v": plain})
    target, other = torch.zeros(SIZE, dtype=torch.bfloat16), np.zeros(100, np.float32)
    readers[0].register({"w": target})
    readers[1].register({"v": other})
    try:
        for version in (1, 2, 3):
            in_threads(*(weights.unpublish for weights in opened))
            master += 1
            plain += 1
            in_threads(*(lambda weights=weights, number=version: weights.publish(number) for weights in opened))
            in_threads(*(weights.update for weights in readers))
            assert torch.equal(target, master.bfloat16())
            assert (other == plain).all()
    finally:
        for weights in (*readers, *opened):
            weights.close(timeout=3)


def test_close_while_the_withdrawal_goes_on(masters, drained):
    trainer, _ = masters(in_place=False)
    trainer.publish(1)
    trainer.unpublish(timeout=20)
    closing = threading.Thread(target=trainer.close, kwargs={"timeout": 1})
    closing.start()
    closing.join(0.2)
    drained.set()
    closing.join(20)
    assert not closing.is_alive()
