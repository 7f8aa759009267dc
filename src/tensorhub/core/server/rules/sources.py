"""Whom a reader could read from, and what the choice between them depends on.

Between datacenters each shard of a version travels once: one worker of a site, the *seed*, reads it from another site.
Who is the seed follows from how things are: who already reads across; else, of those that want the version now and have
no source, the one that has most of it, so that a seed that died is replaced where the least has to come again. The
others of the site wait for it, or read behind it. Nobody waits for one who has gone, though its lease may still last.
"""

from collections import Counter
from math import inf

from ...messages import Holding, Withdrawing
from ...names import WorkerId
from .. import facts
from ..catalog import Model
from ..lines import Line
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import retention, wanted, witness
from .selection import Candidate

MAX_ALL = 8  # holders of whom each is looked at: beyond that an idle one is taken from their index


def candidates(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Whom the reader may be given as its source."""
    return witness.allowed(state, model, reader, possible(state, model, record, reader))


def to_choose_from(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Those that the reader could read from among whom the best one is: of many holders not all are looked at."""
    found: list[Candidate] = []
    if len(record.holders.get(reader.line, {})) > MAX_ALL and model.roll.is_over:
        found = idle(state, model, record, reader)
    return found or possible(state, model, record, reader)


def idle(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Sources without a fault and without a reader in the reader's own site, the best one of them included.

    After those on its own host the first by name that has everything is the best, unless it has published that itself.
    """
    behind = state.reads.readers_behind(reader.worker, record.version)
    there = record.idle.get(reader.line, [])
    near = list(model.hosts.get(reader.hello.host, ()))
    found: list[Candidate] = []
    for worker in near:
        if worker in record.holders.get(reader.line, {}) and worker not in model.read_from and worker not in behind:
            found += _sound(state, record, reader, worker)
    for worker in there:
        sound = _sound(state, record, reader, worker) if worker not in behind else []
        found += [candidate for candidate in sound if not candidate.is_near]
        if any(candidate.is_full and not candidate.published for candidate in sound):
            break
    return found


def _sound(state: State, record: VersionRecord, reader: Member, worker: WorkerId) -> list[Candidate]:
    """What the worker has, as sources to which nothing is to be said against; it is idle."""
    member = state.members.get(worker)
    if member is None or member.hello.site != reader.hello.site:
        return []
    found = [_candidate(state, record, reader, member, from_host, None) for from_host in (False, True)]
    return [
        candidate
        for candidate in found
        if candidate is not None and not candidate.is_doubtful and not candidate.is_withdrawing
        if not candidate.is_slow and candidate.avoided_until <= state.now
    ]


def possible(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Whom the reader could read from; across sites only if it is the seed of its own."""
    behind = state.reads.readers_behind(reader.worker, record.version)
    leaving = reads_leaving(state, record, reader) if len(model.sites) > 1 else None
    found = []
    for worker in record.holders.get(reader.line, {}):
        member = state.members.get(worker)
        if member is None or worker in behind:
            continue
        for from_host in (False, True):
            candidate = _candidate(state, record, reader, member, from_host, leaving)
            if candidate is not None:
                found.append(candidate)
    if all(candidate.is_same_site for candidate in found):
        return found
    near = [c for c in found if c.is_same_site and c.avoided_until <= state.now]
    near = [c for c in near if not c.is_withdrawing and not c.is_doubtful]
    return found if near or may_cross(state, model, record, reader) else []


def reads_leaving(state: State, record: VersionRecord, reader: Member) -> Counter[str]:
    """How many reads by others leave each site, from workers that have this shard of the version."""
    found: Counter[str] = Counter()
    for worker in record.holders.get(reader.line, {}):
        source = state.members.get(worker)
        for read in state.reads.from_source(worker) if source is not None else ():
            other = state.members.get(read.reader)
            if source is None or other is None or other is reader or read.is_void or not other.is_connected:
                continue
            found[source.hello.site] += other.hello.site != source.hello.site
    return found


def whole_sources(state: State, record: VersionRecord, reader: Member, line: Line) -> list[Candidate]:
    """Those that have all of that line of the version, for a reader of another line."""
    found = []
    for worker in record.whole.get(line, {}):
        member = state.members.get(worker)
        if member is None or worker == reader.worker:
            continue
        for from_host in (False, True):
            candidate = _candidate(state, record, reader, member, from_host, None, line)
            if candidate is not None and candidate.is_full:
                found.append(candidate)
    return found


def host_copy_of(state: State, record: VersionRecord, reader: Member, member: Member) -> Candidate | None:
    """The member's host copy as a source, if it is whole."""
    found = _candidate(state, record, reader, member, True, None)
    return found if found is not None and found.is_full else None


def may_cross(state: State, model: Model, record: VersionRecord, reader: Member) -> bool:
    """The reader is the seed of its site for its shard: nobody else is to read that across."""
    best: tuple[tuple[object, ...], Member] | None = None
    for member in facts.members_of(state, model, reader.line):
        has_source = state.reads.current.get(member.worker) is not None
        if member.hello.site != reader.hello.site or (has_source and member is not reader):
            continue
        if not facts.is_here(state, member):
            continue
        replica = model.replicas[member.hello.replica]
        its_read = wanted.wanted_read(state, model, replica, member)
        if its_read is not None and its_read.version == record.version:
            done = member.done(from_host=its_read.to_host, version=record.version)
            rank = (member.turns_lost, has_source, -done, member.worker)
            best = (rank, member) if best is None or rank < best[0] else best
    return best is None or best[1] is reader


def _candidate(
    state: State,
    record: VersionRecord,
    reader: Member,
    member: Member,
    from_host: bool,
    leaving: Counter[str] | None,
    line: Line | None = None,
) -> Candidate | None:
    """The member's buffer, or its host copy, as a source of the reader's line or of that one; None if it is none."""
    version, worker = record.version, member.worker
    if not facts.serves(state, worker, version, from_host) or (from_host and member.loses_copy(version)):
        return None
    if member.content.line_of(version, is_copy=from_host) != (line or reader.line):
        return None  # it has the version in another line too
    has_all = facts.is_full(member, version, from_host)
    current = state.reads.current.get(worker)
    is_filling = current is not None and current.version == version and current.grant.to_host == from_host
    if not has_all and (not is_filling or (not from_host and retention.leaves_last(state, member))):
        return None  # it waits for a source itself, or for those who would read behind it
    if not has_all and current is not None and current.shares:
        return None  # it has all of it at once, or nothing
    buffer, copy, here, there = member.content.buffer, member.copy(version), reader.hello, member.hello
    its_own = copy if from_host else buffer if isinstance(buffer, Holding | Withdrawing) else None
    avoided = reader.avoided.get(worker)
    return Candidate(
        worker=worker,
        load=state.reads.load(worker),
        is_full=has_all,
        done=0 if has_all else member.done(from_host=from_host, version=version),
        published=has_all and its_own is not None and its_own.published,
        is_withdrawing=facts.is_leaving(member, version, from_host),
        is_doubtful=facts.is_doubtful(state, member) or reader.left.get(worker, -inf) > state.now,
        is_slow=member.slow_until > state.now,
        is_near=here.host == there.host,
        is_same_site=here.site == there.site,
        avoided_until=avoided.until if avoided is not None else -inf,
        from_host=from_host,
        leaving_site=leaving[there.site] if leaving is not None and here.site != there.site else 0,
    )
