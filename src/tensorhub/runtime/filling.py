"""Fills tensors that nobody has registered before: the work behind `load`.

It joins as a replica of its own for as long as the transfer takes, one worker for each shard, and leaves. Nobody relies
on it meanwhile, and nothing is fetched ahead for it. It must never: leave a worker behind, however it ends.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from ..core.boxes import Box
from ..core.errors import UsageError, VersionUnavailable
from ..core.manifest import Layout
from ..core.messages import Spec
from ..core.metadata import Json
from ..memory.allocate import allocate
from ..memory.registration import Registration, register
from .client import Client
from .config import Options
from .descriptions import layouts_of, whole_layout_of
from .loops import in_thread
from .opening import open_client

if TYPE_CHECKING:
    from ..memory.registration import type_of_tensor

LEAVE_S = 5.0  # for those who have begun to read from us meanwhile
LEAVE_SHARE = 0.1  # of the time for all of it, at most
AGAIN_S = 0.2  # the newest version was lost between two questions: the next one is about to come


class Filled(NamedTuple):
    """One shard of a version, the caller's alone."""

    tensors: "dict[str, type_of_tensor]"
    version: int
    metadata: dict[str, Json]


async def fill_all(
    options: Options, model: str, spec: Spec, deadline: float, *, check: Callable[[int], None] = lambda shards: None
) -> list[Filled]:
    """Every shard of the version that the spec means. `check` may object to how many there are."""
    options = replace(options, prefetch="never", retain=0, host_bytes=0)
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
) -> list[Filled]:
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
    return [Filled(tensors, version, words) for (tensors, _), words in zip(made, said, strict=True)]


async def _allocated(
    layouts: list[Layout], boxes: "Mapping[str, Sequence[Box]] | None" = None
) -> "list[tuple[dict[str, type_of_tensor], Registration]]":
    """Uninitialised tensors for each shard, and what `register` makes of them."""
    return await in_thread(lambda: [_made(layout, boxes) for layout in layouts], name="allocate")


def _made(
    layout: Layout, boxes: "Mapping[str, Sequence[Box]] | None"
) -> "tuple[dict[str, type_of_tensor], Registration]":
    """In a thread: the first who needs torch waits seconds for it."""
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
