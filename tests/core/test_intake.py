"""What a report changes, and what one changes that a lost or late message came before."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    CallReport,
    Empty,
    Filling,
    Grant,
    Holding,
    HostCopy,
    Reading,
    TicketFailure,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Version

from .kit import worker
from .town import Town

ONE, TWO, THREE, ROOT = Version(1), Version(2), Version(3), Digest("r")
TRAINER, READER, SPOT = worker("trainer"), worker("reader"), worker("spot")


def granted(town: Town) -> Grant:
    grant = town.orders[READER].grant
    assert grant is not None
    return grant


def begins_to_read(town: Town) -> Reading:
    """The reader is in `replicate(1)`, and reads that from whoever is the best source."""
    call = CallReport(1, "replicate", 1)
    town.says(READER, call=call)
    grant = granted(town)
    reading = Reading(grant.ticket, grant.source, ONE)
    town.says(READER, buffer=Filling(ONE), call=replace(call, resolved=ONE), reading=reading)
    return reading


# --- reads ------------------------------------------------------------------------------------------------------------


def test_a_read_that_its_session_did_not_outlive_does_not_come_back_with_its_reader() -> None:
    town = Town(lease_s=4.0, report_s=1.0)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER)
    reading, session = begins_to_read(town), town.orders[READER].session
    for second in range(1, 6):
        town.until(float(second))
        town.says(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    assert READER not in town.server.state.members
    town.loses_its_line(READER)
    town.says_hello_again(READER)
    call = CallReport(1, "replicate", 1, resolved=ONE)
    town.says(READER, buffer=Filling(ONE), call=call, reading=reading)
    assert town.orders[READER].session > session
    assert [read.ticket for read in town.server.state.reads.of(READER)] == [granted(town).ticket]
    assert granted(town).ticket > reading.ticket, "nothing granted before counts"


def test_what_came_before_its_buffer_was_free_is_no_measure_of_a_read() -> None:
    town = Town(default_retain=0, report_s=1.0, slow_s=3.0)
    town.joins(SPOT, buffer=Holding(TWO, ROOT))
    town.joins(READER, buffer=Holding(ONE, ROOT))
    call = CallReport(1, "update", 2)
    town.says(READER, buffer=Holding(ONE, ROOT), call=call)
    call, reading = replace(call, resolved=TWO), Reading(granted(town).ticket, SPOT, TWO)
    rates: list[float | None] = []
    for second in range(1, 8):
        town.until(float(second))
        town.says(SPOT, buffer=Holding(TWO, ROOT))
        if second <= 3:
            opened = replace(reading, is_opened=True)
            town.says(READER, buffer=Withdrawing(ONE, ROOT), call=call, reading=opened)
        else:
            arrived = replace(reading, arrived_bytes=4 * (second - 3))
            town.says(READER, buffer=Filling(TWO, second - 3, 100), call=call, reading=arrived)
        (read,) = town.server.state.reads.of(READER)
        rates.append(read.pace.rate)
    assert rates == [None] * 6 + [4.0], "it has been filled for 3 s only by then"


def test_a_read_whose_source_is_gone_by_its_end_is_no_measure_of_others() -> None:
    """Over what distance it came nobody knows any more: from its own host it would be many times as fast."""
    town = Town(lease_s=4.0, report_s=1.0)
    town.joins(SPOT, host="h", reliable=False, buffer=Holding(ONE, ROOT))
    town.joins(READER, host="h")
    reading = begins_to_read(town)
    call = CallReport(1, "replicate", 1, resolved=ONE)
    for second in range(1, 6):
        town.until(float(second))
        town.says(READER, buffer=Filling(ONE, second, 6), call=call, reading=reading)
    assert SPOT not in town.server.state.members
    town.says(READER, buffer=Holding(ONE, ROOT), call=call, closed=reading.ticket)
    assert town.orders[READER].answer.finished
    assert town.server.state.models[READER.model].lately == {}


def test_a_chunk_that_came_is_counted_though_reads_had_failed_before_there_was_a_buffer_for_it() -> None:
    town = Town(most_failures=2, avoid_s=0.5, report_s=1.0)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER)
    call, failures = CallReport(1, "replicate", 1), []
    town.says(READER, call=call)
    for second, buffer in enumerate((None, None, Filling(ONE, 1, 4), Filling(ONE, 1, 4)), start=1):
        ticket = granted(town).ticket
        failures.append(TicketFailure(ticket, TRAINER, "source-lost", "reset by peer"))
        more = {"buffer": buffer} if buffer is not None else {}
        said = {"call": replace(call, resolved=ONE), "closed": ticket, "failures": tuple(failures), **more}
        town.says(READER, **said)
        assert town.orders[READER].answer.error is None, f"the failure number {second}"
        town.until(float(second))
        town.says(TRAINER, buffer=Holding(ONE, ROOT, published=True))
        town.says(READER, **said)


def test_a_reader_waits_anew_only_for_a_source_that_has_got_something() -> None:
    town = Town(report_s=1.0)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(SPOT, reliable=False)
    town.joins(READER)
    call = CallReport(1, "replicate", 1)
    town.says(SPOT, call=call)
    call, reading = replace(call, resolved=ONE), Reading(town.orders[SPOT].grant.ticket, TRAINER, ONE)
    town.says(SPOT, call=call, buffer=Filling(ONE, 2, 4), reading=reading)
    assert begins_to_read(town).source == SPOT
    waited = []
    town.says(READER, call=call, buffer=Filling(ONE, 2, 4), reading=Reading(granted(town).ticket, SPOT, ONE))
    for now, done in ((0.5, 2), (0.8, 3)):
        town.until(now)
        town.says(SPOT, call=call, buffer=Filling(ONE, done, 4), reading=reading)
        (read,) = town.server.state.reads.of(READER)
        waited.append(read.pace.waited_at)
    assert waited == [0.0, 0.8]


# --- what a worker has ------------------------------------------------------------------------------------------------


def test_a_fill_of_another_version_is_of_that_though_nothing_was_heard_between_them() -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, buffer=Filling(ONE, 1, 4))
    town.says(READER, buffer=Filling(TWO, 1, 4))
    versions = town.server.status(now=0.0).models[0].versions
    assert {each.version: each.filling for each in versions} == {ONE: (), TWO: ("reader",)}


def test_that_one_version_was_drained_is_no_word_about_the_next() -> None:
    """The worker may leave what came next before the server hears that it had come."""
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True), copies_left=1)
    town.joins(READER, buffer=Holding(ONE, ROOT))
    town.says(TRAINER, buffer=Withdrawing(ONE, ROOT, published=True), copies_left=1)
    assert town.orders[TRAINER].drained == ONE
    town.says(TRAINER, buffer=Withdrawing(TWO, ROOT, published=True), copies_left=1)
    assert (town.orders[TRAINER].drained, town.orders[TRAINER].offload) == (None, TWO)


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
    assert not town.server.state.said
    town.until(4.5)
    (said,) = town.server.state.said
    assert said.startswith("version 1 of policy is lost")


@pytest.mark.parametrize("reader_has", [None, TWO])
def test_of_what_the_last_holder_takes_along_only_that_is_said_which_nothing_newer_had_replaced(
    reader_has: Version | None,
) -> None:
    town = Town(lease_s=4.0, report_s=1.0)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER)
    for version in (TWO, THREE):
        town.says(TRAINER, buffer=Holding(version, ROOT, published=True))
        if version == reader_has:
            town.says(READER, buffer=Holding(version, ROOT))
    town.until(2.0)
    town.says(READER, buffer=Holding(reader_has, ROOT) if reader_has is not None else Empty())
    town.until(4.5)
    (said,) = town.server.state.said
    assert said.startswith("version 3 of policy is lost")
    town.joins(worker("of-another-cut", shard=1), shards=2, buffer=Holding(ONE, Digest("half"), published=True))
    town.until(9.0)
    lost = [text.split(" is lost")[0] for text in town.server.state.said]
    assert lost == [f"version {number} of policy" for number in ((3,) if reader_has is None else (3, 2))]


# --- what it has ------------------------------------------------------------------------------------------------------


def test_what_a_worker_has_takes_no_room_of_what_else_it_has() -> None:
    """The table is full, and nobody else has what it shows: each of them is the oldest that can go, in its turn."""
    town = Town(most_versions=2)
    town.joins(SPOT, buffer=Holding(Version(8), ROOT))
    town.joins(worker("other"), buffer=Holding(Version(9), ROOT))
    copy = HostCopy(1, TWO, Digest("of two"), whole=True)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True), copies=(copy,))
    town.joins(READER)
    reading = begins_to_read(town)
    assert (reading.source, granted(town).root) == (TRAINER, ROOT)
