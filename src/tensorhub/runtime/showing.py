"""The status of a large fleet, taken and encoded a little at a time, so that nobody's orders wait for it.

At 8,192 workers it is 4 MB of JSON. So all who ask at about the same time get the same bytes, and after each time there
is a rest. It must never: keep the loop for more than a few milliseconds, or show what was before the question.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec

from ..core.server import Server
from ..core.snapshot import ModelView, Status

SLICE_S = 0.002  # at a stretch, as the intake's
REST = 5.0  # times what it took: a sixth of the time goes into it, and more only where the longest rest is too short
MOST_REST_S = 0.5  # the longest rest, after 0.1 s of work: people wait, and `watch` looks twice a second
LONG_BYTES = 4 << 20  # after such a one it rests for that long: askers that do not read keep some ten of them


class Shown:
    """The status as JSON, for whoever asks. `now` is the machine's clock."""

    def __init__(self, machine: Server, now: Callable[[], float]) -> None:
        self._machine = machine
        self._now = now
        self._next: asyncio.Task[_Picture] | None = None  # it has not been taken yet: who asks now may have it
        self._rests_until = 0.0

    async def ask(self, model: str | None) -> bytes:
        """The whole status, or that of one model, as it is after the question."""
        if self._next is None:
            self._next = asyncio.create_task(self._take())
        picture = await asyncio.shield(self._next)
        return await asyncio.shield(picture.encoded(model))

    async def _take(self) -> "_Picture":
        await asyncio.sleep(self._rests_until - time.monotonic())
        self._next = None
        began = time.monotonic()
        picture = _Picture(await take_status(self._machine, self._now()), self._rest_after)
        self._rest_after(began, 0)
        return picture

    def _rest_after(self, began: float, size_bytes: int) -> None:
        """It has worked since then, and made so much."""
        now = time.monotonic()
        rest_s = REST * (now - began) + MOST_REST_S * size_bytes / LONG_BYTES
        self._rests_until = min(max(self._rests_until, now) + rest_s, now + MOST_REST_S)


class _Picture:
    """The status of one moment, encoded once for each model that is asked for."""

    def __init__(self, status: Status, note_work: Callable[[float, int], None]) -> None:
        self._status = status
        self._note_work = note_work
        self._encoded: dict[str | None, asyncio.Task[bytes]] = {}

    def encoded(self, model: str | None) -> "asyncio.Task[bytes]":
        """As JSON; None: all of it."""
        if model not in self._encoded:
            self._encoded[model] = asyncio.create_task(self._encode(model))
        return self._encoded[model]

    async def _encode(self, model: str | None) -> bytes:
        began, status = time.monotonic(), self._status
        if model is not None:
            models = tuple(each for each in status.models if each.name == model)
            transfers = tuple(each for each in status.transfers if each.model == model)
            status = msgspec.structs.replace(status, models=models, transfers=transfers)
        found = await encode_status(status)
        self._note_work(began, len(found))
        return found


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
