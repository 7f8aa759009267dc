"""Rules: the candidate sources of a reader, shared host copies, and when a read moves to another source."""

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from ..protocol.messages import Holding, Withdrawing
from ..protocol.names import Version, WorkerId
from . import admission, layouts, retention, selection
from . import state as facts
from .groups import Replica
from .members import LayoutKey, Member, OpenRead, Tier, is_too_slow, usual
from .selection import Candidate, choose_source
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
    if version is not None and facts.may_have(state, member, version):
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


def candidates(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """The candidates that the reader may be given."""
    return admission.allowed(state, model, reader, possible(state, model, record, reader))


def to_choose_from(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Candidates among which the best one is: of many holders not all are looked at."""
    found: list[Candidate] = []
    if len(record.holders.get(reader.layout_key, {})) > MAX_ALL and model.roll.is_over:
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
    if not has_all and (not is_filling or (not from_host and retention.leaves_last(state, member))):
        return None  # it waits for a source itself, or for its readers
    if not has_all and current is not None and current.shares:
        return None  # it has all of it at once, or nothing
    buffer, copy, here, there = member.content.buffer, member.copy(version), reader.hello, member.hello
    its_own = copy if from_host else buffer if isinstance(buffer, Holding | Withdrawing) else None
    failed = reader.failed_sources.get(worker)
    return Candidate(
        worker=worker,
        load=state.reads.load(worker),
        is_full=has_all,
        done=0 if has_all else member.done(from_host=from_host, version=version),
        published=has_all and its_own is not None and its_own.published,
        is_withdrawing=facts.is_leaving(member, version, from_host),
        is_doubtful=facts.is_doubtful(state, member) or reader.slow_sources.get(worker, -inf) > state.now,
        is_slow=member.slow_until > state.now,
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


MOMENT = 0.125  # of the time between two reports


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


def awaited_until(state: State, model: Model, record: VersionRecord, member: Member) -> float | None:
    """Another worker fetches what the member could share: when to look whether it still does. None: no worker does."""
    if not _may_share(state, record, member):
        return None
    for mate in _mates(state, model, member):
        read = state.reads.current.get(mate.worker)
        if read is None or read.version != record.version or not read.grant.to_host or not facts.is_here(state, mate):
            continue
        if layouts.may_fit(model, record, mate) and not selection.is_held_up(state, read):
            is_silent_at = mate.silent_at + MOMENT * state.report_s
            return min(is_silent_at, state.now + selection.patience_s(state))
    return None


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


# --- When a reader leaves a source that still serves it: it stands still, is far too slow, or serves others too.
#
# Rules:
# - A source from which nothing comes for two reports is left for any that would do better, even for the publisher.
# - A source that is filling is left if it brings far less than it receives. Any other is left if it brings far less
#   than other readers of the version get, than this reader got before, or than reads of the model brought lately.
# - A reader that merely waits for what its source waits for stays: the one nearest to the root moves. If that one has
#   moved and is still slow, or has nowhere to go, it is slow itself, and its readers look for other sources.
# - A reader that leaves a filling source for that one's own source, and gets more there, takes its place: the slow one
#   gives way, and reads behind the others. A reader that gets no more there goes back.
# - A reader leaves its own site only where no source there would do better, or where all that would were left as slow.
# - A source that was left is the reader's last choice for a while, and each move of a reader waits twice as long as the
#   one before. A source that serves others is taken only if it has brought more, lately, than it brings now.
# - A source from which nothing came is remembered even if there was no other: the next version is read from another.
#
# It must never move all readers of a source at once to another one that serves already.


BETTER = 1.25  # times what came from the slow one, though they share its source now: half is at least 1.5 times a third
WORTH = 2.0  # times what comes now: less is not worth a chunk that has to come again


def leave_slow(state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead) -> bool:
    """Move the reader if its source stands still or is far too slow, and another one would do better."""
    if reader.layout_key not in record.roots:
        return False
    shares_a_source = read.instead_of is not None or reader.gives_way_to is not None
    if shares_a_source and _settle_places(state, model, record, reader, read):
        return True
    found = _why_leave(state, model, record, reader, read)
    if found is None:
        if read.pace.is_stuck and read.pace.rate is not None:
            read.pace.is_stuck = False
        return False
    why, needed = found
    is_without_bytes, window_s = selection.brings_nothing(state, read), selection.pace_window_s(state)
    is_looked_for = state.now >= reader.may_move_at
    if is_without_bytes and not is_looked_for:  # at once, and now and then
        is_looked_for = not read.pace.is_stuck or state.now >= read.looked_at + window_s
    choice = _way_out(state, model, record, reader, read, needed) if is_looked_for else None
    if choice is None:
        if is_looked_for and is_without_bytes:
            read.looked_at = state.now
        if is_looked_for:
            reader.may_move_at = max(reader.may_move_at, state.now + window_s)
        _note_stuck(state, reader, read)
        return False
    best, reason = choice
    its_own = selection.own_pace(state, read)
    takes_its_place = its_own is not None and its_own.source == best.worker
    state.leave(reader, read, may_move_at=state.now + 2 * window_s * 2.0 ** min(reader.moves, 16))
    state.take_back(read)
    state.give(
        *(reader, record, [best.place], f"{reason}; {why}"),
        to_host=read.grant.to_host,
        instead_of=read.source if takes_its_place else None,
        must_beat=BETTER * (read.pace.rate or 0.0) if takes_its_place else 0.0,
        counted_as="left_slow",
    )
    return True


def _note_stuck(state: State, reader: Member, read: OpenRead) -> None:
    """It is slow, and no other source would do better, or it was tried in vain."""
    if not read.pace.is_stuck:
        state.call_stuck(read)
    source = state.members.get(read.source)
    if not reader.moves:
        is_whole = source is not None and facts.is_full(source, read.version, read.from_host)
        if source is not None and is_whole and read.pace.is_still(state.now, selection.patience_s(state)):
            source.slow_until = state.now + state.settings.leave_s  # there will be others to choose from again
        return
    for worker in reader.slow_sources:
        left = state.members.get(worker)
        if left is not None:
            left.slow_until = -inf  # it was not the slow one
    if source is not None:
        source.capacity.forget(state.now)  # nor has this one more to give


def _way_out(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead, needed: float
) -> tuple[Candidate, str] | None:
    """A source that would do better: an idle one; or its own source's, if that one can give way; or any."""
    better = [c for c in candidates(state, model, record, reader) if _is_better(state, read, c, needed)]
    if not selection.tier_of(state, read)[0]:
        near = [candidate for candidate in better if candidate.is_same_site and candidate.avoided_until <= state.now]
        is_needed = all(candidate.is_slow for candidate in near) and may_cross(state, model, record, reader)
        better = better if is_needed else near
    its_own = state.reads.current.get(read.source)
    first = [each for each in better if not (each.load or each.is_slow or each.is_withdrawing)]
    if its_own is not None and its_own.version == read.version:
        first = first or [candidate for candidate in better if candidate.worker == its_own.source]
    return choose_source(first or better, now=state.now)


def _why_leave(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead
) -> tuple[str, float] | None:
    """(the reason in words, how much another source must bring), or None: it stays."""
    pace, name = read.pace, read.source.replica
    if pace.is_still(state.now, selection.patience_s(state)):
        return f"left {name}: nothing came for {state.now - pace.moved_at:.1f} s", 0.0
    if pace.rate is None:
        return None  # too little is known yet
    its_own = selection.own_pace(state, read)
    is_hopeless = its_own is not None and its_own.pace.is_stuck
    if state.now < pace.waited_at + selection.pace_window_s(state) and not is_hopeless:
        return None  # what came was what its source had
    if its_own is None or is_hopeless:
        best = reader.best.get(selection.tier_of(state, read), 0.0)
        usual_rate = _usual(state, record, read)
        others, whose = max(best, usual_rate or 0.0), "others get, or it got before,"
        lately = _lately(state, model, read)
        if lately > others:
            others, whose = lately, "reads brought lately"
    else:
        others, whose = its_own.pace.rate or 0.0, "it receives"
    times, rate = state.settings.slow_times, pace.rate or 0.0
    if not is_too_slow(pace, others, times):
        return None
    return f"left {name}: {rate:.3g} B/s, where {whose} {others:.3g}", max(WORTH * rate, others / times)


def _is_better(state: State, read: OpenRead, candidate: Candidate, needed: float) -> bool:
    """It would bring so much, as far as can be known. A withdrawing source is better than one that brings nothing."""
    if candidate.worker == read.source or candidate.is_doubtful:
        return False
    if candidate.is_withdrawing and not (candidate.is_full and selection.brings_nothing(state, read)):
        return False
    is_still = read.pace.is_still(state.now, selection.patience_s(state))
    if (
        not candidate.is_same_site
        and not is_still
        and (candidate.leaving_site or not selection.tier_of(state, read)[0])
    ):
        return False
    if not candidate.is_full:
        its_own = state.reads.current.get(candidate.worker)
        rate = its_own.pace.rate if its_own is not None else None
        is_enough = is_still if rate is None else rate >= needed
        return is_enough and _is_sound(state, candidate.worker, without=read.source)
    if not candidate.load:
        return True
    source, its_own = state.known(candidate.worker), state.reads.current.get(read.source)
    others = [one for one in state.reads.from_source(candidate.worker) if not one.is_void]
    if is_still:
        return selection.brings_nothing(state, read) or not any(selection.is_held_up(state, one) for one in others)
    if any(one.pace.rate is None for one in others):
        return False  # too little is known yet of one of its readers
    spare = source.capacity.best - sum(one.pace.rate or 0.0 for one in others)
    if its_own is not None and its_own.source == candidate.worker:
        spare += its_own.pace.rate or 0.0  # which gives way
    return max(spare, source.capacity.best / (candidate.load + 1)) >= needed


def _is_sound(state: State, worker: WorkerId, *, without: WorkerId) -> bool:
    """It is filling, and so is each source above it, up to one that has everything. None of them is `without`."""
    read = state.reads.current.get(worker)
    for _ in range(selection.MAX_HOPS):  # no reader moves further from the root
        if read is None or read.source == without or read.pace.is_stuck or selection.is_held_up(state, read):
            return False
        source = state.members.get(read.source)
        if source is None or facts.is_doubtful(state, source):
            return False
        if facts.is_full(source, read.version, read.from_host):
            return True
        read = state.reads.current.get(read.source)
    return False


def _settle_places(state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead) -> bool:
    """Of a slow source and the reader that left it for its own source only one stays there: the one that gets more."""
    slow = state.members.get(read.instead_of) if read.instead_of is not None else None
    if slow is not None and read.pace.rate is not None:
        read.instead_of = None
        its_own = state.reads.current.get(slow.worker)
        if its_own is not None and (its_own.source, its_own.version) == (read.source, read.version):
            if read.pace.rate < read.must_beat:
                _note_stuck(state, reader, read)
                return _follow(state, model, record, reader, read, slow.worker, "no better than")
            slow.gives_way_to = reader.worker
            state.mark_dirty(slow.worker)
    other = reader.gives_way_to
    theirs = state.reads.current.get(other) if other is not None else None
    if other is None or theirs is None or (theirs.source, theirs.version) != (read.source, read.version):
        if other is not None:
            reader.gives_way_to = None
        return False
    if other in state.reads.readers_behind(reader.worker, read.version):
        return False  # until it has let go of it
    reader.gives_way_to = None
    return _follow(state, model, record, reader, read, other, "gives way to")


def _follow(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead, other: WorkerId, why: str
) -> bool:
    """Read behind that one, or behind the last of its readers."""
    found = [
        candidate
        for candidate in candidates(state, model, record, reader)
        if not candidate.is_full and (candidate.worker == other or not (candidate.load or candidate.is_doubtful))
        if candidate.worker == other or other in state.reads.chain(candidate.worker)
    ]
    best = min(found, key=lambda candidate: (candidate.load, candidate.worker), default=None)
    if best is None:
        return False
    reason = f"relay, filling, {best.done} chunks in place; {why} {other.replica}"
    state.take_back(read)
    state.give(
        reader,
        record,
        [best.place],
        reason,
        to_host=read.grant.to_host,
        is_stuck=read.pace.is_stuck,
    )
    return True


def _usual(state: State, record: VersionRecord, read: OpenRead) -> float | None:
    """The rate of the version's readers over that distance. Computed once between two reports."""
    tier = selection.tier_of(state, read)
    if state.now >= record.usual_until:
        found: dict[Tier, list[float]] = {}
        for holders in record.holders.values():
            for worker in holders:
                one = state.reads.current.get(worker)
                if one is None or one.is_across or one.version != record.version or one.pace.rate is None:
                    continue
                if one.source in state.members:  # else it is not known over what distance
                    found.setdefault(selection.tier_of(state, one), []).append(one.pace.rate)
        record.usual = {each: usual(those) for each, those in found.items()}
        record.usual_until = state.now + state.report_s
    return record.usual.get(tier)


def _lately(state: State, model: Model, read: OpenRead) -> float:
    """The rate of the model's finished reads over that distance, 0.0 while unknown.

    Of a source that serves others too a read can get no more than its present share of that.
    """
    tier = selection.tier_of(state, read)
    lately = usual(list(model.lately.get(tier, ())))
    rates = [one.pace.rate for one in _beside(state, read) if selection.tier_of(state, one) == tier]
    known = [rate for rate in rates if rate is not None]
    if lately is None or len(known) < len(rates):
        return 0.0
    total = sum(known)
    return lately * (read.pace.rate or 0.0) / total if total else lately


def _beside(state: State, read: OpenRead) -> list[OpenRead]:
    """The reads that its source serves now, this one too."""
    return [one for one in state.reads.from_source(read.source) if not one.is_void]


def to_idle(state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead) -> bool:
    """Move the reader if that is sure to help: to an idle source that has everything and is no further away.

    It leaves a source that is itself still filling, whose pace it follows, or one that serves others too. It never goes
    back: a reader that has a whole source to itself stays there. Between sites the pace is the uplink's: a reader
    leaves only one that it shares, for one that is idle. But while it cannot begin it leaves any, for a
    worker of its own site that has the version or gets it.
    """
    if state.now < read.looked_at + state.settings.rebalance_s or reader.layout_key not in record.roots:
        return False
    read.looked_at = state.now
    source = state.known(read.source)
    is_cross_site = source.hello.site != reader.hello.site
    may_go_near = is_cross_site and not _has_begun(reader, read)
    is_its_own = facts.is_full(source, read.version, read.from_host) and state.reads.load(read.source) < 2
    if is_its_own and not may_go_near:
        return False
    is_shared = is_cross_site and reads_leaving(state, record, reader)[source.hello.site] > 0
    better = [
        candidate
        for candidate in _for_idle(state, model, record, reader, is_among_all=is_shared or may_go_near)
        if not candidate.is_withdrawing and not candidate.is_doubtful and not candidate.is_slow
        if _is_idle(candidate, is_shared) or (may_go_near and _is_near(state, reader, candidate))
    ]
    choice = choose_source(better, now=state.now)
    if choice is None:
        return False
    best, reason = choice
    state.take_back(read)
    state.give(
        reader,
        record,
        [best.place],
        reason,
        to_host=read.grant.to_host,
        counted_as="rebalanced",
    )
    return True


def _has_begun(reader: Member, read: OpenRead) -> bool:
    """It reads, or may any moment: no former read of its own, and nothing that its buffer holds, stands in the way."""
    reading, buffer = reader.report.reading, reader.content.buffer
    if reading is None or reading.ticket != read.ticket:
        return False
    return read.grant.to_host or not isinstance(buffer, Holding | Withdrawing)


def _is_idle(candidate: Candidate, is_shared: bool) -> bool:
    """It has everything and serves no reader; in another site, no other read leaves that one."""
    is_all_its_own = candidate.is_full and not candidate.load and not candidate.published
    return is_all_its_own and (candidate.is_same_site or (is_shared and not candidate.leaving_site))


def _is_near(state: State, reader: Member, candidate: Candidate) -> bool:
    """It is in the reader's own site, and has the version, or gets it."""
    if not candidate.is_same_site or candidate.avoided_until > state.now:
        return False
    return candidate.is_full or _is_sound(state, candidate.worker, without=reader.worker)


def _for_idle(
    state: State, model: Model, record: VersionRecord, reader: Member, *, is_among_all: bool
) -> list[Candidate]:
    """Candidates among which an idle source is looked for: all where any other may do."""
    if is_among_all or not model.roll.is_over:
        return candidates(state, model, record, reader)
    return idle(state, model, record, reader)
