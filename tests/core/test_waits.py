"""What the status says of time: when a worker was last heard, a version's age, why each call waits and since when."""

from typing import Any

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    CallReport,
    Empty,
    Filling,
    Holding,
    HostCopy,
    Poisoned,
    Reading,
    Source,
    TicketFailure,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Ticket, Version, WorkerId
from tensorhub.protocol.status import ReplicaView, Status, Transfer

from .kit import called, worker
from .town import Town

TRAINER, READER, OTHER = worker("trainer"), worker("reader"), worker("other")
SEVEN, ROOT = Version(7), Digest("r")
HELD = Holding(SEVEN, ROOT, published=True)
UPDATE = called(1, resolved=SEVEN)


def seen(town: Town) -> Status:
    return town.server.status(now=town.now)


def replica(town: Town, who: WorkerId) -> ReplicaView:
    return next(each for each in seen(town).models[0].replicas if each.name == who.replica)


def read_of(town: Town, who: WorkerId) -> Transfer:
    return next(each for each in seen(town).transfers if each.target == who.replica and not each.is_void)


def reading(town: Town, who: WorkerId, **more: Any) -> dict[str, Any]:
    """A report of the read that it was granted."""
    grant = town.orders[who].grant
    assert grant is not None
    return {"call": UPDATE, "reading": Reading(grant.ticket, (Source(grant.source.worker),), SEVEN, **more)}


def passes(town: Town, seconds: float, **said: dict[str, Any]) -> None:
    """Time passes, in which these workers report so; all others are silent."""
    until = town.now + seconds
    while town.now < until:
        town.until(town.now + 0.5)
        for name, more in said.items():
            town.says(worker(name), **more)


@pytest.fixture
def town() -> Town:
    """A trainer holds version 7. A reader updates to it."""
    town = Town(default_retain=0)
    town.joins(TRAINER, buffer=HELD)
    town.joins(READER, call=called(1))
    assert town.orders[READER].grant is not None
    return town


def why(town: Town) -> str:
    """Why the reader's call waits: the same of the replica and of its worker."""
    found = replica(town, READER)
    assert found.call is not None
    assert found.call.waiting_for == found.workers[0].waiting_for
    assert found.call.since_s == found.workers[0].waits_s == town.now
    return found.call.waiting_for


def test_a_worker_that_stands_still_was_not_heard_for_so_long(town: Town) -> None:
    """As one that was stopped by SIGSTOP: its connection is open, and it holds what it held."""
    passes(town, 4.0, reader=reading(town, READER))
    (trainer,) = replica(town, TRAINER).workers
    assert (trainer.state, trainer.connected, trainer.is_silent, trainer.heard_s) == ("holding", True, True, 4.0)
    (reader,) = replica(town, READER).workers
    assert (reader.is_silent, reader.heard_s) == (False, 0.0)


def test_a_version_is_as_old_as_its_publish(town: Town) -> None:
    assert seen(town).models[0].versions[0].age_s is None, "it was there before this server was"
    publish = CallReport(1, "publish", 8, ROOT)
    town.says(TRAINER, call=publish)
    answer = town.orders[TRAINER].answer
    assert answer is not None
    held = Holding(Version(8), ROOT, published=True, epoch=answer.epoch, is_pending=True)
    town.says(TRAINER, call=publish, buffer=held)
    passes(town, 3.0, trainer={"buffer": replace(held, is_pending=False), "ended": 1, "finished": 1})
    newest = seen(town).models[0].versions[0]
    assert (newest.version, newest.age_s) == (8, 3.0)


def test_a_read_says_since_when_nothing_came_and_why(town: Town) -> None:
    told = reading(town, READER, arrived_bytes=1 << 20)
    filling = told | {"buffer": Filling(SEVEN, 1, 4)}
    passes(town, 1.0, reader=filling, trainer={"buffer": HELD})
    read = read_of(town, READER)
    assert (read.since_s, read.still_s, read.waiting_for) == (1.0, 0.5, "")
    passes(town, 2.0, reader=filling, trainer={"buffer": HELD})
    assert (read_of(town, READER).still_s, why(town)) == (2.5, "trainer sends nothing")
    passes(town, 3.0, reader=filling)
    assert read_of(town, READER).still_s == 5.5
    assert read_of(town, READER).waiting_for == why(town) == "trainer was not heard for 3.0 s"


def test_a_read_that_has_not_begun_says_what_is_before_it(town: Town) -> None:
    passes(town, 2.0, reader={"call": UPDATE}, trainer={"buffer": HELD})
    assert why(town) == "it has yet to begin to read from trainer"
    passes(town, 1.0, reader=reading(town, READER, is_opened=True), trainer={"buffer": HELD})
    assert why(town) == "its tensors still have another version"
    earlier = Reading(Ticket(1), (Source(worker("other")),), Version(6))
    passes(town, 0.5, reader={"call": UPDATE, "reading": earlier}, trainer={"buffer": HELD})
    assert why(town) == "its read from other has yet to stop"


def test_a_reader_behind_another_one_says_that_it_waits_for_that_one(town: Town) -> None:
    first = reading(town, READER, arrived_bytes=1) | {"buffer": Filling(SEVEN, 0, 4)}
    town.says(READER, **first)
    town.joins(OTHER, call=called(1))
    assert read_of(town, OTHER).source == READER.replica
    second = reading(town, OTHER) | {"buffer": Filling(SEVEN, 0, 4)}
    passes(town, 2.5, reader=first, other=second, trainer={"buffer": HELD})
    assert read_of(town, OTHER).waiting_for == "reader has no more of it yet"


def test_a_worker_of_another_site_waits_for_the_one_that_reads_from_afar() -> None:
    town = Town(default_retain=0)
    town.joins(TRAINER, buffer=HELD, site="a")
    town.joins(OTHER, call=called(1), site="b", may_be_elected=True)
    town.joins(READER, call=called(1), site="b", may_be_elected=True)
    passes(town, 2.5, reader={"call": UPDATE}, trainer={"buffer": HELD}, other={"call": UPDATE})
    said = {each.name: each.call.waiting_for for each in seen(town).models[0].replicas if each.call is not None}
    assert said["other"] == "it has yet to begin to read from trainer"
    assert said["reader"] == "it has yet to begin to read from other"


def test_a_worker_without_a_source_says_which_one_has_failed_it(town: Town) -> None:
    failed = TicketFailure(read_of(town, READER).ticket, TRAINER, "source-lost", "reset by peer")
    town.says(READER, call=UPDATE, failures=(failed,), closed=failed.ticket)
    assert why(town) == "it has no source of version 7: its read from policy/trainer[0] failed lately"


def test_a_worker_that_fills_itself_says_so(town: Town) -> None:
    copy = HostCopy(1, SEVEN, ROOT, whole=True)
    town.says(READER, call=UPDATE, copies=(copy,))
    assert why(town) == "it copies version 7 from its own host memory"


def test_a_worker_that_closes_says_what_it_waits_for_and_since_when() -> None:
    town = Town()
    town.joins(OTHER)
    town.joins(TRAINER, buffer=HELD, copies_left=1)
    town.joins(READER, copies_left=1)
    leaving = {"buffer": Withdrawing(SEVEN, ROOT, published=True), "closing": True}
    passes(town, 3.0, trainer=leaving, reader={"copies_left": 1})
    (view,) = replica(town, TRAINER).workers
    assert (view.waiting_for, view.waits_s) == ("version 7 is read by policy/reader[0]", 2.5)


@pytest.mark.parametrize(
    ("verb", "buffer", "says"),
    [
        ("publish", Empty(), "it has yet to report that its publish is done"),
        ("unpublish", HELD, "it has yet to report that its unpublish is done"),
        ("unpublish", Poisoned(SEVEN), "it has yet to report that its unpublish is done"),
    ],
)
def test_a_shard_that_does_not_report_the_end_of_a_call_is_named(verb: str, buffer: Any, says: str) -> None:
    town = Town(default_retain=0)
    town.joins(TRAINER, buffer=buffer)
    call = CallReport(1, verb, 8 if verb == "publish" else "", ROOT if verb == "publish" else Digest(""))
    passes(town, 2.0, trainer={"call": call, "buffer": buffer})
    found = replica(town, TRAINER)
    assert found.call is not None
    assert (found.call.state, found.call.waiting_for) == ("running", says)


def test_a_replica_of_many_shards_explains_the_first_ones() -> None:
    town = Town(default_retain=0)
    shards = 70
    for shard in range(shards):
        town.joins(worker("trainer", shard), shards=shards, buffer=HELD, call=CallReport(1, "unpublish", ""))
    found = replica(town, TRAINER)
    assert [bool(each.waiting_for) for each in found.workers] == [True] * 64 + [False] * 6
