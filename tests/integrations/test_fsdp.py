"""FSDP2, tensor parallelism and DDP on real ranks: what is published is what torch says that the module is.

Three gloo processes, uneven and empty shards. A rank that raises or dies in a step takes nobody else's word for it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import tensorhub
from tensorhub.integrations.whole import Whole

from .kit import digest_of, eventually

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


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 3), ("tp", 3), ("ddp", 3), ("hsdp", 4), ("fsdp-tp", 4)])
def test_what_is_published_is_what_the_ranks_hold(start, server, kind, ranks):
    job = start(ranks)
    job.call("build", kind=kind)
    assert job.call("attach", model="policy") == 0, "a version is there before the first rollout"
    with Whole("policy", replica="rollout-0", server=server) as whole:
        for version in (0, 1, 2, 3):
            if version:
                assert job.call("step", version=version) == version
            check(whole, job, version)
        job.call("close")
        with Whole("policy", replica="rollout-1", server=server) as late:
            assert late.update("latest") == 3, "the trainer has gone, and a rollout serves"


def follow(whole, ends):
    """Update to the latest again and again; the digests of each version that came."""
    found = {}
    while not ends.is_set() or whole.update("latest") not in found:
        version = whole.update("latest")
        found.setdefault(version, set()).add(digest_of(dict(whole)))
    return found


def all_have(rollouts, following, version):
    """Or somebody has failed."""
    pairs = zip(rollouts, following, strict=True)
    return all((rollout.version or 0) >= version or its.done() for rollout, its in pairs)


def test_a_hundred_steps_while_rollouts_read_all_the_time(start, server):
    """FSDP2 gathers parameters in each of them, and frees them again. The last version is read by everybody."""
    job = start(2)
    job.call("build", inside=20_001)
    job.call("attach", model="policy")
    wanted = {0: job.call("digest")}
    ends, names = threading.Event(), ("rollout-0", "rollout-1")
    with ExitStack() as stack:
        rollouts = [stack.enter_context(Whole("policy", replica=name, server=server)) for name in names]
        readers = stack.enter_context(ThreadPoolExecutor(len(names)))
        stack.callback(ends.set)
        following = [readers.submit(follow, rollout, ends) for rollout in rollouts]
        for version in range(1, 101):
            job.call("step", version=version)
            wanted[version] = job.call("digest")
            if version % 10 == 0:
                eventually(partial(all_have, rollouts, following, version), f"version {version} is everywhere")
        ends.set()
        for its in following:
            found = its.result(timeout=30)
            assert len(found) >= 10
            assert found == {version: {wanted[version]} for version in found}
            assert 100 in found


@pytest.mark.parametrize(("then", "code"), [("raise", "ValueError"), ("replace", "usage"), ("say", "usage")])
def test_a_rank_raises_in_its_step_and_nothing_is_published(start, server, then, code):
    job = start()
    job.call("build")
    job.call("attach", model="policy")
    with Whole("policy", replica="rollout-0", server=server) as whole:
        check(whole, job, 0)
        found = job.answers("step", version=1, fails=1, then=then)
        assert [each["code"] for each in found] == ["group-incomplete", code, "group-incomplete"]
        assert max(each["took_s"] for each in found) < 5, found
        assert "another rank raised" in found[0]["message"]
        assert whole.update("latest") == 0
        assert [each["value"] for each in job.answers("held")] == [None, None, None]
        newest = tensorhub.connect(server).versions("policy")[0]
        assert (newest.version, newest.holders) == (0, ("rollout-0",)), "the trainer has withdrawn it"
        if then != "replace":
            assert job.call("step", version=1) == 1, "the same number, since it was never published"
            check(whole, job, 1)


@pytest.mark.parametrize("then", ["replaced", "said"])
def test_a_rank_that_cannot_begin_a_step_keeps_nobody_waiting(start, server, then):
    """The others would wait in the claim until `call_timeout`, which is longer than this test may take."""
    job = start()
    job.call("build")
    job.call("attach", model="policy")
    found = job.answers("step", version=1, fails=1, then=then)
    assert [each["code"] for each in found] == ["group-incomplete", "usage", "group-incomplete"]
    assert "step(1) could not begin: another rank raised" in found[0]["message"]
    assert [each["value"] for each in job.answers("held")] == [0, 0, 0]
    newest = tensorhub.connect(server).versions("policy")[0]
    assert (newest.version, newest.holders) == (0, ("trainer",)), "still published"
    if then == "said":
        assert job.call("step", version=1) == 1


def test_a_rank_that_holds_a_copy_hears_that_nothing_was_published(start, server):
    job = start(2)
    job.call("build", kind="ddp")
    job.call("attach", model="policy")
    found = job.answers("step", version=1, fails=0, then="refuse")
    assert [each.get("code") for each in found] == ["usage", "group-incomplete"], found
    assert "step(1) was not published by all ranks: another rank raised" in found[1]["message"]
    assert [each["value"] for each in job.answers("held")] == [None, None]
    assert job.call("step") == 1
    with Whole("policy", replica="rollout-0", server=server) as whole:
        check(whole, job, 1)


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


@pytest.mark.parametrize("then", ["open", "register"])
@pytest.mark.parametrize("has_other", [True, False])
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


def test_a_rank_is_killed_in_its_step_and_the_job_goes_on_from_the_rollouts(start, server, figures):
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
        figures(
            f"fsdp: rank killed in its step: the others raised {took_s:.2f} s later; a new job went on at version 1"
        )
