"""Answers of the server to plain HTTP questions: status, long polls, large fleets in slices."""

import asyncio
import math
import time
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from ..protocol.errors import UsageError
from ..protocol.names import ModelName, ReplicaName, Shard, Version
from ..protocol.status import ModelView, Status
from ..server import Server
from ..server.admission import forget_numbers
from ..server.calls import held_by, next_version
from ..server.layouts import describe, living_layouts
from .event_log import EventLog
from .questions import VersionExists, spec_of_text

# Long polls. Equal questions share an answer, found once for a burst of reports. All questions together take `SHARE` of
# the time.


T = TypeVar("T")

NEWS_S = 0.02  # a burst of reports wakes the long polls once
SHARE = 0.05  # of one core, for all questions that wait
MAX_POLL_REST_S = 1.0  # however much others have asked just now


@dataclass
class _Asked(Generic[T]):
    """A question that clients wait for."""

    waiting: int = 0  # so many
    answer: T | None = None
    burst: int = -1  # that the answer has seen
    fresh_until: float = 0.0  # not asked again before


class Polls:
    """Who waits for an answer of the reference server."""

    def __init__(self) -> None:
        self.is_over = False  # no client is kept waiting
        self._asked: dict[Hashable, _Asked[object]] = {}
        self._has_changed = asyncio.Event()
        self._news = asyncio.Event()
        self._burst = 0
        self._rests_until = 0.0  # what all questions have cost so far is a share of the time by then

    def note(self) -> None:
        """Something may have changed."""
        if self._asked:
            self._burst += 1
            self._has_changed.set()

    def end(self) -> None:
        """Answer all clients as things are."""
        self.is_over = True
        self._news.set()

    async def run(self) -> None:
        """Wake those who wait, once for each burst of reports."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            self._news.set()
            self._news.clear()
            await asyncio.sleep(NEWS_S)

    async def ask(self, key: Hashable, look: Callable[[], T], is_final: Callable[[T], bool], patience_s: float) -> T:
        """The answer once it is final, or as it is when the patience ends. Equal keys are equal questions."""
        asked: _Asked[object] = self._asked.setdefault(key, _Asked())
        asked.waiting += 1
        try:
            answer = self._look(asked, look)
            try:
                async with asyncio.timeout(patience_s):
                    while not is_final(answer) and not self.is_over:
                        await self._news.wait()
                        await asyncio.sleep(max(0.0, asked.fresh_until - time.monotonic()))
                        answer = self._look(asked, look)
            except TimeoutError:
                return self._look(asked, look)
            return answer
        finally:
            asked.waiting -= 1
            if not asked.waiting:
                del self._asked[key]

    def _look(self, asked: _Asked[object], look: Callable[[], T]) -> T:
        began = time.monotonic()
        if asked.burst != self._burst or asked.answer is None:
            asked.answer, asked.burst = look(), self._burst
            now = time.monotonic()
            rests_until = max(self._rests_until, began) + (now - began) / SHARE
            self._rests_until = min(rests_until, now + MAX_POLL_REST_S)
            asked.fresh_until = self._rests_until
        answer: T = asked.answer  # type: ignore[assignment]
        return answer


# The status of a large fleet, taken and encoded in slices. At 8,192 workers it is 4 MB of JSON.


SLICE_S = 0.002  # at a stretch, as the intake's
REST = 5.0  # times what it took: a sixth of the time goes into it, and more only where the longest rest is too short
MAX_REST_S = 0.5  # the longest rest, after 0.1 s of work: people wait, and `watch` looks twice a second
LONG_BYTES = 4 << 20  # after a longer answer it rests: clients that do not read keep some ten of them


class Shown:
    """The status as JSON. `now` is the machine's clock."""

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
        rest_s = REST * (now - began) + MAX_REST_S * size_bytes / LONG_BYTES
        self._rests_until = min(max(self._rests_until, now) + rest_s, now + MAX_REST_S)


class _Picture:
    """The status of one moment, encoded once for each model that is asked for."""

    def __init__(self, status: Status, note_work: Callable[[float, int], None]) -> None:
        self._status = status
        self._note_work = note_work
        self._encoded: dict[str | None, asyncio.Task[bytes]] = {}

    def encoded(self, model: str | None) -> "asyncio.Task[bytes]":
        """Encodes it as JSON; None: all of it."""
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
    status, _ = await in_slices(machine.status_steps(now=now))
    return status


async def in_slices(steps: Generator[None, None, T]) -> tuple[T, float]:
    """Makes the steps, and lets other tasks run between slices. Returns the result, and their CPU seconds."""
    cpu_s, began, until = 0.0, time.thread_time(), time.monotonic() + SLICE_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found, cpu_s + time.thread_time() - began
        if time.monotonic() >= until:
            cpu_s += time.thread_time() - began
            await asyncio.sleep(0)
            began, until = time.thread_time(), time.monotonic() + SLICE_S


async def encode_status(status: Status) -> bytes:
    """Encodes the status as JSON, step by step."""
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


# Handlers of questions. Each ends when its answer is final, or with the asker's patience.


LONGEST_POLL_S = 60.0


class Answers:
    """Handlers of questions. `authorise` raises where the asker may not ask; `settle` carries out what has changed."""

    def __init__(
        self,
        machine: Server,
        authorise: Callable[[web.Request], None],
        settle: Callable[[], None],
        events: EventLog,
    ) -> None:
        self._settle = settle
        self._events = events
        self.polls = Polls()
        self._machine = machine
        self._authorise = authorise

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/wait", self._wait)
        app.router.add_get("/v1/events", self._events_after)
        app.router.add_get("/v1/held", self._held)
        app.router.add_get("/v1/next_version", self._next_version)
        app.router.add_get("/v1/described", self._described)
        app.router.add_get("/v1/layouts", self._layouts)
        app.router.add_delete("/v1/numbers", self._forget_numbers)

    async def _wait(self, request: web.Request) -> web.StreamResponse:
        """Answers when the version, or a newer one, exists."""
        self._authorise(request)
        try:
            model, patience_s = _model(request), _patience_s(request)
            spec = spec_of_text(request.query.get("spec", "latest"))
        except (KeyError, ValueError, UsageError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error

        def existing() -> VersionExists:
            found = self._machine.state.models.get(model)
            return VersionExists(found.reached(spec) if found is not None else None)

        key = ("wait", model, spec)
        return await self._answer(key, existing, lambda found: found.version is not None, patience_s)

    async def _events_after(self, request: web.Request) -> web.StreamResponse:
        """The events after a number; with `follow=1` answers when there is one."""
        self._authorise(request)
        try:
            number, model, patience_s = (
                int(request.query.get("after", "0")),
                request.query.get("model", ""),
                _patience_s(request),
            )
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        if request.query.get("follow", "0") in ("", "0"):
            patience_s = 0.0
        key, look = ("events", number, model), lambda: self._events.after(number, model)
        found = await self.polls.ask(key, look, lambda found: bool(found.events), patience_s)
        self._check_is_on(is_final=bool(found.events) or not patience_s)
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    async def _held(self, request: web.Request) -> web.StreamResponse:
        """Answers when enough replicas hold the version. Names the missing ones at the deadline."""
        self._authorise(request)
        try:
            model, patience_s = _model(request), _patience_s(request)
            version, asker = Version(int(request.query["version"])), ReplicaName(request.query.get("replica", ""))
            fraction = float(request.query.get("fraction", "1"))
            if not 0.0 <= fraction <= 1.0:
                raise UsageError(f"fraction={fraction} is not from 0 to 1")
        except (KeyError, ValueError, UsageError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        key = ("held", model, version, asker, fraction)
        look = lambda: held_by(self._machine.state, model, version, asker, fraction)  # noqa: E731 - named by `key`
        return await self._answer(key, look, lambda found: found.is_enough, patience_s)

    async def _next_version(self, request: web.Request) -> web.StreamResponse:
        """Answers when the server knows which numbers are taken."""
        self._authorise(request)
        try:
            model, patience_s = _model(request), _patience_s(request)
        except (KeyError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        look = lambda: VersionExists(next_version(self._machine.state, model))  # noqa: E731 - named by the key
        return await self._answer(("next", model), look, lambda found: found.version is not None, patience_s)

    async def _described(self, request: web.Request) -> web.StreamResponse:
        """Describes one shard of a version, and names the workers that hold it."""
        self._authorise(request)
        try:
            model, patience_s = _model(request), _patience_s(request)
            spec, shard = spec_of_text(request.query.get("spec", "latest")), Shard(int(request.query.get("shard", "0")))
            if shard < 0:
                raise UsageError(f"shard={shard} is below 0")
        except (KeyError, ValueError, UsageError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        look = lambda: describe(self._machine.state, model, spec, shard)  # noqa: E731 - named by the key
        key = ("described", model, spec, shard)
        found = await self.polls.ask(key, look, lambda found: found.is_final, patience_s)
        self._check_is_on(is_final=found.is_final)
        return web.Response(body=msgspec.msgpack.encode(found), content_type="application/msgpack")

    async def _layouts(self, request: web.Request) -> web.StreamResponse:
        """The layouts of a model's living replicas, now."""
        self._authorise(request)
        try:
            model = _model(request)
        except KeyError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        asker = ReplicaName(request.query.get("replica", ""))
        found = living_layouts(self._machine.state, model, asker)
        return web.Response(body=msgspec.msgpack.encode(found), content_type="application/msgpack")

    async def _forget_numbers(self, request: web.Request) -> web.StreamResponse:
        """Forget the numbers of a model."""
        self._authorise(request)
        try:
            model = _model(request)
        except KeyError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        found = forget_numbers(self._machine.state, model)
        self._settle()  # and writes it into the journal
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    async def _answer(
        self, key: tuple[object, ...], look: Callable[[], T], is_final: Callable[[T], bool], patience_s: float
    ) -> web.StreamResponse:
        found = await self.polls.ask(key, look, is_final, patience_s)
        self._check_is_on(is_final=is_final(found))
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    def _check_is_on(self, *, is_final: bool) -> None:
        """Who asks again at once would ask without a pause."""
        if self.polls.is_over and not is_final:
            raise web.HTTPServiceUnavailable(text="the server stops\n")


def _model(request: web.Request) -> ModelName:
    return ModelName(request.query["model"])


def _patience_s(request: web.Request) -> float:
    patience_s = float(request.query.get("timeout", "20"))
    if math.isnan(patience_s):
        raise ValueError("timeout=nan is no time")
    return min(LONGEST_POLL_S, max(0.0, patience_s))
