"""Who waits for what: the members of one model for whom a change elsewhere may mean something to do.

A member that is decided for says what it waits for from then on, as topics. Whoever changes something of a topic has
those decided for again that wait for it, and nobody else.
"""

from ..names import Version, WorkerId
from .lines import Line

# Something that may change: what it is, and of which version and line. Of the model as a whole where it names none.
Topic = tuple[str, Version | None, Line | None]

NEWS: Topic = ("news", None, None)  # which versions there are, and which of them are to be kept
SERVICE: Topic = ("service", None, None)  # whether somebody serves a version that exists
ARRIVALS: Topic = ("arrivals", None, None)  # whether others still are on their way to a version


def loss_of(version: Version) -> Topic:
    """Whether the version is lost."""
    return "loss", version, None


def sources_of(version: Version, line: Line) -> Topic:
    """From whom that line of the version may be read."""
    return "sources", version, line


def references_of(version: Version, line: Line) -> Topic:
    """Who keeps that line of the version, and who is to get it yet."""
    return "references", version, line


class Watches:
    """The members by topic, and the topics by member. Each call takes as long as what it is given or returns."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, tuple[Topic, ...]] = {}
        self._by: dict[Topic, dict[WorkerId, None]] = {}

    def watch(self, worker: WorkerId, topics: tuple[Topic, ...]) -> None:
        """The member waits for these, and for nothing else."""
        former = self._of.get(worker, ())
        if topics == former:
            return
        for topic in former:
            if topic not in topics:
                waiting = self._by[topic]
                del waiting[worker]
                if not waiting:
                    del self._by[topic]
        for topic in topics:
            self._by.setdefault(topic, {})[worker] = None
        if topics:
            self._of[worker] = topics
        else:
            del self._of[worker]

    def waiting_for(self, topic: Topic) -> list[WorkerId]:
        """Those who wait for it, the first who came first."""
        return list(self._by.get(topic, ()))

    def waits_for_more(self, worker: WorkerId, than: str) -> bool:
        """It waits for something else too than topics of that kind."""
        return any(topic[0] != than for topic in self._of.get(worker, ()))

    def is_waiting(self, worker: WorkerId) -> bool:
        """It waits for something."""
        return worker in self._of
