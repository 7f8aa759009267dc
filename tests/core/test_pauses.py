"""A server that was called late has slept, and nobody's time has passed meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.settings import Settings
from tensorhub.server import Server
from tensorhub.server.state import LATE

from .kit import hello, report, worker

SETTINGS = Settings(lease_s=10.0, report_s=1.0)
ONE, OTHER = worker("one"), worker("other")


def server_with(*names: str, fresh: bool = True) -> Server:
    """A server that was told by each of these workers that it is there, at 0."""
    server = Server(SETTINGS, 0.0, 1, fresh=fresh)
    for name in names:
        server.handle(hello(worker(name)), sender=name, now=0.0)
        server.handle(report(1), sender=name, now=0.0)
    return server


def in_time(server: Server, until: float) -> None:
    """Time goes on, and the server is called whenever it wants to be."""
    while (at := server.next_deadline()) <= until:
        server.tick(now=at)


@pytest.mark.parametrize("first", ["report of the other", "disconnected", "status", "tick"])
def test_whatever_comes_first_after_a_pause_finds_everybody_there(first: str) -> None:
    server = server_with("one", "other")
    in_time(server, 5.0)
    match first:
        case "report of the other":
            server.handle(report(2), sender="other", now=500.0)
        case "disconnected":
            server.disconnected("other", now=500.0)
        case "status":
            assert server.status(now=500.0).models[0].replicas[0].workers[0].lease_left_s == pytest.approx(4.0)
        case "tick":
            server.tick(now=500.0)
    server.tick(now=500.0)
    assert len(server.state.members) == 2
    in_time(server, 503.9)
    assert server.state.members.get(ONE) is not None
    in_time(server, 504.1)
    assert server.state.members.get(ONE) is None, "5 s before it and 5 s after it were a lease"


def test_a_restarted_server_listens_for_a_lease_in_which_it_could_hear() -> None:
    server = server_with(fresh=False)
    in_time(server, 5.0)
    server.tick(now=100.0)
    assert server.is_recovering
    in_time(server, 103.9)
    assert server.is_recovering
    in_time(server, 104.1)
    assert not server.is_recovering


def test_nobody_waits_for_a_server_without_workers() -> None:
    server = server_with()
    assert server.next_deadline() == float("inf")
    server.handle(hello(ONE), sender="one", now=1e6)
    server.handle(report(1), sender="one", now=1e6)
    assert server.state.clock.paused_s == 0.0
    assert server.next_deadline() == 1e6 + SETTINGS.report_s


def test_a_timer_that_comes_a_little_late_is_no_pause() -> None:
    server = server_with("one")
    for _ in range(9):
        server.tick(now=server.next_deadline() + 0.1)
    assert server.state.clock.paused_s == 0.0
    server.tick(now=server.next_deadline() + 0.1)
    assert len(server.state.members) == 0


@given(st.lists(st.floats(0.0, 1e4), min_size=10, max_size=10))
def test_the_dead_are_gone_after_a_lease_of_calls_however_late_each_of_them_is(late: list[float]) -> None:
    server = server_with("one")
    for late_s in late:
        server.tick(now=server.next_deadline() + late_s)
    assert len(server.state.members) == 0


@given(st.lists(st.floats(0.0, 1e4), max_size=30))
def test_who_is_heard_once_between_two_pauses_lives(late: list[float]) -> None:
    server = server_with("one")
    for number, late_s in enumerate(late, start=2):
        server.tick(now=server.next_deadline() + late_s)
        server.handle(report(number), sender="one", now=server.state.now + server.state.clock.paused_s + LATE)
    assert len(server.state.members) == 1
    assert server.state.counters["sessions"] == 1
