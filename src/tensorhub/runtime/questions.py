"""Questions to a server over plain HTTP, and what a version is for a process that holds nothing of it."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TypeVar

import aiohttp
import msgspec

from ..protocol.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    Refused,
    ServerUnreachable,
    TensorHubError,
    UsageError,
    VersionUnavailable,
    error_from_code,
    printable,
)
from ..protocol.manifest import Layout, decode_layout
from ..protocol.messages import Spec, parse_spec
from ..protocol.names import Decoder, Undecodable, Version, decoded, plain, plain_number
from ..protocol.status import CutsView, DescribedView, HeldView, Status
from .config import MAX_SHARDS, OTHER_HOST, Options, with_own_token
from .connection import CONNECT_S, STATUSES, http_session, retry_delay_s, unreached, why_away

# --- What callers and their texts mean by a version, as the plain int or str that travels.
#
# Numbers of steps come out of numpy, and names out of enums. What is an integer or a text counts as one; anything
# else is left as it is, for `core.version_spec` to refuse.


MAX_DIGITS = 100  # of a text that is looked at as a number: Python itself refuses thousands


def plain_spec(spec: Spec) -> Spec:
    """A spec as nothing but an int or a str, where it is one by another name (numpy.int64, numpy.str_, an enum's)."""
    given = plain_number(spec)
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    return plain(given) if isinstance(given, str) else spec


def parse_number(version: Spec, what: str) -> Version:
    """The version that is named by its number. Raises `UsageError` that says what needs one."""
    named = plain_spec(version)
    found = parse_spec(named) if isinstance(named, int) and not isinstance(named, bool) else None
    if found is None:
        raise UsageError(f"{what} needs a version number, not {version!r}", hint="an integer, such as 7")
    return found


def spec_of_text(text: str) -> Spec:
    """A spec as it stands in an address or a reference. Raises `UsageError`."""
    spec: Spec = int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else text
    parse_spec(spec)
    return spec


# --- What anybody may ask a reference server over plain HTTP: how things are, and to be told when they are otherwise.
#
# Each question ends by its deadline; a server that is away is asked again until then. It must never: need a session.


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
_cuts = msgspec.msgpack.Decoder(CutsView)
_described = msgspec.msgpack.Decoder(DescribedView)


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
    """Raises `VersionUnavailable` unless somebody holds the version, in a buffer or a host copy."""
    status = await fetch_status(options, model=model, deadline=deadline)
    known = [found for each in status.models for found in each.versions]
    for found in known:
        if found.version == version and (found.holders or found.host_copies):
            return
    held = ", ".join(str(found.version) for found in known if found.holders or found.host_copies) or "none"
    text = f"nobody holds version {version} of {model}, so it cannot be kept"
    raise VersionUnavailable(text, hint=f"held now: {held}")


async def wait_for_version(options: Options, model: str, spec: Spec, deadline: float) -> Version:
    """Until the version, or a newer one, exists; for "latest", any; for "latest-N", more than N of them."""
    parse_spec(spec)
    asked = _Asked(options, f"wait_for({spec!r}) of {model}", deadline)
    found = await asked.until(
        "/v1/wait", {"model": model, "spec": str(spec)}, _exists, lambda it: it.version is not None
    )
    if found is None or found.version is None:
        raise asked.late("no such version was published", "is the trainer running?")
    return Version(found.version)


async def wait_for_number(options: Options, model: str, deadline: float) -> Version:
    """The lowest number that nobody has taken. Raises `ServerUnreachable`, `DeadlineExceeded`."""
    asked = _Asked(options, f"next_version({model!r})", deadline)
    found = await asked.until("/v1/next_version", {"model": model}, _exists, lambda it: it.version is not None)
    if found is None:
        raise _unreachable(options, asked.why)
    if found.version is None:
        why = "the reference server has restarted, and listens to what those who lived have to say"
        raise asked.late(why, "ask again: it listens for one lease at most")
    return Version(found.version)


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
    """What that shard of the version is.

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
            hint = HERE  # nobody waits here for a number, as replicate() may
        raise error_from_code(found.failure.code, found.failure.message, hint=hint or None)
    try:
        if not 1 <= found.shards <= MAX_SHARDS:
            raise UsageError(f"a shard of {found.shards}")
        return found, decode_layout(found.layout)
    except UsageError as error:
        holders = ", ".join(source.worker for source in found.sources[:3]) or "nobody that is left"
        text = f"shard {shard} of version {found.version} of {model} is no layout: {error}; it is held by {holders}"
        raise CorruptTransfer(text, hint="load another version, and look at its publisher") from error


async def fetch_cuts(options: Options, model: str, deadline: float, *, replica: str = "") -> CutsView:
    """How the living replicas of a model are cut, and who of one replica is there. Raises `ServerUnreachable`."""
    asked = _Asked(options, f"how {model} is cut", deadline)
    found = await asked.until("/v1/cuts", {"model": model, "replica": replica}, _cuts, lambda _: True)
    if found is None:
        raise _unreachable(options, asked.why)
    if not all(0 <= view.boxes < len(found.boxes) for view in found.shards):
        raise _unreachable(options, "it names boxes that it does not send")
    return found


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
    ) -> T | None:
        """The final answer, or the last one before the deadline, if any came."""
        attempt, found, answer_s = 0, None, min(ANSWER_S, (self._deadline - self._began) / 4)
        try:
            async with asyncio.timeout_at(self._deadline), http_session() as http:
                while True:
                    left_s = self._deadline - time.monotonic() - answer_s
                    asked = {**question, "timeout": f"{min(LONG_POLL_S, max(0.0, left_s)):.3f}"}
                    try:
                        found = decoded(decoder, await _get(http, self._options, path, asked))
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


async def _get(http: aiohttp.ClientSession, options: Options, path: str, params: Question) -> bytes:
    options = with_own_token(options)
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
    url = f"http://{options.server}{path}"
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=LONG_POLL_S + CONNECT_S)
    try:
        async with http.get(url, params=params, headers=headers, timeout=patience) as answer:
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
