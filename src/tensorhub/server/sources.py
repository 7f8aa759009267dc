"""Rules: what a worker should read, the candidate sources of a reader, and shared host copies."""

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from ..protocol.messages import Holding, Withdrawing
from ..protocol.names import Version, WorkerId
from . import layouts, retention
from . import state as facts
from .groups import Replica
from .members import LayoutKey, Member, OpenRead
from .selection import Candidate
from .state import State
from .versions import Model, VersionRecord

# --- What a worker should be reading now: its caller's call comes before what is fetched ahead.


class Wanted(NamedTuple):
    """A read that a worker should have."""

    version: Version
    to_host: bool


def wanted_read(state: State, model: Model, replica: Replica, member: Member) -> Wanted | None:
    """What this worker should be reading now, and can. Its caller's call comes before what is fetched ahead."""
    version = facts.wanted_version(replica, member)
    if retention.updates_last(state, model, member):
        return None
    if version is None or member.holds(version) or member.can_fill_itself(version):
        version = retention.version_to_fetch(state, model, replica, member)
        is_whole = version is not None and member.has_whole_copy(version)
        return Wanted(version, True) if version is not None and not is_whole else None
    if _is_to_hear_that_it_goes(state, model, member, version):
        return None
    copy, current = member.copy(version), state.reads.current.get(member.worker)
    if copy is not None and not copy.unfit:
        return Wanted(version, True)
    is_coming = current is not None and current.version == version and current.grant.to_host
    if is_coming and not member.is_dropping_copy(version):
        return Wanted(version, True)  # which is about to begin
    return None if facts.is_read_though_poisoned(member.content.buffer) else Wanted(version, False)


def _is_to_hear_that_it_goes(state: State, model: Model, member: Member, version: Version) -> bool:
    """A whole copy of it is to go, and the worker was not told yet: it fills itself from that, and would not read."""
    going = [c.number for c in member.report.copies if c.version == version and c.whole and not (c.dropping or c.unfit)]
    going = [number for number in going if number in member.releasing]
    return bool(going) and not set(going) <= set(retention.copies_to_release(state, model, member))


# --- The candidate sources of a reader, and what the choice among them depends on.
#
# Between datacenters each shard of a version travels once: one worker of a site, the *seed*, reads it from another
# site. The seed is the worker that already reads across; else, of those that want the version
# now and have no source, the one that has most of it, so that a seed that died is replaced where the least has to
# come again. The others of the site wait for it, or read behind it. No worker waits for one that has gone, though its
# lease may still last.


MAX_ALL = 8  # holders that are each looked at: beyond that an idle one is taken from their index


def to_choose_from(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Candidates among which the best one is: of many holders not all are looked at."""
    found: list[Candidate] = []
    if len(record.holders.get(reader.layout_key, {})) > MAX_ALL and not model.is_listening:
        found = idle(state, model, record, reader)
    return found or possible(state, model, record, reader)


def idle(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Sources without a fault and without a reader in the reader's own site, the best one of them included.

    After those on its own host the first by name that has everything is the best, unless it has published that itself.
    """
    behind = state.reads.readers_behind(reader.worker, record.version)
    there = record.idle.get(reader.layout_key, [])
    near = list(model.hosts.get(reader.hello.host, ()))
    found: list[Candidate] = []
    for worker in near:
        if (
            worker in record.holders.get(reader.layout_key, {})
            and worker not in model.read_from
            and worker not in behind
        ):
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
    """All candidates of the reader; across sites only if it is the seed of its own."""
    behind = state.reads.readers_behind(reader.worker, record.version)
    leaving = reads_leaving(state, record, reader) if len(model.sites) > 1 else None
    found = []
    for worker in record.holders.get(reader.layout_key, {}):
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
    for worker in record.holders.get(reader.layout_key, {}):
        source = state.members.get(worker)
        for read in state.reads.from_source(worker) if source is not None else ():
            other = state.members.get(read.reader)
            if source is None or other is None or other is reader or read.is_void or not other.is_connected:
                continue
            found[source.hello.site] += other.hello.site != source.hello.site
    return found


def whole_sources(state: State, record: VersionRecord, reader: Member, key: LayoutKey) -> list[Candidate]:
    """Workers that hold all of the version with that key, for a reader with another key."""
    found = []
    for worker in record.whole.get(key, {}):
        member = state.members.get(worker)
        if member is None or worker == reader.worker:
            continue
        for from_host in (False, True):
            candidate = _candidate(state, record, reader, member, from_host, None, key)
            if candidate is not None and candidate.is_full:
                found.append(candidate)
    return found


def host_copy_of(state: State, record: VersionRecord, reader: Member, member: Member) -> Candidate | None:
    """The member's host copy as a source, if it is whole."""
    found = _candidate(state, record, reader, member, True, None)
    return found if found is not None and found.is_full else None


def may_cross(state: State, model: Model, record: VersionRecord, reader: Member) -> bool:
    """The reader is the seed of its site for its shard: no other worker is to read that across."""
    best: tuple[tuple[object, ...], Member] | None = None
    for member in facts.members_of(state, model, reader.layout_key):
        has_source = state.reads.current.get(member.worker) is not None
        if member.hello.site != reader.hello.site or (has_source and member is not reader):
            continue
        if not facts.is_here(state, member):
            continue
        replica = model.replicas[member.hello.replica]
        its_read = wanted_read(state, model, replica, member)
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
    key: LayoutKey | None = None,
) -> Candidate | None:
    """The member's buffer or host copy as a source for the reader's key, or for `key`. None if it is no source."""
    version, worker = record.version, member.worker
    if not facts.serves(state, worker, version, from_host) or (from_host and member.is_dropping_copy(version)):
        return None
    if member.content.layout_key_of(version, is_copy=from_host) != (key or reader.layout_key):
        return None  # it has the version with another key too
    has_all = facts.is_full(member, version, from_host)
    current = state.reads.current.get(worker)
    is_filling = current is not None and current.version == version and current.grant.to_host == from_host
    is_late = not from_host and retention.version_to_offload(state, state.models[worker.model], member) is not None
    if not has_all and (not is_filling or is_late):
        return None  # it waits for a source itself, or has to copy what it holds before it is filled
    if not has_all and current is not None and current.shares:
        return None  # it has all of it at once, or nothing
    buffer, copy, here, there = member.content.buffer, member.copy(version), reader.hello, member.hello
    its_own = copy if from_host else buffer if isinstance(buffer, Holding | Withdrawing) else None
    failed = reader.tries.sources.get(worker)
    return Candidate(
        worker=worker,
        load=state.reads.load(worker),
        is_full=has_all,
        done=0 if has_all else member.done(from_host=from_host, version=version),
        published=has_all and its_own is not None and its_own.published,
        is_withdrawing=facts.is_leaving(member, version, from_host),
        is_doubtful=facts.is_doubtful(state, member),
        is_slow=member.avoided.until > state.now,
        is_near=here.host == there.host,
        is_same_site=here.site == there.site,
        avoided_until=failed.until if failed is not None else -inf,
        from_host=from_host,
        leaving_site=leaving[there.site] if leaving is not None and here.site != there.site else 0,
    )


# --- Shared host copies: one worker of a host fetches a copy, the others wait, and then map its memory.
#
# Rules:
# - Workers share if they name the same place, which says that each can map what the other has, and have the same layout
#   key, layout and site. A host name alone proves nothing.
# - While one of them fetches a version into host memory, workers that have nothing of it wait. They do not wait for one
#   that has gone, falls silent, or gets nothing: then the next one fetches.
# - The others map a whole copy. Each of them is a holder like any other, whatever becomes of the one that fetched it.
# - A worker that cannot map reads instead, at once, and fetches its own copies for a while.


def copies_to_share(state: State, model: Model, record: VersionRecord, member: Member) -> list[Candidate]:
    """The host copies of the version that the member could map."""
    if not _may_share(state, record, member):
        return []
    behind = state.reads.readers_behind(member.worker, record.version)
    found = [
        host_copy_of(state, record, member, mate)
        for mate in _mates(state, model, member)
        if mate.worker not in behind and not mate.report.closing and _may_be_shared(mate, record)
    ]
    return [each for each in found if each is not None and not each.is_doubtful]


def reads_to_share(
    state: State, model: Model, record: VersionRecord, member: Member
) -> Iterator[tuple[Member, OpenRead]]:
    """Workers that fetch what the member could share, and their reads."""
    for mate in _mates(state, model, member) if _may_share(state, record, member) else ():
        read = state.reads.current.get(mate.worker)
        if read is None or read.version != record.version or not read.grant.to_host or not facts.is_here(state, mate):
            continue
        if layouts.may_fit(model, record, mate):
            yield mate, read


def _may_share(state: State, record: VersionRecord, member: Member) -> bool:
    """It has nothing of the version in host memory yet, and is not known to be unable."""
    return bool(member.hello.place) and member.copy(record.version) is None and member.alone_until <= state.now


def _may_be_shared(mate: Member, record: VersionRecord) -> bool:
    """Its copy is not of what it has published itself, nor of tensors that were registered before.

    A publisher uses the same memory again for the next version, and would have to touch other pages instead.
    """
    copy = mate.copy(record.version)
    return copy is not None and not copy.layout and not copy.published


def _mates(state: State, model: Model, member: Member) -> Iterator[Member]:
    """The others of its host that could share with it."""
    here = member.hello
    for worker in model.hosts.get(here.host, ()):
        mate = state.members.get(worker) if worker.shard == member.shard and worker != member.worker else None
        if mate is None or mate.layout_key != member.layout_key or mate.alone_until > state.now:
            continue
        if (mate.hello.place, mate.hello.site) == (here.place, here.site):
            yield mate
