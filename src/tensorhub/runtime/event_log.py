"""The newest events of a reference server: numbered, dated, kept and logged."""

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile

from msgspec.structs import replace

from ..protocol.events import MAX_EVENTS, Event, EventsView, is_alarming

_log = logging.getLogger(__name__)

MAX_PAGE = 1_000  # events in one answer: they are encoded within a millisecond


class EventLog:
    """The newest `MAX_EVENTS` events, oldest first. `add` logs each in one line."""

    def __init__(self, first: int, clock: Callable[[], float] = time.time) -> None:
        """`first` is above the numbers of all events of former lives."""
        self.last = self._before = first
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        """Takes in an event that has just happened."""
        self.last += 1
        event = replace(event, number=self.last, at=self._clock())
        self._events.append(event)
        level = logging.WARNING if is_alarming(event) else logging.INFO
        _log.log(level, "%s", event.text, extra={"event": event})

    def after(self, number: int, model: str = "") -> EventsView:
        """The events after that number: of all models and of the server, or of one model. At most `MAX_PAGE`."""
        newer = list(takewhile(lambda event: event.number > number, reversed(self._events)))[::-1]
        oldest = self.last - len(self._events) + 1
        missed = max(0, oldest - 1 - max(number, self._before)) if number else 0
        page = newer[:MAX_PAGE]
        last = page[-1].number if len(newer) > MAX_PAGE else self.last
        return EventsView(tuple(event for event in page if model in ("", event.model)), last, missed)

    def take_from(self, told: deque[Event]) -> None:
        """Takes over all that the machine has told."""
        while told:
            self.add(told.popleft())
