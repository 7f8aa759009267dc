"""What replicas have published, as the truth remembers it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from tensorhub.protocol.names import Digest, ModelName, ReplicaName, Version

from .contents import derived
from .life import BAR


@dataclass(eq=False)
class Made:
    """What one replica has published under a number."""

    model: ModelName
    version: Version
    replica: ReplicaName
    roots: dict[int, Digest] = field(default_factory=dict)
    layouts: dict[int, Digest] = field(default_factory=dict)
    cut: str = ""
    exists: float = inf  # since when all shards had it
    known_to: dict[str, tuple[int, float]] = field(
        default_factory=dict
    )  # lives who heard so: first of which server, when
    known: float = inf  # since when a server had said so

    def note_known(self, life: str, server: int, now: float) -> None:
        """That life of a server has told that life of a worker that it exists."""
        self.known_to.setdefault(life, (server, now))
        self.known = min(self.known, now)

    def root_of(self, shard: tuple[str, int]) -> Digest | None:
        """What it is in that shard of its own cut or of another one."""
        cut = shard[0].partition(BAR)[2]
        if cut == self.cut:
            return self.roots.get(shard[1])
        own = self.roots.get(shard[1], next(iter(self.roots.values()), None))  # another cut may have more shards
        return derived(own, cut, shard[1]) if own is not None else None

    def is_part_of(self, other: "Made") -> bool:
        """What is there of it is the same content."""
        place = f"{self.model}{BAR}{self.cut}" if self.cut else self.model
        return all(other.root_of((place, shard)) in (None, root) for shard, root in self.roots.items())

    def is_anew(self, first: "Made") -> bool:
        """Its publisher was told that it exists, and only by later lives of the server than knew of the first content.

        Whether such a server may say so is judged when it answers the publish. One life never says so of two contents.
        """
        told = [
            server for life, (server, _) in self.known_to.items() if life.startswith(f"{self.model}/{self.replica}[")
        ]
        return bool(told) and min(told) > max((server for server, _ in first.known_to.values()), default=0)


def contents(made: Iterable[Made], first: Made, shard: tuple[str, int]) -> list[Digest | None]:
    """What a version is in that shard: more than one content where it was published anew."""
    return [each.root_of(shard) for each in made if each is first or each.is_anew(first)]
