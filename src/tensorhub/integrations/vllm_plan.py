"""Which part of which published tensor becomes which part of which parameter: told by the model's own `load_weights`.

    plan = planned(model, whole, tied)                  # names, dtypes and shapes of what is published; ties of them
    weights.register(plan.tensors, boxes=plan.boxes)    # parameters as they lie, and boxes for each of them

The loader is given tensors that have a shape and no memory. It slices and fuses them as ever; each copy into a
parameter is noted as boxes, and not done. So there is no table of names for any model, and nothing is moved.

Rules:
1. Only plain copies count. Where a part of a parameter comes from anything else (a cast, a sum, another order of bits),
   from what the loader has changed in place, or from nowhere, `UsageError` names the parameter and says why.
2. What the loader fills with a constant, such as the padding of a vocabulary, is in no box, and stays as it is.
3. Buffers count where something published is copied into them.
4. What the loader leaves out, for it is tied to what it takes, is said to be there too: others may ask for it.

It must never: change a parameter, or take a copy for plain whose every element it has not followed.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorhub

from .vllm_boxes import Region, boxes_of_copy, fewer
from .vllm_writes import written

FILLS = ("fill_", "zero_")
KEEPS = ("clone", "_to_copy", "contiguous")  # other memory, the same elements


class Source(NamedTuple):
    """A published tensor, whole."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Plan(NamedTuple):
    """What `register` takes."""

    tensors: dict[str, torch.Tensor]
    boxes: dict[str, list["tensorhub.Box"]]


def planned(model: torch.nn.Module, whole: Iterable[Any], tied: Sequence[Sequence[str]] = ()) -> Plan:
    """The parameters of the model, and boxes for them. Raises `UsageError` that names a parameter that has none."""
    targets = _Targets(model)
    with _Recording(targets) as recording, torch.no_grad():
        recording.load(model, whole)
    plan = targets.plan()
    copied = {box.name for boxes in plan.boxes.values() for box in boxes}
    for names in tied:
        there, left_out = [name for name in names if name in copied], [name for name in names if name not in copied]
        for boxes in plan.boxes.values():
            same = [box for box in boxes if there and box.name == there[0]]
            boxes += [tensorhub.Box(name, *_place(box)) for box in same for name in left_out]
    return plan


def _place(box: "tensorhub.Box") -> tuple[Any, ...]:
    return box.global_shape, box.at, box.size, box.offset, box.strides


class _Targets:
    """Parameters and buffers by their memory, and what is known of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._parameters = {name for name, _ in model.named_parameters()}
        self._tensors = {name: tensor.data for name, tensor in found.items() if tensor.numel()}
        self._boxes: dict[str, list[tensorhub.Box]] = {}
        self._known: dict[str, dict[Region, int]] = {}  # regions that are accounted for, and their elements
        self._wrong = dict.fromkeys(self._parameters - {*self._tensors}, "vLLM computes with a processed copy of it")
        self._by_storage: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in self._tensors.items():
            first = int(tensor.storage_offset())
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            place = (first, first + span, name)
            self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(place)

    def holding(self, view: Any) -> str | None:
        """The parameter or buffer in whose memory this view lies."""
        if not isinstance(view, torch.Tensor) or view.is_meta or not view.numel():
            return None
        for first, stop, name in self._by_storage.get(view.untyped_storage().data_ptr(), ()):
            if first <= view.storage_offset() < stop:
                return name
        return None

    def copy(self, name: str, view: torch.Tensor, source: Source | None, given: torch.Tensor) -> None:
        if source is None:
            return self.spoil(name, "what the loader copies into it was computed first")
        if {view.dtype, given.dtype, source.dtype} != {self._tensors[name].dtype}:
            text = f"it is {self._tensors[name].dtype}, and {source.name!r} is published as {source.dtype}"
            return self.spoil(name, text.replace("torch.", ""))
        there = _region(view, self._tensors[name])
        boxes = boxes_of_copy(source.name, source.shape, _region(given.expand_as(view)), there)
        if not boxes and view.numel():
            return self.spoil(name, f"{source.name!r} is not copied into it element by element")
        self._boxes.setdefault(name, []).extend(boxes)
        self._known.setdefault(name, {})[there] = view.numel()

    def fill(self, name: str, view: torch.Tensor) -> None:
        self._known.setdefault(name, {})[_region(view, self._tensors[name])] = view.numel()

    def spoil(self, name: str, why: str) -> None:
        self._wrong.setdefault(name, why)

    def plan(self) -> Plan:
        """All of them. Raises `UsageError`."""
        for name, tensor in self._tensors.items():
            known = _covered(self._known.get(name, {}), tensor)
            if (name in self._parameters or name in self._boxes) and known != tensor.numel():
                self.spoil(name, f"{known} of its {tensor.numel()} elements come from what is published")
        if self._wrong:
            refuse(self._wrong)
        boxes = {name: fewer(found) for name, found in self._boxes.items()}
        return Plan({name: self._tensors[name] for name in boxes}, boxes)


def refuse(wrong: Mapping[str, str]) -> None:
    """Raise `UsageError` for these parameters, by name, and why."""
    name, why = min(wrong.items())
    others = f", and {len(wrong) - 1} others cannot be either" if len(wrong) > 1 else ""
    text = f"parameter {name!r} cannot be read in place: {why}{others}"
    raise tensorhub.UsageError(text, hint="leave in_place out: then versions are loaded by vLLM's own reload")


def _covered(regions: Mapping[Region, int], tensor: torch.Tensor) -> int:
    """How many of its elements lie in some region. They are counted one by one only where regions may overlap."""
    spans = sorted(
        (each.offset, each.offset + 1 + sum((n - 1) * s for n, s in zip(each.size, each.strides, strict=True)))
        for each, count in regions.items()
        if count
    )
    if all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans)):
        return sum(regions.values())
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    is_known = torch.zeros(max(reach, spans[-1][1]), dtype=torch.bool)
    for each, count in regions.items():
        if count:
            is_known.as_strided(each.size, each.strides, each.offset).fill_(True)
    return int(is_known.as_strided(tensor.shape, tensor.stride(), 0).sum())


def _region(view: torch.Tensor, inside: torch.Tensor | None = None) -> Region:
    begins = 0 if inside is None else int(inside.storage_offset())
    return Region(int(view.storage_offset()) - begins, tuple(view.shape), tuple(view.stride()))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, copies of published tensors are noted and parameters stay as they are."""

    def __init__(self, targets: _Targets) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets = targets
        self._sources: dict[int, tuple[Source, torch.Tensor]] = {}  # by their storage, which is kept
        self._changed: dict[str, str] = {}  # sources, or what seems to be a clone of them, and by which operation

    def load(self, model: torch.nn.Module, whole: Iterable[Any]) -> None:
        """Have the model load tensors without memory. Raises `UsageError` that names the one that it cannot."""
        last = ""

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for tensor in whole:
                last = tensor.name
                made = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
                source = Source(tensor.name, tuple(tensor.shape), made.dtype)
                self._sources[made.untyped_storage()._cdata] = (source, made)
                yield tensor.name, made

        load: Callable[..., object] = model.load_weights  # type: ignore[assignment]
        try:
            load(each())
        except Exception as error:
            text = f"the model's load_weights cannot be followed at {last!r}: {type(error).__name__}: {error}"
            raise tensorhub.UsageError(text, hint="leave in_place out") from error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        """Each operation of the loader."""
        name = func.overloadpacket.__name__
        if name == "copy_":
            source, into = self._source(args[1]), self._targets.holding(args[0])
            if into is not None:
                self._copy(into, args[0], source, args[1])
            if into is not None or not args[0].numel():
                return args[0]
            if source is not None:
                raise tensorhub.UsageError(f"{source.name!r} is copied into what is no parameter")
        for each in written(func, args, kwargs):
            into, source = self._targets.holding(each), self._source(each)
            if into is not None:
                if name not in FILLS:
                    self._targets.spoil(into, f"the loader changes it by {name}")
                self._targets.fill(into, each)
                if each is args[0]:
                    return each
                raise tensorhub.UsageError(f"parameter {into!r} is changed by {name}")
            if source is not None and each.numel():
                self._changed.setdefault(source.name, name)
        if name in KEEPS and self._source(args[0]) is not None:
            wanted = (kwargs or {}).get("dtype") or args[0].dtype
            if wanted == args[0].dtype:
                return args[0].detach()
        return func(*args, **(kwargs or {}))

    def _copy(self, into: str, view: torch.Tensor, source: Source | None, given: torch.Tensor) -> None:
        if source is not None and source.name in self._changed:
            why = f"the loader changes {source.name!r} by {self._changed[source.name]} before it copies it"
            return self._targets.spoil(into, why)
        self._targets.copy(into, view, source, given)

    def _source(self, tensor: Any) -> Source | None:
        """Of which published tensor this is a view."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return None
        found = self._sources.get(tensor.untyped_storage()._cdata)
        return found[0] if found is not None else None
