"""What programs publish: `REPLICA/SHARD/CONTENT`, or `tiled-WHAT/CUT/SHARD` where one cut follows from another."""

from tensorhub.protocol.names import TILED, Digest

ROOM = 500  # of the values of one cut's chunks


def root_of(what: str, cut: str, shard: int) -> Digest:
    """The content of one shard of a cut."""
    return Digest(f"{TILED}{what}/{cut}/{shard}")


def plain_root_of(replica: str, content: int, shard: int) -> Digest:
    """The content of one shard where all are cut alike."""
    return Digest(f"{replica}/{shard}/{content}")


def what_is(root: Digest) -> str:
    """What was published, whatever the shard and the cut: all of a version is of one such thing."""
    if root.startswith(TILED):
        return root[len(TILED) :].split("/")[0]
    replica, _, content = root.rsplit("/", 2)
    return f"{replica}/{content}"


def derived(root: Digest, cut: str, shard: int) -> Digest:
    """What that content is in another cut."""
    return root_of(what_is(root), cut, shard)


def values_of(root: Digest, chunks: int) -> tuple[int, ...]:
    """Its chunks: `WHAT` is the number of a program and that of what it made."""
    what, cut, shard = root[len(TILED) :].split("/")
    index, content = what.split(".")
    first = ((int(index) * 1000 + int(content)) * 100 + int(shard)) * 1000 + ROOM * (ord(cut) - ord("a"))
    return tuple(first + chunk + 1 for chunk in range(chunks))
