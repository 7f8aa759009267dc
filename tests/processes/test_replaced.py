"""A module whose parameters are replaced after they were registered: never published for what they were."""

import pytest

import tensorhub

from .script import run

pytestmark = pytest.mark.processes

BEGIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
weights = tensorhub.open("m", replica="trainer", server=address, timeout=30, call_timeout=30)
weights.register(model)
with weights.mutating(version=1):
    model[0].weight.data.fill_(1.0)
"""

END = """
say(publish=error_of(weights.publish, 2), version=weights.version)
weights.register(model)
say(again=error_of(weights.publish, 2))
reader = tensorhub.open("m", replica="reader", server=address, timeout=30, call_timeout=30)
target = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
reader.register(target)
reader.replicate(2)
say(is_right=all(torch.equal(target[name], tensor) for name, tensor in model.state_dict().items()))
"""

REPLACEMENTS = {
    "another parameter": ("model[0].weight = nn.Parameter(torch.ones(8, 8))", "'0.weight' lies in other memory"),
    "another dtype": ("model.half()", "'0.weight' is float16 and was float32"),
    "assigned": (
        "model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)",
        "'0.weight' lies in other memory",
    ),
    "a buffer": ("model[1].running_mean = torch.zeros(8)", "'1.running_mean' lies in other memory"),
    "another shape": ("model[0] = nn.Linear(8, 9)", "'0.weight' has shape [9, 8] and had [8, 8]"),
    "transposed": (
        "model[0].weight = nn.Parameter(model[0].weight.detach().t())",
        "'0.weight' has strides [1, 8] and had [8, 1]",
    ),
    "one that is gone": ("model[0].bias = None", "'0.bias' is gone"),
    "one more": ("model.append(nn.Linear(2, 2))", "'2.weight' was not there"),
    "its data": ("model[0].weight.data = torch.ones(8, 8)", "'0.weight' lies in other memory"),
}


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_what_was_replaced_is_named_and_not_published(server, what):
    change, named = REPLACEMENTS[what]
    found = run(f"{BEGIN}weights.unpublish()\n{change}\n{END}", server.address).only()
    assert found["publish"]["kind"] == "UsageError"
    assert named in found["publish"]["text"]
    assert "register() again" in found["publish"]["hint"]
    assert found["version"] is None
    assert found["again"] == {"value": 2}
    assert found["is_right"]


def test_what_is_changed_in_place_is_published(server):
    change = """
weights.unpublish()
model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
say(publish=error_of(weights.publish, 2), version=weights.version)
"""
    found = run(BEGIN + change, server.address).only()
    assert found == {"publish": {"value": 2}, "version": 2}


def test_a_fill_does_not_go_where_the_module_is_no_longer(server):
    story = """
reader = tensorhub.open("m", replica="reader", server=address, timeout=30, call_timeout=30)
other = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
reader.register(other)
other[0].weight = nn.Parameter(torch.zeros(8, 8))
say(replicate=error_of(reader.replicate, 1), version=reader.version)
reader.register(other)
say(again=error_of(reader.replicate, 1), is_right=bool((other[0].weight == 1).all()))
"""
    found = run(BEGIN + story, server.address).only()
    assert found["replicate"]["kind"] == "UsageError"
    assert "'0.weight' lies in other memory" in found["replicate"]["text"]
    assert found["version"] is None
    assert found["again"] == {"value": 1}
    assert found["is_right"]


def test_a_module_has_the_layout_of_its_state_dict(server):
    """Tied weights under both names, a module that occurs twice, and none of what is not kept."""
    story = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = self.again = nn.BatchNorm1d(4)
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.nothing = None

def layout(tensors):
    from tensorhub.memory.registration import register
    return register(tensors).layout

model = Model()
say(is_same=layout(model) == layout(model.state_dict()), names=[t.name for t in layout(model).tensors])
say(empty=error_of(weights.register, nn.ReLU()))
"""
    found = run(BEGIN + story, server.address).only()
    assert found["is_same"]
    assert "head.weight" in found["names"]
    assert "again.weight" in found["names"]
    assert found["empty"]["kind"] == "UsageError"
    assert "ReLU" in found["empty"]["text"]


def test_of_fsdp2_the_local_shards_are_taken_in_place(server):
    """Between steps the module holds `DTensor`s again: the same ones, whatever was gathered meanwhile."""
    story = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
sharded = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
mesh = init_device_mesh("cpu", (1,))
for layer in sharded:
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
weights.unpublish()
weights.close()
trainer = tensorhub.open("fsdp", replica="trainer", server=address, timeout=30, call_timeout=30)
reader = tensorhub.open("fsdp", replica="reader", server=address, timeout=30, call_timeout=30)
target = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
trainer.register(sharded)
reader.register(target)
optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, foreach=False)
wrong = []
for step in range(1, 11):
    sharded(torch.ones(2, 64)).sum().backward()
    with trainer.mutating(version=step):
        optimizer.step()
        optimizer.zero_grad()
    reader.update("latest")
    for name, tensor in sharded.state_dict().items():
        if not torch.equal(tensor.to_local(), target.state_dict()[name]):
            wrong.append((step, name))
    trainer.check()
say(wrong=wrong, version=reader.version)
dist.destroy_process_group()
"""
    found = run(BEGIN + story, server.address).only()
    assert found["wrong"] == []
    assert found["version"] == 10
