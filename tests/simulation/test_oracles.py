"""Each oracle of the simulator bites: the promise is broken once on purpose, and the history ends there."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest

from tensorhub.protocol.messages import (
    PROTOCOL,
    Answer,
    Failure,
    Grant,
    Hello,
    Holding,
    HostCopy,
    Orders,
    Report,
    Source,
)
from tensorhub.protocol.names import Number, Ticket, Version, WorkerId, worker_id
from tensorhub.worker.events import Called, Finished
from tests.sim import oracles, truth
from tests.sim.apps import RolloutApp
from tests.sim.contents import plain_root_of
from tests.sim.draw import draw_plan
from tests.sim.oracles import GroupCall, Oracles
from tests.sim.runner import run_seed
from tests.sim.truth import Copied, Held, Life, Truth
from tests.sim.watch import Watch
from tests.sim.world import OracleViolation, World

pytestmark = pytest.mark.simulation

ONE, TWO = Version(1), Version(2)
ROOT, OTHER = plain_root_of("m/trainer", 1, 0), plain_root_of("m/trainer-2", 1, 0)
SINCE = 1_000.0  # all has been well for long


class Reading:
    """A read from the trainer, into the registered memory."""

    is_stopped = is_ended = shares = False
    root, ticket, began = ROOT, Ticket(5), SINCE
    into = (7,)

    def __init__(self, source: WorkerId) -> None:
        self.grant = Grant(self.ticket, ONE, (Source(source, False, ("trainer",), ROOT),), "")


def answers(version: Version) -> Orders:
    """The call is resolved to that version."""
    return Orders(Number(1), Number(1), 1, 4.0, 3.0, 1.0, answer=Answer(3, version))


class Bench:
    """A trainer that has published version 1 long ago, and two rollouts; the first has it too."""

    def __init__(self) -> None:
        plan = draw_plan(0)
        conditions = replace(plan.conditions, shards=1, is_one_sided=True, host_copies=1)
        plan = replace(plan, conditions=conditions, misfortunes=(), replicas=(replace(plan.replicas[0], model="m"),))
        self.world = World("0")
        self.truth = Truth(self.world, plan, {ROOT: (7,), OTHER: (8,)})
        self.oracles = Oracles(self.truth)
        self.trainer, self.first, self.second = map(self.life, ("trainer", "first", "second"))
        self.world.now = SINCE / 2
        for life in (self.trainer, self.first):
            life.held = Held(ONE, ROOT, self.world.now, published=life is self.trainer)
            life.memory[:] = [7]
        self.truth.published(self.trainer, ONE, ROOT)
        self.truth.made_as("m", ONE)[0].is_known = True
        self.world.now = SINCE

    def life(self, replica: str, site: str = "a") -> Life:
        hello = Hello(PROTOCOL, "m", replica, 0, 1, replica, endpoints=(replica,), site=site)
        memory, host = [0], [7]
        life = Life(worker_id("m", replica, 0), replica, hello, memory, lambda _v: host, lambda: self.world.now, 0.0)
        self.truth.born(life)
        life.trust_until, life.told_at = 2 * SINCE, SINCE
        return life

    def calls(self, life: Life, verb: str, spec: int | str = "latest", **more: object) -> None:
        called = Called(verb, spec, self.world.now + 9.0, **more)  # type: ignore[arg-type]
        self.truth.told(life, called)
        assert life.call is not None
        life.call.number = 3

    def returns(self, life: Life, version: Version | None, error: Failure | None = None) -> None:
        assert life.call is not None
        self.oracles.call_ended(life, life.call, Finished(Number(3), version, error))

    def step_ends(self, verb: str, spec: int | str, *ended: Finished) -> None:
        lives = dict(enumerate([self.first, self.second]))
        group = GroupCall("m/rollout", verb, spec, self.world.now, lives, is_plain=True)
        self.oracles.group_ended(group, dict(enumerate(ended)))

    def passes(self, seconds: float) -> None:
        until = self.world.now + seconds
        while self.world.next_at <= until:
            self.world.step()
        self.world.now = until


def overwritten(bench: Bench) -> None:
    bench.oracles.written(bench.trainer, 0, 9)


def not_whole(bench: Bench) -> None:
    bench.oracles.whole(bench.second, ONE, ROOT, [0], "what was read")


def never_published(bench: Bench) -> None:
    bench.oracles.whole(bench.second, ONE, OTHER, [8], "what was read")


def torn(bench: Bench) -> None:
    bench.oracles.accepted(bench.second, Reading(bench.trainer.me), 0, 9)


def after_the_stop(bench: Bench) -> None:
    bench.second.stopped[Ticket(5)] = None
    bench.oracles.accepted(bench.second, Reading(bench.trainer.me), 0, 7)


def after_the_lease(bench: Bench) -> None:
    bench.second.trust_until = SINCE
    bench.oracles.accepted(bench.second, Reading(bench.trainer.me), 0, 7)


def read_when_it_stops(bench: Bench) -> None:
    bench.truth.begins(bench.second, Reading(bench.trainer.me))
    bench.oracles.serving_stops(bench.trainer, ONE, from_host=False)


def untrue_buffer(bench: Bench) -> None:
    bench.oracles.said(bench.second, Report(Number(1), buffer=Holding(ONE, ROOT)))


def untrue_copy(bench: Bench) -> None:
    bench.oracles.said(bench.second, Report(Number(1), copies=(HostCopy(1, ONE, ROOT, whole=True),)))


def host_copy_changes(bench: Bench) -> None:
    bench.second.copies[ONE] = Copied(ONE, ROOT, SINCE, [9])
    bench.oracles.look(bench.second)


def counted_twice(bench: Bench) -> None:
    memory = [7]
    for life in (bench.first, bench.second):
        life.copies[ONE] = Copied(ONE, ROOT, SINCE, memory)
    bench.oracles.look(bench.second)


def endless(bench: Bench) -> None:
    bench.calls(bench.second, "replicate")
    assert bench.second.call is not None
    bench.oracles.called(bench.second, bench.second.call)
    bench.passes(20.0)


def too_early(bench: Bench) -> None:
    bench.calls(bench.second, "replicate")
    bench.returns(bench.second, None, Failure("deadline-exceeded", "it took too long"))


def unnamed_error(bench: Bench) -> None:
    bench.calls(bench.second, "replicate")
    bench.returns(bench.second, None, Failure("oops", "it failed"))


def returns_while_it_serves(bench: Bench) -> None:
    bench.calls(bench.trainer, "unpublish", "")
    bench.returns(bench.trainer, None)


def returns_too_early(bench: Bench) -> None:
    bench.calls(bench.second, "replicate")
    bench.returns(bench.second, ONE)


def two_versions(bench: Bench) -> None:
    bench.step_ends("replicate", "latest", Finished(Number(3), ONE), Finished(Number(3), TWO))


def another_number(bench: Bench) -> None:
    bench.step_ends("replicate", 2, Finished(Number(3), ONE), Finished(Number(3), ONE))


def two_halves(bench: Bench) -> None:
    bench.second.held = Held(ONE, OTHER, SINCE)
    bench.step_ends("replicate", "latest", Finished(Number(3), ONE), Finished(Number(3), ONE))


def goes_back(bench: Bench) -> None:
    bench.first.held = Held(TWO, ROOT, SINCE)
    bench.calls(bench.first, "update")
    group = GroupCall("m/first", "update", "latest", SINCE, {0: bench.first}, is_plain=True)
    bench.oracles.group_ended(group, {0: Finished(Number(3), ONE)})


def number_twice(bench: Bench) -> None:
    bench.calls(bench.second, "publish", 1, root=OTHER)
    bench.oracles.ordered(bench.second, answers(ONE))


def two_writers(bench: Bench) -> None:
    bench.truth.writers[bench.first.me.model] = bench.first, bench.truth.server_life
    bench.first.heard_by, bench.first.heard_at = bench.truth.server_life, bench.oracles.now
    bench.calls(bench.second, "unpublish", "", claim=TWO)
    bench.oracles.ordered(bench.second, answers(TWO))


def old_latest(bench: Bench) -> None:
    bench.calls(bench.second, "replicate")
    bench.oracles.ordered(bench.second, answers(Version(0)))


def refused(bench: Bench) -> None:
    bench.truth.heard(bench.second, Report(Number(1)))
    bench.oracles.turned_away(bench.second)


def last_one_goes(bench: Bench) -> None:
    bench.trainer.held = bench.first.held = None
    bench.oracles.gives_up(bench.first, ONE, "in the buffer")


def leaves_with_the_last(bench: Bench) -> None:
    bench.trainer.held = None
    bench.first.closing, bench.first.close_deadline = SINCE - 1.0, SINCE + 9.0
    bench.oracles.leaves(bench.first)


def not_given_back(bench: Bench) -> None:
    bench.calls(bench.first, "update")
    call = bench.first.call
    assert call is not None
    bench.first.held = None
    bench.truth.wants(bench.first, Finished(Number(3), error=Failure("group-incomplete", "a shard is missing")))
    bench.oracles.may_have_it_back(bench.first, call)
    bench.passes(20.0)


def fails_for_nothing(bench: Bench) -> None:
    failed = Finished(Number(3), error=Failure("source-lost", "gone"))
    bench.step_ends("replicate", "latest", Finished(Number(3), ONE), failed)


def slow_drain(bench: Bench) -> None:
    bench.calls(bench.trainer, "unpublish", "")
    bench.world.now += 8.0
    assert bench.trainer.held is not None
    bench.trainer.held.is_served = False
    bench.returns(bench.trainer, None)


def crosses_twice(bench: Bench) -> None:
    far = bench.life("far", site="b")
    third = bench.life("third", site="b")
    far.held = Held(ONE, ROOT, SINCE / 2)
    read = Reading(bench.trainer.me)
    bench.oracles.sent(bench.trainer, far, read, 0)
    bench.oracles.sent(bench.trainer, third, read, 0)


def waits_for_ever(bench: Bench) -> None:
    bench.calls(bench.second, "replicate")
    assert bench.second.call is not None
    bench.second.call.resolved = ONE
    bench.oracles.look(bench.second)
    bench.world.now += 9.0
    bench.oracles.look(bench.second)


def stands_still(bench: Bench) -> None:
    bench.calls(bench.first, "update")
    assert bench.first.call is not None
    bench.first.call.resolved = TWO
    bench.oracles.look(bench.first)
    bench.world.now += 9.0
    bench.oracles.look(bench.first)


BITES: dict[Callable[[Bench], None], str] = {
    **dict.fromkeys((overwritten, not_whole, never_published, host_copy_changes, returns_while_it_serves), "G1"),
    **dict.fromkeys((two_versions, another_number, two_halves), "G2"),
    **dict.fromkeys((goes_back, number_twice, old_latest), "G3"),
    two_writers: "one writer",
    **dict.fromkeys((torn, after_the_stop, after_the_lease), "G4"),
    **dict.fromkeys((read_when_it_stops, slow_drain), "G5"),
    **dict.fromkeys((last_one_goes, leaves_with_the_last, not_given_back), "G6"),
    **dict.fromkeys((endless, too_early, unnamed_error, refused, fails_for_nothing), "G7"),
    **dict.fromkeys((waits_for_ever, stands_still), "G7"),
    returns_too_early: "G8",
    crosses_twice: "G10",
    **dict.fromkeys((untrue_buffer, untrue_copy), "reports are true"),
    counted_twice: "memory counts once",
}


@pytest.mark.parametrize(("breach", "promise"), BITES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_an_oracle_sees_it(breach: Callable[[Bench], None], promise: str) -> None:
    with pytest.raises(OracleViolation, match=rf"^{promise}\b.* broken at"):
        breach(Bench())


def test_oracles_ask_the_truth_and_not_the_core() -> None:
    """Of the core they import words alone."""
    words = ("tensorhub.worker.events", "tensorhub.worker", "tensorhub.protocol.messages", "tensorhub.protocol.names")
    for module in (oracles, truth):
        tree = ast.parse(inspect.getsource(module))
        used = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
        assert [name for name in used if name is not None and name.startswith("tensorhub") and name not in words] == []
        near = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
        assert set(near) <= {"contents", "plan", "truth", "world"}


# --- what only a whole history shows ----------------------------------------------------------------------------------


def test_a_replica_that_gets_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutApp, "take", lambda self, step: None)
    assert "progress broken: policy/rollout-0 has version None" in str(run_seed(49).error)


def test_a_read_that_is_never_closed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "reads", lambda self: {7: "m/rollout[0]"})
    assert "leak broken: ticket 7" in str(run_seed(49).error)
