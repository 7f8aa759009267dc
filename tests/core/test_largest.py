"""The longest report that a worker can send, and the longest orders that it can be given, fit the wire.

Whatever outgrows the limit is refused, and again with each report: the worker would be gone for good. So everything is
made as long as it can be at once: names of 200 characters of four bytes, every table full, every text endless.
"""

from tensorhub.protocol.messages import (
    HIGHEST_VERSION,
    MAX_COPIES,
    MAX_CROSS_SITE_VERSIONS,
    MAX_FAILURES,
    MAX_PINS,
    MAX_REPORT_BYTES,
    MAX_SOURCES,
    OTHERS,
    Answer,
    CallReport,
    Failure,
    Grant,
    LayoutInfo,
    Orders,
    Report,
    Source,
    add_up,
)
from tensorhub.protocol.names import MAX_NAME, Digest, Number, ReplicaName, Shard, Ticket, Version, worker_id
from tensorhub.runtime.connection import MAX_ENDPOINTS, MAX_WORD, decode_to_server, decode_to_worker, encode
from tensorhub.server.admission import MAX_SHARDS
from tensorhub.server.groups import GroupCall, Replica
from tensorhub.worker import events
from tensorhub.worker.machine import Worker

from .kit import LAYOUT

HIGHEST = 2**62
SOURCES, RECEIVED = 1_500, 2**50
ROOT = Digest("f" * 64)
ENDLESS = "\N{GRINNING FACE}" * 50_000
NAME = "n" * MAX_NAME
LONGEST = worker_id(NAME, NAME, MAX_SHARDS - 1)
FAILURE = Failure("corrupt-transfer", ENDLESS, ENDLESS)


def test_a_bounded_table_keeps_the_latest_names_and_the_sum() -> None:
    table: dict[str, int] = {}
    for name in ("a", "b", "c", "a", "d"):
        add_up(table, name, 10, most=2)
    assert sum(table.values()) == 50
    assert {name for name in table if name != OTHERS} == {"a", "d"}


class Busy:
    """A worker to which everything happens that makes a report longer."""

    def __init__(self) -> None:
        received: dict[str, int] = {}
        for number in range(SOURCES):
            name = f"{number}{NAME}"[:MAX_NAME]
            add_up(received, name, RECEIVED, most=MAX_SOURCES)
        far = {HIGHEST - number: HIGHEST for number in range(MAX_CROSS_SITE_VERSIONS)}
        self.worker = Worker(LONGEST, received_bytes=received, cross_site_bytes=far)
        self.number = HIGHEST // 2
        self.reports: list[Report] = []
        self.grant: Grant | None = None
        self.tell(events.Connected())
        self.tell(events.Registered(LayoutInfo.of(LAYOUT), ROOT, HIGHEST, max_copies=100))
        pins = tuple(Version(HIGHEST - number) for number in range(MAX_PINS))
        self.tell(events.Wished("latest-999999999", pins))

    def tell(self, event: events.Event, now: float = 0.0) -> None:
        for effect in self.worker.handle(event, now=now):
            if isinstance(effect, events.Send) and isinstance(effect.message, Report):
                self.reports.append(effect.message)

    def order(self, **more: object) -> None:
        self.number += 1
        acknowledged = self.worker.reported
        orders = Orders(Number(self.number), Number(self.number), acknowledged, 4.0, 3.6, 1.0, position=0, **more)  # type: ignore[arg-type]
        self.tell(events.Received(orders))

    def granted(self, version: int, *, to_host: bool) -> Ticket:
        ticket = Ticket(self.number + 1)
        grant = Grant(ticket, Version(version), (Source(LONGEST, True, (), ROOT),), "", to_host=to_host)
        fetch = Version(version) if to_host else None
        call = self.worker.call
        number = call.number if call is not None and call.number is not None else 0
        self.order(grant=grant, fetch=fetch, answer=Answer(number, Version(HIGHEST_VERSION)))
        return ticket


def test_the_longest_report_fits() -> None:
    it = Busy()
    for version in range(HIGHEST - MAX_COPIES, HIGHEST):
        it.tell(events.ReadEnded(it.granted(version, to_host=True), complete=True))
    it.tell(events.Called("update", "latest-999999999", deadline=60.0))
    for _ in range(2 * MAX_FAILURES):
        it.tell(events.ReadEnded(it.granted(HIGHEST_VERSION, to_host=False), failure=FAILURE))
    ticket = it.granted(HIGHEST_VERSION, to_host=False)
    it.tell(events.ReadAdvanced(ticket, HIGHEST - 1, HIGHEST))
    it.worker.state.copies.copying = ("out", Version(HIGHEST - 3))
    it.tell(events.CopiedOut(Version(HIGHEST - 3), FAILURE))
    it.tell(events.ReadMeasured(ticket, ENDLESS, ENDLESS, ENDLESS, HIGHEST))
    it.worker.state.writes = Number(HIGHEST)
    it.tell(events.Tick(), now=it.worker.next_deadline())
    report = it.reports[-1]
    assert len(report.copies) == MAX_COPIES
    assert len(report.failures) == MAX_FAILURES
    assert len(report.received_bytes) == MAX_SOURCES + 1
    assert sum(report.received_bytes.values()) == SOURCES * RECEIVED
    assert report.reading is not None
    assert report.reading.path
    assert report.copy_error is not None
    assert report.call is not None
    data = encode(report)
    assert len(data) <= MAX_REPORT_BYTES
    assert decode_to_server(data) == report


def test_the_longest_orders_fit() -> None:
    group = Replica(ReplicaName(NAME), MAX_SHARDS)
    call = group.call = GroupCall(HIGHEST, "update", "latest-999999999", 0.0)
    call.error, call.waiting = FAILURE, FAILURE
    reported = CallReport(HIGHEST, "update", "latest-999999999")
    grant = Grant(
        Ticket(HIGHEST),
        Version(HIGHEST_VERSION),
        (Source(LONGEST, True, ("\N{GRINNING FACE}" * MAX_WORD,) * MAX_ENDPOINTS, ROOT, True),),
        NAME * 4,
        to_host=True,
    )
    orders = Orders(
        Number(HIGHEST),
        Number(HIGHEST),
        HIGHEST,
        *(1e300, 1e300, 1e300),
        position=HIGHEST,
        answer=group.answer(Shard(0), reported),
        grant=grant,
        drained=Version(HIGHEST),
        newest=Version(HIGHEST),
        offload=Version(HIGHEST),
        fetch=Version(HIGHEST),
        release=tuple(range(HIGHEST, HIGHEST + MAX_COPIES)),
    )
    data = encode(orders)
    assert len(data) <= MAX_REPORT_BYTES
    assert decode_to_worker(data) == orders


def test_a_mismatch_among_four_thousand_shards_fits() -> None:
    group = Replica(ReplicaName(NAME), MAX_SHARDS)
    for shard in range(MAX_SHARDS - 1):
        group.arrive(Shard(shard), CallReport(1, "update", "latest"), now=0.0)
    odd = CallReport(1, "replicate", "latest")
    group.arrive(Shard(MAX_SHARDS - 1), odd, now=0.0)
    assert group.call is not None
    group.call.fail(Failure("group-mismatch", group.call.difference(group.name)))
    for shard, reported in ((MAX_SHARDS - 1, odd), (0, CallReport(1, "update", "latest"))):
        answer = group.answer(Shard(shard), reported)
        assert answer is not None
        assert answer.error is not None
        assert len(encode(Orders(Number(1), Number(1), 1, 1.0, 1.0, 1.0, answer=answer))) < MAX_REPORT_BYTES // 4
