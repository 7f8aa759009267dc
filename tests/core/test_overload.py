"""Leases count from when a report came, and how often one is wanted depends on how many there are."""

from math import inf

import pytest

from tensorhub.protocol.settings import REPORTS_PER_LEASE, Settings
from tensorhub.server import Server, state

from .kit import hello, report, worker

SETTINGS = Settings(lease_s=10.0, report_s=1.0)
ONE, OTHER = worker("one"), worker("other")


def server_with(*workers, settings: Settings = SETTINGS) -> Server:
    found = Server(settings, 0.0, 1, fresh=True)
    for who in workers:
        found.handle(hello(who), sender=str(who), now=0.0)
        found.handle(report(1), sender=str(who), now=0.0)
    return found


def test_a_lease_counts_from_when_the_report_came() -> None:
    """It took the place of one that had waited since 1.0; the server is as far as that."""
    server = server_with(ONE, OTHER)
    server.handle(report(2), sender=str(ONE), now=1.0, arrived=7.0)
    server.handle(report(2), sender=str(OTHER), now=1.0)
    at = 1.0
    while at < 11.5:
        at += 0.5
        server.tick(now=at)
    assert [member.worker for member in server.state.members.all()] == [ONE]
    while at < 16.9:
        at += 0.1
        server.tick(now=at)
    assert len(server.state.members) == 1
    server.tick(now=17.1)
    assert len(server.state.members) == 0


def test_an_arrival_before_the_server_s_time_shortens_nothing() -> None:
    server = server_with(ONE)
    server.handle(report(2), sender=str(ONE), now=1.0, arrived=0.5)
    assert server.state.members.get(ONE).lease_end == 11.0


@pytest.mark.parametrize(
    ("workers", "report_s"), [(0, 1.0), (4_000, 1.0), (4_001, 1.25), (6_000, 1.5), (8_192, 2.0), (20_000, 2.0)]
)
def test_many_workers_report_more_seldom(workers: int, report_s: float) -> None:
    assert SETTINGS.report_s_of(workers) == report_s


@pytest.mark.parametrize("lease_s", [0.5, 2.0, 10.0, 60.0])
@pytest.mark.parametrize("report_s", [0.05, 0.2, 1.0])
def test_a_lease_stays_several_reports_long_unless_it_was_chosen_shorter(lease_s: float, report_s: float) -> None:
    settings = Settings(lease_s=lease_s, report_s=report_s)
    for workers in (1, 100, 10_000, 1_000_000):
        told_s = settings.report_s_of(workers)
        assert report_s <= told_s <= max(report_s, lease_s / REPORTS_PER_LEASE)


def test_who_was_told_to_report_seldom_is_silent_later() -> None:
    """And no change of it is a reason to send everybody new orders."""
    few = Settings(lease_s=10.0, report_s=1.0, most_reports_per_s=1)
    server = Server(few, 0.0, 1, fresh=True)
    told = {}
    for number in range(3):
        who = worker(f"r{number}")
        server.handle(hello(who), sender=str(who), now=0.0)
        for sender, orders in server.handle(report(1), sender=str(who), now=0.0):
            told.setdefault(sender, orders.report_s)  # one of them is asked to be a witness of the next
    assert list(told.values()) == [1.0, 2.0, 2.0]
    assert server.status(now=0.0).report_s == 2.0, "as who watches is to know"
    member = server.state.members.get(worker("r1"))
    server.tick(now=1.0)
    server.tick(now=2.0)
    server.tick(now=3.0)
    for now, is_silent in ((3.9, False), (4.1, True), (inf, True)):
        server.state.now = now
        assert state.is_silent(server.state, member) == is_silent
