"""Which versions must be kept, and by whose host copies: what each worker is to offload, to fetch and to release.

A version is *retained* while it is among the newest `retain` of its model, or pinned. It has a reference wherever a
reliable worker holds it in its buffer or has a host copy of it, as long as that worker does not want to leave for good.

Rules:
- Where there is no room, a version goes that only another replica wishes kept (`retain`): no rollout stops a trainer.
- Where there is no room, a version of which a shard seems to be gone goes first. Not while its worker's replica lacks a
  shard, which may only be cut off.
- The last reference does not leave before its worker has offloaded the version to its own host memory. Where that is
  full, a copy gives way that is not whole yet. Of several workers that leave together only the first by name has to;
  the others may go as long as that one was not let go.
- A worker that closes cannot keep what it has: its *heirs* fetch a copy (`heirs`).
- A copy is released when a buffer holds the version, or a copy that comes first by name exists elsewhere; and nobody
  reads it; and its worker is not about to use it. A copy that was once told to go is never counted again.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ...messages import Failure, HostCopy, Withdrawing
from ...names import Version
from .. import facts
from ..catalog import Model
from ..groups import Replica
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import covered, crossing, election, established, heirs, resting, witness


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
    There is no way back. So in the first lease after a restart only such may go as nobody can want who comes back by
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
    """The host copies, by number, that are to go and that nobody can be reading any more."""
    if not member.releasing or not model.roll.is_over or witness.is_strange(state, member):
        return ()
    told = [copy for copy in member.content.copies if copy.number in member.releasing]
    return tuple(copy.number for copy in told if not _is_read(state, member, copy))


def _is_read(state: State, member: Member, copy: HostCopy) -> bool:
    return facts.must_wait(state, member, state.reads.from_copy(member.worker, copy.version))


def _ahead(state: State, model: Model, member: Member) -> Version | None:
    """What it has to copy ahead, while it holds it: when all leave it at once, nobody may have the time."""
    if established.is_keeper(model, member):
        return model.newest_established
    return resting.version_to_copy(state, model, member) if model.roll.is_over else None


def _not_needed(state: State, model: Model, replica: Replica, member: Member, *, unread: bool = False) -> list[int]:
    """Its host copies, by number, that may go, or have to: one made ahead gives way to one that must be kept.

    Where there is no room, what is not whole goes first.

    `unread`: or may go once nobody reads them, or is to read them.
    """
    copies = [copy for copy in member.content.copies if not copy.leaving]
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
    return [copy for copy in member.content.copies if copy.leaving or copy.number in member.releasing]


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
    if is_squeezed and not covered.is_whole(state, model, record):
        return False
    if member.report.closing:
        return not buffer.impatient and heirs.are_there(state, model, record, member)
    if is_squeezed and not (member.hello.reliable and facts.is_wished(state, model, member, record.version)):
        may_make_room = any(not copy.whole for copy in member.content.copies)
        return may_make_room or established.is_another_on_its_way(state, model, record, member)
    return True


def is_in_doubt(state: State, model: Model, member: Member) -> bool:
    """It has the last reference of what seems lost, and a shard of its replica is away, perhaps with what is missing.

    No call of that replica ends well before that is back, so there is no hurry.
    """
    buffer, replica = member.content.buffer, model.replicas[member.hello.replica]
    if not isinstance(buffer, Withdrawing) or member.report.closing or len(replica.members) == replica.shards:
        return False
    record = model.versions.get(buffer.version)
    if record is None or covered.is_whole(state, model, record) or not _counts(state, model, member, buffer.version):
        return False
    return not _is_kept_elsewhere(state, model, record, member, is_copy=False)


def leaves_last(state: State, member: Member) -> bool:
    """It begins to fill its buffer only when others have the newer version: nobody may wait for it behind its back."""
    buffer = member.content.buffer
    if not isinstance(buffer, Withdrawing) or member.report.closing or not _is_squeezed(buffer.version, member):
        return False
    if member.is_let_go:
        return False  # it was told to go on, and does
    return must_stay(state, state.models[member.hello.model], member)


def waits_for_its_readers(state: State, member: Member, version: Version) -> bool:
    """It has a part of the version at most, and goes on only when others have it all: they must get it elsewhere."""
    is_leaving = isinstance(member.content.buffer, Withdrawing) and member.content.held != version
    return is_leaving and leaves_last(state, member)


def version_to_offload(state: State, model: Model, member: Member) -> Version | None:
    """What it has to copy to its own host memory before its buffer may change."""
    buffer = member.content.buffer
    if not isinstance(buffer, Withdrawing) or member.report.closing or member.is_let_go:
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
    if not (member.hello.reliable and facts.is_wished(state, model, member, version)):
        return None
    if report.copy_error is not None:
        return report.copy_error
    if not _is_squeezed(version, member) or any(copy.leaving for copy in member.content.copies):
        return None
    is_impatient = isinstance(buffer, Withdrawing) and buffer.impatient
    if member.releasing or _not_needed(state, model, replica, member, unread=not is_impatient):
        return None  # room will be made, perhaps when those have it who read what nobody else needs
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
        if member.holds(version) and member.keeps(version):
            continue
        if not crossing.may_fit(model, record, member):
            continue
        copy = member.copy(version)
        if copy is None and (version == filled or not report.copies_left):
            continue  # the buffer is filled at once, or there is no room
        return version
    return None


def _may_want_a_copy(model: Model, member: Member) -> bool:
    """Somebody closes, its caller or its settings wish it, or it may be elected: else it fetches nothing ahead."""
    if model.closing or member.report.prefetch is not None or member.hello.prefetch == "always":
        return True
    return len(model.sites) > 1 and member.hello.prefetch != "never"


def _wanted_copies(state: State, model: Model, member: Member) -> Iterator[Version]:
    """What it should have a host copy of, the most important first."""
    if model.closing:
        for version in model.retained():
            if heirs.is_one(state, model, model.look_up(version), member):
                yield version
    yield from election.wanted_ahead(state, model, member)


def _counts(state: State, model: Model, member: Member, version: Version) -> bool:
    """Its reference keeps the version: it is reliable, or nobody reliable has it who could keep it instead."""
    if version not in model.retained():
        return False
    return member.hello.reliable or not established.has_reliable_holder(state, model, model.look_up(version), member)


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

    for worker in model.staying.at(version, leaver.line):
        if (is_copy or worker != leaver.worker) and is_relied_on(state.known(worker)):
            return True
    for worker in record.holders.get(leaver.line, {}):
        member = state.members.get(worker)
        if member is None or not is_relied_on(member):
            continue
        is_self, comes_first = worker == leaver.worker, worker < leaver.worker or leaver.report.closing
        if member.has_whole_copy(version) and (not is_copy or (comes_first and not is_self)):
            return True
        buffer = member.content.buffer
        is_keeper = isinstance(buffer, Withdrawing) and buffer.version == version and not member.is_let_go
        if not is_copy and not is_self and is_keeper and comes_first:
            return True

    def counts(member: Member) -> bool:
        if member is leaver or not is_relied_on(member):
            return False
        return member.stays(version) or member.has_whole_copy(version)

    return covered.by_another_cut(state, model, record, leaver.line, counts)


def _is_the_copy(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It is the one copy of the newest established version, made ahead."""
    if member.report.closing or member.worker.replica in record.publishers:
        return False
    if not _counts(state, model, member, record.version) or _is_in_the_way(state, model, record, member):
        return False
    for worker in record.whole.get(member.line, {}):
        other = state.members.get(worker)
        if other is None or not other.has_whole_copy(record.version):
            continue
        comes_first = (not other.hello.reliable, worker) < (not member.hello.reliable, member.worker)
        if comes_first and established.may_keep(state, model, record, other):
            return False
    return True


def _is_in_the_way(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """There is no room for what is fetched ahead, which comes before what is copied ahead."""
    if member.report.copies_left or not member.stays(record.version):
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
    if resting.is_used(state, model, member, version) and not _is_in_the_way(state, model, record, member):
        return True
    if not copy.whole:
        return False
    is_kept = _is_kept_elsewhere(state, model, record, member, is_copy=True, is_publisher_enough=is_squeezed)
    is_last = _counts(state, model, member, version) and not is_kept
    is_there = covered.is_whole(state, model, record) or len(replica.members) < replica.shards
    is_firm = not is_squeezed or (not facts.gives_way(state, model, member, version) and is_there)
    if is_last and is_firm:
        return not member.report.closing or heirs.are_there(state, model, record, member)
    if not record.promised or unread:
        return False
    if any(facts.holds_on(state, worker, version) for worker in record.holders.get(member.line, {})):
        return False
    return not covered.by_another_cut(state, model, record, member.line, lambda other: other.holds_on(version))
