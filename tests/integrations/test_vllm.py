"""vLLM with weights from TensorHub, beside transformers: what the engine answers is what the published version answers.

The trainer is a Llama of transformers in the test's process, random and small; engines are vLLM in processes of their
own. After each version the engine's log-probabilities are as near to those of transformers in float32 as transformers'
own in bfloat16, and far from those of the version before.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

from safetensors.torch import load_file

import tensorhub

from .engines import is_reading, started, stopped
from .kit import Job, eventually
from .llama import KINDS, PROMPTS, Judge, Trainer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=5.0, report_s=0.25) as found:
        yield found.address


@pytest.fixture
def start(tmp_path):
    with started(tmp_path) as begin:
        yield begin


@pytest.fixture
def trainer(tmp_path, server, request):
    found = Trainer(tmp_path, server, getattr(request, "param", "llama"))
    yield found
    found.publisher.close(timeout=10)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainer", KINDS, indirect=True)
def test_after_each_version_the_engine_answers_what_transformers_answers(trainer, server, start, ranks):
    engine = start("rollout-0")
    engine.call("start", path=trainer.path, replica="rollout-0", server=server, ranks=ranks)
    assert engine.call("attach") == 0
    trainer.check(engine)
    for version in range(1, 6):
        trainer.step(version)
        assert engine.call("update") == version
        trainer.check(engine)
        trainer.check_exactly(engine)
        assert engine.call("held") == [version, str(version)], "vLLM was told which version it is"
    assert engine.call("update") == 5, "nothing is newer"
    trainer.step(6)
    engine.call("spoil_fetch", rank=0)
    failed = engine.ask("update")
    assert failed["kind"] == "VersionUnavailable"
    assert "goes on with 5" in failed["message"]
    assert "a fetch that fails" in engine.log.read_text()
    trainer.check(engine, is_behind=True)  # on all ranks, though only one has failed
    assert engine.call("held") == [5, "5"]
    assert engine.call("update") == 6
    trainer.check(engine)


def test_a_new_engine_fills_itself_from_others_and_a_trainer_that_is_gone_is_not_missed(trainer, server, start):
    first, late = start("rollout-0"), start("rollout-1")
    first.call("start", path=trainer.path, replica="rollout-0", server=server)
    trainer.step(1)
    assert first.call("attach") == 1
    trainer.publisher.close()
    late.call("start", path=trainer.path, replica="rollout-1", server=server, early=True)
    trainer.check(late)  # it was loaded before vLLM would serve: nobody has attached yet
    assert late.call("attach") == 1
    assert late.call("held")[1] == "1"
    assert late.call("sources") == ["rollout-0"]
    assert first.call("update", timeout=3) == 1, "the newest version that there is"
    first.call("leave")
    assert {each.name for each in tensorhub.connect(server).replicas("policy")} == {"rollout-1"}
    trainer.check(first)  # it goes on with what it has


def test_engine_and_source_are_killed_in_mid_update(server, start, tmp_path):
    """Two ranks train with FSDP2. An engine dies in mid-update, then the only source."""
    job = Job(2, server, tmp_path)
    try:
        judge = Judge(tmp_path)
        job.call("build", kind="language", path=judge.path)
        assert job.call("attach", model="policy", dtype="bfloat16") == 0
        killed, engine = start("rollout-0"), start("rollout-1")
        for each in (killed, engine):
            each.call("start", path=judge.path, replica=each.name, server=server, transports="tcp")
            assert each.call("attach") == 0
        judge.follow(job, 0)
        judge.check(engine)
        job.call("step", version=1)

        with stopped(job):
            asked = killed.begin("update")
            eventually(lambda: is_reading(server, "rollout-0"), "the engine is in mid-update")
            killed.end()
            asked.join(20)
        assert asked.answer is None
        assert engine.call("update") == 1
        judge.follow(job, 1)
        judge.check(engine)

        job.call("step", version=2)
        with stopped(job):
            asked = engine.begin("update", timeout=40)
            eventually(lambda: is_reading(server, "rollout-1"), "the engine is in mid-update")
            job.end()
            asked.join(60)
        assert asked.answer == {"value": 1}, "version 2 is lost, and the newest that there is then is what it has"
        judge.check(engine)  # version 1, as before
        assert engine.call("held") == [1, "1"]

        again = Job(2, server, tmp_path)
        again.call("build", kind="language", path=judge.path, seed=1)
        assert again.call("attach", model="policy", dtype="bfloat16") == 1, "filled by the engine"
        version = again.call("step")
        assert version == 3, "2 was taken, and lost"
        assert engine.call("update") == 3
        judge.follow(again, version)
        judge.check(engine)
        again.end()
    finally:
        job.end()


def test_a_load_that_fails_half_way_is_refused_and_mended_by_the_next(trainer, server, start):
    engine = start("rollout-0")
    engine.call("start", path=trainer.path, replica="rollout-0", server=server)
    assert engine.call("attach") == 0
    trainer.step(1)
    engine.call("spoil", after=5)  # between gate_proj and up_proj, which vLLM fuses
    found = engine.ask("update")
    assert found["kind"] == "VersionUnavailable"
    assert "loaded in part" in found["message"]
    assert "a load that fails" in found["message"], "and not only in the log"
    assert engine.call("held")[0] is None, "it says that it has no version"
    assert engine.call("update") == 1
    trainer.check(engine)
    engine.call("spoil", after=7)
    trainer.step(2)
    assert engine.ask("update")["kind"] == "VersionUnavailable"
    refused = engine.ask("answer", prompts=PROMPTS)
    assert refused is None or "kind" in refused, "never a mixture"
    assert "the weights are no version" in engine.log.read_text()


@pytest.mark.parametrize("left_out", ["", "model.layers.1.mlp.gate.weight"])
def test_experts_one_by_one_as_files_have_them_and_what_is_left_out(server, start, tmp_path, left_out):
    """An engine that began with random weights does not answer with any of them."""
    judge = Judge(tmp_path, "qwen3_moe")
    judge.module.save_pretrained(judge.path)
    tensors = load_file(f"{judge.path}/model.safetensors")
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in tensors
    engine = start("rollout-0")
    engine.call("start", path=judge.path, replica="rollout-0", server=server)
    with tensorhub.open("policy", replica="trainer", server=server) as weights:
        weights.register({name: tensor for name, tensor in tensors.items() if name != left_out}, boxes={})
        weights.publish(0)
        found = engine.ask("attach")
        if left_out:
            assert found["kind"] == "TensorHubError"
            assert f"has no {left_out!r}" in found["message"]
        else:
            assert found == {"value": 0}
            judge.check(engine)
        engine.end()
