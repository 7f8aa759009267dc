"""Which source a reader gets, when it gets another one, and when its call gives up."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.messages import (
    CallReport,
    Empty,
    Filling,
    Holding,
    Orders,
    Reading,
    Report,
    TicketFailure,
)
from tensorhub.protocol.names import Digest, Ticket, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server, reads, sources
from tensorhub.server.members import Avoided, Member
from tensorhub.server.selection import Candidate, choose_source
from tensorhub.server.state import State

from .kit import candidate, hello, worker
from .town import Town

# --- who reads from whom ---


def chosen(*candidates: Candidate, now: float = 0.0) -> str | None:
    found = choose_source(candidates, now=now)
    return found[0].worker.replica if found is not None else None


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (candidate("a", is_same_site=False), candidate("b", load=9)),
        (candidate("a", load=1, is_near=True), candidate("b", published=True)),
        (candidate("a", published=True), candidate("b")),
        (candidate("a"), candidate("b", done=2, is_near=True)),
        (candidate("a", done=1), candidate("b", done=5)),
        (candidate("c"), candidate("b")),
    ],
    ids=["site", "readers", "publisher", "host", "progress", "name"],
)
def test_the_better_source_is_chosen_whatever_the_order(worse: Candidate, better: Candidate) -> None:
    assert chosen(worse, better) == chosen(better, worse) == "b"


def test_between_sites_the_uplink_of_the_site_counts_whoever_serves() -> None:
    idle = candidate("a", is_same_site=False, leaving_site=1)
    assert chosen(idle, candidate("b", load=3, done=1, is_same_site=False)) == "b"
    found = choose_source([idle], now=0.0)
    assert found is not None
    assert found[1] == "relay, full, idle, other site that 1 more leave; best of 1"


def test_one_that_withdraws_is_the_last_resort() -> None:
    assert chosen(candidate("a", is_withdrawing=True), candidate("b", load=7, is_same_site=False)) == "b"
    found = choose_source([candidate("a", is_withdrawing=True)], now=0.0)
    assert found is not None
    assert "withdrawing, but no other worker has it" in found[1]


def test_one_that_failed_is_not_tried_before_its_time() -> None:
    failed = candidate("a", avoided_until=5.0)
    assert chosen(failed, now=4.9) is None
    assert chosen(failed, now=5.0) == "a"
    assert chosen(failed, candidate("b", load=9), now=4.9) == "b"


def test_the_reason_says_what_was_weighed() -> None:
    found = choose_source([candidate("a", load=2, done=3, is_near=True), candidate("b", load=3)], now=0.0)
    assert found is not None
    assert found[0].worker == worker("a")
    assert found[1] == "relay, filling, 3 chunks in place, serves 2 more, same host; best of 2"


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True))
    return [
        candidate(
            name,
            load=draw(st.integers(0, 3)),
            done=draw(st.none() | st.integers(0, 4)),
            published=draw(st.booleans()),
            is_withdrawing=draw(st.booleans()),
            is_near=draw(st.booleans()),
            is_same_site=draw(st.booleans()),
            avoided_until=draw(st.sampled_from([float("-inf"), 1.0, float("inf")])),
            leaving_site=draw(st.integers(0, 2)),
        )
        for name in names
    ]


@given(candidates(), st.randoms(use_true_random=False), st.sampled_from([0.0, 2.0]))
def test_the_order_of_the_facts_does_not_matter(found: list[Candidate], dice, now: float) -> None:
    shuffled = list(found)
    dice.shuffle(shuffled)
    assert choose_source(found, now=now) == choose_source(shuffled, now=now)


@given(candidates(), st.sampled_from([0.0, 2.0]))
def test_it_is_one_that_may_be_tried_and_stays_if_any_does(found: list[Candidate], now: float) -> None:
    usable = [one for one in found if one.avoided_until <= now]
    choice = choose_source(found, now=now)
    assert (choice is None) == (not usable)
    if choice is not None:
        (best,) = [one for one in usable if one.worker == choice[0].worker]
        assert not best.is_withdrawing or all(one.is_withdrawing for one in usable)


# --- what the server grants and until when it watches, of which no transcript tells ---

ONE, ROOT = Version(1), Digest("r")
TRAINER, READER, SPOT = worker("trainer"), worker("reader"), worker("spot")


def reads_from(town: Town, site: str) -> Orders:
    town.joins(TRAINER, site="a", buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, site=site)
    town.says(READER, call=CallReport(1, "replicate", 1))
    return town.orders[READER]


def test_a_grant_says_whether_it_leads_to_another_site() -> None:
    for site, is_cross_site in (("a", False), ("b", True)):
        grant = reads_from(Town(), site).grant
        assert grant is not None
        assert grant.source.is_cross_site is is_cross_site


def drawn_fleet(chance: Random) -> tuple[Town, Member]:
    """Many holders of a version, some of which fill or serve others, and a reader that has no source yet."""
    town = Town(default_retain=0)
    town.joins(TRAINER, site="a", host="h0", buffer=Holding(ONE, ROOT, published=True))
    others = [worker(f"relay-{number:02}") for number in range(14)]
    chance.shuffle(others)
    for each in others:
        buffer = Holding(ONE, ROOT) if chance.random() < 0.6 else Empty()
        town.joins(each, site=chance.choice("aab"), host=f"h{chance.randrange(6)}", buffer=buffer)
    for each in others:
        if town.told[each]["buffer"] == Empty():
            town.says(each, buffer=Empty(), call=CallReport(1, "replicate", 1))
    for each in others:
        grant = town.orders[each].grant
        if grant is not None:
            reading = Reading(grant.ticket, grant.sources, ONE)
            call, buffer = CallReport(1, "replicate", 1, resolved=ONE), Filling(ONE, chance.randrange(1, 5), 9)
            town.says(each, buffer=buffer, reading=reading, call=call)
    town.joins(READER, site="a", host=f"h{chance.randrange(6)}")
    members = town.server.state.members
    for each in chance.sample(others, 3):
        members[each].avoided = Avoided(town.now + 1.0, 1)
        if chance.random() < 0.5:
            town.loses_its_line(each)
    return town, members[READER]


def test_of_many_holders_the_idle_ones_have_the_best_source_by_the_whole_rule() -> None:
    is_filling = is_near = is_far = False
    for seed in range(10):
        town, reader = drawn_fleet(Random(seed))
        state, model = town.server.state, town.server.state.models[READER.model]
        record = model.versions[ONE]
        assert len(record.holders[reader.layout_key]) > sources.MAX_ALL
        found = sources.idle(state, model, record, reader)
        assert found, f"seed {seed} has no idle source, and so shows nothing"
        best = choose_source(found, now=state.now)
        right = choose_source(sources.possible(state, model, record, reader), now=state.now)
        assert best is not None
        assert right is not None
        assert best[0] == right[0], f"seed {seed}: `sources.idle` does not follow `selection._rank`"
        is_near, is_far = is_near or right[0].is_near, is_far or not right[0].is_near
        is_filling = is_filling or not right[0].is_full
    assert (is_near, is_far, is_filling) == (True, True, True), "each of them is drawn"


def test_rules_that_contradict_each_other_do_not_go_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def once_more(state: State, model: object, member: Member, wanted: object) -> None:
        state.mark_dirty(member.worker)

    monkeypatch.setattr(reads, "decide_read", once_more)
    town = Town()
    town.joins(READER)
    assert town.server.state.counters["unsettled"] > 0
    assert town.orders[READER].acknowledged == 1


# --- when a call gives up: not while its reads bring chunks, and not beside a source that it could still try ---

SETTINGS = Settings(default_retain=0)
FAILING = worker("reader")
RELAYS = [worker(f"relay-{number:02}") for number in range(12)]
PUBLISHER = worker("trainer")


class Cluster:
    """A server, holders of version 1 that say so once a second while they live, and a reader whose reads fail."""

    def __init__(self, *holders: WorkerId) -> None:
        self.server, self.now = Server(SETTINGS, 0.0, 1, fresh=True), 0.0
        self.numbers: dict[WorkerId, int] = {}
        self.living = list(holders)
        self.failures: list[TicketFailure] = []
        self.done, self.orders = 0, None
        self.heard: dict[WorkerId, Orders] = {}
        for who in (*holders, FAILING):
            self.server.handle(hello(who, host=who.replica), sender=str(who), now=self.now)
        for who in holders:
            self.hold(who)
        self.tell()

    def hold(self, who: WorkerId) -> None:
        self.numbers[who] = self.numbers.get(who, 0) + 1
        report = Report(self.numbers[who], buffer=Holding(Version(1), Digest("r")), **self.known_to(who))
        self.hear(self.server.handle(report, sender=str(who), now=self.now))

    def known_to(self, who: WorkerId) -> dict:
        """What it has heard of the server."""
        orders = self.heard.get(who)
        return {"session": orders.session} if orders is not None else {}

    def hear(self, outbox: list) -> None:
        for sender, message in outbox:
            assert isinstance(message, Orders)
            self.heard.update({who: message for who in self.numbers if str(who) == sender})
            if sender == str(FAILING):
                self.orders = message

    def tell(self) -> None:
        """The reader says how far it is, and which reads have failed."""
        self.numbers[FAILING] = self.numbers.get(FAILING, 0) + 1
        report = Report(
            self.numbers[FAILING],
            buffer=Filling(Version(1), self.done, 100),
            call=CallReport(1, "replicate", 1, resolved=Version(1)),
            closed=self.failures[-1].ticket if self.failures else Ticket(0),
            failures=tuple(self.failures[-4:]),
            **self.known_to(FAILING),
        )
        self.hear(self.server.handle(report, sender=str(FAILING), now=self.now))

    def crash(self, who: WorkerId, *, with_its_line: bool) -> None:
        self.living.remove(who)
        if with_its_line:
            self.hear(self.server.disconnected(str(who), now=self.now))

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.hear(self.server.tick(now=self.now))
            for who in self.living:
                self.hold(who)
            self.tell()

    @property
    def source(self) -> WorkerId:
        assert self.orders is not None
        assert self.error is None, self.error
        assert self.orders.grant is not None, "it has no read"
        return self.orders.grant.source.worker

    @property
    def error(self) -> str | None:
        answer = self.orders.answer if self.orders is not None else None
        return answer.error.code if answer is not None and answer.error is not None else None

    def fail(self, chunks: int = 0, code: str = "source-lost") -> None:
        """The read brings so many chunks and fails."""
        self.done += chunks
        self.failures.append(TicketFailure(self.orders.grant.ticket, self.source, code, "reset by peer"))
        self.tell()


def test_twenty_resets_that_each_brought_a_chunk_end_no_call() -> None:
    cluster = Cluster(PUBLISHER)
    for _ in range(20):
        assert cluster.source == PUBLISHER
        cluster.fail(chunks=1)
        cluster.pass_time(3)
    assert cluster.error is None


def test_nine_that_brought_nothing_do() -> None:
    cluster = Cluster(PUBLISHER)
    cluster.fail(chunks=5)
    for _ in range(SETTINGS.max_failures - 1):
        cluster.pass_time(3)
        cluster.fail()
    cluster.pass_time(3)
    assert cluster.error is None
    cluster.fail()
    assert cluster.error == "source-lost"


@pytest.mark.parametrize("with_its_line", [True, False])
def test_twelve_dead_relays_are_no_reason_to_give_up_beside_the_trainer(with_its_line: bool) -> None:
    cluster = Cluster(*RELAYS, PUBLISHER)
    assert cluster.source == RELAYS[0]
    for relay in RELAYS:
        cluster.crash(relay, with_its_line=with_its_line)
    asked = []
    while cluster.source != PUBLISHER:
        asked.append(cluster.source)
        cluster.fail()
    assert asked == ([RELAYS[0]] if with_its_line else RELAYS)
    cluster.done = 100
    cluster.pass_time(5)
    assert cluster.source == PUBLISHER


def test_a_reset_of_the_one_that_lives_is_no_end_among_the_dead() -> None:
    """It may be tried again in two seconds; the dead fail in milliseconds."""
    cluster = Cluster(*RELAYS, PUBLISHER)
    cluster.fail()
    for relay in RELAYS:
        cluster.crash(relay, with_its_line=True)
    assert cluster.source == RELAYS[1]
    cluster.fail()
    assert cluster.source == PUBLISHER
    cluster.fail()
    while cluster.orders.grant is not None and cluster.error is None:
        cluster.fail()
    assert cluster.error is None
    cluster.pass_time(3)
    assert cluster.source == PUBLISHER


def test_nobody_tries_again_what_no_other_source_would_help() -> None:
    cluster = Cluster(*RELAYS, PUBLISHER)
    cluster.fail(code="transport-missing")
    assert cluster.error == "transport-missing"
