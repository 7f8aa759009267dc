"""All shards of a replica in one process: `open_group`, and one object for what each shard would call."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from . import aio
from .memory.registration import register as register_tensors
from .protocol.errors import GroupIncomplete, GroupMismatch, UsageError
from .protocol.layout import Box
from .protocol.manifest import Json, encode_metadata
from .protocol.messages import Spec
from .runtime.config import MAX_SHARDS, check_integer, options_without_token, parse_seconds
from .runtime.loops import loop_thread

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights


# --- Several workers of one process that make the same calls at the same time: what `group` and `sets` have in
# common.
#
# It must never: leave a call under way at some of them when it has ended at another.


T = TypeVar("T")

ECHOES = (GroupIncomplete, GroupMismatch)  # what the others hear of when one has failed


class Several:
    """Workers that call together. Of their errors a call raises the cause."""

    def __init__(self, members: list[aio.Weights], name: str) -> None:
        self._members = members
        self._name = name

    def __len__(self) -> int:
        return len(self._members)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=None if error is None else self._members[0]._hurry())

    # --- calls --------------------------------------------------------------------------------------------------------

    def suspend(self, *, timeout: float | None = None) -> None:
        """As `Weights.suspend`, of all."""
        self._all(lambda m: m.suspend(timeout=timeout), timeout, "suspend()")

    def resume(self) -> None:
        """As `Weights.resume`, of all: what was registered is looked for where it is now."""
        self._members[0]._check_process()
        asleep = [m for m in self._members if m._client.suspension.is_suspended] or self._members
        found = [m._client.suspension.again(None) for m in asleep]  # in the caller's thread: it may take memory
        works = [m.take(one, is_resumed=True) for m, one in zip(asleep, found, strict=True)]
        self._wait(works, None, "resume()")

    def publish(
        self, version: int, *, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> int:
        """As `Weights.publish`, of all."""
        return self._all(lambda m: m.publish(version, metadata=metadata, timeout=timeout), timeout, "publish()")[0]

    def unpublish(self, *, timeout: float | None = None) -> None:
        """As `Weights.unpublish`, of all."""
        self._all(lambda m: m.unpublish(timeout=timeout), timeout, "unpublish()")

    @contextmanager
    def mutating(
        self, *, version: int, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> Iterator[None]:
        """As `Weights.mutating`: the block may change the tensors of all."""
        if metadata is not None:
            encode_metadata(metadata)
        begun: list[aio.Weights] = []
        try:
            self._claim(version, timeout, begun)
            with ExitStack() as blocks:
                for member in self._members:
                    blocks.enter_context(member._client.turn.block_of(version))
                yield
        except BaseException:
            for member in begun:
                member._drop_claim()
            raise
        self.publish(version, metadata=metadata, timeout=timeout)

    def prefetch(self, spec: Spec = "latest") -> None:
        """As `Weights.prefetch`, of all."""
        self._all(lambda m: m.prefetch(spec), None, f"prefetch({spec!r})")

    def pin(self, version: int, *, timeout: float | None = None) -> None:
        """As `Weights.pin`, of all."""
        self._all(lambda m: m.pin(version, timeout=timeout), timeout, f"pin({version!r})")

    def unpin(self, version: int, *, timeout: float | None = None) -> None:
        """As `Weights.unpin`, of all."""
        self._all(lambda m: m.unpin(version, timeout=timeout), timeout, f"unpin({version!r})")

    def check(self, *, timeout: float | None = None) -> None:
        """As `Weights.check`, of all."""
        self._all(lambda m: m.check(timeout=timeout), timeout, "check()")

    def close(self, *, timeout: float | None = None) -> None:
        """As `Weights.close`, of all. Idempotent."""
        if not self._members[0]._thread.leaves(lambda: together([m.close(timeout=timeout) for m in self._members])):
            self._all(lambda m: m.close(timeout=timeout), timeout, "close()")

    # --- how things are -----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version that each of them holds, whole and verified; None if there is none."""
        held = {member.version for member in self._members}
        return held.pop() if len(held) == 1 else None

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks in place, and chunks in all, of the fills under way, all together."""
        every = [member.progress for member in self._members]
        return sum(done for done, _ in every), sum(chunks for _, chunks in every)

    # ------------------------------------------------------------------------------------------------------------------

    def _claim(self, version: int, timeout: float | None, begun: list[aio.Weights]) -> None:
        """The beginning of `mutating`. `begun` gets those that may have claimed it since: no others give it back."""

        async def claim(member: aio.Weights) -> None:
            member._client.check_may_call("mutating")
            begun.append(member)
            await member._claim(version, timeout)

        self._all(claim, timeout, f"mutating(version={version!r})")

    def _all(
        self, call: Callable[[aio.Weights], Coroutine[object, object, T]], timeout: float | None, what: str
    ) -> list[T]:
        return self._wait([call(member) for member in self._members], timeout, what)

    def _wait(self, works: list[Coroutine[object, object, T]], timeout: float | None, what: str) -> list[T]:
        first = self._members[0]
        try:
            first._check_process()
            deadline = first._deadline(timeout)
        except BaseException:
            for work in works:
                work.close()
            raise
        with ExitStack() as waiting:
            for member in self._members:
                waiting.enter_context(member._client.callers.blocked())
            return first._thread.wait(together(works), deadline=deadline, what=f"{what} of {self._name}")

    def _metadata(self) -> dict[str, Json] | None:
        return self._members[0].metadata if self.version is not None else None


async def together(works: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """All of them at once, to the end of the last. Raises the error that the others came of."""
    found = await asyncio.gather(*works, return_exceptions=True)
    errors = [each for each in found if isinstance(each, BaseException)]
    if errors:
        raise cause(errors)
    return [each for each in found if not isinstance(each, BaseException)]


def cause(errors: Sequence[BaseException]) -> BaseException:
    """The one that the others came of."""
    return min(errors, key=lambda error: isinstance(error, ECHOES))


async def all_or_none(opening: Sequence[Coroutine[object, object, aio.Weights]]) -> list[aio.Weights]:
    """All of them opened; where one cannot be, or whoever waits gives up, none is left."""
    tasks = [asyncio.ensure_future(each) for each in opening]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await leave([task.result() for task in tasks if not task.cancelled() and task.exception() is None])
        raise
    errors = [error for error in (task.exception() for task in tasks) if error is not None]
    opened = [task.result() for task in tasks if task.exception() is None]
    if errors:
        await leave(opened)
        raise cause(errors)
    return opened


async def leave(opened: Sequence[aio.Weights]) -> None:
    """They were opened when another could not be, or when their caller gave up: nobody will ever use them."""
    await asyncio.gather(*(each._leave() for each in opened))


# --- All shards of a replica in one process: `open_group`, and one object for what each shard would call.
#
# For an engine that has several shards in one process, and for whoever wants a full model of N shards without boxes.
# Each shard is a worker of its own, as if it lived in a process of its own; their calls run at the same time, which
# is what a group's calls need.


def open_group(
    model: str,
    *,
    replica: str,
    shards: int,
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
    timeout: float | None = None,
    call_timeout: float | None = None,
) -> "Group":
    """Join `model` as all shards of one replica; the arguments and errors are those of `tensorhub.open`.

    `host_bytes` is for each shard. Where one of them cannot join none does.
    """
    shards = check_integer(shards, "shards", least=1, most=MAX_SHARDS)
    began = time.monotonic()
    options = options_without_token(connect_s=None if timeout is None else parse_seconds(timeout, "timeout"))

    async def join() -> list[aio.Weights]:
        opening = [
            aio.open(
                model,
                replica=replica,
                shard=shard,
                shards=shards,
                server=server,
                reliable=reliable,
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
                timeout=timeout,
                call_timeout=call_timeout,
            )
            for shard in range(shards)
        ]
        return await all_or_none(opening)

    what = f"open_group of {model}/{replica}"
    return Group(loop_thread().wait(join(), deadline=began + options.connect_s, what=what, undo=leave))


class Group(Several):
    """All shards of one replica, in order, in this process. Made by `open_group`.

    A call is made for all shards at once, and returns when all have ended; of their errors it raises the cause. What a
    call does, and what it raises, `tensorhub.Weights` says.
    """

    def __init__(self, members: list[aio.Weights]) -> None:
        me = members[0]._client.me
        super().__init__(members, f"{me.model}/{me.replica}[0..{len(members) - 1}]")

    def __repr__(self) -> str:
        return f"<Group {self._name}>"

    def __enter__(self) -> "Group":
        return self

    # --- calls --------------------------------------------------------------------------------------------------------

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

    def replicate(self, spec: Spec = "latest", *, wait: bool = False, timeout: float | None = None) -> int:
        """As `Weights.replicate`, of all shards."""
        return self._all(lambda m: m.replicate(spec, wait=wait, timeout=timeout), timeout, f"replicate({spec!r})")[0]

    def update(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """As `Weights.update`, of all shards."""
        return self._all(lambda m: m.update(spec, timeout=timeout), timeout, f"update({spec!r})")[0]

    def wait_held(self, version: int, fraction: float = 1.0, *, timeout: float | None = None) -> tuple[str, ...]:
        """As `Weights.wait_held`."""
        waiting = [self._members[0].wait_held(version, fraction, timeout=timeout)]
        return self._wait(waiting, timeout, f"wait_held({version!r}, {fraction!r})")[0]

    def wait_for(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """As `Weights.wait_for`."""
        return self._wait([self._members[0].wait_for(spec, timeout=timeout)], timeout, f"wait_for({spec!r})")[0]

    # --- how things are -----------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> dict[str, Json] | None:
        """What its publisher said of the version that every shard holds; None if there is none."""
        return self._metadata()

    def statistics(self) -> list[dict[str, object]]:
        """Counters of each shard, in order."""
        return [member.statistics() for member in self._members]


def _listed(given: object) -> list[Any] | None:
    """What is given one by one for each shard; None where it is not."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else None
