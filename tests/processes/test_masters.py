"""A trainer with float32 masters and rollouts with bfloat16, in processes; the trainer dies and is refilled.

While rollouts read, the masters are NaN: whoever took a byte of them would see it.
"""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

import tensorhub

from .script import run

pytestmark = pytest.mark.processes

SIZE = 6 << 20  # 24 MiB of masters

CONTENT = f"""
import signal, torch
def content(version):
    made = torch.Generator().manual_seed(version)
    embed, head = (torch.randn({SIZE} // 2, generator=made) for _ in range(2))
    return {{"embed": embed * version, "head": head}}

def join(replica, tensors, **options):
    weights = tensorhub.open("m", replica=replica, server=address, timeout=30, call_timeout=60)
    weights.register(tensors, **options)
    return weights

def is_widened(masters, version):
    return all(torch.equal(masters[name], each.bfloat16().float()) for name, each in content(version).items())
"""

TRAINER = (
    CONTENT
    + """
masters = {name: torch.zeros_like(each) for name, each in content(0).items()}
trainer = join("trainer", masters, dtype="bfloat16")
for version in range(1, 7):
    if version > 1:
        trainer.wait_held(version - 1, 1.0)
    with trainer.mutating(version=version):
        for name, each in content(version).items():
            masters[name].copy_(each)
    for master in masters.values():
        master.fill_(float("nan"))
trainer.wait_held(6, 1.0)
say(trained=version)
os.kill(os.getpid(), signal.SIGKILL)
"""
)

ROLLOUT = (
    CONTENT
    + """
targets = {name: torch.zeros_like(each, dtype=torch.bfloat16) for name, each in content(0).items()}
rollout = join(sys.argv[2], targets)
version, seen, wrong = rollout.replicate(), [], []
while True:
    seen.append(version)
    wrong += [name for name, each in content(version).items() if not torch.equal(targets[name], each.bfloat16())]
    if version >= 7:
        break
    version = rollout.update(rollout.wait_for(version + 1, timeout=60))
say(seen=seen, wrong=wrong)
"""
)

AGAIN = (
    CONTENT
    + """
masters = {name: torch.full_like(each, float("nan")) for name, each in content(0).items()}
trainer = join("trainer", masters, dtype={"embed": torch.bfloat16, "head": torch.bfloat16})
say(refilled=trainer.replicate("latest"), is_right=is_widened(masters, 6))
with trainer.mutating(version=7):
    for name, each in content(7).items():
        masters[name].copy_(each)
trainer.wait_held(7, 1.0)
"""
)


def test_rollouts_see_what_was_cast_and_a_trainer_that_died_is_refilled_by_widening():
    with tensorhub.serve(lease_s=2, report_s=0.2) as server, ThreadPoolExecutor() as pool:
        rollouts = [pool.submit(run, ROLLOUT, server.address, f"rollout-{i}") for i in range(2)]
        trained = pool.submit(run, TRAINER, server.address).result()
        assert trained.code == -signal.SIGKILL, trained.log[-4000:]
        again = run(AGAIN, server.address).only()
        assert again == {"refilled": 6, "is_right": True}
        for rollout in rollouts:
            found = rollout.result().only()
            assert found["wrong"] == []
            assert found["seen"][-1] == 7
            assert found["seen"] == sorted(set(found["seen"]))
