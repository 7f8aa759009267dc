"""The control plane between workers and the reference server: late, lost, doubled, out of order, cut, restarted.

What a real connection guarantees is kept: a server that does not know a sender hears its `Hello` before anything else.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ..core.messages import Hello, LayoutInfo, Orders, Refusal, Report, ToServer, ToWorker
from ..core.server import Outbox, Server
from .weather import Weather
from .world import World

if TYPE_CHECKING:
    from .process import Process

_to_server = msgspec.msgpack.Decoder(ToServer)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


class ControlPlane:
    """Carries messages; owns the one server and kills it."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.is_stormy = True
        self.lives = 0
        self.server: Server | None = None
        self.known: dict[str, None] = {}  # senders that this life of the server has heard the hello of
        self.processes: dict[str, Process] = {}
        self.after_event: Callable[[], None] = lambda: None
        self._tick_at = float("inf")
        self._rate = 1.0 + world.chance.uniform(-weather.drift, weather.drift)

    @property
    def server_now(self) -> float:
        return self.world.now * self._rate

    # --- the server's life --------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        self.lives += 1
        first_number = self.lives * 1_000_000
        if self.weather.clock_goes_back and self.world.happens(0.5):
            first_number = self.world.chance.randrange(1, 1_000)
        fresh = self.lives == 1
        self.server = Server(
            settings=self.weather.settings, now=self.server_now, first_number=first_number, fresh=fresh
        )
        self.known = {}
        self.world.note("server", f"starts, life {self.lives}")
        for process in list(self.processes.values()):
            process.server_started()
        self._schedule_tick()

    def kill_server(self) -> None:
        self.server = None
        self._tick_at = float("inf")
        self.world.note("server", "is killed")

    def _schedule_tick(self) -> None:
        server = self.server
        if server is None:
            return
        at = server.next_deadline() / self._rate
        if at < self._tick_at:
            self._tick_at = at
            self.world.after(at - self.world.now + 1e-9, lambda: self._tick(server))

    def _tick(self, server: Server) -> None:
        if server is not self.server:
            return
        self._tick_at = float("inf")
        self._deliver(server.tick(now=self.server_now))
        self._schedule_tick()
        self.after_event()

    # --- messages -----------------------------------------------------------------------------------------------------

    def delays(self) -> list[float]:
        """How late each copy of one message is; no copy: it is lost."""
        chance, weather = self.world.chance, self.weather
        if not self.is_stormy:
            return [chance.uniform(0.5, 1.5) * min(weather.delay_s, 0.02)]
        if self.world.happens(weather.loss):
            return []
        copies = 2 if self.world.happens(weather.duplication) else 1
        found = []
        for _ in range(copies):
            delay = chance.uniform(0.5, 1.5) * weather.delay_s
            if self.world.happens(weather.long_delay):
                delay += chance.uniform(0, 2 * weather.settings.lease_s)
            found.append(delay)
        return found

    def to_server(self, process: "Process", hello: Hello, layout: LayoutInfo | None, message: ToServer) -> None:
        for delay in self.delays():
            self.world.after(delay, lambda: self._arrive(process, hello, layout, message))

    def _arrive(self, process: "Process", hello: Hello, layout: LayoutInfo | None, message: ToServer) -> None:
        server = self.server
        if server is None or process.is_mute:
            return
        if self.weather.codec:
            message = _to_server.decode(msgspec.msgpack.encode(message))
        sender = process.sender
        if sender not in self.known:
            self.known[sender] = None
            self._deliver(server.handle(hello, sender=sender, now=self.server_now))
            if sender not in self.known:
                return
            if layout is not None:
                server.handle(layout, sender=sender, now=self.server_now)
        if isinstance(message, Report):
            self.world.note("server", f"hears {process.name} {_short(message)}")
        self._deliver(server.handle(message, sender=sender, now=self.server_now))
        self._schedule_tick()
        self.after_event()

    def lose(self, process: "Process") -> None:
        """The process is dead, and the server's end of its connection notices."""
        self.processes.pop(process.sender, None)
        server = self.server

        def notice() -> None:
            if server is not None and server is self.server and not process.is_mute:
                self._deliver(server.disconnected(process.sender, now=self.server_now))
                self._schedule_tick()

        self.world.after(self.weather.delay_s, notice)

    def _deliver(self, outbox: Outbox) -> None:
        for sender, message in outbox:
            process = self.processes.get(sender)
            if process is None:
                continue
            if isinstance(message, Refusal):
                self.known.pop(sender, None)  # the connection is closed after it
            if self.weather.codec:
                message = _to_worker.decode(msgspec.msgpack.encode(message))
            for delay in self.delays():
                self.world.after(delay, lambda p=process, m=message: self._hand_over(p, m))  # type: ignore[misc]

    def _hand_over(self, process: "Process", message: Orders | Refusal) -> None:
        if process.is_alive and not process.is_deaf:
            process.receive(message)


def _short(report: Report) -> str:
    operation = report.operation
    call = f" op {operation.number} {operation.verb}({operation.spec})" if operation is not None else ""
    version = getattr(report.buffer, "version", None)
    reading = f" reads {report.reading.ticket} from {report.reading.source}" if report.reading is not None else ""
    state = type(report.buffer).__name__.lower()
    return f"#{report.number} {state} {version if version is not None else ''}{call}{reading}"
