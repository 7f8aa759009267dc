"""TensorHub for coroutines: the same names as in `tensorhub`, to be awaited in any event loop.

The work happens in one thread of this process that all workers share; a coroutine here only waits for it, so a caller
that is cancelled cancels its call, and nothing here ever blocks the caller's loop. (`register` and `resume` look at the
tensors, and take memory for masters, in a thread of their own.)
"""

import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from .loading import load_async, load_shards_async
from .memory.registration import Registration
from .memory.registration import register as register_tensors
from .protocol.errors import Refused, UsageError
from .protocol.layout import Box
from .protocol.manifest import Json, encode_metadata
from .protocol.messages import Spec
from .protocol.names import ModelName
from .protocol.status import LayoutView, ModelView, ReplicaView, Status, Transfer, VersionView
from .runtime.client import Client
from .runtime.config import (
    Options,
    check_name,
    check_place,
    parse_fraction,
    parse_seconds,
    with_own_token,
    worker_options,
)
from .runtime.descriptions import layout_of, metadata_of
from .runtime.loops import LoopThread, Undo, check_process, in_thread, loop_thread, warn_unreferenced
from .runtime.opening import leave_at_once, open_client
from .runtime.questions import fetch_status, parse_number, plain_spec, wait_for_number

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights

T = TypeVar("T")

load, load_shards = load_async, load_shards_async  # as in `tensorhub`, awaited

LEAVE_IN_A_HURRY_S = 5.0  # when a `with` block ends by an exception: nobody wants to wait for slow readers then


async def open(
    model: str,
    *,
    replica: str,
    shard: int = 0,
    shards: int = 1,
    server: str | None = None,
    reliable: bool = True,
    site: str | None = None,
    token: str | None = None,
    insecure: bool | None = None,
    host: str | None = None,
    verify: str | None = None,
    chunk_bytes: int | str | None = None,
    transports: str | Sequence[str] | None = None,
    prefetch: str | None = None,
    retain: int | None = None,
    host_bytes: int | str | None = None,
    timeout: float | None = None,  # noqa: ASYNC109 - a deadline of ours, told to the server too
    call_timeout: float | None = None,
) -> "Weights":
    """Join `model` as one shard of one replica; as `tensorhub.open`, awaited."""
    options = worker_options(
        server=server,
        site=site,
        token=token,
        insecure=insecure,
        host=host,
        verify=verify,
        chunk_bytes=chunk_bytes,
        transports=transports,
        prefetch=prefetch,
        retain=retain,
        host_bytes=host_bytes,
        connect_s=_seconds(timeout, "timeout"),
        timeout_s=_seconds(call_timeout, "call_timeout"),
    )
    return await _join(model, replica, shard, shards, reliable, options)


async def _join(model: str, replica: str, shard: int, shards: int, reliable: bool, options: Options) -> "Weights":
    model, replica, shard, shards = check_place(model, replica, shard, shards)
    if not isinstance(reliable, bool):
        raise UsageError(f"reliable={reliable!r} is neither True nor False")
    deadline, thread = time.monotonic() + options.connect_s, loop_thread()
    while True:
        opening = open_client(model, replica, shard, shards, reliable, options, deadline)
        try:
            return Weights(await thread.here(opening, undo=leave_at_once), thread)
        except Refused:  # this user's first server may have made the token after this worker looked for it
            before, options = options, with_own_token(options)
            if options == before:
                raise


class Weights:
    """One worker: one shard of one model in registered memory. Made by `open`; see `tensorhub.Weights`."""

    def __init__(self, client: Client, thread: LoopThread) -> None:
        self._client = client
        self._thread = thread
        self._pid = os.getpid()
        self._kept: object = None  # the module, or mapping, that was registered: the loop knows its tensors only
        self._is_closing = False
        client.callers.note()

    def __repr__(self) -> str:
        return f"<Weights {self._client.me}>"

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
        await self.close(timeout=None if error is None else self._hurry())

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
        """Take these tensors in place, instead of any before; nothing is copied. As `tensorhub.Weights.register`."""
        self._check_process()
        options = {"partial": partial, "leave_out": leave_out}
        looking = in_thread(lambda: register_tensors(tensors, dtype, boxes, **options), name="register")  # type: ignore[arg-type]
        await self.take(await looking, of=tensors)

    async def take(self, registration: Registration, *, of: object = None, is_resumed: bool = False) -> None:
        """Take tensors that `memory.registration.register` has looked at already. `of`: the module that has them."""
        await self._here(self._client.register(registration, self._deadline(None), is_resumed=is_resumed))
        self._kept = self._kept if of is None else of

    async def suspend(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Withdraw, and forget where the tensors are, until `resume`."""
        deadline, suspension = self._deadline(timeout), self._client.suspension
        self._client.turn.check("suspend")
        suspension.check_registered()
        await self._here(self._client.operate("unpublish", "", deadline))
        await self._here(suspension.begin(deadline))

    async def resume(self, tensors: "type_of_weights | None" = None) -> None:
        """Register again what was suspended, where it is now, or these tensors."""
        self._check_process()
        found = await in_thread(lambda: self._client.suspension.again(tensors), name="resume")
        await self.take(found, of=tensors, is_resumed=True)

    async def publish(
        self,
        version: int,
        *,
        metadata: Mapping[str, object] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> int:
        """Let everybody read what the tensors are now, as `version`, and promise not to change them."""
        said = encode_metadata(metadata) if metadata is not None else None
        return _certain(await self._here(self._client.publish(plain_spec(version), self._deadline(timeout), said)))

    async def unpublish(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Take the promise back: returns when nobody reads these tensors any more."""
        await self._here(self._client.operate("unpublish", "", self._deadline(timeout)))

    @contextlib.asynccontextmanager
    async def mutating(
        self,
        *,
        version: int,
        metadata: Mapping[str, object] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> AsyncIterator[None]:
        """Claim the number and unpublish, let the block change the tensors, publish them unless it raised."""
        await self._claim(version, timeout, metadata)
        try:
            with self._client.turn.block_of(version):
                yield
        except BaseException:
            self._drop_claim()
            raise
        await self.publish(version, metadata=metadata, timeout=timeout)

    async def _claim(self, version: int, within: float | None, metadata: Mapping[str, object] | None = None) -> None:
        """The beginning of `mutating`: unpublish, and let nobody else take the number until it is published."""
        if metadata is not None:
            encode_metadata(metadata)  # what cannot be published is said before the step
        claimed = parse_number(version, f"mutating() of {self._client.me}")
        claiming = self._client.operate("unpublish", "", self._deadline(within), claim=claimed)
        await self._here(claiming, undo=self._unclaim)

    async def _unclaim(self, _: object) -> None:
        """The claim was granted when its caller gave up."""
        self._client.drop_claim()

    async def _leave(self) -> None:
        """It was opened when its caller gave up: nobody will ever use it."""
        self._is_closing = True
        await leave_at_once(self._client)

    def _drop_claim(self) -> None:
        """The block of a `mutating` raised: the number is anybody's again. Does not wait, and never fails."""
        if os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and every claim with it
                self._thread.loop.call_soon_threadsafe(self._client.drop_claim)

    async def replicate(
        self,
        spec: Spec = "latest",
        *,
        wait: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> int:
        """Fill the tensors with a version from whoever holds it. Returns the version."""
        if not isinstance(wait, bool):
            raise UsageError(f"wait={wait!r} is neither True nor False")
        filling = self._client.operate("replicate", plain_spec(spec), self._deadline(timeout), waits=wait)
        return _certain(await self._here(filling))

    async def update(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - our own deadline
        """Leave the version held and replicate a newer one, if there is one. Returns the version now held."""
        return _certain(await self._here(self._client.operate("update", plain_spec(spec), self._deadline(timeout))))

    async def prefetch(self, spec: Spec = "latest") -> None:
        """Begin to fill a copy in host memory with that version, for the next update; see `tensorhub.Weights`."""
        await self._here(self._client.prefetch(plain_spec(spec)))

    async def pin(self, version: int, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Keep that version, until `unpin` or the end of this worker."""
        await self._here(self._client.pin(parse_number(version, "a pin"), self._deadline(timeout)))

    async def unpin(self, version: int, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Take the pin back."""
        await self._here(self._client.unpin(parse_number(version, "a pin"), self._deadline(timeout)))

    async def wait_for(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - our own deadline
        """Wait until the version, or a newer one, was published. Returns what there is then."""
        return await self._here(self._client.wait_for(plain_spec(spec), self._deadline(timeout)))

    async def wait_held(
        self,
        version: int,
        fraction: float = 1.0,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    ) -> tuple[str, ...]:
        """Wait until that fraction of the other replicas hold the version or a newer one. Returns their names."""
        number, part = parse_number(version, "wait_held()"), parse_fraction(fraction, "fraction")
        return await self._here(self._client.wait_held(number, part, self._deadline(timeout)))

    async def check(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Hash the tensors again: raises `NotDrained` naming those that were changed since they were published."""
        await self._here(self._client.check(self._deadline(timeout)))

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - our own deadline
        """Withdraw, wait for readers, leave. Idempotent."""
        self._is_closing = True
        await self._here(self._client.close(self._deadline(timeout)))

    # --- how things are -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version held, whole and verified; None if there is none."""
        self._check_process()
        return self._client.version

    @property
    def metadata(self) -> dict[str, Json] | None:
        """What its publisher said of the version held beside its tensors; None if there is none."""
        self._check_process()
        return self._client.metadata

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks in place, and chunks in all, of the fill under way; (0, 0) when there is none."""
        self._check_process()
        return self._client.progress

    def statistics(self) -> dict[str, object]:
        """Counters of this worker's life."""
        self._check_process()
        return self._client.statistics()

    # ------------------------------------------------------------------------------------------------------------------

    def _here(self, work: Coroutine[object, object, T], *, undo: Undo[T] | None = None) -> Coroutine[object, object, T]:
        try:
            self._check_process()
        except BaseException:
            work.close()
            raise
        self._client.callers.note()
        return self._thread.here(work, undo=undo)

    def _block_on(
        self, work: Coroutine[object, object, T], timeout: float | None, what: str, *, undo: Undo[T] | None = None
    ) -> T:
        """For the blocking wrapper: run one of the above in the worker thread and wait for it."""
        try:
            self._check_process()
            deadline = self._deadline(timeout)
        except BaseException:
            work.close()
            raise
        with self._client.callers.blocked():
            return self._thread.wait(work, deadline=deadline, what=f"{what} of {self._client.me}", undo=undo)

    def _close_and_wait(self, timeout: float | None) -> None:
        """For the blocking wrapper, whose `close` a finaliser may call."""
        self._is_closing = True
        if not self._thread.leaves(lambda: self.close(timeout=timeout)):
            self._block_on(self.close(timeout=timeout), timeout, "close()")

    def _check_process(self) -> None:
        check_process(self._pid, str(self._client.me))

    def _deadline(self, timeout: float | None) -> float:
        seconds = _seconds(timeout, "timeout")
        return time.monotonic() + (self._client.options.timeout_s if seconds is None else seconds)

    def _hurry(self) -> float:
        return min(LEAVE_IN_A_HURRY_S, self._client.options.timeout_s)


def connect(
    server: str | None = None,
    *,
    token: str | None = None,
    insecure: bool | None = None,
    timeout: float | None = None,
) -> "View":
    """A read-only view of a reference server; see `tensorhub.connect`. Asks nothing yet."""
    connect_s = _seconds(timeout, "timeout")
    options = worker_options(server=server, token=token, insecure=insecure, connect_s=connect_s)
    return View(options, loop_thread())


class View:
    """What a reference server shows of itself. Each question is asked anew; nothing is kept."""

    def __init__(self, options: Options, thread: LoopThread) -> None:
        self._options = options
        self._thread = thread
        self._pid = os.getpid()

    async def status(self, *, model: str = "", timeout: float | None = None) -> Status:  # noqa: ASYNC109 - our own deadline
        """The whole picture, or that of one model. Raises `ServerUnreachable`, `Refused`."""
        check_process(self._pid, f"the view of {self._options.server}")
        deadline = self._deadline(timeout)
        return await self._thread.here(fetch_status(self._options, model=model, deadline=deadline))

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

    async def next_version(self, model: str, *, timeout: float | None = None) -> int:  # noqa: ASYNC109 - our own deadline
        """The lowest number that nobody has taken."""
        self._check(model)
        return await self._thread.here(wait_for_number(self._options, model, self._deadline(timeout)))

    async def layout(self, model: str, spec: Spec = "latest", *, timeout: float | None = None) -> LayoutView:  # noqa: ASYNC109 - our own deadline
        """What a version is made of: the names, dtypes and shapes of its tensors, shard by shard."""
        self._check(model)
        return await self._thread.here(layout_of(self._options, model, plain_spec(spec), self._deadline(timeout)))

    async def metadata(self, model: str, spec: Spec = "latest", *, timeout: float | None = None) -> dict[str, Json]:  # noqa: ASYNC109 - our own deadline
        """What the publisher of a version said beside its tensors."""
        self._check(model)
        return await self._thread.here(metadata_of(self._options, model, plain_spec(spec), self._deadline(timeout)))

    async def transfers(self) -> tuple[Transfer, ...]:
        """Who reads what from whom now, and why from there."""
        return (await self.status()).transfers

    def _check(self, model: str) -> None:
        check_process(self._pid, f"the view of {self._options.server}")
        check_name(model, "model")

    def _deadline(self, timeout: float | None) -> float:
        seconds = _seconds(timeout, "timeout")
        return time.monotonic() + (self._options.connect_s if seconds is None else seconds)

    def _block_on(self, work: Coroutine[object, object, T], what: str, timeout: float | None = None) -> T:
        try:
            check_process(self._pid, f"the view of {self._options.server}")
            deadline = self._deadline(timeout)
        except BaseException:
            work.close()
            raise
        return self._thread.wait(work, deadline=deadline, what=f"{what} of {self._options.server}")

    async def _model(self, name: str) -> ModelView | None:
        found = (await self.status(model=ModelName(name))).models
        return found[0] if found else None


def _seconds(value: float | None, what: str) -> float | None:
    return None if value is None else parse_seconds(value, what)


def _certain(version: int | None) -> int:
    assert version is not None, "the call ended well without a version"
    return version
