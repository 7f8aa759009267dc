"""A storm: rollouts and server are killed and come back, at random, while a trainer publishes. Then calm: all converge.

In the storm a call may fail, but only as `Unavailable` or `TransferError`, which say that a retry helps; what a rollout
accepts is right to the last byte, and the shards of a replica accept the same version or none does.
"""

import os
import random
import threading
import time
from collections import Counter

import pytest

import tensorhub

from .cluster import Replica
from .process import Died, eventually

pytestmark = pytest.mark.processes

ROUNDS = 8
CALL_S = 10.0  # a shard that comes back too late for a call makes the others wait for so long
RETRYABLE = (tensorhub.Unavailable, tensorhub.TransferError, tensorhub.SessionLost)


class Rollout(threading.Thread):
    """Keeps one replica alive and at `latest`, and judges whatever it accepts, until it has the last version."""

    def __init__(self, cluster, replica, is_calm):
        super().__init__(daemon=True)
        self.cluster, self.replica, self.is_calm = cluster, replica, is_calm
        self.last = threading.Event()
        self.last_version = None
        self.accepted = []
        self.errors = Counter()
        self.failure = None

    def run(self):
        try:
            while not (self.is_calm.is_set() and self.accepted[-1:] == [self.last_version]):
                self._update()
        except BaseException as error:
            self.failure = error
            raise

    def _update(self):
        calls = self._calls()
        found = [call.outcome() for call in calls]
        lived = [each for each in found if not isinstance(each, Died)]
        versions = {each for each in lived if isinstance(each, int)}
        assert len(versions) <= 1, f"{self.replica.name} got {found}"
        assert not versions or all(isinstance(each, int) for each in lived), f"{self.replica.name} got {found}"
        for shard, (call, each) in enumerate(zip(calls, found, strict=True)):
            if isinstance(each, int):  # of a worker that may have been killed since
                assert self.cluster.has(call.worker, shard, each), f"{self.replica.name}: wrong bytes of {each}"
        if len(lived) == len(found) and versions:
            self.accepted += versions
        for each in lived:
            if not isinstance(each, int):
                assert isinstance(each, RETRYABLE), each
                self.errors[type(each).__name__] += 1

    def _calls(self):
        """An update on all shards. A successor joins the call that the others still wait in."""
        calls = self.replica.start("update", spec="latest", timeout=CALL_S)
        while not all(call.is_over for call in calls) or not all(worker.is_alive for worker in self.replica):
            for shard, worker in enumerate(self.replica):
                if worker.is_alive:
                    continue
                self.replica.workers[shard] = self.cluster.worker(self.replica.name, shard, timeout=30)
                if not any(call.is_over for other, call in enumerate(calls) if other != shard):
                    calls[shard] = self.replica[shard].start("update", spec="latest", timeout=CALL_S)
            time.sleep(0.01)
        return calls


class Trainer(threading.Thread):
    """Publishes version after version, until told to stop; the last one stays."""

    def __init__(self, cluster, replica):
        super().__init__(daemon=True)
        self.cluster, self.replica = cluster, replica
        self.version = 1
        self.errors = Counter()
        self.is_over = threading.Event()
        self.failure = None

    def run(self):
        try:
            while not self.is_over.is_set():
                self._retry("unpublish")
                self.cluster.write(self.replica, self.version + 1)
                self._retry("publish", version=self.version + 1)
                self.version += 1
        except BaseException as error:
            self.failure = error
            raise

    def _retry(self, verb, **arguments):
        while True:
            found = [call.outcome() for call in self.replica.start(verb, timeout=20, **arguments)]
            if not any(isinstance(each, Exception) for each in found):
                return
            for each in found:
                assert not isinstance(each, Exception) or isinstance(each, RETRYABLE), each
                self.errors[type(each).__name__] += 1


def blow(dice, cluster, rollouts):
    """One blow of the storm."""
    match dice.choice(["shard", "shard", "replica", "server", "stop"]):
        case "shard":
            victim = dice.choice(dice.choice(rollouts).replica.workers)
            if victim.is_alive:
                victim.kill()
            return "shard killed"
        case "replica":
            for worker in dice.choice(rollouts).replica.workers:
                if worker.is_alive:
                    worker.kill()
            return "replica killed"
        case "server":
            cluster.server.kill()
            cluster.restart_server()
            return "server killed"
        case _:
            victim = dice.choice(dice.choice(rollouts).replica.workers)
            if victim.is_alive:
                victim.stop()
                eventually(lambda: not cluster.is_known(victim.name), "its lease ends", within_s=20)
                victim.go_on()
            return "shard stopped"


@pytest.mark.parametrize("seed", [int(n) for n in os.environ.get("STORM", "1").split()])
def test_everybody_converges_after_a_storm_of_kills(start, figures, seed):
    cluster, dice = start(), random.Random(seed)
    trainer_replica, *replicas = cluster.replicas("trainer", "rollout-1", "rollout-2", "rollout-3")
    cluster.publish(trainer_replica, 1)
    is_calm = threading.Event()
    trainer = Trainer(cluster, trainer_replica)
    rollouts = [Rollout(cluster, Replica(each.name, list(each)), is_calm) for each in replicas]
    began = time.monotonic()
    threads = [trainer, *rollouts]
    for thread in threads:
        thread.start()

    def nobody_failed():
        for thread in threads:
            if thread.failure is not None:
                raise thread.failure
        return True

    blows = Counter()
    for _ in range(ROUNDS):
        before = sum(len(rollout.accepted) for rollout in rollouts)
        eventually(
            lambda before=before: nobody_failed() and sum(len(r.accepted) for r in rollouts) >= before + 2,
            "rollouts go on between two blows",
            within_s=60,
        )
        blows[blow(dice, cluster, rollouts)] += 1
    trainer.is_over.set()
    eventually(lambda: nobody_failed() and not trainer.is_alive(), "the trainer ends", within_s=60)
    for rollout in rollouts:
        rollout.last_version = trainer.version
    calm = time.monotonic()
    is_calm.set()
    eventually(lambda: nobody_failed() and not any(r.is_alive() for r in rollouts), "all converge", within_s=60)
    took_s = time.monotonic() - calm
    for rollout in rollouts:
        cluster.judge(rollout.replica, trainer.version)
        assert rollout.accepted == sorted(rollout.accepted), f"`latest` went backwards: {rollout.accepted}"
    errors = trainer.errors + sum((rollout.errors for rollout in rollouts), Counter())
    accepted = sum(len(rollout.accepted) for rollout in rollouts)
    figures(
        f"storm of seed {seed}: {dict(blows)} in {calm - began:.0f} s, {trainer.version} versions, {accepted} updates "
        f"all right, errors {dict(errors)}; all had `latest` {took_s:.1f} s after the last blow",
        blows=dict(blows),
        errors=dict(errors),
        versions=trainer.version,
    )
