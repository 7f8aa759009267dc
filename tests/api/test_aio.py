"""The same names as coroutines, in a loop of the caller's own."""

import asyncio
import threading

import numpy as np
import pytest

import tensorhub
from runtime.kit import within
from tensorhub import aio
from tensorhub.memory.registration import Registration


def run(story):
    return asyncio.run(asyncio.wait_for(story, 20))


def test_a_step_of_training_in_ones_own_loop(server):
    async def story():
        source, target = np.ones(1000), np.zeros(1000)
        async with (
            await aio.open("m", replica="t", server=server.address) as trainer,
            await aio.open("m", replica="r", server=server.address) as rollout,
        ):
            await trainer.register({"w": source})
            await rollout.register({"w": target})
            waiting = asyncio.create_task(rollout.wait_for("latest"))
            assert await trainer.publish(1) == 1
            assert await waiting == 1
            assert await rollout.replicate() == 1
            async with trainer.mutating(version=2):
                source += 1
            assert await rollout.update() == 2
            await trainer.check()
            assert (target == source).all()
            view = aio.connect(server.address)
            assert await view.models() == ["m"]
            assert [version.version for version in await view.versions("m")] == [2, 1]
            assert [replica.name for replica in await view.replicas("m")] == ["r", "t"]
            assert await view.transfers() == ()
            with pytest.raises(ZeroDivisionError):
                async with trainer.mutating(version=3):
                    raise ZeroDivisionError
            assert trainer.version is None
        with pytest.raises(tensorhub.Closed):
            await trainer.publish(3)
        with pytest.raises(tensorhub.UsageError, match="shard"):
            await aio.open("m", replica="r", shard=5, server=server.address)

    run(story())


def test_a_cancelled_call_is_over_and_the_next_one_works(server):
    async def story():
        weights = await aio.open("m", replica="r", server=server.address)
        await weights.register({"w": np.zeros(10)})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(weights.replicate("latest", timeout=60), 0.2)
        assert await weights.publish(1, timeout=5) == 1
        await weights.close()

    with within(10):
        run(story())


def test_what_a_call_waits_for_is_noted_in_its_callers_thread(server, join, monkeypatch):
    """A device's streams belong to threads: those of the caller are not known where the work is done."""
    noted, settled = [], []
    settle = Registration.settle
    monkeypatch.setattr(Registration, "note_call", lambda self: noted.append(threading.current_thread()))
    monkeypatch.setattr(Registration, "settle", lambda self: (settled.append(list(noted)), settle(self)))
    weights, _ = join("t", 1.0)
    noted.clear()
    weights.publish(1)
    assert settled[-1] == [threading.current_thread()], "before the bytes are looked at"

    async def story():
        async with await aio.open("m", replica="r", server=server.address) as other:
            await other.register({"w": np.zeros(50_000, np.float32)})
            noted.clear()
            assert await other.replicate(1) == 1

    run(story())
    assert settled[-1] == [threading.current_thread()]
