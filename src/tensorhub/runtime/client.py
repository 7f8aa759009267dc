"""The calls of `Weights`, as coroutines of the worker loop: which threads make them, and how tensors are hashed."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from uuid import uuid4
from weakref import WeakSet

from msgspec.structs import replace

from ..memory.describe import some
from ..memory.digests import Parts, build_manifest, small_parts
from ..memory.host_memory import HINT
from ..memory.registration import Registration
from ..protocol.errors import (
    Closed,
    DeadlineExceeded,
    GroupIncomplete,
    HostMemoryFull,
    InvariantViolation,
    LayoutMismatch,
    NotDrained,
    TensorHubError,
    UsageError,
    VersionConflict,
)
from ..protocol.manifest import Json, Manifest, decode_metadata, digest_of_metadata
from ..protocol.messages import (
    MAX_LAYOUT_BYTES,
    MAX_PINS,
    PREFETCHED,
    Empty,
    Failure,
    Hello,
    Holding,
    LayoutInfo,
    Spec,
    Vacated,
    parse_spec,
)
from ..protocol.names import Digest, Version, WorkerId, worker_id
from ..reshard.grid import Grid
from ..reshard.read import TiledVersion, grid_for, tiled_version, with_boxes_like
from ..transport.base import Transport
from ..worker.events import Called, Registered, Wished
from .cast_state import CHANGING, HELD_HINT, BackgroundUnpublish, CallLock, CastState, Suspension
from .config import Options
from .connection import encode
from .content import Known, changed_tensors
from .driver import AFTER_DEADLINE_S, Driver, LongWait, failed
from .loops import in_thread
from .metrics import CALL, CALL_ERRORS, HASH, VERIFY
from .questions import check_held, fetch_layouts, siblings, wait_for_holders, wait_for_version
from .statistics import Progress, Statistics

# Tiles. All shards of a replica make the same grid from the layouts of all living replicas, which the server knows.
# If another replica registers just then, the server says so, and all shards make it anew.


async def prepare_tiles(
    options: Options, me: WorkerId, shards: int, registration: Registration, metadata: bytes, deadline: float
) -> Callable[[], TiledVersion]:
    """A function that hashes the registered tensors, for a thread. Asks the server for all layouts.

    Raises `GroupIncomplete` for siblings that are not there, or have registered nothing with boxes, and `GroupMismatch`
    for those that say another number of shards.
    """
    found = await siblings(options, me, shards, registration, deadline, what="publish")
    mine = {view.shard: found.boxes[view.boxes] for view in found.shards if view.replica == me.replica}
    publisher = [mine[shard] for shard in range(shards)]
    names = {found.boxes[view.boxes]: str(worker_id(me.model, view.replica, view.shard)) for view in found.shards}
    make_grid = partial(grid_for, publisher, found.boxes, names)
    return partial(_hashed, registration, make_grid, options.chunk_bytes, metadata)


def tile_again(known: TiledVersion, registration: Registration) -> TiledVersion:
    """The registered tensors as they are now, in the same tiles. Blocks."""
    return tiled_version(registration, known.shard.grid, known.chunk_bytes, metadata=known.metadata)


def _hashed(
    registration: Registration, make_grid: Callable[[], Grid], chunk_bytes: int, metadata: bytes
) -> TiledVersion:
    return tiled_version(registration, make_grid(), chunk_bytes, metadata=metadata)


T = TypeVar("T")
Prepare = Callable[[Options, WorkerId, int, Registration, bytes, float], Awaitable[Callable[[], TiledVersion]]]

CHUNKS_SHOWN = 3  # of those that several tensors share, in an error


async def hashed(
    options: Options,
    me: WorkerId,
    shards: int,
    registration: Registration,
    held: Known | None,
    metadata: bytes,
    deadline: float,
    prepare: Prepare = prepare_tiles,
) -> Known:
    """Hashes the registered tensors. `held` is what is held already, and is to be the same.

    Raises `VersionConflict` naming tensors that are not, where all of it cannot be hashed anew.
    """
    what = f"publish of {me}: hashing its tensors"
    if held is not None and not held.digests:
        return held  # what was never hashed cannot be hashed again: it is taken for what it was
    if isinstance(held, TiledVersion):
        if held.is_whole:
            return await by(deadline, what, partial(tile_again, held, registration))
        changed, _ = await by(deadline, what, partial(changed_tensors, registration, held))  # as far as can be told
        if changed:
            text = f"{me} holds that version, but these tensors were changed since: {some(changed)}"
            raise VersionConflict(text, hint=HELD_HINT)
        return held
    if registration.table is not None:
        return await by(deadline, what, await prepare(options, me, shards, registration, metadata, deadline))
    chunk_bytes = options.chunk_bytes if held is None else held.chunk_bytes  # equal bytes have equal roots then
    salt = uuid4().hex
    build = partial(build_manifest, registration, chunk_bytes, verify=options.verify, salt=salt)
    return replace(await by(deadline, what, build), metadata=metadata)


async def check_unchanged(
    me: WorkerId, version: Version, registration: Registration, known: Known, parts: Parts, deadline: float
) -> None:
    """Raises `NotDrained` naming the tensors that are not any more what the version held says of them.

    `parts` are digests of what was published here. Where none tells which of the tensors in a chunk was changed, it
    says that at least one of them was.
    """
    what = f"check() of version {version} of {me}"
    names, shared = await by(deadline, what, partial(changed_tensors, registration, known, parts))
    changed = dict.fromkeys([*registration.moved(), *names])
    said = [f"these tensors were changed since: {some(list(changed))}"] if changed else []
    for chunk in sorted(shared)[:CHUNKS_SHOWN]:
        count = len(shared[chunk])
        said.append(f"at least one of the {count} tensors in chunk {chunk} was changed since: {some(shared[chunk])}")
    if len(shared) > CHUNKS_SHOWN:
        said.append(f"and at least one in each of {len(shared) - CHUNKS_SHOWN} more chunks")
    if said:
        text = f"{me} holds version {version}, but {'; '.join(said)}"
        raise NotDrained(text, hint="unpublish() before changing tensors, or use mutating(version=...)")


async def by(deadline: float, what: str, work: Callable[[], T]) -> T:
    """Blocking work in a thread, awaited until the deadline."""
    began = time.monotonic()
    try:
        async with asyncio.timeout_at(deadline):
            return await in_thread(work, name="hash")
    except TimeoutError as error:
        text = f"{what} did not end within {deadline - began:.3g} s"
        raise DeadlineExceeded(text, hint="retry with a longer timeout") from error


def grid_of(known: Known) -> Digest:
    """The digest of the grid, which is the same for all shards of a publish."""
    return known.shard.manifest.grid if isinstance(known, TiledVersion) else Digest("")


# A thread that holds two shards of one replica, and waits for the call of the first, waits for itself. It is told so
# only if the program has no other thread.


OURS = "tensorhub-"  # how the names of this library's threads begin


class Callers:
    """The threads of one worker's callers. Used from any thread."""

    def __init__(self, on_call: Callable[[], object] = lambda: None) -> None:
        """`on_call` is called in the thread that calls, before its call begins."""
        self._on_call = on_call
        self._lock = threading.RLock()  # a finaliser may come while its own thread has it
        self._users: WeakSet[threading.Thread] = WeakSet()
        self.waiting: threading.Thread | None = None  # blocked in a call of this worker

    def note(self) -> None:
        """The present thread uses the worker."""
        thread = threading.current_thread()
        if not thread.name.startswith(OURS):
            with self._lock:
                self._users.add(thread)
            self._on_call()

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The present thread waits for a call of this worker, and can do nothing else meanwhile."""
        self.note()
        self.waiting = threading.current_thread()
        try:
            yield
        finally:
            self.waiting = None

    def are_only(self, thread: threading.Thread) -> bool:
        """It has used the worker, and no other thread might: a pool's thread may be given work later."""
        with self._lock:
            is_user = thread in self._users
        return is_user and all(each is thread or each.name.startswith(OURS) for each in threading.enumerate())


_log = logging.getLogger(__name__)

MORE_ROOM = "raise host_bytes, or give this process more memory"


class Pins:
    """Of one worker. Used in the worker's loop only."""

    def __init__(self, me: WorkerId, driver: Driver) -> None:
        self._me, self._driver = me, driver

    def change(self, **changes: object) -> None:
        """Changes what is pinned or fetched ahead, and leaves the rest as it is."""
        worker = self._driver.worker
        known = {"prefetch": worker.prefetch, "pins": worker.pins, **changes}
        self._driver.feed(Wished(**known))  # type: ignore[arg-type]

    def warn_without_room(self) -> None:
        """Warns if host memory has no room for a copy, so that nothing is fetched ahead."""
        data = self._driver.data
        if data.copies.why_none and data.registration is not None:
            text = "%s fetches nothing ahead: its limit on host memory has no room for a copy of %d B: %s; %s"
            _log.warning(text, self._me, data.registration.size_bytes, data.copies.why_none, MORE_ROOM)

    def update_at_once(self, called: Called, hello: Hello) -> Version | None:
        """The result of an update to "prefetched" without the server; None if the server must be asked.

        Raises `UsageError` where nothing is ever fetched ahead, with the limit that has no room for it.
        """
        known = self._driver.worker.update_at_once(hello, called)
        if not isinstance(known, Failure):
            return known
        why = self._driver.data.copies.why_none
        is_wanted = hello.prefetch == "always" or self._driver.worker.prefetch
        raise failed(replace(known, message=f"{known.message}; {why}") if why and is_wanted else known)

    def prefetch(self, spec: Spec) -> None:
        """A host copy of that version, and of newer ones as they come if it is "latest"."""
        parse_spec(spec)
        if not self._driver.worker.is_registered:
            raise UsageError(f"prefetch on {self._me} before register()", hint="register the tensors first")
        self.warn_without_room()
        self.change(prefetch=spec)

    async def pin(self, version: Version, options: Options, deadline: float) -> None:
        """Raises `VersionUnavailable` if no worker has it."""
        pins = self._driver.worker.pins
        if version in pins:
            return
        if len(pins) >= MAX_PINS:
            raise UsageError(f"{self._me} has pinned {len(pins)} versions, which is the most", hint="unpin() some")
        await self._heard((*pins, version), deadline)
        try:
            await check_held(options, self._me.model, version, deadline)
        except BaseException:
            self.change(pins=tuple(pin for pin in self._driver.worker.pins if pin != version))
            raise

    async def unpin(self, version: Version, deadline: float) -> None:
        """Does nothing if the version is not pinned."""
        await self._heard(tuple(pin for pin in self._driver.worker.pins if pin != version), deadline)

    async def _heard(self, pins: tuple[Version, ...], deadline: float) -> None:
        """Returns once the server knows of the pins."""
        self.change(pins=pins)
        worker = self._driver.worker
        number = worker.reported
        if not await self._driver.until(lambda: worker.acknowledged >= number, deadline):
            text = f"{self._me}: the reference server has not heard of the pins {list(pins)} in time"
            raise DeadlineExceeded(text, hint="is it running? The pins count once it hears of them")


# One shard without boxes is the layout with a box for each tensor that covers all of it. Its worker takes it for that
# only where others of the model have boxes, and goes on so: before a publish, before it reads what is held with boxes
# only, and where it has published without them. Then it withdraws that, and publishes the same cut into tiles.


BOX_AGAIN_S = 5.0  # after a failure: another holder, or room for a copy, makes it possible


class Boxing:
    """Of one worker. Used in the worker's loop only."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._watch: asyncio.Task[None] | None = None
        self._failed: Version | None = None  # of which that was said

    def can_box(self, registration: Registration) -> bool:
        """Whole tensors of one shard, in which tiles can be verified."""
        client = self._client
        return client.hello.shards == 1 and client.options.verify != "none" and registration.can_box

    def registered(self, registration: Registration) -> None:
        """These are the tensors from now on."""
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()
        self._watch = None
        if self.can_box(registration):
            self._watch = asyncio.get_running_loop().create_task(self._watched())

    def end(self) -> None:
        """Called when the worker closes."""
        if self._watch is not None:
            self._watch.cancel()

    async def to_publish(self, deadline: float) -> None:
        """Take boxes, if the server has said so, and there is nothing to withdraw first."""
        client, registration = self._client, self._client.driver.data.registration
        worker = client.driver.worker
        if registration is None or not worker.is_to_box or not isinstance(worker.buffer, Empty):
            return
        if self.can_box(registration):
            boxed = await self._boxed(registration)
            if boxed is not None:
                await self.take(boxed, deadline)

    async def to_read(self, deadline: float) -> Registration | None:
        """The registered tensors with boxes, to read what others have with boxes. None where that is not possible.

        Raises `LayoutMismatch` naming a tensor that differs: nothing was withdrawn yet.
        """
        client, registration = self._client, self._client.driver.data.registration
        if registration is None or not self.can_box(registration):
            return None
        found = await fetch_layouts(client.options, client.me.model, deadline)
        if not found.boxes:
            return None
        return await in_thread(partial(with_boxes_like, registration, found.boxes, str(client.me)), name="tiles")

    async def take(self, boxed: Registration, deadline: float) -> None:
        """Register the same tensors with boxes. The worker holds no version."""
        worker = self._client.driver.worker
        if not await self._client.driver.until(lambda: worker.may_register, deadline):
            text = f"the tensors of {self._client.me} are still touched by what came before"
            raise NotDrained(text, hint="retry with a longer timeout")
        _log.info("%s takes its tensors with boxes={}: other workers of the model have boxes", self._client.me)
        self._client.take(boxed)

    async def _boxed(self, registration: Registration) -> Registration | None:
        try:
            return await in_thread(registration.with_boxes, name="tiles")
        except UsageError as error:  # too many for one shard
            _log.warning("%s goes on without boxes: %s", self._client.me, error)
            return None

    async def _watched(self) -> None:
        """Until it holds what it has published without boxes, and others need it with boxes. Keeps no tensor alive."""
        client = self._client
        worker, lock, behind = client.driver.worker, client.call_lock, client.unpublishing

        def is_due() -> bool:
            held = worker.buffer
            is_published = isinstance(held, Holding) and held.published
            return is_published and worker.is_to_box and worker.call is None and lock.is_free and not behind.is_running

        with contextlib.suppress(TensorHubError):  # it has gone
            while await client.driver.until(is_due, math.inf):
                client.unpublishing.run(self._again())
                await asyncio.sleep(BOX_AGAIN_S)  # other tensors are registered once it has succeeded

    async def _again(self) -> None:
        """Repeat the call in the background. The caller's next call waits for its end."""
        client = self._client
        registration, content = client.driver.data.registration, client.driver.data.content
        version, known = client.driver.worker.held, None if content is None else content.manifest
        if registration is None or not self.can_box(registration):
            return
        boxed = await self._boxed(registration)
        if boxed is None or version is None or not isinstance(known, Manifest):
            return
        deadline = asyncio.get_running_loop().time() + client.options.timeout_s
        try:
            await client.carried(Called("unpublish", "", deadline))
            await self.take(boxed, deadline)
            for more in range(MAX_CUTS - 1, -1, -1):
                try:
                    await self._publish(registration, boxed, known, version, deadline)
                    return
                except GroupIncomplete:
                    if not more:
                        raise
        except TensorHubError as error:
            level = logging.WARNING if version != self._failed and not client.is_leaving else logging.DEBUG
            what = "%s holds version %d without boxes, and could not publish it with boxes, which others have: %s"
            _log.log(level, what, client.me, version, error)
            self._failed = version

    async def _publish(
        self, former: Registration, boxed: Registration, known: Manifest, version: Version, deadline: float
    ) -> None:
        client = self._client
        tiled = await hashed(client.options, client.me, 1, boxed, None, known.metadata, deadline)
        what = f"publish of {client.me} with boxes"
        changed, shared = await by(deadline, what, partial(changed_tensors, former, known))
        if changed or shared:
            raise VersionConflict("its tensors were changed since it was published", hint=HELD_HINT)
        client.driver.data.prepare(tiled)
        root, words = tiled.root(), digest_of_metadata(known.metadata)
        client.cast_state.published(root)
        called = Called("publish", version, deadline, root, metadata=words, grid=grid_of(tiled), former=known.root())
        await client.driver.call(called)


FOLLOW_S = 3600.0  # of one question for a newer version; then it is asked again
MAX_CUTS = 3  # of one publish
CUT_OTHERWISE = "into different tiles"  # as `server/calls.py` says it


living: "WeakSet[Client]" = WeakSet()  # of this process; kept alive by the loop


class Client:
    """One worker, for its caller. Made, and used, in the worker loop."""

    def __init__(self, hello: Hello, options: Options, transports: Mapping[str, Transport]) -> None:
        self.me = hello.worker
        self.options = options
        self.driver = Driver(hello, options, transports, why_it_cannot_end=self._why_it_cannot_end)
        self.callers = Callers(self._note_call)
        self.unpublishing = BackgroundUnpublish(self.driver)
        self.pins = Pins(self.me, self.driver)
        self.cast_state = CastState(self.me)
        self.hello = hello
        self.call_lock = CallLock(self.me)
        self.suspension = Suspension(self.driver, self.unpublishing, self.call_lock)
        self._closing: asyncio.Task[None] | None = None
        self._following: set[asyncio.Task[None]] = set()
        self._parts = Digest(""), Parts()  # of what was hashed last, by its root
        self.filled: Progress | None = None  # of the last call, if it has filled the tensors
        self._grid: tuple[Digest, Grid, int] | None = None  # of the last publish: the layout, and how it was cut
        self.boxing = Boxing(self)

    async def start(self, deadline: float) -> None:
        """Connect. Raises `ServerUnreachable`, `ShardTaken`, `Refused`, `UsageError`."""
        await self.driver.start(deadline)

    async def may_register(self, deadline: float) -> None:
        """No worker may read or write the present tensors. Raises `NotDrained`.

        A call that has failed may leave readers behind, who are being cut off: that is waited for.
        """
        self.check_usable()
        await self.unpublishing.over(None, "register()")
        worker = self.driver.worker
        if not self.call_lock.calling and worker.held is None:
            await self.driver.until(lambda: worker.may_register or bool(self.call_lock.calling), deadline)
            self.check_usable()
        if self.call_lock.calling or not worker.may_register:
            held = f"version {worker.held} is held" if worker.held is not None else "its tensors are still being read"
            why = f"{self.call_lock.calling} has not ended" if self.call_lock.calling else held
            raise NotDrained(f"register() on {self.me} while {why}", hint="unpublish() first")

    async def register(self, registration: Registration, deadline: float, *, is_resumed: bool = False) -> None:
        """Take other tensors, as `may_register` allows."""
        await self.may_register(deadline)
        if registration.table is not None and self.options.verify == "none":
            text = f'{self.me} says verify="none", and what has boxes is verified tile by tile'
            raise UsageError(text, hint="leave verify= out, or register without boxes")
        self.take(registration, is_resumed=is_resumed)

    def take(self, registration: Registration, *, is_resumed: bool = False) -> None:
        """Take other tensors. No worker reads or writes the present tensors."""
        layout = LayoutInfo.of(registration.layout, registration.boxes, partial=registration.is_partial)
        length = len(encode(layout))
        if length > MAX_LAYOUT_BYTES:
            text = f"the names and shapes of {len(registration.layout.tensors)} tensors take {length} B"
            hint = "register fewer tensors, with shorter names, or larger ones"
            raise UsageError(f"{text}; {MAX_LAYOUT_BYTES} B are the limit", hint=hint)
        max_copies = self.driver.data.register(registration)
        if self.hello.prefetch == "always":
            self.pins.warn_without_room()
        self.cast_state.registered(self.driver, is_resumed=is_resumed)
        size_bytes, digest = registration.size_bytes, registration.layout_digest
        self.suspension.over()
        can_box = self.boxing.can_box(registration)
        self.driver.feed(Registered(layout, digest, size_bytes, max_copies, can_box))
        self.boxing.registered(registration)

    async def operate(
        self,
        verb: str,
        spec: Spec,
        deadline: float,
        *,
        claim: Version | None = None,
        waits: bool = False,
    ) -> Version | None:
        """One group call that is no publish. Returns the version then held. `claim` is of an unpublish."""
        with self._one_call("mutating" if claim is not None else verb):
            called = Called(verb, spec, deadline, claim=claim, waits=waits)
            self.filled = None
            await self._unused(called)
            await self.unpublishing.over(deadline, f"{verb}()", partial(self.miss, called))
            registration = self.driver.data.registration
            self.cast_state.check_whole(called, self.driver)
            if verb == "unpublish":
                if registration is None or not registration.is_all_cast:  # readers may be in the caller's own tensors
                    return await self.carried(called)
                await self.unpublishing.begin(self.carried(called), deadline)
                return None
            worker, before = self.driver.worker, self.driver.worker.held
            try:
                self._check_in_place()
                self.cast_state.check(registration, f"{verb}()")
                if registration is not None:
                    registration.check_fillable()
                known = self.pins.update_at_once(called, self.hello)
            except UsageError as error:
                self.driver.miss(called, error)
                raise
            if worker.held is None:
                self.cast_state.forget()
            version = known if known is not None else await self._filled(called)
            held = worker.buffer if isinstance(worker.buffer, Holding) else None
            await self.cast_state.give_back(registration, held, deadline)
            if registration is not None and version is not None and version != before:
                size_bytes = registration.size_bytes
                self.filled = Progress(version, size_bytes, size_bytes, self.driver.read_from, 0)
            return version

    async def _unused(self, called: Called) -> None:
        """Waits until no block of `using` has the tensors. Raises `DeadlineExceeded`, which says which block does."""
        lock = self.call_lock
        if not lock.used_by():
            return
        what = f"{called.verb}() of {self.me}"
        began = time.monotonic()
        waits = LongWait(what, lambda: (lock.used_by(), began))
        try:
            if not await lock.until(lambda: not lock.used_by() or self.is_leaving, called.deadline):
                raise DeadlineExceeded(f"{what} waits for {lock.used_by()}", hint="leave the block between two batches")
            self.check_usable()
        except TensorHubError as error:
            self.miss(called, error)
            raise
        finally:
            waits.end()

    async def use(self, user: object, name: str, deadline: float) -> Version:
        """Begins a block in which the tensors stay as they are. Returns the version that they are."""
        self.check_usable()
        lock = self.call_lock
        if not lock.is_using(user):
            if not await lock.until(lambda: lock.calling not in CHANGING or self.is_leaving, deadline):
                text = f"using() of {self.me} waits for its {lock.calling}, which has not ended"
                raise DeadlineExceeded(text, hint="retry with a longer timeout")
            self.check_usable()
        version = self.version
        if version is None:
            raise UsageError(f"using() of {self.me}, which holds no version", hint="replicate() or update() first")
        lock.use(user, name)
        return version

    def follow(self, tell: Callable[[Version], Coroutine[object, object, None]]) -> asyncio.Task[None]:
        """Tells each version that appears and is newer than what is held, until the task is cancelled."""
        task = asyncio.get_running_loop().create_task(self._follow(tell))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return task

    async def _follow(self, tell: Callable[[Version], Coroutine[object, object, None]]) -> None:
        told = -1
        while not self.is_leaving:
            following = max(told, -1 if self.version is None else self.version) + 1
            try:
                version = await wait_for_version(self.options, self.me.model, following, time.monotonic() + FOLLOW_S)
            except DeadlineExceeded:
                continue
            except TensorHubError as error:
                _log.warning("%s hears of no further version: %s", self.me, error)
                return
            told = version
            if self.version is None or version > self.version:
                await tell(version)

    async def settled(
        self, verb: str, deadline: float, *, missed: Callable[[BaseException], None] | None = None
    ) -> None:
        """No call goes on behind its caller's back. Raises what went wrong there (`missed` is told), or bars one."""
        with self._one_call(verb):
            await self.unpublishing.over(deadline, f"{verb}()", missed)

    def miss(self, called: Called, why: BaseException) -> None:
        """Its siblings hear that it does not come to that call: once what is behind it is over, if it is not."""
        self.unpublishing.then(lambda: self.driver.miss(called, why))

    async def carried(self, called: Called) -> Version | None:
        """Carries out the call, from the machine's answer to its end. Returns the version that is held then."""
        worker, copies, verb = self.driver.worker, self.driver.data.copies, called.verb
        before, copies.spoiled = worker.held, None
        try:
            version = await self.driver.call(called)
        except HostMemoryFull as error:
            hints = [hint for hint in (error.hint, HINT if copies.is_short else "") if hint]
            raise HostMemoryFull(f"{error}; here {copies.allowance}", hint="; or ".join(hints)) from error
        if verb == "unpublish" and copies.spoiled is not None:
            raise self._lost(before, copies.spoiled)
        if verb != "unpublish" and worker.prefetch is not None and (called.spec != PREFETCHED or version != before):
            self.pins.change(prefetch=None)  # what was fetched ahead has served its purpose
        return version

    async def _filled(self, called: Called) -> Version | None:
        """The same of a fill. What is held with boxes only is read into whole tensors that were registered without."""
        try:
            return await self.carried(called)
        except LayoutMismatch:
            boxed = await self.boxing.to_read(called.deadline)
            if boxed is None:
                raise
        if self.driver.worker.held is not None:
            await self.carried(Called("unpublish", "", called.deadline))
        await self.boxing.take(boxed, called.deadline)
        return await self.carried(called)

    def _lost(self, version: Version | None, why: Failure) -> NotDrained:
        """What was unpublished had to be kept here, and was not there any more. All else is as after any unpublish."""
        text = f"version {version} of {self.me} is withdrawn, and lost unless others have it: {why.message}"
        return NotDrained(text, hint=why.hint)

    async def prefetch(self, spec: Spec) -> None:
        """Fill a host copy with that version in the background, and with newer ones as they come if it is "latest"."""
        self.check_usable()
        self.pins.prefetch(spec)

    async def pin(self, version: Version, deadline: float) -> None:
        """Keep a version, however new others are. Raises `VersionUnavailable` if no worker has it."""
        self.check_usable()
        await self.pins.pin(version, self.options, deadline)

    async def unpin(self, version: Version, deadline: float) -> None:
        """Take a pin back. Does nothing where there was none."""
        self.check_usable()
        await self.pins.unpin(version, deadline)

    async def publish(self, version: Spec, deadline: float, metadata: bytes | None = None) -> Version | None:
        """Hash what the tensors are now, and promise not to change it. Without metadata what is held keeps its own."""
        with self._one_call("publish"):
            missed = partial(self.miss, Called("publish", version, deadline))
            await self.unpublishing.over(deadline, f"publish({version!r})", missed)
            await self.boxing.to_publish(deadline)
            for more in range(MAX_CUTS - 1, -1, -1):
                try:
                    return await self._publish(version, deadline, metadata)
                except GroupIncomplete as error:
                    if not more or CUT_OTHERWISE not in str(error):
                        raise  # else all shards hear so: a worker registered while they asked
        raise InvariantViolation("the last try returns or raises")

    async def _publish(self, version: Spec, deadline: float, metadata: bytes | None) -> Version | None:
        buffer = self.driver.worker.buffer
        root = buffer.root if isinstance(buffer, Holding) else Digest("")
        called = Called("publish", version, deadline, root)
        self.cast_state.check_whole(called, self.driver)
        self.driver.check(called)
        try:
            self._check_in_place()
            registration = self.driver.data.registration
            if registration is not None and registration.is_partial:
                text = f"publish of {self.me}, which has registered some of the model only"
                raise UsageError(text, hint="register all of it, without partial=True")
            said = self._metadata_of(version, metadata)
            content, held = self.driver.data.content, self.driver.worker.held
            known = content.manifest if content is not None and held == content.version else None
            if registration is not None and held is not None and known is not None:
                await self.cast_state.check_cast(registration, held, deadline)
            began = time.monotonic()
            manifest = await self._hashed(known, deadline, said)
            hash_s = time.monotonic() - began
            self._check_in_place()  # what was freed meanwhile, and its memory kept by the allocator, was hashed
        except BaseException as error:
            self.driver.miss(called, error)
            raise
        self.driver.data.prepare(manifest)
        self.driver.data.unserved = None
        root, words, grid = manifest.root(), digest_of_metadata(said), grid_of(manifest)
        if known is None:  # else nothing was cast
            self.cast_state.published(root)
        called = Called("publish", version, deadline, root, metadata=words, grid=grid, hash_s=hash_s)
        published = await self.driver.call(called)
        if self.driver.data.unserved is not None:
            raise self.driver.data.unserved
        if registration is not None:
            self.driver.data.copies.prepare(registration)
        return published

    async def _hashed(self, held: Known | None, deadline: float, metadata: bytes) -> Known:
        """Hashes the registered tensors. Casts them before, unless the version is held."""
        self.check_usable()  # it may have been closed while masters were compared
        registration = self.driver.data.registration
        assert registration is not None, "why_not_begin had seen a layout"
        prepare = self._prepare_tiles
        with self.driver.record.timed(HASH):
            if held is None:
                await self.cast_state.cast(registration, deadline, f"publish of {self.me}")
            shards = self.hello.shards
            found = await hashed(self.options, self.me, shards, registration, held, metadata, deadline, prepare)
            if held is None and isinstance(found, Manifest) and found.digests:
                small = partial(small_parts, registration, found.chunk_bytes)
                self._parts = found.root(), await by(deadline, f"publish of {self.me}: hashing its tensors", small)
        if isinstance(found, TiledVersion):
            self._grid = (registration.layout_digest, found.shard.grid, found.chunk_bytes)
        return found

    async def _prepare_tiles(
        self, options: Options, me: WorkerId, shards: int, registration: Registration, metadata: bytes, deadline: float
    ) -> Callable[[], TiledVersion]:
        """As `prepare_tiles`; in the tiles of the publish before if the server is gone, and this worker the writer."""
        worker, loop = self.driver.worker, asyncio.get_running_loop()
        while self._grid is not None and self._grid[0] == registration.layout_digest:
            try:
                async with asyncio.timeout_at(min(deadline, worker.alone_at)):
                    return await prepare_tiles(options, me, shards, registration, metadata, deadline)
            except TimeoutError:
                if loop.time() >= deadline or loop.time() >= worker.alone_at:
                    _, grid, chunk_bytes = self._grid
                    return partial(tiled_version, registration, grid, chunk_bytes, metadata=metadata)
        return await prepare_tiles(options, me, shards, registration, metadata, deadline)

    def _metadata_of(self, version: Spec, metadata: bytes | None) -> bytes:
        """The metadata to publish with that version. Raises `VersionConflict` if it is held here with other words."""
        held = self.manifest_held
        if held is None:
            return metadata or b""
        if metadata is not None and metadata != held.metadata:
            text = f"{self.me} holds version {version} with other metadata"
            raise VersionConflict(text, hint="unpublish(), then publish a higher number with the new metadata")
        return held.metadata

    @property
    def manifest_held(self) -> Known | None:
        """The manifest of the version held."""
        content, held = self.driver.data.content, None if self.driver.is_gone else self.driver.worker.held
        if held is None:
            return None
        return content.manifest if content is not None and content.version == held else self.driver.data.vacated

    async def wait_for(self, spec: Spec, deadline: float) -> Version:
        """Until the version, or a newer one, exists. Returns what the spec means then.

        The server that has said so may have come back just now. The next call of this worker is to reach it as well.
        """
        self.check_usable()
        version = await wait_for_version(self.options, self.me.model, spec, deadline)
        await self.driver.until(lambda: self.driver.worker.has_heard, deadline)
        return version

    async def wait_held(self, version: Version, fraction: float, deadline: float) -> tuple[str, ...]:
        """Until that fraction of the other replicas hold the version or a newer one. Returns their names."""
        self.check_usable()
        return await wait_for_holders(self.options, self.me.model, self.me.replica, version, fraction, deadline)

    async def check(self, deadline: float) -> None:
        """Hash the held version again. Raises `NotDrained` naming the tensors that were changed."""
        self.check_usable()
        content, held = self.driver.data.content, self.driver.worker.held
        if held is None or content is None or content.manifest is None:
            raise UsageError(f"{self.me} holds no version, so there is nothing to check", hint="publish or replicate")
        with self.driver.record.timed(VERIFY):
            root, parts = self._parts
            parts = parts if root == content.manifest.root() else {}
            await check_unchanged(self.me, held, content.registration, content.manifest, parts, deadline)

    async def close(self, deadline: float) -> None:
        """Withdraw, wait for readers, leave. Idempotent; ends by its deadline."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(deadline))
        try:
            async with asyncio.timeout_at(deadline + AFTER_DEADLINE_S):
                await asyncio.shield(self._closing)
        except TimeoutError:  # an earlier close() has more patience than this one
            await self.driver.end(deadline)

    @property
    def version(self) -> Version | None:
        """The version held, whole and verified; None if there is none, or once this worker has gone."""
        is_written = self.driver.data.lease.is_touched and isinstance(self.driver.worker.buffer, Vacated)
        is_none = self.driver.is_gone or is_written or self.cast_state.why_torn(self.driver)
        return None if is_none else self.driver.worker.held

    @property
    def metadata(self) -> dict[str, Json] | None:
        """What its publisher said of the version held; None if there is none."""
        manifest = self.manifest_held if self.version is not None else None
        return decode_metadata(manifest.metadata) if manifest is not None else None

    @property
    def progress(self) -> Progress | None:
        """How far the fill of the tensors is; None if there is none."""
        return None if self.driver.is_gone else self.driver.progress

    def statistics(self) -> Statistics:
        """Figures of this worker's life."""
        return self.driver.statistics()

    # ------------------------------------------------------------------------------------------------------------------

    def _why_it_cannot_end(self) -> UsageError | None:
        """The mistake of a call that waits for shards which its own thread would have to call."""
        thread = self.callers.waiting
        if thread is None:
            return None
        for other in list(living):
            is_sibling = (other.me.model, other.me.replica) == (self.me.model, self.me.replica) and other is not self
            if is_sibling and other.options.server == self.options.server and other.is_idle_but_for(thread):
                verb = self.call_lock.calling
                text = f"{verb} of {self.me} waits for {other.me}, which only this waiting thread has used"
                hint = "all shards call at the same time: a thread for each of them, or tensorhub.aio"
                return UsageError(text, hint=hint)
        return None

    @property
    def is_leaving(self) -> bool:
        """It was closed, or is about to be, or has stopped. Any thread may ask."""
        return self._closing is not None or self.driver.is_gone or self.driver.broken is not None

    def is_idle_but_for(self, thread: threading.Thread) -> bool:
        """It is in no call, and only that thread may begin one."""
        is_idle = not self.call_lock.calling and self._closing is None and not self.driver.is_gone
        return is_idle and self.callers.are_only(thread)

    async def _close(self, deadline: float) -> None:
        self.boxing.end()
        for task in self._following:
            task.cancel()
        self.call_lock.wake()
        is_drained = await self.driver.leave(deadline)
        self.unpublishing.end()
        if not is_drained and self.driver.broken is None:
            _log.warning("%s left before the server confirmed that no worker reads from it", self.me)

    def check_may_call(self, verb: str) -> None:
        """Raises `UsageError` or `Closed` if the call may not begin now. Changes nothing."""
        self.check_usable()
        self.call_lock.check(verb)
        self.suspension.check(verb)

    @contextlib.contextmanager
    def _one_call(self, verb: str) -> Iterator[None]:
        """One call at a time: hashing belongs to the call, but the machine hears of it only afterwards."""
        self.check_may_call(verb)
        record = self.driver.record
        with self.call_lock.of(verb), record.timed(CALL, verb), self.driver.last.timed(verb, record):
            try:
                yield
            except TensorHubError as error:
                record.add(CALL_ERRORS, 1, verb, error.code)
                raise

    def check_usable(self) -> None:
        broken = self.driver.broken
        if broken is not None:
            raise InvariantViolation(f"{self.me} has stopped: {broken}") from broken
        if self._closing is not None or self.driver.is_gone:
            raise Closed(f"{self.me} was closed", hint="open it again")

    def _note_call(self) -> None:
        """Called in the caller's thread. Later work waits for what this thread has launched on its streams."""
        if self.driver.data.registration is not None:
            self.driver.data.registration.note_call()

    def _check_in_place(self) -> None:
        if self.driver.data.registration is not None:
            self.driver.data.registration.check_in_place(str(self.me))
