"""Facts about one tensor, and whether it still lies there; and torch, where it is installed and can be loaded."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ..protocol.errors import UsageError, shortened
from ..protocol.manifest import dense_strides
from ..protocol.names import MAX_TEXT, plain
from ..transport import threads

_log = logging.getLogger(__name__)

INSTALL = "install torch"

_why_not = ""  # what would help, once it could not be loaded


def seen_torch() -> Any:
    """torch, if this process has loaded it already. Loads nothing."""
    found = sys.modules.get("torch")
    return found if hasattr(found, "Tensor") else None  # a folder of that name can be imported too


def outside_modes() -> ExitStack:
    """A block in which torch works on memory, whatever mode or transform its caller is in.

    That is `FakeTensorMode`, a default device such as "meta", a mode of the caller's own, and `torch.func`.
    """
    with ExitStack() as block:
        torch = seen_torch()
        if torch is not None:
            block.enter_context(torch._C.DisableTorchFunction())
            block.enter_context(importlib.import_module("torch.utils._python_dispatch")._disable_current_modes())
            with contextlib.suppress(ImportError, AttributeError):  # not every torch has it
                functorch = importlib.import_module("torch._functorch.pyfunctorch")
                block.enter_context(functorch.temporarily_clear_interpreter_stack())
        return block.pop_all()


def loaded_torch() -> Any:
    """torch, loaded. None where it is not installed, or cannot be loaded, which is logged once.

    Raises `Unavailable` if descriptors or memory are short: that is not remembered.
    """
    global _why_not
    if seen_torch() is None and not _why_not:
        _why_not = _load()
    return seen_torch()


def dtype_name(dtype: object) -> str:
    """By torch's names, of a dtype of torch's or numpy's or the name of one; empty for what is none."""
    torch, numpy = seen_torch(), sys.modules.get("numpy")
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    try:
        return str(numpy.dtype(dtype).name) if numpy is not None and dtype is not None else ""
    except TypeError:
        return ""


def what_helps() -> str:
    """The hint of an error that needs torch: how to install it, or why it does not load."""
    return _why_not if loaded_torch() is None else INSTALL


def _load() -> str:
    try:
        importlib.import_module("torch")
        if seen_torch() is None:
            raise ImportError("it has no tensors")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return INSTALL
        if threads.is_shortage(error):
            raise threads.unavailable(error, "it loaded torch") from error
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        _log.warning("torch is installed and cannot be loaded: numpy does without it (%s)", why)
        return f"torch is installed here and cannot be loaded ({why}): mend it, or install it anew"
    return ""


if TYPE_CHECKING:
    import numpy as np
    import torch


# --- One tensor as plain facts, or a refusal that names it.
#
# 1. The elements fill one range of memory exactly: no gaps, no element twice, in any order of dimensions. Strides go
#    into the layout, in elements. Where they mean nothing they are written as those of a contiguous tensor.
# 2. Subclasses are fine if they own plain memory. One with `__torch_dispatch__` is refused: its memory is elsewhere.
# 3. Dtypes have torch's names.
# 4. No tensor is copied or changed, no operation runs on it, and torch is not imported.


NUMPY_KINDS = "biufc"  # bool, signed, unsigned, float, complex; ml_dtypes are recognised by their module
GATHERED_HINT = "shard the model with FSDP2 (torch.distributed.fsdp.fully_shard), or gather tensors and register copies"
COMPLEX_BYTES = 16  # the widest portable element; wider ones (long double) have padding that differs between machines


class Described(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The facts of one tensor. `owner` keeps its memory alive, whatever happens to the user's object.

    Made by the hundred thousand, so its kind is the cheapest to make, and none that the garbage collector looks at.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    size_bytes: int
    device: str  # "cpu", "cuda:0"
    storage: int  # equal for two tensors whose memory was allocated as one
    owner: object


def describe_all(items: Iterable[tuple[object, object]]) -> list[Described]:
    """The facts of each. Raises `UsageError`, naming the first tensor that cannot be registered."""
    with plainly():
        return [_describe(name, tensor) for name, tensor in items]


def plainly() -> ExitStack:
    """A block without autograd, and without a subclass's own operations: they are no business of ours."""
    with ExitStack() as block:
        torch = seen_torch()
        if torch is not None:
            block.enter_context(torch._C.DisableTorchFunctionSubclass())
            block.enter_context(torch.no_grad())
        return block.pop_all()


def _describe(name: object, tensor: object) -> Described:
    if not isinstance(name, str):
        raise UsageError(
            f"tensor names are strings, but {name!r} is a {type(name).__name__}", hint="register(dict[str, Tensor])"
        )
    if not name.isprintable() or len(name) > MAX_TEXT:
        text = f"tensor name {shortened(repr(name), 200)} has unprintable characters, or more than {MAX_TEXT}"
        raise UsageError(f"{text}; nothing was registered", hint="name it in printable characters")
    name = plain(name)
    torch = seen_torch()
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _describe_torch(name, tensor)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _describe_numpy(name, tensor)
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}".removeprefix("builtins.")
    _refuse(name, f"is a {kind}, not a torch tensor or numpy array", "leave it out of the mapping")


def _refuse(name: str, why: str, remedy: str) -> NoReturn:
    raise UsageError(f"tensor {name!r} {why}; nothing was registered", hint=remedy)


def _describe_torch(name: str, tensor: "torch.Tensor") -> Described:
    _refuse_unusual(name, tensor)
    try:
        alias = tensor.detach()  # holds the memory, even if the user's tensor is given other memory later
        storage = alias.untyped_storage()
        address, start = alias.data_ptr(), storage.data_ptr()
    except (RuntimeError, NotImplementedError) as error:  # a functorch wrapper, for example
        raise UsageError(
            f"tensor {name!r} has no memory of its own ({error}); nothing was registered",
            hint="register the plain tensor behind it",
        ) from error
    shape = tuple(alias.shape)
    strides = _dense_strides(name, shape, alias.stride())
    size_bytes = alias.nbytes
    if size_bytes and not start <= address <= start + storage.nbytes() - size_bytes:
        _refuse(name, "lies outside of its storage, which was freed or shrunk", "register it while it has memory")
    device = tensor.device
    return Described(
        name=name,
        dtype=_dtype_names.get(alias.dtype) or _named(alias.dtype),
        shape=shape,
        strides=strides,
        address=address if size_bytes else 0,
        size_bytes=size_bytes,
        device=device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}",
        storage=start,
        owner=alias,
    )


_dtype_names: "dict[torch.dtype, str]" = {}  # text costs more to make than all else of a small tensor


def _named(dtype: "torch.dtype") -> str:
    return _dtype_names.setdefault(dtype, str(dtype).removeprefix("torch."))


def gathered_by(parameter: object) -> str:
    """Why its memory is no part of a named tensor: FSDP1 and ZeRO-3 keep it flat. "" for other parameters."""
    if hasattr(parameter, "ds_id") or hasattr(parameter, "ds_tensor"):
        return "is cut by DeepSpeed's ZeRO-3, which keeps it flat and gathers it with all ranks"
    return (
        "is flattened by FSDP1, which gathers it with all ranks" if getattr(parameter, "_fsdp_flattened", False) else ""
    )


def _refuse_unusual(name: str, tensor: "torch.Tensor") -> None:
    import torch

    kind = type(tensor)
    if kind.__name__ == "FakeTensor":
        _refuse(name, "is a fake tensor: it has no memory", "make it outside of FakeTensorMode, or register another")
    if why := gathered_by(tensor):
        _refuse(name, why, GATHERED_HINT)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        what = f"is a {kind.__module__}.{kind.__qualname__}, whose memory is elsewhere"
        _refuse(name, what, "register its local shard: .to_local() for a DTensor, its plain inner tensors for others")
    if torch.nn.parameter.is_lazy(tensor):
        _refuse(name, "is a lazy parameter without memory yet", "run the module once, then register")
    if tensor.is_nested:
        _refuse(name, "is a nested tensor", "register .values() and .offsets() as tensors of their own")
    if tensor.layout is not torch.strided:
        _refuse(name, f"is sparse ({tensor.layout})", "register its indices and values as tensors of their own")
    if tensor.is_quantized:
        _refuse(name, f"is quantized ({tensor.dtype})", "register .int_repr(), and its scales as tensors of their own")
    if tensor.is_meta:
        _refuse(name, "is on the meta device: it has no memory", "materialise it first: module.to_empty(device=...)")
    if tensor.device.type not in ("cpu", "cuda"):
        _refuse(name, f"is on device {tensor.device}", "register tensors on the CPU or on a CUDA device")
    if tensor.is_conj():
        _refuse(name, "is a lazy conjugate: its memory holds other values", "register tensor.resolve_conj()")
    if tensor.is_neg():
        _refuse(name, "is a lazy negation: its memory holds other values", "register tensor.resolve_neg()")
    if tensor._is_zerotensor():
        _refuse(name, "is a symbolic zero: it has no memory", "register torch.zeros_like(tensor)")


def _describe_numpy(name: str, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Described:
    import numpy as np

    if isinstance(array, np.ma.MaskedArray):
        _refuse(name, "is a masked array", "register .data and .mask as arrays of their own")
    if not array.flags.writeable:
        _refuse(name, "is a read-only numpy array", "register a writeable one: array.copy()")
    dtype = _numpy_dtype(name, array.dtype)
    itemsize = array.dtype.itemsize
    if any(stride % itemsize for stride in array.strides) and array.size:
        _refuse(name, f"has byte strides {list(array.strides)}, no multiples of its {itemsize} B", "register a copy")
    strides = _dense_strides(name, array.shape, tuple(stride // itemsize for stride in array.strides))
    address: int = array.__array_interface__["data"][0]
    root: object = array
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    start: int = root.__array_interface__["data"][0] if isinstance(root, np.ndarray) else id(root)
    return Described(
        name=name,
        dtype=dtype,
        shape=array.shape,
        strides=strides,
        address=address if array.size else 0,
        size_bytes=array.nbytes,
        device="cpu",
        storage=start,
        owner=array,
    )


def _numpy_dtype(name: str, dtype: "np.dtype[np.generic]") -> str:
    if dtype.names is not None:
        _refuse(name, f"has the structured dtype {dtype}", "register each field as a contiguous array of its own")
    if dtype.hasobject:
        _refuse(name, f"has dtype {dtype}: references to objects, not numbers", "leave it out of the mapping")
    if not dtype.isnative:
        _refuse(name, f"has dtype {dtype.str}, which is not in native byte order", "register array.astype('=...')")
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return dtype.name
    if dtype.kind not in NUMPY_KINDS or dtype.itemsize > (COMPLEX_BYTES if dtype.kind == "c" else COMPLEX_BYTES // 2):
        _refuse(name, f"has dtype {dtype}, which is not one that workers can exchange", "register plain numbers")
    return dtype.name


def _dense_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides as they go into the layout, or a refusal if the elements do not fill one range exactly."""
    found = dense_strides(shape, strides)
    if found is None:
        _refuse_sparse_memory(name, shape, strides)
    return found


def _refuse_sparse_memory(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> NoReturn:
    what, expected = "there are gaps between its elements", 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected:
            if stride < expected:
                what = "it runs backwards" if stride < 0 else "several of its elements share memory"
            break
        expected *= size
    _refuse(
        name,
        f"of shape {list(shape)} has strides {list(strides)}: {what}",
        "register the whole tensor that it is a view of, or use tensor.contiguous() in its place",
    )


# --- Whether registered tensors still are the memory that was registered, asked before every operation.
#
# `param.data = ...`, `resize_` and storages freed from under their tensors (FSDP does so between steps) move a tensor's
# bytes. To compare all addresses takes 0.07 us for a tensor. Only where they differ is each tensor looked at.


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
