"""An engine that sleeps: its tensors' memory goes away, and comes back elsewhere."""

import gc
import weakref

import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually

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
    target[:] = 3.0  # as from a checkpoint
    trainer.close()
    rollout.register({"w": target})
    assert rollout.publish(2) == 2
