"""Who stays only because somebody else is on its way to a newer version hears of it when that one is there, or gone."""

import pytest

from tensorhub.protocol.messages import CallReport, Filling, Holding, Poisoned, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version

from .kit import worker
from .town import Town

ONE, TWO, OLD, NEW = Version(1), Version(2), Digest("old"), Digest("new")
TRAINER, KEEPER, SPOT = worker("trainer"), worker("keeper"), worker("spot")


@pytest.fixture
def town() -> Town:
    """The keeper has the established version and no room to copy it; a spot worker fills with the next one."""
    town = Town()
    town.joins(KEEPER, buffer=Holding(ONE, OLD), copies_left=0)
    town.joins(TRAINER, buffer=Holding(TWO, NEW, published=True))
    town.joins(SPOT, reliable=False, buffer=Holding(ONE, OLD), copies_left=0)
    call = CallReport(Number(1), "update", "latest")
    town.says(SPOT, buffer=Withdrawing(ONE, OLD), call=call, copies_left=0)
    town.says(SPOT, buffer=Filling(TWO), call=call, copies_left=0)
    town.says(KEEPER, buffer=Withdrawing(ONE, OLD), call=CallReport(Number(1), "unpublish", ""), copies_left=0)
    assert town.orders[KEEPER].drained is None, "the spot worker has left the version: it has the next one first"
    return town


def test_it_is_let_go_when_the_other_one_has_arrived(town: Town) -> None:
    town.says(SPOT, buffer=Holding(TWO, NEW), ended=1, copies_left=0)
    assert town.orders[KEEPER].drained == ONE


def test_it_is_let_go_when_the_other_one_has_failed(town: Town) -> None:
    town.says(SPOT, buffer=Poisoned(), ended=1, copies_left=0)
    assert town.orders[KEEPER].drained == ONE


def test_it_is_let_go_when_the_other_one_is_gone(town: Town) -> None:
    town.loses_its_line(SPOT)
    assert town.orders[KEEPER].drained == ONE
