"""An engine that sleeps: its tensors' memory goes away, and comes back elsewhere."""

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually
from tensorhub.memory import cast
from tensorhub.memory.host_copies import HostMemory
from tensorhub.memory.room import Room
from tensorhub.runtime import client
from tensorhub.runtime.cast_state import Suspension
from tensorhub.runtime.client import Client
from tensorhub.runtime.loops import loop_thread
from tensorhub.transport import sealed

torch = pytest.importorskip("torch")


def linear(value):
    module = torch.nn.Linear(300, 200)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def give_other_storage(module):
    """As waking does: the same parameters over other memory. Returns what lies where they were."""
    before = {name: parameter.data for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter.data, -1.0)
    return before


@pytest.fixture
def trainer(join):
    weights, _ = join("t", tensors=linear(1.0))
    weights.publish(1)
    return weights


def test_what_is_filled_after_waking_comes_into_the_new_memory(join, trainer):
    engine = linear(0.0)
    rollout, _ = join("r", tensors=engine, reliable=False)
    rollout.replicate()
    rollout.suspend()
    assert rollout.version is None
    old = give_other_storage(engine)
    for tensor in old.values():
        tensor.fill_(-7.0)
    rollout.resume()
    assert rollout.version is None
    assert rollout.replicate() == 1
    assert (engine.weight == 1.0).all()
    assert (engine.bias == 1.0).all()
    assert all((tensor == -7.0).all() for tensor in old.values())


def test_others_read_from_elsewhere_while_it_sleeps_and_from_it_again_when_it_is_awake(join, trainer):
    engine, other = linear(0.0), linear(0.0)
    rollout, _ = join("r", tensors=engine, reliable=False, host_bytes=0)
    rollout.replicate()
    rollout.suspend()
    late, _ = join("late", tensors=other, reliable=False)
    late.replicate()
    assert list(late.statistics()["bytes_by_source"]) == ["t"]
    give_other_storage(engine)
    rollout.resume()
    rollout.replicate()
    trainer.close()
    late.close()
    latest, _ = join("latest", tensors=linear(0.0), reliable=False)
    latest.replicate()
    assert list(latest.statistics()["bytes_by_source"]) == ["r"]


def test_a_copy_in_host_memory_is_read_while_it_sleeps(join):
    """The last of a version: it was copied out before the tensors went, and is not read from where they were."""
    module, late = linear(1.0), linear(0.0)
    weights, _ = join("t", tensors=module, host_bytes="4MiB")
    weights.publish(1)
    weights.suspend()
    for tensor in give_other_storage(module).values():
        tensor.fill_(-7.0)
    assert weights.statistics()["host_bytes"] > 0
    reader, _ = join("r", tensors=late)
    assert reader.replicate() == 1
    assert (late.weight == 1.0).all()
    weights.resume()
    assert weights.replicate() == 1  # from its own copy, or from the reader
    assert (module.weight == 1.0).all()


def test_nothing_keeps_the_memory_while_it_sleeps(join):
    weights, _ = join("t", tensors=linear(0.0))
    tensors = {"w": np.ones(50_000, np.float32)}
    held = weakref.ref(tensors["w"])
    weights.register(tensors)
    weights.publish(1)
    weights.suspend()
    del tensors["w"]
    gc.collect()
    eventually(lambda: held() is None, "the memory is free")
    tensors["w"] = np.full(50_000, 3.0, np.float32)
    weights.resume()
    assert weights.publish(2) == 2
    array = np.zeros(50_000, np.float32)
    reader, _ = join("r", tensors={"w": array})
    reader.replicate()
    assert (array == 3.0).all()


def test_storages_that_were_emptied_and_made_again(join, trainer):
    engine = linear(0.0)
    rollout, _ = join("r", tensors=engine, reliable=False)
    rollout.replicate()
    rollout.suspend()
    sizes = [parameter.untyped_storage().nbytes() for parameter in engine.parameters()]
    for parameter in engine.parameters():
        parameter.untyped_storage().resize_(0)
    for parameter, size in zip(engine.parameters(), sizes, strict=True):
        parameter.untyped_storage().resize_(size)
    rollout.resume()
    rollout.replicate()
    assert (engine.weight == 1.0).all()


def test_calls_that_need_the_tensors_say_that_it_sleeps(join, trainer):
    rollout, _ = join("r", tensors=linear(0.0), reliable=False)
    rollout.replicate()
    rollout.suspend()
    rollout.suspend()  # again: nothing
    for call in (lambda: rollout.publish(3), rollout.replicate, rollout.update):
        with pytest.raises(tensorhub.UsageError, match="suspended") as raised:
            call()
        assert "resume() first" in str(raised.value.__notes__)
    rollout.unpublish()
    rollout.close()


def test_what_was_not_suspended_cannot_be_resumed(server, join, trainer):
    with pytest.raises(tensorhub.UsageError, match="not suspended"):
        trainer.resume()
    with (
        tensorhub.open("m", replica="empty", server=server.address) as empty,
        pytest.raises(tensorhub.UsageError, match=r"suspend\(\) on m/empty\[0\] before register"),
    ):
        empty.suspend()


def test_other_tensors_are_refused_by_name(join, trainer):
    trainer.suspend()
    with pytest.raises(tensorhub.UsageError, match="bias differ"):
        trainer.resume({"weight": torch.ones(200, 300), "bias": torch.ones(201)})
    trainer.resume({"weight": torch.ones(200, 300), "bias": torch.ones(200)})
    assert trainer.publish(1) == 1  # the same bytes elsewhere are the same version


def test_what_was_prefetched_fills_the_new_memory(join, trainer):
    engine = linear(0.0)
    rollout, _ = join("r", tensors=engine, reliable=False, host_bytes="4MiB")
    rollout.replicate()
    rollout.suspend()
    trainer.unpublish()
    trainer.publish(2)
    rollout.prefetch("latest")
    eventually(lambda: rollout.statistics()["host_bytes"] > 0, "it is fetched ahead")
    give_other_storage(engine)
    rollout.resume()
    assert rollout.replicate() == 2
    assert (engine.weight == 1.0).all()


@pytest.mark.parametrize("left_bytes", [0, (96 << 20) + 300 * 200 * 4 + 800])  # beside the copy: none, or one more
def test_what_was_prefetched_fills_the_new_memory_where_waking_has_left_little_room(
    server, join, trainer, monkeypatch, left_bytes
):
    """No limit was given: what there is room for at that moment is beside the copy that is there already."""
    engine = linear(0.0)
    rollout, _ = join("r", tensors=engine, reliable=False, prefetch="always")
    eventually(lambda: "r" in copies_of(server, 1), "it is fetched ahead")
    rollout.suspend()
    held = rollout.statistics()["host_bytes"]
    give_other_storage(engine)
    look = {**HostMemory.__init__.__kwdefaults__, "look": lambda: Room(left_bytes, "a limit of this test")}
    monkeypatch.setattr(HostMemory.__init__, "__kwdefaults__", look)
    rollout.resume()
    statistics = rollout.statistics()
    assert statistics["host_bytes"] == held > 0
    assert statistics["host_bytes_limit"] == held * (2 if left_bytes else 1)
    trainer.close()  # only the copy has it
    assert rollout.update(timeout=8) == 1
    assert (engine.weight == 1.0).all()


def test_a_neighbours_host_copy_is_shared_while_it_sleeps(join, server):
    """Nobody else has that version: whoever does not share the copy waits for it without end."""
    if sealed.why_not():
        pytest.skip(f"no memory here that others can map: {sealed.why_not()}")
    neighbour, _ = join("neighbour", tensors=linear(0.0), host_bytes="4MiB", prefetch="always")
    trainer, _ = join("t", tensors=linear(1.0))
    trainer.publish(1)
    neighbour.replicate()
    with trainer.mutating(version=2):
        pass
    eventually(lambda: neighbour.statistics()["host_bytes"] > 0, "it is fetched ahead")
    eventually(lambda: copies_of(server, 2) == ("neighbour",), "it is whole")
    trainer.close()
    engine = linear(0.0)
    sleeper, _ = join("sleeper", tensors=engine, host_bytes="4MiB", prefetch="never")
    sleeper.suspend()
    sleeper.prefetch("latest")
    eventually(lambda: copies_of(server, 2) == ("neighbour", "sleeper"), "it is shared")
    assert sleeper.statistics()["bytes_by_source"] == {}  # nothing was read twice
    sleeper.resume()
    assert sleeper.update() == 2
    assert (engine.weight == 1.0).all()


def copies_of(server, version):
    (model,) = tensorhub.connect(server.address).status(model="m").models
    return next((tuple(found.host_copies) for found in model.versions if found.version == version), ())


def test_a_publish_that_comes_before_the_tensors_are_forgotten_keeps_them(join, monkeypatch):
    weights, _ = join("t", 1.0)
    hashed, begin, hashing, go_on, tasks = client.hashed, Suspension.begin, asyncio.Event(), asyncio.Event(), []

    async def slowly(*arguments):
        hashing.set()
        await go_on.wait()
        return await hashed(*arguments)

    async def begin_late(suspension, deadline):
        tasks.append(asyncio.create_task(weights._aio._client.publish(1, deadline)))
        await hashing.wait()
        try:
            await begin(suspension, deadline)
        finally:
            go_on.set()

    monkeypatch.setattr(client, "hashed", slowly)
    monkeypatch.setattr(Suspension, "begin", begin_late)
    with pytest.raises(tensorhub.UsageError, match=r"suspend on m/t\[0\] while its publish has not ended"):
        weights.suspend(timeout=10)
    eventually(lambda: weights.version == 1)
    reader, array = join("r")
    assert reader.replicate(timeout=5) == 1
    assert (array == 1.0).all()


def test_masters_are_cast_from_where_they_are_then(join):
    module = linear(1.0)
    weights, _ = join("t", tensors=linear(0.0))
    weights.register(module, dtype="bfloat16")
    weights.publish(1)
    weights.suspend()
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter.data, 5.0)
    weights.resume()
    weights.publish(2)
    filled = linear(0.0).bfloat16()
    reader, _ = join("r", tensors=filled)
    reader.replicate()
    assert (filled.weight == 5.0).all()


@pytest.fixture
def takers(monkeypatch):
    """The threads that have taken memory for masters, in order."""
    seen, real = [], cast._memory

    def memory(size_bytes):
        seen.append(threading.current_thread())
        return real(size_bytes)

    monkeypatch.setattr(cast, "_memory", memory)
    return seen


@pytest.fixture
def several(server):
    """`several(kind)` opens a group or a set, with masters; returns it."""
    opened = []

    def joined(kind):
        tensors = {name: {"w": np.ones(1000, np.float32)} for name in ("a", "b")}
        if kind == "group":
            found = tensorhub.open_group("m", replica="t", shards=2, server=server.address)
            found.register(list(tensors.values()), dtype="float16")
        else:
            found = tensorhub.open_set(list(tensors), replica="t", server=server.address)
            found.register(tensors, dtype="float16")
        opened.append(found)
        return found

    yield joined
    for each in opened:
        each.close(timeout=3)


@pytest.mark.parametrize("kind", ["group", "set"])
def test_several_take_memory_for_masters_in_the_callers_thread_and_not_in_that_of_all_workers(kind, several, takers):
    trainer = several(kind)
    for version in (1, 2):
        trainer.publish(version)
        trainer.suspend()
        trainer.resume()
    assert trainer.publish(3) == 3
    assert takers == [threading.current_thread()] * 6


@pytest.mark.parametrize("kind", ["group", "set"])
def test_a_resume_of_several_that_has_failed_for_some_goes_on_with_those(kind, several, monkeypatch):
    trainer = several(kind)
    trainer.suspend()
    real, left = Client.register, [2]

    async def register(client, *arguments, **options):
        left[0] -= 1
        if not left[0]:
            raise tensorhub.Unavailable("not yet")
        await real(client, *arguments, **options)

    monkeypatch.setattr(Client, "register", register)
    with pytest.raises(tensorhub.Unavailable, match="not yet"):
        trainer.resume()
    trainer.resume()
    assert trainer.publish(1) == 1
    trainer.unpublish()
    with pytest.raises(tensorhub.UsageError, match="not suspended"):
        trainer.resume()


def test_awaited_the_memory_for_masters_is_taken_in_no_loop(server, takers):
    async def story():
        async with await tensorhub.aio.open("m", replica="t", server=server.address) as weights:
            await weights.register({"w": np.ones(1000, np.float32)}, dtype="float16")
            await weights.suspend()
            await weights.resume()
            assert await weights.publish(1) == 1

    asyncio.run(story())
    assert len(takers) == 2
    assert not {threading.current_thread(), loop_thread().thread} & set(takers)


def test_what_a_failed_fill_has_spoiled_stays_so_while_it_sleeps(join):
    trainer, source = join("t", 1.0)
    trainer.publish(1)
    source[5] = 9
    rollout, target = join("r")
    with pytest.raises(tensorhub.CorruptTransfer):
        rollout.replicate(timeout=8)
    rollout.suspend()
    rollout.resume()
    with pytest.raises(tensorhub.UsageError, match="poisoned"):
        rollout.publish(2)
    with pytest.raises(tensorhub.UsageError, match="poisoned"), rollout.mutating(version=2):
        pytest.fail("the block ran")
    target[:] = 3.0  # as from a checkpoint
    rollout.register({"w": target})
    assert rollout.publish(2) == 2


def test_what_was_spoiled_before_it_slept_is_healed_by_a_fill(join):
    trainer, source = join("t", 1.0)
    trainer.publish(1)
    source[5] = 9
    rollout, target = join("r")
    with pytest.raises(tensorhub.CorruptTransfer):
        rollout.replicate(timeout=8)
    rollout.suspend()
    rollout.resume()
    trainer.unpublish()
    trainer.publish(2)
    assert rollout.update(timeout=8) == rollout.version == 2
    with rollout.mutating(version=3):
        target += 1
    assert rollout.version == 3
