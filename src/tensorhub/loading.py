"""Tensors from the store alone: `tensorhub.load` and `tensorhub.load_shards`, and the same as coroutines.

Nothing of the caller's is registered, and nothing needs to be known before but the model's name.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Unpack
from uuid import uuid4

from .memory.host_memory import allocate
from .memory.registration import Registration, register
from .protocol.errors import UsageError, VersionUnavailable
from .protocol.layout import Box
from .protocol.manifest import Json, Layout
from .protocol.messages import Spec
from .runtime.client import Client
from .runtime.config import LoadArguments, Options, check_arguments, check_name, open_options, parse_seconds
from .runtime.loops import in_thread, loop_thread
from .runtime.opening import open_client
from .runtime.questions import layouts_of, spec_of_text, whole_layout_of
from .tracebacks import brief

if TYPE_CHECKING:
    from .memory.registration import type_of_tensor

    type_of_tensors = dict[str, type_of_tensor]
else:
    type_of_tensors = dict


LEAVE_S = 5.0  # for those who have begun to read from us meanwhile
LEAVE_SHARE = 0.1  # of the time for all of it, at most
AGAIN_S = 0.2  # the newest version was lost between two questions: the next one is about to come


class Loaded(type_of_tensors):
    """The tensors of one shard of a version, by name: a dict that says what it is a version of.

    Torch tensors on the host where torch is installed, numpy arrays elsewhere, of the dtypes, shapes and strides that
    the publisher registered. What shares memory there (tied weights) shares it here.
    """

    def __init__(self, tensors: type_of_tensors, model: str, version: int, metadata: dict[str, Json]) -> None:
        super().__init__(tensors)
        self.model, self.version, self.metadata = model, version, metadata

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self.model}@{self.version}>"


class Asked(NamedTuple):
    """What a caller of `load` wants, checked."""

    model: str
    spec: Spec
    options: Options
    deadline: float


def asked(reference: str, timeout: float | None, **where: Unpack[LoadArguments]) -> Asked:
    """Raises `UsageError` that names what is wrong."""
    model, at, text = reference.rpartition("@") if isinstance(reference, str) else ("", "", "")
    if not at:
        hint = 'load("policy@latest"), "policy@7" or "policy@latest-1"'
        raise UsageError(f"{reference!r} names no version of a model", hint=hint)
    spec = spec_of_text(text)
    check_arguments(where, LoadArguments)
    options = open_options(**where)
    seconds = options.timeout_s if timeout is None else parse_seconds(timeout, "timeout")
    return Asked(check_name(model, "model"), spec, options, time.monotonic() + seconds)


async def run(wanted: Asked, *, only_one: bool) -> list[Loaded]:
    """Runs in the worker loop."""

    def check(shards: int) -> None:
        if only_one and shards > 1:
            text = f"{wanted.model} has {shards} shards, each with tensors of its own"
            raise UsageError(text, hint="load_shards() returns a mapping for each of them")

    return await _fill_all(wanted.options, wanted.model, wanted.spec, wanted.deadline, check=check)


@brief
async def load_async(
    reference: str,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    **where: Unpack[LoadArguments],
) -> Loaded:
    """The tensors of a version, by name: `load("policy@latest")`, "policy@7", "policy@latest-1".

    A dict with `.version` and `.metadata`, in memory of its own: nothing is registered before, and nothing published
    after. Reads from a worker that holds the version, as any replica does, and blocks until all of it is there and
    verified. `timeout` is for all of that (300 s), the others are as of `open`. Raises `VersionUnavailable`,
    `ServerUnreachable`, `Refused`, what `replicate` raises, and `UsageError` for several shards that were published
    without boxes: see `load_shards`. A version with boxes comes as whole tensors, whatever its layout.
    """
    (found,) = await loop_thread().run_here(run(asked(reference, timeout, **where), only_one=True))
    return found


@brief
async def load_shards_async(
    reference: str,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    **where: Unpack[LoadArguments],
) -> list[Loaded]:
    """As `load`, of a model of any number of shards: the tensors of each of them, in order, all of one version."""
    return await loop_thread().run_here(run(asked(reference, timeout, **where), only_one=False))


@brief
def load(reference: str, *, timeout: float | None = None, **where: Unpack[LoadArguments]) -> Loaded:
    """Calls `tensorhub.aio.load`. Its docstring is copied below."""
    (found,) = _load(asked(reference, timeout, **where), f"load({reference!r})", only_one=True)
    return found


@brief
def load_shards(reference: str, *, timeout: float | None = None, **where: Unpack[LoadArguments]) -> list[Loaded]:
    """Calls `tensorhub.aio.load_shards`. Its docstring is copied below."""
    return _load(asked(reference, timeout, **where), f"load_shards({reference!r})", only_one=False)


load.__doc__, load_shards.__doc__ = load_async.__doc__, load_shards_async.__doc__


def _load(wanted: Asked, what: str, *, only_one: bool) -> list[Loaded]:
    return loop_thread().wait(run(wanted, only_one=only_one), deadline=wanted.deadline, what=what)


async def _fill_all(
    options: Options, model: str, spec: Spec, deadline: float, *, check: Callable[[int], None] = lambda shards: None
) -> list[Loaded]:
    """Every shard of the version that the spec means. `check` may object to how many there are."""
    options = dataclasses.replace(options, prefetch="never", retain=0, host_bytes=0)
    while True:
        laid = await layouts_of(options, model, spec, deadline)
        try:
            if laid.cut_by:  # however many shards it has: what they are parts of is whole here
                whole = await whole_layout_of(options, model, laid, deadline)
                return await _fill(options, model, laid.version, [whole], deadline, boxes={})
            check(len(laid.layouts))
            return await _fill(options, model, laid.version, laid.layouts, deadline)
        except VersionUnavailable:
            if isinstance(spec, int) or time.monotonic() + AGAIN_S >= deadline:
                raise
            await asyncio.sleep(AGAIN_S)  # "latest" is another one by now


async def _fill(
    options: Options,
    model: str,
    version: int,
    layouts: list[Layout],
    deadline: float,
    *,
    boxes: "Mapping[str, Sequence[Box]] | None" = None,
) -> list[Loaded]:
    made = await _allocated(layouts, boxes)
    replica, clients = f"load-{uuid4().hex[:12]}", list[Client]()
    leave_s = min(LEAVE_S, LEAVE_SHARE * (deadline - time.monotonic()))
    try:
        for shard, (_, registration) in enumerate(made):
            till_s = deadline - leave_s
            opening = open_client(model, replica, shard, len(made), False, options, till_s, is_passing=True)
            clients.append(await opening)
            await clients[-1].register(registration, till_s)
        await _replicate(clients, version, deadline - leave_s)
        said = [client.metadata or {} for client in clients]
    finally:
        leaving = (client.close(time.monotonic() + leave_s) for client in clients)
        await asyncio.gather(*leaving, return_exceptions=True)
    return [Loaded(tensors, model, version, words) for (tensors, _), words in zip(made, said, strict=True)]


async def _allocated(
    layouts: list[Layout], boxes: "Mapping[str, Sequence[Box]] | None" = None
) -> "list[tuple[dict[str, type_of_tensor], Registration]]":
    """Uninitialised tensors for each shard, and what `register` makes of them."""
    return await in_thread(lambda: [_made_to_load(layout, boxes) for layout in layouts], name="allocate")


def _made_to_load(
    layout: Layout, boxes: "Mapping[str, Sequence[Box]] | None"
) -> "tuple[dict[str, type_of_tensor], Registration]":
    """Called in a thread: the first import of torch takes seconds."""
    tensors = allocate(layout)
    registration = register(tensors, boxes=boxes)
    if boxes is None and registration.layout_digest != layout.digest():
        raise UsageError(f"tensors laid out as {len(layout.tensors)} published ones cannot be made here")
    return tensors, registration


async def _replicate(clients: list[Client], version: int, deadline: float) -> None:
    """On all shards at once. One that fails fails for all of them."""
    calls = [asyncio.ensure_future(client.operate("replicate", version, deadline)) for client in clients]
    try:
        await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
