"""The trainer process: learns from the rollouts' samples and publishes the policy after every step.

While the gradient is computed the weights stay published: nothing changes them. Only `optimizer.step()` does, so only
that is inside `mutating`, which waits until nobody reads the old version and then publishes the new one.

Before one step it waits until the director lets it go on, so that whoever joins late finds a training to join, however
slow the machine is. Told to leave by the end of its standard input, it serves the last version until then.
"""

import argparse
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from . import grpo
from .events import TRAINER, Ended, Published, Trained
from .logs import EventLog, now
from .parent import Parent
from .policy import Policy, fingerprint
from .samples import Batch, Inbox
from .sharded import ShardedWeights

BATCHES = 2  # in a step: 32 prompts of 16 answers
MAX_GRADIENT = 1.0
PATIENCE_S = 120.0  # for samples


def train(server: str, inbox: Inbox, log: EventLog, parent: Parent, *, steps: int, hold_at: int, seed: int) -> None:
    """Publish the untrained policy as version 0, then one version after each step; returns when told to leave."""
    policy = Policy(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=0.0)

    with ShardedWeights(policy, replica=TRAINER, server=server, reliable=True) as weights:
        weights.publish(0)
        tell_published(log, weights, 0, fingerprint(policy))

        for version in range(1, steps + 1):
            if version == hold_at:
                parent.wait_told()
            batches = [take(inbox) for _ in range(BATCHES)]
            began = time.monotonic()
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(policy, batches))
            torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRADIENT)
            for group in optimizer.param_groups:
                group["lr"] = grpo.learning_rate(version - 1, steps)
            computed_s = time.monotonic() - began

            with weights.mutating(version=version):
                began = time.monotonic()
                optimizer.step()
                computed_s += time.monotonic() - began
                sha256 = fingerprint(policy)

            tell_published(log, weights, version, sha256)
            tell_trained(log, version, batches, computed_s)

        inbox.end()
        parent.expect_end()
        log.write(Ended(time=now(), process=TRAINER))
        parent.wait_end()  # rollouts still fetch the last version


def take(inbox: Inbox) -> Batch:
    """The next batch; ends the process if none comes."""
    try:
        return inbox.take(PATIENCE_S)
    except queue.Empty:
        sys.exit(f"no rollout has sent samples for {PATIENCE_S:.0f} s")


def loss_of(policy: Callable[[torch.Tensor], torch.Tensor], batches: list[Batch]) -> torch.Tensor:
    """The objective over some batches."""
    columns = zip(*(batch.arrays() for batch in batches), strict=True)
    tokens, old, rewards = (torch.from_numpy(np.concatenate(column)) for column in columns)
    tokens = tokens.long()
    new = grpo.log_probabilities(policy(tokens), tokens)
    return grpo.loss(new, old, grpo.advantages(rewards.view(-1, grpo.GROUP)).flatten())


def tell_published(log: EventLog, weights: ShardedWeights, version: int, sha256: str) -> None:
    """Write down what was published."""
    log.write(Published(time=now(), process=TRAINER, version=version, sha256=sha256, stall_s=weights.stall_s))


def tell_trained(log: EventLog, version: int, batches: list[Batch], computed_s: float) -> None:
    """Write down what the step learned from, and how long it took."""
    reward = float(np.mean([batch.arrays()[2].mean() for batch in batches]))
    lag = float(np.mean([version - 1 - batch.version for batch in batches]))
    log.write(Trained(time=now(), process=TRAINER, version=version, reward=reward, lag=lag, computed_s=computed_s))


def main() -> None:
    """`python -m bench.demo.trainer`"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--samples", required=True, help="address to listen on for samples")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hold-at", type=int, required=True, help="the step before which it waits to be let go on")
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    parent = Parent()
    torch.set_num_threads(1)
    with EventLog(given.events, TRAINER) as log:
        inbox = Inbox(given.samples)
        train(given.server, inbox, log, parent, steps=given.steps, hold_at=given.hold_at, seed=given.seed)


if __name__ == "__main__":
    main()
