"""The questions that anybody may put to a reference server, and wait for the answer: its side of `questions`.

`/v1/wait` ends when a version exists, `/v1/held` when enough replicas hold it, `/v1/next_version` and `/v1/described`
when a restarted server has heard enough; all with the asker's patience. `/v1/cuts` is answered at once. It must never:
change the machine, or decide.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from ..core.errors import UsageError
from ..core.messages import MAX_COMPANIONS
from ..core.names import ModelName, ReplicaName, Shard, Version
from ..core.server import Server
from ..core.server.rules.cuts import cuts_of
from ..core.server.rules.described import describe
from ..core.server.rules.held import held_by
from ..core.server.rules.numbering import next_version
from .polls import Polls
from .questions import VersionExists
from .specs import spec_of_text

T = TypeVar("T")

LONGEST_POLL_S = 60.0


class Answers:
    """Handlers of questions. `authorise` raises where the asker may not ask."""

    def __init__(self, machine: Server, authorise: Callable[[web.Request], None]) -> None:
        self.polls = Polls()
        self._machine = machine
        self._authorise = authorise

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/wait", self._wait)
        app.router.add_get("/v1/held", self._held)
        app.router.add_get("/v1/next_version", self._next_version)
        app.router.add_get("/v1/described", self._described)
        app.router.add_get("/v1/cuts", self._cuts)

    async def _wait(self, request: web.Request) -> web.StreamResponse:
        """As soon as the version, or a newer one, exists."""
        self._authorise(request)
        try:
            model, patience_s = _model(request), _patience_s(request)
            spec, companions = spec_of_text(request.query.get("spec", "latest")), _companions(request)
        except (KeyError, ValueError, UsageError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error

        def existing() -> VersionExists:
            found = self._machine.state.models.get(model)
            return VersionExists(found.awaited(spec, companions) if found is not None else None)

        key = ("wait", model, spec, companions)
        return await self._answer(key, existing, lambda found: found.version is not None, patience_s)

    async def _held(self, request: web.Request) -> web.StreamResponse:
        """As soon as enough replicas hold the version, or with who is missing."""
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
        """As soon as it is known which numbers are taken."""
        self._authorise(request)
        try:
            model, patience_s = _model(request), _patience_s(request)
        except (KeyError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        look = lambda: VersionExists(next_version(self._machine.state, model))  # noqa: E731 - named by the key
        return await self._answer(("next", model), look, lambda found: found.version is not None, patience_s)

    async def _described(self, request: web.Request) -> web.StreamResponse:
        """What one shard of a version is, and who has it."""
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

    async def _cuts(self, request: web.Request) -> web.StreamResponse:
        """How the living replicas of a model are cut, now."""
        self._authorise(request)
        try:
            model = _model(request)
        except KeyError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        asker = ReplicaName(request.query.get("replica", ""))
        found = cuts_of(self._machine.state, model, asker)
        return web.Response(body=msgspec.msgpack.encode(found), content_type="application/msgpack")

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


def _companions(request: web.Request) -> tuple[ModelName, ...]:
    """Other models that are to have the version too: `with`, once for each."""
    names = request.query.getall("with", [])
    if len(names) > MAX_COMPANIONS:
        raise UsageError(f"a version of {1 + len(names)} models, where {1 + MAX_COMPANIONS} are the most")
    return tuple(map(ModelName, names))


def _patience_s(request: web.Request) -> float:
    patience_s = float(request.query.get("timeout", "20"))
    if math.isnan(patience_s):
        raise ValueError("timeout=nan is no time")
    return min(LONGEST_POLL_S, max(0.0, patience_s))
