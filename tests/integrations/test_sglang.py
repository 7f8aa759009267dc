"""SGLang's custom weight loader with a stand-in for SGLang's model: SGLang itself has not run here.

The stand-in fuses as SGLang's models do, and is called as `ModelRunner.update_weights_from_tensor` calls a loader.
"""

import importlib

import pytest

import tensorhub

torch = pytest.importorskip("torch")

from tensorhub.integrations import sglang  # noqa: E402

FUSED = {"q_proj.weight": 0, "k_proj.weight": 4}


class Model:
    """As a model of SGLang: one parameter for two tensors of the checkpoint."""

    def __init__(self):
        self.qk = torch.zeros(6, 5)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.qk[FUSED[name] : FUSED[name] + len(tensor)].copy_(tensor)


@pytest.fixture
def hub():
    with tensorhub.serve(lease_s=2, report_s=0.2) as found:
        yield found.address
        for _, reader in sglang._readers.values():
            reader.close(timeout=3)
        sglang._readers.clear()


@pytest.fixture
def trainer(hub):
    tensors = {"k_proj.weight": torch.full((2, 5), 1.0), "q_proj.weight": torch.full((4, 5), 2.0)}
    with tensorhub.open("policy", replica="trainer", server=hub) as weights:
        weights.register(tensors, boxes={})
        weights.publish(0)
        yield weights, tensors


def call(model, named_tensors):
    """As SGLang does: by the loader's name, with tensors that went to the device."""
    module, _, name = sglang.LOADER.rpartition(".")
    getattr(importlib.import_module(module), name)(model, [(name, tensor.clone()) for name, tensor in named_tensors])


def test_each_version_that_is_wanted_is_loaded(hub, trainer):
    weights, tensors = trainer
    model = Model()
    for version in range(3):
        if version:
            with weights.mutating(version=version):
                tensors["q_proj.weight"] += 1
        call(model, sglang.wanted("policy", version, replica="rollout", server=hub))
        assert (model.qk[:4] == 2.0 + version).all()
        assert (model.qk[4:] == 1.0).all()
    assert len(sglang._readers) == 1


def test_other_tensors_under_that_name_are_laid_out_anew(hub, trainer):
    weights, tensors = trainer
    call(Model(), sglang.wanted("policy", 0, replica="rollout", server=hub))
    weights.unpublish()
    weights.register({**tensors, "k_proj.weight": torch.full((1, 5), 3.0)}, boxes={})
    weights.publish(1)
    model = Model()
    call(model, sglang.wanted("policy", 1, replica="rollout", server=hub))
    assert (model.qk[4:5] == 3.0).all()


def test_a_version_that_is_not_there_leaves_the_model_as_it_was(hub, trainer):
    model = Model()
    call(model, sglang.wanted("policy", 0, replica="rollout", server=hub))
    before = model.qk.clone()
    with pytest.raises(tensorhub.Unavailable):
        call(model, sglang.wanted("policy", 9, replica="rollout", server=hub, timeout=1.0))
    assert torch.equal(model.qk, before)


def test_other_tensors_and_older_versions_are_refused(hub, trainer):
    weights, tensors = trainer
    with pytest.raises(tensorhub.UsageError, match=r"was given \['q_proj.weight'\]"):
        call(Model(), [("q_proj.weight", tensors["q_proj.weight"])])
    with weights.mutating(version=1):
        tensors["q_proj.weight"] += 1
    call(Model(), sglang.wanted("policy", 1, replica="rollout", server=hub))
    with pytest.raises(tensorhub.UsageError, match="holds version 1 already, and 0 was wanted"):
        call(Model(), sglang.wanted("policy", 0, replica="rollout", server=hub))


class Careless(Model):
    """As loaders that add a bias on one rank only: it changes what it is given."""

    def load_weights(self, weights):
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            tensor.zero_()


def test_a_loader_that_changes_what_it_is_given_changes_nothing_that_others_read(hub, trainer):
    model = Careless()
    call(model, sglang.wanted("policy", 0, replica="rollout", server=hub))
    assert (model.qk[:4] == 2.0).all()
    ((_, reader),) = sglang._readers.values()
    reader.weights.check()
    assert (dict(reader)["q_proj.weight"] == 2.0).all()
