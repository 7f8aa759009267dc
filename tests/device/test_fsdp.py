"""A module under FSDP2 trains on its device and is read by one process after each step, which runs what it got."""

import socket

import pytest

from processes.script import run

pytestmark = pytest.mark.processes

STORY = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tensorhub.integrations import fsdp

device = sys.argv[2]
kind = torch.device(device).type
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
if kind == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=0, world_size=1)
mesh = init_device_mesh(kind, (1,))

def made():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 500), torch.nn.Linear(500, 64)]
    return torch.nn.Sequential(*layers).to(device)

model, engine = made(), made().to(torch.bfloat16)
for layer in model:
    if not isinstance(layer, torch.nn.ReLU):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
publisher = fsdp.attach(model, "m", replica="trainer", server=address, dtype="bfloat16")
rollout = tensorhub.open("m", replica="rollout", server=address, timeout=30, call_timeout=60)
rollout.register(dict(engine.named_parameters()), boxes={})
inputs = torch.randn(64, 512, device=device)
wrong, losses = [], []
for _ in range(5):
    loss = (model(inputs) - 1).square().mean()
    loss.backward()
    with publisher.step() as version:
        adam.step()
    adam.zero_grad()
    assert rollout.update() == version
    engine(inputs.bfloat16())  # its kernels still run when the next version comes
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter.to_local().bfloat16(), engine.get_parameter(name)):
            wrong.append((version, name))
    losses.append(float(loss))
say(wrong=wrong, has_learned=losses[-1] < losses[0])
rollout.close()
publisher.close()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_each_step_under_fsdp2_is_what_the_rollout_has(device, server):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    found = run(STORY, server.address, device, str(port), prefix=() if device == "cpu" else ("env",)).only()
    assert found == {"wrong": [], "has_learned": True}
