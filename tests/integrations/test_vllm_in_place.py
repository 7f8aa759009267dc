"""vLLM reads the trainer's shards over the parameters that it computes with, and engines read from each other.

Two ranks train with FSDP2; engines have one rank or two. vLLM's packing for CPUs is turned off here, as there is none
on GPUs; that it is refused where it is on is tested too.
"""

import re

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")


import tensorhub

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
    for version in range(5):
        if version:
            job.call("step", version=version)
            assert engine.call("update") == version
        judge.follow(job, version)
        judge.check(engine)
        assert engine.call("held") == [version, str(version)]
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


def test_a_source_that_is_killed_in_mid_update_leaves_one_whole_version_or_none(start, jobs, server, tmp_path):
    judge = Judge(tmp_path)
    job, _ = jobs(judge)
    spare, engine = start("rollout-0", judge), start("rollout-1", judge, ranks=2)
    assert [each.call("attach") for each in (spare, engine)] == [0, 0]
    judge.follow(job, 0)
    job.call("step", version=1)
    with stopped(job):
        asked = engine.begin("update", timeout=60)
        eventually(lambda: is_reading(server, "rollout-1"), "the engine is in mid-update")
        job.end()
        asked.join(90)
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
