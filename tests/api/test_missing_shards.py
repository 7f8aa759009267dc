"""A replica whose shards do not all come to a call: what the others are told, and when."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually, in_threads, within
from tensorhub.runtime import driver

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


def test_one_that_a_thread_begun_since_may_be_about_to_call_is_waited_for(pair):
    go_on = threading.Event()
    thread = threading.Thread(target=lambda: (go_on.wait(20), pair[1].publish(1, timeout=20)), daemon=True)
    thread.start()
    threading.Timer(LEASE_S * 1.7, go_on.set).start()
    assert pair[0].publish(1, timeout=20) == 1
    thread.join(20)


def test_a_pool_that_was_there_before_all_is_waited_for(server):
    """Its thread gets to know the shard by what it is given to do, and that may take longer than a lease."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        pair = [tensorhub.open("m", replica="t", shard=shard, shards=2, server=server.address) for shard in range(2)]
        for weights in pair:
            weights.register({"w": np.ones(1000)})
        go_on = threading.Event()
        late = pool.submit(lambda: (go_on.wait(20), pair[1].publish(1, timeout=20))[1])
        threading.Timer(LEASE_S * 1.7, go_on.set).start()
        assert pair[0].publish(1, timeout=20) == 1
        assert late.result(20) == 1
        in_threads(*(lambda w=w: w.close(timeout=3) for w in pair))


def test_tasks_of_one_loop_wait_for_each_other(server):
    async def run():
        opened = [
            await tensorhub.aio.open("m", replica="t", shard=shard, shards=2, server=server.address)
            for shard in range(2)
        ]
        for weights in opened:
            await weights.register({"w": np.ones(1000)})
        go_on = asyncio.Event()
        asyncio.get_running_loop().call_later(LEASE_S * 1.7, go_on.set)

        async def late(weights):
            await go_on.wait()
            return await weights.publish(1, timeout=20)

        found = await asyncio.gather(opened[0].publish(1, timeout=20), late(opened[1]))
        await asyncio.gather(*(weights.close(timeout=3) for weights in opened))
        return found

    assert asyncio.run(run()) == [1, 1]


@pytest.mark.parametrize("first_s", [LEASE_S / 4, LEASE_S * 1.5])
def test_a_shard_that_lives_and_does_not_call_is_named_in_the_log_once(pair, caplog, monkeypatch, first_s):
    """The machine says it after a lease and a report, any long call after a while: whichever comes first."""
    monkeypatch.setattr(driver, "SAYS_AFTER_S", (first_s, 60.0))
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


def test_a_shard_that_was_never_there_costs_a_lease(join):
    alone, _ = join("t", 1.0, shard=0, shards=2)
    began = time.monotonic()
    with within(NOTICED_S), pytest.raises(tensorhub.GroupIncomplete, match="shard 1 of t was not there"):
        alone.publish(1, timeout=60)
    assert time.monotonic() - began > LEASE_S * 0.9


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
