"""Whose turn it is on one worker: one call at a time, and in the block of a `mutating` none that would spoil its end.

The end of the block publishes what the tensors are then, under the number that was claimed. What would fill, publish
or withdraw them meanwhile is refused. What only asks, pins or fetches ahead is not; nor is `register`: whoever has to
replace tensors in a step may say so, and those are published. It must never: wait.
"""

import contextlib
from collections.abc import Iterator

from ..core.errors import UsageError
from ..core.names import WorkerId

BLOCK_HINT = "the block only changes the tensors; its end publishes them, and an exception in it does not"


class Turn:
    """Of one worker. Calls take it in the worker's loop, blocks in their caller's thread."""

    def __init__(self, me: WorkerId) -> None:
        self._me = me
        self.calling = ""  # the call that has not ended
        self._block = ""  # of a `mutating`, that is being run

    def check(self, verb: str) -> None:
        """Raises `UsageError` if such a call may not begin now: neither the other call nor the block is touched."""
        if self.calling:
            text = f"{verb} on {self._me} while its {self.calling} has not ended"
            raise UsageError(text, hint="one call at a time on one Weights: wait for the first")
        if self._block:
            raise UsageError(f"{verb} on {self._me} inside the block of its {self._block}", hint=BLOCK_HINT)

    @contextlib.contextmanager
    def of(self, verb: str) -> Iterator[None]:
        """One call, from its first check to its end. The machine hears of it later, if it is hashed for it."""
        self.check(verb)
        self.calling = verb
        try:
            yield
        finally:
            self.calling = ""

    @contextlib.contextmanager
    def block_of(self, version: int) -> Iterator[None]:
        """The block of a `mutating` that has claimed its number."""
        self._block = f"mutating(version={version!r})"
        try:
            yield
        finally:
            self._block = ""
