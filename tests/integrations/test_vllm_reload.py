"""What vLLM's layerwise reload makes of a loader, without an engine: models are stand-ins, vLLM's reload is not."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import torch
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

import tensorhub
from tensorhub.integrations.vllm_reload import Reload
from tensorhub.integrations.whole import Whole

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


class Layer(torch.nn.Module):
    """With a weight, and what a loader may forget: both begin as -1."""

    def __init__(self):
        super().__init__()
        for name in ("weight", "other"):
            self.register_parameter(name, torch.nn.Parameter(torch.full((4,), -1.0), requires_grad=False))


class Model(torch.nn.Module):
    """`load` is what is done with each tensor that is published."""

    def __init__(self, load):
        super().__init__()
        self.first, self.second, self.load = Layer(), Layer(), load

    def load_weights(self, weights):
        return {self.load(self.get_parameter(name), tensor) or name for name, tensor in weights}


def as_vllm_does(parameter, tensor):
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


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

        def begin(load, load_format="dummy"):
            model = Model(load)
            record_metadata_for_reloading(model)
            given = SimpleNamespace(dtype=torch.float32), SimpleNamespace(load_format=load_format)
            config = SimpleNamespace(model_config=given[0], load_config=given[1])
            whole = Whole("policy", replica=f"rollout-{len(ways)}", server=hub.address)
            ways.append(Reload(model, config, torch.device("cpu"), whole))
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


def test_a_loader_that_changes_what_it_is_given_changes_nothing_that_others_read(reload):
    def careless(parameter, tensor):
        if tensor[0] == 3.0:
            tensor.add_(1.0)
        as_vllm_does(parameter, tensor)

    model, way = reload(careless)
    way.weights.check()
    assert dict(way.whole)["second.other"].tolist() == [3.0] * 4
    assert model.second.other.tolist() == [4.0] * 4
    check(reload(as_vllm_does)[0])
