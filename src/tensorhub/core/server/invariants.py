"""What must be true of the server after every message, whatever came in. A contradiction is a bug of ours."""

from .catalog import versions_in
from .state import State


def server_contradiction(state: State) -> str | None:
    """How the server machine contradicts itself, or None. Looks at every table: for tests and the simulator."""
    granted: dict[object, object] = {}
    for read in state.reads.all():
        if state.members.get(read.reader) is None:
            return f"ticket {read.ticket} is open for {read.reader}, who has no session"
        if not read.is_void and read.reader in granted:
            return f"{read.reader} may read {granted[read.reader]} and {read.ticket} at once"
        if not read.is_void:
            granted[read.reader] = read.ticket
            if read.reader in state.reads.chain(read.reader):
                return f"{read.reader} reads from itself in the end, ticket {read.ticket}"
    for model in state.models.values():
        for record in model.versions.values():
            for holders in record.holders.values():
                for worker in holders:
                    member = state.members.get(worker)
                    if member is None:
                        return f"{worker} counts as a holder of {record.version} and has no session"
                    is_reading = any(read.version == record.version for read in state.reads.of(worker))
                    if not is_reading and record.version not in versions_in(member.content):
                        return f"{worker} counts as a holder of {record.version} and says {member.report}"
        for replica in model.replicas.values():
            for shard, worker in replica.members.items():
                if state.members.get(worker) is None or worker.shard != shard:
                    return f"{replica.name} counts {worker} as its shard {shard}"
    return None
