"""What a version is, for somebody who holds nothing of it: its tensors from the server, its metadata from a holder.

The server has no metadata: it is in the manifest of whoever holds the version, under the root that the server names.
So the manifest is fetched over `tcp`, and not a byte of weights. It must never: believe a manifest of another root.
"""

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from ..protocol.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    InvariantViolation,
    SourceLost,
    TensorHubError,
    UsageError,
)
from ..protocol.manifest import Json, Layout, decode_manifest, decode_metadata
from ..protocol.messages import Spec
from ..protocol.names import Digest, is_tiled
from ..protocol.status import DescribedView, LayoutView, TensorView
from ..reshard.read import tied, whole_layout
from ..transport.base import ByteStream, Sink
from ..transport.ranges import Batches
from ..transport.tcp.reader import Job, TcpRead
from ..transport.tcp.settings import TcpSettings
from .config import Options
from .content import key_of
from .loops import hand_over, in_thread
from .questions import fetch_cuts, wait_for_description

SCHEME = "tcp://"
SOURCE_S = 5.0  # for one of several to answer
TRIES = 3  # all who were said to have it have left it meanwhile: others have it now
AGAIN_S = 0.3


async def layout_of(options: Options, model: str, spec: Spec, deadline: float) -> LayoutView:
    """The layout of every shard of one version; of one with boxes that of the whole, as `load` gives it."""
    while True:
        laid = await layouts_of(options, model, spec, deadline)
        version, layouts, is_whole = laid.version, laid.layouts, bool(laid.cut_by)
        try:
            if is_whole:
                layouts = [await whole_layout_of(options, model, laid, deadline)]
        except SourceLost:  # its replicas come and go
            if time.monotonic() + AGAIN_S >= deadline:
                raise
            await asyncio.sleep(AGAIN_S)
            continue
        shards = tuple(tuple(TensorView(t.name, t.dtype, t.shape) for t in layout.tensors) for layout in layouts)
        ties = tied(layouts[0]) if is_whole else ()
        return LayoutView(model, version, sum(layout.size_bytes for layout in layouts), shards, is_whole, ties)


class Laid(NamedTuple):
    """A version, how each of its shards lies in memory, and the replicas that have it cut with boxes, if it is."""

    version: int
    layouts: list[Layout]
    cut_by: tuple[str, ...]


async def layouts_of(options: Options, model: str, spec: Spec, deadline: float) -> Laid:
    """Of the version that the spec means now."""
    first, layout = await wait_for_description(options, model, spec, 0, deadline)
    others = range(1, first.shards)
    more = [await wait_for_description(options, model, first.version, shard, deadline) for shard in others]
    replicas = (source.worker.removeprefix(f"{model}/").rpartition("[")[0] for source in first.sources)
    cut_by = tuple(dict.fromkeys(replicas)) if is_tiled(Digest(first.root)) else ()
    return Laid(first.version, [layout, *(each for _, each in more)], cut_by)


async def whole_layout_of(options: Options, model: str, laid: Laid, deadline: float) -> Layout:
    """All global tensors of a version that was published with boxes, whole, one after the other.

    Raises `SourceLost` where no replica that has it is there in all its shards, `CorruptTransfer` where none of those
    that are has boxes that can be.
    """
    found, wrong = await fetch_cuts(options, model, deadline), ""
    for replica in laid.cut_by:
        mine = {view.shard: view for view in found.shards if view.replica == replica}
        if mine and len(mine) == next(iter(mine.values())).shards:
            boxes = [found.boxes[each.boxes] for each in mine.values()]
            try:
                return await in_thread(partial(whole_layout, boxes), name="layout")
            except UsageError as error:  # another replica may be what it says
                wrong = wrong or f"{model}/{replica} has sent boxes that cannot be: {error}"
    if wrong:
        raise CorruptTransfer(wrong, hint="load another version, and look at its publisher")
    text = f"no replica that has version {laid.version} of {model} is there with all its shards"
    raise SourceLost(text, hint="retry: one that is about to come or go is there, or gone, by then")


async def metadata_of(options: Options, model: str, spec: Spec, deadline: float) -> dict[str, Json]:
    """Of the version that the spec means now. All its shards say the same, so the first is asked."""
    for again in range(TRIES):
        found, _ = await wait_for_description(options, model, spec, 0, deadline)
        try:
            return decode_metadata(await _fetch_metadata(options, model, found, deadline))
        except SourceLost:
            if again == TRIES - 1 or time.monotonic() + AGAIN_S >= deadline:
                raise
            await asyncio.sleep(AGAIN_S)
    raise InvariantViolation("the last try returns or raises")


async def _fetch_metadata(options: Options, model: str, found: DescribedView, deadline: float) -> bytes:
    """From the first holder that gives a manifest with the right root."""
    wrong: list[str] = []
    for source in found.sources:
        key = key_of(model, found.version, 0, on_host=source.from_host)
        for endpoint in source.endpoints:
            if endpoint.startswith(SCHEME):
                try:
                    return await _read_metadata(options, endpoint, key, found.root, deadline)
                except TensorHubError as error:
                    wrong.append(f"{source.worker}: {error}")
        if time.monotonic() >= deadline:
            break
    text = f"nobody who holds version {found.version} of {model} has shown its manifest"
    text = f"{text}: {'; '.join(wrong) or 'nobody serves by tcp'}"
    if time.monotonic() >= deadline:
        raise DeadlineExceeded(text, hint="retry with a longer timeout")
    raise SourceLost(text, hint="is there a way from here to the workers? Whoever replicates the version has it too")


async def _read_metadata(options: Options, endpoint: str, key: str, root: str, deadline: float) -> bytes:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    sink = _TilesSink(endpoint, root) if is_tiled(Digest(root)) else _ManifestSink(endpoint, root)

    def end(error: TensorHubError | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    job = Job(TcpSettings(token=options.token), endpoint, key, cast(Sink, sink))
    read = TcpRead(job, lambda _: lambda error: hand_over(loop, end, error))
    read.start()
    try:
        async with asyncio.timeout_at(min(deadline, time.monotonic() + SOURCE_S)):
            await ended
    except TimeoutError:
        raise SourceLost(f"{endpoint} did not answer in time") from None
    finally:
        read.stop()
    if sink.metadata is None:
        raise SourceLost(f"{endpoint} was cut before it had shown its manifest")
    return sink.metadata


class _ManifestSink:
    """Takes the manifest with that root, and wants no chunk. It is a stream of nothing at the same time."""

    is_cross_site = False
    is_checking = True

    def __init__(self, endpoint: str, root: str) -> None:
        self.metadata: bytes | None = None
        self.size_bytes, self.chunk_bytes = 0, 1
        self._endpoint, self._root = endpoint, root

    @property
    def stream(self) -> ByteStream:
        return cast(ByteStream, self)

    def begin(self, manifest: bytes) -> Sequence[int]:
        found = decode_manifest(manifest)
        if found.root() != self._root:
            raise CorruptTransfer(f"{self._endpoint} has shown the manifest of something else")
        self.metadata, self.size_bytes, self.chunk_bytes = found.metadata, found.size_bytes, found.chunk_bytes
        return ()


class _TilesSink(_ManifestSink):
    """The same of content in tiles, of which it wants no piece."""

    def __init__(self, endpoint: str, root: str) -> None:
        super().__init__(endpoint, root)
        self.batches = Batches.of(array("q"), [], 0)

    def begin(self, manifest: bytes) -> Sequence[int]:
        from ..reshard.wire import decode_cut  # with numpy, which nothing else here needs

        found = decode_cut(manifest, Digest(self._root))
        self.metadata = found.manifest.metadata
        self.batches = replace(self.batches, source_bytes=found.table.size_bytes)
        return ()

    def wrong_tile(self, tile: int) -> TensorHubError:
        return CorruptTransfer(f"{self._endpoint} has sent a tile of which no byte was wanted")
