"""Questions to a server over plain HTTP, from processes that need not be workers."""

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import NamedTuple, TypeVar, cast

import aiohttp
import msgspec

from ..memory.registration import Registration
from ..protocol.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    GroupIncomplete,
    GroupMismatch,
    InvariantViolation,
    Refused,
    ServerUnreachable,
    SourceLost,
    TensorHubError,
    UsageError,
    VersionUnavailable,
    error_from_code,
    printable,
)
from ..protocol.events import EventsView
from ..protocol.manifest import Json, Layout, decode_layout, decode_manifest, decode_metadata
from ..protocol.messages import Spec, parse_spec
from ..protocol.names import Decoder, Digest, Undecodable, Version, WorkerId, decoded, is_tiled, plain, plain_number
from ..protocol.status import DescribedView, ForgetView, HeldView, LayoutsView, LayoutView, Status, TensorView
from ..reshard.read import tied, whole_layout
from ..transport.base import ByteStream, Sink
from ..transport.ranges import Batches
from ..transport.tcp.reader import Job, TcpRead
from ..transport.tcp.settings import TcpSettings
from .config import MAX_SHARDS, OTHER_HOST, Options, with_own_token
from .connection import CONNECT_S, ELSEWHERE_S, STATUSES, http_session, retry_delay_s, unreached, why_away
from .content import key_of
from .loops import hand_over, in_thread

# Numbers of steps come out of numpy, and names out of enums.


MAX_DIGITS = 100  # of a text that is looked at as a number: Python itself refuses thousands


def plain_spec(spec: Spec) -> Spec:
    """A spec as nothing but an int or a str, where it is one by another name (numpy.int64, numpy.str_, an enum's)."""
    given = plain_number(spec)
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    return plain(given) if isinstance(given, str) else spec


def parse_number(version: Spec, what: str) -> Version:
    """Parses a version number. Raises `UsageError`, which names what needs a number."""
    named = plain_spec(version)
    found = parse_spec(named) if isinstance(named, int) and not isinstance(named, bool) else None
    if found is None:
        raise UsageError(f"{what} needs a version number, not {version!r}", hint="an integer, for example 7")
    return found


def spec_of_text(text: str) -> Spec:
    """A spec as it stands in an address or a reference. Raises `UsageError`."""
    spec: Spec = int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else text
    parse_spec(spec)
    return spec


# A question ends by its deadline. A server that is away is asked again until then.


SIBLING_AGAIN_S = 0.05  # the first time; a sibling registers soon
MAX_SIBLING_AGAIN_S = 1.0
ON_ALL_SHARDS = "see that every shard runs, then call again on all of them"
LONG_POLL_S = 20.0  # below the minute after which a proxy may cut an idle connection
ANSWER_S = 0.2  # before the deadline, so that what is missing is known when time runs out
HERE = "`tensorhub status` shows which models and versions there are; latest is the newest"
MAX_ANSWER_BYTES = 256 * 1024 * 1024  # the status of 20,000 workers takes some 20 MiB

T = TypeVar("T")
Question = Mapping[str, str]

_status = msgspec.json.Decoder(Status)


class VersionExists(msgspec.Struct, frozen=True):
    """The answer of `/v1/wait` and `/v1/next_version`; None: not yet."""

    version: int | None


_exists = msgspec.json.Decoder(VersionExists)
_held = msgspec.json.Decoder(HeldView)
_events = msgspec.json.Decoder(EventsView)
_forgotten = msgspec.json.Decoder(ForgetView)
_layouts = msgspec.msgpack.Decoder(LayoutsView)
_described = msgspec.msgpack.Decoder(DescribedView)


_answered: dict[str, int] = {}  # by the addresses of a server: which of them has answered last


class _Away(Exception):
    """The server did not answer this time."""


async def fetch_status(options: Options, *, model: str, deadline: float) -> Status:
    """The whole picture, or that of one model. Raises `ServerUnreachable`, `Refused`."""
    async with http_session() as http:
        params = {"model": model} if model else {}
        try:
            async with asyncio.timeout_at(deadline):
                return decoded(_status, await _get(http, options, "/v1/status", params))
        except (_Away, TimeoutError, Undecodable) as error:
            raise _unreachable(options, str(error)) from error


async def available_versions(options: Options, model: str, deadline: float) -> list[int]:
    """The versions of a model that exist and are not lost, newest first. Waits for a server that is away or listens."""
    await wait_for_number(options, model, deadline)  # it is answered once the server knows all versions of the model
    status = await fetch_status(options, model=model, deadline=deadline)
    versions = [found for each in status.models for found in each.versions]
    return [found.version for found in versions if found.is_complete and not found.is_lost]


async def check_held(options: Options, model: str, version: Version, deadline: float) -> None:
    """Raises `VersionUnavailable` unless a worker holds the version, in a buffer or a host copy."""
    status = await fetch_status(options, model=model, deadline=deadline)
    known = [found for each in status.models for found in each.versions]
    for found in known:
        if found.version == version and (found.holders or found.host_copies):
            return
    held = ", ".join(str(found.version) for found in known if found.holders or found.host_copies) or "none"
    text = f"no worker holds version {version} of {model}, so it cannot be kept"
    raise VersionUnavailable(text, hint=f"held now: {held}")


async def wait_for_version(options: Options, model: str, spec: Spec, deadline: float) -> Version:
    """Until the version, or a newer one, exists; for "latest", any; for "latest-N", more than N of them."""
    parse_spec(spec)
    asked = _Asked(options, f"wait_for({spec!r}) of {model}", deadline)
    found = await asked.until(
        "/v1/wait", {"model": model, "spec": str(spec)}, _exists, lambda it: it.version is not None
    )
    if found is None or found.version is None:
        raise asked.late("this version was not published", "is the trainer running?")
    return Version(found.version)


async def wait_for_number(options: Options, model: str, deadline: float) -> Version:
    """The lowest number that is not taken. Raises `ServerUnreachable`, `DeadlineExceeded`."""
    asked = _Asked(options, f"next_version({model!r})", deadline)
    found = await asked.until("/v1/next_version", {"model": model}, _exists, lambda it: it.version is not None)
    if found is None:
        raise _unreachable(options, asked.why)
    if found.version is None:
        why = "the reference server has restarted, and listens to what those who lived have to say"
        raise asked.late(why, "ask again: it listens for one lease at most")
    return Version(found.version)


async def fetch_events(options: Options, after: int, model: str, deadline: float, *, follow: bool) -> EventsView:
    """The events after that number. `follow`: waits for one, also while the server is away.

    Raises `ServerUnreachable`, `Refused`.
    """
    question = {"after": str(after), "model": model, "follow": str(int(follow))}
    if follow:
        asked = _Asked(options, "events()", deadline)
        found = await asked.until("/v1/events", question, _events, lambda _: True)
        if found is None:
            raise _unreachable(options, asked.why)
        return found
    async with http_session() as http:
        try:
            async with asyncio.timeout_at(deadline):
                return decoded(_events, await _get(http, options, "/v1/events", question))
        except (_Away, TimeoutError, Undecodable) as error:
            raise _unreachable(options, str(error)) from error


async def wait_for_holders(
    options: Options, model: str, asker: str, version: Version, fraction: float, deadline: float
) -> tuple[str, ...]:
    """Until that fraction of the other replicas hold the version or a newer one. Returns their names."""
    asked = _Asked(options, f"wait_held({version}, {fraction:g}) of {model}", deadline)
    question = {"model": model, "replica": asker, "version": str(version), "fraction": repr(fraction)}
    found = await asked.until("/v1/held", question, _held, lambda it: it.is_enough)
    if found is None or not found.is_enough:
        hint = "`tensorhub status` shows which versions there are, and what the replicas do"
        raise asked.late(found.waits_for if found is not None else "", hint)
    return found.holders


async def wait_for_description(
    options: Options, model: str, spec: Spec, shard: int, deadline: float
) -> tuple[DescribedView, Layout]:
    """Waits for the description of that shard of the version.

    Raises `VersionUnavailable`, `ServerUnreachable`, `DeadlineExceeded`, `UsageError`.
    """
    parse_spec(spec)
    asked = _Asked(options, f"a description of {model}@{spec}", deadline)
    question = {"model": model, "spec": str(spec), "shard": str(shard)}
    found = await asked.until("/v1/described", question, _described, lambda it: it.is_final)
    if found is None:
        raise _unreachable(options, asked.why)
    if found.failure is not None and not found.is_final:
        raise asked.late(found.failure.message, "ask again")
    if found.failure is not None:
        hint: str | None = found.failure.hint
        if found.failure.code == VersionUnavailable.code and isinstance(spec, int):
            hint = HERE  # no number is waited for here, as replicate() may
        raise error_from_code(found.failure.code, found.failure.message, hint=hint or None)
    try:
        if not 1 <= found.shards <= MAX_SHARDS:
            raise UsageError(f"a shard of {found.shards}")
        return found, decode_layout(found.layout)
    except UsageError as error:
        holders = ", ".join(source.worker for source in found.sources[:3]) or "no worker"
        text = f"shard {shard} of version {found.version} of {model} is no layout: {error}; it is held by {holders}"
        raise CorruptTransfer(text, hint="load another version, and look at its publisher") from error


async def fetch_layouts(options: Options, model: str, deadline: float, *, replica: str = "") -> LayoutsView:
    """The layouts of a model's living replicas, and the known shards of one. Raises `ServerUnreachable`."""
    asked = _Asked(options, f"the layouts of {model}", deadline)
    found = await asked.until("/v1/layouts", {"model": model, "replica": replica}, _layouts, lambda _: True)
    if found is None:
        raise _unreachable(options, asked.why)
    if not all(0 <= view.boxes < len(found.boxes) for view in found.shards):
        raise _unreachable(options, "it names boxes that it does not send")
    return found


async def siblings(
    options: Options, me: WorkerId, shards: int, registration: Registration, deadline: float, *, what: str
) -> LayoutsView:
    """All layouts, once the server has heard of every shard of this replica, and of this one as it is now.

    `what` it is asked for is said in errors: they are those of `cut`.
    """
    pause_s, began, absent_since = SIBLING_AGAIN_S, time.monotonic(), time.monotonic()
    while True:
        found = await fetch_layouts(options, me.model, deadline, replica=me.replica)
        mine = {view.shard: view for view in found.shards if view.replica == me.replica}
        is_heard = me.shard in mine and found.boxes[mine[me.shard].boxes] == registration.boxes
        missing = [shard for shard in range(shards) if shard not in mine]
        if is_heard and not missing:
            break
        absent = [shard for shard in missing if shard not in found.here]
        if not absent or found.patience_s is None:
            absent_since = time.monotonic()
        elif found.missed or time.monotonic() >= absent_since + found.patience_s:
            why = found.missed or f"shards {absent} of {me.replica} were not there within {found.patience_s:.3g} s"
            raise GroupIncomplete(f"{what} of {me}: {why}", hint=ON_ALL_SHARDS)
        if time.monotonic() + pause_s >= deadline:
            why = f"shards {missing} of it have registered no tensors with boxes" if missing else "it was not heard"
            text = f"{what} of {me}: {why} within {time.monotonic() - began:.3g} s"
            raise GroupIncomplete(text, hint="all shards of a replica register, all with boxes or all without")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_SIBLING_AGAIN_S)
    others = {view.shards for view in mine.values()}
    if others != {shards}:
        raise GroupMismatch(f"shards of {me.replica} say that there are {sorted(others)} of them")
    return found


async def forget_numbers(options: Options, model: str, deadline: float) -> None:
    """Have the server forget the numbers of a model that no worker holds a version of.

    Raises `VersionConflict` naming the holders, `VersionUnavailable` for an unknown model, `ServerUnreachable`,
    `DeadlineExceeded`.
    """
    asked, question, pause_s = _Asked(options, f"to begin {model} anew", deadline), {"model": model}, SIBLING_AGAIN_S
    while True:
        found = await asked.until("/v1/numbers", question, _forgotten, lambda _: True, method="DELETE")
        if found is None:
            raise _unreachable(options, asked.why)
        if found.failure is not None:
            raise error_from_code(found.failure.code, found.failure.message, hint=found.failure.hint)
        if found.is_begun:
            return
        if time.monotonic() + pause_s >= deadline:
            raise asked.late(found.awaited, "do it again")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_SIBLING_AGAIN_S)


class _Asked:
    """One question, and how long its asker waits for the answer."""

    def __init__(self, options: Options, what: str, deadline: float) -> None:
        self.why = ""  # the server does not answer
        self._options, self._what, self._deadline = options, what, deadline
        self._began = time.monotonic()

    async def until(
        self,
        path: str,
        question: Question,
        decoder: Decoder[T],
        is_final: Callable[[T], bool],
        *,
        method: str = "GET",
    ) -> T | None:
        """The final answer, or the last one before the deadline, if any came."""
        attempt, found, answer_s = 0, None, min(ANSWER_S, (self._deadline - self._began) / 4)
        try:
            async with asyncio.timeout_at(self._deadline), http_session() as http:
                while True:
                    left_s = self._deadline - time.monotonic() - answer_s
                    asked = {**question, "timeout": f"{min(LONG_POLL_S, max(0.0, left_s)):.3f}"}
                    try:
                        found = decoded(decoder, await _get(http, self._options, path, asked, method))
                        self.why, attempt = "", 0
                        if is_final(found):
                            return found
                        if left_s <= 0.0:
                            await asyncio.sleep(answer_s / 2)  # what is missing is known; it may come yet
                    except (_Away, Undecodable) as error:
                        self.why, attempt = str(error), attempt + 1
                        await asyncio.sleep(retry_delay_s(attempt, random.random()))
        except TimeoutError:
            if found is None:
                self.why = self.why or "it does not answer"
            return found

    def late(self, missing: str, hint: str) -> DeadlineExceeded:
        """Time ran out, and that was missing; or the server was."""
        text = f"{self._what} did not end within {self._deadline - self._began:.3g} s"
        if self.why:
            missing, hint = unreached(self._options.server, self.why, hint="is it running?")
            text = f"{text}: {missing}"
        elif missing:
            text = f"{text}: {missing}"
        return DeadlineExceeded(text, hint=hint)


def _unreachable(options: Options, why: str) -> ServerUnreachable:
    text, hint = unreached(options.server, why or "it does not answer")
    return ServerUnreachable(text, hint=hint)


async def _get(
    http: aiohttp.ClientSession, options: Options, path: str, params: Question, method: str = "GET"
) -> bytes:
    """The answer of the first address that gives one, from the one that answered last."""
    addresses, first = options.server.split(","), _answered.get(options.server, 0)
    in_order = [*range(first, len(addresses)), *range(first)]
    for at in in_order:
        asked = replace(options, server=addresses[at])
        try:
            if len(addresses) > 1:  # an answer may take long, but a server that stands still never gives one
                await _get_from(http, asked, "/healthz", {}, "GET", most_s=ELSEWHERE_S)
            body = await _get_from(http, asked, path, params, method)
        except _Away:
            if at == in_order[-1]:
                raise
        else:
            _answered[options.server] = at
            return body
    raise InvariantViolation("the last address answers or raises")


async def _get_from(
    http: aiohttp.ClientSession,
    options: Options,
    path: str,
    params: Question,
    method: str,
    *,
    most_s: float | None = None,
) -> bytes:
    options = with_own_token(options)
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
    url = f"http://{options.server}{path}"
    patience = aiohttp.ClientTimeout(total=most_s, sock_connect=CONNECT_S, sock_read=LONG_POLL_S + CONNECT_S)
    try:
        async with http.request(method, url, params=params, headers=headers, timeout=patience) as answer:
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise _Away(f"its answer has more than {MAX_ANSWER_BYTES} B: is that a reference server?")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _Away(why_away(error)) from error
    if answer.status == 200:
        return bytes(body)
    raise _error(answer.status, bytes(body), options)


def _error(status: int, body: bytes, options: Options) -> Exception:
    text = printable(body[:500].decode(errors="replace").strip())
    if status == 401:
        text = "has another token than the one given" if options.token else "wants a token, and none was given"
        return Refused(f"{options.server} {text}", hint=OTHER_HOST)
    if status == 400:
        return UsageError(f"{options.server} does not understand the question: {text}")
    if status == 404:
        return TensorHubError(f"what answers at {options.server} is no reference server (HTTP 404)")
    return _Away(STATUSES.get(status, f"HTTP {status} {text}"))


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
    """A version, how each of its shards lies in memory, and the replicas that hold it with boxes, if any."""

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
    found, wrong = await fetch_layouts(options, model, deadline), ""
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
    """Fetches the metadata from the first holder whose manifest has the right root."""
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
    text = f"no holder of version {found.version} of {model} has shown its manifest"
    text = f"{text}: {'; '.join(wrong) or 'none serves by tcp'}"
    if time.monotonic() >= deadline:
        raise DeadlineExceeded(text, hint="retry with a longer timeout")
    raise SourceLost(
        text, hint="is there a way from here to the workers? A worker that replicates the version has it too"
    )


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
        from ..reshard.wire import decode_tiled_shard  # with numpy, which nothing else here needs

        found = decode_tiled_shard(manifest, Digest(self._root))
        self.metadata = found.manifest.metadata
        self.batches = replace(self.batches, source_bytes=found.table.size_bytes)
        return ()

    def wrong_tile(self, tile: int) -> TensorHubError:
        return CorruptTransfer(f"{self._endpoint} has sent a tile of which no byte was wanted")
