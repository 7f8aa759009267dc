"""Which models belong together in sets, as the server believes it from who lives."""

from msgspec.structs import replace

from tensorhub.protocol.messages import Holding, HostCopy
from tensorhub.protocol.names import Digest, ModelName, Version, WorkerId
from tensorhub.server.members import Companions

from .kit import worker
from .town import Town

TARGET, DRAFT, CRITIC = map(ModelName, ("target", "draft", "critic"))
READER, MATE, OTHER = worker("r", 0, TARGET), worker("r2", 0, TARGET), worker("r3", 0, TARGET)
KEEPER = worker("keeper", 0, TARGET)


def joins(town: Town, who: WorkerId, *companions: ModelName) -> None:
    """It says of which set it is, whatever it said before."""
    town.joins(who)
    town.hellos[who] = replace(town.hellos[who], companions=companions)
    town.says_hello_again(who)


def test_a_set_is_known_while_somebody_of_it_lives() -> None:
    town = Town(lease_s=4.0, report_s=1.0)
    joins(town, READER, DRAFT)
    joins(town, MATE, DRAFT)
    joins(town, OTHER, DRAFT, CRITIC)
    state = town.server.state
    assert state.models[TARGET].companions.sets == ((DRAFT,), (DRAFT, CRITIC))
    assert state.bound == {DRAFT: {TARGET: None}, CRITIC: {TARGET: None}}
    for second in range(1, 6):
        town.until(float(second))
        town.says(MATE)
    assert state.models[TARGET].companions.sets == ((DRAFT,),)
    assert state.bound == {DRAFT: {TARGET: None}}
    town.says(MATE, leaving=True)
    assert state.models[TARGET].companions.sets == ()
    assert state.bound == {}


def test_who_says_another_set_is_of_that_one() -> None:
    town = Town()
    joins(town, READER, DRAFT)
    joins(town, READER, CRITIC)
    state = town.server.state
    assert state.models[TARGET].companions.sets == ((CRITIC,),)
    assert state.bound == {CRITIC: {TARGET: None}}
    joins(town, READER)
    assert state.models[TARGET].companions.sets == ()
    assert state.bound == {}


def test_what_only_a_set_has_kept_goes_at_once_when_nobody_is_of_it() -> None:
    town, old, new = Town(), Version(1), Version(2)
    drafter, trainer = worker("trainer", 0, DRAFT), worker("trainer", 0, TARGET)
    town.joins(drafter, buffer=Holding(old, Digest("d"), published=True))
    joins(town, READER, DRAFT)
    town.joins(trainer, buffer=Holding(new, Digest("n"), published=True))
    copy = HostCopy(1, old, Digest("o"), done=1, chunks=1, whole=True)
    town.joins(KEEPER, buffer=Holding(new, Digest("n")), copies=(copy,))
    town.says(KEEPER, buffer=Holding(new, Digest("n")), copies=(copy,))
    assert town.orders[KEEPER].release == ()
    joins(town, READER)
    assert town.orders[KEEPER].release == (1,), "it has not reported since"


def test_nobody_is_taken_out_twice() -> None:
    found = Companions()
    assert found.join(READER, (DRAFT,))
    assert not found.join(MATE, (DRAFT,))
    assert not found.join(OTHER, ())
    assert not found.leave(OTHER, (DRAFT,))
    assert not found.leave(READER, (CRITIC,))
    assert not found.leave(READER, (DRAFT,))
    assert not found.leave(READER, (DRAFT,))
    assert found.leave(MATE, (DRAFT,))
    assert (found.sets, found.names) == ((), ())
