"""What a child process hears from the director over its standard input: that it may go on, and, when that ends because
the director closed it or is gone, that it should end. Also how the director itself ends in order.

Nothing that the demo starts outlives the demo, however that ended.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDIN = 0


class Parent:
    """The process that started this one."""

    def __init__(self) -> None:
        self._is_end_expected = False
        self._ended, self._told = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def expect_end(self) -> None:
        """From now on the end of standard input is the signal to leave; before, it ends this process at once."""
        self._is_end_expected = True

    def wait_told(self) -> None:
        """Return once the director has said that this may go on."""
        self._told.wait()

    def wait_end(self) -> None:
        """Return when told to leave."""
        self._ended.wait()

    def _watch(self) -> None:
        while os.read(STDIN, 4096):  # not through sys.stdin, whose lock the interpreter wants when it exits
            self._told.set()
        if not self._is_end_expected:
            os._exit(1)
        self._ended.set()


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM is taken like Ctrl-C during the block, so that nothing that was started is left behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
