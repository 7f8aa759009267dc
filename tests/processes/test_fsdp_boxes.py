"""The recipe of docs/layouts.md: a module under FSDP2, uneven on three ranks, in float32, into one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import tensorhub

from .script import run

pytestmark = pytest.mark.processes

MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(37, 50), torch.nn.Linear(50, 20, bias=False))
plain = {name: parameter.detach().clone() for name, parameter in model.state_dict().items()}
"""

TRAINER = (
    MODEL
    + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=3)
mesh = init_device_mesh("cpu", (3,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
weights = tensorhub.open("m", replica="trainer", shard=rank, shards=3, server=address, timeout=30, call_timeout=60)
weights.register(model, boxes={}, dtype="bfloat16")
with weights.mutating(version=1), torch.no_grad():
    for parameter in model.parameters():
        parameter.to_local().mul_(2)
while "engine" not in weights.wait_held(1, 1.0, timeout=60):  # which may have to start yet, and stays until we go
    time.sleep(0.05)
say(version=weights.version)
dist.destroy_process_group()
"""
)

ENGINE = (
    MODEL
    + """
target = {name: torch.zeros_like(each, dtype=torch.bfloat16) for name, each in plain.items()}
weights = tensorhub.open("m", replica="engine", server=address, timeout=30, call_timeout=60)
weights.register(target, boxes={})
version = weights.replicate("latest")
while any(replica.name == "trainer" for replica in tensorhub.connect(address).replicas("m")):
    time.sleep(0.05)
say(version=version, wrong=[n for n, each in plain.items() if not torch.equal(target[n], (2 * each).bfloat16())])
"""
)


def test_fsdp2_with_masters_is_read_by_one_process(tmp_path):
    pytest.importorskip("torch.distributed.fsdp")
    with tensorhub.serve(lease_s=3, report_s=0.2) as server, ThreadPoolExecutor() as pool:
        ranks = [
            pool.submit(run, TRAINER, server.address, str(rank), str(tmp_path / "store"), within_s=180.0)
            for rank in range(3)
        ]
        engine = run(ENGINE, server.address, within_s=180.0).only()
        assert engine == {"version": 1, "wrong": []}
        assert [rank.result().only() for rank in ranks] == [{"version": 1}] * 3
