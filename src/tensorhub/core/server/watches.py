"""Who waits for what: the members of one model for whom a change elsewhere may mean something to do.

A member that is decided for says what it waits for from then on, as topics. Whoever changes something of a topic has
those decided for again that wait for it, and nobody else.
"""

from typing import NamedTuple

from ..names import Shard, Version, WorkerId


class Topic(NamedTuple):
    """Something that may change. Of the model as a whole where it names no version."""

    what: str
    version: Version | None = None
    shard: Shard | None = None


NEWS = Topic("news")  # which versions there are, and which of them are to be kept
SERVICE = Topic("service")  # whether somebody serves a version that exists


def loss_of(version: Version) -> Topic:
    """Whether the version is lost."""
    return Topic("loss", version)


def sources_of(version: Version, shard: Shard) -> Topic:
    """From whom that shard of the version may be read."""
    return Topic("sources", version, shard)


def references_of(version: Version, shard: Shard) -> Topic:
    """Who keeps that shard of the version, and who is to get it yet."""
    return Topic("references", version, shard)


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

    def is_waiting(self, worker: WorkerId) -> bool:
        """It waits for something."""
        return worker in self._of
