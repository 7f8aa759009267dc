"""Rules: which versions are kept, and which worker makes, fetches or releases a host copy.

A version is kept while it is among the newest `retain` of its model or pinned. So is the newest *established* version:
the newest that was whole outside the replicas that published it. For each shard of a kept version a worker has it in
its tensors, or has a host copy.

- A worker that is about to give up the last one copies it to host memory first. Of several that leave it together the
  first one by name keeps it. Without room the call fails, and the worker goes on holding.
- A worker that closes with the last one waits until one other worker has fetched a copy.
- A host copy goes when its version is not kept any more, or when other workers have it.
"""

from collections.abc import Iterator

from ..protocol.messages import Failure, Filling, Holding, HostCopy, Withdrawing
from ..protocol.names import Version, WorkerId
from . import ahead, layouts
from . import state as facts
from .groups import Replica
from .members import LayoutKey, LayoutSet, Member
from .state import State
from .versions import Model, VersionRecord

# --- Whether other workers have a shard, so that a worker may give up what it has of it.
#
# Rules:
# - A worker counts that holds the version and does not withdraw it, or has a whole host copy. A closing one does not.
# - For what a reliable worker gives up only reliable workers count.
# - Workers have an order, by name among equals. If several workers give up a version at once, each counts only on
#   workers that come earlier in the order. The same holds for host copies.
# - One worker outside the publisher is the *keeper* of the established version: the first one in the order. The others
#   count on the keeper. The keeper counts on no worker with its layout, because a version that was published since may
#   be lost with its publisher.
# - Workers of another layout count if together they have all of the version.


def newly_established(state: State, model: Model) -> list[VersionRecord]:
    """Versions that are established now and were not before, among those whose holders have changed."""
    changed = [model.versions.get(version) for version in model.changed]
    found = [record for record in changed if record is not None and record.exists and not record.is_established]
    return [record for record in found if _is_whole_outside(state, model, record)]


def given_up(state: State, model: Model, member: Member) -> VersionRecord | None:
    """The established version that the member was told to give up though no other worker keeps it: it had no room.

    An older version that is still whole outside its publisher is the established one then. A worker that closes is not
    asked: others had their time to take the version over.
    """
    buffer = member.content.buffer
    record = model.versions.get(buffer.version) if isinstance(buffer, Withdrawing) else None
    if record is None or record.version not in model.glance().outliving or not member.is_drained:
        return None
    if member.worker.replica == record.publisher or member.report.closing:
        return None
    if _is_kept_by_others(state, model, record, member, is_copy=False) or _is_whole_outside(state, model, record):
        return None
    return record


def _is_whole_outside(state: State, model: Model, record: VersionRecord) -> bool:
    def is_outside(key: LayoutKey) -> bool:
        return any(
            worker.replica != record.publisher and _has_it_to_stay(state.members.get(worker), record.version)
            for worker in record.whole.get(key, {})
        )

    return any(all(map(is_outside, layout_set)) for layout_set in model.known_layout_sets())


def _has_it_to_stay(member: Member | None, version: Version) -> bool:
    """It holds the version, or has a host copy, and wants to leave neither."""
    if member is None or member.report.closing:
        return False
    return member.will_hold(version) or member.has_whole_copy(version)


def _is_to_be_kept(model: Model, member: Member, version: Version) -> bool:
    """What the member has of it counts: the version is kept, and not only outside its publisher."""
    if version in model.glance().anywhere:
        return True
    return version in model.retained() and member.worker.replica != model.look_up(version).publisher


def _is_kept_by_others(state: State, model: Model, record: VersionRecord, leaver: Member, *, is_copy: bool) -> bool:
    """The leaver's buffer may go, or its host copy (`is_copy`): the version stays without it."""
    version, key, rank = record.version, leaver.layout_key, _rank(leaver, record.version)
    has_another = leaver.will_hold(version) if is_copy else leaver.has_whole_copy(version)
    if has_another and not leaver.report.closing:
        return True
    if version in model.glance().outliving and leaver.worker.replica != record.publisher:
        if _keeper(state, record, leaver) is not leaver:
            return True

        def is_before(other: Member) -> bool:
            return _keeps(other, record) and (leaver.report.closing or _rank(other, version) < rank)

        return layouts.is_in_another_layout(state, model, record, key, is_before)
    needs_reliable = leaver.hello.reliable and not _is_left_to_spot(state, model, record, leaver)

    def counts(other: Member) -> bool:
        if other is leaver or other.report.closing or (needs_reliable and not other.hello.reliable):
            return False
        is_before = leaver.report.closing or _rank(other, version) < rank
        if other.will_hold(version):
            return True
        if other.has_whole_copy(version):
            return is_before or not is_copy
        return is_before and not is_copy and other.holds_until_told(version)

    whole, reliable = record.whole.get(key, {}), model.reliable.get(key, {})
    for worker in reliable if needs_reliable else whole:
        if worker in whole and counts(state.known(worker)):
            return True
    return layouts.is_in_another_layout(state, model, record, key, counts)


def _keeper(state: State, record: VersionRecord, leaver: Member) -> Member:
    """The one worker outside the publisher that keeps the leaver's shard of the established version; itself, if none.

    It stays the same as long as it can: the others may go at once, and need no memory for a copy.
    """
    key, version = leaver.layout_key, record.version
    worker = record.keepers.get(key)
    keeper = state.members.get(worker) if worker is not None else None
    if keeper is None or not _keeps(keeper, record):
        able = [each for each in map(state.members.get, record.whole.get(key, {})) if each and _keeps(each, record)]
        keeper = min(able, key=lambda each: _rank(each, version), default=leaver)
    elif _keeps(leaver, record) and _has_room(leaver, version) and not _has_room(keeper, version):
        keeper = leaver
    record.keepers[key] = keeper.worker
    return keeper


def _keeps(member: Member, record: VersionRecord) -> bool:
    """It is outside the publisher, and has the version until it is told that it may give it up."""
    return member.worker.replica != record.publisher and member.will_keep(record.version)


def _rank(member: Member, version: Version) -> tuple[bool, bool, WorkerId]:
    """Which one keeps a version that several leave: the first one by name, of those that have room for a copy."""
    return not _has_room(member, version), not member.hello.reliable, member.worker


def _has_room(member: Member, version: Version) -> bool:
    """It has a host copy of the version, whole or not, or may make one."""
    if member.copy(version) is not None:
        return True
    return bool(member.report.copies_left) and member.report.copy_error is None


# --- A worker that withdraws a version, or closes.


def must_stay(state: State, model: Model, member: Member) -> bool:
    """The worker's buffer has the last shard of a version that is kept, and that can still be saved."""
    buffer, error = member.content.buffer, member.report.copy_error
    if not isinstance(buffer, Withdrawing) or not _is_to_be_kept(model, member, buffer.version):
        return False
    if error is not None and error.code == "corrupt-transfer":
        return False  # its tensors were changed while they were published: there is nothing left to keep
    record = model.look_up(buffer.version)
    if _is_kept_by_others(state, model, record, member, is_copy=False):
        return False
    if member.report.closing:
        return not buffer.impatient and _awaits_heirs(state, model, record, member)
    if _has_room(member, record.version) or _makes_room(state, member):
        return True
    if any(not copy.whole for copy in member.content.copies):
        return True  # what it fetches ahead gives way
    if not layouts.is_whole(state, model, record):
        return False
    return _insists(state, model, member, record.version) or _is_another_on_its_way(state, model, member, record)


def _insists(state: State, model: Model, member: Member, version: Version) -> bool:
    """It fails its caller's call rather than to lose the version. No rollout's `retain` stops a trainer."""
    return member.hello.reliable and facts.is_retained(state, model, member, version)


def _makes_room(state: State, member: Member) -> bool:
    """A host copy is on its way out, or may be when a server that has restarted releases copies again."""
    copies = member.content.copies
    is_going = any(copy.dropping or copy.number in member.releasing for copy in copies)
    return is_going or (state.models[member.hello.model].is_listening and bool(copies))


def _is_another_on_its_way(state: State, model: Model, leaver: Member, record: VersionRecord) -> bool:
    """Another replica gets a newer version: the leaver has no room, and waits until that one is established.

    It waits for none that waits itself and comes before it in the order: they would wait for each other.
    """
    rank = _rank(leaver, record.version)
    for replica in model.replicas.values():
        call = replica.call
        if call is None or call.is_over or call.verb not in facts.FILLS or replica.name == leaver.hello.replica:
            continue
        others = [state.known(worker) for worker in replica.members.values()]
        waits = any(_wants_to_leave(other, record.version) and _rank(other, record.version) < rank for other in others)
        if call.version is not None and call.version > record.version and not replica.missing() and not waits:
            return True
    return False


def _wants_to_leave(member: Member, version: Version) -> bool:
    return isinstance(member.content.buffer, Withdrawing) and member.holds_until_told(version)


def updates_last(state: State, model: Model, member: Member) -> bool:
    """The member reads nothing until another replica has the newer version, because it has no room for a copy."""
    version = version_to_offload(state, model, member)
    return version is not None and not _has_room(member, version) and not _makes_room(state, member)


def version_to_offload(state: State, model: Model, member: Member) -> Version | None:
    """The version that the member copies to its host memory before its buffer may change."""
    buffer = member.content.buffer
    if not isinstance(buffer, Withdrawing) or member.report.closing or member.may_drop:
        return None
    return buffer.version if must_stay(state, model, member) else None


def why_stuck(state: State, model: Model, member: Member) -> Failure | None:
    """Why the version that it wants to leave, and may not, cannot be offloaded; None where it can or need not."""
    report, version = member.report, version_to_offload(state, model, member)
    if version is None or not _insists(state, model, member, version) or _has_room(member, version):
        return None
    if report.copy_error is not None:
        return report.copy_error
    buffer, copies = member.content.buffer, member.content.copies
    is_impatient = isinstance(buffer, Withdrawing) and buffer.impatient
    if _makes_room(state, member) or (not is_impatient and _needless(state, model, member)):
        return None  # there will be room, perhaps when readers of an unused copy are done
    kept = ", ".join(str(copy.version) for copy in copies) or "none"
    text = (
        f"{member.worker} is the last reliable holder of version {version} of {model.name}, "
        f"and its limit on host memory allows no further copy of {report.size_bytes} B (it has: {kept})"
    )
    if member.hello.retain > state.settings.default_retain:
        text = f"{text}; it was opened with retain={member.hello.retain}"
    return Failure("host-memory-full", text, "raise host_bytes, unpin a version, or add reliable replicas")


# --- Which workers fetch a copy of what only closing workers have: the heirs.
#
# One worker of the same layout that has room; reliable workers first, and those whose reads have failed last. Where no
# worker of that layout can, one for each shard of another layout. A closing worker does not wait where there is none.


MAX_LOOKED_AT = 256  # workers of one layout key: if none of these has room, another one hardly has


def is_heir(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It has to fetch the version from a closing worker."""
    seen: dict[tuple[LayoutKey, bool], None] = {}
    for worker in model.closing:
        leaver = state.members.get(worker)
        kind = (leaver.layout_key, leaver.hello.reliable) if leaver is not None else None
        if leaver is None or kind is None or kind in seen or worker not in record.whole.get(leaver.layout_key, {}):
            continue
        seen[kind] = None
        if not _is_to_be_kept(model, leaver, record.version):
            continue
        if _is_kept_by_others(state, model, record, leaver, is_copy=False):
            continue
        heirs = _heirs(state, model, record, leaver)
        if any(heir is member for heir in heirs) and _awaits(state, model, leaver, heirs):
            return True
    return False


def _awaits_heirs(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """Workers are to take the version over."""
    heirs = _heirs(state, model, record, leaver)
    return bool(heirs) and _awaits(state, model, leaver, heirs)


def _awaits(state: State, model: Model, leaver: Member, heirs: list[Member]) -> bool:
    """A closing worker waits for these: for spot workers for a while only, and for none that cannot read it."""
    failed = [heir.tries.sources.get(leaver.worker) for heir in heirs]
    if any(each is not None and each.is_for_good for each in failed):
        return False
    return all(heir.hello.reliable for heir in heirs) or state.now < awaits_spot_until(state, model, leaver)


def awaits_spot_until(state: State, model: Model, leaver: Member) -> float:
    """How long a closing worker waits for a spot worker."""
    return model.closing.get(leaver.worker, state.now) + state.settings.spot_handover_s


def _heirs(state: State, model: Model, record: VersionRecord, leaver: Member) -> list[Member]:
    key = leaver.layout_key
    own = _best_heir(state, model, record, key)
    if own is not None and not own.turns_lost:
        return [own]
    for layout_set in model.layout_sets if layouts.is_readable(record, key) else ():
        found = _heirs_in(state, model, record, layout_set) if key not in layout_set else []
        if found:
            return found
    return [own] if own is not None else []


def _heirs_in(state: State, model: Model, record: VersionRecord, layout_set: LayoutSet) -> list[Member]:
    """A worker for each shard of that layout that is not kept; none where a shard has no worker that can."""
    found = []
    for key in layout_set:
        if any(_has_it_to_stay(state.members.get(worker), record.version) for worker in record.whole.get(key, {})):
            continue
        heir = _best_heir(state, model, record, key)
        if heir is None or not any(layouts.readable_layout_sets(model, record, key)):
            return []
        found.append(heir)
    return found


def _best_heir(state: State, model: Model, record: VersionRecord, key: LayoutKey) -> Member | None:
    reliable = [state.known(worker) for worker in list(model.reliable.get(key, {}))[:MAX_LOOKED_AT]]
    able = [each for each in reliable if _may_inherit(model, each, record)]
    if not any(not each.turns_lost for each in able):
        others = [each for each, _ in zip(facts.members_of(state, model, key), range(MAX_LOOKED_AT), strict=False)]
        able += [each for each in others if not each.hello.reliable and _may_inherit(model, each, record)]
    return min(able, key=lambda each: _order(each, record), default=None)


def _may_inherit(model: Model, member: Member, record: VersionRecord) -> bool:
    """It stays, what it has counts, and it gets the version already, or has room for a copy, or will soon have it."""
    if not _is_to_be_kept(model, member, record.version):
        return False
    if _has_it_to_stay(member, record.version) or member.report.closing or not layouts.may_fit(model, record, member):
        return False
    is_going = any(copy.dropping or copy.number in member.releasing for copy in member.content.copies)
    return _gets_it(member, record) or (member.is_connected and (bool(member.report.copies_left) or is_going))


def _gets_it(member: Member, record: VersionRecord) -> bool:
    """It has begun a host copy, or fills its buffer with the version."""
    buffer = member.content.buffer
    is_filling = isinstance(buffer, Filling) and buffer.version == record.version and member.is_connected
    return is_filling or member.copy(record.version) is not None


def _order(member: Member, record: VersionRecord) -> tuple[object, ...]:
    """The order among heirs; the first one fetches the copy."""
    return member.turns_lost, not member.hello.reliable, not _gets_it(member, record), member.worker


def _is_left_to_spot(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """The leaver closes, and no reliable worker can take the version over."""
    if not leaver.report.closing:
        return False
    heir = _best_heir(state, model, record, leaver.layout_key)
    return heir is None or not heir.hello.reliable


# --- What a publisher copies before it has to: the version that it holds, where no other reliable worker may have it.
#
# It would have to copy at its next withdrawal, while its caller waits. It has one copy at a time.


def _version_to_copy_ahead(model: Model, member: Member) -> Version | None:
    """The version that the member copies, or has copied, while it holds it."""
    buffer, report = member.content.buffer, member.report
    if not isinstance(buffer, Holding) or not buffer.published or not member.hello.reliable or report.closing:
        return None
    if buffer.version not in model.glance().anywhere or layouts.has_company(model, member):
        return None
    if report.copy_error is not None or any(copy.version != buffer.version for copy in member.content.copies):
        return None
    spare = 1 if report.prefetch is not None else 0  # room for what its caller wants
    return buffer.version if member.copy(buffer.version) is not None or report.copies_left > spare else None


# --- What each worker is to offload, to fetch and to release. A copy that was once released never counts again.


def version_to_copy(state: State, model: Model, member: Member) -> Version | None:
    """The version that the member copies to host memory now, after it has dropped others."""
    if model.is_listening:
        return None
    offload = version_to_offload(state, model, member)
    return offload if offload is not None else _version_to_copy_ahead(model, member)


def copies_to_let_go(state: State, model: Model, member: Member) -> tuple[int, ...]:
    """Its host copies, by number, that are not needed any more and have no reader, and none to come.

    Of one that is cut off it is not known what it still wants: nothing is fetched ahead for it, and all would go.
    There is no way back.
    """
    copies = member.content.copies
    if not copies or model.is_listening or not facts.is_here(state, member):
        return ()
    return tuple(
        copy.number
        for copy in _needless(state, model, member)
        if not _is_read(state, member, copy) and not _is_promised(state, model, member, copy)
    )


def copies_to_release(state: State, model: Model, member: Member) -> tuple[int, ...]:
    """The host copies, by number, that are to go and have no reader any more."""
    if not member.releasing or model.is_listening:
        return ()
    told = [copy for copy in member.content.copies if copy.number in member.releasing]
    return tuple(copy.number for copy in told if not _is_read(state, member, copy))


def _is_read(state: State, member: Member, copy: HostCopy) -> bool:
    return facts.must_wait(state, member, state.reads.from_copy(member.worker, copy.version))


def _needless(state: State, model: Model, member: Member) -> list[HostCopy]:
    """Its host copies that may go when they have no reader. Those that are on their way out are not among them."""
    replica, offload = model.replicas[member.hello.replica], version_to_offload(state, model, member)
    copies = [copy for copy in member.content.copies if not copy.dropping and copy.number not in member.releasing]
    is_full = not member.report.copies_left and not _makes_room(state, member)
    if offload is not None and member.copy(offload) is None and is_full:
        return [copy for copy in copies if not _is_last_copy(state, model, member, copy, is_squeezed=True)]
    return [
        copy
        for copy in copies
        if not _is_used(state, model, replica, member, copy)
        and not _is_last_copy(state, model, member, copy, is_squeezed=False)
    ]


def _is_used(state: State, model: Model, replica: Replica, member: Member, copy: HostCopy) -> bool:
    """Its worker needs it, or is to have it."""
    version, reading = copy.version, state.reads.current.get(member.worker)
    if version in (version_to_offload(state, model, member), _version_to_copy_ahead(model, member)):
        return True
    if reading is not None and reading.grant.to_host and reading.version == version:
        return True
    if facts.wanted_version(replica, member) == version and not member.holds(version) and not copy.unfit:
        return True
    return version == version_to_fetch(state, model, replica, member)


def _is_last_copy(state: State, model: Model, member: Member, copy: HostCopy, *, is_squeezed: bool) -> bool:
    """No other worker keeps the version.

    Without room for what must be kept, a version goes first that only another replica wants kept, and one that seems
    lost.
    """
    record = model.look_up(copy.version)
    if not copy.whole or not _is_to_be_kept(model, member, copy.version):
        return False
    goes_first = facts.gives_way(state, model, member, copy.version) or not layouts.is_whole(state, model, record)
    if (is_squeezed and goes_first) or _is_kept_by_others(state, model, record, member, is_copy=True):
        return False
    return not member.report.closing or _awaits_heirs(state, model, record, member)


def _is_promised(state: State, model: Model, member: Member, copy: HostCopy) -> bool:
    """A replica is to get the version, and would find no other source."""
    record = model.look_up(copy.version)
    if not copy.whole or not record.promised:
        return False
    if any(facts.will_hold(state, worker, record.version) for worker in record.holders.get(member.layout_key, {})):
        return False
    return not layouts.is_in_another_layout(
        state, model, record, member.layout_key, lambda other: other.will_hold(record.version)
    )


def version_to_fetch(state: State, model: Model, replica: Replica, member: Member) -> Version | None:
    """The version that the member fetches into a host copy, if there is room."""
    report = member.report
    if model.is_listening or report.closing or not _may_want_a_copy(model, member):
        return None
    offload = version_to_offload(state, model, member)
    if offload is not None and not _has_room(member, offload):
        return None
    filled = facts.wanted_version(replica, member)
    for version in _wanted_copies(state, model, member):
        record = model.versions.get(version)
        if record is None or not record.exists or (member.will_hold(version) and member.will_keep(version)):
            continue
        if not layouts.may_fit(model, record, member):
            continue
        if member.copy(version) is None and (version == filled or not report.copies_left):
            continue  # the buffer is filled at once, or there is no room
        return version
    return None


def _may_want_a_copy(model: Model, member: Member) -> bool:
    """A worker is closing, its caller or settings ask for it, or it may be elected: else it fetches nothing ahead."""
    if model.closing or member.report.prefetch is not None or member.hello.prefetch == "always":
        return True
    return len(model.sites) > 1 and member.hello.prefetch != "never"


def _wanted_copies(state: State, model: Model, member: Member) -> Iterator[Version]:
    """The versions of which the member should have host copies, the most important first."""
    if model.closing:
        for version in model.retained():
            if is_heir(state, model, model.look_up(version), member):
                yield version
    yield from ahead.wanted_ahead(state, model, member)
