"""How long an update takes, in one run: in place, by vLLM's reload of what was fetched, and vLLM's own from a file.

vLLM's packing for CPUs is turned off for all of them. `TENSORHUB_TEST_MODEL=large` takes a model of some 400 MiB. The
weight-transfer backends that vLLM has itself are asked too: those of 0.32 want a GPU, or packages beside vLLM.
"""

import os
import statistics

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import tensorhub

from .engine import UNPACKED
from .engines import started
from .llama import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

LARGE = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8}
WANTS = {  # what stands in the way of vLLM's own backends here
    "nccl": "Cannot access accelerator device when none is available",
    "sparse_nccl": "Cannot access accelerator device when none is available",
    "nccl_m2n": "`nccl-extensions`",
    "ipc": "Torch not compiled with CUDA enabled",
    "sharded_rdt": "requires distributed_executor_backend='ray'",
    "modelexpress": "requires ModelExpress",
}


def test_what_an_update_takes_beside_vllms_own_ways(tmp_path, figures):
    sizes = LARGE if os.environ.get("TENSORHUB_TEST_MODEL") == "large" else {}
    with tensorhub.serve(lease_s=5.0, report_s=0.25) as server, started(tmp_path) as begin:
        trainer = Trainer(tmp_path, server.address, **sizes)
        ways = {"in place": begin("in-place", **{UNPACKED: "all"}), "by reload": begin("reload", **{UNPACKED: "all"})}
        for how, engine in ways.items():
            options = {"path": trainer.path, "replica": engine.name, "server": server.address}
            engine.call("start", in_place=how == "in place", **options)
            assert engine.call("attach") == 0
        took_s = {**{how: [] for how in ways}, "vLLM's own from a file": []}
        for version in range(1, 6):
            trainer.step(version)
            for how, engine in ways.items():
                assert engine.call("update") == version
                took_s[how].append(engine.call("took"))
            trainer.module.save_pretrained(trainer.path)
            engine.call("load_file", path=trainer.path)
            took_s["vLLM's own from a file"].append(engine.call("took"))
        for engine in ways.values():
            trainer.check(engine)
        found = engine.call("own_backends")
        assert {*found} == {*WANTS}
        for name, why in WANTS.items():
            assert why in found[name], f"{name}: {found[name]}"
        trainer.publisher.close(timeout=10)
    size = sum(each.nbytes for each in trainer.module.state_dict().values()) / 2**20
    medians = {how: [statistics.median(each) for each in zip(*found, strict=True)] for how, found in took_s.items()}
    text = ", ".join(f"{how} {all_s:.3f} s ({load_s:.3f} s)" for how, (all_s, load_s) in medians.items())
    figures(f"vLLM, {size:.0f} MiB, medians of five (and what of it the engine was not there for): {text}")
