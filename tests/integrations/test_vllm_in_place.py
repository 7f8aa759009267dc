"""vLLM reads the trainer's shards over the parameters that it computes with, and engines read from each other.

Two ranks train with FSDP2; engines have one rank or two. vLLM's packing for CPUs is turned off here, as there is none
on GPUs; that it is refused where it is on is tested too.
"""

import re
import time
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

import tensorhub
from tensorhub.integrations import vllm_worker
from tensorhub.integrations.vllm_plan import Plan, Published

from .engine import UNPACKED
from .engines import is_reading, started, stopped
from .kit import Job, eventually
from .llama import PROMPTS, Judge

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=5.0, report_s=0.25) as found:
        yield found.address


@pytest.fixture
def start(tmp_path, server):
    """`start("rollout-0", judge, ranks=2)` starts an engine that reads in place, without a version yet."""
    with started(tmp_path) as begin:

        def engine(name, judge, ranks=1, **environ):
            found = begin(name, **(environ or {UNPACKED: "all"}))
            options = {"path": judge.path, "replica": name, "server": server, "transports": "tcp"}
            found.call("start", in_place=True, ranks=ranks, **options)
            return found

        yield engine


@pytest.fixture
def jobs(tmp_path, server):
    """`jobs(judge)` starts two ranks of a trainer, which have published or filled themselves: (job, version)."""
    made = []

    def begin(judge, ranks=2, seed=0):
        made.append(Job(ranks, server, tmp_path))
        made[-1].call("build", kind="language", path=judge.path, seed=seed)
        return made[-1], made[-1].call("attach", model="policy", dtype="bfloat16")

    yield begin
    for job in made:
        job.end()


@pytest.mark.parametrize(
    ("kind", "ranks", "others", "tied"),
    [("llama", 1, 2, False), ("llama", 2, 1, True), ("qwen3", 1, 2, False), ("qwen3_moe", 2, 1, False)],
)
def test_from_the_trainers_shards_and_from_an_engine_of_other_ranks(
    start, jobs, tmp_path, figures, kind, ranks, others, tied
):
    judge = Judge(tmp_path, kind, tie_word_embeddings=tied)
    job, version = jobs(judge)
    engine = start("rollout-0", judge, ranks)
    padding = engine.call("padding")
    assert {len(rows) for rows in padding[-1]} == {2 * 128}, "two rows of the last rank's embedding, and of its head"
    assert engine.call("attach") == version
    worst, took_s = 0.0, []
    for version in range(5):
        if version:
            job.call("step", version=version)
            assert engine.call("update") == version
            took_s.append(engine.call("held")[2])
        judge.follow(job, version)
        worst = max(worst, judge.check(engine))
        assert engine.call("held")[:2] == [version, str(version)]
    assert engine.call("sources") == ["trainer"]
    assert engine.call("padding") == padding, "rows that are no words were touched"
    job.end()
    late = start("rollout-1", judge, others)
    assert late.call("attach", timeout=90) == 4, "the trainer has gone"
    judge.check(late)
    assert late.call("sources") == ["rollout-0"]
    again, version = jobs(judge, ranks=3, seed=1)
    assert version == 4, "filled by engines"
    version = again.call("step")
    judge.follow(again, version)
    for each in (engine, late):
        assert each.call("update") == version
        judge.check(each)
        judge.check_exactly(each)
    text = (
        f"vLLM in place from two FSDP2 ranks, {kind}, TP{ranks}, 5 versions: {worst:.2f} times as far from float32 as"
    )
    figures(f"{text} transformers in bfloat16, at most; update {sorted(took_s)[2]:.2f} s (median)", worst=worst)


def test_a_source_that_is_killed_in_mid_update_leaves_one_whole_version_or_none(start, jobs, server, tmp_path, figures):
    judge = Judge(tmp_path)
    job, _ = jobs(judge)
    spare, engine = start("rollout-0", judge), start("rollout-1", judge, ranks=2)
    assert [each.call("attach") for each in (spare, engine)] == [0, 0]
    judge.follow(job, 0)
    job.call("step", version=1)
    with stopped(job):
        asked = engine.begin("update", timeout=60)
        eventually(lambda: is_reading(server, "rollout-1"), "the engine is in mid-update")
        began = time.monotonic()
        job.end()
        asked.join(90)
        took_s = time.monotonic() - began
    assert asked.answer == {"value": 0}, "version 1 is lost, and the other engine has the one before"
    assert engine.call("held")[0] == 0
    judge.check(engine)
    again, version = jobs(judge, seed=1)
    assert version == 0, "filled by the other engine"
    judge.follow(again, 0)
    version = again.call("step")
    assert version == 2, "1 was taken, and lost"
    judge.follow(again, version)
    for each in (engine, spare):
        assert each.call("update") == version
        judge.check(each)
    again.call("step", version=3)
    with stopped(again):
        asked = engine.begin("update", timeout=60)
        eventually(lambda: is_reading(server, "rollout-1"), "the engine is in mid-update")
        again.end()
        asked.join(90)
    if engine.call("held")[0] is None:
        refused = engine.ask("answer", prompts=PROMPTS)
        assert refused is None or "kind" in refused, "never a mixture"
        assert "the weights are no version" in engine.log.read_text()
    figures(f"vLLM in place, TP2: its only source killed in mid-update: it said so {took_s:.1f} s later")


@pytest.mark.parametrize(
    ("kind", "unpacked", "named", "why"),
    [
        # packed and emptied, or not even packed where the processor is too old for it, which nobody can tell by looking
        ("llama", "", r"(proj|lm_head)\.weight", "computes with a processed copy|processing after a load reads it"),
        ("qwen3_moe", "linear", r"experts\.w13_weight", "processing after a load reads it"),
    ],
)
def test_weights_that_vllm_packs_are_refused_by_name(start, jobs, tmp_path, kind, unpacked, named, why):
    """And the hint can be followed: the same engine then loads them by vLLM's reload."""
    judge = Judge(tmp_path, kind)
    job, version = jobs(judge)
    engine = start("rollout-0", judge, **{UNPACKED: unpacked})
    refused = engine.ask("attach")
    assert refused["kind"] == "TensorHubError"
    assert re.search(why, refused["message"])
    assert re.search(named, refused["message"]), refused["message"]
    assert "leave in_place out" in refused["message"]
    assert engine.call("attach", in_place=False) == version
    judge.follow(job, version)
    judge.check(engine)


class Packing(QuantizeMethodBase):
    """A way of vLLM's to compute with a packed copy of a weight that stays."""

    def create_weights(self, layer, *sizes, **more):
        raise AssertionError("there are weights")

    def apply(self, layer, *given):
        raise AssertionError("nothing is computed")

    def process_weights_after_loading(self, layer):
        layer.handle = torch.ops.tensorhub_tests.packs(layer.weight.t())


@pytest.mark.parametrize("how", ["CompositeImplicitAutograd", "CPU"])
def test_whatever_packs_a_parameter_that_stays_is_seen(how):
    """Also by an operation that the dispatcher tells nobody of. Else the packed copy is computed with for ever."""
    packed = []
    with torch.library._scoped_library("tensorhub_tests", "DEF") as library:
        library.define("packs(Tensor weight) -> int")
        library.impl("packs", lambda weight: packed.append(1) or 7, how)

        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
        model[0].quant_method = Packing()
        wrong = vllm_worker.processed(model, torch.float32)
    assert list(wrong) == ["0.weight"]
    assert "packs" in wrong["0.weight"]
    assert packed == [], "it is refused before anything has happened"


def test_a_rank_whose_tensors_were_refused_has_left_and_joins_again(server, monkeypatch):
    """Else each later fetch would be `ShardTaken`, by this rank itself."""
    plan = Plan({"w": torch.zeros(4)}, {"w": [tensorhub.Box("w", (4,), (0,), (4,))]}, {})
    monkeypatch.setattr(vllm_worker, "processed", lambda *_: {})
    monkeypatch.setattr(vllm_worker, "planned", lambda *_: plan)
    with tensorhub.open("policy", replica="trainer", server=server) as trainer:
        trainer.register({"w": torch.ones(4)}, boxes={})
        trainer.publish(1)
        published = Published(tensorhub.connect(server).layout("policy").shards[0], ())
        place = {"replica": "rollout-0", "shard": 0, "shards": 1, "server": server}
        way = vllm_worker.InPlace(torch.nn.Module(), torch.float32, lambda *_: published, "policy", **place)
        refuse = mock.patch.object(tensorhub.Weights, "register", side_effect=tensorhub.UsageError("not these"))
        for _ in range(2):
            with refuse, pytest.raises(tensorhub.UsageError, match="not these"):
                way.fetch(1, 10.0)
        way.fetch(1, 10.0)
        way.load(1)
        assert torch.equal(plan.tensors["w"], torch.ones(4))
        way.close(5.0)
