"""A server that cannot keep up, or stands still, answers later: it loses no session, and nobody comes back for it.

The workers are thin ones of the benchmarks: real decisions and connections, no data.
"""

import contextlib
import signal
import time

import pytest

from bench.processes import Child, Server

from .process import eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

WORKERS = 240
LEASE_S = 5.0
WITHIN_S = 150.0


@pytest.fixture
def server():
    with Server(lease_s=LEASE_S) as running:
        yield running


@pytest.fixture
def crowd(server):
    """They hold version 1, and the first of them has published version 2."""
    with Child("crowd", module="bench.crowd") as found:
        found.wait_started()
        found.do("join", address=server.address, first=0, count=WORKERS, read_s=2.0, spread_s=2.0, within_s=WITHIN_S)
        found.do("begin")
        found.do("publish", version=2, within_s=WITHIN_S)
        yield found
        with contextlib.suppress(Exception):  # a test that has failed says why itself
            found.do("close")


def nobody_was_lost(figures) -> None:
    __tracebackhide__ = True
    assert (figures["sessions"], figures["connects"], figures["connected"]) == (WORKERS, WORKERS, WORKERS)


def test_a_server_that_stands_still_for_two_leases_under_load(server, crowd):
    """SIGSTOP while everybody updates."""
    update = crowd.ask("update", version=2, skip=1, spread_s=0.5, within_s=WITHIN_S, patience_s=WITHIN_S + 30)
    eventually(lambda: crowd.do("count_reads") > WORKERS // 10, "some of them read")
    server.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    eventually(lambda: time.monotonic() > stopped + 2 * LEASE_S + 1.0, "two leases are over")
    server.signal(signal.SIGCONT)
    ended = update.result()
    assert (ended["missing"], ended["failed"]) == (0, 0)
    nobody_was_lost(crowd.do("figures"))


def test_a_server_with_a_tenth_of_the_time_it_needs(server, crowd):
    """It runs for a tenth of a second in each second, while everybody updates and reports."""
    update = crowd.ask("update", version=2, skip=1, spread_s=0.5, within_s=WITHIN_S, patience_s=WITHIN_S + 30)
    began = time.monotonic()
    while time.monotonic() < began + 3 * LEASE_S:
        for number, seconds in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
            server.signal(number)
            until = time.monotonic() + seconds
            eventually(lambda until=until: time.monotonic() >= until, "its share of time is over")
    ended = update.result()
    assert (ended["missing"], ended["failed"]) == (0, 0)
    nobody_was_lost(crowd.do("figures"))
