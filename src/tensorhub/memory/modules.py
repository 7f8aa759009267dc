"""A module's tensors by name, and whether it, or a mapping of tensors, still holds those that were registered.

A tensor in a `state_dict()` is an alias: when its parameter is replaced (`module.weight = Parameter(...)`,
`load_state_dict(assign=True)`, `half()`, a tie that was undone) the alias goes on naming the old memory, and nothing
about it tells. Only the module knows what it holds now, so it is asked at every publish and before every fill. So is a
mapping that was registered: who writes `tensors["w"] = tensors["w"] + 1` means that tensor from then on.

Rules:
1. The tensors are the parameters and persistent buffers, with the names and in the order of `state_dict()`; of a
   `DTensor` (FSDP2, tensor parallelism) its local shard. No hook of the module runs, and nothing is gathered.
2. The same tensor is one at the same address with the same dtype, shape and strides, whatever object names it.
3. What is taken out of a mapping, or put into it under another name, changes nothing of what was registered.

Never: import torch, run an operation on a parameter, or call what an engine may have put in place of `state_dict`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from msgspec.structs import replace

from ..core.errors import UsageError
from .describe import plainly

if TYPE_CHECKING:
    import torch

    from ..core.boxes import Box


def is_module(found: object) -> "TypeGuard[torch.nn.Module]":
    """Whether it is a module of torch's, where torch is loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(found, torch.nn.Module)


def tensors_of_module(module: "torch.nn.Module") -> "dict[str, torch.Tensor]":
    """Its parameters and persistent buffers. Raises `UsageError` if there are none."""
    found = dict(_tensors(module))
    if not found:
        name = type(module).__qualname__
        raise UsageError(f"{name} has neither parameters nor persistent buffers", hint="register a module with weights")
    return found


def _tensors(module: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    for name, tensor in _raw(module):
        yield name, _local(tensor)


def _raw(module: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    import torch

    with torch.no_grad():  # of a DTensor, the shard itself and no view for autograd
        for prefix, part in module.named_modules(remove_duplicate=False):
            before = f"{prefix}." if prefix else ""
            passing = part._non_persistent_buffers_set
            for (
                name,
                parameter,
            ) in part._parameters.items():  # methods that list them may be overridden
                if parameter is not None:
                    yield before + name, parameter
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in passing:
                    yield before + name, buffer


def _local(tensor: "torch.Tensor") -> "torch.Tensor":
    loaded = sys.modules.get("torch.distributed.tensor")
    if loaded is not None and isinstance(tensor, loaded.DTensor):
        local: torch.Tensor = tensor.to_local()
        return local
    return tensor


def is_dtensor(tensor: object) -> bool:
    """Whether it is one, where such are loaded."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def parts_of(tensors: "dict[str, Any]") -> "tuple[dict[str, torch.Tensor], dict[str, list[Box]]]":
    """The local tensors of DTensors, and which parts of the global tensors of those names they are."""
    from .dtensors import boxes_of_dtensor  # with torch's own of them

    found = {name: boxes_of_dtensor(name, tensor) for name, tensor in tensors.items()}
    locals_ = {name: local for name, (local, _) in found.items()}
    return locals_, {name: [replace(box, dtype="") for box in boxes] for name, (_, boxes) in found.items()}


def boxes_of_module(module: "torch.nn.Module") -> "dict[str, list[Box]]":
    """Of those of its parameters and persistent buffers that are DTensors."""
    import torch

    with torch.no_grad():
        found = {name: tensor for name, tensor in _raw(module) if is_dtensor(tensor)}
    return parts_of(found)[1] if found else {}


class Facts(NamedTuple):
    """What makes a tensor the same one."""

    address: int
    dtype: object  # of torch's or numpy's
    shape: Sequence[int]
    strides: tuple[int, ...]


class Held:
    """A module whose tensors are registered, and what they were then."""

    def __init__(self, module: "torch.nn.Module", tensors: "dict[str, torch.Tensor]") -> None:
        self._module = module
        with plainly():
            self._known = {name: _facts(tensor) for name, tensor in tensors.items()}

    def replaced(self) -> list[str]:
        """Each tensor that the module has, or had, and that is not the registered one: its name, and what it is now."""
        with plainly():
            found = {name: _facts(tensor) for name, tensor in _tensors(self._module)}
        if found == self._known:
            return []
        wrong = [_difference(name, known, found.get(name)) for name, known in self._known.items()]
        wrong += [f"{name!r} was not there" for name in found if name not in self._known]
        return [each for each in wrong if each]


class HeldMapping:
    """A mapping whose tensors are registered, and which those were."""

    def __init__(self, tensors: "Mapping[str, object]", registered: "Iterable[tuple[str, object]]") -> None:
        """`registered` are those that it has given. One that it makes anew each time it is asked is never the same."""
        self._tensors = tensors
        with plainly():
            known = {name: (tensor, _facts_of_any(tensor)) for name, tensor in registered}
            self._known = {name: each for name, each in known.items() if self._is_still(name, *each)}

    @property
    def kind(self) -> str:
        """What it is called in errors."""
        return "dict" if isinstance(self._tensors, dict) else "mapping"

    def replaced(self) -> list[str]:
        """Each name that means another tensor by now, and what that is."""
        with plainly():
            changed = [name for name, each in self._known.items() if not self._is_still(name, *each)]
            return [_difference(name, self._known[name][1], _facts_of_any(self._tensors.get(name))) for name in changed]

    def _is_still(self, name: str, known: object, facts: "Facts | None") -> bool:
        now = self._tensors.get(name, known)
        return now is known or _facts_of_any(now) == facts


def _facts_of_any(tensor: Any) -> "Facts | None":
    """Of an array too. None: it is no tensor at all."""
    if hasattr(tensor, "__array_interface__") and not hasattr(tensor, "data_ptr"):
        address = tensor.__array_interface__["data"][0] if tensor.size else 0
        return Facts(address, tensor.dtype, tuple(tensor.shape), tuple(tensor.strides))
    return _facts(_local(tensor)) if hasattr(tensor, "data_ptr") else None


def _facts(tensor: "torch.Tensor") -> Facts:
    return Facts(tensor.data_ptr() if tensor.numel() else 0, tensor.dtype, tensor.shape, tensor.stride())


def _difference(name: str, known: Facts | None, now: Facts | None) -> str:
    if now is None or known is None:
        return f"{name!r} is gone"
    if now.dtype != known.dtype:
        return f"{name!r} is {_named(now.dtype)} and was {_named(known.dtype)}"
    if now.shape != known.shape:
        return f"{name!r} has shape {list(now.shape)} and had {list(known.shape)}"
    if now.strides != known.strides:
        return f"{name!r} has strides {list(now.strides)} and had {list(known.strides)}"
    return f"{name!r} lies in other memory" if now.address != known.address else ""


def _named(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
