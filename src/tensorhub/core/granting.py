"""Who may read what: gives grants, takes them back, and moves readers when their source leaves.

Called by the server machine, whose tables it changes.
"""

from math import inf
from typing import TYPE_CHECKING

from . import operations
from .groups import Replica
from .membership import Member
from .messages import Empty, Filling, Grant, Holding, Poisoned, Withdrawing
from .names import Ticket, Version, WorkerId
from .open_reads import OpenRead
from .references import Model, VersionRecord
from .selection import Candidate, choose_source

if TYPE_CHECKING:
    from .server import Server


def decide_read(server: "Server", model: Model, replica: Replica, member: Member) -> None:
    """Give this worker the read that it should have now, or none."""
    wanted = operations.wanted_version(replica, member)
    current = server.reads.current(member.worker)
    record = model.versions.get(wanted) if wanted is not None else None
    buffer = member.report.buffer
    is_read = isinstance(buffer, Poisoned) and buffer.version is not None
    if record is None or is_read or isinstance(buffer, Holding | Withdrawing):
        if current is not None:
            _void(server, current)
        return
    if current is not None and current.version == wanted and serves(server, current.source, current.version):
        source = server.members.get(current.source)
        if source is None or not isinstance(source.report.buffer, Withdrawing):
            return
        others = [c for c in _candidates(server, record, member) if not c.is_withdrawing]
        if choose_source(others, now=server.now) is None and not source.report.buffer.impatient:
            return
    if current is not None:
        _void(server, current)
    _grant(server, record, member)


def serves(server: "Server", source: WorkerId, version: Version) -> bool:
    """As far as is known, the source still has the version. One whose lease has ended may well go on serving."""
    member = server.members.get(source)
    if member is None:
        return True
    match member.report.buffer:
        case Holding(version=held) | Filling(version=held):
            return held == version
        case Withdrawing(version=held, impatient=impatient):
            has_heard_us = member.report.session == member.session  # no former server's "drained" can reach it any more
            return held == version and not impatient and not member.is_drained and has_heard_us
        case Empty() | Poisoned():
            current = server.reads.current(source)  # it was granted the version, and is about to fill
            return current is not None and current.version == version


def drained_version(server: "Server", model: Model, member: Member) -> Version | None:
    """The version that this worker wants to leave, if nobody reads it there any more or still has to."""
    buffer = member.report.buffer
    if not isinstance(buffer, Withdrawing | Poisoned) or server.is_recovering or _has_readers(server, member):
        return None
    if isinstance(buffer, Poisoned) or buffer.impatient or member.is_drained:
        return buffer.version
    record = model.versions.get(buffer.version)
    if record is None or not record.promised:
        return buffer.version
    is_last = operations.is_last_holder(server, record, member)
    is_needed = is_last and operations.is_awaited(server, model, record, member)
    return None if is_needed else buffer.version


def _has_readers(server: "Server", source: Member) -> bool:
    """Somebody must be waited for before the source may change its buffer.

    A source that can cut its readers off itself waits neither for those whose read was taken back (they have another
    source, or none can help them) nor for those whose connection is gone; the others wait for everybody's word.
    """
    reads = server.reads.from_source(source.worker)
    if not source.hello.revocable:
        return bool(reads)
    readers = [server.members.get(read.reader) for read in reads if not read.is_void]
    return any(reader is not None and reader.is_connected for reader in readers)


def _candidates(server: "Server", record: VersionRecord, reader: Member) -> list[Candidate]:
    behind = server.reads.readers_behind(reader.worker)
    found = []
    for worker in record.holders.get(reader.shard, {}):
        member = server.members.get(worker)
        if member is None or worker in behind or not serves(server, worker, record.version):
            continue
        if not member.is_full and server.reads.current(worker) is None:
            continue  # it waits for a source itself
        buffer, here, there = member.report.buffer, reader.hello, member.hello
        avoided = reader.avoided.get(worker)
        found.append(
            Candidate(
                worker=worker,
                load=server.reads.load(worker),
                is_full=member.is_full,
                done=member.done,
                published=isinstance(buffer, Holding | Withdrawing) and buffer.published,
                is_withdrawing=isinstance(buffer, Withdrawing),
                is_near=here.host == there.host,
                is_same_site=here.site == there.site,
                avoided_until=avoided.until if avoided is not None else -inf,
            )
        )
    return found


def _grant(server: "Server", record: VersionRecord, member: Member) -> None:
    root = record.roots.get(member.shard)
    if root is None:
        return  # only such as are filling have reported since the restart: nobody could say what is good
    candidates = _candidates(server, record, member)
    choice = choose_source(candidates, now=server.now)
    if choice is None:
        if candidates:
            server.members.wake(member, min(candidate.avoided_until for candidate in candidates))
        return
    source, reason = choice
    endpoints = server.known(source).hello.endpoints
    grant = Grant(Ticket(server.next_number()), record.version, root, source, endpoints, reason)
    server.reads.add(OpenRead(grant, member.worker))
    record.holders.setdefault(member.shard, {})[member.worker] = None  # others may read behind it from now on
    server.counters["grants"] += 1
    server.touch(member.worker)
    server.touch_model(server.models[member.hello.model])


def _void(server: "Server", read: OpenRead) -> None:
    read.is_void = True
    server.touch(read.reader)
    for behind in server.reads.from_source(read.reader):
        server.touch(behind.reader)
