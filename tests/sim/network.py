"""The control plane between workers and the reference server: late, lost, doubled, out of order, cut, restarted.

What a real connection guarantees is kept: a server hears the `Hello` of a connection before anything else on it, and
what belongs to a connection that is gone is gone with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import msgspec

from tensorhub.protocol.messages import Hello, LayoutInfo, Orders, Refusal, Report, ToServer, ToWorker, named
from tensorhub.server import Outbox, Server
from tensorhub.server.journal import History, encoded, history_of

from .fates import Fates
from .plan import Plan
from .world import World

if TYPE_CHECKING:
    from .cluster import Cluster
    from .process import Process

BOOT = "this boot"
WHOLE, STALE, TORN = 0.6, 0.7, 0.85  # of the restarts find it whole, at least old, at least in part

_to_server = msgspec.msgpack.Decoder(ToServer)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


@dataclass(eq=False)
class Connection:
    """One connection of one process to one life of the server. Either end may think that it stands when it does not."""

    process: "Process"
    sender: str
    life: int  # of the server
    is_open: bool = True  # at the worker's end
    is_known: bool = False  # the server has heard its hello
    is_refused: bool = False


class ControlPlane:
    """Carries messages; owns the one server, kills it and makes it stand still."""

    def __init__(self, world: World, plan: Plan, fates: Fates, cluster: "Cluster") -> None:
        self.world, self.plan, self.fates, self.cluster = world, plan, fates, cluster
        self.lives = 0
        self.server: Server | None = None
        self.started_at = 0.0
        self.is_paused = False
        self.connections: dict[str, Connection] = {}  # that this life of the server believes in
        self._backlog: list[Callable[[], None]] = []
        self._tick_at = inf
        self._chance = world.stream("server")
        self._disk = self._former_disk = b""  # the server's journal, as it is and as the life before has found it
        self._rate = 1.0 + self._chance.uniform(-plan.conditions.drift, plan.conditions.drift)

    @property
    def server_now(self) -> float:
        return self.world.now * self._rate

    @property
    def is_listening(self) -> bool:
        """Somebody who connects now is answered."""
        return self.server is not None and not self.is_paused

    # --- the server's life --------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        self.lives += 1
        first_number = self.lives * 1_000_000
        draw, low = self._chance.random(), self._chance.randrange(1, 1_000)
        if self.plan.conditions.clock_goes_back and draw < 0.5:
            first_number = low
        self.server = Server(
            settings=self.plan.settings,
            now=self.server_now,
            first_number=first_number,
            fresh=self.lives == 1,
            history=self._history() if self.lives > 1 else None,
            boot=BOOT,
        )
        self._former_disk = self._disk
        self._write()
        self.started_at = self.world.now
        self.cluster.watch.no_server(inf)
        self.connections = {}
        self.world.note("server", f"starts, life {self.lives}")
        self._schedule_tick()

    def _history(self) -> History | None:
        """What the journal says by now: mostly all; or it is gone, torn, or an old one was put in its place."""
        fate, cut = self._chance.random(), self._chance.randrange(1, 40)
        data = self._disk if fate < WHOLE else self._former_disk if fate < STALE else self._disk[:-cut]
        if fate > TORN:
            data = b""
        self.world.note("server", f"finds {len(data)} of {len(self._disk)} bytes of its journal")
        return history_of(data, boot=BOOT, max_versions=self.plan.settings.max_versions)

    def _write(self) -> None:
        """The journal is written before anything is sent."""
        server = self.server
        if server is not None:
            records, is_whole = server.to_journal()
            self._disk = encoded(records) if is_whole else self._disk + encoded(records)

    def kill_server(self) -> None:
        """Everybody's connection breaks; who is cut off finds out later."""
        self.server = None
        self.cluster.watch.no_server(self.world.now)
        self.is_paused, self._backlog, self._tick_at = False, [], inf
        self.world.note("server", "is killed")
        for connection in list(self.connections.values()):
            self._break_at_worker(connection)
        self.connections = {}

    def pause(self) -> None:
        self.is_paused = True
        self.world.note("server", "stands still")

    def resume(self) -> None:
        """It goes on with all that has come in meanwhile."""
        if not self.is_paused:
            return
        self.is_paused = False
        self.world.note("server", "goes on")
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            action()
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        server = self.server
        if server is None:
            return
        at = server.next_deadline() / self._rate
        if at < self._tick_at:
            self._tick_at = at
            self.world.after(at - self.world.now + 1e-9, lambda: self._tick(server, at))

    def _tick(self, server: Server, at: float) -> None:
        if server is not self.server or at != self._tick_at:
            return  # another one was due sooner, and has planned what comes after it
        if self.is_paused:
            self._backlog.append(lambda: self._tick(server, at))
            return
        self._tick_at = inf
        self._deliver(server.tick(now=self.server_now))
        self._schedule_tick()
        self.cluster.watch.server_acted()

    # --- connections --------------------------------------------------------------------------------------------------

    def connect(self, process: "Process", number: int) -> Connection | None:
        """A new connection, or None if the server cannot be reached now."""
        if not self.is_listening or self.cluster.cuts.is_mute(process) or self.cluster.cuts.is_deaf(process):
            return None
        connection = Connection(process, f"{process.name}.{number}", self.lives)
        self.connections[connection.sender] = connection
        return connection

    def close(self, connection: Connection) -> None:
        """The worker's end is closed: the server's end notices, if it can and as soon as it can."""
        connection.is_open = False
        self._soon(connection, lambda: self._notice(connection))

    def _soon(self, connection: Connection, action: Callable[[], None]) -> None:
        """As soon as something gets through from there to the server."""

        def arrive() -> None:
            if self.cluster.cuts.is_mute(connection.process):
                self.world.after(self.plan.settings.lease_s / 4, arrive)
            else:
                action()

        self.world.after(self.plan.conditions.delay_s, arrive)

    def _notice(self, connection: Connection) -> None:
        server = self.server
        if server is None or self.connections.get(connection.sender) is not connection:
            return
        if self.is_paused:
            self._backlog.append(lambda: self._notice(connection))
            return
        del self.connections[connection.sender]
        self._deliver(server.disconnected(connection.sender, now=self.server_now))
        self._schedule_tick()
        self.cluster.watch.server_acted()

    def _break_at_worker(self, connection: Connection) -> None:
        """The server's end is gone: the worker's end notices, if it can and as soon as it can."""

        def arrive() -> None:
            if self.cluster.cuts.is_deaf(connection.process):
                self.world.after(self.plan.settings.lease_s / 4, arrive)
            else:
                connection.process.connection_lost(connection)

        self.world.after(3 * self.plan.conditions.delay_s, arrive)

    # --- messages -----------------------------------------------------------------------------------------------------

    def to_server(self, connection: Connection, hello: Hello, layout: LayoutInfo, message: ToServer) -> None:
        """Sent by a worker."""
        process = connection.process
        delays = self.fates.delays(process.name, "up")
        self.cluster.watch.message(delays)
        for delay in delays:
            self.world.after(delay, lambda: self._arrive(connection, hello, layout, message))

    def _arrive(self, connection: Connection, hello: Hello, layout: LayoutInfo, message: ToServer) -> None:
        server, process = self.server, connection.process
        if server is None or connection.life != self.lives or self.cluster.cuts.is_mute(process):
            return
        if self.is_paused:
            self._backlog.append(lambda: self._arrive(connection, hello, layout, message))
            return
        if self.connections.get(connection.sender) is not connection or connection.is_refused:
            return
        if self.plan.conditions.codec:
            message = _to_server.decode(msgspec.msgpack.encode(message))
        sender = connection.sender
        if not connection.is_known:
            connection.is_known = True
            self._deliver(server.handle(hello, sender=sender, now=self.server_now))
            if connection.is_refused:
                return
            server.handle(layout, sender=sender, now=self.server_now)
        if isinstance(message, Report):
            self.world.note("server", f"hears {process.name} {_short(message)}")
        outbox = server.handle(message, sender=sender, now=self.server_now)
        is_refused = any(to == sender and isinstance(said, Refusal) for to, said in outbox)
        if isinstance(message, Report) and not is_refused:
            self.cluster.watch.heard(process, message)
        self._deliver(outbox)
        self._schedule_tick()
        self.cluster.watch.server_acted()

    def _deliver(self, outbox: Outbox) -> None:
        self._write()
        for sender, message in outbox:
            connection = self.connections.get(sender)
            if connection is None:
                continue
            if isinstance(message, Refusal):
                connection.is_refused = True  # it is closed after that
                del self.connections[sender]
                self._break_at_worker(connection)  # should its last word be lost
                self.cluster.watch.turned_away(connection.process)
            else:
                self.cluster.watch.ordered(connection.process, message)
            if self.plan.conditions.codec:
                message = _to_worker.decode(msgspec.msgpack.encode(message))
            delays = self.fates.delays(connection.process.name, "down")
            self.cluster.watch.message(delays)
            for delay in delays:
                self.world.after(delay, lambda c=connection, m=message: self._hand_over(c, m))  # type: ignore[misc]

    def _hand_over(self, connection: Connection, message: Orders | Refusal) -> None:
        if not self.cluster.cuts.is_deaf(connection.process):
            connection.process.receive(connection, message)


def _short(report: Report) -> str:
    reported = report.call
    call = f" op {reported.number} {reported.verb}({reported.spec})" if reported is not None else ""
    version = getattr(report.buffer, "version", None)
    told = report.reading
    reading = f" reads {told.ticket} from {named(told.sources)}" if told is not None else ""
    state = type(report.buffer).__name__.lower()
    return f"#{report.number} {state} {version if version is not None else ''}{call}{reading}"
