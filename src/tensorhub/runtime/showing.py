"""The status of a large fleet, taken and encoded a little at a time, so that nobody's orders wait for it.

At 8,192 workers it is 4 MB of JSON. It must never: keep the loop for more than a few milliseconds.
"""

import asyncio
import time
from collections.abc import Iterable

import msgspec

from ..core.server import Server
from ..core.snapshot import ModelView, Status

SLICE_S = 0.002  # at a stretch, as the intake's


async def take_status(machine: Server, now: float) -> Status:
    """The whole picture; each replica as it was when it was looked at. `now`: by the machine's clock."""
    steps = machine.status_steps(now=now)
    until = time.monotonic() + SLICE_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Status = end.value
            return found
        if time.monotonic() >= until:
            await asyncio.sleep(0)
            until = time.monotonic() + SLICE_S


async def encode_status(status: Status) -> bytes:
    """As JSON, the same as in one go."""
    models = [await _encode_model(model) for model in status.models]
    transfers = await _encode_each(status.transfers)
    return msgspec.json.encode({**_fields(status), "models": models, "transfers": transfers})


async def _encode_model(model: ModelView) -> msgspec.Raw:
    parts = {"replicas": await _encode_each(model.replicas), "versions": await _encode_each(model.versions)}
    return msgspec.Raw(msgspec.json.encode({**_fields(model), **parts}))


async def _encode_each(things: Iterable[msgspec.Struct]) -> list[msgspec.Raw]:
    found, until = [], time.monotonic() + SLICE_S
    for each in things:
        found.append(msgspec.Raw(msgspec.json.encode(each)))
        if time.monotonic() >= until:
            await asyncio.sleep(0)
            until = time.monotonic() + SLICE_S
    return found


def _fields(thing: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(thing, name) for name in thing.__struct_fields__}
