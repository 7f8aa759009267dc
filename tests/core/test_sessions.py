"""What is left when a session ends, and what may begin one."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.manifest import Layout
from tensorhub.protocol.messages import CallReport, Holding, LayoutInfo, Refusal, Withdrawing
from tensorhub.protocol.names import Digest, Version

from .kit import LAYOUT, report, worker
from .town import Town

ONE, ROOT = Version(1), Digest("r")
TRAINER, READER, OTHER, THIRD = (worker(name) for name in ("trainer", "a", "b", "c"))


def test_what_is_late_on_a_former_line_begins_no_session() -> None:
    """Its worker has made another line since, and left by that."""
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER)
    late = report(2, buffer=Holding(ONE, ROOT), session=town.orders[READER].session, layout=LAYOUT.digest())
    assert not town.server.handle(town.hellos[READER], sender="another line", now=town.now)
    left = report(3, session=town.orders[READER].session, layout=LAYOUT.digest(), leaving=True)
    town.server.handle(left, sender="another line", now=town.now)
    assert READER not in town.server.state.members
    ((_, refusal),) = town.server.handle(late, sender=str(READER), now=town.now)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_s > 0
    assert READER not in town.server.state.members


def test_layouts_of_nobody_are_forgotten_and_those_in_use_are_not() -> None:
    town = Town(most_versions=8)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    for number in range(100):
        other = LayoutInfo.of(Layout((), number + 1))
        town.server.handle(other, sender=str(TRAINER), now=town.now)
    layouts = town.server.state.layouts
    assert LAYOUT.digest() in layouts
    assert len(layouts) <= 2 * 8


@pytest.mark.parametrize("is_reliable", [False, True])
def test_whoever_says_otherwise_on_its_next_line_counts_otherwise(is_reliable: bool) -> None:
    """An honest worker says the same of itself while it lives; this one was started anew with other words."""
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, reliable=is_reliable)
    town.hellos[READER] = replace(town.hellos[READER], reliable=not is_reliable)
    town.says_hello_again(READER)
    town.says(READER, layout=Digest(""))
    counting = town.server.state.models[TRAINER.model].reliable
    assert [who for those in counting.values() for who in those if who == READER] == [READER] * (not is_reliable)


def test_what_a_former_job_wanted_kept_is_over_with_it() -> None:
    """Else whoever once asked for many would fill the memory of all who come after it."""
    town = Town(lease_s=4.0)
    town.joins(OTHER, retain=6)
    town.joins(READER, retain=2)
    model = town.server.state.models[TRAINER.model]
    town.says(OTHER, leaving=True)
    assert model.retain == 6  # it is kept whoever leaves
    town.says(READER, leaving=True)
    town.joins(TRAINER)
    assert model.retain == 1


@pytest.mark.parametrize(("wish", "is_reliable", "retain"), [(256, True, 3), (2**62, True, 3), (3, False, 1)])
def test_a_wish_counts_as_far_as_the_server_allows_and_not_of_a_spot_worker(
    wish: int, is_reliable: bool, retain: int
) -> None:
    town = Town(most_retain=3)
    town.joins(TRAINER)
    town.joins(OTHER, retain=wish, reliable=is_reliable)
    assert town.server.state.models[TRAINER.model].retain == retain
    assert [f"asks to keep {wish} versions" in line for line in town.server.state.said] == [True] * (wish > 3)


def test_who_has_no_room_hears_that_it_wanted_that_much_kept() -> None:
    town = Town()
    town.joins(OTHER, retain=5)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True), copies_left=0, retain=2)
    call = CallReport(1, "unpublish", "")
    town.says(TRAINER, buffer=Withdrawing(ONE, ROOT, published=True), copies_left=0, call=call)
    answer = town.orders[TRAINER].answer
    assert answer is not None
    assert answer.error is not None
    assert answer.error.code == "host-memory-full"
    assert "it was opened with retain=2" in answer.error.message
