"""`next_version` and `wait_held`: a trainer that goes on where another one died, and one that does not run ahead."""

import threading
import time

import pytest

import tensorhub
from runtime.kit import in_threads


def test_the_next_number_is_above_all_that_were_taken(server, join):
    view = tensorhub.connect(server.address)
    assert view.next_version("m") == 0
    trainer, array = join("t", 1.0)
    assert view.next_version("m") == 0
    trainer.publish(view.next_version("m"))
    assert view.next_version("m") == 1
    with trainer.mutating(version=5):
        array += 1
        assert view.next_version("m") == 1, "5 is not published yet"
    trainer.close()
    assert view.next_version("m") == 6, "5 is lost, and stays taken"
    assert view.next_version("another") == 0
    with pytest.raises(tensorhub.UsageError, match="model=''"):
        view.next_version("")


def test_a_trainer_waits_for_its_rollouts(join):
    trainer, _ = join("t", 1.0)
    assert (trainer.publish(1), trainer.wait_held(1)) == (1, ()), "nobody follows it yet"
    fast, _ = join("fast")
    slow, _ = join("slow")
    for rollout in (fast, slow):
        rollout.replicate("latest")
    assert trainer.wait_held(1) == ("fast", "slow")
    with trainer.mutating(version=2):
        pass
    assert fast.update("latest") == 2
    assert trainer.wait_held(2, 0.5) == ("fast",)
    with pytest.raises(
        tensorhub.DeadlineExceeded, match=r"1 of 2 replicas hold version 2 .* missing: slow \(holds 1\)"
    ):
        trainer.wait_held(2, timeout=0.5)
    began = time.monotonic()
    with pytest.raises(tensorhub.DeadlineExceeded):
        trainer.wait_held(2, timeout=0.5)
    assert time.monotonic() - began >= 0.5, "it waits for as long as it was told"
    updating = threading.Timer(0.3, slow.update)
    updating.start()
    assert trainer.wait_held(2, timeout=5) == ("fast", "slow")
    updating.join()


def test_a_version_that_was_not_published_is_waited_for(join):
    trainer, _ = join("t", 1.0)
    with pytest.raises(tensorhub.DeadlineExceeded, match="m has no version 7 yet; nothing was published yet") as raised:
        trainer.wait_held(7, timeout=0.4)
    assert "within 0.4 s" in str(raised.value)
    assert "which versions there are" in raised.value.hint
    other, _ = join("other")
    held, published = in_threads(lambda: other.wait_held(7, timeout=5), lambda: trainer.publish(7))
    assert (held, published) == ((), 7)


@pytest.mark.parametrize("fraction", [-0.1, float("nan"), "all", True])
def test_a_fraction_that_is_none(join, fraction):
    trainer, _ = join("t", 1.0)
    with pytest.raises(tensorhub.UsageError, match="is not a number from 0 to 1"):
        trainer.wait_held(1, fraction)


def test_a_number_that_is_yet_to_be_published_is_waited_for(join):
    trainer, array = join("t", 1.0)
    rollout, filled = join("r")
    with pytest.raises(tensorhub.VersionUnavailable, match="m has no version 3; nothing was published yet"):
        rollout.replicate(3)

    def publish():
        trainer.publish(2)
        with trainer.mutating(version=3):
            array[:] = 3.0

    held, _ = in_threads(lambda: rollout.replicate(3, wait=True, timeout=10), publish)
    assert (held, rollout.version) == (3, 3)
    assert (filled == 3.0).all()


def test_a_number_that_cannot_come_any_more_is_not_waited_for(join):
    trainer, _ = join("t", 1.0)
    rollout, _ = join("r")
    trainer.publish(5)
    with pytest.raises(tensorhub.VersionUnavailable, match="no version 4; its newest version is 5"):
        rollout.replicate(4, wait=True)
    with pytest.raises(tensorhub.DeadlineExceeded, match=r"replicate\(6, wait=True\) .* its newest version is 5"):
        rollout.replicate(6, wait=True, timeout=0.5)
    with pytest.raises(tensorhub.UsageError, match="wait='yes' is neither True nor False"):
        rollout.replicate(6, wait="yes")
    assert rollout.replicate(5, wait=True) == 5
