"""Reports from which nothing follows, and that every other report is more than that."""

from typing import Any

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    Across,
    CallReport,
    Failure,
    Filling,
    Holding,
    HostCopy,
    Part,
    Reading,
    Report,
    TicketFailure,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version, WorkerId
from tensorhub.server import Server, sessions
from tensorhub.server.members import Member

from .kit import worker
from .town import Town

ONE, ROOT = Version(1), Digest("r")
TRAINER, READER = worker("trainer"), worker("reader")

# --- what is news -----------------------------------------------------------------------------------------------------

WITH_EVERY_REPORT = ("number", "seen", "closed", "received_bytes", "ceiling", "ceiling_receipt", "roster")
NEWS: dict[str, Any] = {
    "session": Number(2),
    "buffer": Filling(ONE),
    "layout": Digest("other"),
    "size_bytes": 1,
    "call": CallReport(1, "replicate", 1),
    "ended": 1,
    "finished": 1,
    "reading": Reading(Ticket(1), TRAINER, ONE),
    "newest": ONE,
    "failures": (TicketFailure(Ticket(1), TRAINER, "source-lost", "reset"),),
    "cross_site_bytes": {1: 100},
    "copies": (HostCopy(1, ONE, ROOT),),
    "copies_left": 1,
    "copy_error": Failure("internal", "no memory"),
    "pins": (ONE,),
    "prefetch": "latest",
    "newest_receipt": "receipt",
    "receipts": {1: "receipt"},
    "closing": True,
    "leaving": True,
    "claim": ONE,
    "claimed_in": Number(5),
    "stops": True,
    "across": Across(ONE),
    "over": (Ticket(4),),
    "missed": Failure("layout-mismatch", "no shard has it"),
}


@pytest.mark.parametrize("field", NEWS)
def test_whatever_a_worker_says_anew_is_more_than_that_it_lives(field: str) -> None:
    said = replace(Report(2), **{field: NEWS[field]})
    assert not sessions.is_same(said, Report(1))
    if field != "leaving":  # which is said once
        assert sessions.is_same(replace(said, number=3), said)


def test_every_field_of_a_report_is_one_or_the_other() -> None:
    assert sorted([*WITH_EVERY_REPORT, *NEWS]) == sorted(Report.__struct_fields__)


@pytest.mark.parametrize("field", [field for field in NEWS if field not in ("buffer", "reading")])
def test_whatever_is_said_beside_it_is_more_than_that_a_fill_goes_on(field: str) -> None:
    before = Report(1, buffer=Filling(ONE, 3, 9))
    goes_on = Report(2, buffer=Filling(ONE, 4, 9))
    assert sessions.is_progress(goes_on, before)
    assert not sessions.is_progress(replace(goes_on, **{field: NEWS[field]}), before)


# --- who is decided for -----------------------------------------------------------------------------------------------

HELD = Holding(ONE, ROOT)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[WorkerId]:
    """For whom the server has made a full decision, in order."""
    found: list[WorkerId] = []
    decide = Server._decide

    def noted(server: Server, member: Member) -> None:
        found.append(member.worker)
        decide(server, member)

    monkeypatch.setattr(Server, "_decide", noted)
    return found


def reading_town() -> tuple[Town, dict[str, Any]]:
    """A town in which the reader fills its buffer, and what the reader says."""
    town = Town()
    town.joins(TRAINER, buffer=replace(HELD, published=True))
    town.joins(READER)
    call = CallReport(1, "replicate", 1)
    town.says(READER, call=call)
    grant = town.orders[READER].grant
    assert grant is not None
    said = {"call": replace(call, resolved=ONE), "reading": Reading(grant.ticket, TRAINER, ONE)}
    town.says(READER, buffer=Filling(ONE, 0, 3), **said)
    return town, said


def test_nobody_is_decided_for_who_lives_and_does_nothing(decided: list[WorkerId]) -> None:
    town = Town()
    town.joins(TRAINER, buffer=replace(HELD, published=True))
    town.says(TRAINER, **town.told[TRAINER])
    decided.clear()
    town.says(TRAINER, **town.told[TRAINER])
    assert not decided


def test_nobody_is_decided_for_whose_fill_goes_on(decided: list[WorkerId]) -> None:
    town, said = reading_town()
    decided.clear()
    for done in (1, 2):
        town.says(READER, buffer=Filling(ONE, done, 3), **said)
    assert not decided


def test_nobody_is_decided_for_who_has_heard_the_end_of_its_call(decided: list[WorkerId]) -> None:
    town, said = reading_town()
    closed = said["reading"].ticket
    town.says(READER, buffer=HELD, call=said["call"], closed=closed)
    decided.clear()
    receipts = town.orders[READER].receipts
    town.says(READER, buffer=HELD, closed=closed, ended=1, finished=1, receipts=receipts)
    assert not decided


def test_what_counts_against_a_source_in_a_call_counts_no_more_when_that_is_over() -> None:
    """What one would have given ahead, across, was not what the version is: nobody reads from it during the call."""
    town, said = reading_town()
    ticket, room, newer = said["reading"].ticket, {"copies_left": 1}, Holding(Version(2), Digest("r2"), published=True)
    second = worker("second")
    town.joins(second, buffer=newer)
    wrong = Across(newer.version, to_host=True, root=Digest("other"), parts=(Part(ticket, second),))
    town.says(READER, buffer=Filling(ONE, 1, 3), across=wrong, **said, **room)
    town.says(READER, buffer=HELD, call=said["call"], closed=ticket, **room)
    receipts = town.orders[READER].receipts
    town.says(READER, buffer=HELD, closed=ticket, ended=1, finished=1, receipts=receipts, **room)
    town.says(second, buffer=newer, closing=True)
    grant = town.orders[READER].grant
    assert grant is not None, "it is the heir of what the other one leaves"
    assert (grant.version, grant.source, grant.to_host) == (2, second, True)
