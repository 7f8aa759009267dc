"""What vLLM's layerwise reload makes of a loader, without an engine: models are stand-ins, vLLM's reload is not."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

import tensorhub
from tensorhub.integrations.vllm_plan import Published
from tensorhub.integrations.vllm_worker import Reload
from tensorhub.integrations.whole import Whole

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


class Layer(torch.nn.Module):
    """With a weight, and what a loader may forget: both begin as -1."""

    def __init__(self):
        super().__init__()
        for name in ("weight", "other"):
            self.register_parameter(name, torch.nn.Parameter(torch.full((4,), -1.0), requires_grad=False))


class Model(torch.nn.Module):
    """`load` is what is done with each tensor that is published: with its parameter, the tensor, and its name."""

    def __init__(self, load):
        super().__init__()
        self.first, self.second, self.load = Layer(), Layer(), load

    def load_weights(self, weights):
        return {self.load(self.get_parameter(name), tensor, name) or name for name, tensor in weights}


def as_vllm_does(parameter, tensor, _):
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def chosen(layout):
    return Published(layout.shards[0], layout.tied)


@pytest.fixture
def reload():
    """`reload(load)` loads version 0 into a model with that loader. Returns the model, and what has loaded it."""
    ways = []
    with (
        tensorhub.serve(lease_s=2.0, report_s=0.25) as hub,
        tensorhub.open("policy", replica="trainer", server=hub.address) as trainer,
    ):
        names = [f"{layer}.{name}" for layer in ("first", "second") for name in ("weight", "other")]
        trainer.register({name: torch.full((4,), float(at)) for at, name in enumerate(names)}, boxes={})
        trainer.publish(0)

        def begin(load, load_format="dummy", kind=Model):
            model = kind(load)
            record_metadata_for_reloading(model)
            given = SimpleNamespace(dtype=torch.float32), SimpleNamespace(load_format=load_format)
            config = SimpleNamespace(model_config=given[0], load_config=given[1])
            whole = Whole("policy", replica=f"rollout-{len(ways)}", server=hub.address)
            ways.append(Reload(model, config, torch.device("cpu"), whole, chosen))
            ways[-1].fetch(0, 30.0)
            ways[-1].load(0)
            return model, ways[-1]

        yield begin
        for way in ways:
            way.close(5.0)


def check(model):
    found = {name: parameter.tolist() for name, parameter in model.named_parameters()}
    wanted = ["first.weight", "first.other", "second.weight", "second.other"]
    assert found == {name: [float(at)] * 4 for at, name in enumerate(wanted)}


def directly(parameter, tensor, _):
    parameter.data.copy_(tensor)


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
@pytest.mark.parametrize(
    ("passed_by", "said"),
    [
        (["first.weight", "first.other"], "'first.other' cannot be loaded: the model's load_weights copies it past"),
        (["second.other"], "'second.other' cannot be loaded: the model's load_weights copies it past vLLM's reload"),
    ],
)
def test_what_a_loader_copies_by_itself_is_lost_and_refused_by_name(reload, load_format, passed_by, said):
    """Of a whole layer, and of one parameter of a layer: whatever the loader says that it has loaded."""

    def some(parameter, tensor, name):
        (directly if name in passed_by else as_vllm_does)(parameter, tensor, name)

    with pytest.raises(tensorhub.UsageError, match=re.escape(said)):
        reload(some, load_format)


@pytest.mark.parametrize("after", range(1, 5))
def test_a_load_that_fails_is_mended_by_the_next_one(reload, after):
    """Wherever it fails: before, between, or behind the tensors of a layer. vLLM goes on with a load that is begun."""
    left = []

    def load(parameter, tensor, name):
        if left:
            left.pop()
            if not left:
                raise ValueError("a load that fails")
        parameter.weight_loader(parameter, tensor)  # as vLLM's fused layers do: while it reloads each has one

    model, way = reload(load)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    for _ in range(2):
        left[:] = [0] * after
        with pytest.raises(ValueError, match="a load that fails"):
            way.load(0)
        assert not way.holds(0)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        way.load(0)
        check(model)


def test_a_tied_layer_is_processed_again(reload):
    """vLLM's reload passes by a layer into which nothing came, and leaves it what it made of the version before."""
    processed = []

    class Method(QuantizeMethodBase):
        def create_weights(self, *_, **__): ...

        def apply(self, *_): ...

        def process_weights_after_loading(self, layer):
            processed.append(layer.weight.tolist())

    class Tied(Model):
        def __init__(self, load):
            super().__init__(load)
            self.head = torch.nn.Module()
            self.head.weight, self.head.quant_method = self.first.weight, Method()

    model, way = reload(as_vllm_does, kind=Tied)
    assert processed == [[0.0] * 4]
    way.load(0)
    assert processed == [[0.0] * 4] * 2
    assert model.head.weight is model.first.weight
