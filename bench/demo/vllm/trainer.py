"""One rank of the trainer: FSDP2 over gloo, each rank with samples of its own, a version after every step.

Rank 0 takes the samples, and writes down what happens. It hashes and keeps what a step has made before anybody can read
it. A trainer that was started again is filled from the rollouts (`fsdp.attach`) and goes on with the version they hold;
only its optimizer starts anew, and warms up.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tensorhub.integrations import fsdp

from .. import grpo
from ..events import TRAINER, Ended, Made, Published, Refilled
from ..logs import EventLog, now
from ..parent import Parent
from ..samples import Batch, Inbox
from ..sharded import MODEL
from ..trainer import MAX_GRADIENT, loss_of, take, tell_trained
from .model import PUBLISHED, build, fingerprint, rounded

RATE = 10 / 7  # of the plain demo's learning rate: found to suit this policy


class Versions:
    """What rank 0 tells of each version: its hash, and its tensors in a file, for the judge."""

    def __init__(self, log: EventLog | None, folder: Path) -> None:
        self._log = log
        self._folder = folder

    def tell_made(self, version: int, whole: dict[str, torch.Tensor]) -> str:
        """Before anybody can read it."""
        sha256 = fingerprint(whole)
        if self._log is not None:
            save_file(whole, self._folder / f"{version}.safetensors")
            self._log.write(Made(time=now(), process=TRAINER, version=version, sha256=sha256))
        return sha256


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the module is, gathered by torch and not by TensorHub, and rounded as it is published. On all ranks."""
    gathered = {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in module.state_dict().items()
    }
    return rounded(gathered)


def sharded(policy: Path, seed: int) -> torch.nn.Module:
    """The untrained policy, cut among the ranks, block by block."""
    module: torch.nn.Module = build(policy, seed)
    for layer in module.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(module)
    return module


def share(inbox: Inbox | None) -> list[Batch]:
    """A batch for each rank, which all of them know; this rank learns from its own."""
    batches: list[Batch | None] = [None] * dist.get_world_size()
    if inbox is not None:
        batches = [take(inbox) for _ in batches]
    dist.broadcast_object_list(batches, src=0)
    return [batch for batch in batches if batch is not None]


class Training:
    """One life of the trainer on one rank."""

    def __init__(self, module: torch.nn.Module, publisher: fsdp.Publisher, versions: Versions, steps: int) -> None:
        self._module = module
        self._publisher = publisher
        self._versions = versions
        self._steps = steps
        self._optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        self._taken = 0  # steps in this life
        self.stall_s = 0.0
        self.computed_s = 0.0

    def step(self, batches: list[Batch]) -> tuple[int, str]:
        """Learn from a batch, and publish what came out. Returns its number and its hash."""
        started = time.monotonic()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss_of(self._logits, [batches[dist.get_rank()]]))
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), MAX_GRADIENT)
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * self._rate()

        began = time.monotonic()
        with self._publisher.step() as version:
            withdrawn = time.monotonic()
            self._optimizer.step()
            stepped = time.monotonic()
            sha256 = self._versions.tell_made(version, whole(self._module))
            made = time.monotonic()
        self.stall_s = time.monotonic() - made + withdrawn - began
        self.computed_s = began - started + stepped - withdrawn
        self._taken += 1
        return version, sha256

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._module(input_ids=tokens, use_cache=False).logits
        return logits

    def _rate(self) -> float:
        warm_up = grpo.LEARNING_RATE * (self._taken + 1) / grpo.WARM_UP_STEPS
        return min(warm_up, grpo.learning_rate(self._publisher.next_version - 1, self._steps))


def train(given: argparse.Namespace, inbox: Inbox | None, log: EventLog | None, parent: Parent) -> None:
    """Publish the untrained policy, or go on where the rollouts are; returns when told to leave."""
    module = sharded(given.policy, given.seed)
    versions = Versions(log, given.versions)
    sha256 = "" if given.again else versions.tell_made(0, whole(module))
    began = time.monotonic()
    with fsdp.attach(module, MODEL, replica=TRAINER, server=given.server, dtype=PUBLISHED) as publisher:
        assert publisher.version is not None
        tell_begun(log, publisher, fingerprint(whole(module)) if given.again else sha256, given.again, began)
        training = Training(module, publisher, versions, given.steps)
        while publisher.version < given.steps:
            if publisher.next_version == given.hold_at and inbox is not None:
                parent.wait_told()
            batches = share(inbox)
            version, sha256 = training.step(batches)
            if log is not None:
                stall_s = training.stall_s
                log.write(Published(time=now(), process=TRAINER, version=version, sha256=sha256, stall_s=stall_s))
                tell_trained(log, version, batches, training.computed_s)
        parent.expect_end()
        dist.barrier()
        if log is not None and inbox is not None:
            inbox.end()
            log.write(Ended(time=now(), process=TRAINER))
        parent.wait_end()  # rollouts still fetch the last version


def tell_begun(log: EventLog | None, publisher: fsdp.Publisher, sha256: str, again: bool, began: float) -> None:
    """Write down where it begins: with what it has published, or with what it found."""
    if log is None or publisher.version is None:
        return
    version = publisher.version
    if again:
        assert publisher.weights is not None
        received = publisher.weights.statistics()["bytes_by_source"]
        assert isinstance(received, dict)
        log.write(Refilled(time=now(), process=TRAINER, version=version, sha256=sha256, bytes_by_source=received))
    else:
        took_s = time.monotonic() - began
        log.write(Published(time=now(), process=TRAINER, version=version, sha256=sha256, stall_s=took_s))


def main() -> None:
    """`python -m bench.demo.vllm.trainer`"""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--meet", required=True, help="address where the ranks find each other")
    parser.add_argument("--server", required=True)
    parser.add_argument("--samples", required=True, help="address on which rank 0 listens for samples")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--policy", type=Path, required=True, help="folder of the model's shape")
    parser.add_argument("--versions", type=Path, required=True, help="folder for what was published")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hold-at", type=int, default=0, help="the step before which it waits to be let go on")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--again", action="store_true", help="not the first trainer: go on where the rollouts are")
    given = parser.parse_args()
    parent = Parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{given.meet}", rank=given.rank, world_size=given.ranks)
    if given.rank == 0:
        with EventLog(given.events, TRAINER) as log:
            train(given, Inbox(given.samples), log, parent)
    else:
        train(given, None, None, parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
