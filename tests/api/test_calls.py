"""Progress of calls, calls that go on in the background, news of versions, blocks of `using`, and times."""

import asyncio
import concurrent.futures
import gc
import logging
import sys
import threading

import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub.runtime import loops
from tensorhub.runtime.driver import Driver

PATIENCE_S = 10


def test_a_call_tells_its_progress_to_its_own_thread(join, monkeypatch):
    monkeypatch.setattr(loops, "BRIEF_S", 0.001)
    monkeypatch.setattr(loops, "TICK_S", 0.001)
    trainer, source = join("t", 1.0, size=4 << 20, transports="tcp")
    rollout, target = join("r", size=4 << 20, transports="tcp")
    trainer.publish(1)
    told = []

    def tell(found):
        told.append((threading.get_ident(), found))

    assert rollout.replicate(progress=tell) == 1
    assert {ident for ident, _ in told} == {threading.get_ident()}
    found = [each for _, each in told]
    assert found[-1] == tensorhub.Progress(1, source.nbytes, source.nbytes, "t", 0)
    assert {(each.version, each.total_bytes) for each in found} == {(1, source.nbytes)}
    assert [each.done_bytes for each in found] == sorted(each.done_bytes for each in found)
    assert rollout.update(progress=tell) == 1
    assert len(told) == len(found), "nothing was filled"
    assert rollout.progress is None
    assert target[0] == 1.0


def test_an_error_of_the_callback_ends_the_call(join, monkeypatch):
    rollout, _ = join("r")

    def fail(found):
        raise ValueError("stop here")

    monkeypatch.setattr(Driver, "progress", property(lambda driver: tensorhub.Progress(1, 0, 1, "", 0)))
    with pytest.raises(ValueError, match="stop here"):
        rollout.replicate(progress=fail, timeout=PATIENCE_S)
    assert rollout.publish(1) == 1, "the worker goes on"


def test_a_bar_of_tqdm(join, monkeypatch, capfd):
    trainer, _ = join("t", 1.0)
    rollout, _ = join("r")
    trainer.publish(1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tqdm.auto", None)
        with pytest.raises(tensorhub.UsageError, match="tqdm") as found:
            rollout.replicate(progress=True)
        assert "tensorhub[progress]" in found.value.hint
    pytest.importorskip("tqdm")
    rollout.replicate(progress=True)
    shown = capfd.readouterr().err
    assert "version 1" in shown
    assert "100%" in shown


def test_the_progress_of_a_group_and_in_a_coroutine(server):
    trainer = tensorhub.open_group("m", replica="t", shards=2, server=server.address)
    trainer.register([{"w": np.ones(1000, "float32")} for _ in range(2)])
    trainer.publish(1)
    told = []
    with tensorhub.open_group("m", replica="r", shards=2, server=server.address) as rollout:
        rollout.register([{"w": np.zeros(1000, "float32")} for _ in range(2)])
        call = rollout.begin_replicate()
        assert call.wait(PATIENCE_S) == 1
        trainer.unpublish()
        assert trainer.publish(2) == 2
        with rollout.using() as version:
            assert version == 1
        assert rollout.update(progress=told.append) == 2
    trainer.close()
    assert told[-1] == tensorhub.Progress(2, 8000, 8000, "t", 0)

    async def main():
        async with await tensorhub.aio.open("n", replica="t", server=server.address) as source:
            await source.register({"w": np.ones(1000, "float32")})
            await source.publish(1)
            weights = await tensorhub.aio.open("n", replica="r", server=server.address)
            await weights.register({"w": np.zeros(1000, "float32")})
            heard = asyncio.Queue()
            end = weights.on_version(heard.put)
            assert await asyncio.wait_for(heard.get(), PATIENCE_S) == 1
            assert await weights.replicate(progress=told.append) == 1
            async with weights.using() as version:
                assert version == 1
                with pytest.raises(tensorhub.UsageError, match="inside a block"):
                    await weights.update()
                task = asyncio.create_task(weights.update())
            assert await task == 1
            end()
            await weights.close()

    asyncio.run(main())
    assert told[-1].version == 1


def test_an_update_goes_on_in_the_background(join):
    trainer, source = join("t", 1.0)
    rollout, target = join("r")
    call = rollout.begin_replicate("latest", timeout=PATIENCE_S)
    assert not call.done
    with pytest.raises(tensorhub.UsageError, match="has not ended"):
        rollout.begin_update()
    with pytest.raises(tensorhub.DeadlineExceeded, match="goes on"):
        call.wait(0.01)
    begun = trainer.begin_publish(1, metadata={"loss": 1})
    assert begun.wait() == 1
    assert call.wait() == call.wait() == 1
    assert call.done
    assert (target == source).all()
    assert rollout.metadata == {"loss": 1}
    assert trainer.begin_unpublish().wait() is None


def test_a_mistake_is_raised_at_once_and_later_errors_by_wait(join, caplog):
    rollout, _ = join("r")
    with pytest.raises(tensorhub.UsageError):
        rollout.begin_publish("no number")
    with pytest.raises(tensorhub.UsageError, match="no progress="):
        rollout.begin_update(progress=print)
    call = rollout.begin_replicate(timeout=0.2)
    with pytest.raises(tensorhub.DeadlineExceeded, match="no version of m yet"):
        call.wait()
    dropped = rollout.begin_replicate(timeout=0.2)
    del dropped
    gc.collect()
    with caplog.at_level(logging.WARNING, "tensorhub.calls"):
        eventually(lambda: "its caller did not wait for it" in caplog.text, "the error is logged")


def test_cancel_ends_a_call_and_the_worker_goes_on(join):
    rollout, _ = join("r")
    call = rollout.begin_replicate(timeout=PATIENCE_S)
    assert call.cancel()
    assert call.done
    with pytest.raises(concurrent.futures.CancelledError):
        call.wait()
    assert rollout.publish(1) == 1
    done = rollout.begin_publish(1)
    assert done.wait() == 1
    assert not done.cancel()
    assert done.wait() == 1


def test_each_newer_version_is_told(join, caplog):
    trainer, _ = join("t", 1.0)
    rollout, _ = join("r")
    told, threads = [], []

    def hear(version):
        told.append(version)
        threads.append(threading.current_thread().name)
        if version == 2:
            raise ValueError("a defect of the caller")

    end = rollout.on_version(hear)
    for version in (1, 2, 3):
        with trainer.mutating(version=version):
            pass
        eventually(lambda version=version: told[-1:] == [version], "it is told")
    assert {name.startswith("tensorhub-") for name in threads} == {True}
    assert "a defect of the caller" in caplog.text
    end()
    other = rollout.on_version(told.append)
    eventually(lambda: told[3:] == [3], "it is told anew what is newer than what is held")
    rollout.update()
    rollout.close()
    other()
    with pytest.raises(tensorhub.Closed):
        rollout.on_version(told.append)
    eventually(lambda: not rollout._aio._client._following, "nothing follows any more")


def test_an_update_waits_for_a_block_of_using(join):
    trainer, source = join("t", 1.0)
    rollout, target = join("r")
    with pytest.raises(tensorhub.UsageError, match="holds no version"), rollout.using():
        pass
    trainer.publish(1)
    rollout.replicate()
    with trainer.mutating(version=2):
        source[:] = 2.0
    with rollout.using() as version, rollout.using() as same:
        assert version == same == 1
        with pytest.raises(tensorhub.UsageError, match="would wait for itself"):
            rollout.update()
        late = rollout.begin_update(timeout=0.2)
        with pytest.raises(tensorhub.DeadlineExceeded, match=r"waits for a block of using\(\), held by thread Main"):
            late.wait()
        call = rollout.begin_update(timeout=PATIENCE_S)
        assert not call.done
        assert (target == 1.0).all()
    assert call.wait() == 2
    assert (target == 2.0).all()


def test_using_waits_for_an_update_under_way(join):
    rollout, _ = join("r")
    call = rollout.begin_replicate(timeout=PATIENCE_S)

    def use():
        with pytest.raises(tensorhub.DeadlineExceeded, match="waits for its replicate"), rollout.using(timeout=0.1):
            pass

    in_threads(use)
    trainer, _ = join("t", 1.0)
    trainer.publish(1)
    with rollout.using() as version:
        assert version == 1
    assert call.wait() == 1


def test_statistics_count_what_went_where_and_for_how_long(join):
    trainer, source = join("t", 1.0)
    rollout, _ = join("r")
    trainer.publish(1)
    rollout.replicate()
    # the source counts a chunk when its reader has let go of it, which may be a moment after that has returned
    eventually(lambda: trainer.statistics()["sent_bytes"] == source.nbytes, "all that was sent is counted")
    published, filled = trainer.statistics(), rollout.statistics()
    assert set(filled) == set(tensorhub.Statistics.__annotations__)
    assert filled["bytes_by_source"] == {"t": source.nbytes}
    assert filled["received_bytes"] == source.nbytes
    assert filled["reports"] > 0
    assert filled["is_connected"] is True
    assert 0 < published["publish_hash_s"] <= published["publish_s"] == pytest.approx(published["total_publish_s"], 0.5)
    assert 0 < filled["update_transfer_s"] <= filled["update_s"]
    assert filled["update_verify_s"] == 0, "a read verifies as it goes"
    rollout.check()
    assert rollout.statistics()["total_verify_s"] > 0
