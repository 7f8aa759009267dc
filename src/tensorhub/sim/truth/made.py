"""What replicas have published, as the truth remembers it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from ...core.names import Digest, ModelName, ReplicaName, Version
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

    @property
    def known(self) -> float:
        """Since when a server had said so."""
        return min((at for _, at in self.known_to.values()), default=inf)

    def note_known(self, life: str, server: int, now: float) -> None:
        """That life of a server has told that life of a worker that it exists."""
        self.known_to.setdefault(life, (server, now))

    def root_of(self, shard: tuple[str, int]) -> Digest | None:
        """What it is in that shard of its own cut or of another one."""
        cut = shard[0].partition(BAR)[2]
        if cut == self.cut:
            return self.roots.get(shard[1])
        own = self.roots.get(shard[1], next(iter(self.roots.values()), None))  # another cut may have more shards
        return derived(own, cut, shard[1]) if own is not None else None


def roots_said(made: Iterable[Made], shard: tuple[str, int]) -> list[Digest | None]:
    """What servers have said to exist under a number, in that shard: more than one content where the next server could
    hear from nobody who knew of the first. Whether it may say so is judged when it does."""
    return [each.root_of(shard) for each in made if each.known < inf]
