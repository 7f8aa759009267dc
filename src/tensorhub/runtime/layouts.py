"""Reports that name a layout which the server does not know wait here until one who has it says what it is.

A layout of ten thousand tensors takes a megabyte, and all workers of a model have the same few. So a worker sends its
own when asked for it, and of those who wait for one layout, one is asked. Another one is asked if that takes long: the
first may have stopped, or its host may be gone. Each is asked once.

A report that waits does not prolong its worker's lease. So after a while all who wait are let through, and whoever
names the layout later: a decision needs its digest alone, and only errors and the grid of a publish want to know more.

It must never: drop the last thing that a line has said, ask all at once, or let one worker end the lease of another.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..core.messages import Report
from ..core.names import Digest
from .lines import Line

ASK_AGAIN_S = 0.5  # a megabyte takes 0.1 s on a link of 100 Mbit/s
ASK_AGAIN_MOST_S = 8.0  # it doubles up to here: 16 MiB across a slow link take long, and from everybody longer


@dataclass
class _Waiting:
    line: Line
    report: Report | None = None  # the newest; None: it was let through
    is_asked: bool = False


class _Queue:
    """Those who name one layout, the first first."""

    def __init__(self, layout: Digest) -> None:
        self.layout = layout
        self.waiting: dict[str, _Waiting] = {}  # by sender
        self.is_overdue = False
        self.pause_s = ASK_AGAIN_S
        self.next_ask: asyncio.TimerHandle | None = None
        self.overdue: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Ask the first who was not asked yet, and the next one if that takes long."""
        if self.next_ask is not None:
            self.next_ask.cancel()
            self.next_ask = None
        first = next((each for each in self.waiting.values() if not each.is_asked), None)
        if first is None:
            return
        first.is_asked = True
        first.line.ask(self.layout)
        self.next_ask = asyncio.get_running_loop().call_later(self.pause_s, self.ask)
        self.pause_s = min(2 * self.pause_s, ASK_AGAIN_MOST_S)

    def end(self) -> None:
        for timer in (self.next_ask, self.overdue):
            if timer is not None:
                timer.cancel()


class UnknownLayouts:
    """The queues. `is_known` is asked of each report's layout: it must be quick.

    What has waited for `patience_s` is given to `let_through`, and comes back to `holds`, which then lets it pass.
    """

    def __init__(
        self, is_known: Callable[[Digest], bool], let_through: Callable[[Line, Report], None], *, patience_s: float
    ) -> None:
        self._is_known = is_known
        self._let_through = let_through
        self._patience_s = patience_s
        self._queues: dict[Digest, _Queue] = {}
        self._waits_for: dict[str, Digest] = {}  # by sender

    def holds(self, line: Line, report: Report) -> bool:
        """Whether the report waits here now. What its line said before is of no use any more, either way."""
        layout = report.layout
        if not layout or self._is_known(layout):
            if self._waits_for:
                self.take(line)
            return False
        if self._waits_for.get(line.sender) != layout:
            self.take(line)
            self._waits_for[line.sender] = layout
        queue = self._queues.get(layout) or self._begin(layout)
        waiting = queue.waiting.setdefault(line.sender, _Waiting(line))
        waiting.report = None if queue.is_overdue else report
        if queue.next_ask is None:
            queue.ask()
        return not queue.is_overdue

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
            queue.ask()  # the others need not wait for who has gone
        return gone.report

    def came(self, layout: Digest) -> None:
        """Somebody has said what this layout is: those who wait for it are let through, in their order."""
        queue = self._queues.pop(layout, None)
        if queue is None:
            return
        queue.end()
        for sender in queue.waiting:
            del self._waits_for[sender]
        self._release(queue)

    def _begin(self, layout: Digest) -> _Queue:
        queue = self._queues[layout] = _Queue(layout)
        queue.overdue = asyncio.get_running_loop().call_later(self._patience_s, self._give_up, queue)
        return queue

    def _give_up(self, queue: _Queue) -> None:
        queue.is_overdue = True
        self._release(queue)

    def _release(self, queue: _Queue) -> None:
        for each in queue.waiting.values():
            report, each.report = each.report, None
            if report is not None:
                self._let_through(each.line, report)
