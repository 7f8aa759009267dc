"""A rollout process: answers prompts with the newest policy it can get, scores the answers, sends them to the trainer.

It may join at any time and be killed at any time. When an update fails because the reference server is away, it goes
on with the version it holds. It never runs a policy that is no whole, verified version.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

import tensorhub
from tensorhub import SessionLost, TransferError, Unavailable, VersionUnavailable
from tensorhub.protocol.status import ReplicaView, Status

from . import grpo, task
from .events import TRAINER, Ended, Generated, Kept, Updated
from .logs import EventLog, now
from .parent import Parent
from .policy import Policy, answer, fingerprint
from .samples import Answer, Batch, Outbox
from .sharded import MODEL, ShardedWeights

PROMPTS = 16  # in a batch
PATIENCE_S = 60.0  # to join, and to get the last version
TRY_S = 5.0  # then it is better to go on with the version held, or to choose anew
RETRY_S = 0.1
RETRYABLE = (Unavailable, SessionLost, TransferError)


class Answering(Protocol):
    """What computes with the weights: the policy itself, or an engine."""

    def answer(self, prompts: task.Tokens) -> tuple[task.Tokens, task.Floats]:
        """`grpo.GROUP` answers to each prompt, as rows of prompt and answer, and how likely each token drawn was."""

    def fingerprint(self) -> str:
        """SHA-256 of what it computes with now, as the trainer hashes what it publishes."""


class Replicating(Protocol):
    """How it gets its weights."""

    stall_s: float  # that the last call took

    @property
    def version(self) -> int | None: ...

    def replicate(self, spec: int | str, *, timeout_s: float) -> int: ...

    def update(self, spec: int | str = "latest", *, timeout_s: float) -> int: ...

    def bytes_by_source(self) -> dict[str, int]: ...


class Sending(Protocol):
    """How samples get to the trainer."""

    def send(self, batch: Batch) -> Answer: ...


class OwnPolicy:
    """The policy, computed in this process."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._random = torch.Generator().manual_seed(seed)

    def answer(self, prompts: task.Tokens) -> tuple[task.Tokens, task.Floats]:
        """Draw answers."""
        return answer(self._policy, prompts, grpo.GROUP, self._random)

    def fingerprint(self) -> str:
        """Of all parameters."""
        return fingerprint(self._policy)


class Rollout:
    """One replica of the policy that only generates."""

    def __init__(self, replica: str, weights: Replicating, policy: Answering, log: EventLog, seed: int) -> None:
        self.replica = replica
        self.weights = weights
        self.policy = policy
        self.log = log
        self.prompt_random = np.random.default_rng(seed)

    def join(self, choose: Callable[[], int | str]) -> None:
        """Get a policy for the first time, of the version that `choose` says."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                version = self.weights.replicate(choose(), timeout_s=TRY_S)
            except RETRYABLE:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)  # nothing is published yet, or what was chosen has gone meanwhile
            else:
                self.tell_updated(version, is_first=True)
                return

    def update(self, *, timeout_s: float = TRY_S) -> None:
        """Get the newest policy, or keep the one there is if that cannot be had now. Returns only with one to run."""
        before = self.weights.version
        while True:
            try:
                version = self.weights.update("latest", timeout_s=timeout_s)
            except RETRYABLE as error:
                held = self.weights.version
                if held is not None and held != before:  # all of it had come, and the server could not be told in time
                    self.tell_updated(held)
                    return
                self.tell_kept(error)
                if held is not None:
                    return
                time.sleep(RETRY_S)
            else:
                self.tell_updated(version)
                return

    def generate(self) -> Batch:
        """Answer a batch of random prompts and score the answers."""
        version = self.weights.version
        assert version is not None, "join and update return only with a whole version"
        prompts = task.draw_prompts(PROMPTS, self.prompt_random)
        tokens, log_probabilities = self.policy.answer(prompts)
        rewards = task.reward(tokens)
        self.log.write(
            Generated(
                time=now(),
                process=self.replica,
                version=version,
                sha256=self.policy.fingerprint(),
                reward=float(rewards.mean()),
                samples=len(rewards),
            )
        )
        return Batch(self.replica, version, tokens.tobytes(), log_probabilities.tobytes(), rewards.tobytes())

    def tell_updated(self, version: int, *, is_first: bool = False) -> None:
        """Write down which version this is now, hashed before it is run."""
        self.log.write(
            Updated(
                time=now(),
                process=self.replica,
                version=version,
                sha256=self.policy.fingerprint(),
                stall_s=self.weights.stall_s,
                bytes_by_source=self.weights.bytes_by_source(),
                is_first=is_first,
            )
        )

    def tell_kept(self, error: Exception) -> None:
        """Write down that an update failed, and what this goes on with."""
        self.log.write(
            Kept(
                time=now(),
                process=self.replica,
                version=self.weights.version,
                stall_s=self.weights.stall_s,
                error=f"{type(error).__name__}: {error}",
            )
        )


def work(rollout: Rollout, outbox: Sending, *, updates: bool) -> None:
    """Generate and update until the trainer wants no more; then run the last policy once."""
    while not outbox.send(rollout.generate()).is_last:
        if updates:
            rollout.update()
    if updates:
        rollout.update(timeout_s=PATIENCE_S)
    rollout.generate()
    rollout.log.write(Ended(time=now(), process=rollout.replica))


def from_rollouts(status: Status, replica: str) -> int:
    """The newest version that can be had from other rollouts and needs nothing of the trainer.

    Either all of them hold it: then nobody else is about to fetch it, and whoever reads it has the choice between idle
    rollouts, and the trainer if that still holds it. Or some of them hold it and the trainer does not any more. Raises
    `VersionUnavailable`.
    """
    found: list[int] = []
    for model in status.models:
        others = {each.name for each in model.replicas if each.name.startswith("rollout") and each.name != replica}
        for version in model.versions:
            holders = others.intersection(version.holders)
            has_trainer_left = TRAINER not in {*version.holders, *version.host_copies}
            if holders and (holders == others or has_trainer_left):
                found.append(version.version)
    if not found:
        raise VersionUnavailable("the rollouts hold different versions, of which the trainer has the only idle copy")
    return max(found)


def received_by(name: str, replicas: Sequence[ReplicaView]) -> dict[str, int]:
    """What all workers of a replica have received, by source, as far as the reference server has heard."""
    total: dict[str, int] = {}
    for replica in replicas:
        for worker in replica.workers if replica.name == name else ():
            for source, size_bytes in worker.received_bytes.items():
                total[source] = total.get(source, 0) + size_bytes
    return total


def rollout_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every rollout's process is told, whatever generates."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--samples", required=True, help="address of the trainer's inbox")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--no-updates", action="store_true", help="keep the first version for ever")
    return parser


def main() -> None:
    """`python -m bench.demo.rollout`"""
    parser = rollout_arguments(__doc__)
    parser.add_argument("--from-rollouts", action="store_true", help="join with a version that others have")
    given = parser.parse_args()
    Parent()
    torch.set_num_threads(1)
    policy = Policy(given.seed)  # other weights than the trainer's, until the first replicate
    with (
        EventLog(given.events, given.replica) as log,
        Outbox(given.samples, timeout_s=PATIENCE_S) as outbox,
        ShardedWeights(policy, replica=given.replica, server=given.server, reliable=False) as weights,
    ):
        rollout = Rollout(given.replica, weights, OwnPolicy(policy, given.seed), log, given.seed)

        def choose() -> int | str:
            if not given.from_rollouts:
                return "latest"
            return from_rollouts(tensorhub.connect(given.server).status(model=MODEL), given.replica)

        rollout.join(choose)
        work(rollout, outbox, updates=not given.no_updates)


if __name__ == "__main__":
    main()
