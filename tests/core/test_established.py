"""Which version is safe enough to be the only one left."""

import pytest

from tensorhub.protocol.messages import Holding, HostCopy, Withdrawing
from tensorhub.protocol.names import Digest, Version

from .kit import worker
from .town import Town

ONE, TWO, ROOT = Version(1), Version(2), Digest("r")
TRAINER, KEEPER, SPOT = worker("trainer"), worker("keeper"), worker("spot")


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_host_copy_that_is_about_to_go_makes_no_version_safe(is_leaving: bool) -> None:
    """It was told to go for the sake of the version before, which is given up only when the new one is safe."""
    town = Town()
    town.joins(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    copy = HostCopy(1, TWO, ROOT, whole=True, leaving=is_leaving)
    town.joins(KEEPER, buffer=Holding(ONE, ROOT), copies=(copy,))
    town.joins(SPOT, reliable=False, buffer=Holding(TWO, ROOT))
    town.says(SPOT, buffer=Holding(TWO, ROOT), ended=1)
    assert town.server.state.models[TRAINER.model].newest_established == (ONE if is_leaving else TWO)


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
