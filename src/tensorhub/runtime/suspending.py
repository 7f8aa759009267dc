"""Tensors whose memory goes away for a while, and comes back elsewhere or with other bytes: an engine that sleeps.

Between `suspend` and `resume` a worker knows how its tensors are laid out, and not where they are: it keeps no address,
and nothing that holds their memory. Host copies live on, and are read and filled ahead as ever. It must never: touch
memory that was suspended, or let a call begin that would.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import NotDrained, UsageError
from ..memory.hostmemory import without_memory
from ..memory.registration import Registration, register
from .behind import Behind
from .driver import Driver
from .turns import Turn

if TYPE_CHECKING:
    from ..memory.registration import type_of_weights


class Suspension:
    """Of one worker. Used in the worker's loop only, except for `again` and `is_suspended`."""

    def __init__(self, driver: Driver, behind: Behind, turn: Turn) -> None:
        self._driver, self._behind, self._turn = driver, behind, turn
        self._given: tuple[Callable[[], object], object, object, object] | None = (
            None  # what was registered; None while nothing is suspended
        )

    @property
    def is_suspended(self) -> bool:
        """Any thread may ask."""
        return self._given is not None

    def check(self, verb: str) -> None:
        """Raises `UsageError` if the call would need the tensors."""
        if self._given is not None and verb != "unpublish":
            text = f"{verb} on {self._driver.me} while its tensors are suspended"
            raise UsageError(text, hint="resume() first; who only wants to leave calls close()")

    def check_registered(self) -> None:
        """Raises `UsageError` if there is nothing to suspend."""
        if self._driver.data.registration is None:
            raise UsageError(f"suspend() on {self._driver.me} before register()", hint="register the tensors first")

    async def begin(self, deadline: float) -> None:
        """Nothing is held any more: forget where the tensors are, once nobody touches them. A call of its own.

        Raises `UsageError` if another call has begun since the unpublish: a publish serves the tensors.
        """
        with self._turn.of("suspend"):
            await self._begin(deadline)

    async def _begin(self, deadline: float) -> None:
        await self._behind.over(deadline, "suspend()")
        worker, data, me = self._driver.worker, self._driver.data, self._driver.me
        if not await self._driver.until(lambda: worker.may_register, deadline):
            text = f"suspend() of {me}: its tensors are still touched by what came before"
            raise NotDrained(text, hint="retry with a longer timeout")
        registration = data.registration
        if registration is not None and self._given is None:
            self._given = registration.given
            data.replace(without_memory(registration))
            registration.close()

    def over(self) -> None:
        """Tensors were registered."""
        self._given = None

    def again(self, tensors: "type_of_weights | None") -> Registration:
        """What was suspended, or these tensors, as they are now. In any thread but the loop's: it may take memory.

        Raises `UsageError` if nothing is suspended, or what there is now is laid out otherwise.
        """
        given, before, me = self._given, self._driver.data.registration, self._driver.me
        if given is None or before is None:
            raise UsageError(f"resume() of {me}, which is not suspended", hint="suspend() comes first")
        source, dtype, boxes, leave_out = given
        again = source() if tensors is None else tensors
        found = register(again, dtype, boxes, partial=before.is_partial, leave_out=leave_out)  # type: ignore[arg-type]
        if found.layout_digest != before.layout_digest:
            known = {spec.name: (spec.dtype, spec.shape, spec.strides) for spec in before.layout.tensors}
            now = {spec.name: (spec.dtype, spec.shape, spec.strides) for spec in found.layout.tensors}
            differ = sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))
            what = f"{', '.join(differ[:5])} differ" if differ else "their order differs, or which share memory"
            hint = "register() takes tensors of another layout"
            raise UsageError(f"resume() of {me} with other tensors than were suspended: {what}", hint=hint)
        return found
