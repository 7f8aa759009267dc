"""Many thin workers in one process, each with a real connection of its own to a reference server.

The worker's decisions and its wire code are the product's; only reading is pretended: it takes `read_s`. Commands come
as in `child`. What a worker waits for its orders is measured here, and how late this process's own loop is beside it:
where the loop is late, so are the workers, and the server is not to blame.
"""

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable
from math import inf

from tensorhub.protocol.messages import Grant, LayoutInfo, Orders, Report
from tensorhub.protocol.names import worker_id
from tensorhub.runtime.connection import Connection, ConnectionEvent
from tensorhub.runtime.loops import LoopThread
from tensorhub.worker import events

from .converse import converse
from .processes import own_token
from .thin import ThinWorker, hello_of

MODEL = "policy"
LAG_S = 0.02  # how often the loop's own lateness is looked at
PATIENCE_S = 300.0


class Reader:
    """A thin worker and its line."""

    def __init__(self, crowd: "Crowd", index: int, address: str, shards: int, version: int) -> None:
        self.me = worker_id(MODEL, f"replica-{index // shards:05d}", index % shards)
        self.waits: list[float] = []  # of each report: from its sending to the first orders that acknowledge it
        self.sent_at: dict[int, float] = {}
        self.thin = ThinWorker(self.me, crowd, self._send)
        if version:
            self.thin.begin_with(version)
        self.connection = Connection(address, hello_of(self.me, shards, token=own_token()), self._on_connection)
        self.is_answered = False

    def _send(self, _: ThinWorker, message: object) -> None:
        assert isinstance(message, Report | LayoutInfo)
        if isinstance(message, Report):
            self.sent_at[message.number] = time.monotonic()
        self.connection.send(message)

    def _on_connection(self, event: ConnectionEvent) -> None:
        if isinstance(event, events.Received) and isinstance(event.message, Orders):
            self.is_answered = True
            now, known = time.monotonic(), event.message.acknowledged
            self.waits += [now - at for number, at in self.sent_at.items() if number <= known]
            self.sent_at = {number: at for number, at in self.sent_at.items() if number > known}
        self.thin.tell(event)

    def overdue(self) -> list[float]:
        """How long the reports that nobody has answered have been waiting."""
        now = time.monotonic()
        return [now - at for at in self.sent_at.values()]


class Crowd:
    """The workers of this process, and the loop in which they live. The ground that they stand on is real."""

    def __init__(self) -> None:
        self._thread = LoopThread()
        self.readers: list[Reader] = []
        self.read_s = 0.0
        self._lags: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    # --- the ground ---------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return time.monotonic()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._thread.loop.call_later(max(0.0, delay_s), action)

    def finish_at(self, grant: Grant, begun_at: float, share_left: float) -> float:
        """Links are free, and every source has all of it in time."""
        return begun_at + share_left * self.read_s

    # --- commands -----------------------------------------------------------------------------------------------------

    def join(
        self,
        address: str,
        first: int,
        count: int,
        *,
        shards: int = 1,
        version: int = 1,
        read_s: float = 2.0,
        spread_s: float = 1.0,
        within_s: float = PATIENCE_S,
    ) -> float:
        """Connect, all within `spread_s`, each with the version (0: none). Returns the seconds until all had orders."""
        self.read_s = read_s
        return self._thread.wait(
            self._join(address, first, count, shards, version, spread_s, within_s),
            deadline=time.monotonic() + within_s + 5.0,
            what="join",
        )

    async def _join(
        self, address: str, first: int, count: int, shards: int, version: int, spread_s: float, within_s: float
    ) -> float:
        began = time.monotonic()
        self._tasks.append(asyncio.ensure_future(self._watch_lag()))
        for index in range(first, first + count):
            reader = Reader(self, index, address, shards, version)
            self.readers.append(reader)
            await asyncio.sleep(max(0.0, began + spread_s * (index - first) / count - time.monotonic()))
            self._tasks.append(asyncio.ensure_future(reader.connection.run()))
        await _until(lambda: all(reader.is_answered for reader in self.readers), within_s, "everybody has orders")
        return time.monotonic() - began

    async def _watch_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_S
            await asyncio.sleep(LAG_S)
            self._lags.append(time.monotonic() - due)

    def begin(self) -> None:
        """Forget what was measured so far. What is here stays: the garbage collector need not look at it again."""
        gc.collect()
        gc.freeze()
        self._lags.clear()
        for reader in self.readers:
            reader.waits = []

    def publish(self, version: int, within_s: float = PATIENCE_S) -> float:
        """The first replica here takes back what it has published, and publishes this. Returns when that was done."""
        shards = sum(reader.me.replica == self.readers[0].me.replica for reader in self.readers)
        for verb, spec in (("unpublish", ""), ("publish", version)):
            self._call(self.readers[:shards], verb, spec, 0.0, within_s)
        return time.monotonic()

    def update(
        self, version: int, skip: int = 0, spread_s: float = 1.0, within_s: float = PATIENCE_S
    ) -> dict[str, float | None]:
        """All but the first `skip` update to "latest", spread evenly. Returns when the last one held the version
        (`time.monotonic`), and when the last call ended; None for what has not happened in time."""
        readers = self.readers[skip:]
        with contextlib.suppress(TimeoutError):  # told below
            self._call(readers, "update", "latest", spread_s, within_s)
        held = [reader.thin.held.get(version) for reader in readers]  # type: ignore[call-overload]
        ended = [reader.thin.finished[-1][0] if reader.thin.worker.call is None else None for reader in readers]
        return {
            "held_at": None if None in held else max(held),  # type: ignore[type-var]
            "ended_at": None if None in ended else max(ended),  # type: ignore[type-var]
            "missing": sum(at is None for at in held),
            "failed": sum(
                bool(reader.thin.finished) and reader.thin.finished[-1][1].error is not None for reader in readers
            ),
        }

    def _call(self, readers: list[Reader], verb: str, spec: int | str, spread_s: float, within_s: float) -> None:
        work = self._all_call(readers, verb, spec, spread_s, within_s)
        self._thread.wait(work, deadline=time.monotonic() + within_s + 5.0, what=verb)

    async def _all_call(
        self, readers: list[Reader], verb: str, spec: int | str, spread_s: float, within_s: float
    ) -> None:
        left = {reader.me for reader in readers}
        began = time.monotonic()
        for index, reader in enumerate(readers):
            reader.thin.on_finished = lambda _, me=reader.me: left.discard(me)  # type: ignore[misc]
            at = began + spread_s * index / len(readers)
            if at > time.monotonic():
                await asyncio.sleep(at - time.monotonic())
            reader.thin.call(verb, spec, timeout_s=within_s)
        await _until(lambda: not left, within_s, f"{verb} has ended for all")

    def figures(self) -> dict[str, object]:
        """Since `begin`: what reports waited for (sorted, seconds), sessions and connections, the loop's lateness."""
        waits = [wait for reader in self.readers for wait in reader.waits + reader.overdue()]
        return {
            "waits": sorted(waits),
            "sessions": sum(reader.thin.sessions for reader in self.readers),
            "connects": sum(reader.connection.connects for reader in self.readers),
            "most_connects": max((reader.connection.connects for reader in self.readers), default=0),
            "lags": sorted(self._lags),
            "connected": sum(reader.connection.is_connected for reader in self.readers),
            "why_not": dict(
                Counter(reader.connection.why for reader in self.readers if not reader.connection.is_connected)
            ),
        }

    def close(self) -> None:
        """Cuts every connection."""
        self._thread.wait(self._close(), deadline=time.monotonic() + 30.0, what="close")

    async def _close(self) -> None:
        for reader in self.readers:
            reader.thin.die()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {within_s:.0f} s")
        await asyncio.sleep(0.02)


def share_of(values: list[float], share: float) -> float:
    """The value below which that share of the sorted values lies; infinite of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else inf


if __name__ == "__main__":
    converse(Crowd())
