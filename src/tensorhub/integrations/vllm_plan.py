"""Which part of a published tensor becomes which part of a vLLM parameter."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorhub

# Boxes of a copy: a view's dimensions are those of the published tensor, cut, swapped, merged or split.


MAX_BOXES = 1 << 16  # of one copy: with more, a plan costs more than the read
Dims = list[tuple[int, int, int]]  # (elements, stride in the published tensor, stride in the parameter)


class Region(NamedTuple):
    """Elements of a tensor's memory, by dimension, from `offset` on."""

    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]


def boxes_of_copy(name: str, shape: tuple[int, ...], here: Region, there: Region) -> "list[tensorhub.Box]":
    """Of a copy from a region of a contiguous tensor into one of a parameter's memory. [] if boxes cannot say it."""
    dims = [each for each in zip(here.size, here.strides, there.strides, strict=True) if each[0] != 1]
    found: list[tensorhub.Box] = []
    return found if _add_boxes(found, name, shape, _merged(dims), here.offset, there.offset) else []


def _merged(dims: Dims) -> Dims:
    """Without dimensions that go on where the next one ends, in both. The farthest steps come first."""
    done: Dims = []
    for count, here, there in sorted(dims, key=lambda each: -each[1]):
        if done and done[-1][1] == count * here and done[-1][2] == count * there:
            done[-1] = (done[-1][0] * count, here, there)
        else:
            done.append((count, here, there))
    return done


def _add_boxes(
    found: "list[tensorhub.Box]", name: str, shape: tuple[int, ...], dims: Dims, here: int, there: int
) -> bool:
    """One box, or one for each step of the farthest dimension, and so on. False: too many, or not by plain steps."""
    if any(step <= 0 for _, step, _ in dims) or len(found) >= MAX_BOXES:
        return False
    box = _box(name, shape, dims, here, there)
    if box is not None:
        found.append(box)
        return True
    (count, step, into), rest = dims[0], dims[1:]
    return all(_add_boxes(found, name, shape, rest, here + at * step, there + at * into) for at in range(count))


def _box(name: str, shape: tuple[int, ...], dims: Dims, here: int, there: int) -> "tensorhub.Box | None":
    steps: list[int] = []
    following = 1
    for extent in reversed(shape):
        steps.insert(0, following)
        following *= extent
    at, left = [], here
    for step in steps:
        at.append(left // step)
        left %= step
    size, strides = [1] * len(steps), [1] * len(steps)
    for count, step, into in dims:
        while count > 1:
            dim = next((d for d, each in enumerate(steps) if each == step and shape[d] > 1), None)
            if dim is None or size[dim] != 1:
                return None
            here_too = min(count, shape[dim] - at[dim])
            if count % here_too or (here_too < count and here_too != shape[dim]):
                return None
            size[dim], strides[dim] = here_too, into
            count, step, into = count // here_too, step * here_too, into * here_too
    return tensorhub.Box(name, shape, tuple(at), tuple(size), there, tuple(strides))


def fewer(boxes: "list[tensorhub.Box]") -> "list[tensorhub.Box]":
    """The same parts: a box that goes on where another one ends, in both, is one with it. So a stack of experts is."""
    for dim in reversed(range(max((len(box.size) for box in boxes), default=0))):
        rows: dict[object, list[tensorhub.Box]] = {}
        for box in sorted(boxes, key=lambda each: each.at):
            row = rows.setdefault(_without(box, dim), [])
            joined = _joined(row[-1], box, dim) if row else None
            if joined is None:
                row.append(box)
            else:
                row[-1] = joined
        boxes = [box for row in rows.values() for box in row]
    return boxes


def _without(box: "tensorhub.Box", dim: int) -> object:
    """What boxes have in common that can be one along this dimension."""
    if dim >= len(box.size):
        return box
    others = [d for d in range(len(box.size)) if d != dim]
    return (box.name, *((box.at[d], box.size[d], _strides(box)[d]) for d in others))


def _joined(one: "tensorhub.Box", other: "tensorhub.Box", dim: int) -> "tensorhub.Box | None":
    if dim >= len(one.size) or one.at[dim] + one.size[dim] != other.at[dim]:
        return None
    count, more, gap = one.size[dim], other.size[dim], other.offset - one.offset
    strides = list(_strides(one))
    step = strides[dim] if count > 1 else gap
    if gap <= 0 or gap != step * count or (more > 1 and _strides(other)[dim] != step):
        return None
    size = list(one.size)
    size[dim], strides[dim] = count + more, step
    return tensorhub.Box(one.name, one.global_shape, one.at, tuple(size), one.offset, tuple(strides))


def _strides(box: "tensorhub.Box") -> tuple[int, ...]:
    assert box.strides is not None, "made with them"
    return box.strides


def written(func: Any, args: Sequence[Any], kwargs: "Mapping[str, Any] | None") -> Iterator[torch.Tensor]:
    """Of what a `TorchDispatchMode` is given: those that the operation changes in place, also by `out=`."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, torch.Tensor):
                yield each


# The loader is given tensors that have a shape and no memory. Each copy into a parameter is noted as boxes, not done.
#
# 1. Every element of every parameter comes from the version, and every published element is taken by some rank.
# 2. In place only plain copies count. vLLM's reload (`reload=`) may compute and cast: there floating-point numbers of
#    16 bits or more become each other, and all else keeps its dtype.
# 3. What the loader fills with a constant, such as the padding of a vocabulary, is in no box, and stays as it is.
# 4. Buffers count where something published is copied into them.
# 5. What the loader leaves out because it is tied to what it takes is said to be there too: others may ask for it.


FILLS = ("fill_", "zero_")
KEEPS = ("clone", "_to_copy", "contiguous")  # other memory, the same elements
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # which a reload may cast to each other
IGNORE = 'attach(..., ignore=["{name}"])'
MAX_SAID = 200  # characters of an error of vLLM's

HINT = "publish what the engine's configuration asks for"
PROCESSED = "vLLM computes with a processed copy of it"
RELOAD = "leave in_place out: vLLM's own reload can do that, and the version is checked before it as well"

Part = tuple[tuple[int, ...], tuple[int, ...]]  # of a tensor: where it begins, and its size
Taken = dict[str, tuple[tuple[int, ...], list[Part]]]  # by name: the shape, and what is taken of it


class Published(NamedTuple):
    """What of a version is to be loaded: its tensors, each with a name, a shape and a dtype, and which are tied."""

    tensors: tuple[Any, ...]
    tied: tuple[tuple[str, ...], ...]
    is_partial: bool = False  # versions may have more, which the engine ignores


class Source(NamedTuple):
    """A published tensor, whole, or what the loader has computed from one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Plan(NamedTuple):
    """What `register` takes, and what of the published tensors that is."""

    tensors: dict[str, torch.Tensor]
    boxes: dict[str, list["tensorhub.Box"]]
    taken: Taken


class Reload(NamedTuple):
    """How vLLM's layerwise reload goes about it. The parameters are those that it loads into: without memory."""

    is_noted: Callable[[], bool]  # a parameter's own `weight_loader` is running: vLLM sees what it copies
    same: Mapping[str, str]  # names of one parameter, such as a tied head, and the first of them
    optional: frozenset[str]  # vLLM does without them


def planned(
    model: torch.nn.Module, whole: Iterable[Any], tied: Sequence[Sequence[str]] = (), reload: Reload | None = None
) -> Plan:
    """The parameters of the model, and boxes for them. Raises `UsageError` that names a parameter that has none."""
    published = list(whole)
    targets = _Targets(model, {name: names[0] for names in tied for name in names}, reload)
    with _Recording(targets) as recording, torch.no_grad():
        recording.load(model, published)
    plan = targets.plan({each.name for each in published}, getattr(model, "packed_modules_mapping", None) or {})
    copied = {box.name for boxes in plan.boxes.values() for box in boxes}
    for names in tied:
        there, left_out = [name for name in names if name in copied], [name for name in names if name not in copied]
        for boxes in plan.boxes.values():
            same = [box for box in boxes if there and box.name == there[0]]
            boxes += [tensorhub.Box(name, *_place(box)) for box in same for name in left_out]
    return plan


def refuse_unused(whole: Iterable[Any], tied: Sequence[Sequence[str]], ranks: Sequence[Taken]) -> None:
    """Raise `UsageError` for a published tensor of which some elements are taken by no rank: the engine has no place.

    A tensor of which nothing is taken may be tied to one that is.
    """
    taken: Taken = {each.name: (tuple(each.shape), []) for each in whole}
    for name, (shape, parts) in itertools.chain.from_iterable(rank.items() for rank in ranks):
        taken.setdefault(name, (shape, []))[1].extend(parts)
    counts = {name: _elements(parts) for name, (_, parts) in taken.items()}
    same = {name: names for names in tied for name in names}
    wrong = {
        name: counts[name]
        for name, (shape, _) in taken.items()
        if counts[name] != prod(shape) and (counts[name] or not any(counts.get(each) for each in same.get(name, ())))
    }
    if not wrong:
        return
    name = min(wrong)
    shape, others = taken[name][0], f"; so it is with {len(wrong) - 1} others" if len(wrong) > 1 else ""
    said = f"takes {wrong[name]} of its {prod(shape)} elements" if wrong[name] else "takes nothing of it"
    text = f"{name!r} of shape {list(shape)} is published, and the engine {said}{others}"
    hint = HINT if wrong[name] else f"{HINT}, or leave it out by {IGNORE.format(name=name)}"
    raise tensorhub.UsageError(text, hint=hint)


def _elements(parts: Sequence[Part]) -> int:
    """How many elements lie in some part. Parts of tensor parallelism interleave, and those of copies are the same."""
    found = {*parts}
    if len(found) < 2:
        return sum(prod(size) for _, size in found)
    edges = [
        sorted({edge for at, size in found for edge in (at[dim], at[dim] + size[dim])})
        for dim in range(len(next(iter(found))[0]))
    ]
    is_known = torch.zeros([max(1, len(each) - 1) for each in edges], dtype=torch.bool)
    for at, size in found:
        is_known[tuple(slice(e.index(a), e.index(a + n)) for e, a, n in zip(edges, at, size, strict=True))] = True
    counts = torch.ones((), dtype=torch.int64)
    for each in edges:
        counts = counts[..., None] * torch.tensor([b - a for a, b in itertools.pairwise(each)])
    return int(counts[is_known].sum())


def _place(box: "tensorhub.Box") -> tuple[Any, ...]:
    return box.global_shape, box.at, box.size, box.offset, box.strides


def _storage(tensor: torch.Tensor) -> tuple[bool, int]:
    """A key of the storage: all views of one memory have the same key."""
    storage = tensor.untyped_storage()
    return tensor.is_meta, storage._cdata if tensor.is_meta else storage.data_ptr()


class _Targets:
    """Parameters and buffers by their memory, and what is known of them."""

    def __init__(self, model: torch.nn.Module, tied: Mapping[str, str], reload: Reload | None) -> None:
        parameters = dict(model.named_parameters())
        found = {**parameters, **dict(model.named_buffers())}
        self.reload, self._tied = reload, tied
        self._wanted = {*parameters} - (reload.optional if reload is not None else {*()})
        self._tensors = {name: tensor.data for name, tensor in found.items() if tensor.numel()}
        self._padded = {name: int(getattr(each, "weight_loader_numel", each.numel())) for name, each in found.items()}
        self._boxes: dict[str, list[tensorhub.Box]] = {}
        self._taken: Taken = {}
        self._known: dict[str, dict[Region, int]] = {}  # regions that are accounted for, and their elements
        self._from: dict[tuple[str, Region], str] = {}  # what was copied there
        self._wrong: dict[str, str] = {}
        self._hints: dict[str, str] = {}
        if reload is None:
            self._wrong = dict.fromkeys({*parameters} - {*self._tensors}, PROCESSED)
        self._by_storage: dict[tuple[bool, int], list[tuple[int, int, str]]] = {}
        for name, tensor in self._tensors.items():
            first = int(tensor.storage_offset())
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            self._by_storage.setdefault(_storage(tensor), []).append((first, first + span, name))

    def holding(self, view: Any) -> str | None:
        """The parameter or buffer in whose memory this view lies."""
        if not isinstance(view, torch.Tensor) or not view.numel():
            return None
        for first, stop, name in self._by_storage.get(_storage(view), ()):
            if first <= view.storage_offset() < stop:
                return name
        return None

    def copy(self, name: str, view: torch.Tensor, source: Source | None, given: torch.Tensor) -> None:
        if source is None and (self.reload is None or self.holding(given) is not None):
            return self.spoil(name, "what the loader copies into it was computed first", RELOAD)
        if self.reload is not None and view.is_meta and not self.reload.is_noted():
            return self.spoil(name, "the model's load_weights copies it past vLLM's reload, which loses it")
        if source is None:
            return self.fill(name, view)
        if not self._is_cast_allowed({view.dtype, given.dtype, source.dtype, self._tensors[name].dtype}):
            own, other = (str(each).removeprefix("torch.") for each in (self._tensors[name].dtype, source.dtype))
            hint = f'publish {own}, as fsdp.attach(..., dtype="{own}") does' if source.dtype in FLOATS else ""
            return self.spoil(name, f"it is {own}, and {source.name!r} is published as {other}", hint)
        there = _region(view, self._tensors[name])
        boxes = boxes_of_copy(source.name, source.shape, _region(given.expand_as(view)), there)
        if not boxes and view.numel() and (self.reload is None or given.numel() > 1):
            return self.spoil(name, f"{source.name!r} is not copied into it element by element")
        if self._is_taken_by_another(name, there, source):
            other = self._from[self._canonical(name), there]
            return self.spoil(name, f"{other!r} and {source.name!r} are loaded into the same part of it")
        self._boxes.setdefault(name, []).extend(boxes)
        self._known.setdefault(name, {})[there] = view.numel()
        self.take(source, [(tuple(box.at), tuple(box.size)) for box in boxes] or [((0,) * given.ndim, given.shape)])

    def _is_cast_allowed(self, dtypes: set[torch.dtype]) -> bool:
        return len(dtypes) == 1 or (self.reload is not None and dtypes <= FLOATS)

    def _is_taken_by_another(self, name: str, there: Region, source: Source) -> bool:
        """A reload would keep the last of them. What is read in place is compared when it is read."""
        other = self._from.setdefault((self._canonical(name), there), source.name)
        is_same = self._tied.get(other, other) == self._tied.get(source.name, source.name)
        return self.reload is not None and not is_same and source.dtype in FLOATS

    def _canonical(self, name: str) -> str:
        return self.reload.same.get(name, name) if self.reload is not None else name

    def take(self, source: Source, parts: Iterable[Part]) -> None:
        """These parts of it are of use."""
        self._taken.setdefault(source.name, (source.shape, []))[1].extend(parts)

    def fill(self, name: str, view: torch.Tensor) -> None:
        self._known.setdefault(name, {})[_region(view, self._tensors[name])] = view.numel()

    def spoil(self, name: str, why: str, hint: str = "") -> None:
        self._wrong.setdefault(name, why)
        self._hints.setdefault(name, hint or HINT)

    def plan(self, published: set[str], packed: Mapping[str, Sequence[str]]) -> Plan:
        """Plans all parameters. `packed`: the last names of the parameters that vLLM fuses. Raises `UsageError`."""
        whole = {self._canonical(name) for name in self._known if not self._missing(name)}
        for name in self._tensors:
            missing = self._missing(name)
            if missing and (name in self._boxes or (name in self._wanted and self._canonical(name) not in whole)):
                total = self._tensors[name].numel()
                text = f"{total - missing} of its {total} elements come from what is published"
                lacking = [each for each in _parts_of(name, packed) if each not in published]
                self.spoil(name, text + (f", which has no {lacking[0]!r}" if lacking else ""))
        if self._wrong:
            refuse(self._wrong, self._hints, "read in place" if self.reload is None else "loaded")
        boxes = {name: fewer(found) for name, found in self._boxes.items()}
        return Plan({name: self._tensors[name] for name in boxes}, boxes, self._taken)

    def _missing(self, name: str) -> int:
        """Elements of it that come from nowhere. A reload knows how many of them are padding."""
        tensor = self._tensors[name]
        wanted = tensor.numel() if self.reload is None else min(tensor.numel(), self._padded[name])
        return max(0, wanted - _covered(self._known.get(name, {}), tensor))


def _parts_of(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """The names that a parameter may have where it is published."""
    above, _, own = name.rpartition(".")
    path, _, layer = above.rpartition(".")
    return [".".join(filter(None, (path, each, own))) for each in packed.get(layer, (layer,))]


def refuse(
    wrong: Mapping[str, str], hints: Mapping[str, str] = MappingProxyType({}), how: str = "read in place"
) -> None:
    """Raise `UsageError` for these parameters, by name, and why."""
    name, why = min(wrong.items())
    others = f"; so it is with {len(wrong) - 1} others" if len(wrong) > 1 else ""
    text = f"parameter {name!r} cannot be {how}: {why}{others}"
    raise tensorhub.UsageError(text, hint=hints.get(name, RELOAD))


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
        self._count = 0  # of what was computed from the one that is being loaded

    def load(self, model: torch.nn.Module, whole: Iterable[Any]) -> None:
        """Have the model load tensors without memory. Raises `UsageError` that names the one that it cannot."""
        last, shape = "", ()

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last, shape
            for tensor in whole:
                last, shape, self._count = tensor.name, tuple(tensor.shape), 0
                made = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
                self._add(Source(tensor.name, shape, made.dtype), made)
                yield tensor.name, made

        load: Callable[..., object] = model.load_weights  # type: ignore[assignment]
        try:
            load(each())
        except tensorhub.UsageError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:MAX_SAID]  # vLLM lists all of its parameters
            text = f"the engine's load_weights cannot be followed at {last!r} of shape {list(shape)}: {why}"
            raise tensorhub.UsageError(text, hint=f"{HINT}, or leave it out by {IGNORE.format(name=last)}") from error

    def _add(self, source: Source, made: torch.Tensor) -> None:
        self._sources[made.untyped_storage()._cdata] = (source, made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        """Called by torch for each operation of the loader."""
        name = func.overloadpacket.__name__
        if name == "copy_":
            source, into = self._source(args[1]), self._targets.holding(args[0])
            if into is not None:
                self._copy(into, args[0], source, args[1])
            if into is not None or not args[0].numel():
                return args[0]
            if source is not None and self._targets.reload is None:
                raise tensorhub.UsageError(f"{source.name!r} is copied into what is no parameter")
        for each in written(func, args, kwargs):
            into, source = self._targets.holding(each), self._source(each)
            if into is not None:
                if name not in FILLS and self._targets.reload is None:
                    self._targets.spoil(into, f"the loader changes it by {name}", RELOAD)
                self._targets.fill(into, each)
                if each is args[0]:
                    return each
                raise tensorhub.UsageError(f"parameter {into!r} is changed by {name}")
            if source is not None and each.numel():
                self._changed.setdefault(source.name, name)
        if (
            name in KEEPS
            and self._source(args[0]) is not None
            and (self._targets.reload is None or args[0].is_contiguous())
        ):
            wanted = (kwargs or {}).get("dtype") or args[0].dtype
            if wanted == args[0].dtype:
                return args[0].detach()
        if self._targets.reload is not None and not func.is_view:
            return self._computed(name, func, args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _computed(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operation makes of published tensors is a source of its own; what it is made of is taken."""
        given = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if self._source(each) is not None]
        if given and kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        for made in torch.utils._pytree.tree_leaves(result) if given else ():
            if isinstance(made, torch.Tensor) and made.is_meta and self._source(made) is None and made.numel():
                self._count += 1
                origin = self._source(given[0])
                assert origin is not None
                text = f"{origin.name} (after {name}, {self._count})"
                derived = Source(text, tuple(made.shape), origin.dtype if name == "_to_copy" else made.dtype)
                self._add(derived, made)
                self._targets.take(derived, [])
        for each in given:
            source = self._source(each)
            if source is not None and each.numel():
                each = each.as_strided(
                    [n if s else 1 for n, s in zip(each.shape, each.stride(), strict=True)], each.stride()
                )
                there = torch.empty(each.shape, device="meta")
                boxes = boxes_of_copy(source.name, source.shape, _region(each), _region(there))
                self._targets.take(source, [(tuple(box.at), tuple(box.size)) for box in boxes])
        return result

    def _copy(self, into: str, view: torch.Tensor, source: Source | None, given: torch.Tensor) -> None:
        if source is not None and source.name in self._changed and self._targets.reload is None:
            why = f"the loader changes {source.name!r} by {self._changed[source.name]} before it copies it"
            return self._targets.spoil(into, why, RELOAD)
        self._targets.copy(into, view, source, given)

    def _source(self, tensor: Any) -> Source | None:
        """Of which published tensor this is a view."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return None
        found = self._sources.get(tensor.untyped_storage()._cdata)
        return found[0] if found is not None else None
