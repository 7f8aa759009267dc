"""What a trainer and its rollouts do with `Weights`, end to end over real sockets."""

import gc
import logging
import threading
import weakref
from collections import Counter

import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub.memory import digests
from tensorhub.memory.host_memory import Room
from tensorhub.memory.registration import register
from tensorhub.runtime.driver import AFTER_DEADLINE_S
from tensorhub.server.versions import VersionRecord
from tensorhub.transport.local.transport import LocalTransport
from tensorhub.transport.tcp.transport import TcpTransport

torch = pytest.importorskip("torch")


def test_a_step_of_training_reaches_the_rollouts(join):
    trainer, source = join("t", 1.0)
    rollouts = [join(f"r{i}") for i in range(3)]
    assert trainer.publish(1) == 1
    results = in_threads(*(lambda weights=weights: weights.replicate("latest") for weights, _ in rollouts))
    assert results == [1, 1, 1]
    with trainer.mutating(version=2):
        source[:] = np.arange(source.size)
    for weights, array in rollouts:
        assert weights.update("latest") == 2
        assert (array == source).all()
        assert weights.version == 2
        assert weights.progress is None
        assert weights.update("latest") == 2  # nothing newer: nothing is read
    received = sum(weights.statistics()["received_bytes"] for weights, _ in rollouts)
    assert received == 2 * 3 * source.nbytes


def test_a_process_that_stood_still_over_the_deadline_of_its_call(join):
    """It was stopped, or a native call held the interpreter: the call has run out of time, and the worker lives."""
    weights, _ = join("r")
    loop, never, errors = weights._aio._thread.loop, threading.Event(), []

    def call():
        with pytest.raises(tensorhub.DeadlineExceeded) as caught:
            weights.replicate(timeout=0.5)
        errors.append(caught.value)

    def hold():
        eventually(lambda: weights._aio._client.driver.worker.call is not None, "it waits for a version")
        loop.call_soon_threadsafe(never.wait, 0.5 + AFTER_DEADLINE_S + 0.1)

    in_threads(call, hold)
    assert "did not end" in str(errors[0])
    assert weights.publish(1) == 1, "it goes on"


def test_nobody_sees_a_version_of_which_bytes_have_been_written_over(join):
    """From another thread: what is read between two looks that say version 1 is of version 1."""
    trainer, source = join("t", 1.0)
    rollout, target = join("r")
    trainer.publish(1)
    rollout.replicate()
    wrong, is_over = [], threading.Event()

    def watch():
        while not is_over.is_set():
            before, first = rollout.version, float(target[0])
            if before is not None and first != before and rollout.version == before:
                wrong.append((before, first))

    def update():
        try:
            for version in range(2, 40):
                with trainer.mutating(version=version):
                    source[:] = float(version)
                rollout.update()
        finally:
            is_over.set()

    assert in_threads(watch, update) == [None, None]
    assert not wrong


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("kind", "boxes"), [("local", {}), ("tcp", None)])
def test_updates_leave_nothing_for_the_garbage_collector(join, kind, boxes):
    """Else the memory of a reader grows until it looks, which is after a quarter as many objects as the process has."""
    trainer, source = join("t", 1.0, transports=kind)
    rollout, target = join("r", transports=kind)
    for weights, array in ((trainer, source), (rollout, target)):
        weights.register({"w": array}, boxes=boxes)

    def update(versions):
        for version in versions:
            trainer.unpublish()
            trainer.publish(version)
            rollout.update()

    def ours():
        found = Counter(type(each) for each in gc.get_objects() if "tensorhub" in str(type(each).__module__))
        return found - Counter({VersionRecord: found[VersionRecord]})  # of which the server keeps 256, on purpose

    trainer.publish(1)
    rollout.replicate()
    update(range(2, 10))
    before = ours()
    update(range(10, 30))
    eventually(lambda: max((ours() - before).values(), default=0) < 10, "fewer objects of each kind than updates")


@pytest.mark.usefixtures("no_collector")
def test_what_is_closed_holds_no_memory_though_somebody_holds_it(join):
    """Tensors and host copies: who keeps a closed `Weights` around is not to pay for that."""
    trainer, _ = join("t", 1.0)
    rollout, tensor = join("r", prefetch="always")
    known = weakref.ref(tensor)
    del tensor
    trainer.publish(1)
    rollout.replicate()
    with trainer.mutating(version=2):
        pass
    data = rollout._aio._client.driver.data
    eventually(lambda: data.copies.used_bytes, "version 2 is fetched ahead")
    rollout.close()
    assert data.copies.used_bytes == 0
    assert not data.copies._contents
    assert (data.registration, data.content, data.incoming, data.vacated) == (None, None, None, None)
    assert known() is None


def test_what_this_process_has_open_already_is_said_so(join, server):
    """A notebook cell that is run twice."""
    first, _ = join("t", 1.0)
    with pytest.raises(tensorhub.ShardTaken, match=r"m/t\[0\] is open in this process already") as raised:
        tensorhub.open("m", replica="t", server=server.address, timeout=5)
    assert "close()" in raised.value.hint
    first.close()
    tensorhub.open("m", replica="t", server=server.address, timeout=5).close()


def test_what_has_no_room_to_fetch_ahead_is_told_so(join, caplog):
    """Else it would keep its first version for ever, without a word."""
    trainer, _ = join("t", 1.0)
    trainer.publish(1)
    rollout, array = join("r", prefetch="always", host_bytes=0)
    said = f"fetches nothing ahead: its limit on host memory has no room for a copy of {array.nbytes} B"
    assert f"{said}: host_bytes is 0 B; raise host_bytes" in caplog.text
    rollout.replicate()
    with pytest.raises(tensorhub.UsageError, match=r"would never find a version.*; host_bytes is 0 B"):
        rollout.update("prefetched")
    assert rollout.update() == 1


@pytest.mark.parametrize("boxes", [None, {}], ids=["plain", "boxes"])
def test_memory_that_stays_full_keeps_nobody_at_an_old_version_without_a_word(join, caplog, monkeypatch, boxes):
    trainer, source = join("t", 1.0, prefetch="never")
    rollout, array = join("r", prefetch="always", reliable=False)
    trainer.register({"w": source}, boxes=boxes)
    rollout.register({"w": array}, boxes=boxes)
    pool = rollout._aio._client.driver.data.copies._pool
    monkeypatch.setattr(pool, "_look", lambda: Room(0, "memory.max"))
    trainer.publish(1)
    rollout.replicate()
    with trainer.mutating(version=2):
        source += 1

    def said():
        needs = f"a host copy needs {source.nbytes} B more, and memory.max leaves 0 B"
        wanted = f"m/r[0]: version 2 is not fetched ahead: {needs}"
        found = [(each.levelno, each.getMessage()) for each in caplog.records]
        return [text for level, text in found if level == logging.WARNING and text.startswith(wanted)]

    eventually(said, "it is said")
    assert rollout.update("prefetched") == 1
    monkeypatch.undo()
    eventually(lambda: rollout.update("prefetched") == 2, "it has come")
    assert len(said()) == 1


def test_an_update_to_what_was_prefetched_never_waits(join, server):
    trainer, source = join("t", 1.0)
    rollout, array = join("r", prefetch="never")
    trainer.publish(1)
    assert rollout.update("prefetched") == 1  # nothing is held yet: the latest
    with trainer.mutating(version=2):
        source[:] = 2.0
    with pytest.raises(tensorhub.UsageError, match="fetches nothing ahead"):
        rollout.update("prefetched")
    assert (array == 1.0).all()
    rollout.prefetch("latest")
    replicas = tensorhub.connect(server.address).replicas
    copies = lambda: {each.name: each.workers[0].copies for each in replicas("m")}  # noqa: E731
    eventually(lambda: copies()["r"] == (2,), "it is fetched ahead")
    assert (array == 1.0).all(), "what it computes with is untouched"
    before = rollout.statistics()["received_bytes"]
    assert rollout.update("prefetched") == 2
    assert (array == 2.0).all()
    assert rollout.statistics()["received_bytes"] == before, "a copy within the process"
    with pytest.raises(tensorhub.UsageError, match="update"):
        rollout.replicate("prefetched")
    with pytest.raises(tensorhub.UsageError, match="update"):
        rollout.prefetch("prefetched")


def test_wait_for_ends_when_the_version_comes(join):
    trainer, _ = join("t", 1.0)
    reader, _ = join("r")
    waits = [lambda: reader.wait_for("latest"), lambda: reader.wait_for(2), lambda: reader.wait_for("latest-1")]

    def train():
        trainer.publish(1)
        trainer.pin(1)  # or it would be lost, and no longer the one before the latest
        with trainer.mutating(version=5):
            pass

    first, second, before_last, _ = in_threads(*waits, train)
    assert first in (1, 5)
    assert (second, before_last) == (5, 1)
    assert reader.wait_for(3, timeout=1) == 5
    assert reader.version is None


def test_check_names_the_tensors_that_were_changed(join):
    """`big` fills chunks 0 to 3 and shares chunk 4 with 32 small ones; tied ones fill the last."""
    tensors = {"big": np.zeros(4 * 4096 + 2048, np.uint8)}
    tensors |= {f"layer.{i}.bias": np.zeros(64, np.uint8) for i in range(96)}
    tensors["embed"] = tensors["head"] = np.zeros(2 * 4096, np.uint8)
    trainer, _ = join("t", tensors=tensors, chunk_bytes=4096)
    copied = {name: array.copy() for name, array in tensors.items() if name != "head"}
    copied["head"] = copied["embed"]
    reader, _ = join("r", tensors=copied, chunk_bytes=4096)
    trainer.publish(1)
    trainer.check()
    reader.replicate()

    def said(weights=trainer):
        with pytest.raises(tensorhub.NotDrained) as caught:
            weights.check()
        return str(caught.value).partition(" but ")[2]

    tensors["layer.7.bias"][3] = 1
    assert said() == "these tensors were changed since: 'layer.7.bias'"
    tensors["big"][0] = tensors["layer.50.bias"][3] = tensors["head"][-1] = 1
    assert said() == "these tensors were changed since: 'big', 'layer.7.bias', 'layer.50.bias', 'embed', 'head'"
    tensors["big"][0] = tensors["layer.7.bias"][3] = tensors["layer.50.bias"][3] = tensors["head"][-1] = 0
    tensors["big"][-1] = 1  # in chunk 4, where all others are what they were
    assert said() == "these tensors were changed since: 'big'"
    copied["layer.7.bias"][3] = 1  # a reader has digests of chunks only
    some = "'big', 'layer.0.bias', 'layer.1.bias', 'layer.2.bias', 'layer.3.bias' and 28 more"
    assert said(reader) == f"at least one of the 33 tensors in chunk 4 was changed since: {some}"
    for name in ("layer.7.bias", "layer.50.bias", "big", "head"):
        tensors[name][:] = 0
    trainer.check()


def test_readers_find_out_too_and_say_so(join):
    trainer, source = join("t", 1.0)
    reader, _ = join("r")
    trainer.publish(1)
    source[5] = 9
    with pytest.raises(tensorhub.CorruptTransfer):
        reader.replicate(timeout=8)
    assert reader.version is None
    with pytest.raises(tensorhub.UsageError, match="poisoned"):
        reader.publish(2)
    trainer.unpublish()
    trainer.publish(2)
    assert reader.replicate(timeout=8) == 2  # a good version heals it


def test_other_tensors_can_be_registered_when_nothing_is_held(join):
    trainer, _ = join("t", 1.0)
    trainer.publish(1)
    with pytest.raises(tensorhub.NotDrained, match="version 1 is held"):
        trainer.register({"v": np.zeros(3)})
    trainer.unpublish()
    trainer.register({"v": np.zeros(3)})
    assert trainer.publish(2) == 2


def test_close_ends_everything_and_may_be_called_twice(join):
    before = threading.active_count()
    trainer, _ = join("t", 1.0)
    trainer.publish(1)
    trainer.close()
    trainer.close()
    assert trainer.version is None
    for call in (lambda: trainer.publish(2), trainer.unpublish, trainer.update, trainer.wait_for, trainer.check):
        with pytest.raises(tensorhub.Closed, match=r"m/t\[0\]"):
            call()
    with pytest.raises(tensorhub.Closed):
        trainer.register({"w": np.zeros(3)})
    eventually(lambda: threading.active_count() <= before + 1, "its threads are gone")  # the worker loop stays
    join("t")  # its place is free at once


def test_close_during_a_call_ends_the_call(join):
    reader, _ = join("r")

    def close_soon():
        eventually(lambda: reader._aio._client.call_lock.calling == "replicate")
        reader.close()

    error, _ = in_threads(lambda: reader.replicate("latest", timeout=30), close_soon)
    assert isinstance(error, tensorhub.Closed)


def test_a_manifest_that_is_too_long_is_refused_before_anything_is_hashed(join, monkeypatch):
    array = np.ones(5_000_000, np.uint8)
    trainer, _ = join("t", tensors={"w": array}, chunk_bytes=1)
    monkeypatch.setattr(digests, "_each_digest", lambda *_: pytest.fail("it hashes"))
    with pytest.raises(tensorhub.UsageError, match="64 MiB") as raised:
        trainer.publish(1)
    assert "chunk_bytes of at least 2" in raised.value.hint
    assert trainer.version is None
    digests.check_length(register({"w": array[:4_000_000]}), 1, "full")  # the largest


def test_what_is_held_and_cannot_be_served_is_said_by_the_call(join, monkeypatch, caplog):
    """By one transport of two is enough to say so: peers that share it would choose it. It can be taken back."""
    failing, export = set(), TcpTransport.export

    def fail(transport, what):
        if type(transport) in failing:
            raise ValueError("no export today")
        export(transport, what)

    monkeypatch.setattr(TcpTransport, "export", fail)
    trainer, _ = join("t", 1.0, transports="local,tcp")
    reader, _ = join("r", transports="local,tcp")
    for version, kinds in enumerate(({LocalTransport}, {TcpTransport, LocalTransport}), 1):
        failing |= kinds
        with pytest.raises(tensorhub.TensorHubError, match="by local: no export today") as raised:
            trainer.publish(version)
        assert "unpublish()" in raised.value.hint
        failing.clear()
        trainer.unpublish()
    assert trainer.publish(3) == reader.replicate(3) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.CRITICAL]
