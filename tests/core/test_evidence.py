"""What a version is where two publishes of it differ: which of them the server believes, and who hears of that.

The server saw neither of them. It knows what workers say, and what they can show.
"""

import pytest

from tensorhub.protocol.messages import CallReport, Empty, Holding, HostCopy, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version, WorkerId

from .kit import worker
from .town import Town

ONE, FIRST, SECOND, RIGHT, OTHER = Version(1), *(Digest(root) for root in ("first", "second", "right", "other"))
TRAINER, RIVAL, READER = ([worker(name, shard) for shard in range(2)] for name in ("trainer", "rival", "reader"))


def published(root: Digest) -> Holding:
    return Holding(ONE, root, published=True)


def joins(town: Town, who: WorkerId, **more: object) -> None:
    town.joins(who, shards=2, **more)


def is_believed(town: Town, who: WorkerId) -> bool:
    """What it has counts as the version, and it was not told otherwise."""
    return town.server.state.known(who).holds(ONE) and not town.orders[who].conflict


@pytest.fixture
def town() -> Town:
    return Town()


def test_a_publish_that_may_not_have_ended_is_no_measure_beside_one_that_has(town: Town) -> None:
    """One shard of the trainer shows that its publish has ended. All of the rival say that they have published it."""
    joins(town, TRAINER[0], buffer=published(FIRST), receipts=town.receipts(TRAINER[0], ONE, FIRST, "trainer"))
    joins(town, RIVAL[0], buffer=published(FIRST))
    joins(town, RIVAL[1], buffer=published(OTHER))
    assert town.orders[RIVAL[1]].conflict == OTHER
    joins(town, TRAINER[1], buffer=published(RIGHT))
    assert is_believed(town, TRAINER[1])


def test_what_a_whole_publish_says_beside_a_proof_is_the_measure_of_its_other_shard(town: Town) -> None:
    """Its first shard had another content at first. It has what is proved now, and its second shard goes.

    Whoever comes with something else for that is refused: the version would be of two publishes.
    """
    joins(town, TRAINER[0], buffer=published(FIRST))
    joins(town, TRAINER[1], buffer=published(RIGHT))
    joins(town, READER[0], buffer=Holding(ONE, SECOND), receipts=town.receipts(READER[0], ONE, SECOND))
    assert town.orders[TRAINER[0]].conflict == FIRST
    town.says(TRAINER[0], buffer=published(SECOND))
    town.says(TRAINER[1], buffer=Withdrawing(ONE, RIGHT, published=True))
    town.says(TRAINER[1], buffer=Empty())
    joins(town, READER[1], buffer=Holding(ONE, OTHER))
    assert town.orders[READER[1]].conflict == OTHER
    assert is_believed(town, READER[0])


def test_who_has_something_else_is_told_when_a_publish_turns_out_to_have_ended(town: Town) -> None:
    """One shard of the trainer heard that from a server before this one, and is empty since. The other hears it now."""
    joins(town, READER[1], buffer=Holding(ONE, OTHER))
    joins(town, TRAINER[0], ended=1, finished=1)
    assert is_believed(town, READER[1])
    call = CallReport(Number(1), "publish", ONE, RIGHT, resolved=ONE)
    joins(town, TRAINER[1], buffer=published(RIGHT), call=call, seen=Number(1))
    assert is_believed(town, TRAINER[1])
    assert town.orders[READER[1]].conflict == OTHER


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_shard_stands_by_what_it_published_with_a_copy_that_is_not_about_to_go(town: Town, is_leaving: bool) -> None:
    """If it does, all shards of the trainer do, and that is the version, whatever was heard before."""
    copy = HostCopy(1, ONE, RIGHT, whole=True, published=True, leaving=is_leaving)
    joins(town, READER[1], buffer=Holding(ONE, OTHER))
    joins(town, TRAINER[0], buffer=published(FIRST))
    joins(town, TRAINER[1], copies=(copy,))
    assert is_believed(town, READER[1]) is is_leaving
