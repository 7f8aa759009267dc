"""Events: what happened to models, replicas and workers, as the reference server saw it.

The server's log has a line for each. `tensorhub events`, `View.events()` and `GET /v1/events` show the newest
`MAX_EVENTS` of them. Each kind is a class here, and `kind` names it in JSON.

`number` rises with each event, over restarts of the server too. `at` is the server's clock in seconds since 1970.
`model`, `replica` and `shard` name the worker; they are empty where an event has none.
"""

from typing import Literal

import msgspec

MAX_EVENTS = 10_000  # the newest that a server keeps: some 5 MB
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size_bytes: float) -> str:
    """`0 B`, `1023 B`, `1.5 GiB`."""
    step = 0
    while step + 1 < len(UNITS) and abs(size_bytes) >= 1023.95:
        size_bytes, step = size_bytes / 1024, step + 1
    return f"{size_bytes:.0f} B" if step == 0 else f"{size_bytes:.1f} {UNITS[step]}"


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What all events have."""

    number: int = 0  # the server gives it out, as `at`
    at: float = 0.0
    model: str = ""
    replica: str = ""
    shard: int = 0

    @property
    def worker(self) -> str:
        """The worker, as messages name it."""
        return f"{self.model}/{self.replica}[{self.shard}]"

    @property
    def text(self) -> str:
        """One line for people."""
        raise NotImplementedError


class ServerStarted(_Event, frozen=True, kw_only=True, tag="server_started"):
    """A life of the reference server has begun. While it listens it publishes, drains and resolves nothing."""

    life: int  # rises with each life
    journal: str  # "found"; "none": it listens for a whole lease; "fresh": no server lived here before, by --fresh
    awaited: int = 0  # workers that the journal names; it listens until all of them have reported
    listens_s: float = 0.0  # it listens for so long at most

    @property
    def text(self) -> str:
        if self.journal == "fresh":
            return "server started as the first one: it need not listen"
        if self.journal == "none":
            return f"server started, and no journal says who lives: listens for {self.listens_s:.1f} s to all workers"
        text = "server started, with a journal"
        if not self.listens_s:
            return f"{text} by which no worker lives: it need not listen"
        return f"{text}: listens to {self.awaited} workers, for {self.listens_s:.1f} s at most"


class Joined(_Event, frozen=True, kw_only=True, tag="joined"):
    """A worker has a session."""

    shards: int = 1
    host: str = ""
    site: str = ""
    reliable: bool = True
    is_back: bool = False  # the same process had a session before: the server was restarted, or its lease had ended

    @property
    def text(self) -> str:
        where = f" of {self.shards}" if self.shards > 1 else ""
        place = "".join(f", {what} {name}" for what, name in (("host", self.host), ("site", self.site)) if name)
        spot = "" if self.reliable else ", spot"
        return f"{self.worker}{where} {'is back' if self.is_back else 'joined'}{place}{spot}"


class Left(_Event, frozen=True, kw_only=True, tag="left"):
    """A worker was closed by its own process."""

    @property
    def text(self) -> str:
        return f"{self.worker} left"


class Died(_Event, frozen=True, kw_only=True, tag="died"):
    """The session of a worker is over, and the worker had not said so.

    `seen`: "lease over", "connection closed" (before that), "not back" (it did not report to a restarted server),
    "replaced" (a worker that had lived before a restart has its place).
    """

    seen: str = "lease over"
    silent_s: float = 0.0  # since it was last heard

    @property
    def text(self) -> str:
        silent = f", not heard for {self.silent_s:.1f} s" if self.silent_s else ""
        return f"{self.worker} died: {self.seen}{silent}"


class Published(_Event, frozen=True, kw_only=True, tag="published"):
    """A version exists: all shards of `replica` have published it."""

    version: int
    size_bytes: int = 0  # of all shards
    hash_s: float = 0.0  # of the shard that took longest to hash

    @property
    def text(self) -> str:
        what = f"{size_text(self.size_bytes)}, hashed in {self.hash_s:.2f} s"
        return f"{self.model}/{self.replica} published version {self.version}: {what}"


class ReadFinished(_Event, frozen=True, kw_only=True, tag="read_finished"):
    """A worker has read a version to its end. The figures are of the last read, where it had moved."""

    version: int
    source: str  # the source's replica; of a read across layouts the replicas
    size_bytes: int = 0  # that came by this read
    seconds: float = 0.0  # from its beginning to the last verified chunk
    transport: str = ""
    path: str = ""  # how that transport moved the bytes
    is_verified: bool = True  # the digest of each chunk was checked
    to_host: bool = False  # into host memory, ahead of a call or to keep the version
    is_cross_site: bool = False

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes per second; 0 if nothing was measured."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def text(self) -> str:
        figures = f"{size_text(self.size_bytes)} in {self.seconds:.2f} s, {size_text(self.rate_bytes_per_s)}/s"
        way = f" by {self.transport}" + (f" ({self.path})" if self.path else "") if self.transport else ""
        place = " into host memory" if self.to_host else ""
        checked = "verified" if self.is_verified else "not verified"
        return f"{self.worker} read version {self.version}{place} from {self.source}{way}: {figures}, {checked}"


Cause = Literal["failed", "slow", "withdrawn", "far"]  # its read; the source; that does not serve it; in another site


class ReadMoved(_Event, frozen=True, kw_only=True, tag="read_moved"):
    """A reader goes on at another source, or begins again at the same one. It keeps the chunks that it has."""

    version: int
    source: str  # the new one: its replica
    former: str  # the source that the reader has left
    why: str = ""  # why it has left that
    cause: Cause = "failed"
    to_host: bool = False

    @property
    def text(self) -> str:
        if self.source == self.former:
            return f"{self.worker} reads version {self.version} from {self.source} again: {self.why}"
        return f"{self.worker} reads version {self.version} from {self.source} now, not {self.former}: {self.why}"


class Stalled(_Event, frozen=True, kw_only=True, tag="stalled"):
    """A call of a replica has stood still for more than 2 s, or goes on after that (`is_over`)."""

    call: str  # as its caller wrote it
    waits_for: str
    waited_s: float  # so far; of one that is over, in all
    is_over: bool = False
    is_expected: bool = False  # it waits for a version that is not published yet
    version: int | None = None  # the call's, once it is known

    @property
    def text(self) -> str:
        name = f"{self.call} of {self.model}/{self.replica}"
        if self.is_over:
            return f"{name} waits no more, after {self.waited_s:.1f} s; it waited: {self.waits_for}"
        return f"{name} has waited for {self.waited_s:.1f} s: {self.waits_for}"


class Lost(_Event, frozen=True, kw_only=True, tag="lost"):
    """No worker holds some shard of a version any more. It is not told where all workers close of their own will."""

    version: int
    why: str  # which shards no worker holds, and which worker held it last
    hint: str = ""

    @property
    def text(self) -> str:
        return f"{self.why}; {self.hint}" if self.hint else self.why


class Back(_Event, frozen=True, kw_only=True, tag="back"):
    """A version that was lost is held again."""

    version: int

    @property
    def text(self) -> str:
        return f"version {self.version} of {self.model} is back"


class Offloaded(_Event, frozen=True, kw_only=True, tag="offloaded"):
    """A worker has copied a version from its tensors to host memory, because the version must be kept."""

    version: int
    size_bytes: int = 0

    @property
    def text(self) -> str:
        return f"{self.worker} copied version {self.version} to host memory: {size_text(self.size_bytes)}"


class Refused(_Event, frozen=True, kw_only=True, tag="refused"):
    """The server refused a worker or a publish. A worker that comes again for the same reason makes no new event."""

    why: str
    address: str = ""  # of a client that has shown no right token: what it says of itself is not checked
    left_out: int = 0  # more such refusals since the last one, of which there is no event

    @property
    def text(self) -> str:
        who = self.worker if self.replica else "a client"
        where = f" at {self.address}" if self.address else ""
        more = f"; {self.left_out} more since the last one" if self.left_out else ""
        return f"refused {who}{where}: {self.why}{more}"


class WriterChanged(_Event, frozen=True, kw_only=True, tag="writer_changed"):
    """`replica` is the writer of the model from now on: it alone may publish."""

    former: str = ""  # the writer before, if the model had one

    @property
    def text(self) -> str:
        instead = f", after {self.former}" if self.former else ""
        return f"{self.replica} is the writer of {self.model}{instead}"


class Warned(_Event, frozen=True, kw_only=True, tag="warning"):
    """Something else that its operator should know."""

    what: str

    @property
    def text(self) -> str:
        return self.what


Event = (
    ServerStarted
    | Joined
    | Left
    | Died
    | Published
    | ReadFinished
    | ReadMoved
    | Stalled
    | Lost
    | Back
    | Offloaded
    | Refused
    | WriterChanged
    | Warned
)


def is_alarming(event: Event) -> bool:
    """True if the log has the event as a warning."""
    if isinstance(event, Stalled):
        return not (event.is_over or event.is_expected)
    return isinstance(event, Died | Lost | Refused | Warned)


class EventsView(msgspec.Struct, frozen=True):
    """The answer of `/v1/events`: events after a number, oldest first."""

    events: tuple[Event, ...] = ()
    last: int = 0  # ask for those after this number next
    missed: int = 0  # events after the number asked for that are not kept any more

    def all(self) -> tuple[Event, ...]:
        """The events; before them a warning if some are missing."""
        if not self.missed:
            return self.events
        first = self.events[0].number if self.events else self.last
        at = self.events[0].at if self.events else 0.0
        text = f"{self.missed} events before this one are not kept any more"
        return (Warned(number=first - 1, at=at, what=text), *self.events)
