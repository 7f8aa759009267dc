"""Virtual time: a queue of things to happen, streams of chance, and the history of what happened.

Nothing here or above it may look at a real clock. The same seed gives the same history, whatever the hash seed.
"""

import heapq
import random
from collections.abc import Callable
from hashlib import blake2b


class OracleViolation(AssertionError):
    """A promise was broken in the simulated cluster. The text says which, by whom and when."""


class World:
    """Time, chance, and history."""

    def __init__(self, seed: str, *, trace: bool = False) -> None:
        self.now = 0.0
        self.events = 0
        self._seed = seed
        self._streams: dict[str, random.Random] = {}
        self.lines: list[str] = []
        self._is_traced = trace
        self._history = blake2b(digest_size=16)
        self._sealed = ""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def stream(self, name: str) -> random.Random:
        """The chance of one subsystem, or of one process in it: a draw more in one changes nothing in another."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = random.Random(f"{self._seed} {name}")
        return found

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let it happen so much later; what is due at one time happens in the order in which it was asked for."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._order, action))

    def step(self) -> bool:
        """The next thing happens. False: nothing is left."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        self.events += 1
        action()
        return True

    @property
    def next_at(self) -> float:
        return self._queue[0][0] if self._queue else float("inf")

    def note(self, who: object, what: str) -> None:
        """Write it into the history."""
        line = f"{self.now:10.4f}  {who}: {what}"
        self._history.update(line.encode())
        if self._is_traced:
            self.lines.append(line)

    def seal(self) -> None:
        """The digest is of what has happened so far."""
        self._sealed = self._sealed or self._history.hexdigest()

    def digest(self) -> str:
        """Equal for two histories that are equal to the letter."""
        return self._sealed or self._history.hexdigest()
