"""How a command that draws on a terminal leaves it: as it was, also where a signal ends the command.

SIGTERM and SIGHUP end a program at once. What it would have undone, such as a cursor that is hidden, then stays.
It must never: interrupt a display that starts or stops, or end a program whose caller has it ignore a signal.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TypeVar

LEAVING = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is a KeyboardInterrupt anyway
BY_SIGNAL = 128  # and the signal's number: the exit status that a shell shows


class Display(Protocol):
    """What rich draws with: `Live`, `Progress`, `Status`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


D = TypeVar("D", bound=Display)


@contextmanager
def shown(display: D) -> Iterator[D]:
    """Draw while the block lasts. SIGTERM and SIGHUP raise `SystemExit` in it. For the main thread."""
    leave = _Leave()
    before = {each: signal.getsignal(each) for each in LEAVING}
    ours = [each for each, handler in before.items() if handler == signal.SIG_DFL]
    for each in ours:
        signal.signal(each, leave)
    try:
        display.start()
        try:
            leave.release()
            yield display
        finally:
            leave.is_held = True
            display.stop()
        leave.release()
    finally:
        for each in ours:
            signal.signal(each, before[each])


class _Leave:
    """What a signal does: it ends the program, once that may be."""

    def __init__(self) -> None:
        self.is_held = True
        self._number = 0

    def __call__(self, number: int, _: FrameType | None) -> None:
        self._number = self._number or number
        if not self.is_held:
            self.release()

    def release(self) -> None:
        """From now on at once; now, if one has come before."""
        self.is_held = self._number != 0  # the first one ends the program, and no other disturbs that
        if self._number:
            raise SystemExit(BY_SIGNAL + self._number)
