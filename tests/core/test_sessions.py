"""How a session begins, lasts and ends, and what time a server counts."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tensorhub.protocol.events import Warned
from tensorhub.protocol.manifest import Layout
from tensorhub.protocol.messages import CallReport, Holding, LayoutInfo, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server, state
from tensorhub.server.members import Member, Members
from tensorhub.server.state import LATE

from .kit import LAYOUT, hello, report, worker
from .town import Town

# --- what is left when a session ends, and what may begin one ---

ONE, ROOT = Version(1), Digest("r")
TRAINER, READER, OTHER, THIRD = (worker(name) for name in ("trainer", "a", "b", "c"))


def test_layouts_of_nobody_are_forgotten_and_those_in_use_are_not() -> None:
    town = Town(max_versions=8)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    for number in range(100):
        other = LayoutInfo.of(Layout((), number + 1))
        town.server.handle(other, sender=str(TRAINER), now=town.now)
    layouts = town.server.state.layouts
    assert LAYOUT.digest() in layouts
    assert len(layouts) <= 2 * 8


@pytest.mark.parametrize("is_reliable", [False, True])
def test_whoever_says_otherwise_on_its_next_line_counts_otherwise(is_reliable: bool) -> None:
    """An honest worker says the same of itself while it lives; this one was started anew with other words."""
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, reliable=is_reliable)
    town.hellos[READER] = replace(town.hellos[READER], reliable=not is_reliable)
    town.says_hello_again(READER)
    town.says(READER, layout=Digest(""))
    counting = town.server.state.models[TRAINER.model].reliable
    assert [who for those in counting.values() for who in those if who == READER] == [READER] * (not is_reliable)


def test_what_a_former_job_wanted_kept_is_over_with_it() -> None:
    """Else whoever once asked for many would fill the memory of all who come after it."""
    town = Town(lease_s=4.0)
    town.joins(OTHER, retain=6)
    town.joins(READER, retain=2)
    model = town.server.state.models[TRAINER.model]
    town.says(OTHER, left=True)
    assert model.retain == 6  # it is kept whoever leaves
    town.says(READER, left=True)
    town.joins(TRAINER)
    assert model.retain == 1


@pytest.mark.parametrize(("wish", "is_reliable", "retain"), [(256, True, 3), (2**62, True, 3), (3, False, 1)])
def test_a_wish_counts_as_far_as_the_server_allows_and_not_of_a_spot_worker(
    wish: int, is_reliable: bool, retain: int
) -> None:
    town = Town(max_retain=3)
    town.joins(TRAINER)
    town.joins(OTHER, retain=wish, reliable=is_reliable)
    assert town.server.state.models[TRAINER.model].retain == retain
    texts = [warned.text for warned in town.events(Warned)]
    assert [f"asks to keep {wish} versions" in text for text in texts] == [True] * (wish > 3)


def test_who_has_no_room_hears_that_it_wanted_that_much_kept() -> None:
    town = Town()
    town.joins(OTHER, retain=5)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True), copies_left=0, retain=2)
    call = CallReport(1, "unpublish", "")
    town.says(TRAINER, buffer=Withdrawing(ONE, ROOT, published=True), copies_left=0, call=call)
    answer = town.orders[TRAINER].answer
    assert answer is not None
    assert answer.error is not None
    assert answer.error.code == "host-memory-full"
    assert "it was opened with retain=2" in answer.error.message


# --- who is alive, and when to look at whom ---


def member(name: str, lease_end: float) -> Member:
    return Member(hello(worker(name)), name, Number(1), lease_end)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 5.0), st.booleans()), max_size=40))
def test_nobody_is_missed_and_the_queue_does_not_grow(history: list[tuple[str, float, bool]]) -> None:
    members, now, alive = Members(), 0.0, {}
    for name, step_s, renews in history:
        now += step_s
        ended, _ = members.due(now)
        for one in ended:
            del members[one.worker]
            del alive[one.worker.replica]
        assert all(one.lease_end > now for one in alive.values())
        if name not in alive:
            alive[name] = member(name, now + 3.0)
            members.add(alive[name])
        elif renews:
            alive[name].lease_end = now + 3.0
        else:
            members.wake(alive[name], now + 1.0)
        assert members.next_time() <= min(one.lease_end for one in alive.values())
        assert len(members._times) <= 3 * len(alive) + 3


# --- leases count from when a report came, and how often one is wanted depends on how many there are ---

SETTINGS = Settings(lease_s=10.0, report_s=1.0)
FIRST = worker("one")


def server_with(*names: str, fresh: bool = True) -> Server:
    """A server that was told by each of these workers that it is there, at 0."""
    server = Server(SETTINGS, 0.0, 1, fresh=fresh)
    for name in names:
        server.handle(hello(worker(name)), sender=name, now=0.0)
        server.handle(report(1), sender=name, now=0.0)
    return server


def test_a_lease_counts_from_when_the_report_came() -> None:
    """It took the place of one that had waited since 1.0; the server is as far as that."""
    server = server_with("one", "other")
    server.handle(report(2), sender="one", now=1.0, arrived=7.0)
    server.handle(report(2), sender="other", now=1.0)
    at = 1.0
    while at < 11.5:
        at += 0.5
        server.tick(now=at)
    assert [member.worker for member in server.state.members.all()] == [FIRST]
    while at < 16.9:
        at += 0.1
        server.tick(now=at)
    assert len(server.state.members) == 1
    server.tick(now=17.1)
    assert len(server.state.members) == 0


@pytest.mark.parametrize(
    ("workers", "report_s"), [(0, 1.0), (4_000, 1.0), (4_001, 1.25), (6_000, 1.5), (8_192, 2.0), (20_000, 2.0)]
)
def test_many_workers_report_more_seldom(workers: int, report_s: float) -> None:
    assert SETTINGS.report_s_of(workers) == report_s


def test_who_was_told_to_report_seldom_is_silent_later() -> None:
    """And no change of it is a reason to send everybody new orders."""
    few = Settings(lease_s=10.0, report_s=1.0, max_reports_per_s=1)
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


# --- a server that was called late has slept, and nobody's time has passed meanwhile ---


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
    assert server.state.members.get(FIRST) is not None
    in_time(server, 504.1)
    assert server.state.members.get(FIRST) is None, "5 s before it and 5 s after it were a lease"


def test_a_restarted_server_listens_for_a_lease_in_which_it_could_hear() -> None:
    server = server_with(fresh=False)
    in_time(server, 5.0)
    server.tick(now=100.0)
    assert server.is_recovering
    in_time(server, 103.9)
    assert server.is_recovering
    in_time(server, 104.1)
    assert not server.is_recovering


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
