"""What the shards of a replica read together comes from one publish, though no other judge knows what was published."""

import pytest

from tensorhub.protocol.names import Digest
from tensorhub.worker.events import Finished
from tests.sim.judges.groups import GroupCall, GroupJudge
from tests.sim.truth.contents import plain_root_of, root_of
from tests.sim.truth.life import Held
from tests.sim.world import OracleViolation

from .test_belated import NEWER, Bench

pytestmark = pytest.mark.simulation

ONE = plain_root_of("m/trainer", 1, 0), plain_root_of("m/trainer", 1, 1)


class Readers(Bench):
    """Both shards of a rollout return from one call."""

    def __init__(self) -> None:
        self.begins(shards=2)
        self.rollout = [self.life("rollout", shard) for shard in range(2)]

    def returns(self, *roots: Digest) -> None:
        lives = dict(enumerate(self.rollout))
        for life, root in zip(self.rollout, roots, strict=True):
            life.held = Held(NEWER, root, self.world.now)
        group = GroupCall("m/rollout", "replicate", "latest", self.world.now, lives)
        GroupJudge(self.truth, self.world).ended(group, {shard: Finished(1, NEWER) for shard in lives})


def test_two_halves_are_no_version() -> None:
    with pytest.raises(OracleViolation, match="of two publishes"):
        Readers().returns(ONE[0], plain_root_of("m/trainer-2", 1, 1))


def test_nor_are_those_of_two_tries() -> None:
    with pytest.raises(OracleViolation, match="of two publishes"):
        Readers().returns(ONE[0], plain_root_of("m/trainer", 2, 1))


def test_nor_where_tensors_are_cut_otherwise() -> None:
    with pytest.raises(OracleViolation, match="of two publishes"):
        Readers().returns(root_of("0.1", "a", 0), root_of("1.1", "a", 1))


def test_what_comes_from_one_is() -> None:
    Readers().returns(*ONE)
    Readers().returns(root_of("0.1", "a", 0), root_of("0.1", "b", 1))
