"""Which worker keeps a version, and which one need not."""

from math import inf

import pytest

from tensorhub.protocol.messages import Filling, Holding, HostCopy, Withdrawing
from tensorhub.protocol.names import Digest, Version, WorkerId
from tensorhub.server import retention
from tensorhub.server.members import FailedSource, Member

from .kit import worker
from .town import Town

ONE, TWO, ROOT = Version(1), Version(2), Digest("r")
TRAINER, OTHER, SPOT = worker("trainer"), worker("other"), worker("spot")
FIRST, SECOND = worker("a"), worker("b")
HELD = {"buffer": Holding(ONE, ROOT, published=True)}
COPY = HostCopy(1, ONE, ROOT, done=1, chunks=1, whole=True, published=True)


def told(town: Town, who: WorkerId) -> tuple[Version | None, Version | None]:
    """What it is to copy, and what it may give up, as it was last told."""
    return town.orders[who].offload, town.orders[who].drained


# --- what a publisher copies while it holds it ---


def lone(**more: object) -> Town:
    """A trainer that holds what it has published, beside a spot replica; room for one copy unless told otherwise."""
    town = Town()
    town.joins(SPOT, reliable=False)
    town.joins(TRAINER)
    town.says(TRAINER, **{**HELD, "copies_left": 1, **more})
    return town


def test_the_only_reliable_worker_copies_what_it_publishes() -> None:
    assert told(lone(), TRAINER) == (ONE, None)


@pytest.mark.parametrize("more", [{"copies_left": 0}, {"copies": (HostCopy(1, Version(0), ROOT),), "copies_left": 1}])
def test_it_copies_nothing_ahead_without_room_or_beside_another_copy(more: dict[str, object]) -> None:
    assert told(lone(**more), TRAINER) == (None, None)


def test_a_reliable_worker_that_comes_takes_the_order_back_and_one_that_goes_brings_it() -> None:
    town = lone()
    town.joins(OTHER)
    assert told(town, TRAINER) == (None, None)
    town.says(OTHER, left=True)
    assert told(town, TRAINER) == (ONE, None)


def test_a_publisher_keeps_no_copy_of_an_older_version_though_only_spot_workers_have_that() -> None:
    """That version is established: what counts is outside its publisher."""
    town = lone(copies=(COPY,))
    town.says(SPOT, buffer=Holding(ONE, ROOT), copies_left=1)
    town.says(TRAINER, buffer=Holding(TWO, ROOT, published=True), copies=(COPY,), copies_left=0)
    assert town.server.state.models[TRAINER.model].retained() == {ONE: None, TWO: None}
    assert town.orders[TRAINER].release == (1,)


# --- which of several keeps what they leave together ---


def together(**of_first: object) -> Town:
    """Two spot replicas have version 1, which is established, and leave it for version 2, which the trainer has."""
    town = Town()
    town.joins(TRAINER, **HELD)
    for who in (FIRST, SECOND):
        town.joins(who, reliable=False, buffer=Holding(ONE, ROOT), copies_left=1)
    town.says(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    town.says(SECOND, buffer=Withdrawing(ONE, ROOT), copies_left=1)
    town.says(FIRST, **{"buffer": Withdrawing(ONE, ROOT), "copies_left": 1, **of_first})
    return town


def test_the_first_by_name_copies_it_and_the_other_goes_at_once() -> None:
    town = together()
    assert (told(town, FIRST), told(town, SECOND)) == ((ONE, None), (None, ONE))


def test_the_first_by_name_copies_it_though_the_other_holds_it_yet() -> None:
    """The other one may leave it in a moment, and needs no memory for a copy."""
    town = together(buffer=Holding(ONE, ROOT))
    assert told(town, SECOND) == (None, ONE)
    assert told(town, FIRST) == (None, None)
    town.says(SECOND, buffer=Holding(ONE, ROOT), copies_left=1)
    town.says(FIRST, buffer=Withdrawing(ONE, ROOT), copies_left=1)
    assert told(town, FIRST) == (ONE, None)


def test_one_with_room_comes_before_one_without() -> None:
    town = Town()
    town.joins(TRAINER, **HELD)
    for who in (FIRST, SECOND):
        town.joins(who, reliable=False, buffer=Holding(ONE, ROOT), copies_left=int(who == SECOND))
    town.says(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    for who in (FIRST, SECOND):
        town.says(who, buffer=Withdrawing(ONE, ROOT), copies_left=int(who == SECOND))
    assert (told(town, FIRST), told(town, SECOND)) == ((None, ONE), (ONE, None))


def test_the_copy_goes_when_the_newer_version_is_outside_its_publisher() -> None:
    town, copy = together(), (HostCopy(1, ONE, ROOT, whole=True),)
    town.says(FIRST, buffer=Filling(TWO), copies=copy)
    assert town.orders[FIRST].release == ()
    town.says(SECOND, buffer=Holding(TWO, ROOT))
    assert town.orders[FIRST].release == (1,)


def test_a_spot_worker_goes_at_once_where_a_reliable_one_leaves_the_same() -> None:
    town = Town()
    for who in (TRAINER, SPOT):
        town.joins(who, reliable=who != SPOT, buffer=Holding(ONE, ROOT, published=True), copies_left=1)
    for who in (TRAINER, SPOT):
        town.says(who, buffer=Withdrawing(ONE, ROOT, published=True), copies_left=1)
    assert (told(town, TRAINER), told(town, SPOT)) == ((ONE, None), (None, ONE))


def test_what_is_established_is_kept_outside_its_publisher_though_that_holds_it() -> None:
    """The publisher may publish the next version in a moment, and die with both."""
    town, last = Town(), worker("z")
    town.joins(TRAINER, **HELD, copies_left=1)
    town.joins(last, buffer=Holding(ONE, ROOT), copies_left=1)
    town.says(last, buffer=Withdrawing(ONE, ROOT), copies_left=1)
    assert told(town, last) == (ONE, None)


@pytest.mark.parametrize("is_there", [False, True])
def test_without_room_a_shard_goes_when_the_rest_of_its_version_is_gone(is_there: bool) -> None:
    town, shards = Town(), [worker("trainer", shard) for shard in range(2)]
    for shard in shards:
        town.joins(shard, shards=2, **HELD)
    for shard in shards:
        town.says(shard, **HELD)
    if not is_there:
        town.says(shards[1], left=True)
    town.says(shards[0], buffer=Withdrawing(ONE, ROOT, published=True))
    assert told(town, shards[0]) == ((ONE, None) if is_there else (None, ONE))


# --- which version is established ---


@pytest.mark.parametrize("is_dropping", [False, True])
def test_a_host_copy_that_is_about_to_go_makes_no_version_established(is_dropping: bool) -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    copy = HostCopy(1, TWO, ROOT, whole=True, dropping=is_dropping)
    town.joins(OTHER, buffer=Holding(ONE, ROOT), copies=(copy,))
    assert town.server.state.models[TRAINER.model].newest_established == (ONE if is_dropping else TWO)


def test_a_version_that_its_holder_wants_to_leave_is_not_established() -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    town.joins(OTHER, buffer=Holding(ONE, ROOT))
    town.joins(SPOT, reliable=False, buffer=Withdrawing(TWO, ROOT))
    assert town.server.state.models[TRAINER.model].newest_established == ONE


def test_version_0_is_kept_as_any_other() -> None:
    """A number that is false is a number: its last reliable holder copies it before it leaves it."""
    town = Town()
    town.joins(SPOT, reliable=False)
    town.joins(TRAINER)
    town.says(TRAINER, buffer=Withdrawing(Version(0), ROOT, published=True), copies_left=1)
    assert told(town, TRAINER) == (0, None)


def test_what_is_fetched_ahead_gives_way_to_the_established_version() -> None:
    town = Town()
    town.joins(TRAINER, **HELD)
    town.joins(OTHER, buffer=Holding(ONE, ROOT), copies=(HostCopy(1, TWO, ROOT, done=1, chunks=4),))
    town.says(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    town.says(OTHER, buffer=Withdrawing(ONE, ROOT), copies=(HostCopy(1, TWO, ROOT, done=1, chunks=4),))
    assert told(town, OTHER) == (ONE, None)
    assert town.orders[OTHER].release == (1,)


# --- which worker takes over what a closing one has ---


def test_a_publisher_takes_over_no_version_that_counts_only_outside_it() -> None:
    """It would drop the copy at once, and be asked to fetch it again for as long as the other one waits."""
    town = Town()
    town.joins(TRAINER, **HELD)
    town.joins(FIRST, buffer=Holding(ONE, ROOT))
    town.says(TRAINER, buffer=Holding(TWO, ROOT, published=True), copies_left=1)
    town.says(FIRST, buffer=Withdrawing(ONE, ROOT), closing=True)
    assert town.orders[TRAINER].fetch is None
    assert told(town, FIRST) == (None, ONE)


def test_a_whole_copy_counts_though_another_one_of_its_version_is_not_whole() -> None:
    """Otherwise the server forgets the content of the version, and the worker counts as its holder."""
    town = Town()
    town.joins(FIRST, copies=(COPY, HostCopy(2, ONE, ROOT)))
    assert list(town.server.state.members.get(FIRST).content.places.values()) == [True]


def test_an_older_version_is_kept_when_the_last_worker_with_the_established_one_may_give_it_up() -> None:
    """The one without room goes on to version 3. Version 1 is the only one outside its publisher from then on."""
    town = Town()
    town.joins(TRAINER, **HELD)
    for who in (FIRST, SECOND):
        town.joins(who, reliable=False, buffer=Holding(ONE, ROOT), copies_left=1)
    town.says(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    town.says(FIRST, buffer=Holding(TWO, ROOT), copies_left=0)
    town.says(TRAINER, buffer=Holding(Version(3), ROOT, published=True))
    town.says(FIRST, buffer=Withdrawing(TWO, ROOT), copies_left=0)
    assert told(town, FIRST) == (None, TWO)
    town.says(SECOND, buffer=Withdrawing(ONE, ROOT), copies_left=1)
    assert told(town, SECOND) == (ONE, None)


def test_a_closing_worker_does_not_wait_for_one_that_cannot_read_it() -> None:
    """What it has is spoiled, or does not fit the tensors of the other one."""
    town = Town()
    town.joins(TRAINER, **HELD)
    town.joins(OTHER, copies_left=1)
    town.server.state.members.get(OTHER).tries.sources[TRAINER] = FailedSource(inf)
    town.says(TRAINER, buffer=Withdrawing(ONE, ROOT, published=True), closing=True)
    assert (told(town, TRAINER), town.orders[OTHER].fetch) == ((None, ONE), None)


def test_whoever_leaves_a_version_that_is_not_kept_is_told_so_without_a_look_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands leave it in the same second. A look at all of them for each report took a server 17 s, and not 7."""
    town, many = Town(), [worker(f"r{index:03d}") for index in range(100)]
    town.joins(TRAINER, **HELD)
    for who in many:
        town.joins(who, buffer=Holding(ONE, ROOT))
    town.says(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    town.says(many[0], buffer=Holding(TWO, ROOT))
    for who in many[1:-1]:  # the last one holds it yet
        town.says(who, buffer=Withdrawing(ONE, ROOT))
    rank, looks = retention._rank, 0

    def counted(member: Member, version: Version) -> tuple[bool, bool, WorkerId]:
        nonlocal looks
        looks += 1
        return rank(member, version)

    monkeypatch.setattr(retention, "_rank", counted)
    for who in many[1:-1]:
        town.says(who, buffer=Withdrawing(ONE, ROOT, impatient=True))
        assert told(town, who) == (None, ONE)
    assert looks < 2 * len(many)
