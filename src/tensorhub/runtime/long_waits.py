"""A call that waits for long says so in the log, and for what. It must never: end the call, or keep it waiting."""

import asyncio
import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

SAYS_AFTER_S = (5.0, 30.0)  # since it began: what is over by itself is over by the first
EVERY_S = 60.0  # from then on


class LongWait:
    """Of one call, from its beginning until `end`. Used in the worker loop only."""

    def __init__(self, what: str, why: Callable[[], str]) -> None:
        """`why` is asked for what it waits for; "" where it waits for nobody, as while bytes come."""
        self._what, self._why = what, why
        self._began = time.monotonic()
        self._said = 0
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        beyond = self._said + 1 - len(SAYS_AFTER_S)
        after_s = SAYS_AFTER_S[self._said] if beyond <= 0 else SAYS_AFTER_S[-1] + beyond * EVERY_S
        delay_s = self._began + after_s - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._say)

    def _say(self) -> None:
        self._said += 1
        why = self._why()
        if why:
            _log.warning("%s goes on after %.0f s: %s", self._what, time.monotonic() - self._began, why)
        self._begin()

    def end(self) -> None:
        """The call is over."""
        if self._timer is not None:
            self._timer.cancel()
