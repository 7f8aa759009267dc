"""Trainer and rollouts whose tensors are on one device, within a process: what a step's kernels do, what is freed."""

import gc
import itertools

import pytest
import torch

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub import Box

SIZE = 3_000_000
LARGE = 10_000_000  # more than 32 MiB, which free() gives back to the kernel whatever was freed before
SPIN = 200_000_000  # cycles of the device: about a tenth of a second


def spin(device):
    """What is launched next on this stream begins late. On the host everything is done in order anyway."""
    if device != "cpu":
        torch.cuda._sleep(SPIN)


def model(device, value=0.0):
    """Tensors of several sizes, types and strides, and one that is on the host in any case."""
    made = {
        "big": torch.arange(SIZE, dtype=torch.float32, device=device) % 977 + value,
        "half": (torch.arange(33 * 77, device=device).reshape(33, 77) % 91 + value).bfloat16().t(),
        "whole": torch.arange(1000, device=device) + int(value),
        "host": torch.arange(1000, dtype=torch.float64) + value,
    }
    return made | {f"t{index}": torch.full((index % 5,), value, device=device) for index in range(200)}


def empty(device):
    return {name: torch.full_like(tensor, 7) for name, tensor in model(device).items()}


def differing(found, expected):
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


def test_steps_of_training_reach_the_rollouts(device, join):
    """The kernels of a step are still running when it ends; those of the rollout, when it asks for the next."""
    masters, targets = model(device), empty(device)
    trainer, rollout = join("trainer", masters), join("rollout", targets)
    trainer.publish(0)
    assert rollout.replicate() == 0
    seen = []
    for version in range(1, 5):
        with trainer.mutating(version=version):
            spin(device)
            for tensor in masters.values():
                tensor += 1
        spin(device)
        seen.append((version - 1, {name: tensor * 1 for name, tensor in targets.items()}))
        assert rollout.update() == version
        assert differing(targets, model(device, version)) == []
    for version, computed in seen:
        assert differing(computed, model(device, version)) == [], "what still ran when the next version came"
    trainer.check()
    rollout.check()


def test_work_on_the_stream_of_the_call_is_waited_for(device, join):
    if device == "cpu":
        pytest.skip("the host has no streams")
    weight, target = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    trainer, rollout = join("trainer", {"w": weight}), join("rollout", {"w": target})
    mine = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(mine):
        spin(device)
        weight += 3
        trainer.publish(1)
    rollout.replicate()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):  # it does not wait for the stream by which the bytes came
        total = target.sum()
    assert total.item() == 3 * SIZE


def test_masters_are_cast_where_they_are(device, join):
    master = torch.randn(SIZE, device=device)
    target = torch.zeros(SIZE, dtype=torch.bfloat16, device=device)
    trainer, rollout = join("trainer", {"w": master}, dtype="bfloat16"), join("rollout", {"w": target})
    for version in (1, 2, 3):
        with trainer.mutating(version=version):
            spin(device)
            master *= 1.37
        expected = master.bfloat16()
        spin(device)
        master += 1e3  # before anybody has read it: what is published was cast
        assert rollout.update() == version
        assert torch.equal(target, expected)
        master -= 1e3
    again = torch.zeros(SIZE, device=device)
    refilled = join("other", {"w": again}, dtype="bfloat16")
    assert refilled.replicate() == 3
    assert torch.equal(again, target.float())


def test_host_copies_are_read_when_the_device_has_gone_on(device, join):
    masters = model(device)
    trainer = join("trainer", masters, retain=2)
    trainer.publish(1)
    with trainer.mutating(version=2):
        for tensor in masters.values():
            tensor += 1
    targets = empty(device)
    late = join("late", targets)
    assert late.replicate(1) == 1
    assert differing(targets, model(device)) == []
    assert late.update() == 2
    assert differing(targets, model(device, 1)) == []


def test_an_engine_sleeps_and_wakes_over_other_memory(device, join):
    source, module = (torch.nn.Linear(3000, 1000, device=device) for _ in range(2))
    trainer, rollout = join("trainer", source), join("rollout", module, reliable=False)
    trainer.publish(1)
    rollout.replicate()
    rollout.suspend()
    held = torch.cuda.memory_allocated() if device != "cpu" else 0
    for parameter in module.parameters():
        parameter.data = torch.empty(0, device=device)
    gc.collect()
    if device != "cpu":
        assert torch.cuda.memory_allocated() < held, "nothing keeps the memory while it sleeps"
        torch.cuda.empty_cache()
    module.weight.data = torch.zeros(1000, 3000, device=device)
    module.bias.data = torch.zeros(1000, device=device)
    rollout.resume()
    assert rollout.replicate() == 1
    assert torch.equal(module.weight, source.weight)
    assert torch.equal(module.bias, source.bias)


def test_columns_are_read_from_rows(device, join):
    rows, columns = 3000, 1024
    whole = torch.randn(rows, columns, device=device)

    def part(dim, index, count):
        size = [rows, columns]
        size[dim] //= count
        at = [0, 0]
        at[dim] = index * size[dim]
        return {"w": [Box("w", (rows, columns), tuple(at), tuple(size))]}

    halves = [half.clone() for half in whole.chunk(2, 0)]
    trainers = [
        join("trainer", {"w": half}, boxes=part(0, index, 2), shard=index, shards=2)
        for index, half in enumerate(halves)
    ]
    assert in_threads(*(lambda trainer=trainer: trainer.publish(1) for trainer in trainers)) == [1, 1]
    engine = torch.zeros(rows, columns, device=device)
    one = join("one", {"w": engine}, boxes=part(0, 0, 1))
    assert one.replicate() == 1
    assert torch.equal(engine, whole)
    quarters = [torch.zeros(rows, columns // 4, device=device) for _ in range(4)]
    shards = [
        join("four", {"w": quarter}, boxes=part(1, index, 4), shard=index, shards=4)
        for index, quarter in enumerate(quarters)
    ]
    assert in_threads(*(shard.replicate for shard in shards)) == [1] * 4
    assert torch.equal(torch.cat(quarters, 1), whole)


def test_memory_that_was_freed_is_named_and_the_device_goes_on(device, join):
    masters = {name: torch.full((LARGE,), 1.0, device=device) for name in ("kept", "freed")}
    join("company", {"w": torch.zeros(1)})  # reliable: beside it nothing is copied ahead
    targets = {name: torch.zeros(LARGE, device=device) for name in masters}
    trainer, rollout = join("trainer", masters), join("rollout", targets)
    trainer.publish(1)
    masters["freed"].untyped_storage().resize_(0)
    with pytest.raises(tensorhub.TensorHubError):
        rollout.replicate(timeout=3)
    assert rollout.version is None
    with pytest.raises(tensorhub.NotDrained, match="'freed'"):
        trainer.unpublish()
    trainer.register(targets)
    assert trainer.publish(2) == 2
    assert torch.ones(3, device=device).sum().item() == 3, "the device was told to do nothing that it cannot"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.gpu
def test_nothing_stays_on_the_device_or_pinned(join):
    """Publishing and reading take no memory of the device; the ring of pinned memory is given back."""
    device = "cuda:0"
    masters, targets = model(device), empty(device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trainer, rollout = join("trainer", masters), join("rollout", targets)
    for version in itertools.count(1):
        trainer.publish(version)
        rollout.update()
        trainer.unpublish()
        if version == 5:
            break
    eventually(lambda: torch.cuda.memory_allocated() == before, "a copy to the host takes some for a moment")
    rollout.close()
    trainer.close()
    del masters, targets
    gc.collect()
    eventually(lambda: torch.cuda.memory_allocated() < before, "the tensors go with those who registered them")
