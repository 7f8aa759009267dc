"""The judge of missed wake-ups: whoever has something new to hear after an event is decided for in that event.

On a sample of events it takes a copy of the server. All of the copy are decided for until nothing changes, so that what
only time has changed is out of the way. Then the copy is told of the event, and all are decided for once more, at the
same time. Whoever is told something only then was missed: the event had changed what follows for it, and nobody marked
it as dirty.
"""

import copy
from collections.abc import Callable

from msgspec.structs import replace

from tensorhub.protocol.messages import Answer, Failure, Grant, Orders, Report, ToServer, Withdrawing
from tensorhub.protocol.names import Ticket
from tensorhub.server import Outbox, Server, sessions
from tensorhub.server.members import Member, Told

ROUNDS = 5  # of deciding for everybody, before the copy counts as settled: a move may lead to another one


UNTOLD = ("ceiling", "witness")  # no news by themselves; `witness` is taken back with the next orders


class Judged(Server):
    """A server that is judged at every so-manieth event. What was missed is in `missed`."""

    every = 1
    events = 0
    judged = 0
    missed: list[str] = []  # noqa: RUF012 - of all lives of a simulated server

    def handle(self, message: ToServer, *, sender: str, now: float, arrived: float | None = None) -> Outbox:
        def event(server: Server) -> None:
            server.handle(message, sender=sender, now=now, arrived=arrived)

        self._sample(event, now, f"after {sender}: {message}", reporter=sender)
        if Judged.events % Judged.every == 0 and isinstance(message, Report):
            Judged.missed += misjudged(event, self, now, sender)
        return super().handle(message, sender=sender, now=now, arrived=arrived)

    def disconnected(self, sender: str, *, now: float) -> Outbox:
        def event(server: Server) -> None:
            server.disconnected(sender, now=now)

        self._sample(event, now, f"after {sender} was cut off")
        return super().disconnected(sender, now=now)

    def _sample(self, event: Callable[[Server], None], now: float, what: str, *, reporter: str = "") -> None:
        Judged.events += 1
        if Judged.events % Judged.every == 0:
            Judged.missed += [f"{told} {what}" for told in missed_by(event, self, now, reporter)]
            Judged.judged += 1


def missed_by(event: Callable[[Server], None], server: Server, now: float, reporter: str = "") -> list[str]:
    """Who is told what only when all are decided for, though the event led to it. The server itself stays as it is.

    `reporter`: whose report the event is. It has to hear all that there is to say, whether or not it is busy.
    """
    other = Server.__new__(Server)
    other.state = copy.deepcopy(server.state)
    other.tick(now=now)
    settled = [member for member in other.state.members.all() if member.settled_at == other.state.happened]
    for _ in range(ROUNDS):
        if not decide_for_all(other, now):
            break
    else:
        return []  # readers that go from one source to the next: a rule against that is judged elsewhere
    if other.is_recovering:
        return []  # for a lease everybody is heard of anew, and hears with its own next report
    for member in settled:  # a report from which nothing follows is taken so by the copy too
        member.settled_at = other.state.happened
    event(other)
    before = {member.sender: member.told for member in other.state.members.all()}
    busy = {member.sender for member in other.state.members.all() if is_busy(other, member)}
    found = []
    for sender, orders in decide_for_all(other, now):
        if sender not in busy and sender != reporter:
            continue  # it hears with its own next report
        former = before[sender]
        assert isinstance(orders, Orders)
        now = other.state.known(other.state.hellos[sender].worker).told
        names = [name for name in Told.__struct_fields__ if name not in UNTOLD]
        news = [name for name in names if _said(now, name) != _said(former, name)]
        if news == ["fetch"] and _said(now, "fetch") is None:
            continue  # no read is granted for it any more: it hears that in time
        if news:
            words = [f"{name} {getattr(former, name, None)} -> {getattr(now, name)}" for name in news]
            found.append(f"{sender} hears {'; '.join(words)}")
    return found


def misjudged(event: Callable[[Server], None], server: Server, now: float, sender: str) -> list[str]:
    """Who is told something else when the report is not looked at for whether anything follows from it."""
    one, other = (Server.__new__(Server) for _ in range(2))
    for each in (one, other):
        each.state = copy.deepcopy(server.state)
        each.tick(now=now)
    event(one)
    look, sessions.take = sessions.take, lambda state, report, sender, arrived: None
    try:
        event(other)
    finally:
        sessions.take = look
    found = []
    for member in one.state.members.all():
        theirs = other.state.members.get(member.worker)
        for name in Told.__struct_fields__:
            told, so = (
                getattr(member.told, name, None),
                getattr(theirs.told if theirs is not None else None, name, None),
            )
            if name not in UNTOLD and _without_number(told) != _without_number(so):
                found.append(f"{member.sender} would hear {name} {so} and not {told} after {sender}")
    return found


def _without_number(told: object) -> object:
    """A read is the same whatever number its grant has."""
    return replace(told, ticket=Ticket(0)) if isinstance(told, Grant) else told


def _said(told: object, name: str) -> object:
    """What it was told of it. Which shards a call waits for is told in time, not at once."""
    value = getattr(told, name, None)
    if isinstance(value, Answer) and value.waiting is not None:
        return replace(value, waiting=Failure(value.waiting.code, ""))
    return value


def is_busy(server: Server, member: Member) -> bool:
    """It waits for something, or somebody may wait for it; who does nothing hears with its own next report."""
    reads, content = server.state.reads, member.content
    is_reading = bool(reads.load(member.worker) or reads.of(member.worker))
    is_leaving = isinstance(content.buffer, Withdrawing)
    return member.report.call is not None or is_reading or bool(content.copies) or is_leaving


def decide_for_all(server: Server, now: float) -> Outbox:
    """As if anything might have changed for anybody."""
    for model in server.state.models.values():
        server.state.mark_everyone_dirty(model)
    return server.tick(now=now)
