"""What a report changes, and what one changes that a lost or late message came before."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    CallReport,
    Empty,
    Filling,
    Grant,
    Holding,
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


# --- reads ------------------------------------------------------------------------------------------------------------


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
