"""A call that waits for long says so in the log, and for what. It must never: end the call, or keep it waiting."""

import asyncio
import logging
import time
from collections.abc import Callable

from ..core.worker.deadlines import UNANSWERED
from ..core.worker.machine import Worker

_log = logging.getLogger(__name__)

SAYS_AFTER_S = (5.0, 30.0)  # since it began: what is over by itself is over by the first
EVERY_S = 60.0  # from then on


class LongWait:
    """Of one call, from its beginning until `end`. Used in the worker loop only."""

    def __init__(self, what: str, why: Callable[[], str]) -> None:
        """`why` is asked for what it waits for; "" where it waits for nobody, as while bytes come."""
        self._what, self._why = what, why
        self._began = time.monotonic()
        self._times = 0  # that its time to say something has come
        self._said = ""
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        beyond = self._times + 1 - len(SAYS_AFTER_S)
        after_s = SAYS_AFTER_S[self._times] if beyond <= 0 else SAYS_AFTER_S[-1] + beyond * EVERY_S
        delay_s = self._began + after_s - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._remind)

    def _remind(self) -> None:
        self._times += 1
        if self._times > 1:
            self._said = ""  # it still waits for the same, and that was long ago
        self.say(self._why())
        self._begin()

    def say(self, why: str) -> None:
        """That it waits for this, unless it was said just before: the machine, and the clock here, may both say it."""
        if why and why != self._said:
            self._said = why
            _log.warning("%s goes on waiting after %.0f s: %s", self._what, time.monotonic() - self._began, why)

    def end(self) -> None:
        """The call is over."""
        if self._timer is not None:
            self._timer.cancel()


def why_waits(worker: Worker, server: str, why_away: str, now: float) -> str:
    """What its call waits for, as far as the server has said, or that it says nothing; "" where it waits for nobody.

    In the order in which an error would name it. `why_away`: what was wrong with the line, if there is none.
    """
    call, refusal, book = worker.call, worker.refusal, worker.state.book
    if call is None:
        return ""
    if not worker.connected:
        return f"the reference server at {server}: {refusal.message if refusal is not None else why_away}"
    unanswered_s = book.unanswered_s(now)
    if unanswered_s > UNANSWERED * book.every_s:  # what it said before then may no longer be so
        return f"the reference server at {server} has not answered for {unanswered_s:.3g} s"
    if call.answer is None:
        return f"the reference server at {server} has not answered it"
    return call.answer.waiting.message if call.answer.waiting is not None else ""
