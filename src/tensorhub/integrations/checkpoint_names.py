"""A trainer's tensors under the names that they have in the model's checkpoint, where they lie.

    names = Names(module)                                   # without DDP's, torch.compile's and peft's own prefixes
    tensors, boxes = as_checkpoint(names, state, rename)    # what `register` takes

Rules:
1. Wrappers that the model does not know leave no trace in names. Merged adapters are left out, others are refused.
2. A model of transformers is published as `save_pretrained` writes it: without tied tensors that the file leaves out,
   and with transformers' own conversion (experts one by one, renamed or split layers), which is followed on tensors
   without memory. Each tensor of the file is then a view of what is in memory, as boxes say.
3. What the caller renames, or gives boxes for, is not converted.

It must never: copy a tensor, or publish one whose conversion is no view. That is refused by name, with the cure.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorhub

from ..steps import boxes_of_dtensor, parts_of_module

type_of_rename = Mapping[str, str] | Callable[[str], str | None]

INSIDE = {  # by a wrapper's class: which of its modules is the model
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "TrainableTokensWrapper": "token_adapter",
}
SHOWN = 5
KEEPS = ("clone", "_to_copy", "contiguous")  # other memory, the same elements


class Names:
    """The names of a module's tensors without those of wrappers around it, and around its layers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = self.model = module
        self._paths: dict[str, str | None] = {}  # of each module, by its path; None: it is no part of the model
        self._adapters: dict[str, torch.nn.Module] = {}
        said: dict[str, str | None] = {}
        for path, part in parts_of_module(module):
            above, _, name = path.rpartition(".")
            before = self._paths[above] if path else ""
            usual = None if before is None else f"{before}.{name}".lstrip(".")
            public = self._paths[path] = said.get(path, usual)
            if public == "":
                self.model = part  # the innermost that has the whole of it
            for inside, is_model in _inside(part).items():
                said[f"{path}.{inside}".lstrip(".")] = public if is_model else None
            if _is_adapter(part) and public is not None:
                self._adapters[path] = part

    def __call__(self, name: str) -> str | None:
        """Of a tensor of the module. None: it is an adapter's, and no part of the model."""
        path = name
        while path not in self._paths:
            path = path.rpartition(".")[0]
        public = self._paths[path]
        if public is None or path in self._adapters:
            return None
        return f"{public}.{name[len(path) :].lstrip('.')}".lstrip(".")

    def check_merged(self) -> None:
        """Raises `UsageError` naming adapters that are not in the weights of the model."""
        wrong = [path for path, part in self._adapters.items() if not part.merged and _has_adapters(part)]
        if wrong:
            more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            text = f"adapters that are not merged: {', '.join(map(repr, wrong[:SHOWN]))}{more}"
            hint = "call merge_adapter() first, or attach what merge_and_unload() returns: adapters are not published"
            raise tensorhub.UsageError(text, hint=hint)
        for path, part in parts_of_module(self.module):
            prompt = part._modules.get("prompt_encoder") if "PeftModel" in _kinds(part) else None
            if (prompt is not None and any(True for _ in prompt.parameters())) or "AdaptionPromptModel" in _kinds(part):
                text = f"{path or type(part).__qualname__!r} has an adapter that cannot be merged into weights"
                raise tensorhub.UsageError(text, hint="attach the model without it")


def _kinds(part: torch.nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(part).__mro__}


def _inside(part: torch.nn.Module) -> dict[str, bool]:
    """What has another name than usual, by its path in a wrapper: True: the wrapper's own; False: none."""
    kinds = _kinds(part)
    if _is_adapter(part):
        return {name: name == "base_layer" for name in part._modules}
    if "original_module" in part._modules and isinstance(part._modules.get("modules_to_save"), torch.nn.Module):
        return _saved(part, part._modules["modules_to_save"])
    for kind, name in INSIDE.items():
        if kind in kinds and name in part._modules:
            others = dict.fromkeys(part._modules, False) if kind in ("PeftModel", "BaseTuner") else {}
            return {**others, name: True}
    return {}


def _saved(part: Any, copies: Any) -> dict[str, bool]:
    """Of peft's `modules_to_save`: the copy that is trained stands for the original one."""
    is_off = getattr(part, "disable_adapters", False)
    active = [] if is_off else [each for each in part.active_adapters if each in copies]
    found = {f"modules_to_save.{name}": name in active[:1] for name in copies}
    return {**found, "modules_to_save": bool(active), "original_module": not active}


def _is_adapter(part: torch.nn.Module) -> bool:
    """A layer of peft's around one of the model's."""
    return "base_layer" in part._modules and hasattr(part, "merged")


def _has_adapters(part: torch.nn.Module) -> bool:
    own = any(True for _ in part.parameters(recurse=False))
    inside = (each for name, each in part._modules.items() if name != "base_layer" and each is not None)
    return own or any(True for each in inside for _ in each.parameters())


def as_checkpoint(
    names: Names,
    state: Mapping[str, Any],
    rename: "type_of_rename | None" = None,
    boxes: "Mapping[str, Sequence[tensorhub.Box]] | None" = None,
) -> "tuple[dict[str, Any], dict[str, list[tensorhub.Box]]]":
    """Tensors by the names that `register` takes, sorted; and boxes of those that are not one whole tensor of the file.

    `state`: by `names`. `boxes`: the caller's, which come on top. Raises `UsageError` that names what cannot be mapped.
    """
    given = {name: list(its) for name, its in (boxes or {}).items()}
    renamed = {} if rename is None else _renamed(state, rename)
    fixed = {**{name: name for name in state if name in given}, **renamed}
    left_out = _left_out(names.model, state)
    rest = {name: tensor for name, tensor in state.items() if name not in fixed and name not in left_out}
    by_source: dict[str, list[_Part]] = {}
    for part in itertools.chain.from_iterable(_converted(names.model, rest).values()):
        by_source.setdefault(part.source, []).append(part)
    tensors: dict[str, Any] = {}
    made: dict[str, list[tensorhub.Box]] = {}
    for name, new in fixed.items():
        _add(tensors, new, state[name])
    for name, its in by_source.items():
        tensor, whole = rest[name], its[0]
        if len(its) == 1 and whole.is_all_of(tensor.shape):
            _add(tensors, whole.target, tensor)
            continue
        if sum(prod(part.size) for part in its) != tensor.numel():
            _refuse(whole.target, [name], "its conversion leaves some of it out")
        _add(tensors, name, tensor)
        made[name] = [box for part in its for box in _boxes(part, tensor)]
    lost = sorted(rest.keys() - by_source.keys())
    if lost:
        _refuse(lost[0], lost[:1], "transformers' conversion leaves it out")
    return dict(sorted(tensors.items())), {**made, **given}


def _renamed(state: Mapping[str, Any], rename: "type_of_rename") -> dict[str, str]:
    """By the mapping, or by what the function changes. Raises `UsageError` where that is nothing."""
    if isinstance(rename, Mapping):
        unknown = [name for name in rename if name not in state]
        if unknown:
            hint = f"names are such as {', '.join(list(state)[:SHOWN])}"
            raise tensorhub.UsageError(f"rename= names {unknown[0]!r}, and there is no tensor of that name", hint=hint)
        found: dict[str, Any] = dict(rename)
    elif callable(rename):
        asked = {name: rename(name) for name in state}
        found = {name: new for name, new in asked.items() if new is not None and new != name}
        if not found:
            raise tensorhub.UsageError("rename= changes no name", hint="it is called with each name of the module")
    else:
        raise tensorhub.UsageError(f"rename={rename!r} is neither a mapping nor a function")
    for name, new in found.items():
        if not isinstance(new, str) or not new:
            raise tensorhub.UsageError(f"rename= makes {new!r} of {name!r}, which is no name")
    return found


def _add(tensors: dict[str, Any], name: str, tensor: Any) -> None:
    if name in tensors:
        raise tensorhub.UsageError(f"two tensors are called {name!r}", hint="rename= or leave_out= one of them")
    tensors[name] = tensor


def _left_out(model: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
    """What transformers leaves out of files: all but one of tensors that are tied, and what it says itself."""
    patterns = []
    for path, part in parts_of_module(model):
        patterns += [f"{path}.{key}".lstrip(".") for key in getattr(part, "_tied_weights_keys", None) or ()]
    patterns += list(getattr(model, "all_tied_weights_keys", None) or ())
    found = {name for name in getattr(model, "_keys_to_ignore_on_save", None) or () if name in state}
    alike: dict[object, list[str]] = {}
    for name, tensor in state.items() if patterns else ():
        alike.setdefault(_memory(tensor), []).append(name)
    for same in alike.values():
        tied = [name for name in same if len(same) > 1 and any(re.search(pattern, name) for pattern in patterns)]
        found.update(tied if len(tied) < len(same) else tied[1:])
    return found


def _memory(tensor: Any) -> object:
    """Equal for tensors that are tied."""
    if not tensor.numel() or hasattr(tensor, "device_mesh"):
        return id(tensor)  # FSDP2 ties DTensors by being the same ones
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Part(NamedTuple):
    """A strided part of a tensor in memory, and where it lies in one of the file. All are counted in elements."""

    target: str
    shape: tuple[int, ...]  # of the target
    at: tuple[int, ...]
    size: tuple[int, ...]
    source: str
    offset: int  # in a contiguous source
    strides: tuple[int, ...]

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """The target is the source, under another name."""
        return self.shape == self.size == tuple(shape) and self.offset == 0 and self.strides == _contiguous(shape)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    found: tuple[int, ...] = torch.empty(tuple(shape), device="meta").stride()
    return found


def _converted(model: torch.nn.Module, tensors: Mapping[str, Any]) -> dict[str, list[_Part]]:
    """By the names of the file, what each tensor of it is made of: what transformers' own conversion does."""
    following = _Following(tensors)
    made: Mapping[str, Any] = following.given
    if tensors and "PreTrainedModel" in _kinds(model):
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # transformers 4 holds what the file holds
            return {name: following.parts(name, tensor) for name, tensor in made.items()}
        try:
            with following, torch.no_grad():
                made = revert_weight_conversion(model, dict(following.given))
        except Exception as error:
            text = f"transformers' conversion of {type(model).__qualname__} to the names of its file failed"
            hint = "rename= tensors to what they shall be called: those are not converted"
            raise tensorhub.UsageError(f"{text}: {type(error).__name__}: {error}", hint=hint) from error
    return {name: following.parts(name, tensor) for name, tensor in made.items()}


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, operations on tensors without memory are followed: which of them are views."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
        self._sources = {_storage(made): name for name, made in self.given.items()}
        self._joined: dict[int, list[tuple[torch.Tensor, int, int]]] = {}  # tensors, along which dimension, and where
        self._lost: dict[int, tuple[list[str], str]] = {}  # what is no view: of what it was made, and by what
        self._kept: list[torch.Tensor] = []  # so that no storage is taken for another one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        """Called by torch for each operation of the conversion."""
        name = func.overloadpacket.__name__
        if name == "stack":
            dim = args[1] if len(args) > 1 else 0
            with self:
                return torch.cat([each.unsqueeze(dim) for each in args[0]], dim)
        if name in KEEPS and (kwargs or {}).get("dtype") in (None, args[0].dtype):
            return args[0].detach()
        try:
            found = func(*args, **(kwargs or {}))
        except RuntimeError:
            if name not in ("view", "_unsafe_view"):
                raise
            name = "reshape"  # of what a copy would have made contiguous
            found = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta").view(args[1])
        if isinstance(found, torch.Tensor) and not self._is_known(found):
            self._kept.append(found)
            if name == "cat":
                dim, at = (args[1] if len(args) > 1 else 0) % found.ndim, 0
                joined = self._joined.setdefault(_storage(found), [])
                for each in args[0]:
                    joined.append((each, dim, at))
                    at += each.shape[dim]
            else:
                inputs = [each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
                self._lost[_storage(found)] = ([source for each in inputs for source in self._made_of(each)], name)
        return found

    def _is_known(self, tensor: torch.Tensor) -> bool:
        place = _storage(tensor)
        return place in self._sources or place in self._joined or place in self._lost

    def _made_of(self, tensor: torch.Tensor) -> list[str]:
        place = _storage(tensor)
        if place in self._sources:
            return [self._sources[place]]
        inside = [name for each, _, _ in self._joined.get(place, ()) for name in self._made_of(each)]
        return inside + self._lost.get(place, ([], ""))[0]

    def parts(self, target: str, made: torch.Tensor) -> list[_Part]:
        """What this tensor of the file is made of. Raises `UsageError` where it is no view."""
        place, shape = _storage(made), tuple(made.shape)
        if place in self._sources:
            at, offset = (0,) * len(shape), int(made.storage_offset())
            return [_Part(target, shape, at, shape, self._sources[place], offset, made.stride())]
        if place not in self._joined or made.storage_offset() or made.stride() != _contiguous(shape):
            _refuse(target, self._made_of(made), f"its conversion ({self._lost.get(place, ((), 'cat'))[1]}) is no view")
        found = []
        for each, dim, begin in self._joined[place]:
            for part in self.parts(target, each):
                at = tuple(start + begin * (number == dim) for number, start in enumerate(part.at))
                found.append(part._replace(shape=shape, at=at))
        return found


def _storage(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _refuse(target: str, sources: Sequence[str], why: str) -> NoReturn:
    of = ", ".join(map(repr, sources[:SHOWN]))
    text = f"{target!r}, as the model's file has it, cannot be published in place from {of}: {why}"
    kept = {name: name for name in sources[:SHOWN]}
    raise tensorhub.UsageError(
        text, hint=f"rename={kept} publishes it as it lies in memory; readers need to expect that"
    )


def _boxes(part: _Part, tensor: Any) -> "list[tensorhub.Box]":
    """Of what this rank has of it: the part, cut with what the local tensor is of the whole one."""
    shape = tuple(tensor.shape)
    local: torch.Tensor
    if hasattr(tensor, "device_mesh"):
        local, mine = boxes_of_dtensor(part.source, tensor)
    else:
        local, mine = tensor, [tensorhub.Box(part.source, shape, (0,) * len(shape), shape, 0, tensor.stride())]
    dims = _dimensions(part, shape)
    if dims is None:
        if local.numel() == tensor.numel() and local.is_contiguous():
            return [tensorhub.Box(part.target, part.shape, part.at, part.size, part.offset, part.strides)]
        _refuse(part.target, [part.source], "it is reshaped, and this rank has no contiguous whole of it")
    starts = [part.offset // step % max(count, 1) for step, count in zip(_contiguous(shape), shape, strict=True)]
    counts = [part.size[dims.index(number)] if number in dims else 1 for number in range(len(shape))]
    found = []
    for box in mine:
        assert box.strides is not None
        low = [max(start, at) for start, at in zip(starts, box.at, strict=True)]
        limits = zip(starts, counts, box.at, box.size, strict=True)
        high = [min(start + count, at + size) for start, count, at, size in limits]
        if any(stop <= start for start, stop in zip(low, high, strict=True)):
            continue
        offset = box.offset + sum((a - b) * step for a, b, step in zip(low, box.at, box.strides, strict=True))
        at = tuple(
            begin + (0 if dim is None else low[dim] - starts[dim]) for begin, dim in zip(part.at, dims, strict=True)
        )
        size = tuple(1 if dim is None else high[dim] - low[dim] for dim in dims)
        strides = tuple(1 if dim is None else box.strides[dim] for dim in dims)
        found.append(tensorhub.Box(part.target, part.shape, at, size, offset, strides))
    return found


def _dimensions(part: _Part, shape: Sequence[int]) -> "list[int | None] | None":
    """Which dimension of the source each of the part's is; None for one of size 1. None for all: it is reshaped."""
    steps, found = _contiguous(shape), list[int | None]()
    for count, step in zip(part.size, part.strides, strict=True):
        fit = [number for number, size in enumerate(shape) if steps[number] == step and size > 1]
        if count == 1:
            found.append(None)
            continue
        if len(fit) != 1 or fit[0] in found:
            return None
        start = part.offset // step % shape[fit[0]]
        if start + count > shape[fit[0]]:
            return None
        found.append(fit[0])
    return found
