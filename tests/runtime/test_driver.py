"""A worker's shell: its line comes back, and a machine that contradicts itself ends its worker, loudly and alone."""

import asyncio
import logging
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import tensorhub
from tensorhub.protocol.errors import InvariantViolation
from tensorhub.runtime import client
from tensorhub.runtime import driver as long_waits
from tensorhub.runtime.cast_state import BackgroundUnpublish
from tensorhub.runtime.connection import FIRST_RETRY_S, LAST_RETRY_S, SOON_RETRY_S, SOON_S, retry_delay_s
from tensorhub.runtime.loops import loop_thread
from tensorhub.runtime.serving import ServerThread
from tensorhub.worker.events import Called

from .kit import eventually, in_threads, within


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


def worker(server, replica="t"):
    weights = tensorhub.open("m", replica=replica, server=server.address)
    weights.register({"w": np.ones(1000)})
    return weights


def test_the_back_off_doubles_with_jitter_and_has_a_top():
    dice = random.Random(3)
    for attempt in range(100):
        full = min(LAST_RETRY_S, FIRST_RETRY_S * 2**attempt)
        assert full / 2 <= retry_delay_s(attempt, dice.random()) <= full
    assert retry_delay_s(0, 0.0) == FIRST_RETRY_S
    assert retry_delay_s(10_000, 0.0) == LAST_RETRY_S
    assert retry_delay_s(10_000, 0.0, broken_s=SOON_S - 0.1) == SOON_RETRY_S
    assert retry_delay_s(10_000, 0.0, broken_s=SOON_S) == LAST_RETRY_S


def test_a_server_that_leaves_is_found_again_and_both_are_said(caplog):
    first = tensorhub.serve(lease_s=2, report_s=0.2)
    host, port = first.address.split(":")
    weights = worker(first)
    weights.publish(1)
    first.close()
    eventually(lambda: f"no reference server at {first.address}" in caplog.text)
    with ServerThread(host, int(port), fresh=True):
        eventually(lambda: f"the reference server at {first.address} is back after" in caplog.text)
        assert weights.publish(1, timeout=5) == 1
        weights.close(timeout=5)


def test_a_call_that_waits_for_long_says_for_what_and_what_is_over_says_nothing(server, monkeypatch, caplog):
    monkeypatch.setattr(long_waits, "SAYS_AFTER_S", (0.1, 0.2))
    monkeypatch.setattr(long_waits, "EVERY_S", 0.2)
    weights = worker(server, "reader")
    with caplog.at_level(logging.WARNING, logger="tensorhub"):
        with pytest.raises(tensorhub.DeadlineExceeded):
            weights.replicate("latest", timeout=1.5)
        said = [line for line in caplog.messages if line.startswith("replicate of m/reader[0] goes on waiting after")]
        assert len(said) >= 3
        assert all("no version of m yet" in line for line in said)
        weights.publish(1)
        assert not [line for line in caplog.messages if "publish of" in line]
    weights.close()


def test_who_waits_for_the_place_of_a_former_life_says_so(caplog):
    server = tensorhub.serve(lease_s=4, report_s=0.5)  # it outlasts a machine that stands still
    code = f"""
import os, numpy as np, tensorhub
weights = tensorhub.open("m", replica="trainer", server={server.address!r})
weights.register({{"w": np.ones(1000)}})
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    with caplog.at_level(logging.WARNING, logger="tensorhub"):
        again = worker(server, "trainer")
    said = [line for line in caplog.messages if line.startswith("m/trainer[0] waits to be let in: ")]
    assert len(said) == 1, "the lease of the former life lasts yet"
    assert "its place is free in" in said[0]
    again.close()
    server.close()


def test_a_contradiction_ends_one_worker_and_tells_its_story(server, monkeypatch, caplog):
    broken, well = worker(server, "broken"), worker(server, "well")
    broken.publish(1)

    def contradict():
        raise InvariantViolation("two and two are five")

    monkeypatch.setattr(broken._aio._client.driver.worker, "check_invariants", contradict)
    with caplog.at_level(logging.CRITICAL), within(3), pytest.raises(InvariantViolation, match="five"):
        broken.unpublish(timeout=5)
    assert "published version 1" in caplog.text
    with pytest.raises(InvariantViolation, match="has stopped"):
        broken.publish(2)
    broken.close()
    with pytest.raises(tensorhub.VersionConflict, match="broken has been the writer"):  # until its lease is over
        well.publish(1, timeout=5)
    well.close()


def test_a_publish_whose_worker_is_closed_while_it_hashes_ends_at_once(server, monkeypatch):
    weights = worker(server)
    driver, hashed, hashing = weights._aio._client.driver, client.hashed, threading.Event()

    async def until_it_has_gone(*arguments):
        hashing.set()
        await asyncio.to_thread(eventually, lambda: driver.is_gone)
        return await hashed(*arguments)

    monkeypatch.setattr(client, "hashed", until_it_has_gone)

    def close():
        assert hashing.wait(5)
        weights.close(timeout=2)

    with within(8):
        error, _ = in_threads(lambda: weights.publish(1, timeout=20), close)
    assert isinstance(error, tensorhub.Closed)
    assert driver.broken is None


def test_an_unpublish_behind_its_caller_is_not_granted_by_the_end_of_its_worker(server):
    weights = worker(server)
    driver = weights._aio._client.driver

    async def work():
        await asyncio.to_thread(eventually, lambda: driver._awaited)
        await driver.end(time.monotonic() + 1)
        raise tensorhub.Closed("it")

    begun = BackgroundUnpublish(driver).begin(work(), time.monotonic() + 20)
    with within(8), pytest.raises(tensorhub.Closed):
        loop_thread().wait(begun, deadline=time.monotonic() + 20, what="it")
    weights.close(timeout=1)


def test_what_is_missed_while_a_call_waits_is_not_the_end_of_that_call(server):
    reader, trainer = worker(server, "r"), worker(server)
    driver = reader._aio._client.driver

    async def miss():
        driver.miss(Called("update", "latest", 0.0), ValueError("of the other call"))

    def publish():
        eventually(lambda: driver.worker.call is not None)
        loop_thread().wait(miss(), deadline=time.monotonic() + 5, what="it")
        return trainer.publish(1)

    assert in_threads(lambda: reader.replicate("latest", timeout=20), publish) == [1, 1]
    reader.close()
    trainer.close()


def test_a_loop_that_does_not_get_to_run_lets_nobody_wait_for_ever(monkeypatch):
    thread = loop_thread()
    stuck, release = threading.Event(), threading.Event()

    def hold():
        stuck.set()
        release.wait(10)

    thread.loop.call_soon_threadsafe(hold)
    assert stuck.wait(5)

    async def nothing():
        pass

    try:
        with within(2), pytest.raises(tensorhub.DeadlineExceeded, match="does not get to run"):
            thread.wait(nothing(), deadline=0, what="a call")
    finally:
        release.set()
