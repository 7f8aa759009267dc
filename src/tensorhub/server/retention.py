"""Rules: which versions are kept, and which worker makes, fetches or releases a host copy."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from ..protocol.messages import Failure, Filling, Holding, HostCopy, Withdrawing
from ..protocol.names import Version, WorkerId
from . import admission, layouts
from . import state as facts
from .groups import GroupCall, Replica
from .members import LayoutKey, LayoutSet, Member, Rank
from .state import State
from .versions import Model, VersionRecord

# --- What a worker fetches into host memory ahead of its caller's call.
#
# Its caller asks for a version, its settings say that it always fetches the newest one, or its site lacks the newest
# version and *elects* it to fetch that.


def wanted_ahead(state: State, model: Model, member: Member) -> Iterator[Version]:
    """Versions that it should have a host copy of, beside those it keeps for others; the most important first."""
    wished, latest = _wished(model, member), _latest(model, member)
    if wished is not None:
        yield wished
    if latest is not None and _fetches(state, model, member, latest):
        yield latest


def is_wanted_ahead(state: State, model: Model, member: Member, version: Version) -> bool:
    """The version is one of those."""
    if version == _wished(model, member):
        return True
    return version == _latest(model, member) and _fetches(state, model, member, version)


def _wished(model: Model, member: Member) -> Version | None:
    wish = member.report.prefetch
    return model.resolve(wish)[0] if wish is not None else None


def _latest(model: Model, member: Member) -> Version | None:
    if model.replicas[member.hello.replica].publishes:
        return None
    return model.latest


def _fetches(state: State, model: Model, member: Member, latest: Version) -> bool:
    return member.hello.prefetch == "always" or is_elected(state, model, model.look_up(latest), member)


def is_elected(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """The member is to fetch the version ahead for its site, which has nothing of it."""
    site, key = member.hello.site, member.layout_key
    if len(model.sites) < 2 or not _is_able(state, model, member, record):
        return False
    current = state.reads.current.get(member.worker)
    is_begun = current is not None and current.version == record.version and current.grant.to_host
    if (is_begun and not member.is_dropping_copy(record.version)) or member.copy(record.version) is not None:
        return True  # it was elected before, and has begun
    for worker in record.holders.get(key, {}):
        other = state.members.get(worker)
        if other is None or other.hello.site != site or worker == member.worker:
            continue
        if other.turns_lost > member.turns_lost and worker not in record.whole.get(key, {}):
            continue
        if not facts.is_silent(state, other):  # a worker whose connection broke is back in a moment
            return False
    mates = [mate for mate in facts.members_of(state, model, key) if mate.hello.site == site]
    able = [mate for mate in mates if _is_able(state, model, mate, record)]
    return min(able, key=lambda mate: (mate.turns_lost, mate.worker)) is member


def _is_able(state: State, model: Model, member: Member, record: VersionRecord) -> bool:
    report = member.report
    if model.replicas[member.hello.replica].publishes:
        return False
    has_room = report.copies_left > 0 or member.copy(record.version) is not None
    is_staying = facts.is_here(state, member) and not report.closing and layouts.may_fit(model, record, member)
    return is_staying and has_room and member.hello.prefetch != "never"


# --- The newest *established* version: the one that is safe enough to be the only one left.
#
# A version is established once each of its shards has been whole outside the replicas that published it: in a reliable
# worker if one lives there, else in a spot worker. A worker does not count when it may drop the version, is closing, or
# withdraws it without room for a copy. The newest established version is retained until a newer one is established,
# however old it is: versions published since may be lost with their publisher.
#
# One worker of each shard makes a host copy for that, ahead of need, while its caller computes. Without time it copies
# before it leaves the version. Without room it leaves the version after the others.


def newly_established(state: State, model: Model) -> list[VersionRecord]:
    """Versions that are established now and were not before, among those whose holders have changed."""
    changed = [model.versions.get(version) for version in model.changed]
    found = [record for record in changed if record is not None and record.exists and not record.is_established]
    return [record for record in found if _is_whole_outside(state, model, record)]


def _is_whole_outside(state: State, model: Model, record: VersionRecord) -> bool:
    return any(_is_set_outside(state, model, record, layout_set) for layout_set in model.known_layout_sets())


def _is_set_outside(state: State, model: Model, record: VersionRecord, layout_set: LayoutSet) -> bool:
    for key in layout_set:
        reliable = model.reliable.get(key, {})
        needs_reliable = any(w.replica not in record.publishers and w not in model.closing for w in reliable)
        if not any(
            _has_it_to_stay(state, model, worker, record.version)
            for worker in record.whole.get(key, {})
            if worker.replica not in record.publishers and (worker in reliable or not needs_reliable)
        ):
            return False
    return True


def _has_it_to_stay(state: State, model: Model, worker: WorkerId, version: Version) -> bool:
    """It keeps the version until the server tells it otherwise, and has room to keep it."""
    member = state.members.get(worker)
    if member is None or not member.will_keep(version):
        return False
    if member.will_hold(version) or member.copy(version) is not None or member.report.copies_left:
        return True
    return member.hello.reliable and facts.is_retained(state, model, member, version)  # then it waits for room


def _is_all_outside(model: Model, record: VersionRecord) -> bool:
    """Each shard has a holder outside its publishers, reliable or spot."""
    return any(
        all(any(worker.replica not in record.publishers for worker in record.whole.get(key, {})) for key in layout_set)
        for layout_set in model.known_layout_sets()
    )


def has_reliable_holder(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """Another reliable worker keeps the leaver's shard.

    For the newest established version, outside its publishers: it outlives them.
    """
    reliable = model.reliable.get(leaver.layout_key, {})
    must_be_outside = record.version in model.glance().outliving and leaver.worker.replica not in record.publishers
    for worker in record.whole.get(leaver.layout_key, {}):
        if worker not in reliable or (must_be_outside and worker.replica in record.publishers):
            continue
        member = state.members.get(worker)
        if member is not None and member.will_keep(record.version):
            return True

    def counts(member: Member) -> bool:
        is_inside = must_be_outside and member.worker.replica in record.publishers
        return member.hello.reliable and not is_inside and member is not leaver and member.will_keep(record.version)

    return layouts.is_in_another_layout(state, model, record, leaver.layout_key, counts)


def is_to_copy_ahead(model: Model, member: Member) -> bool:
    """It holds the newest established version, and was chosen to copy it ahead of need."""
    buffer = member.content.buffer
    if not isinstance(buffer, Holding) or buffer.version != model.newest_established:
        return False
    copy_candidates = model.look_up(buffer.version).copy_candidates.get(member.layout_key)
    return copy_candidates is not None and copy_candidates.chosen == member.worker


def may_copy_ahead(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It has all of the version and could make a copy of it ahead of need."""
    if member.worker not in record.whole.get(member.layout_key, {}):
        return False
    return _may_copy_ahead(state, model, record, member)


def _may_copy_ahead(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    report = member.report
    if member.worker.replica in record.publishers or report.closing or not member.is_connected:
        return False
    if report.copy_error is not None:
        return False
    if not member.hello.reliable and has_reliable_holder(state, model, record, member):
        return False
    fetches = member.hello.prefetch != "never" or report.prefetch is not None
    spare = 1 if fetches else 0  # room for what it fetches ahead
    return member.copy(record.version) is not None or report.copies_left > spare


def rank(member: Member, record: VersionRecord) -> Rank:
    """The order among workers that could copy ahead of need."""
    return not member.hello.reliable, member.copy(record.version) is None, member.worker


def is_another_on_its_way(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """Another replica leaves this version for a newer one, or has left it: it has that one before this one must leave.

    No worker is waited for once all of what this one wants is outside its publishers, in one replica or in several: two
    of them that have half of it each would wait for each other. For the same reason a replica of which a shard has left
    waits for no replica that gets an older version than itself, and for none with another layout: it was to go
    first, and the others wait for it.
    """
    version, own_replica = record.version, model.replicas[member.hello.replica]
    own = facts.wanted_version(own_replica, member)
    if own is not None and own > version and _is_all_outside(model, model.look_up(own)):
        return False
    has_begun = any(_has_left(each, record) for each in _members(state, own_replica) if each is not member)
    least = own if has_begun and own is not None else version + 1
    for replica in model.replicas.values():
        call = replica.call
        if replica is own_replica or call is None or call.version is None or call.version < least:
            continue
        for other in _others(state, replica, call, member, has_begun=has_begun):
            if _is_on_its_way(record, replica, member, other):
                return True
    return False


def _others(state: State, replica: Replica, call: GroupCall, member: Member, *, has_begun: bool) -> Iterator[Member]:
    """Of another replica: the worker with its layout key; all workers if the layout differs, unless it is half there.

    Halves of one layout set add up to a version; halves of two sets do not. A shard that never joins its call is
    therefore waited for as long as a dead one.
    """
    is_half = call.waiting is not None and state.now >= call.began + state.settings.lease_s
    is_other_cut = replica.layout_set is not None and member.layout_key not in replica.layout_set
    counts_all = is_other_cut and member.layout_key.is_boxed and not has_begun and not is_half
    for other in _members(state, replica):
        if other.layout_key == member.layout_key or (counts_all and other.layout_key.is_boxed):
            yield other


def _members(state: State, replica: Replica) -> Iterator[Member]:
    for worker in replica.members.values():
        if worker in state.members:
            yield state.members[worker]


def _has_left(member: Member, record: VersionRecord) -> bool:
    buffer = member.content.buffer
    return member.may_drop or not isinstance(buffer, (Holding, Withdrawing)) or buffer.version != record.version


def _is_on_its_way(record: VersionRecord, replica: Replica, member: Member, other: Member) -> bool:
    if not other.is_connected or other.report.closing:
        return False
    wanted = facts.wanted_version(replica, other)
    if wanted is None or wanted <= record.version:
        return False
    return _has_left(other, record) or other.worker > member.worker  # of those that withdraw it the first by name stays


# --- Handover: chooses the workers that copy a version whose last holders are closing.
#
# Rules:
# - A reliable worker with the same layout that can begin at once takes over. It may drop a copy of what its buffer
#   holds too. Without a reliable one a spot worker takes over, for a while.
# - Where no worker of that layout can, workers of another layout take over, one for each of its shards that is not
#   kept elsewhere: they read across. All of them, or none.
# - Workers whose reads failed, or that still wait for room, come last.
# - Where no worker can take over, the closing worker does not wait.


MAX_LOOKED_AT = 256  # workers of one layout key: if none of these has room, another one hardly has
MAX_COMPARED = 16  # of those that can


class Handover(NamedTuple):
    """The workers that take over. `is_across`: they are of another layout, the same workers for all of its keys."""

    workers: tuple[WorkerId, ...] = ()
    is_across: bool = False


NO_HANDOVER = Handover()
AT_ONCE, AFTER_FAILURES, WITH_ROOM = range(3)  # when a worker can begin: its reads failed; it waits for room


class HandoverCandidate(NamedTuple):
    """A worker that could take over, and when."""

    member: Member
    when: int


def is_one(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It has to fetch the version from a closing worker."""
    if member.worker in _handover(state, model, record, member.layout_key).workers:
        return True
    if not layouts.can_cross(record, member.layout_key):
        return False
    seen: dict[LayoutKey, None] = {member.layout_key: None}
    for worker in model.closing:
        leaver = state.members.get(worker)
        if leaver is None or leaver.layout_key not in record.whole or leaver.layout_key in seen:
            continue
        found = _handover(state, model, record, leaver.layout_key)
        if member.worker in found.workers:
            return True
        layout_sets = _layout_sets_of(model, leaver.layout_key) if found.is_across else []
        seen = {**seen, leaver.layout_key: None, **{key: None for layout_set in layout_sets for key in layout_set}}
    return False


def are_there(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """Workers that stay are about to have the version. For spot workers the leaver waits a while only."""
    if _handover(state, model, record, leaver.layout_key).workers:
        return True
    for worker in record.holders.get(leaver.layout_key, {}):
        member = state.members.get(worker)
        if member is None or not member.is_connected or member.report.closing:
            continue
        buffer = member.content.buffer
        is_filling = isinstance(buffer, Filling) and buffer.version == record.version
        is_soon_enough = state.now < leaver.closing_since + state.settings.spot_handover_s
        if is_filling and (member.hello.reliable or is_soon_enough):
            return True
    return False


def _handover(state: State, model: Model, record: VersionRecord, key: LayoutKey) -> Handover:
    """For that layout key: one worker, or several of another layout; none where it is kept, or no worker can."""
    since = _left_since(state, model, record, key)
    if since is None or layouts.is_in_another_layout(
        state, model, record, key, lambda m: layouts.is_relied_on(m, record)
    ):
        return NO_HANDOVER
    candidate = _candidate_of(state, model, record, key, since)
    its_own = Handover((candidate.member.worker,)) if candidate is not None else NO_HANDOVER
    if candidate is not None and candidate.when == AT_ONCE:
        return its_own
    if layouts.is_kept_by_spot(state, record, key) or not layouts.is_readable(record, key):
        return its_own
    others = [
        _left_since(state, model, record, each) for layout_set in _layout_sets_of(model, key) for each in layout_set
    ]
    first = min([since, *[each for each in others if each is not None]])
    best: tuple[tuple[int, ...], list[HandoverCandidate]] | None = None
    for number, layout_set in enumerate(model.layout_sets):
        found = _candidates_in(state, model, record, layout_set, first) if key not in layout_set else None
        if found:
            begun = sum(_has_copy(candidate.member, record) for candidate in found)
            is_spot = any(not candidate.member.hello.reliable for candidate in found)
            rank = (max(candidate.when for candidate in found), is_spot, -begun, len(found), number)
            best = (rank, found) if best is None or rank < best[0] else best
    if best is None or (candidate is not None and candidate.when <= best[0][0]):
        return its_own
    return Handover(tuple([candidate.member.worker for candidate in best[1]]), is_across=True)


def _layout_sets_of(model: Model, key: LayoutKey) -> list[LayoutSet]:
    return [layout_set for layout_set in model.layout_sets if key in layout_set]


def _left_since(state: State, model: Model, record: VersionRecord, key: LayoutKey) -> float | None:
    """When the first reliable holder of that key began to close; None: a reliable holder stays."""
    if not model.closing:
        return None
    since = inf
    for worker in record.whole.get(key, {}):
        member = state.members.get(worker)
        if member is None or not member.hello.reliable:
            continue
        if member.will_keep(record.version):
            return None
        if member.report.closing:
            since = min(since, member.closing_since)
    return since if since < inf else None


def _candidates_in(
    state: State, model: Model, record: VersionRecord, layout_set: LayoutSet, since: float
) -> list[HandoverCandidate] | None:
    """A worker for each key of that layout that is not kept. None where a key has no worker that can."""
    found = []
    for key in layout_set:
        if any(layouts.is_relied_on(state.known(worker), record) for worker in record.whole.get(key, {})):
            continue
        if not any(layouts.readable_layout_sets(model, record, key)):
            return None  # it has too many shards to be read at once
        candidate = _candidate_of(state, model, record, key, since)
        if candidate is not None:
            found.append(candidate)
        elif not layouts.is_kept_by_spot(state, record, key):
            return None
    return found


def _candidate_of(
    state: State, model: Model, record: VersionRecord, key: LayoutKey, since: float
) -> HandoverCandidate | None:
    """A worker with that layout key. None where no worker can, or a spot worker would be nothing new, or late."""
    reliable = _living(state, model.reliable.get(key, {}))
    candidate = _best_of(state, model, record, key, reliable, is_reliable=True)
    if candidate is not None and candidate.when == AT_ONCE:
        return candidate
    is_too_late = candidate is None and state.now >= since + state.settings.spot_handover_s
    if is_too_late or layouts.is_kept_by_spot(state, record, key):
        return candidate
    spot = _best_of(state, model, record, key, facts.members_of(state, model, key), is_reliable=False)
    return spot if candidate is None or (spot is not None and spot.when < candidate.when) else candidate


def _best_of(
    state: State, model: Model, record: VersionRecord, key: LayoutKey, others: Iterator[Member], *, is_reliable: bool
) -> HandoverCandidate | None:
    """The best of those that have begun a copy of it, and of the first others."""
    able: list[HandoverCandidate] = []
    for members, has_begun in ((_living(state, record.holders.get(key, {})), True), (others, False)):
        seen = at_once = 0
        for member in members:
            is_meant = (member.hello.reliable or not is_reliable) and (not has_begun or _has_copy(member, record))
            if not is_meant or not _is_staying(member, record):
                continue
            when = _when(state, model, member, record)
            if when is not None:
                able.append(HandoverCandidate(member, when))
                at_once += when == AT_ONCE
            seen += 1
            if seen == MAX_LOOKED_AT or at_once == MAX_COMPARED:
                break
        if at_once:
            break
    return min(able, key=lambda candidate: _rank(candidate, record), default=None)


def _living(state: State, workers: Iterable[WorkerId]) -> Iterator[Member]:
    for worker in workers:
        member = state.members.get(worker)
        if member is not None:
            yield member


def _has_copy(member: Member, record: VersionRecord) -> bool:
    return member.copy(record.version) is not None


def _rank(candidate: HandoverCandidate, record: VersionRecord) -> tuple[object, ...]:
    """A worker that has begun, or has room, before one that has to make room; reliable workers first."""
    member = candidate.member
    makes_room = not _has_copy(member, record) and not member.report.copies_left
    return candidate.when, member.turns_lost, not member.hello.reliable, makes_room, member.worker


def _when(state: State, model: Model, member: Member, record: VersionRecord) -> int | None:
    """When it can begin to fetch the version; None: never, as far as is known."""
    if not layouts.may_fit(model, record, member):
        return None
    filled = facts.wanted_version(state.place(member)[1], member)
    copies = member.content.copies
    if member.report.copies_left or any(_gives_way(state, member, copy, record, filled) for copy in copies):
        return AFTER_FAILURES if member.turns_lost else AT_ONCE
    is_making_room = any(
        copy.dropping
        or copy.number in member.releasing
        or member.will_stay(copy.version)
        or copy.version == filled
        or _is_needless(state, model, member, copy)
        for copy in copies
    )
    return WITH_ROOM if is_making_room else None


def _gives_way(state: State, member: Member, copy: HostCopy, record: VersionRecord, filled: Version | None) -> bool:
    """It is of the version itself, or can go at once: it has no reader, and its buffer has the same, or soon will."""
    if copy.version == record.version:
        return True
    if any(not read.is_void for read in state.reads.from_copy(member.worker, copy.version)):
        return False
    is_going = copy.dropping or copy.number in member.releasing or member.will_stay(copy.version)
    return is_going or (copy.version == filled and member.can_fill_itself(copy.version))


def _is_needless(state: State, model: Model, member: Member, copy: HostCopy) -> bool:
    """Its worker does not want it, and it need not be kept here: it goes with its last reader."""
    version = copy.version
    if version in model.glance().outliving:
        return False
    if version in model.retained() and not any(
        other.hello.reliable and not other.report.closing and other is not member
        for other in map(state.known, model.buffer_holders.at(version, member.layout_key))
    ):
        return False
    return not is_wanted_ahead(state, model, member, version)


def _is_staying(member: Member, record: VersionRecord) -> bool:
    """It is connected, and not closing. A worker that has begun may be away for as long as its lease."""
    return not member.report.closing and (member.is_connected or _has_copy(member, record))


# --- What a publisher copies to its own host memory while its version rests.
#
# A publisher that is the last reliable holder would have to offload the version at its next withdrawal, while its
# caller waits. It makes the copy before, and `unpublish` copies nothing.
#
# Rules:
# - Where other reliable workers of its shard live, they may have the version in a moment: the copy is ordered once the
#   version has rested for a while.
# - It is ordered only where there is room beside other copies, beside what the caller wants fetched ahead, and beside
#   what a handover may need.
# - The copy goes when another reliable worker has the version, when the version need not be kept any more, or when
#   another reliable worker has come and there is no more room.


REST_S = 1.0  # a GiB over 10 Gbit/s: a reader that is not done by then may take long


def version_to_copy(state: State, model: Model, member: Member) -> Version | None:
    """What it is to copy now, or has copied, because no other reliable worker may have it in time."""
    version = _kept_here(model, member)
    if version is None or member.report.copy_error is not None:
        return None
    spare = 1 if member.report.prefetch is not None else 0
    if layouts.has_company(model, member):
        if state.now < member.rested_at or not is_resting_used(state, model, member, version):
            return None
        spare += 1
    return version if member.copy(version) is not None or member.report.copies_left > spare else None


def is_resting_used(state: State, model: Model, member: Member, version: Version) -> bool:
    """The copy that it has made, or is making, will spare it an offload."""
    if version != _kept_here(model, member):
        return False
    reliable = model.reliable.get(member.layout_key, {})
    if len(reliable) > 1 and not member.report.copies_left:
        return False
    whole = model.look_up(version).whole.get(member.layout_key, {})
    if any(other in whole and other not in model.closing for other in reliable if other != member.worker):
        return False
    record = model.look_up(version)

    def counts(other: Member) -> bool:
        return other is not member and other.hello.reliable and other.will_keep(version)

    return not layouts.is_in_another_layout(state, model, record, member.layout_key, counts)


def _kept_here(model: Model, member: Member) -> Version | None:
    """The version that it has published, holds and would have to keep."""
    buffer = member.content.buffer
    if not isinstance(buffer, Holding) or not member.hello.reliable or member.report.closing:
        return None
    version = buffer.version
    is_publisher = member.worker.replica in model.look_up(version).publishers
    return version if is_publisher and version in model.retained() else None


# --- Which versions must be kept, and by whose host copies: what each worker is to offload, to fetch and to release.
#
# A version is *retained* while it is among the newest `retain` of its model, or pinned. A reliable worker that is not
# closing, and holds it in its buffer or a host copy, is a reference.
#
# Rules:
# - Without room, a version goes first that only another replica wants kept (`retain`): no rollout stops a trainer.
#   Then goes a version of which a shard seems lost, unless a shard of the worker's replica may only be cut off.
# - The last reference does not leave before its worker has offloaded the version. Where host memory is full, a copy
#   that is not whole yet gives way. Of several workers that leave together the first by name stays.
# - A closing worker hands its versions over (see above).
# - A copy is released when a buffer holds the version, or another copy exists that comes first by name; nothing reads
#   it; and its worker is not about to use it. A copy that was once released never counts again.


class HostCopyOrders(NamedTuple):
    """What a worker is to do with its host memory."""

    offload: Version | None = None
    fetch: Version | None = None


def host_copy_orders(state: State, model: Model, replica: Replica, member: Member) -> HostCopyOrders:
    """What the worker is to do now, after what it is to let go."""
    if not model.roll.is_over:
        return HostCopyOrders()
    offload, fetch = version_to_offload(state, model, member), version_to_fetch(state, model, replica, member)
    is_room_ahead = fetch is None or member.copy(fetch) is not None or member.report.copies_left > 1
    if offload is None and is_room_ahead:
        offload = _ahead(state, model, member)
    return HostCopyOrders(offload, fetch)


def copies_to_let_go(state: State, model: Model, replica: Replica, member: Member) -> tuple[int, ...]:
    """Its host copies, by number, that are not needed any more. What it was once told to let go never counts again.

    Of one that is cut off it is not known what it still wants: nothing is fetched ahead for it, and all would go.
    There is no way back. In the first lease after a restart, only copies may go that no returning worker can want by
    then: they are older than a version which those that have answered show to be established.
    """
    copies = member.content.copies
    if not copies or not model.roll.is_over or not facts.is_here(state, member):
        return ()
    newest = model.newest_established
    old = [copy.number for copy in copies if newest is not None and copy.version < newest]
    found = _not_needed(state, model, replica, member)
    return tuple(number for number in found if number in old or not state.is_recovering)


def copies_to_release(state: State, model: Model, member: Member) -> tuple[int, ...]:
    """The host copies, by number, that are to go and have no reader any more."""
    if not member.releasing or not model.roll.is_over or admission.may_have_unknown_readers(state, member):
        return ()
    told = [copy for copy in member.content.copies if copy.number in member.releasing]
    return tuple(copy.number for copy in told if not _is_read(state, member, copy))


def _is_read(state: State, member: Member, copy: HostCopy) -> bool:
    return facts.must_wait(state, member, state.reads.from_copy(member.worker, copy.version))


def _ahead(state: State, model: Model, member: Member) -> Version | None:
    """What it has to copy ahead while it holds it: when all leave at once there may be no time."""
    if is_to_copy_ahead(model, member):
        return model.newest_established
    return version_to_copy(state, model, member) if model.roll.is_over else None


def _not_needed(state: State, model: Model, replica: Replica, member: Member, *, unread: bool = False) -> list[int]:
    """Its host copies, by number, that may go, or have to: one made ahead gives way to one that must be kept.

    Where there is no room, what is not whole goes first.

    `unread`: or may go once they have no reader, and none to come.
    """
    copies = [copy for copy in member.content.copies if not copy.dropping]
    if not copies:
        return []
    is_squeezed = _is_squeezed(version_to_offload(state, model, member), member)
    if any(not _is_read(state, member, copy) for copy in _going(member)):
        is_squeezed = False  # there will be room at once: no other one has to go
    found = [copy for copy in copies if not _is_needed(state, model, replica, member, copy, is_squeezed, unread)]
    at_once = [copy for copy in found if is_squeezed and not copy.whole and not _is_read(state, member, copy)]
    return [copy.number for copy in at_once or found]


def _is_squeezed(offload: Version | None, member: Member) -> bool:
    """There is no room for what it has to offload."""
    return offload is not None and not member.report.copies_left and member.copy(offload) is None


def _going(member: Member) -> list[HostCopy]:
    """Its host copies that are on their way out."""
    return [copy for copy in member.content.copies if copy.dropping or copy.number in member.releasing]


def _makes_room(state: State, member: Member) -> bool:
    """A host copy is on its way out, or may be when a server that has restarted releases copies again."""
    return bool(_going(member) or (state.is_recovering and member.content.copies))


def must_stay(state: State, model: Model, member: Member) -> bool:
    """The worker's buffer is the last reference of a retained version, which can still be saved."""
    buffer = member.content.buffer
    if not isinstance(buffer, Withdrawing) or not _counts(state, model, member, buffer.version):
        return False
    record, error = model.look_up(buffer.version), member.report.copy_error
    is_squeezed = _is_squeezed(record.version, member)
    if error is not None and error.code == "corrupt-transfer":
        return False  # its tensors were changed while they were published: there is nothing left to keep
    if _is_kept_elsewhere(state, model, record, member, is_copy=False):
        return False
    if is_squeezed and not member.report.closing and _makes_room(state, member):
        return True
    if is_squeezed and not layouts.is_whole(state, model, record):
        return False
    if member.report.closing:
        return not buffer.impatient and are_there(state, model, record, member)
    if is_squeezed and not (member.hello.reliable and facts.is_retained(state, model, member, record.version)):
        may_make_room = any(not copy.whole for copy in member.content.copies)
        return may_make_room or is_another_on_its_way(state, model, record, member)
    return True


def is_in_doubt(state: State, model: Model, member: Member) -> bool:
    """It has the last reference of what seems lost, and a shard of its replica is away, perhaps with what is missing.

    No call of that replica ends well before that is back, so there is no hurry.
    """
    buffer, replica = member.content.buffer, model.replicas[member.hello.replica]
    if not isinstance(buffer, Withdrawing) or member.report.closing or len(replica.members) == replica.shards:
        return False
    record = model.versions.get(buffer.version)
    if record is None or layouts.is_whole(state, model, record) or not _counts(state, model, member, buffer.version):
        return False
    return not _is_kept_elsewhere(state, model, record, member, is_copy=False)


def leaves_last(state: State, member: Member) -> bool:
    """It fills its buffer only when others have the newer version: no reader may wait for it."""
    buffer = member.content.buffer
    if not isinstance(buffer, Withdrawing) or member.report.closing or not _is_squeezed(buffer.version, member):
        return False
    if member.may_drop:
        return False  # it was told to go on, and does
    return must_stay(state, state.models[member.hello.model], member)


def waits_for_its_readers(state: State, member: Member, version: Version) -> bool:
    """It has a part of the version at most, and goes on only when others have it all: they must get it elsewhere."""
    is_leaving = isinstance(member.content.buffer, Withdrawing) and member.content.held != version
    return is_leaving and leaves_last(state, member)


def version_to_offload(state: State, model: Model, member: Member) -> Version | None:
    """What it has to copy to its own host memory before its buffer may change."""
    buffer = member.content.buffer
    if not isinstance(buffer, Withdrawing) or member.report.closing or member.may_drop:
        return None
    return buffer.version if must_stay(state, model, member) else None


def why_stuck(state: State, model: Model, replica: Replica, member: Member) -> Failure | None:
    """Why the version that it wants to leave, and may not, cannot be offloaded; None where it can or need not."""
    report, buffer = member.report, member.content.buffer
    if report.copy_error is None and (report.copies_left or not isinstance(buffer, Withdrawing)):
        return None  # there is room
    version = version_to_offload(state, model, member)
    if version is None or member.has_whole_copy(version):
        return None
    if not (member.hello.reliable and facts.is_retained(state, model, member, version)):
        return None
    if report.copy_error is not None:
        return report.copy_error
    if not _is_squeezed(version, member) or any(copy.dropping for copy in member.content.copies):
        return None
    is_impatient = isinstance(buffer, Withdrawing) and buffer.impatient
    if member.releasing or _not_needed(state, model, replica, member, unread=not is_impatient):
        return None  # room will be made, perhaps when readers of an unused copy are done
    kept = ", ".join(str(copy.version) for copy in member.content.copies) or "none"
    text = (
        f"{member.worker} is the last reliable holder of version {version} of {model.name}, "
        f"and its limit on host memory allows no further copy of {report.size_bytes} B (it has: {kept})"
    )
    if member.hello.retain > state.settings.default_retain:
        text = f"{text}; it was opened with retain={member.hello.retain}"
    return Failure("host-memory-full", text, "raise host_bytes, unpin a version, or add reliable replicas")


def version_to_fetch(state: State, model: Model, replica: Replica, member: Member) -> Version | None:
    """What it is to fill a host copy with, as far as there is room."""
    report = member.report
    if not model.roll.is_over or report.closing or not _may_want_a_copy(model, member):
        return None
    if _is_squeezed(version_to_offload(state, model, member), member):
        return None
    filled = facts.wanted_version(replica, member)
    for version in _wanted_copies(state, model, member):
        record = model.versions.get(version)
        if record is None or not record.exists:
            continue
        if member.holds(version) and member.will_keep(version):
            continue
        if not layouts.may_fit(model, record, member):
            continue
        copy = member.copy(version)
        if copy is None and (version == filled or not report.copies_left):
            continue  # the buffer is filled at once, or there is no room
        return version
    return None


def _may_want_a_copy(model: Model, member: Member) -> bool:
    """A worker is closing, its caller or settings ask for it, or it may be elected: else it fetches nothing ahead."""
    if model.closing or member.report.prefetch is not None or member.hello.prefetch == "always":
        return True
    return len(model.sites) > 1 and member.hello.prefetch != "never"


def _wanted_copies(state: State, model: Model, member: Member) -> Iterator[Version]:
    """What it should have a host copy of, the most important first."""
    if model.closing:
        for version in model.retained():
            if is_one(state, model, model.look_up(version), member):
                yield version
    yield from wanted_ahead(state, model, member)


def _counts(state: State, model: Model, member: Member, version: Version) -> bool:
    """Its reference keeps the version: it is reliable, or no reliable worker can keep it instead."""
    if version not in model.retained():
        return False
    return member.hello.reliable or not has_reliable_holder(state, model, model.look_up(version), member)


def _is_kept_elsewhere(
    state: State,
    model: Model,
    record: VersionRecord,
    leaver: Member,
    *,
    is_copy: bool,
    is_publisher_enough: bool = False,
) -> bool:
    """A reference stays when the leaver's buffer, or its copy, goes; of what is established, outside its publisher."""
    version = record.version
    is_outside = leaver.worker.replica not in record.publishers
    is_kept_outside = version in model.glance().outliving and is_outside and not is_publisher_enough

    def is_relied_on(member: Member) -> bool:
        is_inside = is_kept_outside and member.worker.replica in record.publishers  # it may go with its publisher
        is_worse = leaver.hello.reliable and not member.hello.reliable
        return not (member.report.closing or is_inside or is_worse)

    for worker in model.buffer_holders.at(version, leaver.layout_key):
        if (is_copy or worker != leaver.worker) and is_relied_on(state.known(worker)):
            return True
    for worker in record.holders.get(leaver.layout_key, {}):
        member = state.members.get(worker)
        if member is None or not is_relied_on(member):
            continue
        is_self, comes_first = worker == leaver.worker, worker < leaver.worker or leaver.report.closing
        if member.has_whole_copy(version) and (not is_copy or (comes_first and not is_self)):
            return True
        buffer = member.content.buffer
        is_to_copy_ahead = isinstance(buffer, Withdrawing) and buffer.version == version and not member.may_drop
        if not is_copy and not is_self and is_to_copy_ahead and comes_first:
            return True

    def counts(member: Member) -> bool:
        if member is leaver or not is_relied_on(member):
            return False
        return member.will_stay(version) or member.has_whole_copy(version)

    return layouts.is_in_another_layout(state, model, record, leaver.layout_key, counts)


def _is_the_copy(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It is the one copy of the newest established version, made ahead."""
    if member.report.closing or member.worker.replica in record.publishers:
        return False
    if not _counts(state, model, member, record.version) or _is_in_the_way(state, model, record, member):
        return False
    for worker in record.whole.get(member.layout_key, {}):
        other = state.members.get(worker)
        if other is None or not other.has_whole_copy(record.version):
            continue
        comes_first = (not other.hello.reliable, worker) < (not member.hello.reliable, member.worker)
        if comes_first and may_copy_ahead(state, model, record, other):
            return False
    return True


def _is_in_the_way(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """There is no room for what is fetched ahead, which goes before what is copied ahead."""
    if member.report.copies_left or not member.will_stay(record.version):
        return False
    wished = _wanted_copies(state, model, member)
    return any(version != record.version and member.copy(version) is None for version in wished)


def _is_needed(
    state: State,
    model: Model,
    replica: Replica,
    member: Member,
    copy: HostCopy,
    is_squeezed: bool,
    unread: bool,
) -> bool:
    version, reading = copy.version, state.reads.current.get(member.worker)
    if copy.number in member.releasing:
        return False
    is_being_read = not unread and _is_read(state, member, copy) and (copy.whole or not is_squeezed)
    if is_being_read or version == version_to_offload(state, model, member):
        return True
    is_read = reading is not None and reading.grant.to_host and reading.version == version
    is_wanted = facts.wanted_version(replica, member) == version and not member.holds(version)
    is_used = is_wanted and not copy.unfit
    if not is_squeezed and (is_read or is_used or version == version_to_fetch(state, model, replica, member)):
        return True
    record = model.look_up(version)
    is_safe = version in model.glance().outliving
    if is_safe and not is_squeezed and _is_the_copy(state, model, record, member):
        return True
    if is_resting_used(state, model, member, version) and not _is_in_the_way(state, model, record, member):
        return True
    if not copy.whole:
        return False
    is_kept = _is_kept_elsewhere(state, model, record, member, is_copy=True, is_publisher_enough=is_squeezed)
    is_last = _counts(state, model, member, version) and not is_kept
    is_there = layouts.is_whole(state, model, record) or len(replica.members) < replica.shards
    is_firm = not is_squeezed or (not facts.gives_way(state, model, member, version) and is_there)
    if is_last and is_firm:
        return not member.report.closing or are_there(state, model, record, member)
    if not record.promised or unread:
        return False
    if any(facts.will_hold(state, worker, version) for worker in record.holders.get(member.layout_key, {})):
        return False
    return not layouts.is_in_another_layout(
        state, model, record, member.layout_key, lambda other: other.will_hold(version)
    )
