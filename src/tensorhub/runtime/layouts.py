"""Reports that name a layout which the server does not know wait here until one who has it says what it is.

A layout of ten thousand tensors takes a megabyte, and all workers of a model have the same few. So a worker sends its
own when asked for it, and of those who wait for one layout, one is asked. Another one is asked if that takes long: the
first may have stopped, or its host may be gone. Each is asked once.

It must never: drop the last thing that a line has said, or ask all at once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..core.messages import Report
from ..core.names import Digest
from .lines import Line

ASK_AGAIN_S = 0.5  # a megabyte takes a tenth of that on a link of 100 Mbit/s
ASK_AGAIN_MOST_S = 8.0  # it doubles up to here: 16 MiB across a slow link take long, and from everybody longer


@dataclass
class _Waiting:
    line: Line
    report: Report
    is_asked: bool = False


class _Queue:
    """Those who wait for one layout, the first first; the newest report of each."""

    def __init__(self, layout: Digest) -> None:
        self.layout = layout
        self.waiting: dict[str, _Waiting] = {}  # by sender
        self.pause_s = ASK_AGAIN_S
        self.timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Ask the first who was not asked yet, and the next one if that takes long."""
        self.timer = None
        first = next((each for each in self.waiting.values() if not each.is_asked), None)
        if first is None:
            return
        first.is_asked = True
        first.line.ask(self.layout)
        self.timer = asyncio.get_running_loop().call_later(self.pause_s, self.ask)
        self.pause_s = min(2 * self.pause_s, ASK_AGAIN_MOST_S)

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class UnknownLayouts:
    """The queues. `is_known` is asked of each report's layout: it must be quick."""

    def __init__(self, is_known: Callable[[Digest], bool]) -> None:
        self._is_known = is_known
        self._queues: dict[Digest, _Queue] = {}
        self._waits_for: dict[str, Digest] = {}  # by sender

    def holds(self, line: Line, report: Report) -> bool:
        """Whether the report waits here now. What its line said before is of no use any more, either way."""
        layout = report.layout
        if not layout or self._is_known(layout):
            if self._waits_for:
                self.take(line)
            return False
        queue = self._queues.get(layout)
        before = queue.waiting.get(line.sender) if queue is not None else None
        if before is not None:
            before.report = report
            return True
        self.take(line)
        queue = self._queues.setdefault(layout, _Queue(layout))
        queue.waiting[line.sender] = _Waiting(line, report)
        self._waits_for[line.sender] = layout
        if queue.timer is None:
            queue.ask()
        return True

    def take(self, line: Line) -> Report | None:
        """The report of this line that waits here, if any; from now on it does not."""
        layout = self._waits_for.pop(line.sender, None)
        if layout is None:
            return None
        queue = self._queues[layout]
        gone = queue.waiting.pop(line.sender)
        if not queue.waiting:
            queue.end()
            del self._queues[layout]
        elif gone.is_asked:
            queue.end()
            queue.ask()  # the others need not wait for who has gone
        return gone.report

    def came(self, layout: Digest) -> list[tuple[Line, Report]]:
        """Somebody has said what this layout is: those who waited for it, in their order."""
        queue = self._queues.pop(layout, None)
        if queue is None:
            return []
        queue.end()
        for sender in queue.waiting:
            del self._waits_for[sender]
        return [(each.line, each.report) for each in queue.waiting.values()]
