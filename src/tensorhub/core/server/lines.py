"""What workers have in common: the *line* of a worker says how its shard is cut; a *cut* is the lines of one replica.

All workers of one line have the same bytes of a version, chunk by chunk, and read from each other. A layout with boxes
says itself what it is of; without them a shard is known by its number among so many. A version may be had in several
cuts: it is there as long as somebody has each line of one of them.
"""

from typing import NamedTuple

from ..names import Digest, Shard, Version, is_boxed


class Line(NamedTuple):
    """One shard of so many, cut in one way. `layout` is that of a shard with boxes, and empty for any other."""

    shards: int
    shard: Shard
    layout: Digest = Digest("")

    def of(self, layout: Digest) -> "Line":
        """The line of the same shard, laid out like that."""
        own = layout if is_boxed(layout) else Digest("")
        return self if own == self.layout else Line(self.shards, self.shard, own)

    @property
    def is_boxed(self) -> bool:
        """Its content can be read out of other cuts, and into them."""
        return bool(self.layout)


Cut = tuple[Line, ...]  # the lines of one replica, by shard
Place = tuple[Version, Line]


def plain_cut(shards: int) -> Cut:
    """A replica of so many shards without boxes."""
    return tuple(Line(shards, Shard(shard)) for shard in range(shards))
