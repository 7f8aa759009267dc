"""Replicas without a GPU: versions held in host memory, and versions kept in an object store.

Rules:
1. `hold` has one buffer more than it keeps versions, so that a new version is whole before an old one goes.
2. An archived version is its safetensors files and, written last, the object `manifest`. Without that object it is no
   version. It begins with the SHA-256 of the rest, which has the version's number, its layout, and a digest of each
   chunk as the publisher made them.
3. What is read back is compared with those digests before it is published. What differs is refused, and the object is
   named.
4. A version goes between worker and store through host memory of its size, and parts of `PART_BYTES`. No disk is used.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack
from urllib.parse import urlsplit

import msgspec

from . import aio, files
from .memory.describe import Described
from .memory.host_memory import Footing, untouched
from .memory.registration import Registration, register_memory
from .memory.streams import host_view
from .protocol.errors import (
    CorruptTransfer,
    SourceLost,
    TensorHubError,
    Unavailable,
    UsageError,
    VersionConflict,
    VersionUnavailable,
)
from .protocol.manifest import Layout, Manifest, decode_layout
from .protocol.names import Digest
from .protocol.status import ModelView
from .runtime.config import LoadArguments, Options
from .runtime.loops import in_thread, loop_thread
from .runtime.questions import layouts_of, whole_layout_of

_log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two questions to the server
MAX_RETAIN = 8

# --- Hold: the newest versions in host memory.


async def hold(
    model: str,
    *,
    keep: int = 1,
    host_bytes: int | None = None,
    replica: str = "hold",
    on_change: Callable[[tuple[int, ...], int], None] = lambda versions, size_bytes: None,
    **where: Unpack[LoadArguments],
) -> None:
    """Hold the newest `keep` versions of a model in host memory, and serve them, until it is cancelled.

    It takes (`keep` + 1) times the model, or at most `host_bytes`: then an old version goes before a new one comes.
    Raises `HostMemoryFull`, `LayoutMismatch` where a later version has other tensors, and what `open` raises.
    """
    options = files.options_for_files(retain=min(keep, MAX_RETAIN), **where)
    view, held = aio.View(options, loop_thread()), list[_Held]()
    try:
        while True:
            there = [each.version for each in await view.versions(model) if each.is_complete and not each.is_lost]
            mine = [each.version for each in held]
            missing = [version for version in there[:keep] if version not in mine]
            if missing:
                with contextlib.suppress(VersionUnavailable, SourceLost):
                    await _hold(model, missing[0], held, keep + 1, host_bytes, replica, options)
                    versions = tuple(sorted((each.version for each in held if each.version >= 0), reverse=True))
                    on_change(versions, sum(each.size_bytes for each in held))
            await asyncio.sleep(LOOK_S)
    finally:
        await asyncio.gather(*(each.weights.close(timeout=files.LEAVE_S) for each in held), return_exceptions=True)


class _Held:
    """One buffer, which is a replica of its own."""

    def __init__(self, weights: aio.Weights, size_bytes: int) -> None:
        self.weights, self.size_bytes = weights, size_bytes

    @property
    def version(self) -> int:
        """-1: it holds none."""
        found = self.weights.version
        return -1 if found is None else found


async def _hold(
    model: str, version: int, held: list[_Held], most: int, host_bytes: int | None, replica: str, options: Options
) -> None:
    """Read a version into a new buffer, or into the one with the oldest version."""
    oldest = min(held, key=lambda each: each.version, default=None)
    has_room = len(held) < most and (
        host_bytes is None or oldest is None or (len(held) + 1) * oldest.size_bytes <= host_bytes
    )
    if oldest is not None and (oldest.version < 0 or not has_room):
        if oldest.version < version:
            await (oldest.weights.replicate(version) if oldest.version < 0 else oldest.weights.update(version))
        return
    registration = (await loop_thread().run_here(_memory(model, version, options, host_bytes))).registration
    weights = await aio.join(model, f"{replica}-{len(held)}", 0, 1, True, options)
    held.append(_Held(weights, registration.size_bytes))
    await weights.take(registration)
    await weights.replicate(version)


class _Memory(NamedTuple):
    """Host memory of a version, and the bytes of each tensor in it."""

    registration: Registration
    tensors: dict[str, memoryview]


async def _memory(model: str, version: int, options: Options, host_bytes: int | None) -> _Memory:
    """Host memory for a version that workers hold. In the worker loop."""
    deadline = asyncio.get_running_loop().time() + options.timeout_s
    laid = await layouts_of(options, model, version, deadline)
    if not laid.cut_by and len(laid.layouts) > 1:
        text = f"{model} has {len(laid.layouts)} shards, published without boxes: one replica cannot hold them"
        raise UsageError(text, hint="register with boxes= on the trainer")
    layout = await whole_layout_of(options, model, laid, deadline) if laid.cut_by else laid.layouts[0]
    if host_bytes is not None and layout.size_bytes > host_bytes:
        raise UsageError(f"version {version} of {model} has {layout.size_bytes} B, host_bytes allows {host_bytes} B")
    what = f"version {version} of {model}"
    return await in_thread(lambda: _allocated(layout, bool(laid.cut_by), what), name="hold")


def _allocated(layout: Layout, has_boxes: bool, what: str, *, may_have: bool = False) -> _Memory:
    """Raises `HostMemoryFull`."""
    size_bytes = max(1, layout.size_bytes)
    Footing(size_bytes, what=what)
    start, owner = untouched(size_bytes)
    described, tensors, memory = list[Described](), dict[str, memoryview](), host_view(start, size_bytes, owner)
    for each in layout.tensors:
        address = start + each.offset_bytes if each.size_bytes else 0
        facts = (each.name, each.dtype, each.shape, each.strides, address, each.size_bytes, "cpu", start, owner)
        described.append(Described(*facts))
        tensors[each.name] = memory[each.offset_bytes : each.offset_bytes + each.size_bytes]
    return _Memory(register_memory(described, has_boxes=has_boxes, may_have=may_have), tensors)


# --- Archive: an object store keeps versions, and gives them back.

MANIFEST = "manifest"
SHA256_BYTES = 32
OLDER = "an older version may be whole"
PART_BYTES = 16 << 20  # of an upload: a store takes 10,000 of them, so 160 GB in one file
AT_ONCE = 4  # parts of one upload
READ_S = 3600.0  # for a version from other workers
ALONE_S = 300.0  # without any worker of a model, until numbers that were lost are forgotten


class Archived(msgspec.Struct, frozen=True):
    """The object `manifest` of an archived version."""

    version: int
    root: Digest
    has_boxes: bool
    layout: bytes
    manifest: bytes
    metadata: dict[str, Any]
    files: tuple[files.File, ...]


class Store:
    """The archived versions of one model: objects below a URL. Blocks. Raises `UsageError` for a URL that is none."""

    def __init__(self, url: str, model: str) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import LocalStore, from_url
        except ModuleNotFoundError as error:
            raise UsageError(
                "the package obstore is not installed",
                hint="pip install 'tensorhub[archive]', or '.[archive]' in a clone",
            ) from error
        self._obstore, self.url, self._model = obstore, url, model
        self.errors = (BaseError, OSError)  # an object that is missing is a FileNotFoundError
        parts = urlsplit(url)
        try:
            if parts.scheme == "file":
                self._store: Any = LocalStore(parts.path, mkdir=True)
            else:
                self._store = from_url(url)  # credentials and endpoint come from the provider's own variables
        except (BaseError, ValueError) as error:
            raise UsageError(f"{url} is no object store: {error}", hint="file://, s3://, gs:// or az://") from error

    def name(self, version: int, file: str) -> str:
        """The path of an object below the URL."""
        return f"{self._model}/{version:012}/{file}"

    def versions(self) -> list[int]:
        """Versions that are whole, newest first: those with a manifest."""
        return sorted((version for version, names in self._folders().items() if MANIFEST in names), reverse=True)

    def _folders(self) -> dict[int, list[str]]:
        """Names of the objects of each version, whole or not."""
        found: dict[int, list[str]] = {}
        for batch in self._obstore.list(self._store, prefix=f"{self._model}/"):
            for each in batch:
                version, _, name = each["path"].removeprefix(f"{self._model}/").partition("/")
                if version.isdecimal():
                    found.setdefault(int(version), []).append(name)
        return found

    def manifest(self, version: int) -> Archived:
        """Raises `CorruptTransfer` for one that is malformed, was changed, or is of another version."""
        name = self.name(version, MANIFEST)
        data = bytes(self._obstore.get(self._store, name).bytes())
        digest, encoded = data[:SHA256_BYTES], data[SHA256_BYTES:]
        if hashlib.sha256(encoded).digest() != digest:
            raise CorruptTransfer(f"{self.url}/{name} is not what was archived: its SHA-256 differs", hint=OLDER)
        try:
            archived = msgspec.msgpack.decode(encoded, type=Archived)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptTransfer(f"{self.url}/{name} is no manifest: {error}", hint=OLDER) from error
        if archived.version != version:
            raise CorruptTransfer(f"{self.url}/{name} is the manifest of version {archived.version}", hint=OLDER)
        return archived

    def write(self, archived: Archived, memory: _Memory) -> None:
        """Files first, the manifest last."""
        for file in archived.files:
            name, parts = self.name(archived.version, file.name), _parts([file.header, *_tensors(file, memory)])
            self._obstore.put(self._store, name, parts, chunk_size=PART_BYTES, max_concurrency=AT_ONCE)
        encoded = msgspec.msgpack.encode(archived)
        digest = hashlib.sha256(encoded).digest()
        self._obstore.put(self._store, self.name(archived.version, MANIFEST), digest + encoded)

    def read(self, archived: Archived, memory: _Memory) -> None:
        """Fill the memory of a version, and compare it. Raises `CorruptTransfer` naming the object that is wrong."""
        for file in archived.files:
            name = f"{self.url}/{self.name(archived.version, file.name)}"
            header = bytearray(len(file.header))
            try:
                found = self._obstore.get(self._store, self.name(archived.version, file.name))
            except FileNotFoundError as error:
                raise CorruptTransfer(f"{name} is missing", hint=OLDER) from error
            if found.meta["size"] != file.size_bytes:
                text = f"{name} has {found.meta['size']} B, and {file.size_bytes} B were archived"
                raise CorruptTransfer(text, hint=OLDER)
            _scatter(found.stream(min_chunk_size=PART_BYTES), [memoryview(header), *_tensors(file, memory)])
            if header != file.header:
                raise CorruptTransfer(f"{name} is not what was archived: its header differs", hint=OLDER)
        wrong = files.changed_since(memory.registration, archived.manifest, archived.root)
        if wrong:
            first = files.aliases_in(memory.registration.layout).get(wrong[0], wrong[0])
            file = next(each for each in archived.files for tensor in each.tensors if tensor.name == first)
            name = f"{self.url}/{self.name(archived.version, file.name)}"
            raise CorruptTransfer(f"{name} is not what was archived: tensor {wrong[0]!r} differs", hint=OLDER)

    def prune(self, keep: int) -> None:
        """Keep the newest versions, and remove what an older one has left, whole or not."""
        whole = self.versions()
        for version in self._folders():
            if version < whole[0] and version not in whole[:keep]:
                self.remove(version)

    def remove(self, version: int) -> None:
        """The manifest first: what is left of it is no version."""
        self._obstore.delete(self._store, self.name(version, MANIFEST))
        prefix = self.name(version, "")
        names = [each["path"] for batch in self._obstore.list(self._store, prefix=prefix) for each in batch]
        self._obstore.delete(self._store, names)


def _tensors(file: files.File, memory: _Memory) -> list[memoryview]:
    return [memory.tensors[each.name] for each in file.tensors]


def _parts(pieces: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """The pieces, none of them longer than a part."""
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), PART_BYTES):
            yield view[at : at + PART_BYTES]


def _scatter(chunks: Iterator[Any], into: Sequence[memoryview]) -> None:
    """Copy bytes into memory, piece after piece."""
    pieces = iter(into)
    piece = next(pieces)
    for chunk in chunks:
        view = memoryview(chunk)
        while len(view):
            while not len(piece):
                piece = next(pieces)
            count = min(len(piece), len(view))
            piece[:count] = view[:count]
            piece, view = piece[count:], view[count:]


async def archive(
    model: str,
    url: str,
    *,
    every: int = 10,
    keep: int = 5,
    serves: bool = False,
    alone_s: float = ALONE_S,
    replica: str = "archive",
    on_change: Callable[[str], None] = lambda text: None,
    **where: Unpack[LoadArguments],
) -> None:
    """Write each `every`-th version to an object store, and keep the newest `keep` there, until it is cancelled.

    The first is the newest version that there is, the next one is at least `every` higher; 0: none is written. `serves`
    reads versions back, as `to_serve` says; after `alone_s` without any holder it forgets higher numbers that are lost.
    Raises `UsageError`, and what `open` raises.
    """
    options = files.options_for_files(**where)
    view, store = aio.View(options, loop_thread()), await asyncio.to_thread(Store, url, model)
    serving = _Serving(model, store, replica, options, on_change, alone_s)
    known = await asyncio.to_thread(store.versions)
    last = known[0] if known else None
    try:
        while True:
            try:
                await view.next_version(model)  # answered once a restarted server knows all versions
                found = next(iter((await view.status(model=model)).models), None)
                there = [each for each in found.versions if each.holders or each.host_copies] if found else []
                newest = max((each.version for each in there if each.is_complete), default=None)
                if every and newest is not None and (last is None or newest >= last + every):
                    await _write(store, view, model, newest, options)
                    last = newest
                    on_change(f"version {newest} is in {url}")
                    await asyncio.to_thread(store.prune, keep)
                elif serves:
                    await serving.step(found, await asyncio.to_thread(store.versions))
            except (CorruptTransfer, VersionConflict, Unavailable, SourceLost, *store.errors) as error:
                hint = f" ({error.hint})" if isinstance(error, TensorHubError) and error.hint else ""
                _log.error("%s: %s%s", model, error, hint)
            await asyncio.sleep(LOOK_S)
    finally:
        await serving.close()


async def _write(store: Store, view: aio.View, model: str, version: int, options: Options) -> None:
    """Read a version from other workers, and write it to the store."""
    metadata = await view.metadata(model, version)
    memory = await loop_thread().run_here(_memory(model, version, options, None))
    registration = memory.registration
    checkpoint, _ = files.files_for(registration.layout, metadata, None)
    wanted = files.Wanted(model, version, None, options, lambda *_: None)
    target = files.Target(version, checkpoint, registration)
    _, manifest = await loop_thread().run_here(files.fill(wanted, target, time.monotonic() + READ_S))
    has_boxes = not isinstance(manifest, Manifest)
    facts = (version, manifest.root(), has_boxes, registration.layout.encode(), manifest.encode(), metadata)
    await asyncio.to_thread(store.write, Archived(*facts, checkpoint.files), memory)


class ToServe(NamedTuple):
    """An archived version that is lacking."""

    version: int
    publishes: bool  # else it is held beside those that have it
    forgets: bool = False  # the server knows that number, or a higher one, of versions that are lost


def to_serve(found: ModelView | None, known: Sequence[int], site: str) -> ToServe | None:
    """Which archived version an archive reads back, and how. `known`: newest first.

    It publishes the newest one while no trainer is here, and either no worker holds any version, or the server has
    never had so high a number: a region has its own server. Else it holds the newest one that other sites hold, if its
    own site has none so new.
    """
    if not known:
        return None
    if found is None:
        return ToServe(known[0], True)
    workers = [each for replica in found.replicas for each in replica.workers]
    there = [each for each in found.versions if each.holders or each.host_copies]
    if not there or found.newest is None or known[0] > found.newest:
        forgets = found.newest is not None and known[0] <= found.newest
        return None if any(each.is_writer for each in workers) else ToServe(known[0], True, forgets)
    mine = [each for each in workers if each.site == site]
    here = [each.version for each in mine if each.version is not None and each.state == "holding"]
    newest = max([*here, *(copy for each in mine for copy in each.copies)], default=-1)
    whole = [each.version for each in there if each.is_complete]
    lacked = next((version for version in known if version in whole and version > newest), None)
    return ToServe(lacked, False) if site and lacked is not None else None


class _Serving:
    """What an archive has read back: in a site that lacks it, it holds the version until there is a newer one."""

    def __init__(
        self,
        model: str,
        store: Store,
        replica: str,
        options: Options,
        on_change: Callable[[str], None],
        alone_s: float,
    ) -> None:
        self._model, self._store, self._replica, self._options = model, store, replica, options
        self._on_change, self._alone_s = on_change, alone_s
        self._alone_since: float | None = None
        self._corrupt: set[int] = set()
        self._refused: dict[int, int | None] = {}  # by the server, while that was the newest number
        self._held: aio.Weights | None = None

    async def step(self, found: ModelView | None, known: Sequence[int]) -> None:
        """Serve a version, if one is lacking. Raises what reads and publishes raise."""
        wanted = to_serve(found, [each for each in known if each not in self._corrupt], self._options.site)
        newest = found.newest if found is not None else None
        if wanted is None or not wanted.forgets:
            self._alone_since = None
        if wanted is None or not self._may_begin(wanted, newest):
            return
        version = wanted.version
        try:
            await self.close()
            archived, memory = await asyncio.to_thread(self._read, version)
            self._on_change(f"version {version} of {self._store.url} is verified")
            if wanted.publishes:
                await self._publish(wanted, archived, memory)
            else:
                self._held = await aio.join(self._model, self._replica, 0, 1, True, self._options)
                await self._held.take(memory.registration)
                await self._held.replicate(version)
                self._on_change(f"version {version} is served")
        except CorruptTransfer:
            self._corrupt.add(version)
            raise
        except VersionConflict:
            self._refused[version] = newest
            raise

    def _may_begin(self, wanted: ToServe, newest: int | None) -> bool:
        """The server did not refuse the same before. Numbers are forgotten only after some time without a holder."""
        if not wanted.forgets:
            return self._refused.get(wanted.version, -1) != newest
        if self._alone_since is None:
            self._alone_since = time.monotonic()
            text = f"no worker holds a version of {self._model}: archived version {wanted.version} is served in"
            self._on_change(f"{text} {self._alone_s:g} s, or at once after `tensorhub rm {self._model}`")
        return time.monotonic() >= self._alone_since + self._alone_s

    async def _publish(self, wanted: ToServe, archived: Archived, memory: _Memory) -> None:
        """Publish the version, until another replica holds it."""
        if wanted.forgets:
            await aio.View(self._options, loop_thread()).begin_anew(self._model)
            self._alone_since = None
        is_told = False

        def tell(_: files.Pushed) -> None:
            nonlocal is_told
            if not is_told:
                self._on_change(f"version {wanted.version} is served")
            is_told = True

        await files.serve(
            *(self._model, files.Checkpoint(archived.files, None), memory.registration),
            *(archived.metadata, self._options),
            version=wanted.version,
            replica=self._replica,
            on_change=tell,
        )
        self._on_change(f"version {wanted.version} is held by another replica")

    def _read(self, version: int) -> tuple[Archived, _Memory]:
        """A version out of the store, verified."""
        archived = self._store.manifest(version)
        try:
            layout, what = decode_layout(archived.layout), f"version {version} of {self._model}"
            memory = _allocated(layout, archived.has_boxes, what, may_have=True)
            self._store.read(archived, memory)
        except (UsageError, KeyError) as error:
            raise CorruptTransfer(f"{self._store.url}/{self._store.name(version, MANIFEST)}: {error}") from error
        return archived, memory

    async def close(self) -> None:
        """Hold nothing any more."""
        held, self._held = self._held, None
        if held is not None:
            await held.close(timeout=files.LEAVE_S)
