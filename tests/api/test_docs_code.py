"""Code of docs/ runs: each fragment in the story that its page tells, with the names that it takes for granted."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorhub

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    block
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    for block in re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]
WITH_ENGINES = {  # tests/integrations runs these calls with the real engines: make test-engines
    "tensorhub_vllm.attach(",
    "llm.sleep(level=2)",
    "PublishingCallback(",
    "WeightTransfer(",
    "open_in_actor(",
    "tensorhub_sglang.wanted(",
    "TensorHubTransport(",
}
A_FORM = "boxes={...}"  # it says what stands where
MARKS = {  # what only that fragment has
    "first trainer": "range(1, 1000)",
    "first rollout": "while True",
    "trainer": 'trainer", shard=dist.get_rank(), shards=dist.get_world_size())\nweights.register(model',
    "engine": "class WeightUpdater",
    "beside generation": "weights.begin_update(",
    "load": "tensorhub.load(",
    "trainer again": "following =",
    "masters": "lm_head.weight",
    "layouts": "fsdp_model",
    "boxes": "def boxes_of_qkv",
    "fsdp": "for batch in batches",
    "whole": "policy = Whole(",
    "together": "policy+draft",
    "set": "open_set(",
    "group": "open_group(",
}


def told(name: str) -> str:
    """The fragment of that name."""
    (found,) = [block for block in BLOCKS if MARKS[name] in block]
    return found


@pytest.fixture
def run(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run(name, **names)` runs a fragment that finds this server, and returns the names that it has then."""
    monkeypatch.setenv("TENSORHUB_SERVER", server.address)

    def run_it(name: str, **names: Any) -> dict[str, Any]:
        names = {"tensorhub": tensorhub, "__name__": "docs", **names}
        exec(compile(told(name).replace("head:7450", server.address), f"<docs: {name}>", "exec"), names)
        return names

    return run_it


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Any]:
    """A trainer of one rank: `torch.distributed` over gloo."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def trainers_names(model: Any) -> dict[str, Any]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, 4)
    return {
        "model": model,
        "optimizer": optimizer,
        "loss": lambda module, given: module(given).sum(),
        "batch": batch,
        "batches": [batch] * 3,
        "steps": 3,
    }


def test_a_trainer_and_an_engine_and_the_trainer_again(run: Any, ranks: Any) -> None:
    import torch

    policy, engine, loaded = (torch.nn.Linear(4, 2) for _ in range(3))
    names = run("trainer", **trainers_names(policy))
    with names["weights"]:
        updater = run("engine")["WeightUpdater"](engine, "rollout-0", 0, 1)
        assert updater.update() == 2
        assert torch.equal(engine.weight, policy.weight)
        assert run("beside generation", weights=updater.weights)["version"] == 2
        run("load", model=loaded)
        assert torch.equal(loaded.weight, policy.weight)
    again = {name: torch.zeros_like(tensor) for name, tensor in policy.state_dict().items()}
    names = run("trainer again", tensors=again, steps=5, load_checkpoint=lambda into: pytest.fail("it has a source"))
    assert names["version"] == 4
    assert torch.equal(again["weight"], policy.weight)
    updater.weights.close(timeout=3)


def test_masters_and_layouts(run: Any, ranks: Any) -> None:
    import torch

    policy, engine = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).bfloat16()
    with tensorhub.open("masters", replica="trainer") as weights:
        run("masters", weights=weights, model=policy)
        weights.publish(0)
    with tensorhub.open("policy", replica="first") as first:  # what the engine of the page waits for
        first.register(policy, boxes={}, dtype="bfloat16")
        first.publish(1)
        names = run("layouts", dist=ranks, fsdp_model=torch.nn.Linear(4, 2), engine_model=engine)
        assert torch.equal(engine.weight, policy.weight.bfloat16())
        names["engine"].close(timeout=3), names["trainer"].close(timeout=3)
    boxes = run("boxes")["boxes_of_qkv"]("layers.0", 1, 2, hidden=8, q=8, kv=4)
    assert [box.name for box in boxes["layers.0.qkv_proj.weight"]] == [f"layers.0.{each}_proj.weight" for each in "qkv"]


def test_fsdp_and_whole_tensors(run: Any, ranks: Any) -> None:
    import torch

    policy, engine = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    code = told("fsdp")
    assert code.rstrip().splitlines()[-1].startswith("publisher.close()")
    before, close = code[: code.index("publisher.close()")], "publisher.close()"
    names = trainers_names(policy)
    address = os.environ["TENSORHUB_SERVER"]
    exec(before.replace("head:7450", address), names)
    read = run("whole", engine_model=engine)
    assert torch.equal(engine.weight.bfloat16(), policy.weight.bfloat16())
    read["policy"].close(timeout=3)
    exec(close, names)


def test_several_models_and_several_shards(run: Any) -> None:
    def tensors(value: float) -> dict[str, Any]:
        return {"w": np.full(8, value, np.float32)}

    opened = [run("together", target=tensors(0), draft=tensors(0))["weights"]]
    opened += [tensorhub.open(model, replica="trainer") for model in ("target", "draft")]
    for weights in opened[1:]:
        weights.register(tensors(1))
        weights.publish(1)
    target, draft = tensors(0), tensors(0)
    opened.append(run("set", target_model=target, draft_model=draft)["rollout"])
    assert opened[-1].version == 1
    assert (target["w"] == draft["w"]).all()
    trainer = tensorhub.open_group("policy", replica="trainer", shards=4)
    trainer.register([tensors(at) for at in range(4)])
    trainer.publish(1)
    shards = [tensors(9) for _ in range(4)]
    opened += [trainer, run("group", shards=shards)["group"]]
    assert [shard["w"][0] for shard in shards] == [0, 1, 2, 3]
    for weights in reversed(opened):
        weights.close(timeout=3)


@pytest.mark.long
@pytest.mark.processes
def test_the_first_two_programs(server: Any, tmp_path: Path) -> None:
    """A rollout prints the trainer's second version."""
    environ = {**os.environ, "TENSORHUB_SERVER": server.address, "PYTHONUNBUFFERED": "1"}
    programs = []
    for name in ("first trainer", "first rollout"):
        path = tmp_path / f"{name}.py"
        path.write_text(told(name), encoding="utf-8")
        command = [sys.executable, str(path), "rollout-0"]
        programs.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    try:
        output, deadline = programs[1].stdout, time.monotonic() + 60
        assert output is not None
        seen = ""
        while "version 2 is 2.0" not in seen and time.monotonic() < deadline:
            if select.select([output], [], [], 1.0)[0]:
                seen = output.readline()
        assert "version 2 is 2.0, from {'trainer'" in seen
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_no_fragment_is_left_out() -> None:
    """A new fragment joins a story above, or says which engine it needs."""
    marks = {*MARKS.values(), *WITH_ENGINES, A_FORM}
    assert [block for block in BLOCKS if not any(mark in block for mark in marks)] == []
    assert [mark for mark in marks if not any(mark in block for block in BLOCKS)] == []
