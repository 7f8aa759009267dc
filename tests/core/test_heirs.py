"""Who closes hands on what it alone has, however many close with it."""

import pytest

from tensorhub.protocol.messages import CallReport, Filling, Holding, HostCopy, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version
from tensorhub.server.rules import retention

from .kit import worker
from .town import Town

ONE, TWO, OLD, NEW = Version(1), Version(2), Digest("old"), Digest("new")
LEAVERS, HEIR = [worker(f"leaver-{number}") for number in range(6)], worker("stays")


def test_those_that_leave_do_not_hide_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_LOOKED_AT", 3)
    town = Town()
    for leaver in LEAVERS:
        town.joins(leaver, buffer=Holding(ONE, OLD), copies_left=1)
    town.joins(HEIR, copies_left=1)
    for leaver in LEAVERS:
        town.says(leaver, buffer=Withdrawing(ONE, OLD), closing=True, copies_left=1)
    assert town.orders[HEIR].fetch == ONE
    assert town.orders[LEAVERS[-1]].drained is None


def test_a_worker_that_is_about_to_have_the_version_is_waited_for_while_it_can_be_reached() -> None:
    town, leaver = Town(), LEAVERS[0]
    town.joins(leaver, buffer=Holding(ONE, OLD))
    town.joins(HEIR, buffer=Filling(ONE))
    town.says(leaver, buffer=Withdrawing(ONE, OLD), closing=True)
    assert town.orders[leaver].drained is None
    town.loses_its_line(HEIR)
    assert town.orders[leaver].drained == ONE


def test_who_has_room_is_the_heir_before_one_that_would_have_to_make_it() -> None:
    """The other one would give up its copy of what alone has left its publisher."""
    town, leaver, full = Town(), LEAVERS[0], worker("full")
    assert full < HEIR, "by name alone it would be that one"
    town.joins(leaver, buffer=Holding(TWO, NEW, published=True))
    town.joins(full, buffer=Holding(ONE, OLD), copies=(HostCopy(1, ONE, OLD, whole=True),))
    town.joins(HEIR, copies_left=1)
    town.says(leaver, buffer=Withdrawing(TWO, NEW, published=True), closing=True)
    assert town.orders[HEIR].fetch == TWO
    assert (town.orders[full].fetch, town.orders[full].release) == (None, ())


def test_a_copy_that_is_not_whole_makes_no_room_at_once_though_its_buffer_is_to_be_filled_with_it() -> None:
    """The copy has to be filled first. The heir is one who drops a copy of what it holds."""
    town, leaver, filling = Town(), LEAVERS[0], worker("fills")
    town.joins(leaver, buffer=Holding(TWO, NEW, published=True))
    town.joins(HEIR, buffer=Holding(ONE, OLD), copies=(HostCopy(1, ONE, OLD, whole=True),))
    copy, call = HostCopy(1, ONE, OLD, done=1, chunks=4), CallReport(Number(1), "replicate", ONE)
    town.joins(filling, copies=(copy,), call=call)
    assert town.orders[HEIR].release == ()
    town.says(leaver, buffer=Withdrawing(TWO, NEW, published=True), closing=True)
    assert town.orders[HEIR].release == (1,)
