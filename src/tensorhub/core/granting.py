"""Who may read what: gives grants, takes them back, and moves readers when their source leaves.

Called by the server machine, whose tables it changes.
"""

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from . import moving, operations, retention, rollcall, sites
from .groups import Replica
from .membership import Member
from .messages import Filling, Grant, Holding, Poisoned, Withdrawing
from .names import Ticket, Version, WorkerId
from .open_reads import OpenRead
from .references import Model, VersionRecord
from .selection import Candidate, choose_source

if TYPE_CHECKING:
    from .server import Server


class Wanted(NamedTuple):
    """A read that a worker should have."""

    version: Version
    to_host: bool


def wanted_read(server: "Server", model: Model, replica: Replica, member: Member) -> Wanted | None:
    """What this worker should be reading now, and can. Its caller's operation comes before what is fetched ahead."""
    version = operations.wanted_version(replica, member)
    if version is None or member.holds(version) or member.fills_itself(version):
        version = retention.version_to_fetch(server, model, replica, member)
        is_whole = version is not None and member.has_whole_copy(version)
        return Wanted(version, True) if version is not None and not is_whole else None
    copy, current = member.copy(version), server.reads.current(member.worker)
    if copy is not None and not copy.unfit:
        return Wanted(version, True)
    is_coming = current is not None and current.version == version and current.grant.to_host
    if is_coming and not member.loses_copy(version):
        return Wanted(version, True)  # which is about to begin
    buffer = member.report.buffer
    is_read = isinstance(buffer, Poisoned) and buffer.version is not None
    return None if is_read else Wanted(version, False)


def decide_read(server: "Server", model: Model, replica: Replica, member: Member) -> None:
    """Give this worker the read that it should have now, or none.

    One that has gone keeps what it has until it is back or its lease ends: it would not hear of another, and a source
    would wait in vain.
    """
    if not server.is_here(member):
        return
    wanted = wanted_read(server, model, replica, member)
    current = server.reads.current(member.worker)
    record = model.versions.get(wanted.version) if wanted is not None else None
    if wanted is None or record is None:
        if current is not None:
            void(server, current)
        return
    is_wanted = current is not None and (current.version, current.grant.to_host) == wanted
    if current is not None and is_wanted and serves(server, current.source, current.version, current.grant.from_host):
        source = server.members.get(current.source)
        if moving.leave_slow(server, model, record, member, current) or source is None:
            return
        if moving.to_idle(server, model, record, member, current):
            return
        if not (_is_leaving(source, current.version, current.grant.from_host) or _is_paused(server, current)):
            return
        waits_for_us = _waits_for_its_readers(server, current)
        others = [c for c in candidates(server, model, record, member) if waits_for_us or not c.is_withdrawing]
        if server.is_here(source):
            others = [c for c in others if not c.is_doubtful]
        is_cut = _is_impatient(source, current.version) and not current.grant.from_host
        if choose_source(others, now=server.now) is None and not is_cut:
            return
    if current is not None:
        void(server, current)
    if wanted.to_host and any(read.is_void for read in server.reads.of(member.worker)):
        return  # in its own time: were it stopped, each new version would leave one more source waiting for it
    _grant(server, model, record, member, to_host=wanted.to_host)


def _is_leaving(source: Member, version: Version, from_host: bool) -> bool:
    buffer = source.report.buffer
    if from_host:
        return source.report.closing
    return isinstance(buffer, Withdrawing) and buffer.version == version


def _is_paused(server: "Server", read: OpenRead) -> bool:
    """Its source has only a part of the version, and nothing to read the rest from: it has something else to do."""
    source, from_host = server.members.get(read.source), read.grant.from_host
    if source is None or is_full(source, read.version, from_host):
        return False
    current = server.reads.current(read.source)
    if current is None or (current.version, current.grant.to_host) != (read.version, from_host):
        return True
    return _waits_for_its_readers(server, read)


def _waits_for_its_readers(server: "Server", read: OpenRead) -> bool:
    """Its source has a part of the version, and goes on only when others have it all: they must get it elsewhere."""
    source = server.members.get(read.source)
    if source is None or read.grant.from_host or is_full(source, read.version, from_host=False):
        return False
    return retention.leaves_last(server, source)


def is_full(member: Member, version: Version, from_host: bool) -> bool:
    """It has all of the version, there."""
    return member.has_whole_copy(version) if from_host else member.holds(version)


def _is_impatient(source: Member, version: Version) -> bool:
    buffer = source.report.buffer
    return isinstance(buffer, Withdrawing) and buffer.version == version and buffer.impatient


def serves(server: "Server", source: WorkerId, version: Version, from_host: bool) -> bool:
    """As far as is known, the source still has the version. One whose lease has ended may well go on serving."""
    member = server.members.get(source)
    if member is None:
        return True
    current = server.reads.current(source)
    is_about_to = current is not None and current.version == version and current.grant.to_host == from_host
    if from_host:
        return member.keeps_copy(version) or (is_about_to and not member.loses_copy(version))
    match member.report.buffer:
        case Holding(version=held) | Filling(version=held) if held == version:
            return True
        case Withdrawing(version=held, impatient=impatient) if held == version:
            return not impatient and not member.is_let_go
        case Filling():
            return False
        case _:
            return is_about_to  # it was granted the version, and fills the buffer with it next


def drained_version(server: "Server", model: Model, member: Member) -> Version | None:
    """The version that this worker wants to leave, if nobody reads it there any more or still has to."""
    buffer = member.report.buffer
    if not isinstance(buffer, Withdrawing | Poisoned) or buffer.version is None:
        return None
    if not model.roll.is_over or rollcall.is_strange(server, member):
        return None
    if _has_readers(server, member, buffer.version):
        return None
    if isinstance(buffer, Poisoned) or member.is_drained:
        return buffer.version
    if retention.must_stay(server, model, member):
        patience_until = member.closing_since + server.settings.spot_heir_s
        if member.report.closing and patience_until > server.now:
            server.members.wake(member, patience_until)
        return None
    if buffer.impatient:
        return buffer.version
    record = model.versions.get(buffer.version)
    if record is None or not record.promised:
        return buffer.version
    is_last = operations.is_last_holder(server, record, member)
    is_needed = is_last and operations.is_awaited(server, model, record, member)
    return None if is_needed else buffer.version


def _has_readers(server: "Server", source: Member, version: Version) -> bool:
    """Somebody must be waited for before the source may change its buffer.

    Who has opened there what the buffer is to be filled with next reads nothing of what it has now.
    """
    return retention.must_wait(server, source, server.reads.from_buffer(source.worker, version))


def full_sources(server: "Server", record: VersionRecord, reader: Member) -> Iterator[Member]:
    """Those others that have all of the version and may serve it."""
    for worker in record.holders.get(reader.shard, {}):
        member = server.members.get(worker)
        if member is None or worker == reader.worker:
            continue
        if member.has_whole_copy(record.version) or (
            member.holds(record.version) and serves(server, worker, record.version, from_host=False)
        ):
            yield member


def candidates(server: "Server", model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Whom the reader may be given as its source."""
    return rollcall.allowed(server, model, reader, _possible(server, model, record, reader))


def _possible(server: "Server", model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Whom the reader could read from; across sites only if it is the seed of its own."""
    behind = server.reads.readers_behind(reader.worker, record.version)
    leaving = reads_leaving(server, record, reader) if len(model.sites) > 1 else None
    found = []
    for worker in record.holders.get(reader.shard, {}):
        member = server.members.get(worker)
        if member is None or worker in behind:
            continue
        for from_host in (False, True):
            candidate = _candidate(server, record, reader, member, from_host, leaving)
            if candidate is not None:
                found.append(candidate)
    if all(candidate.is_same_site for candidate in found):
        return found
    near = [c for c in found if c.is_same_site and c.avoided_until <= server.now]
    near = [c for c in near if not c.is_withdrawing and not c.is_doubtful]
    return found if near or sites.may_cross(server, model, record, reader) else []


def reads_leaving(server: "Server", record: VersionRecord, reader: Member) -> Counter[str]:
    """How many reads by others leave each site for another, of those from who has this shard of the version."""
    found: Counter[str] = Counter()
    for worker in record.holders.get(reader.shard, {}):
        source = server.members.get(worker)
        for read in server.reads.from_source(worker) if source is not None else ():
            other = server.members.get(read.reader)
            if source is None or other is None or other is reader or read.is_void or not other.is_connected:
                continue
            found[source.hello.site] += other.hello.site != source.hello.site
    return found


def _candidate(
    server: "Server",
    record: VersionRecord,
    reader: Member,
    member: Member,
    from_host: bool,
    leaving: Counter[str] | None,
) -> Candidate | None:
    """The member's buffer, or its host copy, as a source; None if it cannot be one."""
    version, worker = record.version, member.worker
    if not serves(server, worker, version, from_host) or (from_host and member.loses_copy(version)):
        return None
    has_all = is_full(member, version, from_host)
    current = server.reads.current(worker)
    is_filling = current is not None and current.version == version and current.grant.to_host == from_host
    if not has_all and (not is_filling or (not from_host and retention.leaves_last(server, member))):
        return None  # it waits for a source itself, or for those who would read behind it
    buffer, here, there = member.report.buffer, reader.hello, member.hello
    avoided = reader.avoided.get(worker)
    return Candidate(
        worker=worker,
        load=server.reads.load(worker),
        is_full=has_all,
        done=member.done(from_host=from_host, version=version),
        published=not from_host and has_all and isinstance(buffer, Holding | Withdrawing) and buffer.published,
        is_withdrawing=_is_leaving(member, version, from_host),
        is_doubtful=server.is_doubtful(member) or reader.left.get(worker, -inf) > server.now,
        is_slow=member.slow_until > server.now,
        is_near=here.host == there.host,
        is_same_site=here.site == there.site,
        avoided_until=avoided.until if avoided is not None else -inf,
        from_host=from_host,
        leaving_site=leaving[there.site] if leaving is not None and here.site != there.site else 0,
    )


def _grant(server: "Server", model: Model, record: VersionRecord, member: Member, *, to_host: bool) -> None:
    if member.shard not in record.roots:
        return  # only such as are filling have reported since the restart: nobody could say what is good
    possible = _possible(server, model, record, member)
    found = rollcall.allowed(server, model, member, possible)
    choice = choose_source(found, now=server.now)
    if choice is None:
        best = choose_source(possible, now=server.now)
        if found:
            server.members.wake(member, min(candidate.avoided_until for candidate in found))
        elif best is not None:
            rollcall.wait_for(server, model, member, possible, best[0])
        return
    give(server, record, member, choice, to_host=to_host)


def give(
    server: "Server", record: VersionRecord, member: Member, choice: tuple[Candidate, str], *, to_host: bool
) -> OpenRead:
    """Grant the reader that source."""
    best, reason = choice
    root = record.roots[member.shard]
    source, endpoints = best.worker, server.known(best.worker).hello.endpoints
    grant = Grant(
        *(Ticket(server.next_number()), record.version, root, source, endpoints, reason),
        from_host=best.from_host,
        to_host=to_host,
        is_far=server.known(best.worker).hello.site != member.hello.site,
    )
    done, chunks, _ = member.filled(record.version, to_host=to_host)
    read = OpenRead(grant, member.worker, looked_at=server.now, began_at=server.now, had=done / max(chunks, done, 1))
    server.reads.add(read)
    record.holders.setdefault(member.shard, {})[member.worker] = None  # others may read behind it from now on
    server.counters["grants"] += 1
    server.touch(member.worker)
    server.touch_model(server.models[member.hello.model])
    return read


def void(server: "Server", read: OpenRead) -> None:
    """Take the read back."""
    read.is_void = True
    server.touch(read.reader)
    for behind in server.reads.from_source(read.reader):
        server.touch(behind.reader)
