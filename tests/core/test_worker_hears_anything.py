"""Whatever a worker is told, in whatever order: it never raises, never contradicts itself, and every call ends in time.

The data plane keeps its contract (an open read ends once, serving stops once it was asked to); the server keeps none.
"""

from dataclasses import dataclass, field
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.protocol.messages import Answer, Failure, Holding, LayoutInfo, Orders, Refusal, Report
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.runtime.connection import decode_to_server, encode
from tensorhub.worker import events
from tensorhub.worker.machine import Worker

from .kit import LAYOUT, grant, worker

versions = st.integers(1, 4).map(Version)
failures = st.builds(Failure, st.sampled_from(["group-incomplete", "version-unavailable"]), st.just("why"))
answers = st.builds(
    Answer, st.integers(1, 6), st.none() | versions, st.booleans(), st.none() | failures, st.none() | failures
)
orders = st.builds(
    Orders,
    number=st.integers(1, 60).map(Number),
    session=st.integers(1, 3).map(Number),
    acknowledged=st.integers(0, 40),
    lease_s=st.just(4.0),
    trust_s=st.just(3.6),
    report_s=st.just(1.0),
    position=st.none() | st.integers(0, 5),
    answer=st.none() | answers,
    grant=st.none() | st.builds(grant, st.integers(1, 60), version=versions, root=st.sampled_from("rs")),
    drained=st.none() | versions,
)
refusals = st.builds(Refusal, st.just("shard-taken"), st.just("why"), retry_s=st.sampled_from([0.0, 1.0]))


def obedient(number: int, **more: object) -> Orders:
    """Orders that make sense to a worker in its first call."""
    return Orders(Number(number), Number(1), number, 4.0, 3.6, 1.0, **more)  # type: ignore[arg-type]


calls = st.one_of(
    st.tuples(st.just("publish"), versions, st.sampled_from([Digest("r"), Digest("s")])),
    st.tuples(st.just("unpublish"), st.just(""), st.just(Digest(""))),
    st.tuples(st.sampled_from(["replicate", "update"]), st.sampled_from(["latest", 1, 2]), st.just(Digest(""))),
    st.tuples(st.just("frobnicate"), st.just("nonsense"), st.just(Digest(""))),
)
steps = st.one_of(
    st.tuples(st.just("told"), orders),
    st.tuples(st.just("told"), orders),
    st.tuples(st.just("granted"), versions),
    st.tuples(st.just("finished"), st.booleans()),
    st.tuples(st.just("drained"), st.none()),
    st.tuples(st.just("refused"), refusals),
    st.tuples(st.just("call"), calls),
    st.tuples(st.just("cancel"), st.none()),
    st.tuples(st.just("register"), st.none()),
    st.tuples(st.just("advance"), st.integers(1, 4)),
    st.tuples(st.just("end"), st.sampled_from(["complete", "fails", "stops"])),
    st.tuples(st.just("stop serving"), st.none()),
    st.tuples(st.just("connection"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from([0.1, 1.0, 3.0, 9.0])),
    st.tuples(st.just("close"), st.none()),
)


@dataclass
class Shell:
    """Carries out what the worker wants, and watches that it never wants what it may not."""

    now: float = 0.0
    waits_until: float | None = None
    reading: int | None = None
    is_stopping: bool = False
    serving: int | None = None
    must_stop: int | None = None
    last_ticket: int = 0
    has_left: bool = False
    reports: int = 0
    worker: Worker = field(default_factory=lambda: Worker(worker("rollout")))

    def tell(self, event: events.Event) -> None:
        effects = self.worker.handle(event, now=self.now)
        self.worker.check_invariants()
        for effect in effects:
            self.carry_out(effect)
        if self.waits_until is not None:
            assert self.now < self.waits_until, "a call outlived its deadline"

    def carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Send(message=Report() as report):
                assert report.number > self.reports, "reports rise"
                assert decode_to_server(encode(report)) == report
                self.reports = report.number
            case events.StartRead(grant=found):
                assert self.reading is None, "one read at a time"
                assert self.must_stop is None, "nobody reads what begins to change"
                assert found.ticket > self.last_ticket, "tickets never go back"
                self.reading = self.last_ticket = found.ticket
                self.is_stopping, self.serving = False, found.version
            case events.StopRead(ticket=ticket):
                assert ticket == self.reading
                assert not self.is_stopping, "it was asked to stop already"
                self.is_stopping = True
            case events.StartServing(version=version):
                assert self.serving is None
                assert self.reading is None
                self.serving = version
            case events.StopServing(version=version):
                assert self.serving == version
                assert self.must_stop is None
                self.must_stop = version
            case events.Finished(number=number):
                assert self.waits_until is not None or number == 0, "an end of a call that nobody made"
                self.waits_until = None
            case events.Left():
                assert not self.has_left
                self.has_left = True

    def do(self, step: tuple) -> None:
        what, value = step
        match what:
            case "told" | "refused":
                self.tell(events.Received(value))
            case "granted":
                given = grant(self.worker.state.seen + 1, version=value)
                call = self.worker.call
                answer = Answer(call.number, value) if call is not None and call.number is not None else None
                self.tell(events.Received(self.new_orders(answer=answer, grant=given)))
            case "finished":
                call = self.worker.call
                if call is not None and call.number is not None:
                    self.tell(events.Received(self.new_orders(answer=Answer(call.number, call.resolved, value))))
            case "drained":
                version = getattr(self.worker.buffer, "version", None)
                self.tell(events.Received(self.new_orders(drained=version)))
            case "call":
                self.call(*value)
            case "cancel":
                self.waits_until = None  # nobody waits for an answer any more
                self.tell(events.Cancelled())
            case "register":
                if self.worker.may_register:
                    self.tell(events.Registered(LayoutInfo.of(LAYOUT), LAYOUT.digest(), LAYOUT.size_bytes))
            case "connection":
                self.tell(events.Connected() if value else events.Disconnected())
            case "close":
                self.tell(events.Closing(self.now + 5.0))
            case "time":
                self.advance(value)
            case _:
                self.data_plane(what, value)

    def new_orders(self, **more: object) -> Orders:
        number = Number(self.worker.state.seen + 2)
        return Orders(number, Number(1), self.reports, 4.0, 3.6, 1.0, position=self.position, **more)  # type: ignore[arg-type]

    @property
    def position(self) -> int:
        call = self.worker.call
        return call.number - 1 if call is not None and call.number is not None else 0

    def call(self, verb: str, spec: int | str, root: Digest) -> None:
        call = events.Called(verb, spec, self.now + 5.0, root)
        if self.worker.call is None:
            self.waits_until = self.now + 5.0
            self.tell(call)
            return
        (refused,) = [e for e in self.worker.handle(call, now=self.now) if isinstance(e, events.Finished)]
        assert refused.error is not None, "one call at a time"

    def data_plane(self, what: str, value: object) -> None:
        if what == "stop serving" and self.must_stop is not None:
            version, self.must_stop, self.serving = self.must_stop, None, None
            self.tell(events.ServingStopped(Version(version)))
        elif what == "advance" and self.reading is not None:
            self.tell(events.ReadAdvanced(Ticket(self.reading), int(str(value)), 4))
        elif what == "end" and self.reading is not None:
            ticket, self.reading = Ticket(self.reading), None
            failure = Failure("source-lost", "gone") if value == "fails" else None
            self.tell(events.ReadEnded(ticket, value == "complete", failure))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(200):
            at = self.worker.next_deadline()
            if at > until:
                break
            self.now = max(self.now, at)
            self.tell(events.Tick())
        else:
            raise AssertionError(f"a deadline that does not move: {at}")
        self.now = until


@settings(max_examples=300)
@given(st.lists(steps, max_size=60))
def test_it_never_raises_and_every_call_ends(history: list) -> None:
    shell = Shell()
    shell.do(("register", None))
    shell.do(("connection", True))
    for one in history:
        if not shell.has_left:
            shell.do(one)
    shell.advance(6.0)
    assert shell.waits_until is None
    assert shell.worker.next_deadline() < inf or not shell.worker.connected or shell.has_left


def test_the_shell_of_this_test_can_bring_a_worker_all_the_way() -> None:
    """Without this, the property above might hold because nothing ever happens."""
    shell = Shell()
    for one in [
        ("register", None),
        ("connection", True),
        ("told", obedient(1, position=0)),
        ("call", ("replicate", "latest", Digest(""))),
        ("granted", Version(3)),
        ("advance", 2),
        ("end", "complete"),
        ("finished", True),
    ]:
        shell.do(one)
    assert shell.worker.buffer == Holding(Version(3), Digest("r"))
    assert shell.waits_until is None
