"""One rank of a training job in a process of its own: commands are JSON lines on stdin, answers JSON lines on stdout.

    {"do": "build", "kind": "fsdp"}    {"do": "attach", "model": "policy"}    {"do": "step", "version": 1}

What was published is told by torch alone: `save` gathers the module with torch's own collectives. Matrices have five
and seven rows, so that three ranks hold uneven shards, and empty ones.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, LocalStateDictConfig, ShardedStateDictConfig, fully_shard
from torch.distributed.fsdp import StateDictType as Kind
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tensorhub
from tensorhub.integrations import fsdp

from .kit import digest_of

GATHERING = ("fsdp1", "fsdp1-part", "fsdp1-original", "fsdp1-inside", "fsdp1-sharded", "fsdp1-local", "zero3")
CPU = torch.device("cpu")
SUBMESHES = ("dp-tp", "two-meshes", "copies-cut")
INSIDE = {"tp": 6, "fsdp-tp": 8} | dict.fromkeys(SUBMESHES, 8)  # cut twice along one dimension: evenly
LATE_S = 4.0  # how long a call takes that waits, longer than ranks wait for each other where it is short


def publish_late(self, version, *, publish=tensorhub.Weights.publish, **options):
    """As `Weights.publish` where readers, or a server that stands still, keep it waiting."""
    threading.Event().wait(LATE_S)
    return publish(self, version, **options)


class Net(torch.nn.Module):
    """Two matrices, one of a single row, a norm and a buffer."""

    def __init__(self, inside=7):
        super().__init__()
        self.up = torch.nn.Linear(4, inside)
        self.down = torch.nn.Linear(inside, 5, bias=False)
        self.norm = torch.nn.LayerNorm(5)
        self.last = torch.nn.Linear(5, 1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, batch):
        return self.last(self.norm(self.down(torch.relu(self.up(batch))))) * self.scale[0]


class Rank:
    """Carries out commands. A method is a command."""

    def build(self, kind="fsdp", seed=0, path=None, inside=None):
        torch.manual_seed(seed)
        self.kind = kind
        self.module = Net(inside or INSIDE.get(kind, 7)) if path is None else self._language(path)
        ranks = dist.get_world_size()
        if kind == "fsdp":
            mesh = init_device_mesh("cpu", (ranks,))
            fully_shard(self.module.up, mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        elif kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))
            fully_shard(self.module, mesh=mesh)
        elif kind == "language":
            fully_shard(self.module)
        elif kind == "tp":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self.module, init_device_mesh("cpu", (ranks,)), plan)
        elif kind == "fsdp-tp":
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("rows", "parallel"))
            parallelize_module(self.module, mesh["parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(self.module, mesh=mesh["rows"])
        elif kind in SUBMESHES:
            self._on_submeshes(init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("rows", "parallel")))
        elif kind == "stages":  # plain tensors, and each rank has others
            self.module = self.module.up if dist.get_rank() else torch.nn.Sequential(self.module.norm, self.module.last)
        elif kind in GATHERING:
            self._gathering()
        elif kind == "ddp":
            self.module = torch.nn.parallel.DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1 if path is None else 0.2)

    def _on_submeshes(self, mesh):
        """Nothing is cut along the other dimension; or each of two layers along its own; or one, and copies of it."""
        both = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self.module, mesh["parallel"], both if self.kind == "dp-tp" else {"up": ColwiseParallel()})
        if self.kind == "two-meshes":
            fully_shard(self.module.down, mesh=mesh["rows"])
        elif self.kind == "copies-cut":
            placements = (Shard(0), Replicate())
            self.module.down.weight = torch.nn.Parameter(distribute_tensor(self.module.down.weight, mesh, placements))

    def _gathering(self):
        """All of it, or one of its layers, is FSDP1's or ZeRO-3's, or was."""
        if self.kind == "zero3":  # what DeepSpeed makes of a parameter
            for at, parameter in enumerate(self.module.down.parameters()):
                parameter.ds_id, parameter.ds_tensor = at, parameter.detach().flatten()
                parameter.data = torch.empty(0)
            return
        if self.kind == "fsdp1-part":
            self.module.down = FullyShardedDataParallel(self.module.down, device_id=CPU)
            return
        whole = FullyShardedDataParallel(self.module, device_id=CPU, use_orig_params=self.kind == "fsdp1-original")
        self.module = whole.module if self.kind == "fsdp1-inside" else whole
        if self.kind == "fsdp1-sharded":
            FullyShardedDataParallel.set_state_dict_type(whole, Kind.SHARDED_STATE_DICT, ShardedStateDictConfig())
        elif self.kind == "fsdp1-local":
            FullyShardedDataParallel.set_state_dict_type(whole, Kind.LOCAL_STATE_DICT, LocalStateDictConfig())

    def _language(self, path):
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).float()

    def attach(self, model, fails=None, then="register", wait_s=None, **options):
        """The rank `fails` cannot join, or has joined, and then its tensors are refused. `wait_s`: for other ranks."""
        if wait_s is not None:
            fsdp.WAIT_S, fsdp.SLACK_S = wait_s, wait_s
        where = {"open": tensorhub, "register": tensorhub.Weights}[then]
        refuse = mock.patch.object(where, then, side_effect=tensorhub.UsageError("not these"))
        with refuse if fails == dist.get_rank() else nullcontext():
            self.publisher = fsdp.attach(self.module, model, **options)
        return self.publisher.version

    def forward(self):
        """Without a backward: FSDP2 leaves the root's parameters gathered."""
        with torch.no_grad():
            self.module(torch.ones(2, 4))

    def step(self, version=None, fails=None, timeout=None, then="raise"):
        """One step of training. The rank `fails` raises before it or in it, dies, or publishes late."""
        torch.manual_seed(1000 * (version or 77) + (0 if "tp" in self.kind else dist.get_rank()))
        if self.kind == "language":
            tokens = torch.randint(3, self.module.config.vocab_size, (2, 16))
            self.module(input_ids=tokens, labels=tokens).loss.backward()
        else:
            self.module(torch.randn(3, 4)).square().sum().backward()
            self.forward()
        said = {"step": version or self.publisher.next_version}
        fails_here = fails == dist.get_rank()
        if fails_here and then == "said":
            self._fail(then, said)
        late = mock.patch.object(tensorhub.Weights, "publish", publish_late)
        began = time.monotonic()
        try:
            with (
                late if fails_here and then == "late" else nullcontext(),
                self.publisher.step(version, metadata=said, timeout=timeout),
            ):
                if fails_here and then not in ("said", "late"):
                    self._fail(then, said)
                self.optimizer.step()
        finally:
            self.took_s = time.monotonic() - began
        self.optimizer.zero_grad()
        return self.publisher.version

    def step_alone(self):
        """A step without anything that torch does together with other ranks."""
        with self.publisher.step(), torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(2.0)

    def _fail(self, then, said):
        if then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif then in ("say", "said"):
            said["what"] = object()
        elif then == "raise":
            raise ValueError("an optimizer that fails")

    def save(self, path):
        """What torch says that the module is, as one file."""
        whole = self._gathered()
        if dist.get_rank() == 0:
            save_file(whole, path)

    def digest(self):
        """Of what torch says that the module is."""
        return digest_of(self._gathered())

    def _gathered(self):
        found = self.module.state_dict()
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
        return {name.removeprefix("module."): value.detach().clone().contiguous() for name, value in whole.items()}

    def held(self):
        return self.publisher.version

    def close(self):
        self.publisher.close(timeout=20)

    def threads(self):
        """Of this process, as the system counts them."""
        return len(os.listdir("/proc/self/task"))


def main():
    """Until stdin ends."""
    torch.set_num_threads(1)
    place = {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    dist.init_process_group("gloo", init_method=f"file://{os.environ['JOB_STORE']}", **place)  # a port may be taken
    rank = Rank()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"value": getattr(rank, command.pop("do"))(**command)}
        except tensorhub.TensorHubError as error:
            answer = {"code": error.code, "message": str(error), "hint": error.hint}
            answer["took_s"] = getattr(rank, "took_s", None)
        except ValueError as error:
            answer = {"code": "ValueError", "message": str(error), "took_s": getattr(rank, "took_s", None)}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # the group may have lost a rank, and then cannot be taken down in order


if __name__ == "__main__":
    main()
