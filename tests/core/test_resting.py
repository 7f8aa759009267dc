"""What a publisher is told to copy while its version rests, of which the transcripts show one case each."""

from tensorhub.protocol.messages import Holding, HostCopy
from tensorhub.protocol.names import Version
from tensorhub.server.rules import retention

from .kit import worker
from .test_grants import ONE, ROOT, Town

TRAINER, HEIR, SPOT = worker("trainer"), worker("heir"), worker("spot")
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
    town.says(HEIR, leaving=True)
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
