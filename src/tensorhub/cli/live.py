"""`tensorhub watch`: the status again and again, in place on a terminal, one below the other elsewhere."""

import time
from collections.abc import Callable
from itertools import count

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..core.errors import ServerUnreachable
from ..core.snapshot import Status
from .draw import draw_status
from .leaving import shown
from .rows import Progress, progress_after, rates_of

FRESH_REPORTS = 2  # between two reports nothing seems to move, and one may come late: the former rate still holds


class Watcher:
    """Turns one answer after another into pictures. While the server is away, the last picture stays."""

    def __init__(
        self, server: str, ask: Callable[[], Status], clock: Callable[[], float] = time.monotonic, *, model: str = ""
    ) -> None:
        self._server, self._model = server, model
        self._ask = ask
        self._clock = clock
        self._last: Status | None = None
        self._progress: dict[int, Progress] = {}
        self._rates: dict[int, float] = {}
        self._away_since: float | None = None

    def look(self, width: int) -> RenderableType:
        """The picture as it is now. Raises `ServerUnreachable` only if there never was one."""
        now = self._clock()
        try:
            status = self._ask()
        except ServerUnreachable:
            if self._last is None:
                raise
            self._away_since = now if self._away_since is None else self._away_since
            away = Text(f"no answer for {now - self._away_since:.0f} s; below is what was last heard", style="bold red")
            return Group(away, self._draw(self._last, width))
        self._away_since = None
        self._progress = progress_after(self._progress, status, now)
        self._rates = rates_of(self._progress, now, fresh_s=FRESH_REPORTS * status.report_s)
        self._last = status
        return self._draw(status, width)

    def _draw(self, status: Status, width: int) -> RenderableType:
        return draw_status(status, server=self._server, model=self._model, width=width, bars=True, rates=self._rates)


def watch(watcher: Watcher, console: Console, *, every_s: float, times: int | None) -> None:
    """Show it every `every_s` seconds, `times` times or until Ctrl-C.

    SIGTERM and SIGHUP raise `SystemExit` while it draws in place, once the terminal is as it was.
    """
    rounds = range(times) if times is not None else count()
    if not console.is_interactive:  # no terminal, or a dumb one, in which nothing can be drawn over
        for number in rounds:
            time.sleep(every_s if number else 0.0)
            console.print(watcher.look(console.width))
        return
    first = watcher.look(console.width)  # an error before the screen is taken stays readable
    with shown(Live(first, console=console, screen=times is None, auto_refresh=False)) as live:
        for number in rounds:
            if number:
                time.sleep(every_s)
                live.update(watcher.look(console.width))
            live.refresh()
