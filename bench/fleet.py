"""A fleet in one process, on virtual time: the real core server, real core workers, messages handed over directly.

Only what the server spends in `handle`, `tick` and `disconnected` is counted, by this thread's own CPU clock; what the
workers and this harness spend is not. Messages to the server are encoded and decoded outside the count, so that what
the server keeps is its own. The garbage collector is off while something is counted.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tensorhub.protocol.messages import Grant
from tensorhub.protocol.names import Version, WorkerId, worker_id
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.connection import decode_to_server, encode
from tensorhub.server import Outbox, Server
from tensorhub.worker import events
from tests.sim.world import World

from .deep import deep_size
from .thin import ThinWorker, hello_of

HOP_S = 0.00025  # one way between worker and server, and between two workers
READ_S = 2.0  # of a whole version, if its source has all of it
SPREAD_S = 1.0  # within which everybody comes
MODEL = "policy"
IDLE, BUSY, TICK, GONE = "idle reports", "other messages", "ticks", "hang-ups"


class TooDear(Exception):
    """What is being measured has cost the server more than was allowed."""


@dataclass
class Meter:
    """CPU of the server, by what it was spent on."""

    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys((IDLE, BUSY, TICK, GONE), 0.0))
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((IDLE, BUSY, TICK, GONE), 0))
    longest_of: dict[str, float] = field(default_factory=lambda: dict.fromkeys((IDLE, BUSY, TICK, GONE), 0.0))
    most_s: float = float("inf")

    def spend(self, what: str, work: Callable[[], Outbox]) -> Outbox:
        """Do it and count it. Raises `TooDear` once all together is more than `most_s`."""
        began = time.thread_time()
        outbox = work()
        took_s = time.thread_time() - began
        self.cpu_s[what] += took_s
        self.counts[what] += 1
        self.longest_of[what] = max(self.longest_of[what], took_s)
        if self.total_s > self.most_s:
            raise TooDear(f"more than {self.most_s:.0f} s of CPU")
        return outbox

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())

    @property
    def own_s(self) -> float:
        """Without the reports of workers that do nothing: how many of them fall into a phase depends on its length."""
        return self.total_s - self.cpu_s[IDLE]


class Fleet:
    """A server and its workers: replica 0 publishes, all others read. All of them come with version 1."""

    def __init__(self, workers: int, shards: int = 1, *, settings: Settings | None = None, read_s: float = READ_S):
        assert workers % shards == 0
        self.settings = settings or Settings()
        self.read_s, self.shards = read_s, shards
        self.world = World("fleet")
        self.meter = Meter()
        self.lives = 0
        self.server: Server
        self.updating: dict[WorkerId, ThinWorker] = {}  # those whose update has not ended
        self._lines: dict[str, ThinWorker] = {}  # by their names towards the server
        self._line_of: dict[WorkerId, str] = {}
        self._tick_at = float("inf")
        self._start_server(fresh=True)
        names = [worker_id(MODEL, f"replica-{n // shards:05d}", n % shards) for n in range(workers)]
        self.workers = {me: ThinWorker(me, self, self._to_server) for me in names}
        self.trainer = [self.workers[me] for me in names[:shards]]
        self.rollouts = [self.workers[me] for me in names[shards:]]
        for thin in self.workers.values():
            thin.begin_with(1)

    # --- the ground of the workers ------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.world.now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.after(delay_s, action)

    def finish_at(self, grant: Grant, begun_at: float, share_left: float) -> float:
        """Links are free; but nobody is done before its source, and a hop."""
        own = begun_at + share_left * self.read_s
        read = self.workers[grant.source.worker].read
        return own if read is None or grant.source.from_host else max(own, read.finish_at + HOP_S)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _to_server(self, thin: ThinWorker, message: object) -> None:
        sender, what = self._line_of.get(thin.me), IDLE if thin.is_idle else BUSY
        data = encode(message)  # type: ignore[arg-type]
        if sender is not None:
            self.world.after(HOP_S, lambda: self._arrive(sender, data, what))

    def _arrive(self, sender: str, data: bytes, what: str) -> None:
        if sender not in self._lines:
            return
        message = decode_to_server(data)
        self._deliver(self.meter.spend(what, lambda: self.server.handle(message, sender=sender, now=self.now)))

    def _deliver(self, outbox: Outbox) -> None:
        for sender, message in outbox:
            thin = self._lines.get(sender)
            if thin is not None:
                received = events.Received(message)
                self.world.after(HOP_S, lambda thin=thin, received=received: thin.tell(received))
        at = self.server.next_deadline()
        if at < self._tick_at:
            self._tick_at = at
            server = self.server
            self.world.after(at - self.now, lambda: self._tick(server))

    def _tick(self, server: Server) -> None:
        if server is not self.server:
            return
        self._tick_at = float("inf")
        self._deliver(self.meter.spend(TICK, lambda: server.tick(now=self.now)))

    def _start_server(self, *, fresh: bool) -> None:
        self.lives += 1
        self.server = Server(self.settings, self.now, self.lives * 10**9, fresh=fresh)
        self._tick_at = float("inf")

    def connect(self, thin: ThinWorker) -> None:
        """Hello, its layout, and its report."""
        sender = f"{thin.me}.{self.lives}"
        self._lines[sender], self._line_of[thin.me] = thin, sender
        self._arrive(sender, encode(hello_of(thin.me, self.shards)), BUSY)
        thin.tell(events.Connected())

    # --- what happens -------------------------------------------------------------------------------------------------

    def run(self, *, until: Callable[[], bool] | None = None, within_s: float) -> None:
        """Let time pass: until something is so, or for exactly `within_s`. Raises `TimeoutError`, `TooDear`."""
        end = self.now + within_s
        while self.world.next_at <= end:
            self.world.step()
            if until is not None and until():
                return
        if until is not None:
            raise TimeoutError(f"after {within_s:.0f} s of virtual time it is not so")
        self.world.now = end

    @contextmanager
    def counting(self, *, most_s: float = float("inf")) -> Iterator[Meter]:
        """What the server spends in the block."""
        self.meter = Meter(most_s=most_s)
        gc.collect()
        gc.disable()
        try:
            yield self.meter
        finally:
            gc.enable()

    def join(self) -> None:
        """All come within a second, and the server knows each of them."""
        workers = list(self.workers.values())
        self._spread(workers, self.connect)
        self.run(until=lambda: self._heard == len(workers), within_s=SPREAD_S + 1.0)

    @property
    def _heard(self) -> int:
        return self.server.state.counters["sessions"]

    def _spread(self, workers: list[ThinWorker], action: Callable[[ThinWorker], None]) -> None:
        for index, thin in enumerate(workers):
            delay_s = SPREAD_S * (index // self.shards * self.shards) / len(workers)
            self.world.after(delay_s, lambda thin=thin: action(thin))

    def publish(self, version: int) -> None:
        """The trainer takes the old version back and publishes this one."""
        for verb, spec in (("unpublish", ""), ("publish", version)):
            done = [len(thin.finished) + 1 for thin in self.trainer]
            for thin in self.trainer:
                thin.call(verb, spec)
            self.run(
                until=lambda done=done: [len(thin.finished) for thin in self.trainer] == done,
                within_s=self.settings.lease_s,
            )

    def begin_update(self) -> None:
        """Every living rollout updates within a second."""
        self.updating = {thin.me: thin for thin in self.rollouts if thin.is_alive}
        for thin in self.updating.values():
            thin.on_finished = lambda _, me=thin.me: self.updating.pop(me, None)  # type: ignore[misc]
        self._spread(list(self.updating.values()), lambda thin: thin.call("update", "latest"))

    def finish_update(self, *, within_s: float = 600.0) -> None:
        """Until each of them holds what was published last, or has died or failed with one that did; and knows it."""
        self.run(until=lambda: not self.updating, within_s=within_s)

    def kill(self, thin: ThinWorker) -> None:
        """It dies, and its line breaks."""
        thin.die()
        self.updating.pop(thin.me, None)
        sender = self._line_of.pop(thin.me)
        del self._lines[sender]
        self._deliver(self.meter.spend(GONE, lambda: self.server.disconnected(sender, now=self.now)))

    def restart_server(self) -> None:
        """A server with empty memory, to which everybody comes back within a second."""
        self._lines, self._line_of = {}, {}
        living = [thin for thin in self.workers.values() if thin.is_alive]
        self._start_server(fresh=False)
        for thin in living:
            thin.tell(events.Disconnected())
        self._spread(living, self.connect)

    def bytes_per_worker(self) -> float:
        """What the server keeps, all that hangs on it."""
        return deep_size(self.server) / len(self.workers)

    def holders(self, version: int) -> int:
        """How many workers hold all of it."""
        return sum(thin.worker.held == Version(version) for thin in self.workers.values() if thin.is_alive)
