"""`tensorhub watch`: one screen after another, and keys that scroll."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..protocol.errors import ServerUnreachable
from ..protocol.status import Status
from .output import shown
from .status import SCREEN_LINES, draw_status, print_lines, status_json


class Watcher:
    """Turns one answer after another into screens. While the server is away, the last answer stays."""

    def __init__(
        self, server: str, ask: Callable[[], Status], clock: Callable[[], float] = time.monotonic, *, model: str = ""
    ) -> None:
        self._server, self._model = server, model
        self._ask = ask
        self._clock = clock
        self._last: Status | None = None
        self._away_since: float | None = None
        self._away_s = 0.0

    def ask(self) -> Status | None:
        """What the server says now; None while it is away. Raises `ServerUnreachable` if it never answered."""
        now = self._clock()
        try:
            self._last = self._ask()
        except ServerUnreachable:
            if self._last is None:
                raise
            self._away_since = now if self._away_since is None else self._away_since
            self._away_s = now - self._away_since
            return None
        self._away_since = None
        return self._last

    def draw(self, width: int, most_lines: int | None = None) -> Iterator[Text]:
        """The lines of the last answer."""
        if self._last is None:
            return
        if self._away_since is not None:
            yield Text(f"no answer for {self._away_s:.0f} s; below is what was last heard", style="bold red")
        yield from draw_status(self._last, server=self._server, model=self._model, width=width, most_lines=most_lines)


UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END = b"\x1b[A", b"\x1b[B", b"\x1b[5~", b"\x1b[6~", b"\x1b[H", b"\x1b[F"
AS_KEYS = {b"k": UP, b"j": DOWN, b"b": PAGE_UP, b" ": PAGE_DOWN, b"g": HOME, b"G": END}
KEYS = "↑ ↓ PgUp PgDn scroll, q ends"
FAR = 1 << 30


class Page:
    """The part of a longer screen that a terminal shows. Its last line says which part, where not all of it fits."""

    def __init__(self, watcher: Watcher, console: Console) -> None:
        self._watcher, self._console = watcher, console
        self.first = 0  # line at the top

    def press(self, key: bytes) -> bool:
        """Scroll by that key. False: it ends the program."""
        page = max(1, self._console.height - 2)
        steps = {UP: -1, DOWN: 1, PAGE_UP: -page, PAGE_DOWN: page, HOME: -FAR, END: FAR}
        self.first = max(0, self.first + steps.get(AS_KEYS.get(key, key), 0))
        return key != b"q"

    def draw(self) -> Group:
        """The lines that are seen now. Lines below them are not drawn."""
        height = self._console.height
        lines = list(islice(self._watcher.draw(self._console.width), self.first + height + 1))
        if len(lines) <= height:
            self.first = 0
            return Group(*lines)
        self.first = min(self.first, len(lines) - height + 1)
        seen = lines[self.first : self.first + height - 1]
        where = f"lines {self.first + 1:,} to {self.first + len(seen):,}; {KEYS}"
        return Group(*seen, Text(where[: self._console.width], style="reverse"))


def watch(watcher: Watcher, console: Console, *, every_s: float, times: int | None) -> None:
    """Show it every `every_s` seconds, `times` times or until q or Ctrl-C.

    SIGTERM and SIGHUP raise `SystemExit` while it draws in place, once the terminal is as it was.
    """
    rounds = range(times) if times is not None else count()
    if not console.is_interactive:  # no terminal, or a dumb one, in which nothing can be drawn over
        for number in rounds:
            time.sleep(every_s if number else 0.0)
            watcher.ask()
            print_lines(console, watcher.draw(console.width, SCREEN_LINES))
        return
    page = Page(watcher, console)
    watcher.ask()  # an error before the screen is taken stays readable
    with (
        shown(Live(page.draw(), console=console, screen=times is None, auto_refresh=False)) as live,
        _keys() as pressed,
    ):
        for number in rounds:
            if number:
                until = time.monotonic() + every_s
                while (left_s := until - time.monotonic()) > 0:
                    key = pressed(left_s)
                    if key and not page.press(key):
                        return
                    if key:
                        live.update(page.draw(), refresh=True)
                watcher.ask()
                live.update(page.draw())
            live.refresh()


def watch_json(watcher: Watcher, say: Callable[[str], None], *, every_s: float, times: int | None) -> None:
    """One line of JSON for each answer. While the server is away there is none."""
    for number in range(times) if times is not None else count():
        time.sleep(every_s if number else 0.0)
        if (status := watcher.ask()) is not None:
            say(status_json(status, indent=None))


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Keys of the terminal, each as it is pressed. What is yielded waits so many seconds for one; empty: none came."""
    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    def pressed(seconds: float) -> bytes:
        if descriptor is None:
            time.sleep(seconds)
            return b""
        return os.read(descriptor, 16) if select.select((descriptor,), (), (), seconds)[0] else b""

    if descriptor is None:
        yield pressed
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
