"""The members of a set in this process, one worker for each of its models: how all of them get one version, or none.

1. The worker of the first model asks what the spec means: a number that all models have, the same for all shards.
2. Each member opens a source of that version. None gives up what it holds before all have one within reach.
3. Then all are filled at once. A member that fails before the second step is over leaves all as they were; one that
   fails later leaves the set without a version, until the next call.

It must never: say that the set holds a version that one of its members does not.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from ..protocol.errors import (
    GroupIncomplete,
    GroupMismatch,
    TensorHubError,
    UsageError,
    VersionConflict,
    VersionUnavailable,
)
from ..protocol.messages import PREFETCHED, Holding, Spec, parse_spec
from ..protocol.names import Version
from ..worker.events import Called, MayWithdraw
from .client import Client
from .content import Known, changed_tensors
from .publishing import by
from .questions import plain_spec

BACK_S = 30.0  # to publish once more what was withdrawn in vain, for each model: it is hashed again

ECHOES = (GroupIncomplete, GroupMismatch)  # what the others hear of when one has failed

_log = logging.getLogger(__name__)

Filling = asyncio.Task[Version | None]


class SetCalls:
    """What is called on a set. Made, and used, in the worker loop."""

    def __init__(self, clients: Sequence[Client], name: str) -> None:
        self._clients, self._name = clients, name
        self._had: Version | None = None  # the last that all of them held
        self._calling = ""

    @property
    def version(self) -> Version | None:
        """What all of them hold."""
        held = [client.version for client in self._clients]
        return held[0] if held.count(held[0]) == len(held) else None

    def forget(self) -> None:
        """What was held was given up on purpose: any version may come next."""
        self._had = None

    def check_idle(self, verb: str) -> None:
        """Between its choice and the calls of its members no member may be called."""
        if self._calling:
            text = f"{verb} on {self._name} while its {self._calling} has not ended"
            raise UsageError(text, hint="one call at a time on one set: wait for the first")

    @property
    def back_s(self) -> float:
        """So long after its deadline a claim that failed may still be about to publish what it had withdrawn."""
        return BACK_S * len(self._clients)

    async def claim(self, spec: Spec, deadline: float) -> None:
        """Unpublish all models, and let nobody else take the number; or leave all as they were, and raise.

        A model that cannot be published again is named in a note of the error, and in the log.
        """
        version = parse_spec(plain_spec(spec))
        if version is None:
            text = f"mutating() on {self._name} needs a version number, not {spec!r}"
            raise UsageError(text, hint="mutating(version=7)")
        self._check_of_one_version()
        begun, left = list[Client](), dict[Client, tuple[Version, Known | None]]()
        try:
            for client in self._clients:  # else the claim that it may have is that of the outer block
                missed = partial(client.miss, Called("unpublish", "", deadline))
                await client.settled("mutating", deadline, missed=missed)
                begun.append(client)
                held, known = client.version, client.manifest_held
                await client.operate("unpublish", "", deadline, claim=version)
                if held is not None:
                    left[client] = held, known
        except BaseException as error:
            for client in begun:
                client.drop_claim()
            for client, (held, known) in left.items():
                try:
                    await _hold_again(client, held, known, max(deadline, time.monotonic() + BACK_S))
                except TensorHubError as why:
                    text = f"version {held} of {client.me} was withdrawn, and cannot be published again: {why}"
                    _log.warning("%s", text)
                    error.add_note(text)
            raise

    def _check_of_one_version(self) -> None:
        """An update may have succeeded on some models only: no step begins on such a mixture."""
        buffers = [client.driver.worker.buffer for client in self._clients]
        whole = [buffer for buffer in buffers if isinstance(buffer, Holding)]
        if len({buffer.version for buffer in whole}) > 1 and not all(buffer.published for buffer in whole):
            held = ", ".join(f"{client.me.model} is of {client.version}" for client in self._clients)
            hint = "update() or replicate() until that succeeds for all models"
            text = f"the models of {self._clients[0].me.replica} are not of one version: {held}"
            raise GroupMismatch(text, hint=hint)

    async def fill(self, verb: str, spec: Spec, deadline: float, *, waits: bool = False) -> Version:
        """Replicate or update. Raises as those do, and `VersionUnavailable` for a number that not all models have."""
        self.check_idle(verb)
        self._calling = verb
        try:
            return await self._fill(verb, spec, deadline, waits=waits)
        finally:
            self._calling = ""

    async def _fill(self, verb: str, spec: Spec, deadline: float, *, waits: bool) -> Version:
        first = self._clients[0]
        for client in self._clients:  # before anything is looked at: until then it is not what it will be
            await client.settled(verb, deadline, missed=partial(first.miss, Called("choose", spec, deadline)))
        self._had = self.version if self.version is not None else self._had
        if verb == "update" and spec == PREFETCHED and (kept := self._kept(deadline)) is not None:
            return kept
        floor = self._had if verb == "update" else None
        while True:
            version = await first.choose(spec, deadline, floor=floor, waits=waits, what=verb)
            assert version is not None, "a choice that ended well has a version"
            try:
                await self._bring(version, deadline)
                self._had = version
                return version
            except VersionUnavailable:  # it was lost meanwhile
                if isinstance(spec, int) or time.monotonic() >= deadline:
                    raise

    def _kept(self, deadline: float) -> Version | None:
        """The version that an update to what was fetched ahead leaves alone, where that needs no server."""
        called = Called("update", PREFETCHED, deadline)
        for client in self._clients:
            try:
                known = client.wishes.update_at_once(called, client.hello)
            except UsageError as error:  # the siblings wait in the choice, which this shard will not come to
                self._clients[0].miss(Called("choose", PREFETCHED, deadline), error)
                raise
            if known is not None and self.version == known:
                return known
        return None

    async def _bring(self, version: Version, deadline: float) -> None:
        """All members get that version."""
        is_alone = self._clients[0].hello.shards == 1  # else other shards may wait for this one
        wanting = [client for client in self._clients if not (is_alone and client.version == version)]
        works: dict[Client, Filling] = {
            client: asyncio.create_task(client.operate("replicate", version, deadline, is_held_back=True))
            for client in wanting
        }
        try:
            if works and await _are_near(works, deadline):
                for client in works:
                    client.driver.feed(MayWithdraw())
                await asyncio.wait(works.values())
        finally:
            for work in works.values():
                work.cancel()
            if works:
                await asyncio.wait(works.values())
        errors = [error for work in works.values() if not work.cancelled() and (error := work.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, ECHOES))
        if self.version != version:
            text = f"{self._clients[0].me.replica} does not hold version {version} of all models of its set any more"
            raise GroupIncomplete(text, hint="call again")


async def _hold_again(client: Client, held: Version, known: Known | None, deadline: float) -> None:
    """Publish what was withdrawn a moment ago as what it was. What newer versions have passed by is filled in again.

    Filled, because a lower number is published by nobody; and only where that changes nothing of the tensors.
    """
    try:
        await client.publish(held, deadline, again=known)
    except VersionConflict:
        registration = client.driver.data.registration
        if registration is None or known is None or not known.digests:
            raise
        what = f"mutating() of {client.me}: hashing what it had withdrawn"
        if any(await by(deadline, what, partial(changed_tensors, registration, known))):
            raise
        await client.operate("replicate", held, deadline, is_again=True)


async def _are_near(works: dict[Client, Filling], deadline: float) -> bool:
    """Until each of them has the version within reach. False: one of them never will, in this call."""
    near = [asyncio.create_task(_is_near(client, work, deadline)) for client, work in works.items()]
    try:
        for each in asyncio.as_completed(near):
            if not await each:
                return False
        return True
    finally:
        for one in near:
            one.cancel()
        await asyncio.wait(near)


async def _is_near(client: Client, work: Filling, deadline: float) -> bool:
    """Its version is within reach, or it has it. False: its call has failed."""
    worker = client.driver.worker
    reached = asyncio.create_task(client.driver.until(lambda: worker.is_ready, deadline))
    try:
        await asyncio.wait((reached, work), return_when=asyncio.FIRST_COMPLETED)
    finally:
        reached.cancel()
        await asyncio.wait((reached,))
        if not reached.cancelled():
            reached.exception()  # looked at: its worker may have gone
    if not work.done():
        return not reached.cancelled() and not reached.exception() and reached.result()  # False: time is over
    return not work.cancelled() and work.exception() is None
