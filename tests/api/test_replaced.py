"""A module whose parameters are replaced after they were registered: never published for what they were."""

import pytest
import torch
from torch import nn

import tensorhub


def model() -> nn.Module:
    found = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    found[0].weight.data.fill_(1.0)
    return found


def assign(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


REPLACEMENTS = {  # what its owner does, and what is said
    "another parameter": (
        lambda module: setattr(module[0], "weight", nn.Parameter(torch.ones(8, 8))),
        "'0.weight' lies in other memory",
    ),
    "another dtype": (lambda module: module.half(), "'0.weight' is float16 and was float32"),
    "assigned": (assign, "'0.weight' lies in other memory"),
    "a buffer": (
        lambda module: setattr(module[1], "running_mean", torch.zeros(8)),
        "'1.running_mean' lies in other memory",
    ),
    "another shape": (
        lambda module: module.__setitem__(0, nn.Linear(8, 9)),
        "'0.weight' has shape [9, 8] and had [8, 8]",
    ),
    "transposed": (
        lambda module: setattr(module[0], "weight", nn.Parameter(module[0].weight.detach().t())),
        "'0.weight' has strides [1, 8] and had [8, 1]",
    ),
    "one that is gone": (lambda module: setattr(module[0], "bias", None), "'0.bias' is gone"),
    "one more": (lambda module: module.append(nn.Linear(2, 2)), "'2.weight' was not there"),
    "its data": (
        lambda module: setattr(module[0].weight, "data", torch.ones(8, 8)),
        "'0.weight' lies in other memory",
    ),
}


def test_what_was_replaced_is_named_and_not_published(join):
    """Each in a model of its own: it is refused until the module is registered again."""
    for number, (what, (change, said)) in enumerate(REPLACEMENTS.items()):
        module = model()
        trainer, _ = join("trainer", model=f"m{number}", tensors=module)
        trainer.publish(1)
        trainer.unpublish()
        change(module)
        with pytest.raises(tensorhub.UsageError) as refused:
            trainer.publish(2)
        assert said in str(refused.value), what
        assert "register() again" in refused.value.hint
        assert trainer.version is None
        trainer.register(module)
        assert trainer.publish(2) == 2
        target = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
        reader, _ = join("reader", model=f"m{number}", tensors=target)
        assert reader.replicate(2) == 2
        assert all(torch.equal(target[name], tensor) for name, tensor in module.state_dict().items()), what


def test_a_fill_does_not_go_where_the_module_is_no_longer(join):
    trainer, _ = join("trainer", tensors=model())
    trainer.publish(1)
    other = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    reader, _ = join("reader", tensors=other)
    other[0].weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(tensorhub.UsageError, match=r"'0\.weight' lies in other memory"):
        reader.replicate(1)
    assert reader.version is None
    reader.register(other)
    assert reader.replicate(1) == 1
    assert (other[0].weight == 1).all()
