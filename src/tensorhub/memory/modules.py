"""Tensors of a torch module by name, DTensors with their boxes, and whether a module still holds them."""

import io
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

from msgspec.structs import replace

from ..protocol.errors import UsageError
from ..protocol.layout import Box, Placement, Replicated, Sharded, StridedSharded, boxes_of_placements
from .describe import GATHERED_HINT, NAMES_SHOWN, gathered_by, plainly, seen_torch

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


# --- DTensors as a local tensor, and the boxes of a global one that lie in it.
#
# A rank outside the mesh, or with an empty part, has no boxes. FSDP over tensor parallelism that cuts one dimension
# unevenly twice leaves local tensors of other sizes than their placements say: such a DTensor is refused by name.


def boxes_of_dtensor(name: str, tensor: "DTensor") -> "tuple[torch.Tensor, list[Box]]":
    """The local tensor, which shares the DTensor's memory, and its boxes in the global tensor `name`."""
    import torch

    with torch.no_grad():
        local = tensor.to_local()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return local, []
    shape = tuple(tensor.shape)
    placements = [_plain(name, placement, len(shape)) for placement in tensor.placements]
    dtype = str(local.dtype).removeprefix("torch.")
    boxes = boxes_of_placements(name, shape, tuple(mesh.shape), coordinate, placements, tuple(local.stride()), dtype)
    elements = sum(prod(box.size) for box in boxes)
    if elements != local.numel() or (elements and any(_reach(box) > elements for box in boxes)):
        raise UsageError(
            f"tensor {name!r} is a DTensor of global shape {list(shape)} whose local shape {list(local.shape)} is not"
            f" what its placements {tensor.placements} mean at {coordinate} of a mesh of shape {list(mesh.shape)}",
            hint="cut this dimension evenly, or register the local tensor with boxes of your own",
        )
    return local, boxes


def _plain(name: str, placement: "TorchPlacement", dimensions: int) -> Placement:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):  # asked first: in older releases it is a kind of Shard
        return StridedSharded(placement.dim % dimensions, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Sharded(placement.dim % dimensions)
    if isinstance(placement, Replicate):
        return Replicated()
    raise UsageError(
        f"tensor {name!r} is a DTensor with placement {placement}, which names no part of it",
        hint="redistribute it to Shard or Replicate first",
    )


def _reach(box: Box) -> int:
    assert box.strides is not None, "said above"
    return box.offset + 1 + sum((count - 1) * stride for count, stride in zip(box.size, box.strides, strict=True))


# --- A module's tensors by name, and whether it, or a mapping, still holds those that were registered.
#
# A tensor in a `state_dict()` is an alias: when its parameter is replaced, the alias goes on naming the old memory. So
# the module, or mapping, is asked at every publish and before every fill.
#
# 1. The tensors are parameters and persistent buffers, with the names and in the order of `state_dict()`; of a
#    `DTensor` its local shard. Nothing is gathered.
# 2. State that only `state_dict()` knows is refused by name, unless the caller leaves it out.
# 3. A module whose `state_dict()` is a collective (FSDP1, ZeRO-3) is refused before it is asked.
# 4. The same tensor is one at the same address with the same dtype, shape and strides.


def is_module(found: object) -> "TypeGuard[torch.nn.Module]":
    """Whether it is a module of torch's, where torch is loaded."""
    torch = seen_torch()
    return torch is not None and isinstance(found, torch.nn.Module)


class Nested(Mapping[str, object]):
    """Mappings of tensors inside a mapping, as one mapping: names are joined by dots."""

    __slots__ = ("_tensors",)  # so `weakly` keeps it, as it keeps a dict

    def __init__(self, tensors: "Mapping[str, object]") -> None:
        self._tensors = tensors

    def __iter__(self) -> "Iterator[str]":
        return (name for name, _ in self._walk(self._tensors, ""))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> object:
        found = self._inside(self._tensors, name)
        if found is None:
            raise KeyError(name)
        return found

    def _inside(self, tensors: "Mapping[str, object]", name: str) -> object | None:
        found = tensors.get(name)
        ends = [at for at, letter in enumerate(name) if letter == "." and found is None]
        for inner, rest in ((tensors.get(name[:at]), name[at + 1 :]) for at in ends):
            if isinstance(inner, Mapping) and (found := self._inside(inner, rest)) is not None:
                return found
        return found

    def _walk(self, tensors: "Mapping[str, object]", path: str) -> "Iterator[tuple[str, object]]":
        for name, each in tensors.items():
            if isinstance(each, Mapping):
                yield from self._walk(each, f"{path}{name}.")
            else:
                yield (f"{path}{name}" if path else name), each


class Modules:
    """Modules by name, as one module for as long as all of them live."""

    def __init__(self, modules: "Mapping[str, torch.nn.Module]") -> None:
        self._modules = {path: weakly(module) for path, module in modules.items()}

    def given(self) -> "Mapping[str, torch.nn.Module] | None":
        """By path; None where one of them is gone."""
        found = {path: each for path, module in self._modules.items() if (each := module()) is not None}
        return found if len(found) == len(self._modules) else None

    def whole(self) -> "torch.nn.Module | None":
        """A module that has these inside; None where one of them is gone."""
        import torch

        whole = torch.nn.Module()
        for path, module in (self.given() or {}).items():
            inside, *parts = whole, *path.split(".")
            for part in parts[:-1]:
                inside = inside._modules.setdefault(part, torch.nn.Module())  # type: ignore[assignment]
            inside._modules[parts[-1]] = module
        return whole if whole._modules else None


def modules_of(tensors: "Mapping[str, object]") -> Modules | None:
    """The modules in a mapping, also in mappings inside it; None: there are none.

    Raises `UsageError` where modules and tensors are mixed.
    """
    flat = dict(Nested(tensors))
    modules = {path: each for path, each in flat.items() if is_module(each)}
    if not modules:
        return None
    if len(modules) < len(flat):
        path = next(path for path in flat if path not in modules)
        text = f"{next(iter(modules))!r} is a module, and {path!r} is a {type(flat[path]).__qualname__}"
        raise UsageError(f"{text}: a mapping has modules, or tensors", hint="give the tensors of every model by name")
    return Modules(modules)


def tensors_of_module(module: "torch.nn.Module", leave_out: object = ()) -> "dict[str, torch.Tensor]":
    """Its parameters and persistent buffers, without those that are left out.

    Raises `UsageError` if there are none, or if the module's state has more than them that is not left out.
    """
    return {name: _local(tensor) for name, tensor in state_of_module(module, leave_out).items()}


def state_of_module(
    module: "torch.nn.Module", leave_out: object = (), named: "Callable[[str], str | None] | None" = None
) -> "dict[str, torch.Tensor]":
    """The same, and DTensors as they are. What FSDP2 has gathered is sharded again.

    `named` gives a tensor of the module its name, or None for one that is no part of the model.
    """
    asked = _asked(module)  # first: it puts FSDP2's shards back
    called: Callable[[str], str | None] = named or str
    found = {public: each for name, each in _raw(module) if (public := called(name)) is not None}
    state = {public: (name, each) for name, each in asked.items() if (public := called(name)) is not None}
    others = _beyond(module, state, found)
    left_out = names_left_out(leave_out, [*found, *(name for name in state if name not in found)])
    wrong = [(name, what) for name, what in others.items() if name not in left_out]
    if wrong:
        listed = "; ".join(what for _, what in wrong[:NAMES_SHOWN])
        more = f"; and {len(wrong) - NAMES_SHOWN} more" if len(wrong) > NAMES_SHOWN else ""
        text = f"state of the module that is neither a parameter nor a persistent buffer: {listed}{more}"
        names = [name for name, _ in wrong[:NAMES_SHOWN]]
        hint = f"readers would not get it: keep it in a buffer, or say leave_out={names} if they can do without"
        raise UsageError(text, hint=hint)
    kept = {name: tensor for name, tensor in found.items() if name not in left_out}
    if not kept:
        name = type(module).__qualname__
        left = " that are not left out" if found else ""
        text = f"{name} has neither parameters nor persistent buffers{left}"
        raise UsageError(text, hint="register a module with weights")
    return kept


def names_left_out(leave_out: object, names: "Iterable[str]") -> set[str]:
    """Those of `names` that `leave_out` means: names, or patterns with *. Raises `UsageError` if one means nothing."""
    patterns = [leave_out] if isinstance(leave_out, str) else [*leave_out] if isinstance(leave_out, Iterable) else None
    if patterns is None or not all(isinstance(each, str) for each in patterns):
        raise UsageError(f"leave_out={leave_out!r} is no list of names", hint='such as leave_out=["lm_head.weight"]')
    names, found = list(names), set[str]()
    for pattern in patterns:
        matched = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not matched:
            hint = f"names are such as {', '.join(names[:NAMES_SHOWN])}"
            raise UsageError(f"leave_out names {pattern!r}, and there is nothing of that name", hint=hint)
        found |= matched
    return found


def parts_of_module(
    module: "torch.nn.Module", path: str = "", above: "tuple[tuple[str, torch.nn.Module], ...]" = ()
) -> "Iterator[tuple[str, torch.nn.Module]]":
    """The module and all inside it, by path, as `state_dict()` orders them. Raises `UsageError` if one holds itself."""
    for at, each in above:
        if each is module:
            holder = repr(at) if at else "the whole module"
            text = f"{path!r} is {holder} again, class {type(module).__qualname__}: a module that holds its parent"
            raise UsageError(text, hint="hold the parent where torch does not look: self.parent = [parent]")
    yield path, module
    for name, part in module._modules.items():
        if part is not None:
            yield from parts_of_module(part, f"{path}.{name}" if path else name, (*above, (path, module)))


def _asked(module: "torch.nn.Module") -> "Mapping[str, object]":
    """What `state_dict()` says. Raises `UsageError`, and asks nothing, where other ranks would have to ask too."""
    for path, part in parts_of_module(module):
        _refuse_gathering(path, part)
    try:
        with plainly():
            state: object = module.state_dict()
    except Exception as error:
        text = f"state_dict() of the module, class {type(module).__qualname__}, raised {type(error).__name__}: {error}"
        raise UsageError(text, hint="register the tensors that you want, as a mapping") from error
    if not isinstance(state, Mapping):
        text = f"state_dict() of the module, class {type(module).__qualname__}, gave a {type(state).__qualname__}"
        raise UsageError(text, hint="register the tensors that you want, as a mapping")
    return state


def _refuse_gathering(path: str, part: "torch.nn.Module") -> None:
    """FSDP1 and ZeRO-3 hold flat or empty parameters, and gather them together with other ranks."""
    where, hint = f"{path!r}" if path else "the module", GATHERED_HINT
    if any(kind.__name__.endswith("FullyShardedDataParallel") for kind in type(part).__mro__):
        text = f"{where} is of class {type(part).__qualname__} (FSDP1), which keeps its parameters flat"
        raise UsageError(f"{text} and gathers them with all ranks", hint=hint)
    for name, parameter in part._parameters.items():
        if why := gathered_by(parameter):
            raise UsageError(f"parameter {name!r} of {where}, class {type(part).__qualname__}, {why}", hint=hint)


def _beyond(
    module: "torch.nn.Module", state: "Mapping[str, tuple[str, object]]", found: "dict[str, torch.Tensor]"
) -> dict[str, str]:
    """What of the state does not lie in the tensors found, and says something: by name, in words that name it.

    `state` has the module's own names too.
    """
    with plainly():
        spans = [_span(_local(tensor)) for tensor in found.values()]
        inside = sorted(span for span in spans if span is not None)
        wrong = [name for name, (_, value) in state.items() if not _is_known(value, found.get(name), inside)]
    parts = dict(parts_of_module(module)) if wrong else {}
    told = {}
    for name in wrong:
        path, value = state[name]
        while path not in parts:
            path = path.rpartition(".")[0]
        kind = type(value).__qualname__ + (", not the module's own," if name in found else "")
        holder = repr(path) if path else "the module"
        told[name] = f"{name!r} ({kind} of {holder}, class {type(parts[path]).__qualname__})"
    return told


def _is_known(value: object, same_name: "torch.Tensor | None", inside: "list[tuple[int, int]]") -> bool:
    """Whether it says nothing, or is one of the tensors, a view of one, or a copy of the one of that name."""
    import torch

    if not isinstance(value, torch.Tensor):
        return _is_empty(value)
    try:
        local, mine = _local(value), None if same_name is None else _local(same_name)
        if mine is not None and (value is same_name or _facts(local) == _facts(mine)):
            return True
        if (span := _span(local)) is None:
            return value.numel() == 0
        at = bisect_right(inside, (span[0], sys.maxsize)) - 1
        if at >= 0 and span[1] <= max(stop for _, stop in inside[: at + 1]):
            return True
        return mine is not None and local.dtype == mine.dtype and torch.equal(local.to(mine.device), mine)
    except (RuntimeError, NotImplementedError, ValueError):  # no memory of its own: `describe` refuses such a parameter
        return same_name is not None


def _is_empty(value: object) -> bool:
    """Extra state that says nothing, as modules give it that have none to save."""
    is_without = isinstance(value, bytes | str | dict | list | tuple | set) and not value
    return value is None or is_without or (isinstance(value, io.BytesIO) and not value.getbuffer().nbytes)


def _span(tensor: "torch.Tensor") -> "tuple[int, int] | None":
    """Its addresses, from the first element to the end of the last one. None: it has no elements, or no memory."""
    try:
        if not tensor.numel() or not tensor.data_ptr():
            return None
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    reach = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _raw(module: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    import torch

    with torch.no_grad():  # of a DTensor, the shard itself and no view for autograd
        for prefix, part in parts_of_module(module):
            before = f"{prefix}." if prefix else ""
            passing = part._non_persistent_buffers_set
            for name, parameter in part._parameters.items():  # methods that list them may be overridden
                if parameter is not None:
                    yield before + name, parameter
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in passing:
                    yield before + name, buffer


def _local(tensor: "torch.Tensor") -> "torch.Tensor":
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_dtensor(tensor: object) -> bool:
    """True if it is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def parts_of(tensors: "dict[str, Any]") -> "tuple[dict[str, torch.Tensor], dict[str, list[Box]]]":
    """The local tensors of DTensors, and which parts of the global tensors of those names they are."""

    found = {name: boxes_of_dtensor(name, tensor) for name, tensor in tensors.items()}
    locals_ = {name: local for name, (local, _) in found.items()}
    return locals_, {name: [replace(box, dtype="") for box in boxes] for name, (_, boxes) in found.items()}


def boxes_of_module(module: "torch.nn.Module") -> "dict[str, list[Box]]":
    """Of those of its parameters and persistent buffers that are DTensors."""
    import torch

    with torch.no_grad():
        found = {name: tensor for name, tensor in _raw(module) if is_dtensor(tensor)}
    return parts_of(found)[1] if found else {}


T = TypeVar("T")


def weakly(found: T) -> "Callable[[], T | None]":
    """It, as long as it lives: it may know the `Weights`, which keeps it. What cannot be referenced so is kept here."""
    return weakref.ref(found) if type(found).__weakrefoffset__ else lambda: found  # of a dict there is none


class Facts(NamedTuple):
    """What makes a tensor the same one."""

    address: int
    dtype: object  # of torch's or numpy's
    shape: Sequence[int]
    strides: tuple[int, ...]


class Held:
    """What of a module, or a mapping, is registered."""

    def __init__(self, kind: str, now: "Callable[[], dict[str, Facts | None] | None]") -> None:
        """`now` says what is there under each name; None once the module is gone. `kind` names the module in errors."""
        self.kind = kind
        self._now = now
        with plainly():
            self._known = now() or {}

    def replaced(self) -> list[str]:
        """Each tensor that is there, or was, and is not the registered one: its name, and what it is now."""
        with plainly():
            found = self._now()
        if found is None or found == self._known:
            return []
        wrong = [_difference(name, known, found.get(name)) for name, known in self._known.items()]
        wrong += [f"{name!r} was not there" for name in found if name not in self._known]
        return [each for each in wrong if each]


def held_module(module: "torch.nn.Module", tensors: "dict[str, torch.Tensor]", several: Modules | None = None) -> Held:
    """A module with the tensors that are registered. `several`: of which the module was made."""
    left_out = {name for name, _ in _raw(module)} - tensors.keys()
    alive = weakly(module) if several is None else several.whole

    def now() -> "dict[str, Facts | None] | None":
        found = alive()
        if found is None:
            return None
        return {name: _facts(_local(tensor)) for name, tensor in _raw(found) if name not in left_out}

    return Held("module", now)


def held_mapping(tensors: "Mapping[str, object]", registered: "Iterable[tuple[str, object]]") -> Held:
    """A mapping that has given these tensors. One that it makes anew each time it is asked is not compared."""
    alive = weakly(tensors)
    with plainly():
        known = {name: (tensor, _facts_of_any(tensor)) for name, tensor in registered}

    def now() -> "dict[str, Facts | None] | None":
        found = alive()
        if found is None:
            return None
        its = ((name, found.get(name, tensor), tensor, facts) for name, (tensor, facts) in known.items())
        return {name: facts if given is tensor else _facts_of_any(given) for name, given, tensor, facts in its}

    with plainly():
        first = now() or {}
    known = {name: each for name, each in known.items() if first.get(name, each[1]) == each[1]}
    return Held("dict" if isinstance(tensors, dict) else "mapping", now)


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
