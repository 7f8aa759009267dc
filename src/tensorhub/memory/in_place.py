"""Whether registered tensors still are the memory that was registered, asked before every operation.

`param.data = ...`, `resize_` and a storage freed from under its tensors (as FSDP does between steps) all move the bytes
of a tensor. What was registered would be read for what it is not, and what is received would never reach the tensor.

Rules:
1. Asking takes 0.07 us for a tensor (0.3 if no cache has it): the addresses, listed by a loop of C's, are compared with
   those of registration. That notices resized storages too: to resize one is to allocate another, or none.
2. Only if they differ is each tensor looked at by itself, so that those that moved can be named.

Never: run an operation on a tensor, or take a tensor's word for another's.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .describe import Described
from .torch_here import seen_torch

if TYPE_CHECKING:
    import torch

NAMES_SHOWN = 5  # tensors in an error


def some(names: Sequence[str]) -> str:
    """A few of these names, and how many more there are, as errors show them."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:NAMES_SHOWN])) + more


class InPlace:
    """Registered tensors, and where their bytes were then."""

    def __init__(self, described: Sequence[Described], tensors: Sequence[object]) -> None:
        self._known: list[Described] = []
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[tuple[Described, object]] = []
        loaded = seen_torch()
        for known, tensor in zip(described, tensors, strict=True):
            if not known.size_bytes:
                continue  # no bytes, no place
            if loaded is not None and isinstance(tensor, loaded.Tensor):
                self._known.append(known)
                self._tensors.append(tensor)
            else:
                self._arrays.append((known, tensor))
        self._addresses = [known.address for known in self._known]

    def __len__(self) -> int:
        """How many of them have bytes."""
        return len(self._tensors) + len(self._arrays)

    def moved(self) -> list[str]:
        """Names of tensors that no longer are the registered memory, torch's first."""
        found = [] if self._is_as_before() else self._moved_torch()
        return found + [known.name for known, array in self._arrays if not _is_array_at(known, array)]

    def _is_as_before(self) -> bool:
        if not self._tensors:
            return True
        import torch  # imported already: some of its tensors are registered

        return list(map(torch._C.TensorBase.data_ptr, self._tensors)) == self._addresses

    def _moved_torch(self) -> list[str]:
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            return [
                known.name
                for known, tensor in zip(self._known, self._tensors, strict=True)
                if not _is_tensor_at(known, tensor)
            ]


def _is_tensor_at(known: Described, tensor: "torch.Tensor") -> bool:
    storage = tensor.untyped_storage()
    end = storage.data_ptr() + storage.nbytes()
    return bool(tensor.data_ptr() == known.address and known.address + known.size_bytes <= end)


def _is_array_at(known: Described, array: object) -> bool:
    facts: dict[str, tuple[int, bool]] = array.__array_interface__  # type: ignore[attr-defined]
    return facts["data"][0] == known.address and getattr(array, "nbytes", 0) == known.size_bytes
