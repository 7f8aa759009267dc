"""The number with which a trainer that was started again goes on: above all that were ever taken."""

from tensorhub.protocol.messages import CallReport, Holding, Vacated
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


def test_a_lost_number_stays_taken() -> None:
    fleet = Fleet()
    fleet.says(worker("rollout"))
    fleet.says(worker("trainer"))
    fleet.publishes(7, worker("trainer"), 1)
    fleet.says(worker("trainer"), left=True, ended=1, finished=1)
    model = fleet.server.state.models[POLICY]
    assert model.is_lost(model.versions[Version(7)])
    assert next_of(fleet) == 8


def test_what_one_shard_has_published_is_taken_and_stays_so() -> None:
    fleet = Fleet()
    first, second = worker("trainer", 0), worker("trainer", 1)
    calls = CallReport(1, "publish", 7, Digest("r"))
    for each in (first, second):
        fleet.says(each, shards=2)
    fleet.says(first, shards=2, call=calls)
    assert next_of(fleet) == 8, "one shard is about to"
    fleet.says(second, shards=2, call=calls)
    fleet.says(first, shards=2, call=calls, buffer=Holding(Version(7), Digest("r"), published=True))
    fleet.says(second, shards=2, left=True)
    fleet.says(first, shards=2, left=True, ended=1)
    assert not fleet.server.state.models[POLICY].versions[Version(7)].exists
    assert next_of(fleet) == 8


def test_a_publish_that_was_refused_takes_nothing() -> None:
    fleet = Fleet()
    fleet.says(worker("rollout"))
    fleet.publishes(7, worker("trainer"), 1)
    fleet.says(worker("second"), call=CallReport(1, "publish", 5, Digest("s")))
    assert next_of(fleet) == 8


def test_a_claim_counts_until_it_is_given_back() -> None:
    fleet = Fleet()
    fleet.says(worker("rollout"))
    fleet.publishes(7, worker("trainer"), 1)
    fleet.says(worker("trainer"), buffer=Vacated(Version(7), Digest("r"), True), ended=2, finished=2, claim=Version(9))
    assert next_of(fleet) == 10
    fleet.says(worker("trainer"), ended=2, finished=2)
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
