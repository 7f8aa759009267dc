"""What is true in a simulated cluster, as seen from outside the core: bytes, publishes, calls, messages and faults.

Of the core only messages, names and events are imported. No table of a server or a worker is read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from tensorhub.protocol.messages import Failure, Grant, Hello, Orders, Poisoned, Report
from tensorhub.protocol.names import Digest, ModelName, Number, ReplicaName, Shard, Ticket, Version, WorkerId
from tensorhub.worker import events
from tensorhub.worker.events import Finished

from .contents import derived
from .plan import Misfortune, Plan
from .world import World

Memory = list[int]
Place = tuple[str, int]  # a model, with its cut if it has several; and a shard
BAR = "|"  # between a model and a cut
MAX_PAST = 20  # calls of one process that are remembered
ALONE = 0.9  # of a lease, however clocks drift
RECONNECT_S = 2.5  # a new connection stands by then, and something was said on it
OF_SERVER = ("restart-server", "pause-server")
OF_DATA = ("unplug", "slow", "stutter")
DEATHS = ("crash", "gone")
FILLS = ("replicate", "update")


class Read(Protocol):
    """A read as the simulated data plane sees it."""

    grant: Grant
    began: float
    is_stopped: bool
    is_ended: bool
    shares: bool
    root: Digest  # of what it brings, in the reader's own cut
    ticket: Ticket

    @property
    def into(self) -> Memory: ...


@dataclass(eq=False)
class Held:
    """A version that is whole in the registered memory, until its bytes may be changed."""

    version: Version
    root: Digest
    since: float
    published: bool = False
    is_served: bool = True
    is_of_stopped: bool = False  # its read was told to stop before the last chunk: the worker may not trust it


@dataclass(eq=False)
class Copied:
    """A version that is whole in host memory."""

    version: Version
    root: Digest
    since: float
    memory: Memory  # which other workers may share
    is_counted: bool = True  # here, and not where it is shared from


@dataclass(eq=False)
class Call:
    """One call of one shard's caller."""

    verb: str
    spec: int | str
    root: Digest
    began: float
    deadline: float  # by the world's clock; the process's own runs a little otherwise
    had: Version | None  # what the worker held
    claim: Version | None = None  # of an unpublish: the number that it asks for
    is_missed: bool = False  # it failed before it was made
    number: int = 0  # its position, once that was said
    resolved: Version | None = None  # as a server has answered, wherever that got
    ended: float = inf
    outcome: Finished | None = None
    is_cancelled: bool = False
    is_touched: bool = False  # a byte of the registered memory was written
    is_alone: bool = False  # it has ended when no server had been heard for about a lease

    @property
    def error(self) -> Failure | None:
        return self.outcome.error if self.outcome is not None else None


@dataclass(eq=False)
class Life:
    """One life of one process."""

    me: WorkerId
    name: str
    hello: Hello
    memory: Memory
    host_memory: Callable[[Version], Memory]  # where a copy is
    clock: Callable[[], float]  # its own
    started: float
    cut: str = ""
    is_alive: bool = True
    closing: float = inf  # when close() was called
    close_deadline: float = inf
    trust_until: float = -inf  # by its own clock
    registered: float = 0.0
    layout: Digest = Digest("")
    held: Held | None = None
    copies: dict[Version, Copied] = field(default_factory=dict)
    freeing: dict[Version, Copied] = field(default_factory=dict)  # no copies any more, but their memory is here yet
    copying: tuple[Version, Digest] | None = None  # out
    read: Read | None = None
    read_for: Call | None = None  # in which call it began
    stopped: dict[Ticket, None] = field(default_factory=dict)  # tickets that it was told to end
    call: Call | None = None
    past: list[Call] = field(default_factory=list)
    pins: tuple[Version, ...] = ()
    heard: Report | None = None  # the latest that a server took in
    heard_at: float = -inf
    heard_by: int = 0  # which life of the server; 0 once that has refused it
    told_at: float = -inf  # when a server's orders last came
    told_number: Number = Number(0)  # theirs
    back_at: float = -inf  # when they last came after about a lease without any
    is_writer: bool = False  # a publish, or a claim, has ended well
    waits_since: float = inf  # it has been ready to read what it needs for so long
    unanswered_since: float = inf  # and in an update to a version that no worker that lives has whole

    @property
    def place(self) -> Place:
        return f"{self.me.model}{BAR}{self.cut}" if self.cut else self.me.model, self.me.shard

    @property
    def hosted(self) -> int:
        """Versions that fill its host memory, whole or being copied there."""
        return sum(copy.is_counted for copy in self.copies.values()) + (self.copying is not None)

    def root_of(self, version: Version) -> Digest | None:
        """The content that it has under that number, to read or to come back to."""
        if self.held is not None and self.held.version == version:
            return self.held.root
        return self.copies[version].root if version in self.copies else None

    def calls(self) -> list[Call]:
        """The latest last."""
        return [*self.past, *([self.call] if self.call is not None else [])]


@dataclass(eq=False)
class Made:
    """What one replica has published under a number."""

    model: ModelName
    version: Version
    replica: ReplicaName
    cut: str
    roots: dict[int, Digest] = field(default_factory=dict)
    exists: float = inf  # since when all shards have had it
    server_life: int = 0  # at that time
    is_known: bool = False  # a caller was told by a server that it has it
    is_alone: bool = False  # no server has let it happen

    def root_of(self, place: Place) -> Digest | None:
        """What it is in that shard of its own cut or of another one."""
        cut = place[0].partition(BAR)[2]
        if cut == self.cut:
            return self.roots.get(place[1])
        own = self.roots.get(place[1], next(iter(self.roots.values()), None))  # another cut may have more shards
        return derived(own, cut, place[1]) if own is not None else None


class Weather:
    """When something last went wrong with the server, a message, a worker ("lives") or the bytes that it reads."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.last = dict.fromkeys(("server", "messages", "lives", "data"), 0.0)  # the cluster has just been started
        self.last_but_deaths = 0.0  # of misfortunes
        self._open: dict[int, Misfortune] = {}

    def kinds(self, misfortune: Misfortune) -> tuple[str, ...]:
        if misfortune.kind in OF_SERVER:
            return ("server",)
        return ("data",) if misfortune.kind in OF_DATA else ("lives", "data")

    def struck(self, number: int, misfortune: Misfortune) -> None:
        self._open[number] = misfortune

    def passed(self, number: int, now: float) -> None:
        misfortune = self._open.pop(number)
        for kind in self.kinds(misfortune):
            self.disturbed(kind, now)
        if misfortune.kind not in DEATHS:
            self.last_but_deaths = max(self.last_but_deaths, now)

    def disturbed(self, kind: str, now: float) -> None:
        self.last[kind] = max(self.last[kind], now)

    def is_quiet(self, since: float, *kinds: str) -> bool:
        """Nothing of those kinds, or nothing at all, has gone wrong since then, nor at any time in the lease before."""
        asked = kinds or tuple(self.last)
        before = since - 2 * self.plan.settings.lease_s - RECONNECT_S
        is_hit = any(kind in asked for bad in self._open.values() for kind in self.kinds(bad))
        return not is_hit and all(self.last[kind] <= before for kind in asked)

    def is_quiet_but_for_deaths(self, since: float) -> bool:
        """Since then, and in the lease before, nothing has gone wrong but that processes were killed."""
        before = since - 2 * self.plan.settings.lease_s - RECONNECT_S
        is_hit = any(bad.kind not in DEATHS for bad in self._open.values())
        return not is_hit and max(self.last_but_deaths, self.last["messages"], self.last["server"]) <= before

    def is_down(self, life: Life) -> bool:
        """Something hits that process now."""
        return any(_is_hit(life, bad) for bad in self._open.values())

    def is_paused(self, life: Life) -> bool:
        """The process stands still now."""
        return any(bad.kind == "pause" and _is_hit(life, bad) for bad in self._open.values())


def _is_hit(life: Life, bad: Misfortune) -> bool:
    """By name, by host, by site; as the one end or the other."""
    names = (str(life.me), life.hello.host, life.hello.site)
    return bad.target in names or (bool(bad.other) and bad.other in names)


class Truth:
    """Changed by what happens, asked by the oracles."""

    def __init__(self, world: World, plan: Plan, contents: dict[Digest, tuple[int, ...]]) -> None:
        self.world, self.plan, self.contents = world, plan, contents
        self.settings, self.conditions = plan.settings, plan.conditions
        self.weather = Weather(plan)
        self.lives: dict[WorkerId, Life] = {}  # the living
        self.by_name: dict[str, Life] = {}
        self.by_place: dict[Place, dict[WorkerId, None]] = {}
        self.made: dict[tuple[str, Version], dict[ReplicaName, Made]] = {}
        self.recut: dict[str, None] = {}  # models of which a worker has registered other tensors than before
        self.server_life = 0
        self.no_server_since = inf
        self.writers: dict[str, tuple[Life, int]] = {}  # who was last let publish or claim, and by which server's life

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def spread_s(self) -> float:
        """By then a report and its answer have got where they should."""
        return 2 * self.settings.report_s + 6 * self.conditions.delay_s + 0.1

    # --- lives and versions -------------------------------------------------------------------------------------------

    def born(self, life: Life) -> None:
        self.lives[life.me] = self.by_name[life.name] = life
        self.by_place.setdefault(life.place, {})[life.me] = None

    def died(self, life: Life) -> None:
        life.is_alive = False
        self.weather.disturbed("lives", self.now)
        if self.lives.get(life.me) is life:
            del self.lives[life.me]
        if life.call is not None:
            life.call.ended = self.now

    def is_alone(self, life: Life) -> bool:
        """It has heard nothing of a server for about a lease, and may go on without one."""
        return self.now > life.told_at + ALONE * self.settings.lease_s

    def was_alone(self, life: Life) -> bool:
        """A shard of its replica is alone, or was within the last lease or in its last call, and acted by itself."""
        since = min([self.now - self.settings.lease_s, *(call.began for call in life.calls()[-1:])])
        return any(self.is_alone(each) or each.back_at > since for each in (life, *self.group(life)))

    def shards_of(self, life: Life) -> int:
        return self.conditions.shards_in(life.cut)

    def group(self, life: Life) -> Iterator[Life]:
        """The living of its replica, itself too."""
        for shard in range(self.shards_of(life)):
            found = self.lives.get(WorkerId(life.me.model, life.me.replica, Shard(shard)))
            if found is not None:
                yield found

    def at(self, place: Place) -> Iterator[Life]:
        """The living that have this shard of this model, whatever version."""
        return (self.lives[me] for me in self.by_place.get(place, {}) if me in self.lives)

    def of_model(self, model: str) -> list[Life]:
        return [life for life in self.lives.values() if life.me.model == model]

    def published(self, life: Life, version: Version, root: Digest) -> None:
        """A shard serves what its caller publishes. The version exists if all shards have it."""
        made = self.made.setdefault((life.me.model, version), {})
        mine, group = made.get(life.me.replica), list(self.group(life))
        if mine is None or mine.roots.get(life.me.shard, root) != root:
            mine = made[life.me.replica] = Made(life.me.model, version, life.me.replica, life.cut)
            since = life.call.began if life.call is not None else self.now
            for each in group:  # of a former call nothing counts
                if (held := each.held) and held.published and held.version == version and held.since >= since:
                    mine.roots[each.me.shard] = held.root
        mine.roots[life.me.shard] = root
        if len(group) == self.shards_of(life) and mine.exists == inf:
            helds = [each.held for each in group]
            if all(h is not None and h.version == version and h.root == mine.roots.get(i) for i, h in enumerate(helds)):
                mine.exists, mine.server_life = self.now, self.server_life
                if any(map(self.was_alone, group)):
                    mine.is_alone, mine.server_life = True, 0

    def made_as(self, model: str, version: Version) -> list[Made]:
        """What replicas have published under that number."""
        return list(self.made.get((model, version), {}).values())

    def exists(self, model: str, version: Version) -> Made | None:
        """The last that came to be under that number: a publish that a server has let happen has the higher epoch."""
        found = [made for made in self.made_as(model, version) if made.exists < inf]
        return max(found, key=lambda made: (not made.is_alone, made.exists), default=None)

    def existing(self, model: str) -> list[Version]:
        """The versions that came to be, newest first."""
        found = (version for name, version in self.made if name == model)
        return sorted((version for version in found if self.exists(model, version) is not None), reverse=True)

    def newest(self, model: str) -> Version | None:
        return next(iter(self.existing(model)), None)

    def cuts(self, model: str) -> list[list[Place]]:
        """The ways in which a model's replicas are cut: the shards of each."""
        cuts = dict.fromkeys(each.cut for each in self.plan.replicas)
        names = {f"{model}{BAR}{cut}" if cut else model: self.conditions.shards_in(cut) for cut in cuts}
        return [[(name, shard) for shard in range(shards)] for name, shards in names.items()]

    def holders(self, place: Place, version: Version) -> list[Life]:
        """The living that have all of that shard of the version."""
        made = self.exists(place[0].partition(BAR)[0], version)
        root = made.root_of(place) if made is not None else None
        found = ((life, life.root_of(version)) for life in self.at(place))
        return [life for life, own in found if own is not None and root in (None, own)]

    def is_whole(self, model: str, version: Version, counts: Callable[[Life], bool] = lambda life: True) -> bool:
        """Each shard of some cut has a living holder that counts."""
        return any(all(any(map(counts, self.holders(place, version))) for place in cut) for cut in self.cuts(model))

    def is_sole_publisher(self, model: str) -> bool:
        return sum(each.is_trainer and each.model == model for each in self.plan.replicas) == 1

    # --- what happens -------------------------------------------------------------------------------------------------

    def told(self, life: Life, event: events.Event) -> None:
        """The shell tells the worker's machine."""
        match event:
            case events.Called(verb, spec, deadline, root, claim, missed=missed):
                if life.call is None:
                    had = life.held.version if life.held is not None else None
                    until = self.now + deadline - life.clock()
                    life.call = Call(verb, spec, root, self.now, until, had, claim, missed is not None)
            case events.Cancelled():
                if life.call is not None:
                    life.call.is_cancelled = True
                    self._ended(life)
            case events.Received(Orders(number=number)) if number > life.told_number:  # late ones say nothing
                life.told_number = number
                if self.is_alone(life) and life.told_at > -inf:
                    life.back_at = self.now
                life.told_at = self.now
            case events.Closing():
                life.closing = min(life.closing, self.now)
                life.close_deadline = self.now + event.deadline - life.clock()
            case events.Registered(digest=digest):
                if life.layout not in ("", digest):
                    self.recut[life.me.model] = None
                life.layout, life.registered, life.held = digest, self.now, None
            case events.Wished(_, pins):
                life.pins = pins
            case events.ReadEnded(complete=complete, failure=failure):
                self._read_ended(life, complete, failure)
            case events.CopyCounted(version):
                if version in life.copies:
                    life.copies[version].is_counted = True
            case events.CopiedIn(failure=failure):
                if failure is not None:
                    self.weather.disturbed("data", self.now)
            case events.CopiedOut(version, failure):
                if failure is None and life.copying is not None:
                    life.copies[version] = Copied(version, life.copying[1], self.now, life.host_memory(version))
                elif failure is not None:
                    self.weather.disturbed("data", self.now)
                life.copying = None
            case events.CopyDropped(version):
                life.freeing.pop(version, None)

    def _read_ended(self, life: Life, complete: bool, failure: Failure | None) -> None:
        read, life.read = life.read, None
        if read is None:
            return
        version = read.grant.version
        if complete and read.grant.to_host:
            life.copies[version] = Copied(version, read.root, self.now, read.into, not read.shares)
        elif complete and life.call is not None and life.call is life.read_for:
            life.held = Held(version, read.root, self.now, is_of_stopped=read.is_stopped)
        elif failure is not None and not read.is_stopped:
            self.weather.disturbed("data", self.now)

    def wants(self, life: Life, effect: events.Effect) -> None:
        """The worker's machine wants something done."""
        match effect:
            case events.StartServing(version, root):
                is_published = life.call is not None and life.call.verb == "publish"
                life.held = Held(version, root, self.now, is_published)
            case events.StopServing(version):
                if life.held is not None and life.held.version == version:
                    life.held.is_served = False
            case events.CopyOut(version):
                life.copying = (version, life.held.root if life.held is not None else Digest(""))
            case events.DropCopy(version):
                if version in life.copies:
                    life.freeing[version] = life.copies.pop(version)
            case events.Trust(until):
                life.trust_until = until
            case events.StopRead(ticket):
                life.stopped[ticket] = None
            case events.Finished() as finished:
                if life.call is not None:
                    life.call.outcome = finished
                    self._ended(life)

    def _ended(self, life: Life) -> None:
        call = life.call
        assert call is not None
        call.ended, call.is_alone = self.now, self.is_alone(life)
        if call.outcome is not None and call.error is None:
            if call.verb == "unpublish":
                life.held = None
            life.is_writer |= call.verb == "publish" or call.claim is not None
            is_told = call.outcome.number and not self.is_alone(life)
            if is_told and call.outcome.version is not None:
                for made in self.made_as(life.me.model, call.outcome.version):
                    made.is_known = True
        life.past = [*life.past, call][-MAX_PAST:]
        life.call = None

    def begins(self, life: Life, read: Read) -> None:
        life.read, life.read_for = read, life.call

    def said(self, life: Life, report: Report) -> None:
        """A report goes out, wherever it gets."""
        if isinstance(report.buffer, Poisoned) and life.held is not None and life.held.is_of_stopped:
            life.held = None
        if report.call is not None and life.call is not None:
            life.call.number = report.call.number  # it may have been numbered anew

    def heard(self, life: Life, report: Report) -> None:
        """A server takes in a report."""
        if life.heard is not None and life.heard_by == self.server_life and report.number <= life.heard.number:
            return
        is_sure = self.now - life.heard_at < self.settings.lease_s / 2
        if not is_sure and self.writers.get(life.me.model, (None, 0))[0] is life:
            del self.writers[life.me.model]  # its session may have ended, and with it the writer's lease
        life.heard, life.heard_at, life.heard_by = report, self.now, self.server_life

    def ordered(self, life: Life, orders: Orders) -> None:
        """The server says something to a worker; it may never get there."""
        call, answer = life.call, orders.answer
        if call is not None and answer is not None and answer.number == call.number and answer.version is not None:
            call.resolved = answer.version
