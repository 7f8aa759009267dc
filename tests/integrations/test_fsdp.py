"""FSDP2, tensor parallelism and DDP on real ranks: what is published is what torch says that the module is."""

import pytest
import torch
from safetensors.torch import load_file

import tensorhub
from tensorhub.integrations import fsdp
from tensorhub.integrations.whole import Whole

from .kit import eventually
from .rank import GATHERING

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def check(whole, job, version):
    """A reader of the whole model has what torch gathers from the ranks, to the bit."""
    path = str(job.folder / f"{version}.safetensors")
    job.call("save", path=path)
    assert whole.update(version) == version
    wanted, found = load_file(path), dict(whole)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), f"{name} of version {version}"
    assert whole.metadata.get("step", 0) == version


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("fsdp", 3),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("tp", 3), ("ddp", 3), ("hsdp", 4), ("fsdp-tp", 4))),
    ],
)
def test_what_is_published_is_what_the_ranks_hold(start, server, kind, ranks):
    job = start(ranks)
    job.call("build", kind=kind)
    assert job.call("attach", model="policy") == 0, "a version is there before the first rollout"
    with Whole("policy", replica="rollout-0", server=server) as whole:
        for version in (0, 1, 2, 3):
            if version:
                assert job.call("step", version=version) == version
            check(whole, job, version)
        found = {each.name: each.shards for each in tensorhub.connect(server).replicas("policy")}
        assert found["rollout-0"] == 1, "one worker, however many published"
        job.call("close")
        with Whole("policy", replica="rollout-1", server=server) as late:
            assert late.update("latest") == 3, "the trainer has gone, and a rollout serves"


@pytest.mark.parametrize(
    ("then", "code", "begins"),
    [
        ("raise", "ValueError", True),
        pytest.param("say", "usage", True, marks=pytest.mark.long),
        # the others would wait in the claim, longer than this test may take
        pytest.param("said", "usage", False, marks=pytest.mark.long),
    ],
)
def test_a_rank_raises_in_its_step_or_before_it_and_nothing_is_published(start, server, then, code, begins):
    job = start()
    job.call("build")
    job.call("attach", model="policy")
    with Whole("policy", replica="rollout-0", server=server) as whole:
        check(whole, job, 0)
        found = job.answers("step", version=1, fails=1, then=then)
        assert [each["code"] for each in found] == ["group-incomplete", code, "group-incomplete"]
        assert max(each["took_s"] for each in found) < 5, found
        said = "step(1) failed" if begins else "step(1) could not begin"
        assert said in found[0]["message"]
        assert "another rank raised" in found[0]["message"]
        assert whole.update("latest") == 0
        assert [each["value"] for each in job.answers("held")] == [None if begins else 0] * 3
        newest = tensorhub.connect(server).versions("policy")[0]
        holders = {"rollout-0"} if begins else {"rollout-0", "trainer"}
        assert (newest.version, set(newest.holders)) == (0, holders), "the trainer has withdrawn it, or has it still"
        assert job.call("step", version=1) == 1, "the same number, since it was never published"
        check(whole, job, 1)


@pytest.mark.long
def test_a_number_that_is_taken_is_said_before_any_block_runs(start, server):
    job = start()
    job.call("build")
    job.call("attach", model="policy", version=7)
    with Whole("policy", replica="rollout-0", server=server) as whole:
        whole.update("latest")
        found = job.answers("step", version=7, fails=0)
        assert {each["code"] for each in found} == {"version-conflict"}
        newest = tensorhub.connect(server).versions("policy")[0]
        assert set(newest.holders) == {"rollout-0", "trainer"}, "still published"


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(("fsdp", 3), ("fsdp", 2)), (("tp", 3), ("ddp", 2))])
def test_a_job_that_is_cut_in_another_way_goes_on_from_the_rollouts(start, server, before, after):
    job = start(before[1])
    job.call("build", kind=before[0])
    job.call("attach", model="policy")
    with Whole("policy", replica="rollout-0", server=server) as whole:
        job.call("step", version=1)
        check(whole, job, 1)
        job.end()
        again = start(after[1])
        again.call("build", kind=after[0], seed=1, inside=6 if before[0] == "tp" else None)
        assert again.call("attach", model="policy") == 1, "filled by the rollout"
        check(whole, again, 1)
        for version in (2, 3):
            assert again.call("step") == version
            check(whole, again, version)


@pytest.mark.long
@pytest.mark.parametrize("has_rollout", [True, False])
def test_a_job_that_is_back_at_once_does_not_wait_for_its_former_self(start, server, has_rollout):
    """The server still believes that the killed trainer holds its last version, which nobody else has."""
    job, again = start(2), start(2)  # both have loaded torch
    job.call("build")
    job.call("attach", model="policy")
    again.call("build", seed=1)
    with Whole("policy", replica="rollout-0", server=server) as whole:
        if has_rollout:
            check(whole, job, 0)
        job.call("step", version=1)
        job.end()
        assert again.call("attach", model="policy") == (0 if has_rollout else 2), "filled by the rollout, or published"
        assert again.call("step") == (2 if has_rollout else 3), "1 was published"
        check(whole, again, 2 if has_rollout else 3)


@pytest.mark.long
@pytest.mark.parametrize(("then", "has_other"), [("open", True), ("register", False)])
def test_a_rank_that_is_refused_keeps_nobody_waiting(start, then, has_other):
    """Its siblings would wait for it to fill itself, or to publish, as they do."""
    job = start()
    if has_other:
        first = start(2)
        first.call("build")
        first.call("attach", model="policy", replica="other")
    job.call("build", seed=1)
    found = job.answers("attach", model="policy", fails=1, then=then)
    assert [each["code"] for each in found] == ["group-incomplete", "usage", "group-incomplete"]
    assert "attach() failed: another rank raised" in found[0]["message"]
    assert job.call("attach", model="policy") == 0, "filled by the other one, or published"


def test_a_rank_is_killed_in_its_step_and_the_job_goes_on_from_the_rollouts(start, server):
    job = start()
    job.call("build")
    job.call("attach", model="policy")
    with Whole("policy", replica="rollout-0", server=server) as whole:
        job.call("step", version=1)
        check(whole, job, 1)
        found = job.answers("step", version=2, fails=2, then="die")
        assert found[2] is None
        assert [each["code"] for each in found[:2]] == ["group-incomplete", "group-incomplete"]
        took_s = max(each["took_s"] for each in found[:2])
        assert took_s < 5, found
        job.end()
        assert whole.update("latest") == 1, "a version is whole, or is not there"
        again = start()
        again.call("build", seed=1)
        assert again.call("attach", model="policy") == 1, "filled by the rollout"
        check(whole, again, 1)
        number = again.call("step")
        assert number in (2, 3), "2 was claimed, and is not taken again while a former rank may live"
        check(whole, again, number)


def module(value: float) -> torch.nn.Module:
    found = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.fill_(value)
    return found


def test_it_goes_on_where_the_rollouts_are_and_publishes_no_untrained_weights() -> None:
    first = tensorhub.serve(lease_s=5, report_s=0.2)
    port = int(first.address.rpartition(":")[2])
    held = module(0.0)
    with tensorhub.open("policy", replica="rollout-0", server=first.address) as rollout:
        rollout.register(held, boxes={})
        with fsdp.attach(module(1.0), "policy", server=first.address, version=5):
            rollout.replicate("latest")
        first.close()
        with tensorhub.serve(port=port, lease_s=5, report_s=0.2, fresh=False) as again:
            untrained = module(0.0)
            with fsdp.attach(untrained, "policy", replica="trainer-again", server=again.address) as trainer:
                assert (trainer.version, trainer.next_version) == (5, 6)
                assert all((parameter == 1.0).all() for parameter in untrained.parameters())
                assert rollout.update("latest") == 5
            rollout.close()


@pytest.mark.parametrize("has_older", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_version_that_is_lost_but_for_a_part_of_it_is_passed_over(has_older: bool) -> None:
    """Who holds the part cannot fill a trainer, which was refused: nobody else could have published a newer version."""
    with tensorhub.serve(lease_s=2, report_s=0.2) as server:
        where = {"server": server.address, "call_timeout": 20, "reliable": False}
        with (
            tensorhub.open("policy", replica="engine", **where) as engine,
            tensorhub.open("policy", replica="rollout", host_bytes=0, **where) as rollout,  # else it takes a copy
        ):
            engine.register({"bias": torch.zeros(64)}, boxes={}, partial=True)
            rollout.register(module(0.0), boxes={})
            with fsdp.attach(module(1.0), "policy", **where) as trainer:
                if has_older:
                    rollout.replicate(0)
                with trainer.step():
                    pass
                engine.replicate("latest")
            newest = tensorhub.connect(server.address).versions("policy")[0]
            assert (newest.version, newest.holders, newest.is_lost) == (1, ("engine",), True)
            again = module(2.0)
            with fsdp.attach(again, "policy", **where) as trainer:
                assert (trainer.version, trainer.next_version) == ((0, 2) if has_older else (2, 3))
                assert all((parameter == (1.0 if has_older else 2.0)).all() for parameter in again.parameters())
                with trainer.step() as version:
                    pass
                assert version == trainer.version == engine.update("latest")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("dp-tp", "the module's DTensors are on a mesh of 2 ranks, and the job has 4"),
        ("two-meshes", "the module's DTensors are on a mesh of 2 ranks, and the job has 4"),
        ("copies-cut", "ranks that hold copies on a mesh of 2 dimensions hold parts on another one"),
    ],
)
def test_it_is_refused_with_the_words_that_help_and_these_help(start, server, kind, text):
    job = start(4)
    job.call("build", kind=kind)
    found = job.answers("attach", model="policy")
    assert [each.get("code") for each in found] == ["usage"] * 4, found
    assert all(text in each["message"] and "give shards=4" in each["hint"] for each in found), found
    assert job.call("attach", model="policy", shards=4) == 0
    with Whole("policy", replica="rollout-0", server=server) as whole:
        for version in (0, 1):
            path = str(job.folder / f"{version}.safetensors")
            if version:
                assert job.call("step_alone") is None
            job.call("save", path=path)
            assert whole.update("latest") == version
            wanted, read = load_file(path), dict(whole)
            assert read.keys() == wanted.keys()
            assert all(read[name].equal(tensor) for name, tensor in wanted.items())


@pytest.mark.long
def test_ranks_with_other_tensors_are_not_taken_for_copies(start):
    """The stages of a pipeline, in plain tensors: rank 0's alone would pass for the whole model."""
    job = start(2)
    job.call("build", kind="stages")
    found = job.answers("attach", model="policy")
    assert [each.get("code") for each in found] == ["group-incomplete", "usage"], found
    assert "rank 1 has other tensors than rank 0" in found[1]["message"]
    assert "shards=" in found[1]["hint"]


SHORT_S = 0.5  # in place of WAIT_S and SLACK_S: less than a late call takes
LONG_S = 60


@pytest.fixture
def pair(start):
    """`pair()` starts a job of two ranks, the second of which holds a copy and only votes."""

    def begin():
        job = start(2)
        job.call("build", kind="ddp")
        return job

    return begin


@pytest.mark.long
@pytest.mark.parametrize("said", ["step(timeout=)", "TENSORHUB_TIMEOUT_S"])
def test_who_holds_a_copy_waits_for_a_call_as_long_as_it_may_take(pair, monkeypatch, said):
    if said == "TENSORHUB_TIMEOUT_S":
        monkeypatch.setenv("TENSORHUB_TIMEOUT_S", str(LONG_S))
    job = pair()
    call_s = 1 if said == "step(timeout=)" else None
    job.call("attach", model="policy", wait_s=SHORT_S, call_timeout=call_s)
    step_s = LONG_S if said == "step(timeout=)" else None
    assert job.call("step", version=1, fails=0, then="late", timeout=step_s) == 1
    assert job.call("step", version=2) == 2


MANY, OF_ONE = 4, 3  # attachments; threads of a gloo group


@pytest.mark.long
@pytest.mark.parametrize("fails", [None, 0])
def test_an_attachment_that_has_ended_leaves_no_threads(pair, fails):
    job = pair()
    job.call("attach", model="policy")  # with it begins what a process has once
    job.call("close")
    before = job.answers("threads")
    for _ in range(MANY):
        if fails is None:
            job.call("attach", model="policy")
            job.call("close")
        else:
            found = job.answers("attach", model="policy", fails=fails, then="open")
            assert [each.get("code") for each in found] == ["usage", "group-incomplete"], found

    def are_few():
        pairs = zip(job.answers("threads"), before, strict=True)
        return all(now["value"] < then["value"] + OF_ONE for now, then in pairs)

    eventually(are_few, f"the threads of {MANY} attachments are gone")
    assert job.call("attach", model="policy") is not None


# What gathers with other ranks is refused by name: FSDP1, ZeRO-3.


GATHERS = {
    "fsdp1-part": "'down' is of class FullyShardedDataParallel",
    "fsdp1-inside": "is flattened by FSDP1",
    "zero3": "parameter 'weight' of 'down', class Linear, is cut by DeepSpeed's ZeRO-3",
}


@pytest.mark.long
def test_what_gathers_with_other_ranks_is_refused_on_all_of_them(start, server):
    """Before any rank waits in a collective that others do not call."""
    job = start(2)
    for kind in GATHERING:
        job.call("build", kind=kind)
        found = job.answers("attach", model="policy")
        assert [each["code"] for each in found] == ["usage", "usage"], (kind, found)
        for each in found:
            assert GATHERS.get(kind, "the module is of class FullyShardedDataParallel") in each["message"], (
                kind,
                found,
            )
            assert "fully_shard" in each["hint"]
    assert tensorhub.connect(server).versions("policy") == ()
    job.call("build", kind="fsdp")
    assert job.call("attach", model="policy") == 0
