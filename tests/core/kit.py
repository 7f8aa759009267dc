"""Short ways to make the values that the rules of the core are about."""

from msgspec import structs

from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import (
    PROTOCOL,
    Answer,
    CallReport,
    Grant,
    Hello,
    Holding,
    LayoutInfo,
    Orders,
    Report,
    Source,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version, WorkerId, worker_id
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server
from tensorhub.server.selection import Candidate
from tensorhub.worker import events
from tensorhub.worker.machine import Worker

LEASE_S = Settings().lease_s
LAYOUT = Layout((TensorSpec("w", "float32", (4,), (1,), 0, 16),), 16)


def worker(replica: str, shard: int = 0, model: str = "policy") -> WorkerId:
    return worker_id(model, replica, shard)


def hello(who: WorkerId, *, shards: int = 1, life: str = "1", host: str = "", site: str = "") -> Hello:
    line = ("x://1",)
    return Hello(PROTOCOL, who.model, who.replica, who.shard, shards, life, endpoints=line, host=host, site=site)


def grant(
    ticket: int, *, source: WorkerId | None = None, version: int = 1, root: str = "r", from_host: bool = False
) -> Grant:
    where = Source(source or worker("trainer"), from_host, (), Digest(root))
    return Grant(Ticket(ticket), Version(version), (where,), "because")


def across(ticket: int, *, replica: str = "trainer", version: int = 1, to_host: bool = False) -> Grant:
    """Out of two shards of that replica, with another layout."""
    sources = tuple(Source(worker(replica, shard), False, (), Digest(f"r{shard}")) for shard in (0, 1))
    return Grant(Ticket(ticket), Version(version), sources, "because", to_host=to_host, is_across=True)


def candidate(
    replica: str,
    *,
    load: int = 0,
    done: int | None = None,
    published: bool = False,
    is_withdrawing: bool = False,
    is_doubtful: bool = False,
    is_near: bool = False,
    is_same_site: bool = True,
    avoided_until: float = float("-inf"),
    leaving_site: int = 0,
) -> Candidate:
    """A candidate source; whole unless `done` chunks are named."""
    return Candidate(
        worker=worker(replica),
        load=load,
        is_full=done is None,
        done=done or 0,
        published=published,
        is_withdrawing=is_withdrawing,
        is_doubtful=is_doubtful,
        is_near=is_near,
        is_same_site=is_same_site,
        avoided_until=avoided_until,
        leaving_site=leaving_site,
    )


def called(number: int, verb: str = "update", spec: int | str = "latest", **more: object) -> CallReport:
    return CallReport(number, verb, spec, **more)  # type: ignore[arg-type]


def report(number: int, **more: object) -> Report:
    return Report(number, **more)  # type: ignore[arg-type]


def orders(number: int, **more: object) -> Orders:
    """The server's `number`th orders, which answer everything that the worker has reported up to then."""
    return Orders(Number(number), Number(1), number, 4.0, 3.6, 1.0, position=0, **more)  # type: ignore[arg-type]


class Conversation:
    """Tells a worker things, and keeps what it wants done."""

    epoch = Number(0)  # of what is published

    def __init__(self, *told: events.Event) -> None:
        self.worker = Worker(worker("rollout"))
        self.wanted: list[events.Effect] = []
        self.now = 0.0
        self.tell(*told)

    @classmethod
    def begun(cls, *, max_copies: int = 0) -> "Conversation":
        """With a worker that has tensors and has heard from the server once."""
        registered = events.Registered(LayoutInfo(LAYOUT), Digest("l"), 16, max_copies)
        return cls(events.Connected(), registered, events.Received(orders(1)))

    def resolved(self, version: int) -> Answer:
        """The server's word that the call under way is about that version."""
        assert self.worker.call is not None
        assert self.worker.call.number is not None
        return Answer(self.worker.call.number, Version(version), epoch=self.epoch)

    def tell(self, *told: events.Event) -> None:
        for event in told:
            self.wanted += self.worker.handle(event, now=self.now)
            self.worker.check_invariants()

    def wants(self, effect: events.Effect) -> bool:
        return effect in self.wanted

    @property
    def errors(self) -> list[str]:
        """Codes of the errors in which calls have ended."""
        return [e.error.code for e in self.wanted if isinstance(e, events.Finished) and e.error is not None]


class Fleet:
    """A server, and workers that say what they are told to say."""

    def __init__(self, *, fresh: bool = True) -> None:
        self.server = Server(Settings(), 0.0, 1_000, fresh=fresh)
        self.now = 0.0
        self._numbers: dict[WorkerId, int] = {}

    def says(self, who: WorkerId, *, shards: int = 1, is_passing: bool = False, **more: object) -> None:
        """A report of that worker, who says hello first if it is new."""
        if who not in self._numbers:
            its = structs.replace(hello(who, shards=shards), is_passing=is_passing)
            self.server.handle(its, sender=str(who), now=self.now)
        number = self._numbers[who] = self._numbers.get(who, 0) + 1
        report = Report(number, layout=Digest("l"), size_bytes=16, **more)  # type: ignore[arg-type]
        self.server.handle(report, sender=str(who), now=self.now)
        self.server.check_invariants()

    def publishes(self, version: int, who: WorkerId, number: int, root: str = "r") -> None:
        call = CallReport(number, "publish", version, Digest(root))
        self.says(who, call=call)
        held = Holding(Version(version), Digest(root), published=True)
        self.says(who, call=call, buffer=held)
        self.says(who, buffer=held, ended=number, finished=number)

    def passes(self, seconds: float, *living: WorkerId, **more: object) -> None:
        """Time passes, in which these go on reporting that they live; who is not named falls silent."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for who in living:
                self.says(who, **more)
            self.server.tick(now=self.now)
