"""Taking an export back, from every transport that has it, however long its readers take."""

import logging
import time
from collections.abc import Callable, Iterable

from ..transport.base import Transport

TRY_S = 1.0  # one try; they go on until nobody reads any more
SLOW_S = 10.0  # longer than this is worth a line in the log

_log = logging.getLogger(__name__)


def withdraw_everywhere(
    transports: Iterable[Transport], key: str, *, who: object, is_closed: Callable[[], bool]
) -> None:
    """Wait until nobody reads it any more, or all is closed. In a thread; `who` is for the log."""
    began, is_told = time.monotonic(), False
    for transport in transports:
        while not is_closed() and not transport.withdraw(key, timeout_s=TRY_S):
            if not is_told and time.monotonic() - began > SLOW_S:
                is_told = True
                _log.warning("%s: %s is still being read after %.0f s", who, key, SLOW_S)
