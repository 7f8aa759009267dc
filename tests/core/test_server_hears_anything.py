"""Whatever is said to the reference server, in whatever order: it never raises and never contradicts itself.

Two kinds of worker speak. Liars send reports that mean something (the codec lets no others through) and need not be
true, consistent, in order, or their own. Followers do what they were told, which may rest on lies.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.protocol.messages import (
    CallReport,
    Empty,
    Failure,
    Filling,
    Holding,
    HostCopy,
    LayoutInfo,
    Orders,
    Poisoned,
    Reading,
    Report,
    Source,
    TicketFailure,
    ToServer,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.connection import decode_to_server, decode_to_worker, encode
from tensorhub.server import Server

from .kit import LAYOUT, hello, worker

SETTINGS = Settings(lease_s=4.0, report_s=1.0, max_versions=4, max_workers=8, max_models=2, max_failures=2)
WORKERS = [worker(replica, shard) for replica in ("trainer", "a", "b") for shard in (0, 1)]
FIRST_NUMBER = 100

workers = st.sampled_from(WORKERS)
versions = st.integers(1, 5).map(Version)
roots = st.sampled_from([Digest("r"), Digest("s")])
numbers = st.integers(0, 2 * FIRST_NUMBER)
buffers = st.one_of(
    st.just(Empty()),
    st.builds(Filling, versions, st.integers(0, 4), st.integers(0, 4)),
    st.builds(Holding, versions, roots, st.booleans(), numbers.map(Number), st.booleans()),
    st.builds(Withdrawing, versions, roots, st.booleans(), numbers.map(Number), st.booleans(), st.booleans()),
    st.builds(Poisoned, st.none() | versions),
)
specs = st.sampled_from(["latest", "latest-1", 1, 2, 3])


def fills(verbs: st.SearchStrategy[str], specs: st.SearchStrategy[int | str]) -> st.SearchStrategy[CallReport]:
    return st.builds(CallReport, st.integers(0, 4), verbs, specs, st.just(Digest("")), st.none() | versions)


calls = st.one_of(
    st.builds(CallReport, st.integers(0, 4), st.just("publish"), st.integers(1, 5), roots, st.none() | versions),
    st.builds(
        CallReport,
        st.integers(0, 4),
        st.just("unpublish"),
        st.just(""),
        st.just(Digest("")),
        st.none() | versions,
        claim=st.none() | versions,
    ),
    fills(st.sampled_from(["replicate", "update"]), specs),
    fills(st.just("update"), st.just("prefetched")),
)
failures = st.builds(
    TicketFailure,
    numbers.map(Ticket),
    workers,
    st.sampled_from(["source-lost", "corrupt-transfer", "layout-mismatch", "no-such-code"]),
    st.just("why"),
)
copies = st.builds(
    HostCopy,
    st.integers(0, 4),
    versions,
    roots,
    st.integers(0, 4),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    unfit=st.booleans(),
    shared=st.booleans(),
)
reports = st.builds(
    Report,
    number=st.integers(1, 60),
    session=numbers.map(Number),
    seen=numbers.map(Number),
    buffer=buffers,
    layout=st.sampled_from([Digest(""), Digest("l"), LAYOUT.digest()]),
    size_bytes=st.integers(0, 100),
    call=st.none() | calls,
    ended=st.integers(0, 4),
    finished=st.integers(0, 4),
    reading=st.none()
    | st.builds(
        Reading,
        numbers.map(Ticket),
        st.lists(st.builds(Source, workers, st.booleans()), min_size=1, max_size=3).map(tuple),
        versions,
        st.booleans(),
        is_opened=st.booleans(),
        arrived_bytes=st.integers(0, 2**62),
        is_across=st.booleans(),
        root=st.just(Digest("")) | roots,
    ),
    writes=numbers.map(Number),
    closed=numbers.map(Ticket),
    newest=st.none() | versions,
    newest_epoch=numbers.map(Number),
    failures=st.lists(failures, max_size=3).map(tuple),
    left=st.sampled_from([False, False, False, True]),
    closing=st.sampled_from([False, False, False, True]),
    stops=st.booleans(),
    copies=st.lists(copies, max_size=3).map(tuple),
    copies_left=st.integers(0, 3),
    copy_error=st.none() | st.builds(Failure, st.sampled_from(["internal", "no-such-code"]), st.just("why")),
    pins=st.lists(versions, max_size=2).map(tuple),
    prefetch=st.none() | specs,
    cross_site_bytes=st.dictionaries(st.integers(0, 4), st.integers(0, 100), max_size=2),
)
lives = st.sampled_from(["1", "2"])


@dataclass
class Listener:
    """What one worker that follows its orders would say next."""

    number: int = 0
    position: int = 0
    ended: int = 0
    orders: Orders | None = None
    report: Report = field(default_factory=lambda: Report(0))

    def hear(self, orders: Orders) -> None:
        if self.orders is None or orders.number > self.orders.number:
            self.orders = orders
            self.position = max(self.position, orders.position or 0)

    def next_report(self, wish: CallReport) -> Report:
        """It fills with what is granted, holds it the next time, withdraws when it is to publish, and so on."""
        self.number += 1
        orders, buffer, call = self.orders, self.report.buffer, self.report.call
        reading, closed = None, self.report.closed
        answer = orders.answer if orders is not None else None
        resolved = answer.version if answer is not None else None
        if call is not None and answer is not None and (answer.finished or answer.error is not None):
            self.ended, call = call.number, None
        elif call is None:
            call = CallReport(max(self.ended, self.position) + 1, wish.verb, wish.spec, wish.root)
        if orders is not None and orders.grant is not None:
            grant = orders.grant
            if self.report.reading is not None and self.report.reading.ticket == grant.ticket:
                buffer, closed = Holding(grant.version, grant.root, epoch=grant.epoch), grant.ticket
            elif isinstance(buffer, Empty | Filling) and grant.ticket > closed:
                buffer, reading = Filling(grant.version, 1, 4), Reading(grant.ticket, grant.sources, grant.version)
        elif orders is not None and orders.drained is not None and isinstance(buffer, Withdrawing | Poisoned):
            buffer = Empty()
        elif call is not None and call.verb == "unpublish" and isinstance(buffer, Holding):
            buffer = Withdrawing(buffer.version, buffer.root, buffer.published, buffer.epoch, buffer.is_pending)
        elif call is not None and call.verb == "publish" and resolved is not None:
            epoch = answer.epoch if answer is not None else Number(0)
            buffer = Holding(resolved, call.root, True, epoch, is_pending=True)
        session = orders.session if orders is not None else Number(0)
        seen = orders.number if orders is not None else Number(0)
        self.report = Report(
            self.number,
            session=session,
            seen=seen,
            buffer=buffer,
            call=call,
            ended=self.ended,
            reading=reading,
            closed=closed,
        )
        return self.report


@dataclass
class Audience:
    """A server and all who talk to it."""

    fresh: bool
    now: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)
    listeners: dict[str, Listener] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = Server(SETTINGS, self.now, FIRST_NUMBER, fresh=self.fresh)

    def say(self, message: ToServer, sender: str) -> None:
        decoded = decode_to_server(encode(message))
        self.take(self.server.handle(decoded, sender=sender, now=self.now))

    def take(self, outbox: list) -> None:
        for sender, message in outbox:
            assert decode_to_worker(encode(message)) == message
            if isinstance(message, Orders):
                assert message.number > self.seen.get(sender, 0), "orders rise"
                self.seen[sender] = message.number
                self.listeners.setdefault(sender, Listener()).hear(message)
        self.server.check_invariants()
        assert self.server.next_deadline() > self.now, "nothing is due any more"

    def do(self, step: tuple) -> None:
        what, who, life, value = step
        sender = f"{who}#{life}"
        match what:
            case "hello":
                self.say(hello(who, shards=2, life=life, host=value or "", site=value or ""), sender)
            case "lie":
                self.say(value, sender)
            case "follow":
                listener = self.listeners.setdefault(sender, Listener())
                self.say(listener.next_report(value), sender)
            case "layout":
                self.say(LayoutInfo.of(LAYOUT), sender)
            case "disconnect":
                self.take(self.server.disconnected(sender, now=self.now))
            case "stall":  # it is not called in time
                self.now += value
                self.take(self.server.tick(now=self.now))
            case "time":
                self.pass_time(value)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while (at := min(self.server.next_deadline(), until)) < until:
            self.now = at
            self.take(self.server.tick(now=at))
        self.now = until
        self.take(self.server.tick(now=until))


def step(what: str, values: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(st.just(what), workers, lives, values)


nothing = st.none()
steps = st.one_of(
    step("hello", st.sampled_from(["", "here", "there"])),  # where it is, which a liar may change
    step("lie", reports),
    step("follow", calls),
    step("follow", calls),
    step("layout", nothing),
    step("disconnect", nothing),
    step("time", st.sampled_from([0.1, 1.0, 2.5, 5.0])),
    step("stall", st.sampled_from([0.1, 1.0, 2.5, 5.0])),
)


@settings(max_examples=150)
@given(st.booleans(), st.lists(steps, max_size=60))
def test_it_never_raises_and_never_contradicts_itself(fresh: bool, history: list) -> None:
    audience = Audience(fresh)
    for who in WORKERS:
        audience.do(("hello", who, "1", None))
    for one in history:
        audience.do(one)
    audience.server.status(now=audience.now)
    audience.do(("time", WORKERS[0], "1", 5.0))
    audience.do(("time", WORKERS[0], "1", 5.0))
    assert len(audience.server.state.members) == 0, "whoever is silent for a lease is gone"
    assert audience.server.state.reads.all() == []


def a_listener(audience: Audience, who: WorkerId) -> Listener:
    return audience.listeners[f"{who}#1"]


def test_the_followers_of_this_test_do_publish_and_replicate() -> None:
    """Without this, the properties above might hold because nothing ever happens."""
    audience = Audience(fresh=True)
    publish, fill = CallReport(0, "publish", 1, Digest("r")), CallReport(0, "replicate", "latest")
    for who in WORKERS:
        audience.do(("hello", who, "1", None))
    for _ in range(8):
        for who in WORKERS:
            audience.do(("follow", who, "1", publish if who.replica == "trainer" else fill))
    for who in WORKERS:
        assert isinstance(a_listener(audience, who).report.buffer, Holding), who
    assert audience.server.state.models[WORKERS[0].model].newest == 1
    assert audience.server.state.counters["grants"] >= 4
