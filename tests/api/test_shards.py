"""Replicas of several shards, each a thread here: one version for all of them, or an error for all of them."""

import contextlib
import logging
import subprocess
import sys
import threading
import time

import pytest

import tensorhub
from runtime.kit import eventually, in_threads, within
from tensorhub.runtime import driver


def all_of(workers, call):
    return in_threads(*(lambda weights=weights: call(weights) for weights, _ in workers))


def test_a_version_exists_only_when_all_shards_have_published_it(join, server):
    first, second = (join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2))
    reader, _ = join("x", shard=0, shards=2)
    results = in_threads(
        lambda: first.publish(1, timeout=20),
        lambda: reader.wait_for("latest", timeout=20),
        lambda: (tensorhub.connect(server.address).versions("m"), second.publish(1, timeout=20)),
    )
    versions, published = results[2]
    assert not any(version.is_complete for version in versions)
    assert (results[0], results[1], published) == (1, 1, 1)


def test_latest_is_one_version_for_the_whole_group_while_the_trainer_goes_on(join):
    """Shards ask at different times while versions come and go: they always get the same one."""
    trainer = [join("t", 0.0, shard=shard, shards=2, size=1000) for shard in range(2)]
    rollout = [join("r", shard=shard, shards=2, size=1000) for shard in range(2)]
    all_of(trainer, lambda weights: weights.publish(0))

    def train(shard):
        weights, array = trainer[shard]
        for step in range(1, 20):
            with weights.mutating(version=step, timeout=20):
                array += 1

    def roll(shard):
        weights, array = rollout[shard]
        seen = []
        while not seen or seen[-1] < 19:
            try:
                seen.append(weights.update("latest", timeout=20))
                assert (array == seen[-1]).all()
            except tensorhub.Unavailable:  # the trainer went on meanwhile: all shards are told so, and retry
                seen.append(-1)
        return seen

    results = in_threads(lambda: train(0), lambda: train(1), lambda: roll(0), lambda: roll(1))
    assert results[:2] == [None, None]
    assert results[2] == results[3]
    versions = [version for version in results[2] if version >= 0]
    assert versions == sorted(versions)


def test_a_shard_that_cannot_be_filled_tells_its_siblings(join):
    """A tensor was replaced on one shard alone: the others would wait for it until their time is up."""
    torch = pytest.importorskip("torch")
    trainer = [join("t", tensors={"w": torch.ones(10)}, shard=shard, shards=2) for shard in range(2)]
    all_of(trainer, lambda weights: weights.publish(1))
    modules = [torch.nn.ParameterDict({"w": torch.zeros(10)}) for _ in range(2)]
    rollout = [join("r", tensors=module, shard=shard, shards=2) for shard, module in enumerate(modules)]
    modules[1]["w"] = torch.nn.Parameter(torch.zeros(10))

    waiting = rollout[0][0]._aio._client.driver.worker

    def failed(weights):
        if weights is rollout[1][0]:
            eventually(lambda: waiting.call is not None and waiting.call.answer is not None, "its sibling waits")
        with pytest.raises(tensorhub.TensorHubError) as caught:
            weights.update("latest", timeout=100)
        return type(caught.value), str(caught.value)

    (sibling, text), (mine, _) = all_of(rollout, failed)
    assert mine is tensorhub.UsageError
    assert sibling is tensorhub.GroupIncomplete
    assert "no longer holds what was registered" in text


def test_a_job_of_another_number_of_shards_comes_after_one_that_has_left(join):
    former = [join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2)]
    all_of([(weights, None) for weights in former], lambda weights: weights.publish(1))
    others = [join("u", shard=shard, shards=4) for shard in range(4)]

    def fails(weights):
        with pytest.raises(tensorhub.LayoutMismatch, match="shards=2"):
            weights.replicate("latest")

    all_of(others, fails)
    in_threads(*(lambda weights=weights: weights.close(timeout=0.5) for weights, _ in others))
    in_threads(*(lambda weights=weights: weights.close(timeout=0.5) for weights in former))
    job = [join("t", 2.0, shard=shard, shards=4) for shard in range(4)]
    assert all_of(job, lambda weights: weights.publish(2)) == [2] * 4
    rollout = [join("r", shard=shard, shards=4) for shard in range(4)]
    assert all_of(rollout, lambda weights: weights.replicate("latest")) == [2] * 4


LEASE_S = 2.0  # of the server of these tests
NOTICED_S = LEASE_S + 1.5  # a lease, a report, and a slow machine


@pytest.fixture
def pair(join):
    """Both shards of one replica, opened by the thread of the test."""
    return [join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2)]


ALONE = """
import sys, time
import numpy as np, tensorhub
pair = [tensorhub.open("m", replica="t", shard=shard, shards=2, server=sys.argv[1]) for shard in range(2)]
for weights in pair:
    weights.register({"w": np.ones(1000)})
began = time.monotonic()
try:
    pair[0].publish(1, timeout=60)
except tensorhub.UsageError as error:
    print(error, error.hint, time.monotonic() - began, sep="|")
input()
"""


def test_a_thread_that_waits_for_itself_is_told_so(server):
    """In a process of its own: the threads that other tests have left might be about to call."""
    command = [sys.executable, "-c", ALONE, server.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdout is not None
        text, hint, took_s = alone.stdout.readline().split("|")
        assert "publish of m/t[0] waits for m/t[1], which only this waiting thread has used" in text
        assert "thread" in hint
        assert "aio" in hint
        assert float(took_s) < NOTICED_S
        eventually(lambda: server.status().models[0].replicas[0].call.state == "failed")  # all shards are told so
        alone.kill()


def test_one_that_was_used_by_another_thread_before_is_waited_for(pair):
    go_on, ended = threading.Event(), []

    def other():
        ended.append(pair[1].publish(1, timeout=20))
        go_on.wait(20)
        ended.append(pair[1].unpublish(timeout=20))

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert pair[0].publish(1, timeout=20) == 1
    threading.Timer(LEASE_S * 1.7, go_on.set).start()
    assert pair[0].unpublish(timeout=20) is None
    thread.join(20)
    assert ended == [1, None]


def test_a_shard_that_lives_and_does_not_call_is_named_in_the_log_once(pair, caplog, monkeypatch):
    """The machine says it after a lease and a report, any long call after a while: whichever comes first."""
    monkeypatch.setattr(driver, "SAYS_AFTER_S", (LEASE_S / 4, 60.0))
    caplog.set_level(logging.WARNING, "tensorhub")
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, args=(30,), daemon=True)  # it might be about to call
    thread.start()
    with within(LEASE_S * 2.5 + 1), pytest.raises(tensorhub.DeadlineExceeded, match="shard 1 of 2"):
        pair[0].publish(1, timeout=LEASE_S * 2.5)
    is_over.set()
    said = [line for line in caplog.messages if "m/t[0]" in line and "shard 1 of 2" in line]
    assert len(said) == 1
    assert "goes on waiting" in said[0]


def test_a_shard_that_is_closed_while_its_sibling_calls_costs_nothing(pair, server):
    found = []

    def call():
        with pytest.raises(tensorhub.GroupIncomplete, match="shard 1 of t"):
            pair[0].publish(1, timeout=60)
        found.append(time.monotonic())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    # were the close heard first, this were a call beside a shard that is not there, and waited for a lease
    eventually(lambda: server.status().models[0].replicas[0].call is not None, "the server has heard the call")
    began = time.monotonic()
    pair[1].close(timeout=5)
    thread.join(10)
    assert found
    assert found[0] - began < LEASE_S / 2


def test_a_publish_that_fails_before_it_is_hashed_counts_as_a_call(pair):
    """Its shard's next call is not compared with the publish that the other still waits in, as if both were first."""

    def program(weights, timeout, error):
        with pytest.raises(error):
            weights.publish(1, timeout=timeout)
        for _ in range(3):
            with contextlib.suppress(tensorhub.GroupIncomplete):
                return weights.unpublish(timeout=20)

    def late():
        eventually(lambda: pair[0]._aio._client.driver.worker.call is not None, "the other waits")
        return program(pair[1], 1e-6, tensorhub.DeadlineExceeded)

    assert in_threads(lambda: program(pair[0], 60, tensorhub.GroupIncomplete), late) == [None, None]
    assert in_threads(*(lambda w=w: w.publish(1, timeout=5) for w in pair)) == [1, 1]


def test_shards_that_go_on_at_once_with_another_call_are_in_step(pair):
    """Shard 1 comes to the next call before it can have heard that shard 0 has given up the one before."""
    assert in_threads(*(lambda w=w: w.publish(1, timeout=5) for w in pair)) == [1, 1]
    for version in range(2, 12):
        with pytest.raises(tensorhub.DeadlineExceeded):
            pair[0].replicate(1, timeout=0.001)
        assert in_threads(*(lambda w=w: w.unpublish(timeout=5) for w in pair)) == [None, None]
        assert in_threads(*(lambda w=w, v=version: w.publish(v, timeout=5) for w in pair)) == [version, version]
