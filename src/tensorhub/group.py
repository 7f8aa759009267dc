"""Workers of one process that call together: `open_group` for all shards of a replica, and what sets share with it.

A call ends when it has ended at each of them; of their errors it raises the cause.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from . import aio
from .api import BEGUN, call_text, check_begun, on_version
from .calls import Call, Shown
from .memory.registration import register as register_tensors
from .protocol.errors import GroupIncomplete, GroupMismatch, UsageError
from .protocol.layout import Box
from .protocol.manifest import Json, encode_metadata
from .runtime.cast_state import present_user
from .runtime.config import MAX_SHARDS, OpenArguments, Options, check_integer, open_options
from .runtime.loops import loop_thread
from .runtime.statistics import Progress, Statistics, added
from .tracebacks import Block, brief, brief_methods

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights

P = ParamSpec("P")
T = TypeVar("T")

ECHOES = (GroupIncomplete, GroupMismatch)  # what the others hear of when one has failed


def _together(
    call: Callable[Concatenate[aio.Weights, P], Coroutine[object, object, T]], *, is_question: bool = False
) -> Callable[Concatenate["Several", P], T]:
    """That method, of all at once; a question is put by the first. What the first returns, all return."""

    @wraps(call)
    def waiting(self: "Several", /, *args: P.args, **kwargs: P.kwargs) -> T:
        members = self._members[:1] if is_question else self._members
        for member in members:
            member._check_outside(call.__name__)
        with self._shown(kwargs.get("progress", False)) as shown:
            works = [call(member, *args, **kwargs) for member in members]
            tick = None if shown is None else shown.tick
            return self._wait(works, kwargs.get("timeout"), call_text(call.__name__, args, kwargs), tick=tick)[0]

    return waiting


def _beginning(
    call: Callable[Concatenate[aio.Weights, P], Coroutine[object, object, T]],
) -> Callable[Concatenate["Several", P], Call[T]]:
    """That method, of all at once, for a thread that does something else meanwhile."""

    @wraps(call)
    def begin(self: "Several", /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        check_begun(call.__name__, kwargs)
        what = f"{call_text(call.__name__, args, kwargs)} of {self._name}"
        first = self._members[0]
        deadline = first._deadline(kwargs.get("timeout"))

        async def of_all() -> T:
            return (await together([call(member, *args, **kwargs) for member in self._members]))[0]

        return Call(first._thread, of_all(), deadline=deadline, what=what, waits=self._waits)

    begin.__doc__ = BEGUN.format(name=call.__name__)
    return begin


@brief_methods
class Several:
    """Several workers of one process that call together."""

    def __init__(self, members: list[aio.Weights], name: str) -> None:
        self._members = members
        self._name = name

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=self._members[0]._hurry(error))

    def using(self, *, timeout: float | None = None) -> Block[int]:
        """Calls `Weights.using` of all shards: their tensors stay as they are in the block."""
        return Block(self._using(timeout))

    @contextmanager
    def _using(self, timeout: float | None) -> Iterator[int]:
        user, name = present_user(), f"thread {threading.current_thread().name}"
        with ExitStack() as blocks:
            for member in self._members:
                deadline = member._deadline(timeout)
                self._wait([member._client.use(user, name, deadline)], timeout, "using()")
                blocks.callback(member._leave_use, user)
            version = self.version
            if version is None:
                raise UsageError(f"using() of {self._name}, which holds no version", hint="update() on all of it first")
            yield version

    suspend = _together(aio.Weights.suspend)
    publish = _together(aio.Weights.publish)
    unpublish = _together(aio.Weights.unpublish)
    prefetch = _together(aio.Weights.prefetch)
    pin = _together(aio.Weights.pin)
    unpin = _together(aio.Weights.unpin)
    check = _together(aio.Weights.check)

    def resume(self) -> None:
        """As `Weights.resume`, of all: what was registered is looked for where it is now."""
        self._members[0]._check_process()
        asleep = [m for m in self._members if m._client.suspension.is_suspended] or self._members
        found = [m._client.suspension.again(None) for m in asleep]  # in the caller's thread: it may take memory
        works = [m.take(one, is_resumed=True) for m, one in zip(asleep, found, strict=True)]
        self._wait(works, None, "resume()")

    def mutating(
        self, *, version: int, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> Block[None]:
        """Calls `Weights.mutating` of all shards: the block may change their tensors."""
        return Block(self._mutating(version, metadata, timeout))

    @contextmanager
    def _mutating(self, version: int, metadata: Mapping[str, object] | None, timeout: float | None) -> Iterator[None]:
        if metadata is not None:
            encode_metadata(metadata)
        self._claim(version, timeout)
        with ExitStack() as blocks:
            for member in self._members:
                blocks.enter_context(member._client.call_lock.block_of(version))
            yield
        self.publish(version, metadata=metadata, timeout=timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Calls `Weights.close` of all shards. Idempotent."""
        if not self._members[0]._thread.leaves(lambda: together([m.close(timeout=timeout) for m in self._members])):
            self._wait([m.close(timeout=timeout) for m in self._members], timeout, "close()")

    @property
    def version(self) -> int | None:
        """The version that each of them holds, whole and verified; None if there is none."""
        held = {member.version for member in self._members}
        return held.pop() if len(held) == 1 else None

    @property
    def progress(self) -> Progress | None:
        """How far the fills of all of them are together; None when there is none."""
        return added([each for member in self._members if (each := member.progress) is not None])

    def _shown(self, callback: object) -> AbstractContextManager[Shown | None]:
        """Shows the progress of all of them to their caller; nothing for False."""
        if callback is False:
            return nullcontext()

        def filled() -> Progress | None:
            return added([each for member in self._members if (each := member._client.filled) is not None])

        return Shown(lambda: self.progress, filled, callback)  # type: ignore[arg-type]

    def _claim(self, version: int, timeout: float | None) -> None:
        """The beginning of `mutating`."""

        async def claim(member: aio.Weights) -> None:
            member._client.check_may_call("mutating")
            await member._claim(version, timeout)

        self._wait([claim(member) for member in self._members], timeout, f"mutating(version={version!r})")

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """A block in which the calling thread waits for a call of all."""
        with ExitStack() as waiting:
            for member in self._members:
                waiting.enter_context(member._client.callers.blocked())
            yield

    def _wait(
        self,
        works: list[Coroutine[object, object, T]],
        timeout: object,
        what: str,
        *,
        tick: Callable[[], None] | None = None,
    ) -> list[T]:
        first = self._members[0]
        try:
            first._check_process()
            deadline = first._deadline(timeout)
        except BaseException:
            for work in works:
                work.close()
            raise
        with self._waits():
            return first._thread.wait(together(works), deadline=deadline, what=f"{what} of {self._name}", tick=tick)


async def together(works: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Runs all calls at once, until the last has ended. Raises the first cause, not the errors that follow from it."""
    found = await asyncio.gather(*works, return_exceptions=True)
    errors = [each for each in found if isinstance(each, BaseException)]
    if errors:
        raise _cause(errors)
    return [each for each in found if not isinstance(each, BaseException)]


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """The one that the others came of."""
    return min(errors, key=lambda error: isinstance(error, ECHOES))


async def _all_or_none(opening: Sequence[Coroutine[object, object, aio.Weights]]) -> list[aio.Weights]:
    """All of them opened; where one cannot be, or the caller gives up, none is left."""
    tasks = [asyncio.ensure_future(each) for each in opening]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _leave([task.result() for task in tasks if not task.cancelled() and task.exception() is None])
        raise
    errors = [error for error in (task.exception() for task in tasks) if error is not None]
    opened = [task.result() for task in tasks if task.exception() is None]
    if errors:
        await _leave(opened)
        raise _cause(errors)
    return opened


async def _leave(opened: Sequence[aio.Weights]) -> None:
    """They were opened when another could not be, or when their caller gave up."""
    await asyncio.gather(*(each._leave() for each in opened))


def open_several(
    places: Sequence[tuple[str, int]], replica: str, shards: int, reliable: bool, options: Options, what: str
) -> list[aio.Weights]:
    """Join these models, each as that shard; or none of them."""
    deadline = time.monotonic() + options.connect_s

    async def join() -> list[aio.Weights]:
        return await _all_or_none([aio.join(model, replica, each, shards, reliable, options) for model, each in places])

    return loop_thread().wait(join(), deadline=deadline, what=f"{what}/{replica}", undo=_leave)


@brief
def open_group(
    model: str, *, replica: str, shards: int, reliable: bool = True, **options: Unpack[OpenArguments]
) -> "Group":
    """Join `model` as all shards of one replica; the arguments and errors are those of `tensorhub.open`.

    `host_bytes` is for each shard. Where one of them cannot join none does.
    """
    shards = check_integer(shards, "shards", least=1, most=MAX_SHARDS)
    places = [(model, shard) for shard in range(shards)]
    return Group(open_several(places, replica, shards, reliable, open_options(**options), f"open_group of {model}"))


@brief_methods
class Group(Several):
    """All shards of one replica, in order, in this process. Made by `open_group`.

    A call is made for all shards at once, and returns when all have ended; of their errors it raises the cause. What a
    call does, and what it raises, `tensorhub.Weights` says.
    """

    def __init__(self, members: list[aio.Weights]) -> None:
        me = members[0]._client.me
        super().__init__(members, f"{me.model}/{me.replica}[0..{len(members) - 1}]")

    def __enter__(self) -> "Group":
        return self

    def register(
        self,
        tensors: "Sequence[type_of_weights]",
        *,
        dtype: "type_of_dtype | Mapping[str, type_of_dtype] | None" = None,
        boxes: "Sequence[Mapping[str, Sequence[Box]] | None] | None" = None,
        partial: bool = False,
    ) -> None:
        """Take these tensors in place: for each shard, in order, a module or a mapping; likewise `boxes`.

        Tensors that cannot be taken are refused before any shard has let go of what it had.
        """
        count = len(self._members)
        every, cut = _listed(tensors), [None] * count if boxes is None else _listed(boxes)
        for what, given in (("tensors", every), ("boxes", cut)):
            if given is None or len(given) != count:
                is_what = "" if given is None else f", not {len(given)}"
                text = f"{what} of {self._name} are for {count} shards, in order{is_what}"
                raise UsageError(text, hint="a sequence with one module or mapping for each shard")
        self._members[0]._check_process()
        taken = [
            register_tensors(each, dtype, box, partial=partial)
            for each, box in zip(every or (), cut or (), strict=True)
        ]
        members = self._members
        self._wait([m._here(m._client.may_register(m._deadline(None))) for m in members], None, "register()")
        works = [member.take(one, of=each) for member, one, each in zip(self._members, taken, every or (), strict=True)]
        self._wait(works, None, "register()")

    begin_publish = _beginning(aio.Weights.publish)
    begin_replicate = _beginning(aio.Weights.replicate)
    begin_unpublish = _beginning(aio.Weights.unpublish)
    begin_update = _beginning(aio.Weights.update)

    def on_version(self, callback: Callable[[int], object]) -> Callable[[], None]:
        """As `Weights.on_version`, of the model that all of them are shards of."""
        return on_version(self._members[0], callback)

    replicate = _together(aio.Weights.replicate)
    update = _together(aio.Weights.update)

    wait_for = _together(aio.Weights.wait_for, is_question=True)
    wait_held = _together(aio.Weights.wait_held, is_question=True)

    @property
    def metadata(self) -> dict[str, Json] | None:
        """What its publisher said of the version that every shard holds; None if there is none."""
        return self._members[0].metadata if self.version is not None else None

    def statistics(self) -> list[Statistics]:
        """Figures of each shard, in order."""
        return [member.statistics() for member in self._members]


def _listed(given: object) -> list[Any] | None:
    """The list, if the argument has one value for each shard; else None."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else None
