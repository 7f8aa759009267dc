"""A worker's tensors as one logical stream of bytes, in place: which byte of which tensor comes where.

Rules:
1. The stream is the memory of the tensors, each byte once. Tensors whose memory *overlaps*, directly or through others,
   form one block; blocks follow each other in the order in which one of their tensors was first registered; inside a
   block bytes are in the order of their addresses.
2. So tied weights cost once; partially overlapping views are fine; and views that only lie side by side (q, k, v of one
   fused storage) are blocks of their own, in the order of registration, exactly as three separate tensors would be.
   Offsets depend on the names' order and on which overlap, never on addresses.
3. Tensors without elements have offset 0 and no bytes.
4. All or nothing: a refused tensor leaves everything as it was.
5. Tensors that are published in another dtype are in the stream as they are published, in a buffer (`masters`).
6. With boxes it is known which parts of which global tensors they are (`protocol/layout.py`): then the layout's digest
   covers those too, and a version can be read into them from replicas that are cut in another way.

Memory that is mapped twice, at two addresses, is not recognised as shared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..protocol.errors import LayoutMismatch, UsageError
from ..protocol.manifest import Layout, TensorSpec, digest_of_boxed, has_partial_overlaps
from ..protocol.names import Digest
from ..transport.base import ByteStream
from .cast import Casts, cast
from .describe import NAMES_SHOWN, Described, InPlace, describe_all, outside_modes, some
from .modules import (
    Held,
    Modules,
    Nested,
    boxes_of_module,
    held_mapping,
    held_module,
    is_dtensor,
    is_module,
    modules_of,
    names_left_out,
    parts_of,
    tensors_of_module,
    weakly,
)
from .streams import HostStream, Piece, unwritable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..protocol.layout import Box
    from ..reshard.grid import BoxTable

    type_of_tensor = torch.Tensor | np.ndarray[Any, np.dtype[Any]]
    type_of_weights = (
        Mapping[str, type_of_tensor]
        | torch.nn.Module
        | Mapping[str, torch.nn.Module]
        | Mapping[str, Mapping[str, type_of_tensor]]
    )
    type_of_dtype = str | torch.dtype | np.dtype[Any] | type[np.generic]

IN_PLACE = "change tensors in place (copy_, load_state_dict without assign=True), or register() again after replacing"


@dataclass(frozen=True, eq=False, repr=False)
class Registration:
    """Registered tensors: their layout, and their memory as a stream. Keeps that memory alive; copies nothing."""

    layout: Layout
    layout_digest: Digest  # of `layout`: computed once, for it is asked for at every publish and every read
    stream: ByteStream
    pieces: tuple[Piece, ...]  # the stream's memory, in order: what a transport registers with its hardware
    devices: tuple[str, ...]  # sorted: ("cpu",), ("cuda:0",), or several
    _in_place: InPlace
    casts: Casts | None = None  # of the caller's tensors that are published in another dtype
    table: "BoxTable | None" = None  # which parts of which global tensors they are, where that was said
    boxes: bytes = b""  # the same, encoded
    is_partial: bool = False  # True where the caller said that they are a part of the model
    shares: tuple[str, str] | None = None  # which boxes share memory, so that nothing can fill them; and a hint
    _held: Held | None = None  # whose tensors they are, where that is known
    given: tuple[Callable[[], object], object, object, object] | None = (
        None  # by the caller: tensors, dtypes, boxes, what is left out
    )
    may_have: bool = False  # True where chunks of the version may be here already: a fill looks, and keeps them

    def __repr__(self) -> str:
        return f"<Registration of {len(self.layout.tensors)} tensors, {self.size_bytes} B on {self.device}>"

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes

    @property
    def device(self) -> str:
        """ "cpu", "cuda:0", or several joined by "+"."""
        return "+".join(self.devices)

    @property
    def is_all_cast(self) -> bool:
        """What is published lies in the buffer of `casts`, and no byte of it in the caller's tensors."""
        return self.casts is not None and not self._in_place

    def moved(self) -> list[str]:
        """Names of tensors that no longer are the registered memory (`param.data = ...`, a resized storage).

        Their new contents would never be read, and what is received would never reach them: register again.
        Not of tensors that are published from a buffer: see `casts`.
        """
        return self._in_place.moved()

    def replaced(self) -> list[str]:
        """What the registered module, or mapping, has by now in place of a registered tensor, in words that name it."""
        return self._held.replaced() if self._held is not None else []

    def took(self, size_bytes: int) -> None:
        """A transport has written so much by itself. Raises `HostMemoryFull` where it may not go on."""
        if isinstance(self.stream, HostStream):
            self.stream.took(size_bytes)

    def check_in_place(self, whose: str) -> None:
        """The module, or mapping, and the tensors still are what was registered, else `UsageError` names them."""
        replaced = self.replaced()
        if self._held is not None and replaced:
            more = f"; and {len(replaced) - NAMES_SHOWN} more" if len(replaced) > NAMES_SHOWN else ""
            named = "; ".join(replaced[:NAMES_SHOWN]) + more
            raise UsageError(
                f"the {self._held.kind} of {whose} no longer holds what was registered: {named}", hint=IN_PLACE
            )
        moved = self.moved() + (self.casts.moved() if self.casts is not None else [])
        if moved:
            text = f"tensors of {whose} no longer are the registered memory: {some(moved)}"
            raise UsageError(text, hint=IN_PLACE)

    @property
    def can_box(self) -> bool:
        """Without boxes, and `boxes={}` would do as well: its tensors share memory wholly, or not at all."""
        return self.table is None and not has_partial_overlaps(self.layout)

    def with_boxes(self) -> "Registration":
        """Registers this memory with `boxes={}`: each tensor is a whole one. Raises `UsageError` for too many."""
        table, encoded, shares = _boxed(self.layout, {}, False)
        digest, given = digest_of_boxed(self.layout.encode(), encoded, False), self.given
        if given is not None:
            given = given[0], given[1], {}, given[3]
        return replace(self, layout_digest=digest, table=table, boxes=encoded, shares=shares, given=given)

    def check_fillable(self) -> None:
        """Raises `LayoutMismatch`, naming two boxes, if what there is to read could not fill both."""
        if self.shares is not None:
            text, hint = self.shares
            raise LayoutMismatch(text, hint=hint)

    def close(self) -> None:
        """Blocks until nothing is touched any more that is not in the stream. Any thread may call it."""
        if self.casts is not None:
            self.casts.close()

    def note_call(self) -> None:
        """The calling thread is about to call: `settle`, which another thread calls for it, waits for its streams."""
        if self.devices != ("cpu",):
            from .cuda import note_call

            note_call(self.devices)

    def settle(self) -> None:
        """Wait until bytes may be read or overwritten: for what the caller and the default streams have launched.

        Work on other streams is for the user to join first (`cuda.synchronize`). Raises `UsageError` while the caller's
        stream captures a graph, and where a device has no memory behind the tensors' addresses.
        """
        if self.devices == ("cpu",):
            return
        from .cuda import synchronize, unmapped

        gone = [(piece.start, piece.stop) for piece in unmapped(self.pieces)]
        if gone:
            its = [t.name for t in self.layout.tensors if any(start <= t.offset_bytes < stop for start, stop in gone)]
            raise UsageError(
                f"the memory of these tensors on {self.device} is unmapped: {some(its)}",
                hint="an engine that sleeps wakes before such a call, or calls suspend() before it sleeps",
            )
        for device in self.devices:
            if device != "cpu":
                synchronize(device)

    def settle_to_fill(self) -> None:
        """Settle before a fill. Raises `UsageError` where tensors no longer are the registered memory.

        Their old memory may have another use by now, even as the stack of a thread.
        """
        self.settle()
        moved = self.moved()
        if moved:
            text = f"the memory of these tensors was freed, or replaced, before they could be filled: {some(moved)}"
            raise UsageError(text, hint="register() again what was given other memory, and update once more")
        fixed = self._unwritable()
        if fixed:
            text = f"the memory of these tensors cannot be written, so nothing can be read into them: {some(fixed)}"
            raise UsageError(text, hint="is it a file mapped for reading, or another read-only array? Register a copy")

    def _unwritable(self) -> list[str]:
        """Names of tensors on the host whose memory begins with a byte that is read-only, or was unmapped."""
        pieces = [piece for piece in self.pieces if piece.device == "cpu" and piece.size_bytes]
        starts = {pieces[at].start for at in unwritable([piece.address for piece in pieces])}
        return [tensor.name for tensor in self.layout.tensors if tensor.size_bytes and tensor.offset_bytes in starts]


def register(
    tensors: "type_of_weights",
    dtype: object = None,
    boxes: "Mapping[str, Sequence[Box]] | None" = None,
    *,
    partial: bool = False,
    leave_out: object = (),
) -> Registration:
    """Take tensors in place, as torch tensors or numpy arrays, or those of a module.

    A mapping may have modules, or mappings, by name: their tensors are named "target.…", "draft.…".
    `dtype`: in which those of floating-point numbers are published, or a mapping from names to dtypes. `boxes`: which
    parts of which global tensors they are; a tensor that is not named is one whole global tensor, a DTensor what its
    mesh and placements say. DTensors in a mapping are taken so without `boxes` too. `partial`: with boxes, and some of
    the model is left out. `leave_out`: names and patterns of what the module, or mapping, has and is not registered.
    Raises `UsageError` naming the tensor that cannot be, and `HostMemoryFull` where there is no room to cast into.
    """
    with outside_modes():
        return _register(tensors, dtype, boxes, partial=partial, leave_out=leave_out)


def _register(
    tensors: "type_of_weights",
    dtype: object,
    boxes: "Mapping[str, Sequence[Box]] | None",
    *,
    partial: bool,
    leave_out: object = (),
) -> Registration:
    given_boxes = boxes
    if is_module(tensors):
        return _register_module(tensors, dtype, boxes, partial, leave_out)
    if not isinstance(tensors, Mapping):
        raise UsageError(
            f"register takes a module, or a mapping from names to tensors, not a {type(tensors).__name__}",
            hint="pass the module itself, or its state_dict()",
        )
    if not tensors:
        raise UsageError("no tensors to register: the mapping is empty", hint="pass the module")
    flat: Mapping[str, Any] = tensors
    if any(isinstance(each, Mapping) or is_module(each) for each in tensors.values()):
        modules = modules_of(tensors)
        if modules is not None and (whole := modules.whole()) is not None:
            return _register_module(whole, dtype, boxes, partial, leave_out, several=modules)
        flat = Nested(tensors)
    left_out = names_left_out(leave_out, [name for name in flat if isinstance(name, str)])
    given_items = items = [(name, tensor) for name, tensor in flat.items() if name not in left_out]
    if not items:
        raise UsageError("no tensors to register: all are left out", hint="leave_out= names too many of them")
    distributed = {name: tensor for name, tensor in items if is_dtensor(tensor)}
    if distributed:
        found, known = parts_of(distributed)
        items = [(name, found.get(name, tensor)) for name, tensor in items]
        boxes = {**known, **(boxes or {})}
    given = described = describe_all(items)
    casts = None
    if dtype is not None:
        values = [tensor for _, tensor in items]
        described, casts = cast(given, values, dtype, sorted(_blocks(given), key=min))
    kept = [(old, tensor) for old, new, (_, tensor) in zip(given, described, items, strict=True) if old is new]
    offsets, pieces = place(described)
    specs = tuple(
        TensorSpec(facts.name, facts.dtype, facts.shape, facts.strides, offset, facts.size_bytes)
        for facts, offset in zip(described, offsets, strict=True)
    )
    layout = Layout(specs, pieces[-1].stop if pieces else 0)
    table, encoded, shares = _boxed(layout, boxes, partial)
    if casts is not None and table is not None:
        from ..reshard.plan import ranges_inside  # with numpy, as the table

        casts.keep_to(ranges_inside(table), {spec.name: spec.offset_bytes for spec in specs})
    return Registration(
        layout=layout,
        layout_digest=digest_of_boxed(layout.encode(), encoded, partial) if encoded else layout.digest(),
        stream=_stream(pieces),
        pieces=tuple(pieces),
        devices=tuple(sorted({facts.device for facts in described})),
        _in_place=InPlace([facts for facts, _ in kept], [tensor for _, tensor in kept]),
        casts=casts,
        _held=held_mapping(flat, given_items),
        given=(weakly(tensors), dtype, given_boxes, leave_out),
        table=table,
        boxes=encoded,
        is_partial=partial,
        shares=shares,
    )


def register_memory(described: Sequence[Described], *, has_boxes: bool, may_have: bool = False) -> Registration:
    """Takes memory of this process by its addresses: tensors that lie in mapped files, or in host memory.

    `has_boxes`: each tensor is a whole one, as with `boxes={}`. `may_have`: see `Registration`.
    """
    offsets, pieces = place(described)
    specs = tuple(
        TensorSpec(each.name, each.dtype, each.shape, each.strides, offset, each.size_bytes)
        for each, offset in zip(described, offsets, strict=True)
    )
    layout = Layout(specs, pieces[-1].stop if pieces else 0)
    found = Registration(
        *(layout, layout.digest(), _stream(pieces), tuple(pieces), ("cpu",), InPlace([], [])), may_have=may_have
    )
    return found.with_boxes() if has_boxes else found


def _register_module(
    module: "torch.nn.Module",
    dtype: object,
    boxes: "Mapping[str, Sequence[Box]] | None",
    partial: bool,
    leave_out: object,
    several: Modules | None = None,
) -> Registration:
    """`several`: of which the module was made."""
    found = tensors_of_module(module, leave_out)
    given = (weakly(module) if several is None else several.given, dtype, boxes, leave_out)
    if boxes is not None:
        known = boxes_of_module(module)
        boxes = {**{name: each for name, each in known.items() if name in found}, **boxes}
    return replace(
        _register(found, dtype, boxes, partial=partial), _held=held_module(module, found, several), given=given
    )


def _boxed(
    layout: Layout, boxes: "Mapping[str, Sequence[Box]] | None", partial: object
) -> "tuple[BoxTable | None, bytes, tuple[str, str] | None]":
    if not isinstance(partial, bool):
        raise UsageError(f"partial={partial!r} is neither True nor False")
    if boxes is None:
        if partial:
            raise UsageError("partial=True without boxes", hint="boxes={} says that all of these tensors are whole")
        return None, b"", None
    from ..reshard.copies import why_not_filled  # with numpy, which nothing else here needs
    from ..reshard.grid import table_of
    from ..reshard.wire import encode_table

    table = table_of(layout, boxes)
    return table, encode_table(table), why_not_filled(table)


def place(described: Sequence[Described]) -> tuple[list[int], list[Piece]]:
    """Each tensor's offset in the stream, and the memory that the stream consists of. Rules 1 to 3 above."""
    blocks = _blocks(described)
    blocks.sort(key=min)
    offsets = [0] * len(described)
    pieces: list[Piece] = []
    at = 0
    for members in blocks:
        address = min(described[index].address for index in members)
        end = max(described[index].address + described[index].size_bytes for index in members)
        for index in members:
            offsets[index] = at + described[index].address - address
        first = described[members[0]]
        owners = tuple(described[index].owner for index in members)
        pieces.append(Piece(at, at + end - address, address, first.device, first.storage, owners))
        at += end - address
    return offsets, _joined(pieces)


def _blocks(described: Sequence[Described]) -> list[list[int]]:
    """Tensors grouped by overlap: one sweep over the intervals in the order of their addresses."""
    order = sorted(
        (index for index, facts in enumerate(described) if facts.size_bytes),
        key=lambda index: (described[index].device, described[index].address, index),
    )
    blocks: list[list[int]] = []
    device, end = "", 0
    for index in order:
        facts = described[index]
        if blocks and facts.device == device and facts.address < end:
            blocks[-1].append(index)
        else:
            blocks.append([index])
            end = 0
        device, end = facts.device, max(end, facts.address + facts.size_bytes)
    return blocks


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours in the stream that are neighbours in one allocation become one piece: fewer views, fewer regions."""
    joined: list[Piece] = []
    run: list[Piece] = []
    for piece in pieces:
        if run and not piece.follows(run[-1]):
            joined.append(Piece.join(run))
            run = []
        run.append(piece)
    if run:
        joined.append(Piece.join(run))
    return joined


def _stream(pieces: Sequence[Piece]) -> ByteStream:
    if all(piece.device == "cpu" for piece in pieces):
        return HostStream(pieces)
    from .cuda import CudaStream

    return CudaStream(pieces)
