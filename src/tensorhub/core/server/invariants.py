"""What must be true of the server after every message, whatever came in. A contradiction is a bug of ours."""

from collections import Counter

from ..names import WorkerId
from .catalog import Model
from .content import WHOLE
from .open_reads import OpenRead
from .state import State


def server_contradiction(state: State) -> str | None:
    """How the server machine contradicts itself, or None. Looks at every table: for tests and the simulator."""
    granted: dict[WorkerId, OpenRead] = {}
    for read in state.reads.all():
        if state.members.get(read.reader) is None:
            return f"ticket {read.ticket} is open for {read.reader}, who has no session"
        other = granted.get(read.reader) if not read.is_void else None
        if other is not None and not _are_parts_of_one(read, other):
            return f"{read.reader} may read {other.ticket} and {read.ticket} at once"
        if not read.is_void:
            granted[read.reader] = read
            if read.reader in state.reads.chain(read.reader):
                return f"{read.reader} reads from itself in the end, ticket {read.ticket}"
    for model in state.models.values():
        for record in model.versions.values():
            for line, holders in record.holders.items():
                for worker in holders:
                    member = state.members.get(worker)
                    if member is None:
                        return f"{worker} counts as a holder of {record.version} and has no session"
                    place = record.version, line
                    is_reading = any((read.version, read.line) == place for read in state.reads.of(worker))
                    if not is_reading and place not in member.content.places:
                        return f"{worker} counts as a holder of {record.version} and says {member.report}"
        wrong = _index_contradiction(state, model) or _content_contradiction(state, model)
        if wrong is not None:
            return wrong
        for replica in model.replicas.values():
            for shard, worker in replica.members.items():
                if state.members.get(worker) is None or worker.shard != shard:
                    return f"{replica.name} counts {worker} as its shard {shard}"
    return None


def _are_parts_of_one(one: OpenRead, other: OpenRead) -> bool:
    """Both are parts of one read across."""
    if one.part is None or other.part is None or one.part == other.part:
        return False
    return (one.version, one.grant.to_host) == (other.version, other.grant.to_host)


def _index_contradiction(state: State, model: Model) -> str | None:
    """How what is kept to be found quickly differs from what it was found from."""
    members = [member for member in state.members.all() if member.hello.model == model.name]
    for member in members:
        if (member.worker in model.read_from) != bool(state.reads.load(member.worker)):
            return (
                f"{member.worker} serves {state.reads.load(member.worker)} reads, and is kept as if it were otherwise"
            )
        if member.worker not in model.hosts.get(member.hello.host, {}):
            return f"{member.worker} is not kept among those of its host {member.hello.host!r}"
    if model.sites != Counter(member.hello.site for member in members):
        return f"the sites of {model.name} are kept as {dict(model.sites)}"
    reliable = sorted((member.line, member.worker) for member in members if member.hello.reliable)
    if reliable != sorted((line, worker) for line, those in model.reliable.items() for worker in those):
        return f"those who count for retention are {reliable}, and kept are {model.reliable}"
    staying = sorted((place, m.worker) for m in members if (place := m.content.staying) is not None)
    if staying != sorted((place, worker) for place, those in model.staying.by_place.items() for worker in those):
        return f"those who stay with what they hold are {staying}, and kept are {model.staying.by_place}"
    for record in model.versions.values():
        for line, holders in record.holders.items():
            idle = sorted(worker for worker in holders if worker not in model.read_from)
            if record.idle.get(line, []) != idle:
                return f"{idle} are idle holders of {record.version}, {record.idle.get(line)} are kept as such"
    return None


def _content_contradiction(state: State, model: Model) -> str | None:
    """Who is believed to have all of a version, of which it is not known what it is: nobody could read it there."""
    for member in state.members.all():
        if member.hello.model != model.name:
            continue
        buffer, copies = member.content.buffer, member.content.copies
        whole = [
            (copy.version, copy.root, member.content.line_of(copy.version, is_copy=True))
            for copy in copies
            if copy.whole and not copy.leaving
        ]
        if isinstance(buffer, WHOLE):
            whole.append((buffer.version, buffer.root, member.line))
        for version, root, line in whole:
            known = model.look_up(version).roots.get(line)
            if known != root:
                return f"{member.worker} has {version} with the content {root}, and that is kept as {known}"
    return None
