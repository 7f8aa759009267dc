"""Who lives of one model, so that a later life of the server can tell whether anybody is missing.

A set of sessions is written as how many they are and the sum of a keyed hash of each: the same for the same set, in
whatever order they came and went. A session is *witnessed* when another worker, itself witnessed, is known to know of
it. Sessions are numbered as they begin, so the witnessed ones are those up to a watermark. The oldest needs no witness.
"""

from dataclasses import dataclass, field

from ..messages import Roster
from ..names import Number, WorkerId

MODULUS = 2**96  # as long as a receipt


@dataclass
class Tally:
    """A set of sessions, as how many they are and their sum."""

    count: int = 0
    total: int = 0

    def add(self, key: int) -> None:
        self.count, self.total = self.count + 1, (self.total + key) % MODULUS

    def remove(self, key: int) -> None:
        self.count, self.total = self.count - 1, (self.total - key) % MODULUS

    @property
    def digest(self) -> str:
        return f"{self.total:x}"

    def is_that_of(self, roster: Roster) -> bool:
        return (self.count, self.digest) == (roster.count, roster.digest)


@dataclass
class Roll:
    """Who lives and who is witnessed; and after a restart, who has answered the roll call."""

    is_over: bool = True  # the roll call: nobody is missing to whom a former life may have promised anything
    living: Tally = field(default_factory=Tally)
    roster: Roster | None = None  # of those who live now; None: not made yet
    upto: Number = Number(0)  # sessions up to this one are witnessed
    witnessed: dict[WorkerId, Number] = field(default_factory=dict)  # the sessions that live, oldest first
    unwitnessed: dict[WorkerId, Number] = field(default_factory=dict)
    shown: Roster | None = None  # the newest of a former life
    answered: Tally = field(default_factory=Tally)  # who has shown one, by their former sessions
    unaware: dict[WorkerId, None] = field(
        default_factory=dict
    )  # those of them that have not said yet that they heard this life
    doubted: dict[WorkerId, None] = field(default_factory=dict)  # who has other content than was heard of before

    @property
    def is_complete(self) -> bool:
        """Those who have answered are all of the newest roster, and have heard this life."""
        return self.shown is not None and not self.unaware and self.answered.is_that_of(self.shown)

    def begin(self, worker: WorkerId, session: Number, key: int) -> None:
        self.living.add(key)
        self.unwitnessed[worker], self.roster = session, None

    def end(self, worker: WorkerId, key: int) -> None:
        self.living.remove(key)
        self.roster = None
        for sessions in (self.witnessed, self.unwitnessed, self.unaware, self.doubted):
            sessions.pop(worker, None)

    def witness(self, upto: Number) -> list[WorkerId]:
        """Sessions up to that one are witnessed. Returns those that were not before."""
        self.upto = max(self.upto, upto)
        found = []
        while self.unwitnessed and next(iter(self.unwitnessed.values())) <= self.upto:
            worker = next(iter(self.unwitnessed))
            self.witnessed[worker] = self.unwitnessed.pop(worker)
            found.append(worker)
        return found
