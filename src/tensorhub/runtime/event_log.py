"""The newest events of a reference server: numbered, dated, kept and logged."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import takewhile

from msgspec.structs import replace

from ..protocol.events import MAX_EVENTS, Event, EventsView, Refused, is_alarming
from ..protocol.messages import Hello
from ..protocol.names import is_name

_log = logging.getLogger("tensorhub.events")

MAX_PAGE = 1_000  # events in one answer: they are found and encoded within 3 ms


class EventLog:
    """The newest `MAX_EVENTS` events, oldest first. `add` logs each in one line."""

    def __init__(self, first: int, clock: Callable[[], float] = time.time) -> None:
        """`first` is above the numbers of all events of former lives."""
        self.last = self._before = first
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __reversed__(self) -> Iterator[Event]:
        return reversed(self._events)

    def add(self, event: Event) -> None:
        """Takes in an event that has just happened."""
        self.last += 1
        event = replace(event, number=self.last, at=self._clock())
        self._events.append(event)
        level = logging.WARNING if is_alarming(event) else logging.INFO
        _log.log(level, "%s", event.text, extra={"event": event})

    def take_from(self, told: deque[Event]) -> None:
        """Takes over all that the machine has told."""
        while told:
            self.add(told.popleft())

    def after(self, number: int, model: str = "") -> EventsView:
        """The first `MAX_PAGE` events after that number: of one model, or of all and of the server."""
        if number > self.last:  # of another server: all that this one has is news
            number = 0
        newer = list(takewhile(lambda event: event.number > number, reversed(self._events)))[::-1]
        found = [event for event in newer if model in ("", event.model)]
        oldest = self.last - len(self._events) + 1
        missed = max(0, oldest - 1 - max(number, self._before)) if number else 0
        last = found[MAX_PAGE - 1].number if len(found) > MAX_PAGE else self.last
        return EventsView(tuple(found[:MAX_PAGE]), last, missed)


MAX_ADDRESSES = 1_000
AGAIN_S = 60.0  # until a client of the same address makes another event


class UncheckedRefusals:
    """Events of refused clients that have shown no right token: few, however often they come."""

    def __init__(self, log: EventLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._known: dict[str, tuple[float, int]] = {}  # by address: when it last made an event, and how many did not

    def add(self, address: str, hello: Hello | None, why: str) -> None:
        """Such a client is refused."""
        now = self._clock()
        told_at, left_out = self._known.pop(address, (now - AGAIN_S, 0))
        if now - told_at < AGAIN_S:
            self._known[address] = told_at, left_out + 1
            return
        if len(self._known) >= MAX_ADDRESSES:
            self._known = {each: known for each, known in self._known.items() if now - known[0] < AGAIN_S}
        if len(self._known) < MAX_ADDRESSES:
            self._known[address] = now, 0
            named = hello is not None and is_name(hello.model) and is_name(hello.replica)
            name = (hello.model, hello.replica, hello.shard) if hello is not None and named else ("", "", 0)
            model, replica, shard = name
            refused = Refused(model=model, replica=replica, shard=shard, why=why, address=address, left_out=left_out)
            self._log.add(refused)
