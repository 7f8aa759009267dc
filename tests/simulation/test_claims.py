"""Nothing is withdrawn for a claim that is not granted, but what its worker has been told is not the version."""

from contextlib import nullcontext

import pytest

from tensorhub.protocol.messages import Holding, Poisoned, Report
from tensorhub.protocol.names import Digest, Version
from tensorhub.worker.events import Called
from tests.sim.judges.claims import ClaimJudge
from tests.sim.truth.life import Held
from tests.sim.world import OracleViolation

from .test_belated import FORMER, Bench

pytestmark = pytest.mark.simulation

CONTENT = Digest("content")


class Claiming(Bench):
    """A trainer holds what it has published, and readers are there yet."""

    def __init__(self) -> None:
        self.begins(shards=1)
        self.judge = ClaimJudge(self.truth, self.world)
        self.trainer = self.life("trainer")
        self.trainer.held = Held(FORMER, CONTENT, self.world.now, published=True)
        self.says(Holding(FORMER, CONTENT, published=True))

    def says(self, buffer: Holding | Poisoned) -> None:
        self.world.now += 0.1
        self.reports += 1
        self.truth.said(self.trainer, Report(self.reports, buffer=buffer))

    def calls(self) -> None:
        self.world.now += 0.1
        self.truth.told(self.trainer, Called("unpublish", "", self.world.now + 9, claim=Version(FORMER + 1)))

    def withdraws(self) -> None:  # type: ignore[override]
        self.judge.withdraws(self.trainer, FORMER, self.trainer.call)


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("told", ["before the call", "in the call", "never"])
def test_who_was_told_before_that_it_is_not_the_version_waits_for_no_claim(told: str, others: bool) -> None:
    """Seed 4106594: the server could not know that it had the same content as another publisher."""
    bench = Claiming()
    for life in (bench.trainer, bench.life("twin"))[: 1 + others]:
        bench.truth.published(life, FORMER, CONTENT)
    if told == "before the call":
        bench.says(Poisoned())
    bench.calls()
    if told == "in the call":
        bench.says(Poisoned())
    is_good = told == "before the call" and others
    with nullcontext() if is_good else pytest.raises(OracleViolation, match="before its claim"):
        bench.withdraws()
