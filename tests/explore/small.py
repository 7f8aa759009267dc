"""The small cluster: the real server, a trainer and two rollouts, the links between them, and all that can happen next.

`actions` lists what can happen in this state, `apply` lets it happen. Nothing is left to chance and nothing to a clock:
time passes only as an action. Whoever applies the same actions gets the same state.
"""

import copyreg
import pickle
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import PROTOCOL, Grant, Hello, LayoutInfo, Orders, Refusal, Report, ToServer
from tensorhub.protocol.names import ModelName, ReplicaName, Shard
from tensorhub.protocol.settings import Settings
from tensorhub.server import Outbox, Server
from tensorhub.worker import events
from tensorhub.worker.machine import Worker

from . import programs, truth
from .actor import CHUNKS, TRAINED, Actor
from .canon import digest

if TYPE_CHECKING:
    from .telling import Teller

Action = tuple[str, ...]

SETTINGS = Settings(
    **{"lease_s": 3.0, "report_s": 1.0, "avoid_s": 1.0, "leave_s": 3.0, "spot_heir_s": 3.0},
    rebalance_s=1e6,  # nobody is moved for being slow: what is fast means nothing here
    slow_times=1e6,
)
NUMBERS_PER_LIFE = 1_000_000
LAYOUT = Layout((TensorSpec("w", "uint8", (CHUNKS,), (1,), 0, CHUNKS),), CHUNKS)
LAYOUT_INFO, LAYOUT_DIGEST = LayoutInfo.of(LAYOUT), LAYOUT.digest()
TIME = ("time passes",)
MISFORTUNES = ("cancels", "is lost", "comes twice", "crashes", "is cut off", "read fails", "server restarts")
MAX_ROUNDS = 400  # messages in one quiet second: more is an exchange without end


@dataclass(frozen=True)
class Faults:
    """How often each kind of misfortune may still happen."""

    losses: int = 0  # of a message
    repeats: int = 0  # of a message
    failures: int = 0  # of a read whose source is well
    cancels: int = 0  # of a rollout's call
    crashes: int = 0  # of a worker, or a restart of the server, or a worker cut off for longer than a lease

    def less(self, kind: str) -> "Faults":
        return replace(self, **{kind: getattr(self, kind) - 1})


@dataclass(frozen=True)
class Shape:
    """Which small cluster it is."""

    rollouts: int = 2
    copies: int = 1  # host copies that each worker has room for
    revocable: bool = False  # sources can cut readers off, the server believes; the readers here read on all the same
    closes: bool = False  # the trainer leaves after its last publish
    excused: tuple[str, ...] = ()  # promises that are not asked about
    patience_s: float = inf  # of a rollout's call; for walks: the search takes no time for a difference
    chapter: str = "opening"  # where in the programs it begins


@dataclass
class Small:
    """One state of the small cluster."""

    shape: Shape
    faults: Faults
    budget: Faults  # as at the start
    now: float = 0.0
    lives: int = 0  # of the server
    server: Server | None = None
    actors: dict[str, Actor] = field(default_factory=dict)
    published: int = 0  # the newest version whose publish has returned
    has_lost_a_rollout: bool = False  # one has crashed, or was cut off
    unheard: str = ""  # who was cut off, until the server hears how things are there
    lost: list[int] = field(default_factory=list)  # versions that at some time nobody had
    teller: "Teller | None" = None  # writes down what happens, for people

    # --- the start ----------------------------------------------------------------------------------------------------

    @classmethod
    def begin(cls, shape: Shape, budget: Faults) -> "Small":
        """Everybody is known to the server, the calls before the chapter have returned, nothing is on its way."""
        small = cls(shape, Faults(), Faults())
        small._start_server()
        for name in ("trainer", *(f"rollout-{index}" for index in range(shape.rollouts))):
            me = Hello(
                *(PROTOCOL, ModelName("policy"), ReplicaName(name), Shard(0), 1, name),
                endpoints=(f"x://{name}",),
                revocable=shape.revocable,
                host=name,
                prefetch="always" if shape.chapter == "ahead" and name != "trainer" else "never",
            )
            actor = small.actors[name] = Actor(name, me, Worker(me.worker))
            actor.tell(small, events.Registered(LAYOUT_INFO, LAYOUT_DIGEST, LAYOUT.size_bytes, shape.copies))
            small.connect(actor)
            small._settle()
        for name in programs.before(shape):
            small.apply(("calls", name))
            while following := [action for action in small.actions() if action != TIME and action[0] != "calls"]:
                small.apply(following[0])
        small.faults = small.budget = budget
        return small

    def _start_server(self) -> None:
        self.lives += 1
        number = NUMBERS_PER_LIFE * self.lives
        self.server = Server(settings=SETTINGS, now=self.now, first_number=number, fresh=self.lives == 1)

    def connect(self, actor: Actor) -> None:
        """A new connection to the server stands, and hello was said on it."""
        if actor.worker.connected:
            actor.tell(self, events.Disconnected())
        actor.is_linked, actor.up, actor.down = True, [actor.hello], []
        actor.tell(self, events.Connected())

    # --- what can happen ----------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Everything that can happen next, in one order."""
        found: list[Action] = []
        for name, actor in self.actors.items():
            if actor.up:
                found.append(("server hears", name))
            if not actor.is_alive:
                continue
            if actor.down:
                found.append(("hears", name))
            if not actor.is_linked:
                found.append(("connects", name))
            if actor.local:
                found.append(("goes on", name))
            found += self._reads_of(actor)
            if not actor.verb and programs.may_call(self, actor):
                found.append(("calls", name))
        if all(self._is_quiet(actor) for actor in self.actors.values()):
            found.append(TIME)
        return found + self._misfortunes()

    def _is_quiet(self, actor: Actor) -> bool:
        """Nothing of it has to happen before time passes. Who can connect does so at once."""
        return not actor.up and not actor.down and not actor.local and (actor.is_linked or not actor.is_alive)

    def _reads_of(self, actor: Actor) -> list[Action]:
        read = actor.read
        if read is None:
            return []
        source = self.actors.get(read.grant.source.replica)
        if read.is_stopped:
            stops: list[Action] = [("read stops", actor.name)]
            is_under_way = read.is_touched and source is not None and source.is_alive and actor.done < len(actor.memory)
            return [*stops, ("read stops late", actor.name)] if is_under_way and not read.grant.to_host else stops
        if actor.can_read(source):
            return [("reads", actor.name)]
        is_lost = source is None or (
            source.available(read.grant) is None and not source.verb
        )  # else it is about to come
        return [("read is lost", actor.name)] if is_lost and not actor.worker.state.slot.is_opened else []

    def _misfortunes(self) -> list[Action]:
        found: list[Action] = []
        for name, actor in self.actors.items():
            for link, messages in (("up", actor.up), ("down", actor.down)):
                is_message = bool(messages) and not isinstance(messages[0], Hello | LayoutInfo | Refusal | None)
                if is_message and self.faults.losses:
                    found.append(("is lost", link, name))
                if is_message and self.faults.repeats:
                    found.append(("comes twice", link, name))
            if actor.is_alive and self.faults.crashes:
                found += [("crashes", name), ("is cut off", name)]
            if actor.is_alive and actor.verb and name != "trainer" and self.faults.cancels:
                found.append(("cancels", name))
            if actor.read is not None and self.faults.failures and not actor.read.is_stopped:
                found.append(("read fails", name))
        return [*found, ("server restarts",)] if self.faults.crashes else found

    # --- it happens ---------------------------------------------------------------------------------------------------

    def apply(self, action: Action) -> None:
        """Let it happen. Raises `truth.Broken` if a promise is broken by it."""
        had = truth.usable_outside(self)
        kind, actor = action[0], self.actors.get(action[-1])
        match kind:
            case "time passes":
                self._pass_a_second(cut_off=None)
            case "server restarts":
                self._restart()
            case "is lost" | "comes twice":
                self._disturb(kind, action[1], action[2])
            case _:
                assert actor is not None
                self._apply_to(kind, actor)
        truth.after(self, had, action)

    def _apply_to(self, kind: str, actor: Actor) -> None:
        source = self.actors.get(actor.read.grant.source.replica) if actor.read is not None else None
        match kind:
            case "server hears":
                self._server_hears(actor, actor.up.pop(0))
            case "hears":
                self._hears(actor, actor.down.pop(0))
            case "connects":
                self.connect(actor)
            case "goes on":
                actor.go_on(self)
            case "calls":
                programs.call(self, actor)
            case "reads":
                assert source is not None
                actor.read_on(self, source)
            case "read stops":
                actor.read_stops(self, source=None)
            case "read stops late":
                actor.read_stops(self, source=source)
            case "read is lost":
                actor.read_fails(self, "source-lost")
            case "read fails":
                self.faults = self.faults.less("failures")
                actor.read_fails(self, "source-lost")
            case "cancels":
                self.faults = self.faults.less("cancels")
                programs.cancel(self, actor)
            case "crashes":
                self.faults = self.faults.less("crashes")
                self.dies(actor)
            case "is cut off":
                self._cut_off(actor)
            case _:
                raise AssertionError(f"nothing is called {kind!r}")

    def dies(self, actor: Actor) -> None:
        """All of it is gone at once; what it said before still arrives, and then the end of its connection."""
        if actor.is_alive:
            actor.is_alive, actor.read, actor.local, actor.down, actor.verb = False, None, [], [], ""
            actor.memory, actor.copies, actor.serving, actor.opened = [TRAINED] * len(actor.memory), {}, None, None
            actor.up = [*actor.up, None] if actor.is_linked else []

    def has_left(self, actor: Actor) -> None:
        """It has said good-bye and the server needs it no more; its memory goes with it."""
        self.dies(actor)

    def _restart(self) -> None:
        self.faults = self.faults.less("crashes")
        for actor in self.actors.values():
            actor.up, actor.down, actor.is_linked = [], [], False
        self._start_server()

    def _disturb(self, kind: str, link: str, name: str) -> None:
        actor = self.actors[name]
        if kind == "is lost":
            self.faults = self.faults.less("losses")
            (actor.up if link == "up" else actor.down).pop(0)
            return
        self.faults = self.faults.less("repeats")
        if link == "up":
            self._server_hears(actor, actor.up[0])
        else:
            self._hears(actor, actor.down[0])

    def _cut_off(self, actor: Actor) -> None:
        """It and the server do not hear each other for longer than a lease; what others say arrives at once."""
        self.faults = self.faults.less("crashes")
        actor.up, actor.down, actor.is_linked = [], [], False
        self.unheard = actor.name
        truth.note_lost(self)
        until = self.now + SETTINGS.lease_s + SETTINGS.report_s
        while self.now < until:
            self._pass_a_second(cut_off=actor)
        assert self.server is not None
        self._send(self.server.disconnected(actor.hello.life, now=self.now))  # by now it knows that the line is gone

    # --- messages -----------------------------------------------------------------------------------------------------

    def _server_hears(self, actor: Actor, message: ToServer | None) -> None:
        assert self.server is not None
        if self.teller is not None:
            self.teller.server_hears(actor.name, message)
        if message is None:
            outbox = self.server.disconnected(actor.hello.life, now=self.now)
        else:
            outbox = self.server.handle(message, sender=actor.hello.life, now=self.now)
            if isinstance(message, Report) and actor.name == self.unheard:
                self.unheard = ""
        self._send(outbox)
        self.server.check_invariants()

    def _send(self, outbox: Outbox) -> None:
        for sender, message in outbox:
            actor = self.actors[sender]
            if actor.is_alive and actor.is_linked:
                actor.down.append(message)

    def _hears(self, actor: Actor, message: Orders | Refusal) -> None:
        if self.teller is not None:
            self.teller.hears(actor.name, message)
        if isinstance(message, Refusal):
            raise truth.Broken(f"{actor.name} was refused: {message.message}")
        actor.tell(self, events.Received(message))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _pass_a_second(self, cut_off: Actor | None) -> None:
        """Who asked to be called is called in time; what is said meanwhile arrives at once. Reads and programs rest."""
        self._settle(cut_off)
        until = self.now + SETTINGS.report_s
        for _ in range(MAX_ROUNDS):
            at = min(self._times())
            if at > until:
                break
            self.now = max(self.now, at)
            self._tick()
            self._settle(cut_off)
        else:
            raise truth.Broken("deadlines that do not move")
        self.now = until

    def _times(self) -> list[float]:
        assert self.server is not None
        return [self.server.next_deadline(), *(a.worker.next_deadline() for a in self.actors.values() if a.is_alive)]

    def _tick(self) -> None:
        assert self.server is not None
        if self.server.next_deadline() <= self.now:
            self._send(self.server.tick(now=self.now))
            self.server.check_invariants()
        for actor in self.actors.values():
            if actor.is_alive and actor.worker.next_deadline() <= self.now:
                actor.tell(self, events.Tick())

    def _settle(self, cut_off: Actor | None = None) -> None:
        """Every message arrives, in turn."""
        for _ in range(MAX_ROUNDS):
            is_quiet = True
            for actor in self.actors.values():
                if actor.up and actor is not cut_off:
                    self._server_hears(actor, actor.up.pop(0))
                    is_quiet = False
                if actor.down and actor.is_alive and actor is not cut_off:
                    self._hears(actor, actor.down.pop(0))
                    is_quiet = False
            if is_quiet:
                return
        raise truth.Broken(f"{MAX_ROUNDS} rounds of messages and no end")

    # --- what actors tell ---------------------------------------------------------------------------------------------

    def check(self, actor: Actor) -> None:
        """A machine has taken in an event."""
        truth.check(self, actor)

    def wants(self, actor: Actor, effect: events.Effect) -> None:
        """A machine wants this done."""
        if self.teller is not None:
            self.teller.wants(actor.name, effect)

    def accepted(self, actor: Actor, grant: Grant, chunk: int, value: int) -> None:
        """A chunk counts as one of the version from now on."""
        truth.accepted(actor, grant, chunk, value)

    def finished(self, actor: Actor, effect: events.Finished) -> None:
        """A caller has got its answer."""
        programs.finished(self, actor, effect)

    def warned(self, actor: Actor, text: str) -> None:
        """A machine says that something went wrong. Who leaves while its line is cut may; nobody else has a reason."""
        if "closes, and waits for the reference server" in text and not actor.is_linked:
            return
        raise truth.Broken(f"warnings: {actor.name}: {text}")

    # --- as a value ---------------------------------------------------------------------------------------------------

    def packed(self) -> bytes:
        """All of it, to be unpacked by `unpack`."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    def digest(self) -> int:
        """The same for two states that are the same but for counters and the time (`canon.py`)."""
        return digest(self, self.now)


def unpack(packed: bytes) -> Small:
    """A state of its own."""
    found = pickle.loads(packed)  # noqa: S301 (what this process packed itself)
    assert isinstance(found, Small)
    return found


def _layout_info() -> LayoutInfo:
    return LAYOUT_INFO


copyreg.pickle(LayoutInfo, lambda _: (_layout_info, ()))  # there is only one
