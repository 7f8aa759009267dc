"""What a reference server's log says of requests that went wrong: each kind seldom, whoever sends how many.

aiohttp logs a traceback for each. A stranger must not fill the log with them, nor hide in them what matters. What is no
HTTP is one line, and what fails is a defect of ours with its traceback; each says how many like it were left out.
"""

import logging
import time
from math import inf

from aiohttp.http import HttpProcessingError

MALFORMED_EVERY_S = 60.0
FAILED_EVERY_S = 10.0  # a defect is to be found by its first traceback


class Seldom(logging.Filter):
    """Lets a record of either kind pass once in a while."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at = {True: -inf, False: -inf}
        self._left_out = {True: 0, False: 0}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be written; the one that is says what was left out since the last."""
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        is_malformed = isinstance(error, HttpProcessingError)
        now = time.monotonic()
        if now - self._passed_at[is_malformed] < (MALFORMED_EVERY_S if is_malformed else FAILED_EVERY_S):
            self._left_out[is_malformed] += 1
            return False
        self._passed_at[is_malformed] = now
        if is_malformed:
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
            record.msg, record.args = f"{record.getMessage()}: it is no HTTP ({type(error).__name__})", ()
            record.exc_info = None
        if left_out := self._left_out[is_malformed]:
            record.msg, record.args = f"{record.getMessage()}; {left_out} more like it since the last one said", ()
            self._left_out[is_malformed] = 0
        return True


log = logging.getLogger(__name__)
log.addFilter(Seldom())
