"""Who waits for a version that all its holders want to leave hears of it when one of them stays after all."""

import pytest

from tensorhub.protocol.messages import CallReport, Holding, HostCopy, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version

from .kit import worker
from .town import Town

ONE, OLD = Version(1), Digest("old")
HOLDER, NEWCOMER, NEXT = worker("holder"), worker("newcomer"), worker("next")
UNPUBLISH = CallReport(Number(1), "unpublish", "")


@pytest.fixture
def town() -> Town:
    """The only holder takes its version back, and is not let go yet: the newcomer waits for somebody who has it."""
    town = Town()
    town.joins(HOLDER, buffer=Holding(ONE, OLD))
    town.says(HOLDER, buffer=Withdrawing(ONE, OLD), call=UNPUBLISH)
    town.joins(NEWCOMER)
    town.says(NEWCOMER, call=CallReport(Number(1), "replicate", "latest"))
    assert is_waiting(town)
    return town


def is_waiting(town: Town) -> bool:
    answer = town.orders[NEWCOMER].answer
    assert answer is not None
    return answer.version is None and answer.waiting is not None


def test_it_reads_when_the_holder_has_changed_its_mind(town: Town) -> None:
    town.says(HOLDER, buffer=Holding(ONE, OLD), ended=1)
    assert not is_waiting(town)


def test_it_reads_when_somebody_else_comes_with_it(town: Town) -> None:
    town.joins(NEXT, buffer=Holding(ONE, OLD))
    assert not is_waiting(town)


def test_it_reads_when_the_holder_has_a_copy_of_it(town: Town) -> None:
    town.says(HOLDER, buffer=Withdrawing(ONE, OLD), call=UNPUBLISH, copies=(HostCopy(1, ONE, OLD, whole=True),))
    assert not is_waiting(town)
