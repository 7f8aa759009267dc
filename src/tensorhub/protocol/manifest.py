"""Manifests: the tensors of a shard, the digests of its chunks or tiles, and a version's metadata."""

import json
import re
from collections.abc import Collection, Mapping, Sequence, Set
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from math import isfinite, prod

import msgspec

from .errors import UsageError, shortened
from .names import BOXED, PARTIAL, TILED, Digest, Undecodable, decoded

# --- metadata ---------------------------------------------------------------------------------------------------------
#
# A small JSON object that travels in each shard's manifest, under its root. Equal objects are equal bytes.


MAX_METADATA_BYTES = 16 * 1024  # hyperparameters, counters, hashes, paths; the manifest of a GiB takes 4 KiB
MAX_DEPTH = 32  # of objects and arrays inside each other

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def encode_metadata(metadata: object) -> bytes:
    """Encodes metadata for the wire; empty for an empty mapping. Raises `UsageError` for no JSON, or a large size."""
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is of type {type(metadata).__name__}: it has to be a mapping of strings to JSON")
    plain = {key: _json(value, f"metadata[{key!r}]", 1) for key, value in _checked(metadata, "metadata").items()}
    if not plain:
        return b""
    try:
        encoded = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except ValueError as error:  # half a surrogate pair, or a number of thousands of digits
        raise UsageError(f"metadata cannot be written as JSON: {error}") from error
    if len(encoded) > MAX_METADATA_BYTES:
        largest = max(plain, key=lambda key: len(json.dumps(plain[key])))
        text = f"metadata of {len(encoded)} B is over {MAX_METADATA_BYTES} B; its largest value is {largest!r}"
        raise UsageError(text, hint="publish where it is to be found, or register it as a tensor")
    return encoded


def decode_metadata(encoded: bytes) -> dict[str, Json]:
    """Anew each time, so that it is the caller's. Raises `UsageError` if it is no JSON object, or too long."""
    if not encoded:
        return {}
    if len(encoded) > MAX_METADATA_BYTES:
        raise UsageError(f"metadata of {len(encoded)} B is over {MAX_METADATA_BYTES} B")
    try:
        found = json.loads(encoded, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"malformed metadata: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"metadata of type {type(found).__name__}, where an object is wanted")
    return found


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is no JSON")


def digest_of_metadata(encoded: bytes) -> Digest:
    """The digest by which shards compare their metadata; empty if there is none."""
    return Digest(blake2b(encoded, digest_size=16).hexdigest() if encoded else "")


def _checked(value: Mapping[object, object], where: str) -> dict[str, object]:
    """Its items, the keys of which are texts."""
    found: dict[str, object] = {}
    for key, each in value.items():
        if not isinstance(key, str):
            raise UsageError(f"{where} has the key {key!r}: keys are strings")
        found[key] = each
    return found


def _json(value: object, where: str, depth: int) -> Json:
    """The value, if JSON can say it as it is."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{where} is more than {MAX_DEPTH} levels deep")
    match value:
        case None | bool() | str():
            return value
        case int() if type(value) is int:
            return value
        case float() if type(value) is float:
            if not isfinite(value):
                raise UsageError(f"{where} is {value}, which JSON cannot say")
            return value
        case list() | tuple():
            return [_json(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)]
        case Mapping():
            return {key: _json(each, f"{where}[{key!r}]", depth + 1) for key, each in _checked(value, where).items()}
        case _:
            hint = "of a tensor or numpy scalar: .item() or .tolist()"
            raise UsageError(f"{where} is of type {type(value).__name__}, which is no JSON value", hint=hint)


# --- layouts and manifests --------------------------------------------------------------------------------------------
#
# A shard is one *logical stream* of bytes: the memory of its tensors in the order of registration, each byte once.
# Tensors that share memory share their place in the stream. The stream is cut into chunks of `chunk_bytes`: the unit of
# progress, verification and resumption. Workers may exchange a shard only if their layout digests are equal. They hold
# the same version only if their roots are equal: the root covers layout, chunk digests and metadata.


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
        """Encodes it for the wire from worker to server."""
        return msgspec.msgpack.encode(self)


def digest_of_layout(encoded: Buffer) -> Digest:
    """The digest of the layout that was encoded so."""
    return Digest(blake2b(encoded, digest_size=DIGEST_BYTES).hexdigest())


def digest_of_boxed(encoded: Buffer, boxes: Buffer, is_partial: bool) -> Digest:
    """The digest of a layout with boxes, which are encoded too. `is_partial`: it leaves out some of the model."""
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
    """The reason why memory cannot have this layout; empty if it can."""
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
    if ours == others and has_partial_overlaps(mine):
        return "give each tensor of the reader memory of its own; only whole tensors may be tied"
    if ours == others:
        boxes = "boxes={}" if shards == 1 else "boxes={...}, which say what each shard has,"
        return f"register(..., {boxes} on both sides): then order, strides and ties may differ"
    same = "register the same tensors in the same order on both sides; register(..., dtype=) publishes in another dtype"
    return _names_said(mine, theirs, "here", "there")[1] or same


def has_partial_overlaps(layout: Layout) -> bool:
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

    `digests` has 16 bytes for each chunk; it is empty for verify="none". Then `salt` is unique to that content,
    and else it is empty.
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
        """Encodes it for the wire from source to target."""
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


# --- manifests of tiles -----------------------------------------------------------------------------------------------
#
# A tile is one cell of the grid that all layouts of a version share. Its digest is taken over its elements in row-major
# order of the global tensor, so the manifest of *any* layout follows from the publisher's tile digests.
#
# `digests` has 16 bytes for each tile of each box, in the order of the layout's boxes, and within a box in row-major
# order; it is empty for verify="none".


class TileManifest(msgspec.Struct, frozen=True):
    """The layout, the grid, and the digest of every tile. Its root is what the server pins for a version and shard."""

    layout: Digest
    grid: Digest
    algorithm: str  # "xxh3-128" or "none"
    tile_count: int
    digests: bytes
    salt: str = ""
    metadata: bytes = b""  # as `encode_metadata` has made it: the same in all shards

    def digest_of(self, tile: int) -> bytes:
        """The digest of one tile (16 bytes)."""
        return self.digests[tile * DIGEST_BYTES : (tile + 1) * DIGEST_BYTES]

    def root(self) -> Digest:
        """The content's identity, for this layout: one digest over everything above. It says that there are tiles."""
        return Digest(TILED + blake2b(self.encode(), digest_size=DIGEST_BYTES).hexdigest())

    def encode(self) -> bytes:
        """Encodes it for the wire from source to reader."""
        return msgspec.msgpack.encode(self)


_tile_decoder = msgspec.msgpack.Decoder(TileManifest)


def decode_tile_manifest(data: bytes) -> TileManifest:
    """A manifest from a peer's bytes. Raises `UsageError` if it is malformed or contradicts itself."""
    try:
        manifest = decoded(_tile_decoder, data)
    except Undecodable as error:
        raise UsageError(f"malformed manifest of tiles: {error}") from error
    expected = 0 if manifest.algorithm == "none" else manifest.tile_count * DIGEST_BYTES
    if manifest.tile_count < 0 or len(manifest.digests) != expected:
        raise UsageError(
            f"manifest of {manifest.tile_count} tiles with {len(manifest.digests)} B of digests, not {expected} B"
        )
    decode_metadata(manifest.metadata)
    return manifest
