"""Checkpoints in safetensors files: published from where they lie, and filled where they are to lie.

A file is mapped, and its pages are the registered memory of a worker. So a push reads each byte when a reader wants it,
a pull writes each byte where it belongs, and neither takes memory of the size of the model.

Rules:
1. A checkpoint is one file, or a directory with files and an index that says which file has which tensor.
2. A version that is pushed says in its metadata which files it came from. A pull makes these again, byte for byte.
   Where that does not fit into metadata, and for all other versions, it makes files of `max_shard_bytes`.
3. A pull writes to PATH.part and renames it when all chunks are verified and on disk. What an earlier pull has left
   there is hashed, and only what differs is read.
4. `safetensors` reads all headers, those that a pull has written too. It has no call that writes a header ahead of its
   tensors, so `header_of` does that.
"""

import asyncio
import base64
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack, cast
from uuid import uuid4

from msgspec.structs import replace

from . import aio
from .memory.describe import Described
from .memory.digests import changed_chunks, tensors_of
from .memory.host_memory import map_file
from .memory.registration import Registration, register_memory
from .protocol.errors import CorruptTransfer, SourceLost, UsageError, VersionConflict, VersionUnavailable
from .protocol.events import ReadFinished
from .protocol.manifest import (
    MAX_METADATA_BYTES,
    Json,
    Layout,
    contiguous_strides,
    decode_manifest,
    encode_metadata,
    item_bytes,
)
from .protocol.messages import Spec
from .protocol.names import Digest, is_tiled
from .protocol.status import ModelView, VersionView
from .reshard.grid import tiles_of
from .reshard.read import TiledVersion
from .reshard.wire import decode_tiled_shard, layout_digest
from .runtime.client import Client
from .runtime.config import LoadArguments, Options, check_name, open_options
from .runtime.content import Known
from .runtime.loops import in_thread, loop_thread
from .runtime.opening import open_client
from .runtime.questions import Laid, layouts_of, metadata_of, whole_layout_of
from .transport.threads import scope

_log = logging.getLogger(__name__)

# --- Files as plain facts.

SUFFIX, INDEX_SUFFIX, PART = ".safetensors", ".safetensors.index.json", ".part"
WHOLE_NAME = "model"
MAX_SHARD_BYTES = 5 * 10**9  # as transformers
TRANSPORTS = ("local", "tcp")  # RDMA cannot register the pages of every file system
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
CODES = {name: code for code, name in DTYPES.items()}
ORDER = {code: at for at, code in enumerate(reversed(DTYPES))}


class Tensor(NamedTuple):
    """One tensor of a file. `dtype` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        size_bytes = item_bytes(self.dtype)
        for extent in self.shape:
            size_bytes *= extent
        return size_bytes


class File(NamedTuple):
    """One file: its tensors in the order of their bytes, and all that comes before these."""

    name: str
    tensors: tuple[Tensor, ...]
    header: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(tensor.size_bytes for tensor in self.tensors)


class Checkpoint(NamedTuple):
    """The files of a checkpoint. `about`: the metadata in its index file; None if it has no index."""

    files: tuple[File, ...]
    about: Mapping[str, Json] | None
    index_name: str = f"{WHOLE_NAME}{INDEX_SUFFIX}"

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for file in self.files for tensor in file.tensors)


def header_of(tensors: Sequence[Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """The bytes before the first tensor, as `safetensors` writes them."""
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for each in tensors:
        stop = at + each.size_bytes
        table[each.name] = {"dtype": CODES[each.dtype], "shape": list(each.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def metadata_in(header: bytes) -> Mapping[str, str] | None:
    """The free text in a header that was read already; None if there is none."""
    found = json.loads(header[8:])
    return cast("Mapping[str, str] | None", found.get("__metadata__"))


def index_of(checkpoint: Checkpoint) -> bytes:
    """The index file, as transformers writes it."""
    names = {tensor.name: file.name for file in checkpoint.files for tensor in file.tensors}
    text = json.dumps({"metadata": checkpoint.about, "weight_map": names}, indent=2, sort_keys=True)
    return f"{text}\n".encode()


# --- Reading.


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at that path, a file or a directory. Reads headers only. Raises `UsageError`."""
    if path.is_file():
        return Checkpoint((read_file(path),), None)
    found = sorted(each for each in path.glob(f"*{SUFFIX}") if each.is_file())
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if not found:
        raise UsageError(f"{path} is no safetensors file, and no directory that has one")
    if not indices and len(found) == 1:
        return Checkpoint((read_file(found[0]),), None)
    if len(indices) != 1:
        text = f"{path} has {len(found)} files {SUFFIX} and {len(indices)} files *{INDEX_SUFFIX}"
        raise UsageError(text, hint="give the path of one file, or of a directory with one index")
    try:
        index = json.loads(indices[0].read_bytes())
        names: dict[str, str] = index["weight_map"]
        files = tuple(read_file(path / name) for name in sorted(set(names.values())))
        metadata = index.get("metadata", {})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{indices[0]} is no index of safetensors files: {error!r}") from error
    there = {tensor.name: file.name for file in files for tensor in file.tensors}
    if there != names:
        wrong = sorted(there.items() ^ names.items())[0][0]
        raise UsageError(f"{indices[0]} and the files beside it differ in where tensor {wrong!r} is")
    return Checkpoint(files, metadata, indices[0].name)


def read_file(path: Path) -> File:
    """The header of one file. Raises `UsageError` for one that is malformed, or has a dtype that no worker takes."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise UsageError("the package safetensors is not installed", hint="pip install 'tensorhub[files]'") from error
    try:
        with safe_open(path, framework="np") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            facts = [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in slices]
        unknown = [(name, code) for name, code, _ in facts if code not in DTYPES]
        if unknown:
            raise UsageError(f"tensor {unknown[0][0]!r} of {path} has dtype {unknown[0][1]}, which no worker takes")
        tensors = tuple(Tensor(name, DTYPES[code], shape) for name, code, shape in facts)
        with path.open("rb") as file:
            header = file.read(path.stat().st_size - sum(each.size_bytes for each in tensors))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is no safetensors file: {error}") from error
    return File(path.name, tensors, header)


# --- Files in the metadata of a version.
#
# The tensors of a version are known, sorted by name. What is added: for each file its name, how many tensors it has and
# its free text; and the order of the tensors, as differences of their places among the sorted names.

KEY = "safetensors"


def packed(checkpoint: Checkpoint) -> dict[str, Json]:
    """What a version says of the files that it came from; {} where it has no room for that."""
    names = [tensor.name for file in checkpoint.files for tensor in file.tensors]
    place = {name: at for at, name in enumerate(sorted(names))}
    order, before = array("i"), -1
    for name in names:
        order.append(place[name] - before - 1)
        before = place[name]
    files: list[Json] = []
    for file in checkpoint.files:
        metadata = metadata_in(file.header)
        is_usual = header_of(file.tensors, metadata) == file.header
        text: Json = {**metadata} if is_usual and metadata is not None else None
        files.append([file.name, len(file.tensors), text, "" if is_usual else _deflated(file.header)])
    found: dict[str, Json] = {KEY: {"files": files, "order": _deflated(order.tobytes())}}
    if checkpoint.about is not None:
        cast(dict[str, Json], found[KEY])["index"] = [checkpoint.index_name, {**checkpoint.about}]
    try:
        encode_metadata(found)
    except UsageError:
        return {}
    return found


def unpacked(metadata: Mapping[str, Json], tensors: Sequence[Tensor]) -> Checkpoint | None:
    """The files that a version came from; None if it says nothing of that, or what does not fit its tensors."""
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError, AttributeError, zlib.error):
        said = cast(dict[str, Json], metadata[KEY])
        by_name = sorted(tensors)
        ordered, at = [], -1
        for step in array("i", _inflated(cast(str, said["order"]))):
            at += step + 1
            ordered.append(by_name[at])
        files, first = [], 0
        for name, count, text, header in cast(list[tuple[str, int, dict[str, str] | None, str]], said["files"]):
            mine = tuple(ordered[first : first + count])
            files.append(File(_checked_file_name(name), mine, _inflated(header) if header else header_of(mine, text)))
            first += count
        index = cast(tuple[str, dict[str, Json]], said.get("index") or ("", None))
        if sorted(ordered) == by_name and first == len(ordered) and len({file.name for file in files}) == len(files):
            return Checkpoint(tuple(files), index[1], _checked_file_name(index[0]) if index[0] else "")
    return None


def _checked_file_name(name: str) -> str:
    """A name that leads to no other directory. It comes from another worker."""
    if not re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII) or name.startswith("."):
        raise ValueError(f"{name!r} is no name of a file")
    return name


def _deflated(plain: bytes) -> str:
    return base64.b85encode(zlib.compress(plain, 9)).decode()


def _inflated(text: str) -> bytes:
    unpacking = zlib.decompressobj()
    return unpacking.decompress(base64.b85decode(text), 4096 * MAX_METADATA_BYTES)


def cut(tensors: Sequence[Tensor], max_shard_bytes: int, aliases: Mapping[str, str]) -> Checkpoint:
    """New files, each of `max_shard_bytes` or of one tensor. `aliases`: which of the tensors is the same memory."""
    groups: list[list[Tensor]] = [[]]
    size_bytes = 0
    for each in tensors:
        if groups[-1] and size_bytes + each.size_bytes > max_shard_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(each)
        size_bytes += each.size_bytes
    files = []
    for at, group in enumerate(groups):
        mine = tuple(sorted(group, key=lambda each: (ORDER[CODES[each.dtype]], each.name)))
        shares = {alias: name for alias, name in aliases.items() if any(each.name == name for each in mine)}
        name = f"{WHOLE_NAME}-{at + 1:05}-of-{len(groups):05}{SUFFIX}" if len(groups) > 1 else f"{WHOLE_NAME}{SUFFIX}"
        files.append(File(name, mine, header_of(mine, {"format": "pt", **shares})))
    total = sum(each.size_bytes for each in tensors)
    return Checkpoint(tuple(files), {"total_size": total} if len(groups) > 1 else None)


# --- Files as registered memory.


def placed(checkpoint: Checkpoint, paths: Sequence[Path], *, is_writable: bool) -> dict[str, Described]:
    """Where each tensor lies in the mapped files. Raises `UsageError`."""
    found: dict[str, Described] = {}
    for file, path in zip(checkpoint.files, paths, strict=True):
        try:
            start, owner = map_file(path, is_writable=is_writable)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be mapped: {error}") from error
        at = start + len(file.header)
        for each in file.tensors:
            strides = contiguous_strides(each.shape)
            address = at if each.size_bytes else 0
            facts = (each.name, each.dtype, each.shape, strides, address, each.size_bytes, "cpu", start, owner)
            found[each.name] = Described(*facts)
            at += each.size_bytes
    return found


# --- Push: a checkpoint becomes a version.

LOOK_S = 0.5  # between two questions to the server
LEAVE_S = 30.0  # for readers that still read here


class Pushed(NamedTuple):
    """A version that was pushed, and by which replicas it is held beside this process."""

    version: int
    size_bytes: int
    holders: tuple[str, ...]
    best_part: float  # of it that the reader has which has most, from 0 to 1
    keeps_files: bool  # True: a pull makes the same files again


async def push(
    model: str,
    path: Path,
    *,
    version: int | None = None,
    replica: str = "push",
    until_held: int | None = 1,
    on_change: Callable[[Pushed], None] = lambda _: None,
    **where: Unpack[LoadArguments],
) -> Pushed:
    """Publish a checkpoint, and serve it until so many other replicas hold it; with None until it is cancelled.

    Without `version` it takes the next number. If the newest version has this content already, it serves that one: so
    a push that was killed goes on under its number, and readers keep the chunks that they have. Raises `UsageError` for
    files that are malformed, `VersionConflict`, and what `open` and `publish` raise.
    """
    checkpoint, registration = await asyncio.to_thread(mapped, path)
    options = {"version": version, "replica": replica, "until_held": until_held, "on_change": on_change}
    where_options = options_for_files(**where)
    return await serve(model, checkpoint, registration, packed(checkpoint), where_options, **options)  # type: ignore[arg-type]


async def serve(
    model: str,
    checkpoint: Checkpoint,
    registration: Registration,
    metadata: dict[str, Json],
    options: Options,
    *,
    version: int | None,
    replica: str,
    until_held: int | None = 1,
    on_change: Callable[[Pushed], None] = lambda _: None,
) -> Pushed:
    """Publish memory as `push` does."""
    view = aio.View(options, loop_thread())
    weights = await aio.join(model, replica, 0, 1, True, options)
    try:
        await weights.take(registration)
        last = max([each.number async for each in view.events(model=model)], default=0)
        readers = dict[str, None]()  # that have read all of it: one may have left by now
        number = await _publish(view, weights, model, version, metadata)
        while True:
            async for event in view.events(after=last, model=model):
                last = event.number
                if isinstance(event, ReadFinished) and event.version == number and event.shard == 0:
                    readers[event.replica] = None
            holders, part = _pushed((await view.status(model=model)).models, replica, number)
            pushed = Pushed(number, checkpoint.size_bytes, holders, part, bool(metadata))
            on_change(pushed)
            if until_held is not None and len({**readers, **dict.fromkeys(holders)}) >= until_held:
                return pushed
            await asyncio.sleep(LOOK_S)
    finally:
        await weights.close(timeout=LEAVE_S)


def mapped(path: Path) -> tuple[Checkpoint, Registration]:
    """The checkpoint at that path, as memory to publish. Raises `UsageError`."""
    checkpoint = read_checkpoint(path)
    paths = [path] if path.is_file() else [path / file.name for file in checkpoint.files]
    memory = placed(checkpoint, paths, is_writable=False)
    if not memory:
        raise UsageError(f"{path} has no tensors")
    return checkpoint, register_memory(list(memory.values()), has_boxes=True)


def options_for_files(*, retain: int | None = None, **where: Unpack[LoadArguments]) -> Options:
    """Options of a worker whose memory is files: it keeps no host copies. Raises `UsageError`."""
    options = open_options(**where, prefetch="never", host_bytes=0, retain=retain)
    return options if options.transports else dataclasses.replace(options, transports=TRANSPORTS)


async def _publish(
    view: aio.View, weights: aio.Weights, model: str, version: int | None, metadata: dict[str, Json]
) -> int:
    if version is not None:
        return await weights.publish(version, metadata=metadata)
    following = await view.next_version(model)
    known = await view.versions(model)
    if known and await _may_be(view, model, known[0], metadata):
        with contextlib.suppress(VersionConflict):
            return await weights.publish(known[0].version, metadata=metadata)
    return await weights.publish(following, metadata=metadata)


async def _may_be(view: aio.View, model: str, newest: VersionView, metadata: dict[str, Json]) -> bool:
    """Whether the newest version may come from the same files. Its digests tell, and to make them takes a while."""
    if not newest.holders:
        return True
    with contextlib.suppress(SourceLost, VersionUnavailable):
        return await view.metadata(model, newest.version) == metadata
    return True


def _pushed(models: Sequence[ModelView], replica: str, version: int) -> tuple[tuple[str, ...], float]:
    """Which other replicas hold the version, and the largest part that another one has."""
    holders, best = list[str](), 0.0
    for model in models:
        for each in model.versions:
            if each.version == version:
                holders += [name for name in each.holders if name != replica]
        for other in model.replicas:
            if other.name != replica:
                mine = [worker for worker in other.workers if worker.version == version and worker.chunks]
                best = max([best, *(worker.done / worker.chunks for worker in mine)])
    return tuple(holders), 1.0 if holders else best


# --- Pull: a version becomes files.

AGAIN_S = 0.5


class Pulled(NamedTuple):
    """A version in files, and how much of it was read: less than its size where an earlier pull had begun."""

    version: int
    paths: tuple[Path, ...]
    size_bytes: int
    received_bytes: int


async def pull(
    model: str,
    path: Path,
    spec: Spec = "latest",
    *,
    max_shard_bytes: int | None = None,
    timeout: float = 3600.0,  # noqa: ASYNC109 - our own deadline
    on_progress: Callable[[int, float, int], None] = lambda version, part, size_bytes: None,
    **where: Unpack[LoadArguments],
) -> Pulled:
    """Write a version to a file (PATH ends in .safetensors) or a directory.

    The files are those that were pushed, or, with `max_shard_bytes` and for what came from no files, new ones.
    If its last source dies, it waits for another one until `timeout`. Raises `UsageError` if PATH exists or the tensors
    fit into no file, and what `replicate` raises.
    """
    is_file = path.suffix == SUFFIX
    wanted = Wanted(check_name(model, "model"), spec, max_shard_bytes, options_for_files(**where), on_progress)
    part = path.with_name(path.name + PART)
    with _locked(path, part, is_file=is_file):
        deadline = time.monotonic() + timeout
        has_layout = has_begun = is_told = False
        while True:
            try:
                laid = await loop_thread().run_here(layouts_of(wanted.options, wanted.model, spec, deadline))
                has_layout = True
                target = await loop_thread().run_here(_target(wanted, laid, part, deadline, is_file=is_file))
                has_begun = True
                received_bytes, _ = await loop_thread().run_here(fill(wanted, target, deadline))
                break
            except (VersionUnavailable, SourceLost) as error:
                may_come_back = has_begun or (has_layout and isinstance(error, VersionUnavailable))
                if not may_come_back or time.monotonic() + AGAIN_S >= deadline:
                    raise
                if not is_told:
                    _log.warning("%s; the pull goes on when a worker has it again", error)
                is_told = True
                await asyncio.sleep(AGAIN_S)
        await asyncio.to_thread(_finish, target.checkpoint, part, path, is_file)
    names = (path,) if is_file else tuple(path / file.name for file in target.checkpoint.files)
    return Pulled(target.version, names, target.checkpoint.size_bytes, received_bytes)


class Wanted(NamedTuple):
    """What a pull was asked for."""

    model: str
    spec: Spec
    max_shard_bytes: int | None
    options: Options
    on_progress: Callable[[int, float, int], None]


class Target(NamedTuple):
    """A version, its files, and the memory that is filled."""

    version: int
    checkpoint: Checkpoint
    registration: Registration


async def _target(wanted: Wanted, laid: Laid, part: Path, deadline: float, *, is_file: bool) -> Target:
    """The files for that version, mapped. In the worker loop."""
    options, model = wanted.options, wanted.model
    if not laid.cut_by and len(laid.layouts) > 1:
        text = f"{model} has {len(laid.layouts)} shards, published without boxes: which tensor is whole is not known"
        raise UsageError(text, hint="register with boxes= on the trainer")
    layout = await whole_layout_of(options, model, laid, deadline) if laid.cut_by else laid.layouts[0]
    metadata = await metadata_of(options, model, laid.version, deadline)
    checkpoint, aliases = files_for(layout, metadata, wanted.max_shard_bytes, is_file=is_file)

    def prepare() -> Target:
        paths = [part] if is_file else [part / file.name for file in checkpoint.files]
        may_have = _make_files(checkpoint, paths)
        memory = placed(checkpoint, paths, is_writable=True)
        described = [replace(memory[aliases.get(each.name, each.name)], name=each.name) for each in layout.tensors]
        found = register_memory(described, has_boxes=bool(laid.cut_by), may_have=may_have)
        if not laid.cut_by and found.layout_digest != layout.digest():
            raise UsageError(
                f"tensors of {model} share memory in a way that files cannot", hint="publish with boxes={}"
            )
        return Target(laid.version, checkpoint, found)

    return await in_thread(prepare, name="files")


def files_for(
    layout: Layout, metadata: Mapping[str, Json], max_shard_bytes: int | None, *, is_file: bool = False
) -> tuple[Checkpoint, Mapping[str, str]]:
    """The files for a layout, and which of its tensors are the memory of another one (tied weights).

    Raises `UsageError` naming a tensor that a file cannot have.
    """
    aliases, tensors = aliases_in(layout), []
    for each in layout.tensors:
        if each.dtype not in CODES or each.strides != contiguous_strides(each.shape):
            what = f"dtype {each.dtype}" if each.dtype not in CODES else f"strides {list(each.strides)}"
            raise UsageError(f"tensor {each} has {what}, which no safetensors file has", hint="publish with boxes={}")
        if each.name not in aliases:
            tensors.append(Tensor(each.name, each.dtype, each.shape))
    found = unpacked(metadata, tensors) if max_shard_bytes is None else None
    if found is None or (is_file and len(found.files) > 1):
        most = layout.size_bytes if is_file else max_shard_bytes or MAX_SHARD_BYTES
        found = cut(tensors, most, aliases)
    return found, aliases


def aliases_in(layout: Layout) -> Mapping[str, str]:
    """Names of tensors that are the memory of an earlier one (tied weights), and the name of that one."""
    found: dict[str, str] = {}
    first: dict[tuple[int, str, tuple[int, ...]], str] = {}
    for each in layout.tensors:
        name = (
            first.setdefault((each.offset_bytes, each.dtype, each.shape), each.name) if each.size_bytes else each.name
        )
        if name != each.name:
            found[each.name] = name
    return found


def changed_since(registration: Registration, shown: bytes, root: Digest) -> list[str]:
    """Names of tensors that are not what an encoded manifest says of them. Blocks. Raises `CorruptTransfer`."""
    if not is_tiled(root):
        manifest = decode_manifest(shown)
        if manifest.root() != root:
            raise CorruptTransfer("the manifest has another root than the version")
        return tensors_of(registration.layout, manifest, changed_chunks(registration, manifest))
    shard = decode_tiled_shard(shown, root)
    tiles = tiles_of(shard.table, shard.grid)
    if registration.table is None or layout_digest(registration.table) != shard.manifest.layout:
        raise CorruptTransfer("the manifest is of other tensors")
    known = TiledVersion(shard, tiles, registration.size_bytes, 1)
    return known.names(known.changed(registration), registration)


def _make_files(checkpoint: Checkpoint, paths: Sequence[Path]) -> bool:
    """Files of the right size with their headers. Returns whether one of them was there already."""
    was_there = False
    for file, path in zip(checkpoint.files, paths, strict=True):
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab"):
                pass
            with path.open("r+b") as opened:
                if (
                    os.fstat(opened.fileno()).st_size == file.size_bytes
                    and opened.read(len(file.header)) == file.header
                ):
                    was_there = True
                    continue
                opened.truncate(0)
                opened.seek(0)
                opened.write(file.header)
                opened.flush()
                os.posix_fallocate(opened.fileno(), 0, file.size_bytes)  # a full disk is an error here, not later
        except OSError as error:
            raise UsageError(f"{path} of {file.size_bytes} B cannot be written: {error.strerror or error}") from error
    return was_there


async def fill(wanted: Wanted, target: Target, deadline: float) -> tuple[int, Known]:
    """Read all that is missing. Returns how many bytes came, and the manifest. In the worker loop."""
    name, options = f"pull-{uuid4().hex[:12]}", wanted.options
    client = await open_client(wanted.model, name, 0, 1, False, options, deadline, is_passing=True)
    watching = asyncio.ensure_future(_watch(client, wanted, target))
    try:
        await client.register(target.registration, deadline)
        await client.operate("replicate", target.version, deadline)
        manifest = client.manifest_held
        assert manifest is not None, "a version is held, and nothing says what it is"
        return client.statistics()["received_bytes"], manifest
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close(min(deadline, time.monotonic() + LEAVE_S))


async def _watch(client: Client, wanted: Wanted, target: Target) -> None:
    while True:
        found = client.progress
        if found is not None and found.total_bytes:
            part = found.done_bytes / found.total_bytes
            wanted.on_progress(target.version, part, target.checkpoint.size_bytes)
        await asyncio.sleep(0.1)


def _finish(checkpoint: Checkpoint, part: Path, path: Path, is_file: bool) -> None:
    """All is verified: on disk with it, and under its name."""
    paths = [part] if is_file else [part / file.name for file in checkpoint.files]
    for file, each in zip(checkpoint.files, paths, strict=True):
        found = read_file(each)
        assert found.tensors == file.tensors, f"{each} has another header than was written"
        _sync(each)
    if not is_file:
        for other in part.iterdir():  # of an earlier pull of another version
            if other not in paths:
                other.unlink()
        if checkpoint.about is not None:
            (part / checkpoint.index_name).write_bytes(index_of(checkpoint))
            _sync(part / checkpoint.index_name)
        _sync(part)
    part.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_empty(part: Path) -> None:
    """What a pull leaves that has written nothing."""
    with contextlib.suppress(OSError):
        if part.is_dir():
            part.rmdir()
        elif not part.stat().st_size:
            part.unlink()


@scope
def _locked(path: Path, part: Path, *, is_file: bool) -> Iterator[None]:
    """PATH is free, and no other pull writes there meanwhile. Raises `UsageError`."""
    if path.exists() and (is_file or not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists already", hint="remove it, or pull to another path")
    try:
        if is_file:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
        else:
            part.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{part} cannot be written: {error.strerror or error}") from error
    try:
        is_ours = False
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        if not is_ours:
            raise UsageError(f"another pull writes {part}")
        try:
            yield
        except BaseException:
            _remove_empty(part)
            raise
    finally:
        os.close(descriptor)
