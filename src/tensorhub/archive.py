"""Replicas without a GPU: versions held in host memory, and versions kept in an object store.

Rules:
1. `hold` has one buffer more than it keeps versions, so that a new version is whole before an old one goes.
2. An archived version is its safetensors files and, written last, the object `manifest`. Without that object it is no
   version. It has the layout, and a digest of each chunk as the publisher made them.
3. What is read back is compared with those digests before it is published. What differs is refused, and the object is
   named.
4. A version goes from and to the store through files in `staging`, so that neither way takes memory of its size.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from . import aio, files
from .memory.describe import Described
from .memory.host_memory import Footing, untouched
from .memory.registration import Registration, register_memory
from .protocol.errors import CorruptTransfer, SourceLost, UsageError, VersionConflict, VersionUnavailable
from .protocol.manifest import Manifest, decode_layout
from .protocol.names import Digest
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
    registration = await loop_thread().run_here(_memory(model, version, options, host_bytes))
    weights = await aio.join(model, f"{replica}-{len(held)}", 0, 1, True, options)
    held.append(_Held(weights, registration.size_bytes))
    await weights.take(registration)
    await weights.replicate(version)


async def _memory(model: str, version: int, options: Options, host_bytes: int | None) -> Registration:
    """Host memory for a version. In the worker loop."""
    deadline = asyncio.get_running_loop().time() + options.timeout_s
    laid = await layouts_of(options, model, version, deadline)
    if not laid.cut_by and len(laid.layouts) > 1:
        text = f"{model} has {len(laid.layouts)} shards, published without boxes: one replica cannot hold them"
        raise UsageError(text, hint="register with boxes= on the trainer")
    layout = await whole_layout_of(options, model, laid, deadline) if laid.cut_by else laid.layouts[0]
    if host_bytes is not None and layout.size_bytes > host_bytes:
        raise UsageError(f"version {version} of {model} has {layout.size_bytes} B, host_bytes allows {host_bytes} B")

    def make() -> Registration:
        Footing(layout.size_bytes, what=f"version {version} of {model}")
        address, owner = untouched(max(1, layout.size_bytes))
        described = [
            Described(
                *(
                    each.name,
                    each.dtype,
                    each.shape,
                    each.strides,
                    address + each.offset_bytes if each.size_bytes else 0,
                ),
                *(each.size_bytes, "cpu", address, owner),
            )
            for each in layout.tensors
        ]
        return register_memory(described, has_boxes=bool(laid.cut_by))

    return await in_thread(make, name="hold")


# --- Archive: an object store keeps versions, and gives them back.

MANIFEST = "manifest"
PART_BYTES = 16 << 20  # of an upload: a store takes 10,000 of them, so 160 GB in one file
AT_ONCE = 4  # parts of one upload


class Archived(msgspec.Struct, frozen=True):
    """The object `manifest` of an archived version."""

    version: int
    root: Digest
    has_boxes: bool
    layout: bytes
    manifest: bytes
    metadata: dict[str, Any]
    files: tuple[tuple[str, int], ...]  # names and sizes

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self.files)


class Store:
    """The archived versions of one model: objects below a URL. Blocks. Raises `UsageError` for a URL that is none."""

    def __init__(self, url: str, model: str) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import LocalStore, from_url
        except ModuleNotFoundError as error:
            raise UsageError("the package obstore is not installed", hint="pip install 'tensorhub[archive]'") from error
        self._obstore, self.url, self._model = obstore, url, model
        self.errors: type[Exception] = BaseError
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
        found = []
        for batch in self._obstore.list(self._store, prefix=f"{self._model}/"):
            for each in batch:
                parts = each["path"].split("/")
                if parts[-1] == MANIFEST and parts[-2].isdecimal():
                    found.append(int(parts[-2]))
        return sorted(found, reverse=True)

    def manifest(self, version: int) -> Archived:
        """Raises `CorruptTransfer` for one that is malformed."""
        name = self.name(version, MANIFEST)
        data = bytes(self._obstore.get(self._store, name).bytes())
        try:
            return msgspec.msgpack.decode(data, type=Archived)
        except msgspec.MsgspecError as error:
            raise CorruptTransfer(f"{self.url}/{name} is no manifest: {error}") from error

    def write(self, folder: Path, archived: Archived) -> None:
        """Files first, the manifest last."""
        for file, _ in archived.files:
            name = self.name(archived.version, file)
            self._obstore.put(self._store, name, folder / file, chunk_size=PART_BYTES, max_concurrency=AT_ONCE)
        self._obstore.put(self._store, self.name(archived.version, MANIFEST), msgspec.msgpack.encode(archived))

    def read(self, archived: Archived, folder: Path) -> None:
        """All files of a version, not verified yet. Raises `CorruptTransfer` for one of another length."""
        for file, size_bytes in archived.files:
            name = self.name(archived.version, file)
            with (folder / Path(file).name).open("wb") as target:
                for chunk in self._obstore.get(self._store, name).stream(min_chunk_size=PART_BYTES):
                    target.write(chunk)
                if target.tell() != size_bytes:
                    text = f"{self.url}/{name} has {target.tell()} B, and {size_bytes} B were archived"
                    raise CorruptTransfer(text, hint="an older version may be whole")

    def remove(self, version: int) -> None:
        """The manifest first: what is left of it is no version."""
        self._obstore.delete(self._store, self.name(version, MANIFEST))
        prefix = self.name(version, "")
        names = [each["path"] for batch in self._obstore.list(self._store, prefix=prefix) for each in batch]
        self._obstore.delete(self._store, names)


async def archive(
    model: str,
    url: str,
    *,
    every: int = 10,
    keep: int = 5,
    serves: bool = False,
    staging: Path | None = None,
    replica: str = "archive",
    on_change: Callable[[str], None] = lambda text: None,
    **where: Unpack[LoadArguments],
) -> None:
    """Write each `every`-th version to an object store, and keep the newest `keep` there, until it is cancelled.

    The first is the newest version that there is, the next one is at least `every` higher. `serves`: while no worker
    holds any version of the model, publish the newest archived one, until another replica holds it. Raises
    `UsageError`, and what `open` raises.
    """
    options = files.options_for_files(**where)
    view, store = aio.View(options, loop_thread()), await asyncio.to_thread(Store, url, model)
    known = await asyncio.to_thread(store.versions)
    last, refused = known[0] if known else None, set[int]()
    while True:
        try:
            await view.next_version(model)  # answered once a restarted server knows all versions
            there = [each for each in await view.versions(model) if each.holders or each.host_copies]
            newest = max((each.version for each in there if each.is_complete), default=None)
            if newest is not None and (last is None or newest >= last + every):
                with _staged(staging) as folder:
                    await _write(store, model, newest, folder, **where)
                last = newest
                on_change(f"version {newest} is in {url}")
                for old in (await asyncio.to_thread(store.versions))[keep:]:
                    await asyncio.to_thread(store.remove, old)
            elif serves and not there:
                known = await asyncio.to_thread(store.versions)
                wanted = next((version for version in known if version not in refused), None)
                if wanted is not None:
                    try:
                        with _staged(staging) as folder:
                            await _serve(store, model, wanted, folder, replica, on_change, **where)
                    except (CorruptTransfer, VersionConflict):
                        refused.add(wanted)
                        raise
        except (CorruptTransfer, VersionConflict, VersionUnavailable, SourceLost, store.errors) as error:
            _log.error("%s: %s", model, error)
            on_change(str(error))
        await asyncio.sleep(LOOK_S)


@contextlib.contextmanager
def _staged(staging: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tensorhub-archive-", dir=staging))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _write(store: Store, model: str, version: int, folder: Path, **where: Unpack[LoadArguments]) -> None:
    found = await files.pull(model, folder / "version", version, **where)
    shown = found.manifest.encode()
    names = tuple((path.name, path.stat().st_size) for path in found.paths)
    about = Archived(
        *(version, found.manifest.root(), not isinstance(found.manifest, Manifest), found.layout.encode(), shown),
        *(found.metadata, names),
    )
    await asyncio.to_thread(store.write, folder / "version", about)


async def _serve(
    store: Store,
    model: str,
    version: int,
    folder: Path,
    replica: str,
    on_change: Callable[[str], None],
    **where: Unpack[LoadArguments],
) -> None:
    archived = await asyncio.to_thread(store.manifest, version)
    await asyncio.to_thread(store.read, archived, folder)
    checkpoint, registration = await asyncio.to_thread(verified, store, archived, folder)
    on_change(f"version {version} is verified, and served from {store.url}")
    await files.serve(model, checkpoint, registration, archived.metadata, version=version, replica=replica, **where)
    on_change(f"version {version} is held by another replica")


def verified(store: Store, archived: Archived, folder: Path) -> tuple[files.Checkpoint, Registration]:
    """The files of an archived version as memory. Raises `CorruptTransfer` naming the object that is not right."""
    layout = decode_layout(archived.layout)
    aliases = files.aliases_in(layout)
    try:
        checkpoint = files.Checkpoint(tuple(files.read_file(folder / name) for name, _ in archived.files), None)
        memory = files.placed(checkpoint, [folder / name for name, _ in archived.files], is_writable=False)
        described = [replace(memory[aliases.get(each.name, each.name)], name=each.name) for each in layout.tensors]
        registration = register_memory(described, has_boxes=archived.has_boxes)
    except (UsageError, KeyError) as error:
        raise CorruptTransfer(f"{store.url}/{store.name(archived.version, '')}: {error}") from error
    wrong = files.changed_since(registration, archived.manifest, archived.root)
    if wrong:
        first = aliases.get(wrong[0], wrong[0])
        file = next(file.name for file in checkpoint.files for each in file.tensors if each.name == first)
        text = f"{store.url}/{store.name(archived.version, file)} is not what was archived: tensor {wrong[0]!r} differs"
        raise CorruptTransfer(text, hint="an older version may be whole")
    return checkpoint, registration
