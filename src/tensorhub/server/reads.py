"""Rules: permission to read, reads across layouts, and when a source is drained."""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from ..protocol.messages import Holding, Poisoned, Source, Withdrawing
from ..protocol.names import Version, WorkerId
from . import layouts, retention, slow, sources
from . import state as facts
from .groups import Replica
from .members import (
    ARRIVALS,
    NEWS,
    SERVICE,
    LayoutSet,
    Member,
    OpenRead,
    Topic,
    loss_of,
    references_of,
    sources_of,
)
from .selection import Candidate, choose_source
from .sources import Wanted
from .state import State
from .versions import Model, VersionRecord

# --- Drains: a worker may change its buffer when it has no reader, and is not the only source of a promised version.


MAX_NAMED = 3  # of the readers that a worker waits for


class Drained(NamedTuple):
    """The version without readers, if any; else what is waited for, and when to ask again though nothing was heard."""

    version: Version | None = None
    look_again_at: float = inf
    why: str = ""


MOMENT = 0.125  # of the time between two reports
AGAIN = 0.25  # of the time between two reports: whether a source is back for which an update waits


def drained_version(state: State, model: Model, member: Member) -> Drained:
    """The version that this worker wants to leave, if it has no reader left and none to come."""
    buffer, is_accepted = member.content.buffer, True
    if isinstance(buffer, Poisoned) and isinstance(member.report.buffer, Withdrawing):
        buffer, is_accepted = member.report.buffer, False  # what it withdraws is not what its version is
    if not isinstance(buffer, (Withdrawing, Poisoned)) or buffer.version is None:
        return Drained()
    if model.is_listening:
        return Drained(why="the server has restarted, and has not heard all workers yet")
    judged = state.place(member)[1].standing
    if judged is not None and judged.is_resolved_here and not judged.is_over and judged.version == buffer.version:
        return Drained(why=f"version {buffer.version}, published without the server, is being judged")
    if _has_readers(state, member, buffer.version):
        return Drained(why=_read_by(state, member, buffer.version))
    if isinstance(buffer, Poisoned) or member.is_drained or not is_accepted:
        return Drained(buffer.version)
    if _may_keep_it(state, model, member):
        why = "no worker that is here has all of the newer version, so this one is kept"
        return Drained(None, state.now + AGAIN * state.report_s, why)
    if retention.must_stay(state, model, member):
        where = "in another worker" if member.report.closing else "in host memory"
        why = f"it has the last copy of version {buffer.version}, which must be kept, until there is one {where}"
        until = retention.awaits_spot_until(state, model, member) if member.report.closing else inf
        return Drained(look_again_at=until if until > state.now else inf, why=why)
    if buffer.impatient:
        return Drained(buffer.version)
    record = model.versions.get(buffer.version)
    if record is None or not record.promised:
        return Drained(buffer.version)
    if is_last_holder(state, model, record, member) and (reader := awaiting(state, model, record, member)) is not None:
        return Drained(why=f"{reader} is to read version {buffer.version}, and no other worker has it")
    return Drained(buffer.version)


def _may_keep_it(state: State, model: Model, member: Member) -> bool:
    """It leaves that for an update, and no worker that is here has all of the newer version.

    What others have of it already would bring only a part. All shards may keep what they hold, or some have not come
    yet. So they do where the update has ended with that, which this one has not heard yet.
    """
    call, told = state.place(member)[1].call, member.report.call
    if call is None or call.version is None or told is None or told.number != call.number:
        return False
    if call.is_finished and call.verb == "update":
        return call.version == member.content.held
    if not call.may_keep or member.shard not in call.arrived:
        return False
    record = model.look_up(call.version)

    def is_here(source: Member) -> bool:
        return facts.is_here(state, source)

    if any(is_here(state.known(worker)) for worker in record.whole.get(member.layout_key, ())):
        return False
    if layouts.is_in_another_layout(state, model, record, member.layout_key, is_here):
        return False
    replica = state.place(member)[1]
    return bool(replica.missing()) or kept_by_all(state, replica) is not None


def kept_by_all(state: State, replica: Replica) -> Version | None:
    """The version that each shard holds and was not told that it may leave, if all are in the replica's call."""
    call, kept = replica.call, []
    for worker in replica.members.values() if call is not None else ():
        member = state.members.get(worker)
        told = member.report.call if member is not None else None
        if member is None or call is None or member.shard not in call.arrived:
            return None
        if told is None or told.number != call.number or member.content.held is None:
            return None
        kept += [member.content.held] if member.holds_until_told(member.content.held) else []
    return kept[0] if len(kept) == replica.shards and kept.count(kept[0]) == len(kept) else None


def _has_readers(state: State, source: Member, version: Version) -> bool:
    """A reader must be waited for before the source may change its buffer.

    A reader that has only opened there what comes next reads nothing of what the buffer has now.
    """
    return facts.must_wait(state, source, state.reads.from_buffer(source.worker, version))


def _read_by(state: State, source: Member, version: Version) -> str:
    readers = [str(read.reader) for read in state.reads.from_buffer(source.worker, version)]
    more = f" and {len(readers) - MAX_NAMED} more" if len(readers) > MAX_NAMED else ""
    return f"version {version} is read by {', '.join(readers[:MAX_NAMED])}{more}"


def is_last_holder(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """No other worker holds this key of the version whole and stays, nor all keys of another layout."""
    for worker in record.holders.get(leaver.layout_key, {}):
        member = state.members.get(worker)
        if member is None:
            continue
        is_held = isinstance(member.content.buffer, Holding) and member.holds(record.version)
        if member.has_whole_copy(record.version) or (worker != leaver.worker and is_held):
            return False

    def counts(member: Member) -> bool:
        return member is not leaver and (member.will_stay(record.version) or member.has_whole_copy(record.version))

    return not layouts.is_in_another_layout(state, model, record, leaver.layout_key, counts)


def awaiting(state: State, model: Model, record: VersionRecord, leaver: Member) -> WorkerId | None:
    """A worker that could read the version here and has not got it yet, of a replica that was promised it."""
    is_for_all = layouts.is_readable(record, leaver.layout_key)
    for name in record.promised:
        replica = model.replicas.get(name)
        for worker in replica.members.values() if replica is not None else ():
            member = state.members.get(worker)
            if member is None or not member.is_connected or member.worker == leaver.worker:
                continue
            is_reader = member.layout_key == leaver.layout_key or (is_for_all and member.layout_key.is_boxed)
            if is_reader and not member.holds(record.version):
                return member.worker
    return None


# --- Reads across: a worker reads a version from workers of another layout, all shards of it by one ticket.
#
# Rules:
# - A worker reads across only where no sound worker of its own layout can be its source. One worker of each layout and
#   site does: the one that has most of it. The others wait until it has said what the version is in their layout, and
#   then read behind it.
# - It gets one whole holder for each key of one layout set. Only whole holders are taken, so no reader reads behind
#   itself, however versions go from layout to layout.
# - The ticket ends as a whole where one of these sources is gone, leaves the version or fails, or where nothing comes
#   and others can take their place. The next ticket goes on with what is missing.
#
# It must never mix two layout sets in one ticket, or give content without tiles.


def set_out(state: State, model: Model, record: VersionRecord, member: Member, *, to_host: bool) -> bool:
    """Grants a read across layouts, if the worker is elected for its key and site."""
    if not layouts.can_cross(record, member.layout_key):
        return False
    if not _is_elected(state, model, record, member):
        see_that_it_begins(state, model, record, member)
        return False
    return _give_across(state, record, member, _choose(state, model, record, member), to_host=to_host)


def instead_of(
    state: State, model: Model, record: VersionRecord, member: Member, read: OpenRead, *, is_in_need: bool = False
) -> bool:
    """Grants a read across layouts where the source is too slow and no other source of the same key is better.

    `is_in_need`: its source will bring nothing, so slow sources and sources that leave the version are taken too.
    """
    if not layouts.can_cross(record, member.layout_key) or not _is_elected(state, model, record, member):
        return False

    def would_do(candidate: Candidate) -> bool:
        return not candidate.is_doubtful and (is_in_need or not (candidate.is_slow or candidate.is_withdrawing))

    choice = _choose(state, model, record, member, would_do)
    if choice is None:
        return False
    if not slow.is_paused(state, read):  # one that does something else was not slow
        slow.avoid(state, read)
    state.take_back(read, "it is too slow, and workers of another layout are not", "slow")
    return _give_across(state, record, member, choice, to_host=read.grant.to_host, moves=read.moves + 1)


def keep_up(state: State, model: Model, record: VersionRecord, member: Member, read: OpenRead) -> None:
    """Gives a read across layouts other sources where its own do not serve it any more, and others do."""
    is_without_bytes = slow.brings_nothing(state, read)
    if is_without_bytes != read.is_stuck:
        state.call_stuck(read, is_stuck=is_without_bytes)
    found = _why_replace(state, member, read)
    if found is None:
        return
    left, why = found
    is_served = facts.is_served(state, read)
    is_in_need = is_without_bytes or not is_served

    def would_do(candidate: Candidate) -> bool:
        is_sound = not candidate.is_doubtful and (is_in_need or not candidate.is_withdrawing)
        return is_sound and all(candidate.place != each.place for each in left)

    choice = _choose(state, model, record, member, would_do)
    if choice is not None:
        if _is_still(state, read):
            slow.avoid(state, read)
        state.take_back(read, why.removeprefix("; "), "slow" if is_served else "withdrawn")
        _give_across(state, record, member, choice, to_host=read.grant.to_host, why=why, moves=read.moves + 1)
    elif not is_served or (is_without_bytes and _is_had_in_its_layout(state, model, record, member)):
        state.take_back(read, why.removeprefix("; "), "slow" if is_served else "withdrawn")
        _grant(state, model, record, member, to_host=read.grant.to_host)


def _why_replace(state: State, member: Member, read: OpenRead) -> tuple[list[Source], str] | None:
    """The sources of a read across that are to be left, if there are others, and why; None: all are to stay."""
    leaving, away = [], []
    for each in read.sources:
        source = state.members.get(each.worker)
        is_leaving = source is not None and facts.is_leaving(source, read.version, each.from_host)
        if is_leaving or not facts.serves(state, each.worker, read.version, each.from_host):
            leaving.append(each)
        elif source is None or not facts.is_here(state, source):
            away.append(each)
    if leaving:
        return leaving, f"; {leaving[0].worker.replica} leaves it"
    is_slow = _is_still(state, read) and slow.may_move(state, read)
    if not is_slow and not slow.brings_nothing(state, read):
        return None
    left = away or list(read.sources)
    return left, f"; left {left[0].worker.replica}: nothing came for {state.now - read.pace.moved_at:.1f} s"


def _is_still(state: State, read: OpenRead) -> bool:
    return read.pace.is_still(state.now, slow.window_s(state))


def _is_elected(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """No other worker of its layout and site reads the version across, or should do so before it.

    A worker to which nothing comes keeps no other from it.
    """
    for other in facts.members_of(state, model, member.layout_key):
        read = state.reads.current.get(other.worker)
        if other is member or other.hello.site != member.hello.site or read is None or read.version != record.version:
            continue
        if other.turns_lost > member.turns_lost:
            continue
        if (
            read.is_across
            and facts.is_here(state, other)
            and not (slow.is_still(state, read) or slow.cannot_begin(state, read))
        ):
            return False
    return sources.may_cross(state, model, record, member)


def see_that_it_begins(state: State, model: Model, record: VersionRecord, member: Member) -> None:
    """It waits for another one that reads across; look again if that one has not begun by then."""
    for other in facts.members_of(state, model, member.layout_key):
        read = state.reads.current.get(other.worker)
        if other is not member and read is not None and read.version == record.version:
            until = slow.begins_until(state, read)
            if state.now < until < inf:
                state.members.wake(member, until)


Choice = tuple[LayoutSet, list[Candidate], str]  # a source for each key, and why the first of them


def _choose(
    state: State,
    model: Model,
    record: VersionRecord,
    member: Member,
    would_do: Callable[[Candidate], bool] = lambda _: True,
) -> Choice | None:
    """The best layout set of which each key has a source that would do. None: it is looked for again in time."""
    best: tuple[tuple[object, ...], Choice] | None = None
    for number, layout_set in enumerate(layouts.readable_layout_sets(model, record, member.layout_key)):
        found = []
        for key in layout_set:
            whole = sources.whole_sources(state, record, member, key)
            found.append(choose_source(filter(would_do, whole), now=state.now))
        chosen = [each for each in found if each is not None]
        if len(chosen) == len(layout_set):
            rank = (*_rank([candidate for candidate, _ in chosen]), number)
            choice = layout_set, [candidate for candidate, _ in chosen], chosen[0][1]
            best = (rank, choice) if best is None or rank < best[0] else best
    if best is None:
        _wait(state, model, record, member)
    return None if best is None else best[1]


def _give_across(
    state: State,
    record: VersionRecord,
    member: Member,
    choice: Choice | None,
    *,
    to_host: bool,
    why: str = "",
    moves: int = 0,
) -> bool:
    if choice is None:
        return False
    layout_set, chosen, reason = choice
    text = f"across, from {len(chosen)} shards: {reason}{why}"
    places = [each.place for each in chosen]
    state.give(member, record, places, text, to_host=to_host, across=layout_set, moves=moves)
    return True


def _wait(state: State, model: Model, record: VersionRecord, member: Member) -> None:
    """Nothing can be given now: see to it that it is looked at again when something may be."""
    soonest = inf
    for key in dict.fromkeys(
        each for layout_set in layouts.readable_layout_sets(model, record, member.layout_key) for each in layout_set
    ):
        found = sources.whole_sources(state, record, member, key)
        soonest = min([soonest, *[each.avoided_until for each in found if each.avoided_until > state.now]])
    if soonest < inf:
        state.members.wake(member, soonest)


def _rank(chosen: list[Candidate]) -> tuple[object, ...]:
    """Ranks layout sets: sound sources first, then near ones, then idle ones, then few shards."""
    return (
        any(each.is_doubtful for each in chosen),
        any(each.is_withdrawing for each in chosen),
        sum(not each.is_same_site for each in chosen),
        any(each.is_slow for each in chosen),
        max(each.load for each in chosen),
        any(each.published for each in chosen),
        len(chosen),
    )


# --- Grants: gives a worker its read, takes it back, and looks for another source where its own leaves.
#
# `decide_read` takes one step after another: the next follows from what the one before has changed.


def decide_read(state: State, model: Model, member: Member, wanted: Wanted | None) -> None:
    """Give this worker the read that it should have now, or none. It is here.

    One that has gone keeps what it has until it is back or its lease ends: it would not hear of another, and a source
    would wait in vain.
    """
    current = state.reads.current.get(member.worker)
    record = model.versions.get(wanted.version) if wanted is not None else None
    if wanted is None or record is None:
        if current is not None:
            state.take_back(current)
        return
    is_wanted = current is not None and (current.version, current.grant.to_host) == wanted
    if current is not None and is_wanted and current.is_across:
        keep_up(state, model, record, member, current)
        return
    if current is not None and is_wanted and facts.is_served(state, current):
        may_come_back = model.is_listening and current.source not in state.members
        is_fixed = current.shares or may_come_back
        if not is_fixed and _moves(state, model, record, member, current):
            return
        source = state.members.get(current.source)
        if source is None or not _is_to_be_left(state, source, current):
            return
        # it has a part and does nothing for the rest: where that is all read, any that has the whole is better
        is_paused = not facts.is_leaving(source, current.version, current.from_host)
        is_stuck = is_paused and slow.is_still(state, current)
        may_doubt = not facts.is_here(state, source)
        others = [
            candidate
            for candidate in sources.possible(state, model, record, member)
            if (is_stuck and candidate.is_full)
            or (not candidate.is_withdrawing and (may_doubt or not candidate.is_doubtful))
        ]
        is_cut = _is_impatient(source, current.version) and not current.from_host
        if choose_source(others, now=state.now) is None and not is_cut:
            if is_stuck or source.turns_lost > member.turns_lost:  # it was to read for both, and does not
                instead_of(state, model, record, member, current, is_in_need=is_stuck)
            return
    _begin_anew(state, model, record, member, wanted)


def _begin_anew(state: State, model: Model, record: VersionRecord, member: Member, wanted: Wanted) -> None:
    """Instead of what it reads it is given the best that there is."""
    current = state.reads.current.get(member.worker)
    if current is not None:
        is_served = facts.is_served(state, current)
        state.take_back(current, "it leaves this version" if is_served else "it does not serve this version any more")
    if wanted.to_host and any(read.is_void for read in state.reads.of(member.worker)):
        return  # in its own time: were it stopped, each new version would leave one more source waiting for it
    _grant(state, model, record, member, to_host=wanted.to_host)


def _is_had_in_its_layout(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """A living worker of its own layout has all of the version.

    Better one that was too slow for it, or that wants to leave the version, than none.
    """
    return member.layout_key in record.roots and any(
        candidate.is_full
        and candidate.avoided_until <= state.now
        and not facts.is_doubtful(state, state.known(candidate.worker))
        for candidate in sources.possible(state, model, record, member)
    )


def _moves(state: State, model: Model, record: VersionRecord, member: Member, current: OpenRead) -> bool:
    """It is given a better source.

    Also if its own has no session any more: that may well go on serving. But nothing may come from it for ever, and the
    reader need not find out: one that was filling still says that it has no more yet, or its memory alone is read.
    """
    if slow.move(state, model, record, member, current):
        return True
    is_in_need = slow.brings_nothing(state, current)
    return (current.is_stuck or is_in_need) and instead_of(state, model, record, member, current, is_in_need=is_in_need)


def is_looking(state: State, member: Member, wanted: Wanted) -> bool:
    """It has no source for what it should be reading, or one that it is to leave as soon as there is another."""
    current = state.reads.current.get(member.worker)
    if current is None or (current.version, current.grant.to_host) != wanted:
        return True
    if current.is_across:
        return _why_replace(state, member, current) is not None
    source = state.members.get(current.source)
    if source is None or not facts.is_served(state, current):
        return True
    return _is_to_be_left(state, source, current)


def _is_to_be_left(state: State, source: Member, read: OpenRead) -> bool:
    """Its source wants to leave what is read there; or it is paused.

    A source is paused that has only a part of the version, and nothing to read the rest from: it has something else to
    do.
    """
    from_host = read.from_host
    if facts.is_leaving(source, read.version, from_host):
        return True
    if facts.is_full(source, read.version, from_host):
        return False
    its_own = state.reads.current.get(read.source)
    return its_own is None or its_own.version != read.version or its_own.grant.to_host != from_host


def _is_impatient(source: Member, version: Version) -> bool:
    buffer = source.content.buffer
    return isinstance(buffer, Withdrawing) and buffer.version == version and buffer.impatient


def _grant(state: State, model: Model, record: VersionRecord, member: Member, *, to_host: bool) -> None:
    if _read_across(state, model, record, member, to_host=to_host):
        return
    if member.layout_key not in record.roots:  # only filling workers have reported: the right digests are not known
        if layouts.can_cross(record, member.layout_key):
            see_that_it_begins(state, model, record, member)
        return
    if to_host and _share(state, model, record, member):
        return
    found = sources.to_choose_from(state, model, record, member)
    choice = choose_source(found, now=state.now)
    if choice is None:
        if found:
            state.members.wake(member, min(candidate.avoided_until for candidate in found))
        return
    source, reason = choice
    state.give(member, record, [source.place], reason, to_host=to_host)


def _read_across(state: State, model: Model, record: VersionRecord, member: Member, *, to_host: bool) -> bool:
    if not layouts.can_cross(record, member.layout_key) or _has_sound_source(state, model, record, member):
        return False
    return set_out(state, model, record, member, to_host=to_host)


def _has_sound_source(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """A sound worker of its own layout has the version, or is getting it."""
    return any(
        not candidate.is_doubtful
        and not candidate.is_withdrawing
        and candidate.avoided_until <= state.now
        and not _waits_to_begin(state, record, candidate)
        for candidate in sources.to_choose_from(state, model, record, member)
    )


def _waits_to_begin(state: State, record: VersionRecord, source: Candidate) -> bool:
    """It has nothing of the version yet, and cannot begin to read it."""
    read = state.reads.current.get(source.worker)
    return read is not None and read.version == record.version and slow.cannot_begin(state, read)


def _share(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """Let it map the host copy of another worker of its host, or wait for one that is being fetched."""
    choice = choose_source(sources.copies_to_share(state, model, record, member), now=state.now)
    if choice is not None:
        source, reason = choice
        state.give(member, record, [source.place], f"{reason}; shared", to_host=True, shares=True)
        return True
    for mate, read in sources.reads_to_share(state, model, record, member):
        if not slow.is_still(state, read):
            is_silent_at = mate.silent_at + MOMENT * state.report_s
            state.members.wake(member, min(is_silent_at, state.now + slow.window_s(state)))
            return True
    return False


# --- What a member waits for, as things are: what has to change elsewhere before there is something new for it.
#
# What it hears of its own its own report leads to. What becomes of its source, of its readers, and of its replica
# leads to it anyway.


def interests_of(
    state: State, model: Model, replica: Replica, member: Member, wanted: Wanted | None
) -> tuple[Topic, ...]:
    """The topics that the member waits for. `wanted` is what it should be reading."""
    key, content, call = member.layout_key, member.content, replica.call
    found: list[Topic] = []
    if wanted is not None and is_looking(state, member, wanted):
        found.append(sources_of(wanted.version, key))
        if layouts.can_cross(model.look_up(wanted.version), key):
            found += [sources_of(wanted.version, each) for layout_set in model.layout_sets for each in layout_set]
    is_leaving = isinstance(content.buffer, Withdrawing) and not member.is_drained
    if isinstance(content.buffer, Withdrawing) and is_leaving:
        found.append(references_of(content.buffer.version, key))
    if content.copies:
        found += [
            references_of(copy.version, content.layout_key_of(copy.version, is_copy=True)) for copy in content.copies
        ]
    if key.is_boxed:  # workers with another layout count too
        kept = [topic[1] for topic in found if topic[0] == "references" and topic[1] is not None]
        found += [
            references_of(version, each) for version in kept for layout_set in model.layout_sets for each in layout_set
        ]
    if retention.updates_last(state, model, member):  # until others have what they are on their way to, or give it up
        found.append(ARRIVALS)
        if call is not None and call.version is not None:
            found += [
                references_of(call.version, each) for layout_set in model.known_layout_sets() for each in layout_set
            ]
    is_open = call is not None and not call.is_over
    if call is not None and is_open:
        found += [loss_of(call.version)] if call.version is not None else [SERVICE]
    is_electable = member.hello.prefetch != "never" and len(model.sites) > 1
    fetches = member.report.prefetch is not None or member.hello.prefetch == "always" or is_electable
    is_unresolved = call is not None and is_open and call.version is None
    if is_unresolved or is_leaving or fetches or content.copies or member.report.closing:
        found.append(NEWS)
    return tuple(dict.fromkeys(found)) if found else ()
