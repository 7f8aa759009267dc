"""What a publisher copies to host memory, and which version is safe enough to be the only one left."""

import pytest

from tensorhub.protocol.messages import CallReport, Filling, Holding, HostCopy, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version, WorkerId
from tensorhub.server import retention

from .kit import LEASE_S, worker
from .town import Town

# --- what a publisher is told to copy while its version rests, of which the transcripts show one case each ---

ONE, TWO, ROOT = Version(1), Version(2), Digest("r")
TRAINER, HEIR, KEEPER, SPOT = worker("trainer"), worker("heir"), worker("keeper"), worker("spot")
HELD = {"buffer": Holding(ONE, ROOT, published=True)}
COPY = HostCopy(1, ONE, ROOT, done=1, chunks=1, whole=True, published=True)


def ordered(town: Town) -> Version | None:
    """What the trainer is to copy, as it was last told."""
    return town.orders[TRAINER].offload


def lone(*, reliable: bool = True, **more: object) -> Town:
    """A trainer that holds what it has published, beside a spot replica; room for one copy unless told otherwise."""
    town = Town()
    town.joins(SPOT, reliable=False)
    town.joins(TRAINER, reliable=reliable)
    town.says(TRAINER, **{**HELD, "copies_left": 1, **more})
    return town


def kept(town: Town) -> bool:
    """Its copy will spare it an offload."""
    model = town.server.state.models[TRAINER.model]
    return retention.is_resting_used(town.server.state, model, town.server.state.known(TRAINER), ONE)


def test_the_only_reliable_holder_is_told_to_copy() -> None:
    assert ordered(lone()) == ONE


def test_where_there_is_no_room_nothing_is_ordered() -> None:
    assert ordered(lone(copies_left=0)) is None


def test_a_reliable_worker_that_comes_takes_the_order_back_and_one_that_goes_brings_it() -> None:
    town = lone()
    town.joins(HEIR)
    assert ordered(town) is None
    town.says(HEIR, left=True)
    assert ordered(town) == ONE


def test_beside_reliable_workers_a_version_rests_for_a_while_first() -> None:
    town = lone(copies_left=2)
    town.joins(HEIR)
    town.says(TRAINER, **HELD, copies_left=2)
    assert ordered(town) is None
    town.until(retention.REST_S - 0.01)
    assert ordered(town) is None
    town.until(retention.REST_S)
    assert ordered(town) == ONE, "nobody reported anything: the server looks by itself"


def test_the_copy_stays_until_another_reliable_worker_has_the_version() -> None:
    town = lone(copies=(COPY,))
    town.joins(HEIR)
    assert kept(town)
    town.says(HEIR, buffer=Holding(ONE, ROOT))
    assert not kept(town)
    assert town.orders[TRAINER].release == (1,)


# --- which version is safe enough to be the only one left ---


@pytest.mark.parametrize("is_dropping", [False, True])
def test_a_host_copy_that_is_about_to_go_makes_no_version_safe(is_dropping: bool) -> None:
    """It was told to go for the sake of the version before, which is given up only when the new one is safe."""
    town = Town()
    town.joins(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    copy = HostCopy(1, TWO, ROOT, whole=True, dropping=is_dropping)
    town.joins(KEEPER, buffer=Holding(ONE, ROOT), copies=(copy,))
    town.joins(SPOT, reliable=False, buffer=Holding(TWO, ROOT))
    town.says(SPOT, buffer=Holding(TWO, ROOT), ended=1)
    assert town.server.state.models[TRAINER.model].newest_established == (ONE if is_dropping else TWO)


@pytest.mark.parametrize("is_newest", [False, True])
def test_it_is_with_one_who_is_relied_on_and_waits_for_room(is_newest: bool) -> None:
    """Nobody waits for room to keep what is not among the newest."""
    town, other = Town(), worker("other")
    town.joins(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    town.joins(KEEPER, buffer=Holding(ONE, ROOT))
    if not is_newest:
        town.says(TRAINER, buffer=Holding(Version(3), ROOT, published=True))
    town.joins(other, buffer=Withdrawing(TWO, ROOT))
    assert town.server.state.models[TRAINER.model].newest_established == (TWO if is_newest else ONE)


def test_a_spot_publisher_leaves_a_version_at_once_where_a_reliable_one_has_published_the_same() -> None:
    """Nobody else has it any more, and both leave it: the reliable one makes the copy."""
    town = Town()
    for who in (TRAINER, SPOT):
        town.joins(who, reliable=who != SPOT, buffer=Holding(ONE, ROOT, published=True), copies_left=1)
    town.joins(KEEPER, buffer=Holding(ONE, ROOT))
    town.says(KEEPER)
    assert town.server.state.models[TRAINER.model].newest_established == ONE
    for who in (TRAINER, SPOT):
        town.says(who, buffer=Withdrawing(ONE, ROOT, published=True), copies_left=1)
    assert (town.orders[TRAINER].offload, town.orders[TRAINER].drained) == (ONE, None)
    assert (town.orders[SPOT].offload, town.orders[SPOT].drained) == (None, ONE)


class CutOff:
    """Of a steady replica of two shards the first has version 1, and the second has 1 in host memory, and 2.

    A spot replica has 2 as well. Its first shard wants to leave it, and has no room for a copy; or it has it in host
    memory, and closes.
    """

    def __init__(self, *, closes: bool = False, copies_left: int = 0) -> None:
        self.town = Town()
        self.trainer, self.steady, self.spot = (
            [worker(name, shard) for shard in range(2)] for name in ("trainer", "steady", "spot")
        )
        self.joins(self.trainer, buffer=Holding(ONE, ROOT, published=True))
        self.joins(self.steady, buffer=Holding(ONE, ROOT))
        for shard in self.trainer:
            self.town.says(shard, buffer=Holding(TWO, ROOT, published=True))
        self.joins(self.spot, reliable=False, buffer=Holding(TWO, ROOT))
        call, copies = CallReport(Number(1), "update", "latest"), (HostCopy(1, ONE, ROOT, whole=True),)
        self.town.says(self.steady[0], buffer=Holding(ONE, ROOT), call=call)
        for buffer in (Withdrawing(ONE, ROOT), Filling(TWO), Holding(TWO, ROOT)):
            self.town.says(self.steady[1], buffer=buffer, copies=copies, call=call)
        if closes:
            for shard in self.trainer:
                self.town.says(shard)
            self.town.says(self.spot[0], copies=(HostCopy(1, TWO, ROOT, whole=True),), closing=True)
        else:
            unpublish = CallReport(Number(1), "unpublish", "")
            self.town.says(self.spot[0], buffer=Withdrawing(TWO, ROOT), call=unpublish, copies_left=copies_left)
        assert self.newest_established() == ONE
        assert not self.is_let_go(), "the first steady shard was promised version 2"

    def joins(self, replica: list[WorkerId], *, reliable: bool = True, **more: object) -> None:
        for shard in replica:
            self.town.joins(shard, shards=2, reliable=reliable, **more)

    def is_let_go(self) -> bool:
        orders = self.town.orders[self.spot[0]]
        return orders.drained == TWO or orders.release == (1,)

    def cuts_off(self, *silent: WorkerId) -> None:
        """They lose their sessions; all others are heard in time."""
        for now in (LEASE_S / 2, LEASE_S * 1.01):
            self.town.until(now)
            for who in (*self.trainer, *self.steady, *self.spot):
                if who not in silent:
                    self.town.says(who, **self.town.told[who])
        for who in silent:
            self.town.loses_its_line(who)

    def newest_established(self) -> Version | None:
        return self.town.server.state.models[self.trainer[0].model].newest_established


@pytest.mark.parametrize("closes", [False, True])
def test_what_its_last_holder_may_leave_at_once_is_not_established(closes: bool) -> None:
    """Those who count beside it are cut off, and it is let go in the same breath: the version before stays."""
    bench = CutOff(closes=closes)
    first, second = bench.steady
    bench.cuts_off(first)
    assert bench.is_let_go()
    assert bench.town.orders[second].release == ()
    bench.joins([first], buffer=Holding(ONE, ROOT))
    assert bench.newest_established() == ONE
