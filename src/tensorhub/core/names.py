"""What things are called: the identifiers that server, workers and messages share.

A *worker* is one process with one shard of one model; its name is (model, replica, shard) and stays the same over its
lives. Numbers (sessions, tickets, order numbers) all come from one counter of the reference server that only rises,
over its restarts too, so any two of them can be compared and the greater is the later one.
"""

from typing import NamedTuple, NewType

ModelName = NewType("ModelName", str)
ReplicaName = NewType("ReplicaName", str)
Shard = NewType("Shard", int)
Version = NewType("Version", int)
Number = NewType("Number", int)  # 0 is "none yet"; every other one was handed out by a reference server
Ticket = NewType("Ticket", int)
Digest = NewType("Digest", str)


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
