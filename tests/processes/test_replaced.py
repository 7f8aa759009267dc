"""A module whose parameters are replaced after they were registered: never published for what they were."""

import json

import pytest

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


def test_what_was_replaced_is_named_and_not_published(server):
    """Each in a model of its own: it is refused until the module is registered again."""
    story = """
import copy
given = json.loads(sys.argv[2])
template, found = model, {}
for number, (what, change) in enumerate(given.items()):
    model = copy.deepcopy(template)
    own = tensorhub.open(f"m{number}", replica="trainer", server=address, timeout=30, call_timeout=30)
    own.register(model)
    own.publish(1)
    own.unpublish()
    exec(change)
    refused, version = error_of(own.publish, 2), own.version
    own.register(model)
    again = error_of(own.publish, 2)
    target = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with tensorhub.open(f"m{number}", replica="reader", server=address, timeout=30, call_timeout=30) as reader:
        reader.register(target)
        reader.replicate(2)
    is_right = all(torch.equal(target[name], tensor) for name, tensor in model.state_dict().items())
    found[what] = dict(publish=refused, version=version, again=again, is_right=is_right)
    own.close()
say(found=found)
"""
    changes = json.dumps({what: change for what, (change, _) in REPLACEMENTS.items()})
    found = run(BEGIN + story, server.address, changes).only()["found"]
    assert found.keys() == REPLACEMENTS.keys()
    for what, (_, named) in REPLACEMENTS.items():
        assert found[what]["publish"]["kind"] == "UsageError", what
        assert named in found[what]["publish"]["text"]
        assert "register() again" in found[what]["publish"]["hint"]
        assert found[what]["version"] is None
        assert found[what]["again"] == {"value": 2}
        assert found[what]["is_right"], what


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
