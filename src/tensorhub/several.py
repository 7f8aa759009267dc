"""Several workers of one process that make the same calls at the same time: what `group` and `sets` have in common.

It must never: leave a call under way at some of them when it has ended at another.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TypeVar

from . import aio
from .core.errors import GroupIncomplete, GroupMismatch
from .core.messages import Spec
from .core.metadata import Json, encode_metadata

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
