"""Breadth first over everything that can happen: each state once, and the shortest history to each.

States are kept packed in the frontier and as a digest ever after; a history is played again from the start to be shown.
"""

import multiprocessing
import time
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult
from typing import NamedTuple

from tensorhub.protocol.errors import InvariantViolation

from . import truth
from .small import MISFORTUNES, TIME, Faults, Shape, Small, unpack

MISTAKES = (truth.Broken, InvariantViolation, AssertionError, LookupError, TypeError, ValueError, AttributeError)
AT_A_TIME = 32  # states that one process expands before it answers
UNDER_WAY = 4  # such shares of each process


class Following(NamedTuple):
    """A state that follows another by its `number`th action; packed, unless it was sent before."""

    number: int
    digest: int
    packed: bytes | None


@dataclass
class Expansion:
    """All that can happen in one state."""

    following: list[Following] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    is_at_rest: bool = False
    broken: str = ""
    broken_by: int = 0


def expand(packed: bytes, sent: dict[int, None]) -> Expansion:
    """Take every action of that state. `sent`: digests of which the state need not be packed again."""
    small = unpack(zlib.decompress(packed))
    actions, found = small.actions(), Expansion()
    is_idle = TIME in actions and all(action == TIME or action[0] in MISFORTUNES for action in actions)
    for number, action in enumerate(actions):
        found.kinds[action[0]] += 1
        successor = unpack(zlib.decompress(packed)) if number + 1 < len(actions) or is_idle else small
        try:
            successor.apply(action)
            digest = successor.digest()
            if is_idle and action == TIME and digest == small.digest():
                found.is_at_rest = True
                truth.at_rest(small)
        except MISTAKES as error:
            found.broken, found.broken_by = f"{type(error).__name__}: {error}", number
            break
        is_sent = digest in sent
        sent[digest] = None
        found.following.append(Following(number, digest, None if is_sent else zlib.compress(successor.packed(), 1)))
    return found


_sent: dict[int, None] = {}  # of one process of the pool


def _expand_some(some: list[tuple[int, bytes]]) -> list[tuple[int, Expansion]]:
    return [(index, expand(packed, _sent)) for index, packed in some]


@contextmanager
def expander(jobs: int) -> Iterator[Callable[[list[tuple[int, bytes]]], Iterator[tuple[int, Expansion]]]]:
    """Expands states in so many processes, in their order."""
    if jobs == 1:
        sent: dict[int, None] = {}
        yield lambda frontier: ((index, expand(packed, sent)) for index, packed in frontier)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:

        def together(frontier: list[tuple[int, bytes]]) -> Iterator[tuple[int, Expansion]]:
            """A pool that is let go while its pipe is full of tasks waits for ever: few are under way, and all end."""
            pending: deque[AsyncResult[list[tuple[int, Expansion]]]] = deque()
            try:
                for at in range(0, len(frontier), AT_A_TIME):
                    pending.append(pool.apply_async(_expand_some, (frontier[at : at + AT_A_TIME],)))
                    if len(pending) > UNDER_WAY * jobs:
                        yield from pending.popleft().get()
                while pending:
                    yield from pending.popleft().get()
            finally:
                for each in pending:
                    each.wait()

        yield together


@dataclass
class Found:
    """What a search has come to."""

    states: int = 0
    steps: int = 0  # transitions
    depth: int = 0  # every history up to this length was seen
    is_whole: bool = False  # and there is no longer one
    at_rest: int = 0  # states in which nothing happens any more
    kinds: Counter[str] = field(default_factory=Counter)
    broken: str = ""
    history: list[int] = field(default_factory=list)
    took_s: float = 0.0


class Search:
    """One search, level by level."""

    def __init__(self, shape: Shape, budget: Faults) -> None:
        self.shape, self.budget = shape, budget
        self.found = Found()
        self._known: dict[int, None] = {}
        self._parent, self._by = array("I"), array("B")  # of each state: where it came from, and by which action
        self._began = time.monotonic()

    def run(
        self,
        *,
        until: Callable[[], bool],
        jobs: int = 1,
        deepest: int = 10**9,
        said: Callable[[Found], None] | None = None,
    ) -> Found:
        """Search until everything was seen, a promise is broken, or it is time to stop."""
        start = Small.begin(self.shape, self.budget)
        frontier = [(0, zlib.compress(start.packed(), 1))]
        self._note(start.digest(), 0, 0)
        found = self.found
        with expander(jobs) as expanded:
            while frontier and found.depth < deepest:
                following = self._level(expanded(frontier), until)
                found.took_s = time.monotonic() - self._began
                if following is None:
                    break
                found.depth += 1
                found.is_whole = not following
                frontier = following
                if said is not None:
                    said(found)
        return found

    def _level(
        self, expansions: Iterator[tuple[int, Expansion]], until: Callable[[], bool]
    ) -> list[tuple[int, bytes]] | None:
        """One step further from all of them; None if it was cut short."""
        following: list[tuple[int, bytes]] = []
        found = self.found
        for index, expansion in expansions:
            found.kinds += expansion.kinds
            found.steps += len(expansion.following)
            found.at_rest += expansion.is_at_rest
            for number, digest, packed in expansion.following:
                new = self._note(digest, index, number)
                if new is not None:
                    assert packed is not None
                    following.append((new, packed))
            if expansion.broken:
                found.broken, found.history = expansion.broken, [*self._history(index), expansion.broken_by]
                return None
            if until():
                return None
        return following

    def _note(self, digest: int, parent: int, by: int) -> int | None:
        """The index of a state that was not known before."""
        if digest in self._known:
            return None
        self._known[digest] = None
        self._parent.append(parent)
        self._by.append(by)
        self.found.states += 1
        return self.found.states - 1

    def _history(self, index: int) -> list[int]:
        """Which of its actions was taken in each state on the way to that one."""
        found: list[int] = []
        while index:
            found.append(self._by[index])
            index = self._parent[index]
        return found[::-1]
