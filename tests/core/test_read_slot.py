"""The one place through which a buffer is written."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.errors import InvariantViolation
from tensorhub.protocol.messages import Source
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.worker.events import StartRead, StopRead, Trust
from tensorhub.worker.read_slot import ReadSlot

from .kit import grant, worker

ONE = Version(1)
LAYOUT = Digest("l")


def slot(*, ticket: int = 5, trust_until: float = 10.0) -> ReadSlot:
    found = ReadSlot(worker("rollout"))
    found.extend_trust(trust_until)
    found.take_grant(grant(ticket))
    return found


def test_a_granted_read_starts_when_it_is_wanted_and_trusted() -> None:
    found = slot()
    assert found.may_start(is_wanted=True, now=9.9)
    assert not found.may_start(is_wanted=True, now=10.0)
    assert not found.may_start(is_wanted=False, now=0.0)
    found.start(LAYOUT)
    assert [type(effect) for effect in found.take_effects()] == [Trust, Trust, StartRead]
    assert not found.may_start(is_wanted=True, now=0.0)


def test_a_ticket_that_was_closed_is_never_begun() -> None:
    found = slot(ticket=5)
    found.start(LAYOUT)
    found.ended(Ticket(5))
    found.take_grant(grant(5))
    assert found.grant is None
    found.take_grant(grant(6))
    assert found.may_start(is_wanted=True, now=0.0)


def test_a_void_grant_stops_its_read_once() -> None:
    found = slot()
    found.start(LAYOUT)
    found.take_effects()
    found.take_grant(None)
    found.stop_unless_granted(is_wanted=True)
    found.stop_unless_granted(is_wanted=True)
    assert found.take_effects() == [StopRead(Ticket(5))]


def test_the_end_of_the_lease_stops_the_read() -> None:
    found = slot()
    found.start(LAYOUT)
    found.take_effects()
    assert not found.lapse(9.9)
    assert found.lapse(10.0)
    assert found.take_effects() == [StopRead(Ticket(5))]


def test_the_end_of_a_read_that_is_not_open_is_our_bug() -> None:
    with pytest.raises(InvariantViolation):
        slot().ended(Ticket(5))


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
