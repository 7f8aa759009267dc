"""TensorHub for coroutines: the same names as in `tensorhub`, to be awaited in any event loop.

The work happens in one thread of this process that all workers share; a coroutine here only waits for it, so a caller
that is cancelled cancels its call, and nothing here ever blocks the caller's loop. (`register` and `resume` look at the
tensors, and take memory for masters, in a thread of their own.)
"""

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from .calls import Callback, Shown
from .loading import load_async, load_shards_async
from .memory.registration import Registration
from .memory.registration import register as register_tensors
from .protocol.errors import Refused, UsageError
from .protocol.events import Event, EventsView
from .protocol.layout import Box
from .protocol.manifest import Json, encode_metadata
from .protocol.messages import Spec
from .protocol.names import ModelName, Version
from .protocol.status import LayoutView, ModelView, ReplicaView, Status, Transfer, VersionView
from .runtime.cast_state import present_user
from .runtime.client import Client
from .runtime.config import (
    OpenArguments,
    Options,
    check_integer,
    check_name,
    check_place,
    open_options,
    parse_fraction,
    parse_seconds,
    with_own_token,
)
from .runtime.loops import LoopThread, Undo, check_process, in_thread, is_worker_loop, loop_thread, warn_unreferenced
from .runtime.opening import leave_at_once, open_client
from .runtime.questions import (
    LONG_POLL_S,
    fetch_events,
    fetch_status,
    forget_numbers,
    layout_of,
    metadata_of,
    parse_number,
    plain_spec,
    wait_for_number,
)
from .runtime.statistics import Progress, Statistics
from .runtime.tracing import traced
from .tracebacks import AsyncBlock, brief, brief_methods

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights

T = TypeVar("T")

_log = logging.getLogger(__name__)

load, load_shards = load_async, load_shards_async  # as in `tensorhub`, awaited

LEAVE_IN_A_HURRY_S = 5.0  # when a `with` block ends by an exception: slow readers are not waited for then


@brief
async def open(
    model: str,
    *,
    replica: str,
    shard: int = 0,
    shards: int = 1,
    reliable: bool = True,
    **options: Unpack[OpenArguments],
) -> "Weights":
    """Join `model` as one shard of one replica, and connect to the reference server.

    What is None comes from TENSORHUB_SERVER, _SITE, _TOKEN, _INSECURE, _HOST, _VERIFY, _CHUNK_BYTES, _TRANSPORTS,
    _PREFETCH, _RETAIN, _HOST_BYTES, _CONNECT_S (`timeout`) and _TIMEOUT_S (`call_timeout`), else from its default. The
    token is the server's, by default this user's own; with `insecure` there is none. `transports` limits and orders the
    ways to move bytes, e.g. "local,tcp". `timeout` is for this call, in seconds, `call_timeout` for every later one,
    unless told otherwise. Peers read from this worker at `host`; several addresses, or interfaces ("eth0,eth1"), are
    used side by side. `reliable=False`: it may vanish at any time; others read from it, but do not rely on it.

    `retain` is how many of the newest versions of the model are kept until all workers have left: the most that
    reliable workers ask for, 1 at least and 8 at most unless the server says otherwise. The last reliable worker to
    leave one copies it to host memory first. All its copies together take at most `host_bytes` (by default two copies
    of the shard, or `retain` + 1, if there is room at `register`; 0: none). `site` names this worker's datacenter:
    between sites each shard of a version travels once. `prefetch` says when versions are fetched into host memory
    ahead: "seed", for a site that lacks the newest one; "always", for this worker too; "never".

    Raises `ServerUnreachable`, `ShardTaken`, `Refused` (token, protocol), and `UsageError` naming a bad argument.
    """
    return await join(model, replica, shard, shards, reliable, open_options(**options))


async def join(model: str, replica: str, shard: int, shards: int, reliable: bool, options: Options) -> "Weights":
    """Open a worker with options that are parsed already."""
    model, replica, shard, shards = check_place(model, replica, shard, shards)
    if not isinstance(reliable, bool):
        raise UsageError(f"reliable={reliable!r} is neither True nor False")
    deadline, thread = time.monotonic() + options.connect_s, loop_thread()
    while True:
        opening = open_client(model, replica, shard, shards, reliable, options, deadline)
        try:
            return Weights(await thread.run_here(opening, undo=leave_at_once), thread)
        except Refused:  # this user's first server may have made the token after this worker looked for it
            before, options = options, with_own_token(options)
            if options == before:
                raise


class Caller:
    """What needs the thread that all workers of this process share."""

    def __init__(self, thread: LoopThread, name: str, timeout_s: float) -> None:
        self._thread, self._name, self._timeout_s = thread, name, timeout_s
        self._pid = os.getpid()

    def _check_process(self) -> None:
        check_process(self._pid, self._name)

    def _deadline(self, timeout: object) -> float:
        return time.monotonic() + (self._timeout_s if timeout is None else parse_seconds(timeout, "timeout"))

    def _check_outside(self, verb: str) -> None:
        """Raises `UsageError` where the call would wait for its own caller."""

    def _shown(self, callback: Any) -> Shown | None:
        """What shows the progress of a call to its caller; None where nothing does."""
        return None

    def _waits(self) -> AbstractContextManager[object]:
        """A block in which the calling thread waits for a call."""
        return contextlib.nullcontext()


class Worker(Caller):
    """What a worker tells without asking the server."""

    def __init__(self, client: Client, thread: LoopThread) -> None:
        super().__init__(thread, str(client.me), client.options.timeout_s)
        self._client = client
        client.callers.note()

    def __repr__(self) -> str:
        return f"<Weights {self._name}>"

    @property
    def version(self) -> int | None:
        """The version held, whole and verified; None if there is none."""
        self._check_process()
        return self._client.version

    @property
    def metadata(self) -> dict[str, Json] | None:
        """What its publisher said of the version held beside its tensors, {} if nothing; None if no version is held."""
        self._check_process()
        return self._client.metadata

    @property
    def progress(self) -> Progress | None:
        """How far the fill of the tensors is: version, bytes, source and rate; None when there is none."""
        self._check_process()
        return self._client.progress

    def statistics(self) -> Statistics:
        """Figures of this worker's life: bytes by source, seconds of updates and publishes, connections."""
        self._check_process()
        return self._client.statistics()

    def _shown(self, callback: Any) -> Shown | None:
        client = self._client
        return Shown(lambda: client.progress, lambda: client.filled, callback) if callback is not False else None

    def _check_outside(self, verb: str) -> None:
        self._client.call_lock.check_outside(verb)

    def _on_version(self, tell: Callable[[int], Coroutine[object, object, None]]) -> Callable[[], None]:
        """The function that ends it. Raises `Closed`."""
        self._check_process()
        client, loop, name = self._client, self._thread.loop, self._name
        client.check_usable()
        is_over = threading.Event()

        async def told(version: int) -> None:
            try:
                if not is_over.is_set():
                    await tell(version)
            except Exception as error:  # noqa: BLE001 - of the caller's function: it is logged
                _log.error("on_version() of %s: its callback has failed for version %d", name, version, exc_info=error)

        following: list[asyncio.Task[None]] = []
        loop.call_soon_threadsafe(lambda: following.append(client.follow(told)))

        def end() -> None:
            is_over.set()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has it
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in following])

        return end

    def _waits(self) -> AbstractContextManager[object]:
        return self._client.callers.blocked()

    def _hurry(self, error: BaseException | None) -> float | None:
        """The timeout of a `close` at the end of a `with` block."""
        return None if error is None else min(LEAVE_IN_A_HURRY_S, self._timeout_s)


@brief_methods
class Weights(Worker):
    """One worker: one shard of one model in registered memory. Made by `open`.

    One call at a time; all shards of a replica make the same calls in the same order. Every blocking call takes
    `timeout=` in seconds (default 300 s, see `call_timeout` of `open`) and ends by then, in success or in an error.
    """

    def __init__(self, client: Client, thread: LoopThread) -> None:
        super().__init__(client, thread)
        self._kept: object = None  # the module, or mapping, that was registered: the loop knows its tensors only
        self._is_closing = False

    def __del__(self) -> None:
        """Nothing references it any more: it leaves as `close()` would, and no caller waits for it."""
        if sys.is_finalizing() or getattr(self, "_is_closing", True) or os.getpid() != self._pid:
            return
        client = self._client
        if not client.is_leaving:
            self._thread.begin(lambda: client.close(time.monotonic() + client.options.timeout_s))
            warn_unreferenced(self, f"{self!r} at {client.options.server}")

    async def __aenter__(self) -> "Weights":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(timeout=self._hurry(error))

    # --- calls --------------------------------------------------------------------------------------------------------

    async def register(
        self,
        tensors: "type_of_weights",
        *,
        dtype: "type_of_dtype | Mapping[str, type_of_dtype] | None" = None,
        boxes: Mapping[str, Sequence[Box]] | None = None,
        partial: bool = False,
        leave_out: str | Sequence[str] = (),
    ) -> None:
        """Take these tensors in place, instead of any before; nothing is copied.

        A torch module is best: its parameters and persistent buffers (of a `DTensor` the local shard), and at every
        publish and before every fill it is asked whether it still holds them; one that was replaced is a `UsageError`.
        Or torch tensors (CPU or CUDA, any dtype, dense) and numpy arrays, by name. Their memory belongs to the caller,
        who keeps it where it is, and changes it only while nothing is published or held. Raises `UsageError` naming the
        tensor that cannot be taken, `NotDrained` while a version is held.
        `dtype`: publish tensors of floating-point numbers in that dtype, rounded as torch does ("bfloat16"), or those
        that a mapping names in theirs. They become *masters*: each `publish` casts them into a buffer of this worker's,
        and only that is held and read, so masters may change outside of `publish`, `replicate` and `update`. A fill
        ends by giving them the buffer's numbers, exactly, or is refused. Raises `HostMemoryFull` without room for it.
        `boxes`: by name, which parts of which global tensors lie where in a tensor (docs/layouts.md); one not named is
        whole, a DTensor what its placements say. Replicas with different layouts can then read from each other.
        `partial`: some of the model is left out on purpose; without it, a replica with gaps is refused every version.
        `leave_out`: names, or patterns with *, of what is not registered. A module with state that only `state_dict()`
        knows (extra state, packed weights, what a hook adds) is a `UsageError` that names it, unless it is left out.
        """
        self._check_process()
        options = {"partial": partial, "leave_out": leave_out}
        looking = in_thread(lambda: register_tensors(tensors, dtype, boxes, **options), name="register")  # type: ignore[arg-type]
        await self.take(await looking, of=tensors)

    async def take(self, registration: Registration, *, of: object = None, is_resumed: bool = False) -> None:
        """Take tensors that `memory.registration.register` has looked at already. `of`: the module that has them."""
        await self._here(self._client.register(registration, self._deadline(None), is_resumed=is_resumed))
        self._kept = self._kept if of is None else of

    async def suspend(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Withdraw, and forget where the tensors are: their memory may be unmapped, freed or moved until `resume`.

        For engines that sleep. As `unpublish`, all shards of a replica call it; when it returns there are no readers,
        and nothing here keeps the memory. Until `resume` or `register` calls that need the tensors are a `UsageError`;
        copies in host memory are read and prefetched on. Does nothing while suspended. Raises as `unpublish` does.
        """
        self._check_outside("suspend")
        deadline, suspension = self._deadline(timeout), self._client.suspension
        self._client.call_lock.check("suspend")
        suspension.check_registered()
        await self._here(self._client.operate("unpublish", "", deadline))
        await self._here(suspension.begin(deadline))

    async def resume(self, tensors: "type_of_weights | None" = None) -> None:
        """Register again what was suspended, where it is now: the module, or the mapping with what it holds by now.

        Or these tensors, in the same layout (else `UsageError`, which names them). Afterwards they are no version:
        `replicate` fills them, `publish` takes them for what they are: after `register`, if a failed fill spoiled them.
        """
        self._check_process()
        found = await in_thread(lambda: self._client.suspension.again(tensors), name="resume")
        await self.take(found, of=tensors, is_resumed=True)

    @traced("publish")
    async def publish(
        self,
        version: int,
        *,
        metadata: Mapping[str, object] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> int:
        """Let all workers read what the tensors are now, as `version`, and promise not to change them.

        `metadata` goes with the version to each worker that gets it: a mapping of JSON values, 16 KiB at most, the same
        on all shards, verified as the tensors are. Blocks while the tensors are hashed and until all shards of the
        replica have published. Raises `VersionConflict`, `GroupMismatch`, `GroupIncomplete`, `NotDrained`,
        `UsageError`.
        """
        said = encode_metadata(metadata) if metadata is not None else None
        return _certain(await self._here(self._client.publish(plain_spec(version), self._deadline(timeout), said)))

    @traced("unpublish")
    async def unpublish(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Take the promise back: returns when these tensors have no readers and may be changed.

        Readers are moved to other holders, else awaited; those who still read after half of the timeout are cut off.
        With masters alone (`dtype` of `register`) it returns as soon as no new reader may come: the next call awaits
        the others, within this timeout, and raises what went wrong. With nothing published it does nothing. Raises
        `NotDrained` if it was to keep the last copy of what was freed: that version is withdrawn, and lost.
        """
        self._check_outside("unpublish")
        await self._here(self._client.operate("unpublish", "", self._deadline(timeout)))

    def mutating(
        self, *, version: int, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Unpublish, let the block change the tensors, publish them as `version`.

        The number is checked before anything is withdrawn: if it is not higher than the newest, or another replica is
        the writer of the model, that is a `VersionConflict` at once, nothing was changed and the block does not run;
        so it is with tensors that a failed fill may have begun to write, a `UsageError`. No other replica can publish
        meanwhile. If the block raises, nothing is published: the tensors stay unpublished, and the exception goes on.
        In the block no call may fill, publish or withdraw them (`UsageError`); `register` may change them. With
        masters alone readers of the version before are awaited after the block, not before it. `metadata` is that of
        `publish`, as it is when the block has ended. `timeout` is for each of the two calls.
        """
        return AsyncBlock(self._mutating(version, metadata, timeout))

    @contextlib.asynccontextmanager
    async def _mutating(
        self,
        version: int,
        metadata: Mapping[str, object] | None,
        timeout: float | None,  # noqa: ASYNC109 - our own deadline
    ) -> AsyncIterator[None]:
        await self._claim(version, timeout, metadata)
        with self._client.call_lock.block_of(version):
            yield
        await self.publish(version, metadata=metadata, timeout=timeout)

    @traced("mutating")
    async def _claim(self, version: int, within: float | None, metadata: Mapping[str, object] | None = None) -> None:
        """The beginning of `mutating`: unpublish, and keep the number until it is published."""
        if metadata is not None:
            encode_metadata(metadata)  # what cannot be published is said before the step
        claimed = parse_number(version, f"mutating() of {self._client.me}")
        self._check_outside("mutating")
        claiming = self._client.operate("unpublish", "", self._deadline(within), claim=claimed)
        await self._here(claiming)

    async def _leave(self) -> None:
        """It was opened when its caller gave up."""
        self._is_closing = True
        await leave_at_once(self._client)

    @traced("replicate")
    async def replicate(
        self,
        spec: Spec = "latest",
        *,
        wait: bool = False,
        progress: Callback = False,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> int:
        """Fill the tensors with a version, verified; afterwards this worker serves it to others.

        `spec` is a version number, "latest" or "latest-N". "latest" waits for a first version, "latest-N" for so many;
        a number waits to be published with `wait=True`, as long as no higher one was. Returns the version when all
        shards of the replica have it. `progress` is a function that gets a `Progress` up to four times a second, while
        bytes come and once at the end, in the thread or task that waits here; an exception of it ends the call. True
        shows a bar (tqdm, extra `progress`).
        On an error in mid-transfer the tensors are no version at all, and can only be filled again. Raises
        `VersionUnavailable`, `LayoutMismatch`, `CorruptTransfer`, `SourceLost`, `GroupIncomplete`, `GroupMismatch`.
        """
        if not isinstance(wait, bool):
            raise UsageError(f"wait={wait!r} is neither True nor False")
        return await self._fill("replicate", spec, progress, timeout, waits=wait)

    @traced("update")
    async def update(
        self,
        spec: Spec = "latest",
        *,
        progress: Callback = False,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> int:
        """Leave the version held and replicate a newer one, if there is one. Returns the version now held.

        Cheap when nothing is newer. Where no worker that has all of the newer version was heard for 2 s, "latest" keeps
        what is held, and the log says so. A number waits. One that is not newer keeps what is held; a newer one that
        does not exist is `VersionUnavailable`. "prefetched" is the newest version that every shard of this replica has
        fetched ahead, whole; while there is none the version held is kept, and the call does not wait. So an update is
        never more than a local copy. It wants `prefetch="always"` on `open`, or `prefetch()` before (else
        `UsageError`). `progress` is that of `replicate`. It waits for blocks of `using`. Errors as of `replicate` and
        `unpublish`; after one the shards may hold different versions until the next call succeeds.
        """
        return await self._fill("update", spec, progress, timeout)

    async def _fill(
        self, verb: str, spec: Spec, progress: Callback, within: float | None, *, waits: bool = False
    ) -> int:
        self._check_outside(verb)
        filling = self._client.operate(verb, plain_spec(spec), self._deadline(within), waits=waits)
        shown = (
            None if is_worker_loop(asyncio.get_running_loop()) else self._shown(progress)
        )  # else its thread shows it
        if shown is None:
            return _certain(await self._here(filling))
        with shown:
            return _certain(await self._here(filling, tick=shown.tick))

    def using(self, *, timeout: float | None = None) -> AbstractAsyncContextManager[int]:
        """A block in which the tensors stay as they are: `async with weights.using() as version`.

        Calls of others that would change them, or take the version back, wait for its end, within their timeouts:
        `update`, `replicate`, `unpublish`, `mutating` and `suspend`. In the block such a call is a `UsageError`. It
        begins once such a call has ended, within `timeout`. Blocks of one caller may lie inside each other. Raises
        `UsageError` if no version is held, and `DeadlineExceeded`.
        """
        return AsyncBlock(self._using(timeout))

    @contextlib.asynccontextmanager
    async def _using(self, within: float | None) -> AsyncIterator[int]:
        user = present_user()
        name = user.get_name() if isinstance(user, asyncio.Task) else str(user)
        version = await self._here(self._client.use(user, name, self._deadline(within)), undo=self._undo_use(user))
        try:
            yield version
        finally:
            self._leave_use(user)

    def _undo_use(self, user: object) -> Undo[Version]:
        async def undo(version: Version) -> None:
            self._client.call_lock.leave(user)

        return undo

    def _leave_use(self, user: object) -> None:
        """The block has ended. Waits for nothing."""
        self._client.call_lock.leave(user)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all of its workers
            self._thread.loop.call_soon_threadsafe(self._client.call_lock.wake)

    def on_version(self, callback: Callable[[int], object]) -> Callable[[], None]:
        """Call the function, or coroutine function, with each version that appears and is newer than the one held.

        In the event loop that calls this, one at a time; a version that is passed by meanwhile is left out. An
        exception is logged. Ends with `close()`, or when the function that this returns is called. Raises `Closed`.
        """
        here = asyncio.get_running_loop()

        async def tell(version: int) -> None:
            async def told() -> None:
                found = callback(version)
                if inspect.isawaitable(found):
                    await found

            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(told(), here))

        return self._on_version(tell)

    async def prefetch(self, spec: Spec = "latest") -> None:
        """Begin to fill a copy in host memory with that version while the tensors go on holding theirs.

        Returns at once; `update` is then a local copy, and others may read the copy meanwhile. With "latest" it follows
        the newest version until the next `update` or `replicate`. Without room under `host_bytes` nothing happens.
        Raises `UsageError` before `register()`.
        """
        await self._here(self._client.prefetch(plain_spec(spec)))

    async def pin(self, version: int, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Keep that version, however new others are, until `unpin` or the end of this worker.

        When this returns, no worker leaves the last reliable copy of it by its own will. Raises `VersionUnavailable` if
        no worker holds it, `ServerUnreachable` if the server cannot be asked, `DeadlineExceeded`.
        """
        await self._here(self._client.pin(parse_number(version, "a pin"), self._deadline(timeout)))

    async def unpin(self, version: int, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Take the pin back. Does nothing where there was none."""
        await self._here(self._client.unpin(parse_number(version, "a pin"), self._deadline(timeout)))

    async def wait_for(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - our own deadline
        """Wait until the version, or a newer one, was published. Returns what there is then; changes nothing.

        "latest" waits for any version at all, "latest-N" for more than N of them. Raises `DeadlineExceeded`.
        """
        return await self._here(self._client.wait_for(plain_spec(spec), self._deadline(timeout)))

    async def wait_held(
        self,
        version: int,
        fraction: float = 1.0,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> tuple[str, ...]:
        """Wait until that fraction of the other replicas hold the version or a newer one. Returns their names.

        For a trainer that must not run ahead of its rollouts. Counted are replicas that have called `replicate` or
        `update`, all of whose shards live, none of which is closing, and that are no trainers: one that dies is waited
        for until its lease ends, one that starts is not waited for. Where there is none, it returns at once. Each shard
        asks for itself. Raises `DeadlineExceeded`, which says who is missing and what those hold.
        """
        number, part = parse_number(version, "wait_held()"), parse_fraction(fraction, "fraction")
        return await self._here(self._client.wait_held(number, part, self._deadline(timeout)))

    async def check(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Hash the tensors again: raises `NotDrained` naming those that were changed while they were published.

        A publisher has digests of small tensors too. A reader, and what lies on a device, has digests of chunks only:
        where several tensors share a changed chunk, the error says that at least one of them was changed.
        """
        await self._here(self._client.check(self._deadline(timeout)))

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Withdraw, wait for readers, leave; the tensors are the caller's alone then. Idempotent; fit for `__del__`."""
        self._is_closing = True
        await self._here(self._client.close(self._deadline(timeout)))
        self._kept = None

    # ------------------------------------------------------------------------------------------------------------------

    def _here(
        self,
        work: Coroutine[object, object, T],
        *,
        undo: Undo[T] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> Coroutine[object, object, T]:
        try:
            self._check_process()
        except BaseException:
            work.close()
            raise
        self._client.callers.note()
        return self._thread.run_here(work, undo=undo, tick=tick)


@brief
def connect(
    server: str | None = None,
    *,
    token: str | None = None,
    insecure: bool | None = None,
    timeout: float | None = None,
) -> "View":
    """A read-only view of a reference server: which models, versions and replicas there are, and what is read.

    `token` and `insecure` are as of `open`; an insecure server looks at no token. `timeout` is for each question. Asks
    nothing.
    """
    return View(open_options(server=server, token=token, insecure=insecure, timeout=timeout), loop_thread())


@brief_methods
class View(Caller):
    """What a reference server shows of itself. Each question blocks and is asked anew; nothing is kept.

    Raises `ServerUnreachable`, `Refused`.
    """

    def __init__(self, options: Options, thread: LoopThread) -> None:
        super().__init__(thread, f"the view of {options.server}", options.connect_s)
        self._options = options

    async def status(self, *, model: str = "", timeout: float | None = None) -> Status:  # noqa: ASYNC109 - our own deadline
        """The whole picture, or that of one model."""
        self._check_process()
        return await self._thread.run_here(fetch_status(self._options, model=model, deadline=self._deadline(timeout)))

    async def models(self) -> list[str]:
        """Names of all models, sorted."""
        return [each.name for each in (await self.status()).models]

    async def versions(self, model: str) -> tuple[VersionView, ...]:
        """The versions known of a model, newest first; none of a model that is unknown."""
        found = await self._model(model)
        return found.versions if found is not None else ()

    async def replicas(self, model: str) -> tuple[ReplicaView, ...]:
        """The replicas of a model that live, by name."""
        found = await self._model(model)
        return found.replicas if found is not None else ()

    async def events(self, *, after: int = 0, follow: bool = False, model: str = "") -> AsyncIterator[Event]:
        """The newest 10,000 events that the server keeps, oldest first, and with `follow` each one as it comes.

        `after` is the `number` of the last event that the caller has had, of the same server or one before it. `model`
        takes those of one model. `tensorhub.protocol.events` has the kinds; the `text` of each is a line for people.
        Raises `ServerUnreachable` where the server answers no question in time: ask again with `after`. Raises
        `Refused`.
        """
        number = check_integer(after, "after", least=0, most=2**63 - 1)
        is_first = True
        while True:
            found = await self._events_after(number, model, follow=follow and not is_first)
            for event in found.all():
                yield event
            if not (follow or found.events):
                return
            number, is_first = found.last, False

    async def _events_after(self, number: int, model: str, *, follow: bool) -> EventsView:
        self._check_process()
        deadline = self._deadline(None) + (LONG_POLL_S if follow else 0.0)
        return await self._thread.run_here(fetch_events(self._options, number, model, deadline, follow=follow))

    async def next_version(self, model: str, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - our own deadline
        """The number with which a restarted trainer goes on: the lowest above all that were ever taken, 0 at first.

        Taken are versions that exist or were lost. Ask on one shard and tell the others. A restarted server knows what
        its journal and the workers that live have told it: it is waited for until all have. Raises
        `ServerUnreachable`, `DeadlineExceeded`.
        """
        self._check(model)
        return await self._thread.run_here(wait_for_number(self._options, model, self._deadline(timeout)))

    async def begin_anew(self, model: str, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Forget the numbers of a model, so that its trainer may begin with 0 again: `tensorhub rm`.

        Only where no worker that lives holds any version of it, in its tensors or in host memory; else
        `VersionConflict` names the holders. Other workers may live, and go on with the model. Returns once all of them
        have heard so: a server that restarts afterwards does not have the old numbers from them. Raises
        `VersionUnavailable` for a model that the server does not know, `ServerUnreachable`, `DeadlineExceeded`.
        """
        self._check(model)
        await self._thread.run_here(forget_numbers(self._options, model, self._deadline(timeout)))

    async def layout(self, model: str, spec: Spec = "latest", *, timeout: float | None = None) -> LayoutView:  # noqa: ASYNC109 - our own deadline
        """Returns the layout of a version, without registering tensors: names, dtypes and shapes, shard by shard.

        With boxes: of the whole tensors, in one shard, as `load` gives them. Raises `VersionUnavailable`, `SourceLost`,
        `ServerUnreachable`, `DeadlineExceeded`, `UsageError`.
        """
        self._check(model)
        return await self._thread.run_here(layout_of(self._options, model, plain_spec(spec), self._deadline(timeout)))

    async def metadata(self, model: str, spec: Spec = "latest", *, timeout: float | None = None) -> dict[str, Json]:  # noqa: ASYNC109 - our own deadline
        """Returns the metadata that the publisher gave with a version, {} if there are none.

        Asked of a holder by `tcp`, and verified. Raises as `layout` does; `SourceLost` where none can be reached.
        """
        self._check(model)
        return await self._thread.run_here(metadata_of(self._options, model, plain_spec(spec), self._deadline(timeout)))

    async def transfers(self) -> tuple[Transfer, ...]:
        """Returns the reads under way: reader, version, source, and the reason for the source."""
        return (await self.status()).transfers

    def _check(self, model: str) -> None:
        self._check_process()
        check_name(model, "model")

    async def _model(self, name: str) -> ModelView | None:
        found = (await self.status(model=ModelName(name))).models
        return found[0] if found else None


def _certain(version: int | None) -> int:
    assert version is not None, "the call ended well without a version"
    return version
