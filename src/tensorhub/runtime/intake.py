"""What workers have sent and nobody has decided about yet: one decider takes the lines in turn.

A report is whole, so of each line only the newest waits: however late the decisions are, no more than one report of
each worker is owed an answer. The decider lets everybody else run after a few milliseconds, so that orders leave, and
lines are read, while others still wait.

Lateness is no time: what waits is handled as of when it came (`now`), in the order in which the lines began to wait. So
no lease ends, and no recovery, while a report that would have changed that waits here. It must never: drop the last
thing that a line has said, or look into a message.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..core.messages import Hello, LayoutInfo, Report, ToServer
from .lines import Line

SLICE_S = 0.002  # at a stretch: an update's decisions take up to that, and a turn of the loop 20 µs


class Decider(Protocol):
    """Who handles what has come, at the time when it came."""

    def decide(self, line: Line, message: ToServer, *, now: float, arrived: float) -> None:
        """Handle one message."""

    def end(self, line: Line, *, now: float) -> None:
        """The line has ended, and all that it said was handled."""

    def rest(self) -> None:
        """Nothing waits any more."""


class Inbox:
    """What one line has said and nobody has handled; the newest of each kind."""

    def __init__(self, now: float) -> None:
        self.first_at = self.last_at = now  # when the first and the last of it came
        self.hello: Hello | None = None
        self.layout: LayoutInfo | None = None
        self.report: Report | None = None
        self.is_over = False  # and the line has ended

    def put(self, message: ToServer, now: float) -> None:
        self.last_at = now
        match message:
            case Hello():
                self.hello = message
            case LayoutInfo():
                self.layout = message
            case Report():
                self.report = message

    def messages(self) -> list[ToServer]:
        """In their order: a report may be about the layout that came before it, never the other way round."""
        return [message for message in (self.hello, self.layout, self.report) if message is not None]


class Intake:
    """The queue of lines, and the task that empties it."""

    def __init__(self, decider: Decider, clock: Callable[[], float] = time.monotonic) -> None:
        self._decider = decider
        self._clock = clock
        self._waiting: deque[tuple[Line, Inbox]] = deque()
        self._inboxes: dict[str, Inbox] = {}  # of the lines in the queue, by sender
        self._has_mail = asyncio.Event()
        self.replaced = 0  # reports in whose place a newer one was handled

    @property
    def is_busy(self) -> bool:
        """Something waits."""
        return bool(self._waiting)

    @property
    def now(self) -> float:
        """The time up to which all that came has been handled: the machine's."""
        return self._waiting[0][1].first_at if self._waiting else self._clock()

    def put(self, line: Line, message: ToServer) -> None:
        """The line has said this."""
        inbox = self._inbox(line)
        self.replaced += isinstance(message, Report) and inbox.report is not None
        inbox.put(message, self._clock())

    def put_back(self, line: Line, report: Report) -> None:
        """What the line has said before can be handled now, if it has said nothing newer."""
        inbox = self._inbox(line)
        inbox.report = inbox.report or report

    def end(self, line: Line) -> None:
        """The line has ended. What it said before counts."""
        self._inbox(line).is_over = True

    def _inbox(self, line: Line) -> Inbox:
        inbox = self._inboxes.get(line.sender)
        if inbox is None:
            inbox = self._inboxes[line.sender] = Inbox(self._clock())
            self._waiting.append((line, inbox))
            self._has_mail.set()
        return inbox

    async def run(self) -> None:
        """For ever: decide for a slice of time, then let the others run."""
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            while self._waiting:
                self._decide_for(SLICE_S)
                await asyncio.sleep(0)
            self._decider.rest()

    def _decide_for(self, seconds: float) -> None:
        until = self._clock() + seconds
        while self._waiting:
            self._take_first()
            if self._clock() >= until:
                return

    def _take_first(self) -> None:
        line, inbox = self._waiting.popleft()
        del self._inboxes[line.sender]
        for message in inbox.messages():
            if not line.is_refused:
                self._decider.decide(line, message, now=inbox.first_at, arrived=inbox.last_at)
        if inbox.is_over:
            self._decider.end(line, now=inbox.first_at)
