"""What things are called: the identifiers that server, workers and messages share.

A *worker* is one process with one shard of one model; its name is (model, replica, shard) and stays the same over its
lives. Numbers (sessions, tickets, order numbers) all come from one counter of the reference server that only rises,
over its restarts too, so any two of them can be compared and the greater is the later one.
"""

import re
from typing import NamedTuple, NewType

ModelName = NewType("ModelName", str)
ReplicaName = NewType("ReplicaName", str)
Shard = NewType("Shard", int)
Version = NewType("Version", int)
Number = NewType("Number", int)  # 0 is "none yet"; every other one was handed out by a reference server
Ticket = NewType("Ticket", int)
Digest = NewType("Digest", str)


MAX_NAME = 200  # characters of a model's or replica's name
NAME_RULE = f"use 1 to {MAX_NAME} letters, digits and . _ + = : -, not beginning with a sign"
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._+=:-]{{0,{MAX_NAME - 1}}}\Z")


def is_name(text: str) -> bool:
    """A model or a replica may be called so."""
    return _NAME.match(text) is not None


def plain(text: str) -> str:
    """As nothing but a text: one of a class derived from `str` (numpy.str_, an enum's) does not travel."""
    return str.__str__(text)


def plain_number(value: object) -> object:
    """A number of numpy's or torch's, also as an array of no dimension, as Python's own; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


class WorkerId(NamedTuple):
    """One shard of one replica of one model. Sorts by name, which is how every tie is broken."""

    model: ModelName
    replica: ReplicaName
    shard: Shard

    def __str__(self) -> str:
        return f"{self.model}/{self.replica}[{self.shard}]"


def worker_id(model: str, replica: str, shard: int) -> WorkerId:
    """A `WorkerId` from plain values."""
    return WorkerId(ModelName(model), ReplicaName(replica), Shard(shard))


# --- what a digest says of itself -------------------------------------------------------------------------------------

BOXED = "boxed-"  # how the digest of a layout begins that says which parts of which global tensors it has
PARTIAL = BOXED + "part-"  # the same of one that leaves out some of the model, and says so
TILED = "tiled-"  # how the root of a content begins that has a digest for each tile: it can be read into other layouts


def is_boxed(layout: Digest) -> bool:
    """What the tensors of that layout are does not depend on the shard's number."""
    return layout.startswith(BOXED)


def is_partial(layout: Digest) -> bool:
    """Whoever has all of that layout may not have all of a version."""
    return layout.startswith(PARTIAL)


def is_tiled(root: Digest) -> bool:
    """That content can be read into any layout of the same global tensors."""
    return root.startswith(TILED)
