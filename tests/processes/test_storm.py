"""A storm: workers and server are killed, stopped and slowed down at random, while a trainer publishes. Then calm.

In the storm a call may fail, but only as `Unavailable` or `TransferError`, which say that a retry helps; what a rollout
accepts is right to the last byte, and the shards of a replica accept the same version or none does. The trainer writes
over its tensors as soon as it may, so a reader that has not left them by then accepts wrong bytes. After the storm
everybody converges. `PROCESSES_STORM="7 8 9"` draws other storms.
"""

import contextlib
import os
import random
import threading
import time
from collections import Counter

import pytest

import tensorhub

from .process import Died, eventually

pytestmark = pytest.mark.processes

BLOWS = 10
CALL_S = 10.0  # a shard that comes back too late for a call makes the others wait for so long
RETRYABLE = (tensorhub.Unavailable, tensorhub.TransferError, tensorhub.SessionLost)
SEEDS = [int(seed) for seed in os.environ.get("PROCESSES_STORM", "29").split()]


class Keeper(threading.Thread):
    """Keeps one replica alive, and makes its calls."""

    def __init__(self, cluster, replica):
        super().__init__(daemon=True, name=f"keeper of {replica.name}")
        self.cluster, self.replica = cluster, replica
        self.errors = Counter()
        self.failure = None
        self.is_over = threading.Event()
        self.is_abandoned = threading.Event()  # the test has failed: replace nobody

    def run(self):
        try:
            while not self.has_ended():
                self.step()
        except BaseException as error:
            self.failure = error
            raise

    def has_ended(self):
        return self.is_over.is_set()

    def call(self, verb, **arguments):
        """On all shards; the dead are replaced. Returns [(worker, version or error)] by shard.

        The successor of a shard joins the call that the others still wait in.
        """
        calls = self.replica.start(verb, timeout=CALL_S, **arguments)
        while not all(call.is_over for call in calls) or not all(worker.is_alive for worker in self.replica):
            for shard, worker in enumerate(self.replica):
                if worker.is_alive:
                    continue
                assert not self.is_abandoned.is_set(), "the test has failed elsewhere"
                self.replica.workers[shard] = self.cluster.worker(self.replica.name, shard, timeout=30)
                if verb == "update" and not any(call.is_over for other, call in enumerate(calls) if other != shard):
                    calls[shard] = self.replica[shard].start(verb, timeout=CALL_S, **arguments)
            time.sleep(0.01)
        found = [(call.worker, call.outcome()) for call in calls]
        for _, each in found:
            if isinstance(each, Exception):
                assert isinstance(each, (*RETRYABLE, Died)), each
                self.errors[type(each).__name__] += 1
        return found


class Rollout(Keeper):
    """Stays at `latest`, and judges whatever it accepts, until it has the last version."""

    def __init__(self, cluster, replica):
        super().__init__(cluster, replica)
        self.last_version = None
        self.accepted = []

    def has_ended(self):
        return self.last_version is not None and self.accepted[-1:] == [self.last_version]

    def step(self):
        found = self.call("update", spec="latest")
        lived = [each for _, each in found if not isinstance(each, Died)]
        versions = {each for each in lived if isinstance(each, int)}
        assert len(versions) <= 1, f"{self.replica.name} got {found}"
        assert not versions or all(isinstance(each, int) for each in lived), f"{self.replica.name} got {found}"
        for shard, (worker, each) in enumerate(found):
            if isinstance(each, int):  # of a worker that may have been killed since
                assert self.cluster.has(worker, shard, each), f"{self.replica.name}: wrong bytes of {each}"
        if versions and len(lived) == len(found):
            self.accepted += versions


class Trainer(Keeper):
    """Publishes version after version, until told to stop; the last one stays."""

    def __init__(self, cluster, replica):
        super().__init__(cluster, replica)
        self.version = self.number = 1

    def step(self):
        """A number that failed is not used again: nobody knows whether that version came into being."""
        self.number += 1
        if not self._succeeds("unpublish"):
            return
        self.cluster.write(self.replica, self.number)
        if self._succeeds("publish", version=self.number):
            self.version = self.number

    def has_ended(self):
        return self.is_over.is_set() and self.version == self.number

    def _succeeds(self, verb, **arguments):
        return not any(isinstance(each, Exception) for _, each in self.call(verb, **arguments))


class Weather:
    """Blows, drawn from a seed."""

    def __init__(self, seed, cluster, trainer, rollouts):
        self._dice = random.Random(seed)
        self._cluster, self._trainer, self._rollouts = cluster, trainer, rollouts
        self._pauses = []
        self.blows = Counter()

    def blow(self):
        """One blow of the storm."""
        kinds = ["shard killed", "shard paused"] * 3 + ["replica killed", "server killed", "shard slowed"] * 2
        kinds += ["server paused", "trainer killed", "trainer paused"]
        kind = self._dice.choice(kinds)
        self.blows[kind] += 1
        keeper = self._trainer if kind.startswith("trainer") else self._dice.choice(self._rollouts)
        worker = self._dice.choice(keeper.replica.workers)
        with contextlib.suppress(ProcessLookupError):  # the last blow has killed it
            self._strike(kind, keeper, worker)

    def _strike(self, kind, keeper, worker):
        match kind.split():
            case ["server", "killed"]:
                self._cluster.server.kill()
                self._cluster.restart_server()
            case ["server", "paused"]:
                self._pause(self._cluster.server)
            case ["replica", "killed"]:
                for each in list(keeper.replica.workers):
                    each.kill()
            case [_, "killed"]:
                worker.kill()
            case [_, "paused"]:
                self._pause(worker)
            case _:
                worker.ask("valve", which="writing", pace_s=self._dice.choice([0.01, 0.05]))

    def _pause(self, process):
        """Stop it for a time around its lease."""
        process.stop()
        timer = threading.Timer(self._dice.uniform(0.2, 1.8) * self._cluster.lease_s, _go_on, [process])
        self._pauses.append(timer)
        timer.start()

    def end(self):
        """The last pause is over."""
        for timer in self._pauses:
            timer.join()


def _go_on(process):
    with contextlib.suppress(ProcessLookupError):  # killed meanwhile
        process.go_on()


def nobody_failed(keepers):
    """Raises what a keeper found wrong."""
    for keeper in keepers:
        if keeper.failure is not None:
            raise keeper.failure
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_everybody_converges_after_a_storm(start, figures, seed):
    cluster = start()
    first, *others = cluster.replicas("trainer", "rollout-1", "rollout-2", "rollout-3")
    cluster.publish(first, 1)
    trainer, rollouts = Trainer(cluster, first), [Rollout(cluster, replica) for replica in others]
    keepers = [trainer, *rollouts]
    weather = Weather(seed, cluster, trainer, rollouts)
    began = time.monotonic()
    for keeper in keepers:
        keeper.start()

    def accepted():
        return nobody_failed(keepers) and sum(len(rollout.accepted) for rollout in rollouts)

    try:
        for _ in range(BLOWS):
            enough = accepted() + 2
            eventually(lambda enough=enough: accepted() >= enough, "rollouts go on between two blows", within_s=60)
            weather.blow()
        weather.end()
        calm = time.monotonic()
        trainer.is_over.set()
        eventually(lambda: nobody_failed(keepers) and not trainer.is_alive(), "the trainer ends", within_s=60)
        for rollout in rollouts:
            rollout.last_version = trainer.version
        eventually(
            lambda: nobody_failed(keepers) and not any(r.is_alive() for r in rollouts), "all converge", within_s=60
        )
    finally:
        for keeper in keepers:
            keeper.is_abandoned.set()
    took_s = time.monotonic() - calm
    for rollout in rollouts:
        cluster.judge(rollout.replica, trainer.version)
        assert rollout.accepted == sorted(rollout.accepted), f"`latest` went backwards: {rollout.accepted}"
    errors = sum((keeper.errors for keeper in keepers), Counter())
    figures(
        f"storm {seed}: {dict(weather.blows)} in {calm - began:.0f} s; {trainer.version} versions, {accepted()} "
        f"updates, all right; errors {dict(errors)}; all had `latest` {took_s:.1f} s after the last blow",
        blows=dict(weather.blows),
        errors=dict(errors),
        versions=trainer.version,
    )
