"""Which version is safe enough to be the only one left: the newest *established* one.

A version is established once each of its shards has been whole outside the replicas that published it: in a reliable
worker if any lives there, else in a spot one. Who was told that it may give the version up does not count: it may do so
before anybody hears of it. Nor does who closes, or wants to give it up without room for a copy: nothing would be
established once it is gone. The newest established version is retained until a newer one is established, however old it
is: what was published since may go with its publisher.

One worker of each shard pays for that, all of one replica where they can. Ahead of need, while it holds the version
and its caller computes, it copies it to host memory. Where there was no time, it does so before it leaves the version.
Where there is no room, it leaves the version after the others.
"""

from collections.abc import Iterator

from ...messages import Holding, Withdrawing
from ...names import Version, WorkerId
from .. import facts
from ..catalog import Model
from ..groups import GroupCall, Replica
from ..keepers import Rank
from ..lines import Cut
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import covered


def newly_established(state: State, model: Model) -> list[VersionRecord]:
    """Of the versions of which somebody has got or lost all: those established now that were not before."""
    changed = [model.versions.get(version) for version in model.changed]
    found = [record for record in changed if record is not None and record.exists and not record.is_established]
    return [record for record in found if _is_whole_outside(state, model, record)]


def _is_whole_outside(state: State, model: Model, record: VersionRecord) -> bool:
    return any(_is_cut_outside(state, model, record, cut) for cut in model.known_cuts())


def _is_cut_outside(state: State, model: Model, record: VersionRecord, cut: Cut) -> bool:
    for line in cut:
        reliable = model.reliable.get(line, {})
        needs_reliable = any(w.replica not in record.publishers and w not in model.closing for w in reliable)
        if not any(
            _has_it_to_stay(state, model, worker, record.version)
            for worker in record.whole.get(line, {})
            if worker.replica not in record.publishers and (worker in reliable or not needs_reliable)
        ):
            return False
    return True


def _has_it_to_stay(state: State, model: Model, worker: WorkerId, version: Version) -> bool:
    """It keeps the version until it is told otherwise, and will not be told so for want of room."""
    member = state.members.get(worker)
    if member is None or not member.keeps(version):
        return False
    if member.holds_on(version) or member.copy(version) is not None or member.report.copies_left:
        return True
    return member.hello.reliable and facts.is_wished(state, model, member, version)  # then it waits for room


def _is_all_outside(model: Model, record: VersionRecord) -> bool:
    """Somebody has each shard, beside its publishers, whether anybody relies on him or not."""
    return any(
        all(any(worker.replica not in record.publishers for worker in record.whole.get(line, {})) for line in cut)
        for cut in model.known_cuts()
    )


def has_reliable_holder(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """Somebody reliable keeps the leaver's shard.

    For the newest established version, outside its publishers: it outlives them.
    """
    reliable = model.reliable.get(leaver.line, {})
    must_be_outside = record.version in model.glance().outliving and leaver.worker.replica not in record.publishers
    for worker in record.whole.get(leaver.line, {}):
        if worker not in reliable or (must_be_outside and worker.replica in record.publishers):
            continue
        member = state.members.get(worker)
        if member is not None and member.keeps(record.version):
            return True

    def counts(member: Member) -> bool:
        is_inside = must_be_outside and member.worker.replica in record.publishers
        return member.hello.reliable and not is_inside and member is not leaver and member.keeps(record.version)

    return covered.by_another_cut(state, model, record, leaver.line, counts)


def is_keeper(model: Model, member: Member) -> bool:
    """It holds the newest established version, and of those that do it is the one to make a copy ahead of need."""
    buffer = member.content.buffer
    if not isinstance(buffer, Holding) or buffer.version != model.newest_established:
        return False
    keepers = model.look_up(buffer.version).keepers.get(member.line)
    return keepers is not None and keepers.chosen == member.worker


def may_keep(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It has all of the version and could make a copy of it ahead of need."""
    if member.worker not in record.whole.get(member.line, {}):
        return False
    return _may_keep(state, model, record, member)


def _may_keep(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
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
    """Among those that could make a copy ahead of need."""
    return not member.hello.reliable, member.copy(record.version) is None, member.worker


def is_another_on_its_way(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """Another replica is leaving this version for a newer one, or has left it: it has that one before this one must.

    Nobody is waited for once all of what this one wants is outside its publishers, in one replica or in several: two
    of them that have half of it each would wait for each other. For the same reason a replica of which a shard has left
    waits for none that is to get an older version than itself, and for none that is cut in another way: it was to go
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
    """Of another replica: who is of its line; where that is cut in another way all of them, unless it is half there.

    Halves of one cut add up to a version, those of two cuts do not. So a shard that never comes to its call is waited
    for as long as one that died.
    """
    is_half = call.waiting is not None and state.now >= call.began + state.settings.lease_s
    is_other_cut = replica.cut is not None and member.line not in replica.cut
    counts_all = is_other_cut and member.line.is_boxed and not has_begun and not is_half
    for other in _members(state, replica):
        if other.line == member.line or (counts_all and other.line.is_boxed):
            yield other


def _members(state: State, replica: Replica) -> Iterator[Member]:
    for worker in replica.members.values():
        if worker in state.members:
            yield state.members[worker]


def _has_left(member: Member, record: VersionRecord) -> bool:
    buffer = member.content.buffer
    return member.is_let_go or not isinstance(buffer, (Holding, Withdrawing)) or buffer.version != record.version


def _is_on_its_way(record: VersionRecord, replica: Replica, member: Member, other: Member) -> bool:
    if not other.is_connected or other.report.closing:
        return False
    wanted = facts.wanted_version(replica, other)
    if wanted is None or wanted <= record.version:
        return False
    return _has_left(other, record) or other.worker > member.worker  # of those that withdraw it the first by name stays
