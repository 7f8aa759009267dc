"""The one place through which a buffer is written."""

from msgspec.structs import replace

from tensorhub.protocol.messages import Source
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.worker.events import StartRead
from tensorhub.worker.read_slot import ReadSlot

from .kit import grant, worker

ONE = Version(1)
LAYOUT = Digest("l")


def slot(*, ticket: int = 5, trust_until: float = 10.0) -> ReadSlot:
    found = ReadSlot(worker("rollout"))
    found.extend_trust(trust_until)
    found.take_grant(grant(ticket))
    return found


def test_the_watermark_rises_to_just_below_what_is_open() -> None:
    found = slot(ticket=5)
    assert found.raise_watermark(Number(9)) == 4  # waits to be begun
    found.start(LAYOUT)
    found.take_grant(grant(8))
    assert found.raise_watermark(Number(9)) == 4
    found.ended(Ticket(5))
    assert found.raise_watermark(Number(9)) == 7
    found.take_grant(None)
    assert found.raise_watermark(Number(9)) == 9
    assert found.raise_watermark(Number(3)) == 9


def test_only_the_read_that_was_told_to_stop_writes_no_more() -> None:
    found = slot(ticket=5)
    assert not found.bar(Ticket(5))  # nothing is read
    found.start(LAYOUT)
    assert not found.bar(Ticket(5))  # it was not told to
    found.stop("no longer granted")
    assert not found.bar(Ticket(4))
    assert found.may_write
    assert found.bar(Ticket(5))
    assert not found.may_write


def test_a_ticket_keeps_what_was_granted_with_it_whatever_a_restarted_server_knows_of_it() -> None:
    known = Source(worker("trainer"))
    found, first = ReadSlot(worker("rollout")), replace(grant(5), sources=(replace(known, endpoints=("x://1",)),))
    found.extend_trust(10.0)
    found.take_grant(first)
    found.start(LAYOUT, is_only_opened=True)
    found.note_opened(Ticket(5), Digest(""))
    found.take_grant(replace(first, sources=(known,)))
    found.take_effects()
    found.go_on()
    assert found.take_effects() == [StartRead(first)]
