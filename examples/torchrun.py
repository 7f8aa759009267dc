"""A trainer of several ranks under torchrun, and rollouts that follow it. CPU only; needs torch.

    tensorhub serve --fresh                                                    # in one shell
    torchrun --standalone --nproc-per-node 2 examples/torchrun.py --rollouts 1  # in a second: FSDP2 over gloo
    python examples/torchrun.py --replica rollout-0                             # in a third

The trainer waits until so many rollouts have joined. All end with version STEPS. On several hosts each process needs
`TENSORHUB_SERVER=host:port`; `deploy/slurm/job.sbatch` starts the same program there.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import tensorhub
from tensorhub.integrations import fsdp

MODEL, STEPS = "policy", 20


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1))


def train(rollouts: int) -> None:
    """Each rank holds a part of each tensor, and publishes that part."""
    dist.init_process_group("gloo")
    policy = module()
    for layer in (policy[0], policy[2], policy):
        fully_shard(layer)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)
    with fsdp.attach(policy, MODEL, replica="trainer") as publisher:
        hub = tensorhub.connect()
        while len(hub.replicas(MODEL)) <= rollouts:  # and the trainer itself
            time.sleep(0.5)
        for _ in range(STEPS):
            loss = (policy(torch.ones(8, 1000)) - 1).square().mean()
            loss.backward()
            with publisher.step() as version:  # readers go on elsewhere while the optimizer changes the tensors
                optimizer.step()
            optimizer.zero_grad()
            publisher.weights.wait_held(version, 1.0)  # for show: a real trainer does not wait for each rollout
            if dist.get_rank() == 0:
                print(f"published version {version}, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def roll_out(replica: str) -> None:
    """Whole tensors, read from all ranks of the trainer or from another rollout."""
    policy = module()
    with tensorhub.open(MODEL, replica=replica, reliable=False) as weights:
        weights.register(policy, boxes={})
        version = 0
        while version < STEPS:
            version = weights.update("latest")
            answer = policy(torch.ones(1, 1000)).item()
            print(f"{replica} has version {version}: {answer:.4f}", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--replica", help="run a rollout of this name; else a rank of the trainer")
    arguments.add_argument("--rollouts", type=int, default=1, help="of the trainer: how many it waits for")
    given = arguments.parse_args()
    roll_out(given.replica) if given.replica else train(given.rollouts)
