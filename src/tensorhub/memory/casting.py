"""Casts of elements as torch does them, and which of them lose nothing.

Where torch is not loaded, numpy does those casts that it rounds exactly as torch does; any other one needs torch. (From
float64 to float16 torch goes by way of float32, and rounds twice; numpy does not. numpy has no bfloat16.) NaN stays
NaN, with whatever payload: torch's own differs with the length of what it casts.

Never: import torch where numpy will do.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import UsageError
from .torch_here import INSTALL, loaded_torch, seen_torch, what_helps

if TYPE_CHECKING:
    import torch

    from .describe import Described

Move = Callable[[memoryview, memoryview], None]  # all elements of the first, cast, into the second


class Form(NamedTuple):
    """What a dtype of floating-point numbers can say."""

    size_bytes: int
    bits: int  # of the significand
    lowest: int  # 2 to this is the least number above zero
    highest: int  # every number is below 2 to this
    is_finite: bool = False  # it has no infinity


FORMS = {
    "float64": Form(8, 53, -1074, 1024),
    "float32": Form(4, 24, -149, 128),
    "bfloat16": Form(2, 8, -133, 128),
    "float16": Form(2, 11, -24, 16),
    "float8_e4m3fn": Form(1, 4, -9, 9, is_finite=True),
    "float8_e5m2": Form(1, 3, -16, 16),
}
AS_TORCH = {  # what numpy casts as torch does
    ("float64", "float32"),
    ("float32", "float16"),
    ("float16", "float32"),
    ("float16", "float64"),
    ("float32", "float64"),
}


def keeps_all(source: str, target: str) -> bool:
    """Every number of the one is a number of the other."""
    old, new = FORMS[source], FORMS[target]
    fits = old.bits <= new.bits and old.lowest >= new.lowest and old.highest <= new.highest
    return source == target or (fits and (old.is_finite or not new.is_finite))


def targets_of(described: "list[Described]", wanted: object) -> list[str]:
    """The dtype in which each tensor is to be published: its own, unless `wanted` names another.

    `wanted` is a dtype for all tensors of floating-point numbers, or a mapping from names to dtypes. Raises
    `UsageError` that names what is wrong.
    """
    if not isinstance(wanted, Mapping):
        name = _dtype_name(wanted)
        return [name if facts.dtype in FORMS else facts.dtype for facts in described]
    known = {facts.name: facts.dtype for facts in described}
    named: dict[str, str] = {}
    for tensor, dtype in wanted.items():
        if tensor not in known:
            text = f"dtype names tensor {tensor!r}, which is not among those to register; nothing was registered"
            raise UsageError(text, hint="use the names under which the tensors are registered")
        named[tensor] = _dtype_name(dtype)
        if known[tensor] not in FORMS and named[tensor] != known[tensor]:
            text = f"tensor {tensor!r} of {known[tensor]} cannot be cast to {named[tensor]}; nothing was registered"
            raise UsageError(text, hint="only floating-point numbers are cast")
    return [named.get(facts.name, facts.dtype) for facts in described]


def _dtype_name(dtype: object) -> str:
    """By torch's names, of a dtype of torch's or numpy's or the name of one."""
    torch, numpy = seen_torch(), sys.modules.get("numpy")
    name = dtype if isinstance(dtype, str) else ""
    if torch is not None and isinstance(dtype, torch.dtype):
        name = str(dtype)
    elif numpy is not None and isinstance(dtype, type) and issubclass(dtype, numpy.generic):
        name = numpy.dtype(dtype).name
    elif numpy is not None and isinstance(dtype, numpy.dtype):
        name = dtype.name
    name = name.removeprefix("torch.")
    if name not in FORMS:
        raise UsageError(f"dtype={dtype!r} is none that can be cast to", hint=f"one of {', '.join(FORMS)}")
    return name


def mover(source: str, target: str) -> Move:
    """Casts all elements of one piece of memory into another. Raises `UsageError` if nothing here can."""
    is_plain = (source, target) in AS_TORCH
    if is_plain and seen_torch() is None:
        return _by_numpy(source, target)
    if loaded_torch() is None:
        if is_plain:
            return _by_numpy(source, target)
        why = "is not installed" if what_helps() == INSTALL else "cannot be loaded"
        text = f"casting {source} to {target} needs torch, which {why}"
        plain = ", ".join(f"{old} to {new}" for old, new in sorted(AS_TORCH))
        raise UsageError(text, hint=f"{what_helps()}; numpy alone casts {plain} as torch does")
    return _by_torch(source, target)


def _by_numpy(source: str, target: str) -> Move:
    import numpy as np

    old, new = np.dtype(source), np.dtype(target)

    def move(theirs: memoryview, ours: memoryview) -> None:
        with np.errstate(all="ignore"):  # too large is infinite, as in torch
            np.copyto(np.frombuffer(ours, new), np.frombuffer(theirs, old), casting="unsafe")

    return move


def _by_torch(source: str, target: str) -> Move:
    import torch

    old, new = _torch_dtype(source), _torch_dtype(target)

    def move(theirs: memoryview, ours: memoryview) -> None:
        with torch.no_grad():
            torch.frombuffer(ours, dtype=new).copy_(torch.frombuffer(theirs, dtype=old))

    return move


def are_same(dtype: str, ours: memoryview, theirs: memoryview) -> bool:
    """All elements of that dtype are. What is no number is the same as any other such, whatever its payload."""
    if ours == theirs:
        return True
    if seen_torch() is None:
        import numpy as np

        mine, yours = np.frombuffer(ours, np.dtype(dtype)), np.frombuffer(theirs, np.dtype(dtype))
        return bool(((mine == yours) | (np.isnan(mine) & np.isnan(yours))).all())
    import torch

    there = _torch_dtype(dtype)
    return is_same_tensor(torch.frombuffer(ours, dtype=there), torch.frombuffer(theirs, dtype=there))


def is_same_tensor(ours: "torch.Tensor", theirs: "torch.Tensor") -> bool:
    """The same of two tensors of one dtype, which is no wider than float64."""
    import torch

    with torch.no_grad():
        wide = torch.float64 if ours.dtype == torch.float64 else torch.float32  # not all devices compare all dtypes
        mine, yours = ours.to(wide), theirs.to(wide)
        return bool(((mine == yours) | (mine.isnan() & yours.isnan())).all())


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"this torch does not know {name}", hint="install a newer torch")
    return found
