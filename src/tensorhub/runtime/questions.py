"""What anybody may ask a reference server over plain HTTP: how things are, and to be told when a version exists.

Each question ends by its deadline; a server that is away is asked again until then. It must never: need a session.
"""

import asyncio
import random
import time

import aiohttp
import msgspec

from ..core.errors import DeadlineExceeded, Refused, ServerUnreachable, TensorHubError, UsageError, VersionUnavailable
from ..core.messages import Spec
from ..core.names import Version
from ..core.snapshot import Status
from ..core.version_spec import parse_spec
from .config import Options
from .connection import CONNECT_S, retry_delay_s

LONG_POLL_S = 20.0  # below the minute after which a proxy may cut an idle connection
MOST_ANSWER_BYTES = 256 * 1024 * 1024  # the status of 20,000 workers takes some 20 MiB

_status = msgspec.json.Decoder(Status)


class VersionExists(msgspec.Struct, frozen=True):
    """The answer of `/v1/wait`; None: not yet."""

    version: int | None


_exists = msgspec.json.Decoder(VersionExists)


class _Away(Exception):
    """The server did not answer this time."""


async def fetch_status(options: Options, *, model: str, deadline: float) -> Status:
    """The whole picture, or that of one model. Raises `ServerUnreachable`, `Refused`."""
    async with aiohttp.ClientSession() as http:
        params = {"model": model} if model else {}
        try:
            async with asyncio.timeout_at(deadline):
                return _status.decode(await _get(http, options, "/v1/status", params))
        except (_Away, TimeoutError, msgspec.MsgspecError) as error:
            text = f"no reference server at {options.server}: {error or 'it does not answer'}"
            raise ServerUnreachable(text, hint="start one with `tensorhub serve`") from error


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
    began, attempt, why = time.monotonic(), 0, ""
    try:
        async with asyncio.timeout_at(deadline), aiohttp.ClientSession() as http:
            while True:
                asked = {"model": model, "spec": str(spec), "timeout": f"{LONG_POLL_S}"}
                try:
                    found = _exists.decode(await _get(http, options, "/v1/wait", asked))
                    why, attempt = "", 0
                    if found.version is not None:
                        return Version(found.version)
                except (_Away, msgspec.MsgspecError) as error:
                    why, attempt = str(error), attempt + 1
                    await asyncio.sleep(retry_delay_s(attempt, random.random()))
    except TimeoutError as error:
        text = f"wait_for({spec!r}) of {model} did not end within {time.monotonic() - began:.3g} s"
        if why:
            hint = "is it running?"
            raise DeadlineExceeded(f"{text}: no reference server at {options.server}: {why}", hint=hint) from error
        raise DeadlineExceeded(f"{text}: no such version was published", hint="is the trainer running?") from error


async def _get(http: aiohttp.ClientSession, options: Options, path: str, params: dict[str, str]) -> bytes:
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
    url = f"http://{options.server}{path}"
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=LONG_POLL_S + CONNECT_S)
    try:
        async with http.get(url, params=params, headers=headers, timeout=patience) as answer:
            body = await answer.content.read(MOST_ANSWER_BYTES)
            while chunk := await answer.content.read(MOST_ANSWER_BYTES):
                body += chunk
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _Away(str(error) or type(error).__name__) from error
    if answer.status == 200:
        return body
    raise _error(answer.status, body, options)


def _error(status: int, body: bytes, options: Options) -> Exception:
    text = body[:500].decode(errors="replace").strip()
    if status == 401:
        return Refused(f"{options.server} does not accept this token", hint="set token= or TENSORHUB_TOKEN")
    if status == 400:
        return UsageError(f"{options.server} does not understand the question: {text}")
    if status == 404:
        return TensorHubError(f"what answers at {options.server} is no reference server (HTTP 404)")
    return _Away(f"HTTP {status} {text}")
