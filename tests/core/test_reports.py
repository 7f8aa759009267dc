"""What the server learns from a report, and which reports change nothing."""

from typing import Any

import pytest
from msgspec.structs import replace

from tensorhub.protocol.events import Lost
from tensorhub.protocol.messages import (
    CallReport,
    Failure,
    Filling,
    Holding,
    HostCopy,
    Reading,
    Report,
    Source,
    Step,
    TicketFailure,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version, WorkerId
from tensorhub.server import Server, sessions
from tensorhub.server.members import Member

from .kit import worker
from .town import Town

# --- what a report changes, and what one changes that a lost or late message came before ---

ONE, TWO, THREE, ROOT = Version(1), Version(2), Version(3), Digest("r")
TRAINER, READER, SPOT = worker("trainer"), worker("reader"), worker("spot")


# --- what a worker has ------------------------------------------------------------------------------------------------


def test_a_fill_of_another_version_is_of_that_though_nothing_was_heard_between_them() -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, buffer=Filling(ONE, 1, 4))
    town.says(READER, buffer=Filling(TWO, 1, 4))
    versions = town.server.status(now=0.0).models[0].versions
    assert {each.version: each.filling for each in versions} == {ONE: (), TWO: ("reader",)}


def test_what_came_from_other_sites_is_counted_once_and_to_the_byte() -> None:
    town = Town()
    town.joins(TRAINER, site="a", buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, site="b")
    for received in (100, 100, 150):
        town.says(READER, cross_site_bytes={1: received})
    (version,) = town.server.status(now=town.now).models[0].versions
    assert version.cross_site_bytes == {"b": 150}


@pytest.mark.parametrize("site", ["a", "b"])
def test_a_loss_is_said_when_it_happens_though_nobody_waits_for_anything(site: str) -> None:
    town = Town(lease_s=4.0, report_s=1.0)
    town.joins(TRAINER, site="a", buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, site=site)
    for second in (1.0, 2.0, 3.0):
        town.until(second)
        town.says(READER)
    assert not town.events(Lost)
    town.until(4.5)
    (told,) = town.events(Lost)
    assert told.text.startswith("version 1 of policy is lost")


# --- what is news -----------------------------------------------------------------------------------------------------

WITH_EVERY_REPORT = ("number", "seen", "closed", "received_bytes", "read")
CHANGES: dict[str, Any] = {
    "session": Number(2),
    "buffer": Filling(ONE),
    "layout": Digest("other"),
    "size_bytes": 1,
    "call": CallReport(1, "replicate", 1),
    "ended": 1,
    "finished": 1,
    "step": Step(ONE),
    "reading": Reading(Ticket(1), (Source(TRAINER),), ONE),
    "newest": ONE,
    "failures": (TicketFailure(Ticket(1), TRAINER, "source-lost", "reset"),),
    "cross_site_bytes": {1: 100},
    "copies": (HostCopy(1, ONE, ROOT),),
    "copies_left": 1,
    "copy_error": Failure("internal", "no memory"),
    "pins": (ONE,),
    "prefetch": "latest",
    "newest_epoch": Number(3),
    "writes": Number(5),
    "closing": True,
    "left": True,
    "stops": True,
    "can_box": True,
    "missed": Failure("layout-mismatch", "no shard has it"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_a_worker_says_anew_is_more_than_that_it_lives(field: str) -> None:
    said = replace(Report(2), **{field: CHANGES[field]})
    assert not sessions.is_same(said, Report(1))
    if field != "left":  # which is said once
        assert sessions.is_same(replace(said, number=3), said)


def test_every_field_of_a_report_is_one_or_the_other() -> None:
    assert sorted([*WITH_EVERY_REPORT, *CHANGES]) == sorted(Report.__struct_fields__)


@pytest.mark.parametrize("field", [field for field in CHANGES if field not in ("buffer", "reading")])
def test_whatever_is_said_beside_it_is_more_than_that_a_fill_goes_on(field: str) -> None:
    before = Report(1, buffer=Filling(ONE, 3, 9))
    goes_on = Report(2, buffer=Filling(ONE, 4, 9))
    assert sessions.is_progress(goes_on, before)
    assert not sessions.is_progress(replace(goes_on, **{field: CHANGES[field]}), before)


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
    said = {"call": replace(call, resolved=ONE), "reading": Reading(grant.ticket, (Source(TRAINER),), ONE)}
    town.says(READER, buffer=Filling(ONE, 0, 3), **said)
    return town, said


def test_nobody_is_decided_for_who_tells_nothing_new(decided: list[WorkerId]) -> None:
    town, said = reading_town()
    town.says(TRAINER, **town.told[TRAINER])
    decided.clear()
    town.says(TRAINER, **town.told[TRAINER])
    assert not decided, "it lives and does nothing"
    for done in (1, 2):
        town.says(READER, buffer=Filling(ONE, done, 3), **said)
    assert not decided, "its fill goes on"
    closed = said["reading"].ticket
    town.says(READER, buffer=HELD, call=said["call"], closed=closed)
    decided.clear()
    town.says(READER, buffer=HELD, closed=closed, ended=1, finished=1)
    assert not decided, "it has heard the end of its call"
