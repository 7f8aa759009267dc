"""What a user of TensorHub sees: `open` a worker's `Weights`, `serve` a reference server, `connect` to look at one.

Each call is that of `tensorhub.aio`, where its types and its text stand, made for a thread that waits for it until its
timeout at the latest. An interrupt (Ctrl-C) of the waiting thread cancels the call.
"""

import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar, Unpack

from . import aio
from .calls import Call
from .memory.registration import register as register_tensors
from .protocol.errors import UsageError
from .protocol.events import Event
from .protocol.layout import Box
from .runtime.cast_state import present_user
from .runtime.config import OpenArguments, check_integer, open_options, parse_seconds, server_settings
from .runtime.loops import Undo, in_thread, loop_thread
from .runtime.opening import leave_on_sigterm as install_sigterm
from .runtime.questions import LONG_POLL_S
from .runtime.serving import ServerThread
from .tracebacks import Block, brief, brief_methods

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound=aio.Caller)


class Blocking(Generic[A]):
    """What waits in the caller's thread for the calls of an object of `tensorhub.aio`."""

    def __init__(self, awaited: A) -> None:
        self._aio = awaited

    def _wait(
        self,
        work: Coroutine[object, object, T],
        timeout: object,
        what: str,
        *,
        undo: Undo[T] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> T:
        ours, deadline = self._aio, self._deadline_of(work, timeout)
        with ours._waits():
            return ours._thread.wait(work, deadline=deadline, what=f"{what} of {ours._name}", undo=undo, tick=tick)

    def _deadline_of(self, work: Coroutine[object, object, object], timeout: object) -> float:
        """Closes the work where the call may not begin."""
        try:
            self._aio._check_process()
            return self._aio._deadline(timeout)
        except BaseException:
            work.close()
            raise

    def _begin(self, work: Coroutine[object, object, T], timeout: object, what: str) -> Call[T]:
        """It goes on while the caller does something else."""
        ours, deadline = self._aio, self._deadline_of(work, timeout)
        return Call(ours._thread, work, deadline=deadline, what=f"{what} of {ours._name}", waits=ours._waits)


def call_text(name: str, arguments: tuple[object, ...], options: Mapping[str, object]) -> str:
    """A call as its caller wrote it, for errors."""
    named = [f"{name}={value!r}" for name, value in options.items() if name not in ("timeout", "metadata", "progress")]
    return f"{name}({', '.join([*map(repr, arguments), *named])})"


def blocking(
    call: Callable[Concatenate[A, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[Blocking[A], P], T]:
    """The async method, for a thread that waits."""

    @wraps(call)
    def waiting(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._aio._check_outside(call.__name__)
        shown = self._aio._shown(kwargs.get("progress", False))
        work = call(self._aio, *args, **kwargs)
        what = call_text(call.__name__, args, kwargs)
        if shown is None:
            return self._wait(work, kwargs.get("timeout"), what)
        with shown:
            return self._wait(work, kwargs.get("timeout"), what, tick=shown.tick)

    return waiting


def beginning(
    call: Callable[Concatenate[A, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[Blocking[A], P], Call[T]]:
    """The async method, for a thread that does something else meanwhile."""

    @wraps(call)
    def begin(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        check_begun(call.__name__, kwargs)
        work = call(self._aio, *args, **kwargs)
        return self._begin(work, kwargs.get("timeout"), call_text(call.__name__, args, kwargs))

    begin.__doc__ = BEGUN.format(name=call.__name__)
    return begin


BEGUN = """Begin `{name}`, and return a `Call` at once. Takes what `{name}` takes, but for `progress`.

        Raises what is wrong from the beginning; all else is raised by `wait()` of the call.
        """


def on_version(worker: aio.Weights, callback: Callable[[int], object]) -> Callable[[], None]:
    """What `Weights.on_version` does."""

    async def tell(version: int) -> None:
        await in_thread(lambda: callback(version), name="on-version")

    return worker._on_version(tell)


def check_begun(verb: str, options: Mapping[str, object]) -> None:
    """Raises `UsageError` for what a call that is begun does not take."""
    if options.get("progress", False) is not False:
        text = f"begin_{verb} takes no progress=, for no thread waits that could show it"
        raise UsageError(text, hint="`weights.progress` tells how far it is")


@brief
def open(
    model: str,
    *,
    replica: str,
    shard: int = 0,
    shards: int = 1,
    reliable: bool = True,
    **options: Unpack[OpenArguments],
) -> "Weights":
    """Calls `tensorhub.aio.open`. Its docstring is copied below."""
    began, thread, settings = time.monotonic(), loop_thread(), open_options(**options)
    deadline, what = began + settings.connect_s, f"open of {model}/{replica}[{shard}]"
    joining = aio.join(model, replica, shard, shards, reliable, settings)
    opened = thread.wait(joining, deadline=deadline, what=what, undo=aio.Weights._leave)
    try:
        return Weights(opened)
    except BaseException:
        thread.wait(opened._leave(), deadline=deadline, what=f"close of {what}")
        raise


@brief_methods
class Weights(aio.Worker, Blocking[aio.Weights]):
    """As `tensorhub.aio.Weights`, whose text it gets below."""

    def __init__(self, weights: aio.Weights) -> None:
        aio.Worker.__init__(self, weights._client, weights._thread)
        Blocking.__init__(self, weights)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=self._hurry(error))

    def register(
        self,
        tensors: "type_of_weights",
        *,
        dtype: "type_of_dtype | Mapping[str, type_of_dtype] | None" = None,
        boxes: Mapping[str, Sequence[Box]] | None = None,
        partial: bool = False,
        leave_out: str | Sequence[str] = (),
    ) -> None:
        """Calls the coroutine. Looks at the tensors in the caller's thread."""
        self._check_process()
        found = register_tensors(tensors, dtype, boxes, partial=partial, leave_out=leave_out)  # in the caller's thread
        self._wait(self._aio.take(found, of=tensors), None, "register()")

    def resume(self, tensors: "type_of_weights | None" = None) -> None:
        """Calls the coroutine. Looks at the tensors in the caller's thread."""
        self._check_process()
        found = self._client.suspension.again(tensors)
        self._wait(self._aio.take(found, of=tensors, is_resumed=True), None, "resume()")

    def mutating(
        self, *, version: int, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> Block[None]:
        """Calls the coroutine."""
        return Block(self._mutating(version, metadata, timeout))

    @contextmanager
    def _mutating(self, version: int, metadata: Mapping[str, object] | None, timeout: float | None) -> Iterator[None]:
        self._aio._check_outside("mutating")
        self._wait(self._aio._claim(version, timeout, metadata), timeout, f"mutating(version={version!r})")
        with self._client.call_lock.block_of(version):
            yield
        self.publish(version, metadata=metadata, timeout=timeout)

    def using(self, *, timeout: float | None = None) -> Block[int]:
        """Calls the coroutine."""
        return Block(self._using(timeout))

    @contextmanager
    def _using(self, timeout: float | None) -> Iterator[int]:
        user = present_user()
        work = self._client.use(user, f"thread {threading.current_thread().name}", self._deadline(timeout))
        version = self._wait(work, timeout, "using()", undo=self._aio._undo_use(user))
        try:
            yield version
        finally:
            self._aio._leave_use(user)

    def on_version(self, callback: Callable[[int], object]) -> Callable[[], None]:
        """Call the function with each version that appears and is newer than the one held.

        In a thread of TensorHub, one at a time; a version that is passed by meanwhile is left out. An exception is
        logged. Ends with `close()`, or when the function that this returns is called. Raises `Closed`.
        """
        return on_version(self._aio, callback)

    def close(self, *, timeout: float | None = None) -> None:
        """Calls the coroutine. A finaliser may call it."""
        self._aio._is_closing = True
        if not self._thread.leaves(lambda: self._aio.close(timeout=timeout)):
            self._wait(self._aio.close(timeout=timeout), timeout, "close()")

    begin_publish = beginning(aio.Weights.publish)
    begin_replicate = beginning(aio.Weights.replicate)
    begin_unpublish = beginning(aio.Weights.unpublish)
    begin_update = beginning(aio.Weights.update)

    suspend = blocking(aio.Weights.suspend)
    publish = blocking(aio.Weights.publish)
    unpublish = blocking(aio.Weights.unpublish)
    replicate = blocking(aio.Weights.replicate)
    update = blocking(aio.Weights.update)
    prefetch = blocking(aio.Weights.prefetch)
    pin = blocking(aio.Weights.pin)
    unpin = blocking(aio.Weights.unpin)
    wait_for = blocking(aio.Weights.wait_for)
    wait_held = blocking(aio.Weights.wait_held)
    check = blocking(aio.Weights.check)


@brief
def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    insecure: bool | None = None,
    names: str | Sequence[str] | None = None,
    lease_s: float | None = None,
    report_s: float | None = None,
    fresh: bool = True,
    state: str | PathLike[str] | None = None,
) -> ServerThread:
    """Start a reference server inside this process: for notebooks, tests and single-node runs.

    Runs in a thread until its `close()` or the end of its `with` block; its `address` is what `open` takes as
    `server`. It begins with an empty memory: nothing that lived at this address before may still be in use. Where
    workers of an earlier server at this address may live, `fresh=False`: it hears them first, for as long as a lease.
    `state` is the file of its journal: with that of the earlier server it hears those that may live, and goes on.

    It asks all clients for `token` (TENSORHUB_TOKEN, or a file: TENSORHUB_TOKEN_FILE). Without one it asks for this
    user's own, which is made in the state directory (~/.local/state/tensorhub) and which this user's workers find by
    themselves. `insecure=True` (TENSORHUB_INSECURE) lets all clients in. `names` (TENSORHUB_NAMES) are those by which
    clients reach it, where that is neither an IP address nor what this machine calls itself. Raises `UsageError`.
    """
    settings = server_settings(lease_s=lease_s, report_s=report_s)
    return ServerThread(
        host, port, settings=settings, token=token, insecure=insecure, names=names, fresh=fresh, state=state
    )


@brief
def leave_on_sigterm(grace: float = 20.0) -> None:
    """On SIGTERM close every `Weights` of this process within `grace` seconds, then end as SIGTERM does.

    What only this process holds is fetched by another reliable worker first, in that time. Replaces the handler of
    SIGTERM. Raises `UsageError` outside the main thread.
    """
    install_sigterm(parse_seconds(grace, "grace"))


@brief
def connect(
    server: str | None = None,
    *,
    token: str | None = None,
    insecure: bool | None = None,
    timeout: float | None = None,
) -> "View":
    """Calls `tensorhub.aio.connect`. Its docstring is copied below."""
    return View(aio.connect(server, token=token, insecure=insecure, timeout=timeout))


@brief_methods
class View(Blocking[aio.View]):
    """As `tensorhub.aio.View`, whose text it gets below."""

    def events(self, *, after: int = 0, follow: bool = False, model: str = "") -> Iterator[Event]:
        """Calls the coroutine for each answer of the server."""
        number, patience_s = check_integer(after, "after", least=0, most=2**63 - 1), self._aio._timeout_s
        is_first = True
        while True:
            work = self._aio._events_after(number, model, follow=follow and not is_first)
            found = self._wait(work, patience_s + (LONG_POLL_S if follow else 0.0), "events()")
            yield from found.all()
            if not (follow or found.events):
                return
            number, is_first = found.last, False

    status = blocking(aio.View.status)
    models = blocking(aio.View.models)
    versions = blocking(aio.View.versions)
    replicas = blocking(aio.View.replicas)
    next_version = blocking(aio.View.next_version)
    begin_anew = blocking(aio.View.begin_anew)
    layout = blocking(aio.View.layout)
    metadata = blocking(aio.View.metadata)
    transfers = blocking(aio.View.transfers)


for _ours, _theirs, _names in (
    (globals(), vars(aio), ("open", "connect", "Weights", "View")),
    (vars(Weights), vars(aio.Weights), ("register", "resume", "mutating", "using", "close")),
    (vars(View), vars(aio.View), ("events",)),
):
    for _name in _names:
        _ours[_name].__doc__ = _theirs[_name].__doc__
