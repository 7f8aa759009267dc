"""What is left when a session ends, and what may begin one."""

import pytest
from msgspec.structs import replace

from tensorhub.core.manifest import Layout
from tensorhub.core.messages import Holding, LayoutInfo, Refusal
from tensorhub.core.names import Digest, Shard, Version
from tensorhub.core.server.lines import Line

from .kit import LAYOUT, report, worker
from .town import Town

ONE, ROOT = Version(1), Digest("r")
TRAINER, READER, OTHER, THIRD = (worker(name) for name in ("trainer", "a", "b", "c"))


@pytest.mark.parametrize("site", ["", "far"])
def test_when_the_one_who_copies_ahead_dies_another_does(site: str) -> None:
    town = Town(lease_s=4.0, report_s=1.0)
    holding = {"buffer": Holding(ONE, ROOT), "copies_left": 1}
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True), site=site)
    for who in (READER, OTHER, THIRD):
        town.joins(who, **holding)
    record = town.server.state.models[TRAINER.model].look_up(ONE)
    first = record.keepers[Line(1, Shard(0))].chosen
    assert first in (READER, OTHER, THIRD)
    rest = [who for who in (READER, OTHER, THIRD) if who != first]
    for second in range(1, 6):
        town.until(float(second))
        town.says(TRAINER, buffer=Holding(ONE, ROOT, published=True))
        for who in rest:
            town.says(who, **holding)
    assert first not in town.server.state.members
    assert record.keepers[Line(1, Shard(0))].chosen in rest


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
