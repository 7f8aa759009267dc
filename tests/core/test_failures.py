"""When a call gives up: not while its reads bring chunks, and not beside a source that it could still try."""

import pytest

from tensorhub.protocol.messages import CallReport, Filling, Holding, Orders, Report, TicketFailure
from tensorhub.protocol.names import Digest, Ticket, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server, state
from tensorhub.server.rules import sources

from .kit import hello, worker

SETTINGS = Settings(default_retain=0)
READER = worker("reader")
RELAYS = [worker(f"relay-{number:02}") for number in range(12)]
TRAINER = worker("trainer")


class Cluster:
    """A server, holders of version 1 that say so once a second while they live, and a reader whose reads fail."""

    def __init__(self, *holders: WorkerId) -> None:
        self.server, self.now = Server(SETTINGS, 0.0, 1, fresh=True), 0.0
        self.numbers: dict[WorkerId, int] = {}
        self.living = list(holders)
        self.failures: list[TicketFailure] = []
        self.done, self.orders = 0, None
        self.heard: dict[WorkerId, Orders] = {}
        for who in (*holders, READER):
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
        return {"session": orders.session, "roster": orders.roster} if orders is not None else {}

    def hear(self, outbox: list) -> None:
        for sender, message in outbox:
            assert isinstance(message, Orders)
            self.heard.update({who: message for who in self.numbers if str(who) == sender})
            if sender == str(READER):
                self.orders = message
        for who in [who for who in self.living if self.heard.get(who) and self.heard[who].witness]:
            self.hold(who)  # it is asked whether it has heard of the reader

    def tell(self) -> None:
        """The reader says how far it is, and which reads have failed."""
        self.numbers[READER] = self.numbers.get(READER, 0) + 1
        report = Report(
            self.numbers[READER],
            buffer=Filling(Version(1), self.done, 100),
            call=CallReport(1, "replicate", 1, resolved=Version(1)),
            closed=self.failures[-1].ticket if self.failures else Ticket(0),
            failures=tuple(self.failures[-4:]),
            **self.known_to(READER),
        )
        self.hear(self.server.handle(report, sender=str(READER), now=self.now))

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
        return self.orders.grant.source

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
    cluster = Cluster(TRAINER)
    for _ in range(20):
        assert cluster.source == TRAINER
        cluster.fail(chunks=1)
        cluster.pass_time(3)
    assert cluster.error is None


def test_nine_that_brought_nothing_do() -> None:
    cluster = Cluster(TRAINER)
    cluster.fail(chunks=5)
    for _ in range(SETTINGS.most_failures - 1):
        cluster.pass_time(3)
        cluster.fail()
    cluster.pass_time(3)
    assert cluster.error is None
    cluster.fail()
    assert cluster.error == "source-lost"


@pytest.mark.parametrize("with_its_line", [True, False])
def test_twelve_dead_relays_are_no_reason_to_give_up_beside_the_trainer(with_its_line: bool) -> None:
    cluster = Cluster(*RELAYS, TRAINER)
    assert cluster.source == RELAYS[0]
    for relay in RELAYS:
        cluster.crash(relay, with_its_line=with_its_line)
    asked = []
    while cluster.source != TRAINER:
        asked.append(cluster.source)
        cluster.fail()
    assert asked == ([RELAYS[0]] if with_its_line else RELAYS)
    cluster.done = 100
    cluster.pass_time(5)
    assert cluster.source == TRAINER


def test_a_reset_of_the_one_that_lives_is_no_end_among_the_dead() -> None:
    """It may be tried again in two seconds; the dead fail in milliseconds."""
    cluster = Cluster(*RELAYS, TRAINER)
    cluster.fail()
    for relay in RELAYS:
        cluster.crash(relay, with_its_line=True)
    assert cluster.source == RELAYS[1]
    cluster.fail()
    assert cluster.source == TRAINER
    cluster.fail()
    while cluster.orders.grant is not None and cluster.error is None:
        cluster.fail()
    assert cluster.error is None
    cluster.pass_time(3)
    assert cluster.source == TRAINER


def test_among_very_many_one_that_failed_keeps_nobody_from_the_others() -> None:
    """Not all of them are looked at then."""
    many = [worker(f"relay-{number:03}") for number in range(sources.MAX_ALL + 4)]
    cluster = Cluster(*many)
    asked = []
    for _ in range(3):
        asked.append(cluster.source)
        cluster.fail()
        cluster.hold(asked[-1])  # it lives, and says so
    assert asked == many[:3]


def test_what_one_reader_has_learned_of_a_source_helps_the_next() -> None:
    cluster = Cluster(RELAYS[0], RELAYS[1], TRAINER)
    cluster.crash(RELAYS[0], with_its_line=False)
    assert cluster.source == RELAYS[0]
    cluster.fail()
    assert state.is_doubtful(cluster.server.state, cluster.server.state.known(RELAYS[0]))
    cluster.living.append(RELAYS[0])  # it lives after all, and says so
    cluster.hold(RELAYS[0])
    assert not state.is_doubtful(cluster.server.state, cluster.server.state.known(RELAYS[0]))


def test_nobody_tries_again_what_no_other_source_would_help() -> None:
    cluster = Cluster(*RELAYS, TRAINER)
    cluster.fail(code="transport-missing")
    assert cluster.error == "transport-missing"
