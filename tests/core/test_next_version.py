"""The number with which a trainer that was started again goes on: above all that were ever taken."""

from tensorhub.protocol.messages import Holding
from tensorhub.protocol.names import Digest, ModelName, Number, Version
from tensorhub.server.calls import next_version

from .kit import LEASE_S, Fleet, worker

POLICY = ModelName("policy")


def next_of(fleet: Fleet) -> int | None:
    return next_version(fleet.server.state, POLICY)


def test_it_is_above_what_exists() -> None:
    fleet = Fleet()
    assert next_of(fleet) == 0
    fleet.says(worker("trainer"))
    fleet.says(worker("rollout"))
    assert next_of(fleet) == 0
    fleet.publishes(7, worker("trainer"), 1)
    assert next_of(fleet) == 8


def test_a_restarted_server_knows_nothing_until_it_has_listened() -> None:
    fleet = Fleet(fresh=False)
    assert next_of(fleet) is None, "a model of which nobody has spoken yet may be there"
    fleet.says(worker("rollout"), session=Number(5), buffer=Holding(Version(4), Digest("r")))
    assert next_of(fleet) is None
    held = Holding(Version(4), Digest("r"))
    fleet.passes(LEASE_S + 0.1, worker("rollout"), session=Number(5), buffer=held)
    assert next_of(fleet) == 5
    assert next_version(fleet.server.state, ModelName("other")) == 0
