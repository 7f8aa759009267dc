"""What a shard is made of: its tensors (the layout) and the digests of its bytes (the manifest).

A shard is one *logical stream* of bytes: the memory of its tensors in the order of registration, each byte once.
Tensors that share memory (tied weights, views of one storage) share their place in the stream. The stream is cut into
chunks of `chunk_bytes`; the chunk is the unit of progress, verification and resumption.

What its publisher says of the version beside its tensors is here too (see `metadata`).

Two workers may exchange a shard only if their layout digests are equal. What two workers hold is the same version only
if their root digests are equal: the root covers the layout, the digest of every chunk and the metadata.
"""

import re
from collections.abc import Collection, Sequence, Set
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from math import prod

import msgspec

from .decoding import Undecodable, decoded
from .errors import UsageError, shortened
from .metadata import decode_metadata
from .names import BOXED, PARTIAL, Digest

DIGEST_BYTES = 16  # xxh3-128 and blake2b-128 alike
MAX_SIZE = 2**62  # of anything in a layout: above every memory, and twice it still fits 64 bits
MAX_ELEMENTS = 1 << 58  # of one tensor: its bytes still fit 62 bits
MAX_DIMENSIONS = 64  # numpy's limit
MAX_CHUNK_BYTES = 1 << 30
_dtype = re.compile(r"[a-z]+(\d+)(?:x(\d+))?(?:_[a-z0-9]+)*\Z")
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # which torch puts into names
Buffer = bytes | bytearray | memoryview | msgspec.Raw


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its place in the logical stream. Elements lie in memory as `strides` (in elements) says."""

    name: str
    dtype: str  # torch's name without the prefix: "bfloat16", "float8_e4m3fn", "int64"
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.name!r}: {self.dtype}{list(self.shape)}"


class Layout(msgspec.Struct, frozen=True):
    """The tensors of one shard, in order, and the length of its logical stream."""

    tensors: tuple[TensorSpec, ...]
    size_bytes: int

    def digest(self) -> Digest:
        """Equal for two workers exactly when names, dtypes, shapes, strides, order and sharing of memory are equal."""
        return digest_of_layout(self.encode())

    def encode(self) -> bytes:
        """As it travels from worker to server."""
        return msgspec.msgpack.encode(self)


def digest_of_layout(encoded: Buffer) -> Digest:
    """The digest of the layout that was encoded so."""
    return Digest(blake2b(encoded, digest_size=DIGEST_BYTES).hexdigest())


def digest_of_boxed(encoded: Buffer, boxes: Buffer, is_partial: bool) -> Digest:
    """The same of a layout with boxes, which are encoded too. `is_partial`: it leaves out some of the model."""
    both = blake2b(encoded, digest_size=DIGEST_BYTES)
    both.update(b"boxes")
    both.update(boxes)
    return Digest((PARTIAL if is_partial else BOXED) + both.hexdigest())


_layout_decoder = msgspec.msgpack.Decoder(Layout)


def decode_layout(data: Buffer) -> Layout:
    """A layout from a worker's bytes. Raises `UsageError` if it is none that `register` makes: see `_wrong_with`."""
    try:
        layout = decoded(_layout_decoder, data)
    except Undecodable as error:
        raise UsageError(f"malformed layout: {error}") from error
    wrong = _wrong_with(layout)
    if wrong:
        raise UsageError(f"malformed layout: {wrong}")
    return layout


def _wrong_with(layout: Layout) -> str:
    """What keeps memory from being laid out so; empty where nothing does."""
    for spec in layout.tensors:
        what = _wrong_with_tensor(spec)
        if what:
            return f"tensor {shortened(repr(spec.name), 200)} has {what}"
    if len({spec.name for spec in layout.tensors}) < len(layout.tensors):
        return "two tensors of one name"
    end = 0
    for spec in sorted(layout.tensors, key=lambda spec: spec.offset_bytes):
        if spec.offset_bytes > end:
            return f"no tensor where its bytes {end} to {spec.offset_bytes} are"
        end = max(end, spec.offset_bytes + spec.size_bytes)
    return "" if end == layout.size_bytes else f"tensors of {end} B in {layout.size_bytes} B"


def _wrong_with_tensor(spec: TensorSpec) -> str:
    numbers = (*spec.shape, *spec.strides, spec.offset_bytes, spec.size_bytes)
    if min(numbers) < 0 or max(numbers) > MAX_SIZE or len(spec.shape) > MAX_DIMENSIONS:
        return "a number out of range"
    if prod(max(extent, 1) for extent in spec.shape) > MAX_ELEMENTS:
        return f"the shape {list(spec.shape)}, which is too large"
    try:
        size_bytes = prod(spec.shape) * item_bytes(spec.dtype)
    except UsageError as error:
        return str(error)
    if spec.size_bytes != size_bytes or (spec.offset_bytes and not size_bytes):
        return f"{spec.size_bytes} B, where {spec.dtype}{list(spec.shape)} takes {size_bytes} B"
    if spec.strides != dense_strides(spec.shape, spec.strides):
        return f"the strides {list(spec.strides)}, with which {list(spec.shape)} fills no range of memory"
    return ""


@lru_cache(maxsize=64)
def item_bytes(dtype: str) -> int:
    """Bytes of one element, by the dtype's name; elements of less than a byte, and packs of them, count as one byte."""
    if dtype == "bool":
        return 1
    found = _dtype.match(dtype)
    if found is None:
        raise UsageError(f"dtype {dtype!r} is not one that workers can exchange")
    bits = int(found[1]) * int(found[2] or 1)
    if not 0 < bits <= 128:
        raise UsageError(f"dtype {dtype!r} is not one that workers can exchange: it has {bits} bits")
    return -(-bits // 8)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor of this shape whose last dimension runs fastest, in elements."""
    strides, following = [], 1
    for extent in reversed(shape):
        strides.append(following)
        following *= max(extent, 1)
    return tuple(reversed(strides))


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides as they go into a layout; None if the elements do not fill one range of memory exactly.

    Where a stride means nothing (a dimension of size 1, a tensor without elements) it is a contiguous tensor's.
    """
    if len(strides) != len(shape):
        return None
    expected = 1
    for axis in range(len(shape) - 1, -1, -1):  # contiguous, as nearly all are
        if strides[axis] != expected or shape[axis] < 2:
            break
        expected *= shape[axis]
    else:
        return tuple(strides)
    if 0 not in shape:
        expected = 1
        for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
            if stride != expected:
                return None
            expected *= size
    canonical = list(strides)
    following = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1 or 0 in shape:
            canonical[axis] = following
        following = canonical[axis] * max(shape[axis], 1)
    return tuple(canonical)


def layout_difference(mine: Layout, theirs: Layout, *, here: str = "here", there: str = "there") -> str | None:
    """The first difference between two layouts, in words that name the tensor; None where there is none."""
    for index, (a, b) in enumerate(zip(mine.tensors, theirs.tensors, strict=False)):
        if a == b:
            continue
        if a.name != b.name:
            names = {spec.name for spec in theirs.tensors}
            if a.name not in names:
                text = f"tensor {a} exists {here} but not {there} (there, tensor {index} is {b})"
                return text + _names_said(mine, theirs, here, there)[0]
            return f"order differs: tensor {index} is {a.name!r} {here} and {b.name!r} {there}"
        for what in ("dtype", "shape", "strides"):
            x, y = getattr(a, what), getattr(b, what)
            if x != y:
                x, y = (list(x), list(y)) if what != "dtype" else (x, y)
                return f"tensor {a.name!r} has {what} {x} {here} and {y} {there}"
        return f"tensor {a.name!r} shares memory with other tensors in another way {here} than {there}"
    more, fewer = sorted((mine.tensors, theirs.tensors), key=len, reverse=True)
    if len(more) > len(fewer):
        where, other = (here, there) if more is mine.tensors else (there, here)
        return f"tensor {more[len(fewer)]} exists {where} but not {other}"
    return None if mine == theirs else "the layouts differ in their total size"


def difference_hint(mine: Layout, theirs: Layout, *, shards: int = 1) -> str:
    """What makes `mine` able to hold what was published as `theirs`, both of them without boxes."""
    ours, others = ({spec.name: (spec.dtype, spec.shape) for spec in each.tensors} for each in (mine, theirs))
    if ours == others and _shares_in_part(mine):
        return "give each tensor of the reader memory of its own; only whole tensors may be tied"
    if ours == others:
        boxes = "boxes={}" if shards == 1 else "boxes={...}, which say what each shard has,"
        return f"register(..., {boxes} on both sides): then order, strides and ties may differ"
    same = "register the same tensors in the same order on both sides; register(..., dtype=) publishes in another dtype"
    return _names_said(mine, theirs, "here", "there")[1] or same


def _shares_in_part(layout: Layout) -> bool:
    """Two of its tensors share some of their memory, and not all of it."""
    places = sorted({(spec.offset_bytes, spec.size_bytes) for spec in layout.tensors if spec.size_bytes})
    return any(start + size > following for (start, size), (following, _) in pairwise(places))


def _names_said(mine: Layout, theirs: Layout, here: str, there: str) -> tuple[str, str]:
    return names_difference([s.name for s in mine.tensors], [s.name for s in theirs.tensors], here=here, there=there)


def names_difference(mine: Collection[str], theirs: Collection[str], *, here: str, there: str) -> tuple[str, str]:
    """What the names of one side have in addition, as to append it to a message, and a hint; both empty if nothing.

    That is what wrappers put there (`torch.compile`: "_orig_mod."), and a prefix of all names of one side.
    """
    sides = [dict.fromkeys(mine), dict.fromkeys(theirs)]
    wraps = [[word for word in WRAPPERS if any(word in name for name in names)] for names in sides]
    extra = [[word for word in wraps[n] if word not in wraps[1 - n]] for n in (0, 1)]
    for n in (0, 1):
        for word in extra[n]:
            sides[n] = dict.fromkeys(name.replace(word, "") for name in sides[n])
    for n in (0, 1):
        prefix = _prefix(sides[n].keys(), sides[1 - n].keys())
        if prefix:
            extra[n].append(prefix)
            sides[n] = dict.fromkeys(name.removeprefix(prefix) for name in sides[n])
            break
    if not any(extra) or sides[0].keys().isdisjoint(sides[1]):
        return "", ""
    said, hints = [], []
    for words, where, names in zip(extra, (here, there), (mine, theirs), strict=True):
        if words:
            said.append(f"names {where} have {' and '.join(map(repr, words))} in addition")
            hints += _hints_without(words, names)
    return f"; {', and '.join(said)}", "; ".join(hints)


def _prefix(names: Set[str], others: Set[str]) -> str:
    """What all of these names begin with, if others are the same without it."""
    for name in sorted(names - others):
        at = name.find(".") + 1
        while at:
            if name[at:] in others:
                return name[:at] if all(each.startswith(name[:at]) for each in names) else ""
            at = name.find(".", at) + 1
    return ""


def _hints_without(words: Collection[str], names: Collection[str]) -> list[str]:
    """How to register without these words: what is inside of a wrapper, or under other names."""
    front, others = "", list(words)
    while found := [word for word in others if all(name.startswith(front + word) for name in names)]:
        front += found[0]
        others.remove(found[0])
    hints = [f"register what is inside, model.{front[:-1]}, or a mapping from names without {front!r}"] if front else []
    for word in others:
        bare = f"{{name.replace({word!r}, ''): tensor for name, tensor in model.state_dict().items()}}"
        hints.append(f"register({bare})")
    return hints


class Manifest(msgspec.Struct, frozen=True):
    """A layout's digest and the digest of every chunk of one version of one shard.

    `digests` is the concatenation of `chunk_count` digests of 16 bytes; empty where the publisher said verify="none".
    `salt` is empty for verified content; a publisher without digests puts something unique there, so that its content
    is never taken for anybody else's.
    """

    layout: Digest
    size_bytes: int
    chunk_bytes: int
    algorithm: str  # "xxh3-128" or "none"
    digests: bytes
    salt: str = ""
    metadata: bytes = b""  # as `encode_metadata` has made it

    @property
    def chunk_count(self) -> int:
        return chunk_count(self.size_bytes, self.chunk_bytes)

    def digest_of(self, chunk: int) -> bytes:
        """The announced digest of one chunk (16 bytes)."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """The chunk's place in the logical stream: (start, stop) in bytes."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.size_bytes)

    def root(self) -> Digest:
        """The content's identity: one digest over everything above."""
        return Digest(blake2b(msgspec.msgpack.encode(self), digest_size=DIGEST_BYTES).hexdigest())

    def encode(self) -> bytes:
        """As it travels from source to target."""
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(Manifest)


def decode_manifest(data: bytes) -> Manifest:
    """A manifest from a peer's bytes. Raises `UsageError` if it is malformed or contradicts itself."""
    try:
        manifest = decoded(_decoder, data)
    except Undecodable as error:
        raise UsageError(f"malformed manifest: {error}") from error
    if not 1 <= manifest.chunk_bytes <= MAX_CHUNK_BYTES or not 0 <= manifest.size_bytes <= MAX_SIZE:
        raise UsageError(f"manifest with chunks of {manifest.chunk_bytes} B and {manifest.size_bytes} B in all")
    expected = 0 if manifest.algorithm == "none" else manifest.chunk_count * DIGEST_BYTES
    if len(manifest.digests) != expected:
        raise UsageError(f"manifest with {len(manifest.digests)} B of digests where {expected} B were due")
    decode_metadata(manifest.metadata)
    return manifest


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    """How many chunks a logical stream has; an empty one has none."""
    return -(-size_bytes // chunk_bytes)
