"""A module's state that is no parameter and no persistent buffer: refused by name, or left out on request."""

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tensorhub.memory.registration import register
from tensorhub.protocol.errors import UsageError


def names(module: object, **options: Any) -> list[str]:
    return [tensor.name for tensor in register(module, **options).layout.tensors]  # type: ignore[arg-type]


def set_in_state(name: str, value: object) -> Any:
    def hook(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        state[prefix + name] = value

    return hook


class Packed(nn.Linear):
    """As bitsandbytes' layers, whose scales no parameter and no buffer holds."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = torch.ones(3)


class Extra(nn.Linear):
    extra: object = None

    def get_extra_state(self) -> Any:
        return self.extra


class Saying(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "step": 3}


class Kept(nn.Linear):
    """Extra state that is a tensor, the same one each time."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.kept = torch.ones(2)

    def get_extra_state(self) -> Any:
        return self.kept


def hooked(value: object, name: str = "scale", *, is_public: bool = True) -> nn.Module:
    module = nn.Linear(2, 2)
    register_hook = module.register_state_dict_post_hook if is_public else module._register_state_dict_hook
    register_hook(set_in_state(name, value))  # type: ignore[no-untyped-call]
    return module


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[no-untyped-call]
        found.state_dict()  # which warns too
    return found


BEYOND = {
    "override": (lambda: Packed(2, 2), r"'0\.weight\.absmax' \(Tensor of '0', class Packed\)"),
    "extra": (Kept, r"'0\._extra_state' \(Tensor of '0', class Kept\)"),
    "post-hook": (lambda: hooked(torch.ones(1)), r"'0\.scale' \(Tensor of '0', class Linear\)"),
    "hook": (lambda: hooked({"absmax": 1}, is_public=False), r"'0\.scale' \(dict of '0', class Linear\)"),
    "other": (
        lambda: hooked(torch.ones(2), "bias"),
        r"'0\.bias' \(Tensor, not the module's own, of '0', class Linear\)",
    ),
    "packed": (quantized, r"'0\.0\._packed_params\._packed_params' \(tuple of '0\.0\._packed_params', class Linear"),
}


@pytest.mark.filterwarnings("ignore:torch")
@pytest.mark.parametrize("kind", BEYOND)
def test_state_that_readers_would_not_get_is_refused_by_name(kind: str) -> None:
    make, said = BEYOND[kind]
    module = nn.Sequential(make(), nn.Linear(2, 2))
    with pytest.raises(UsageError, match=str(said)) as refused:
        register(module)
    left_out = [name for name in module.state_dict() if f"{name!r}" in str(refused.value)]
    assert str(left_out) in (refused.value.hint or "")
    kept = names(module, leave_out=left_out)
    assert {"1.weight", "1.bias"} <= set(kept)
    assert not set(kept) & set(left_out)


def test_a_state_dict_of_its_own_is_asked() -> None:
    with pytest.raises(UsageError, match=r"'step' \(int of the module, class Saying\)"):
        register(Saying(2, 2))
    assert names(Saying(2, 2), leave_out="step") == ["weight", "bias"]


@pytest.mark.parametrize("extra", [None, b"", {}, io.BytesIO(), torch.empty(0)], ids=lambda extra: type(extra).__name__)
def test_extra_state_that_says_nothing_is_no_hindrance(extra: object) -> None:
    module = Extra(2, 2)
    module.extra = extra
    assert names(nn.Sequential(module)) == ["0.weight", "0.bias"]


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[return-value]


def lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(2))
    module(torch.ones(1, 3))
    return module


def renaming() -> nn.Module:
    module = nn.Linear(2, 2)

    def rename(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        state[prefix + "w"] = state.pop(prefix + "weight")

    module._register_state_dict_hook(rename)
    return module


def copying() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(set_in_state("weight", module.weight.detach().clone()))  # type: ignore[no-untyped-call]
    return module


ORDINARY = {
    "norm": (lambda: nn.BatchNorm1d(2), 5),
    "compiled": (compiled, 2),
    "lazy, run": (lazy, 2),
    "parametrized": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), 4),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), 3),
    "shared": (lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2), 4),
    "a hook that renames": (renaming, 2),
    "a hook that copies": (copying, 2),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_modules_are_registered_whole(kind: str) -> None:
    make, count = ORDINARY[kind]
    module = make()
    registration = register(module)
    assert len(registration.layout.tensors) == count
    assert registration.replaced() == []


def test_a_lazy_module_that_never_ran_says_so() -> None:
    with pytest.raises(UsageError, match=r"'0\.weight' is a lazy parameter"):
        register(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.parametrize(("depth", "said"), [(0, r"'me' is the whole module again"), (1, r"'0\.me' is '0' again")])
def test_a_module_that_holds_its_parent_is_refused(depth: int, said: str) -> None:
    inside = nn.Linear(2, 2)
    inside.me = inside
    module = nn.Sequential(inside) if depth else inside
    with pytest.raises(UsageError, match=said):
        register(module)


def test_what_is_left_out_is_neither_registered_nor_watched() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    registration = register(module, leave_out=["1.*"])
    assert [tensor.name for tensor in registration.layout.tensors] == ["0.weight", "0.bias"]
    module[1].weight = nn.Parameter(torch.ones(2, 2))
    assert registration.replaced() == []
    module[0].weight = nn.Parameter(torch.ones(2, 2))
    assert registration.replaced() == ["'0.weight' lies in other memory"]
    assert names({"a": torch.ones(1), "b": torch.ones(1)}, leave_out="a") == ["b"]


@pytest.mark.parametrize(
    ("leave_out", "said"), [("2.*", "nothing of that name"), ("*", "not left out"), (3, "no list of names")]
)
def test_a_leave_out_that_fits_nothing_is_refused(leave_out: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        register(nn.Sequential(nn.Linear(2, 2)), leave_out=leave_out)


@pytest.mark.parametrize("attribute", ["ds_id", "_fsdp_flattened"])
def test_flat_parameters_are_refused_by_name(attribute: str) -> None:
    module = nn.Linear(2, 2)
    setattr(module.bias, attribute, True)
    with pytest.raises(UsageError, match=r"parameter 'bias' of '0', class Linear, is (cut by DeepSpeed|flattened)"):
        register(nn.Sequential(module))
    with pytest.raises(UsageError, match=r"tensor 'bias' is (cut by DeepSpeed|flattened)"):
        register(dict(module.named_parameters()))
