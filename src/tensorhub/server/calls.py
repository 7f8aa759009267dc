"""Rules: how a group call is resolved to a version, what it waits for, and when it ends."""

from collections.abc import Iterable
from math import ceil, inf

from msgspec.structs import replace

from ..protocol import events
from ..protocol.messages import (
    CLAIMED,
    PREFETCHED,
    Answer,
    CallReport,
    Empty,
    Failure,
    Filling,
    Holding,
    Poisoned,
    Report,
    Spec,
    Step,
    TicketFailure,
    Vacated,
    Withdrawing,
)
from ..protocol.names import Digest, ModelName, ReplicaName, Shard, Version, WorkerId, is_tiled
from ..protocol.status import HeldView
from . import admission, apply, content, layouts, retention, slow
from . import reads as across
from . import state as facts
from .groups import GroupCall, Replica, place_of, some_shards
from .journal import Published
from .members import NEWS, WHOLE, LayoutKey, Member, held_in, version_in
from .state import State
from .versions import Model, VersionRecord

# --- Which version a call means by now. An update never goes back: not behind what is held, nor what was held before.
#
# What was held before counts where a call is made once more: the version that it was to bring was lost after a part
# of it had been written over the former one. Its caller still waits in one and the same call.


def meant_by(
    state: State, model: Model, replica: Replica, call: GroupCall
) -> tuple[Version, None] | tuple[None, Failure]:
    """The version, or why there is none now."""
    held = _held_by_all(state, replica, call)
    if call.spec == PREFETCHED:
        version, failure = _prefetched(state, model, replica, held)
    else:
        version, failure = model.resolve(call.spec)
    if call.verb == "update" and held is not None and is_enough(call.spec, held, version):
        return held, None
    if version is None:
        assert failure is not None
        return None, failure
    floor = _had_by_all(state, replica, call)
    if floor is None or version >= floor:
        return version, None
    newer = [each for each in model.available() if each >= floor]
    if newer:
        return newer[-1], None
    return None, all_older(model, replica, floor)


def all_older(model: Model, replica: Replica, floor: Version) -> Failure:
    """Why an update finds no version."""
    text = f"nothing as new as version {floor} of {model.name} is left, which {replica.name} had when it called"
    hint = 'an update never goes back; replicate("latest") takes what there is'
    return Failure("version-unavailable", text, hint)


def is_known(state: State, replica: Replica, call: GroupCall) -> bool:
    """What each shard of the replica holds, or can hold again, is known.

    It is not where one is gone, or still fills its buffer for a call before this one: when it has heard how that one
    ended, it may have all of the version after all.
    """
    members = [state.members.get(worker) for worker in replica.members.values()]
    return len(members) == replica.shards and not any(_still_fills(call, member) for member in members)


def is_older(state: State, replica: Replica, call: GroupCall, version: Version) -> bool:
    """The version is older than what some shard had. All must have come before it is sure that they had different ones.

    A shard that is about to make its call once more holds what that call has brought until it comes, or nothing. Only
    then it says what it had.
    """
    return any(each is not None and each > version for each in _had(state, replica, call))


def _still_fills(call: GroupCall, member: Member | None) -> bool:
    if member is None or not isinstance(member.content.buffer, Filling):
        return False
    told = member.report.call
    return told is None or told.number < call.number


def is_enough(spec: Spec, held: Version, version: Version | None) -> bool:
    """What is held needs no update: nothing newer was asked for, or there is nothing newer."""
    if version is None and isinstance(spec, int):
        return held >= spec  # a number that was never published is not to be had, whatever is held
    return version is None or held >= version


def _prefetched(
    state: State, model: Model, replica: Replica, held: Version | None
) -> tuple[Version | None, Failure | None]:
    """The newest version of which each shard of the replica has a whole copy; or what they hold; or the latest."""
    members = [state.known(worker) for worker in replica.members.values()]  # all of them: it is of an update
    for version in sorted(model.versions, reverse=True):  # a version with a whole copy exists
        if all(member.can_fill_itself(version) for member in members):
            return version, None
    return (held, None) if held is not None else model.resolve("latest")


def _held_by_all(state: State, replica: Replica, call: GroupCall) -> Version | None:
    """The version that each shard of the replica holds, if it is one."""
    members = [state.members.get(worker) for worker in replica.members.values()]
    held = [_held(replica, call, member) if member is not None else None for member in members]
    return held[0] if len(held) == replica.shards and held.count(held[0]) == len(held) else None


def _held(replica: Replica, call: GroupCall, member: Member) -> Version | None:
    """What it holds, or can hold again: nothing has been written over it yet.

    It had withdrawn for a call before this one, which did not end well. Where it has come to this call since, that says
    what it held when it came.
    """
    buffer, told = member.content.buffer, member.report.call
    if isinstance(buffer, Holding):
        return buffer.version
    if not isinstance(buffer, Withdrawing | Vacated):
        return None
    is_former = told is None or replica.finished < told.number < call.number
    is_this = told is not None and told.number == call.number and told.floor == buffer.version
    return buffer.version if is_former or is_this else None


def _had_by_all(state: State, replica: Replica, call: GroupCall) -> Version | None:
    """The version that each shard of the replica held when its caller began to wait, if it is one."""
    had = _had(state, replica, call)
    return had[0] if len(had) == replica.shards and had.count(had[0]) == len(had) else None


def _had(state: State, replica: Replica, call: GroupCall) -> list[Version | None]:
    """What each of its shards held when its caller began to wait. One that has not come yet counts by what it holds.

    Unless it makes its call once more: see `is_older`.
    """
    had = []
    for worker in replica.members.values():
        member = state.members.get(worker)
        asked = member.report.call if member is not None else None
        if asked is not None and asked.number == call.number:
            had.append(asked.floor)
        else:
            had.append(_held(replica, call, member) if member is not None else None)
    return had


def may_come(model: Model, number: int) -> bool:
    """Numbers only rise: one that a newer one has passed by is never published."""
    return model.newest is None or model.newest < number


# --- How a group call goes forward: what it resolves to, what it waits for, when it is over.
#
# `advance` takes one step after another: the next follows from what the one before has changed.


TRIES = 3  # a source that lives may fail a reader so often before it is given up: a link reset, a restart
STATUS_SAYS = "see `tensorhub status` for who holds it"
HOPELESS = {  # another source would not help; what would, where that is known
    "layout-mismatch": "register the same names, dtypes and global shapes on both sides; partial=True leaves some out",
    "version-conflict": "a part that several shards or boxes have is the same in all of them when it is published",
    "usage": "",
    "transport-missing": "",
}


def advance(state: State, model: Model, replica: Replica, call: GroupCall) -> None:
    """Take the call as far as the facts allow."""
    if call.is_over:
        return
    if call.pending and _still_in(state, replica, call, call.arrived):
        for shard, root in call.pending.items():
            call.arrived[shard] = root
            state.mark_dirty(replica.members[shard])
        call.pending = {}
    if call.differing:
        difference = _why_different(state, replica, call)
        if difference is not None:
            call.fail(difference)
            return
    missing = _missing(replica)
    if missing != call.waiting:
        call.waiting = missing
    if missing is not None:
        incomplete, look_again_at = _why_incomplete(state, replica, call)
        if incomplete is not None:
            call.fail(incomplete)
            return
        if look_again_at < inf:
            for shard in call.arrived:
                waiting = state.members.get(replica.members[shard]) if shard in replica.members else None
                if waiting is not None:
                    state.members.wake(waiting, look_again_at)
    if call.verb in facts.FILLS:
        _advance_fill(state, model, replica, call)
    elif call.claim is not None and call.waiting is None and not call.is_resolved_here:
        _advance_claim(state, model, replica, call, call.claim)
    elif call.verb == "publish":
        _advance_publish(state, model, replica, call)
    stuck = _why_stuck(state, model, replica) if not call.is_over and not model.is_listening else None
    if stuck is not None:
        _give_up(replica, call, stuck)
    if not call.is_over and _is_done(state, replica, call):
        _finish(state, model, replica, call)


def _finish(state: State, model: Model, replica: Replica, call: GroupCall) -> None:
    """It has ended well on all shards."""
    call.finish()
    state.waited.append((call.kind, max(0.0, state.now - call.began)))
    replica.finished = max(replica.finished, call.number)
    if call.version is not None:
        apply.note_filled(state, model, replica)
    if call.verb == "publish" and call.version is not None:
        record = model.record(call.version)
        if model.note_exists(record):
            record.exists_since = state.now
            state.mark_waiting_dirty(model, NEWS)
            state.events.append(_published(state, model, replica, record))
            state.journal.append(Published(model.name, record.version, record.epoch, replica.name))


def _published(state: State, model: Model, replica: Replica, record: VersionRecord) -> events.Published:
    reports = [state.known(worker).report for worker in replica.members.values()]
    publishes = [publish_of(each) for each in reports]
    hash_s = max((each.hash_s for each in publishes if each is not None), default=0.0)
    size_bytes = sum(each.size_bytes for each in reports)
    return events.Published(
        model=model.name, replica=replica.name, version=record.version, size_bytes=size_bytes, hash_s=hash_s
    )


def _missing(replica: Replica) -> Failure | None:
    missing, call = replica.missing(), replica.call
    if not missing or call is None:
        return None
    absent = [shard for shard in missing if Shard(shard) not in call.pending]
    text = f"{replica.name} waits for shard {some_shards(absent)} of {replica.shards} to call {call}"
    if replica.missed is not None and replica.missed[0] in absent:
        text = f"{text} again, since it could not before: {replica.missed[1].message}"
    if not absent:
        text = f"{replica.name} waits to hear that shard {some_shards(list(call.arrived))} is still in {call}"
    if call.differing:
        text = f"{text}; {call.difference(replica.name)}"
    return Failure("group-incomplete", text, "is every shard running, and making the same calls?")


def is_asked(replica: Replica, member: Member) -> bool:
    """It is not certain that all shards at a position are there together; this one is to say whether it still is."""
    call = replica.call
    if call is None or not call.is_doubted:
        return False
    return (member.shard in call.arrived or member.shard in call.differing) and member.report.seen <= call.doubted


def _why_different(state: State, replica: Replica, call: GroupCall) -> Failure | None:
    """Shards are in different calls at one position, and that is certain: one of each side was asked, and still is."""
    arrived, differing = [_still_in(state, replica, call, shards) for shards in (call.arrived, call.differing)]
    if not arrived or not differing:
        return None
    text = call.difference(replica.name)
    if all(member.report.ended == call.number - 1 for member in (*arrived, *differing)):
        return Failure("group-mismatch", text, "all shards of a replica make the same calls in the same order")
    return Failure("group-incomplete", f"{text}, and not all of them made the call before", "retry on all shards")


def _still_in(state: State, replica: Replica, call: GroupCall, shards: Iterable[Shard]) -> list[Member]:
    """The members at that position that have heard which shards have come there."""
    found = [state.members.get(replica.members[shard]) for shard in shards if shard in replica.members]
    return [each for each in found if each is not None and each.report.seen > call.doubted and _is_in(each, call)]


def _is_in(member: Member, call: GroupCall) -> bool:
    return member.report.call is not None and member.report.call.number == call.number


def _why_incomplete(state: State, replica: Replica, call: GroupCall) -> tuple[Failure | None, float]:
    """Why a shard that has not come is not expected any more; or when to ask again.

    A shard that lives may take its time.
    """
    hint, absent = "see that every shard runs, then call again on all of them", []
    for shard in replica.missing():
        worker = replica.members.get(Shard(shard))
        member = state.members.get(worker) if worker is not None else None
        if member is None:
            absent.append(shard)
        elif member.report.closing:
            text = f"shard {shard} of {replica.name} is being closed, and does not come to {call}"
            return Failure("group-incomplete", text, hint), inf
    if not absent:
        return None, inf
    patience_s = state.settings.lease_s
    until = max(call.began, state.recovered_at) + patience_s
    if state.now >= until:
        text = f"shard {some_shards(absent)} of {replica.name} was not there within {patience_s:.3g} s of {call}"
        return Failure("group-incomplete", text, hint), inf
    return None, until


def _why_stuck(state: State, model: Model, replica: Replica) -> Failure | None:
    """Why a shard may never leave the version that it holds, as this call wants."""
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is None or not isinstance(member.content.buffer, Withdrawing):
            continue
        failure = retention.why_stuck(state, model, member)
        if failure is not None:
            return failure
    return None


def _is_done(state: State, replica: Replica, call: GroupCall) -> bool:
    if (call.claim is not None and call.version is None) or (call.verb == "publish" and not call.is_resolved_here):
        return False
    for shard in range(replica.shards):
        worker = replica.members.get(Shard(shard))
        member = state.members.get(worker) if worker is not None else None
        if member is None or Shard(shard) not in call.arrived or not _is_in(member, call):
            return False
        buffer = member.report.buffer if call.verb == "unpublish" else member.content.buffer
        if call.verb == "unpublish":
            if not isinstance(buffer, (Empty, Vacated, Poisoned)) or facts.is_read_though_poisoned(buffer):
                return False
        elif (
            not isinstance(buffer, Holding)
            or buffer.version != call.version
            or (call.verb == "publish" and buffer.epoch != call.epoch)
        ):
            return False
    return True


# --- calls that a shard ends by itself, because a sibling has come past them without the server ----------------------


def answer_passed(state: State, model: Model, replica: Replica, member: Member) -> Answer | None:
    """The answer to a call that a sibling is past."""
    past, call = passed_by(state, model, replica, member), member.report.call
    return Answer(call.number, past=replace(past, publish=None)) if past is not None and call is not None else None


def passed_by(state: State, model: Model, replica: Replica, member: Member) -> Step | None:
    """How far a sibling has come that is past this shard's call. None: the call is one of the whole replica."""
    call, come = member.report.call, replica.come
    group = replica.find(call.number) if call is not None else None
    if call is None or come is None or (group is not None and group.is_finished):
        return None
    if call.verb in facts.FILLS:
        is_new = not member.report.ended  # it was not there, and comes after that
        return Step(alone=replica.alone) if call.number <= replica.alone and not is_new else None
    held, own = held_in(member.report.buffer), replica.steps.get(member.shard, Step())
    is_behind, place = own.place < come.place, place_of(call, held)
    may_be_there = place == come.place or not place  # an unpublish of nothing may be any
    if (place or come.place) > come.place or (may_be_there and replica.is_there(call, come.place)):
        return None
    if call.verb == "publish":
        is_judged = model.newest is not None and int(call.spec) <= model.newest
        return come if not is_judged and (is_behind or come.publish is not None) else None
    if call.claim is not None and admission.why_not_writer(state, model, replica) is not None:
        return None
    return come if is_behind else None


# --- publish ----------------------------------------------------------------------------------------------------------


def _advance_publish(state: State, model: Model, replica: Replica, call: GroupCall) -> None:
    if call.is_resolved_here or call.waiting is not None:
        return
    if model.is_listening:
        call.waiting = admission.recovering(state)
        return
    if len({call.grids.get(shard) for shard in call.arrived}) > 1:
        text = f"the shards of {replica.name} divided {call} into different tiles: layouts have come or gone meanwhile"
        call.fail(Failure("group-incomplete", text, "publish again on all shards"))
        return
    version, roots = Version(int(call.spec)), facts.roots_of(state, replica, call)
    conflict = admission.why_not_writer(state, model, replica)
    is_known = call.version is not None  # it was resolved by a server before this one, or for a former session
    conflict = conflict or (
        model.why_late(version, call.epoch)
        if is_known
        else model.conflict(replica, version, roots, _former_of(state, replica))
    )
    if conflict is not None:
        _refuse(state, model, replica, call, conflict)
    else:
        _accept_publish(state, model, replica, call, version)


def _former_of(state: State, replica: Replica) -> Digest:
    """What a replica of one shard says that it published before under that number, without boxes."""
    member = state.members.get(replica.members[Shard(0)]) if replica.shards == 1 else None
    publish = publish_of(member.report) if member is not None else None
    return publish.former if publish is not None else Digest("")


def publish_of(report: Report) -> CallReport | None:
    """The publish that the worker makes now, or has ended without the server."""
    if report.call is not None and report.call.verb == "publish":
        return report.call
    return report.step.publish if report.step is not None else None


def judge(state: State, model: Model, replica: Replica) -> bool:
    """Judge what was published without the server. Returns whether there is news of it.

    It is a version when all shards hold it. It is none if another replica is the writer by now, or the number is taken.
    """
    former = replica.standing
    if not replica.unjudged and former is None:
        return False
    call = replica.standing = _ended_alone(state, replica)
    if former is not None and call is not former:
        apply.release(state, model, former, replica)
    if call is None or call.is_over:
        return False
    was_resolved, call.waiting = call.is_resolved_here, None
    if call.differing:
        text = call.difference(replica.name)
        call.fail(Failure("group-mismatch", text, "all shards of a replica make the same calls in the same order"))
    elif len(call.arrived) == replica.shards:
        _advance_publish(state, model, replica, call)
    elif not model.is_listening and call.version is None:
        roots = facts.roots_of(state, replica, call)
        taken = model.conflict(replica, Version(int(call.spec)), roots)
        if (conflict := admission.why_not_writer(state, model, replica) or taken) is not None:
            _refuse(state, model, replica, call, conflict)
    if call.is_resolved_here and not call.is_over and _has_epoch(state, replica, call):
        _finish(state, model, replica, call)
    if call.is_over:
        apply.release(state, model, call, replica)
    return call.is_over or call.is_resolved_here != was_resolved


def _ended_alone(state: State, replica: Replica) -> GroupCall | None:
    """The newest publish that shards have ended without the server and hold, as one call of all of these."""
    found: dict[Shard, CallReport] = {}
    for shard, publish in replica.unjudged.items():
        member = state.members.get(replica.members[shard])
        buffer = member.report.buffer if member is not None else None
        if isinstance(buffer, WHOLE) and (buffer.version, buffer.root) == (publish.spec, publish.root):
            found[shard] = publish
    if not found:
        return None
    one = max(found.values(), key=lambda each: int(each.spec))
    call = GroupCall(0, one.verb, one.spec, state.now, metadata=one.metadata)
    for shard, publish in found.items():
        if call.is_same(publish):
            call.arrived[shard], call.grids[shard] = publish.root, publish.grid
            if publish.resolved is not None:
                call.version, call.epoch = publish.resolved, publish.epoch
        elif publish.spec == call.spec:
            call.differing[shard] = ""
    former = replica.standing
    return former if former is not None and former.is_same(one) and _is_no_news(former, call) else call


def _is_no_news(former: GroupCall, call: GroupCall) -> bool:
    """No shard has come to it since; where it is over, some may have heard so."""
    if former.is_over:
        return call.arrived.items() <= former.arrived.items()
    return (call.arrived, call.differing) == (former.arrived, former.differing)


def _has_epoch(state: State, replica: Replica, call: GroupCall) -> bool:
    """All shards hold the version with the epoch that the server gave it."""
    members = [state.members.get(worker) for worker in replica.members.values()]
    buffers = [member.content.buffer for member in members if member is not None]
    whole = [each for each in buffers if isinstance(each, WHOLE)]
    return [(each.version, each.epoch) for each in whole] == [(call.version, call.epoch)] * replica.shards


def _advance_claim(state: State, model: Model, replica: Replica, call: GroupCall, version: Version) -> None:
    """All shards have come to an unpublish that claims a number.

    A server before this one may have granted it. Nothing has been changed for it yet: if another replica is the writer
    by now, the call fails.
    """
    waiting = admission.recovering(state) if model.is_listening else admission.why_wait(state, replica)
    if waiting is not None and call.version is None:
        call.waiting = waiting
        return
    is_new = call.version is None
    conflict = admission.why_refuse_claim(state, model, replica, version) if is_new else None
    conflict = conflict or admission.why_not_writer(state, model, replica)
    if conflict is None:
        call.epoch = admission.make_writer(state, model, replica)
        call.resolve(version)
    elif not model.is_listening:
        _refuse(state, model, replica, call, conflict)


def _refuse(state: State, model: Model, replica: Replica, call: GroupCall, why: Failure) -> None:
    """The replica may not publish that."""
    state.events.append(events.Refused(model=model.name, replica=replica.name, why=f"{call}: {why.message}"))
    call.fail(why)


def _accept_publish(state: State, model: Model, replica: Replica, call: GroupCall, version: Version) -> None:
    """Its shards may hold that version. One that exists has the same content, and keeps its epoch."""
    admission.make_writer(state, model, replica)
    record = model.record(version)
    if not record.exists and (call.version is None or record.epoch != call.epoch):
        for worker in record.begin(
            call.epoch or state.next_number()
        ):  # what a publish before this one has left is nothing
            if (other := state.members.get(worker)) is not None:
                content.judge_content(state, model, model.replicas[other.hello.replica], other, other.report)
    record.publisher, record.is_publishing = replica.name, True
    record.roots.update(facts.roots_of(state, replica, call))
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is not None:
            record.layouts[member.layout_key] = member.report.layout
    call.epoch = record.epoch
    call.resolve(version)


# --- replicate and update ---------------------------------------------------------------------------------------------


def _advance_fill(state: State, model: Model, replica: Replica, call: GroupCall) -> None:
    if call.version is None:
        _resolve(state, model, replica, call)
    version = call.version
    if version is None or call.is_over:
        return
    record = model.look_up(version)
    if replica.name not in record.promised:
        model.record(version).promised[replica.name] = None
    for shard in call.arrived:
        worker = replica.members.get(shard)
        member = state.members.get(worker) if worker is not None else None
        if member is not None and not call.is_over and not _has_arrived(member, version):
            failure = _why_hopeless(state, model, record, member)
            if failure is not None:
                _give_up(replica, call, failure)
    _keep_held(state, model, replica, call, record)


def _give_up(replica: Replica, call: GroupCall, failure: Failure) -> None:
    """It cannot succeed. All shards hear so together: one that came later would be counted as making the next call."""
    if replica.missing():
        call.waiting = failure
    else:
        call.fail(failure)


def _resolve(state: State, model: Model, replica: Replica, call: GroupCall) -> None:
    if model.is_listening:
        call.waiting = admission.recovering(state)
        return
    missing = _missing(replica) if call.verb == "update" else None
    if missing is not None and not is_known(state, replica, call):
        call.waiting = missing  # an update never goes back, and what they all hold is not known yet
        return
    version, failure = meant_by(state, model, replica, call)
    if missing is not None and version is not None and is_older(state, replica, call, version):
        call.waiting = missing  # nor is it known yet what they all had
        return
    if version is None:
        assert failure is not None
        if isinstance(call.spec, int) and not (call.waits and may_come(model, call.spec)):
            _give_up(replica, call, failure)
        else:
            call.waiting = Failure(failure.code, failure.message) if call.waits else failure
        return
    record = model.look_up(version)
    absent = _absent_key(state, model, replica, record)
    if absent is None:
        call.resolve(version)
    elif (unreadable := _why_unreadable(state, model, replica, record)) is not None:
        _give_up(replica, call, unreadable)
    else:
        call.waiting = _unavailable(state, model, record, absent)
        _keep_held(state, model, replica, call, record)


def _why_unreadable(state: State, model: Model, replica: Replica, record: VersionRecord) -> Failure | None:
    members = [state.members.get(worker) for worker in replica.members.values()]
    found = [layouts.why_unreadable(state, model, record, member) for member in members if member is not None]
    return next((failure for failure in found if failure is not None), None)


def _keep_held(state: State, model: Model, replica: Replica, call: GroupCall, record: VersionRecord) -> None:
    """End an update with what all shards hold where the newer version has no source that answers.

    Its publisher may be dead, and have a session until its lease ends. An update waits all the same where a shard may
    have begun to write over what it held.
    """
    held = across.kept_by_all(state, replica) if call.may_keep and not model.is_listening else None
    if held is None or held >= record.version:
        return
    keys = [state.known(worker).layout_key for worker in replica.members.values()]
    answered_until = min(_answered_until(state, model, record, key, call) for key in keys)
    if answered_until > state.now:
        state.members.wake(state.known(replica.members[Shard(0)]), answered_until)
        return
    apply.release(state, model, call, replica)
    text = f"{replica.name} keeps version {held}: no source of version {record.version} of {model.name} has answered"
    hint = f"the next update tries again; replicate({record.version}) waits for a source"
    call.resolve(held)
    _finish(state, model, replica, call)
    call.waiting = Failure("version-unavailable", f"{text} for {state.settings.keep_held_s:.3g} s", hint)


def _answered_until(state: State, model: Model, record: VersionRecord, key: LayoutKey, call: GroupCall) -> float:
    """Until when a reader of that key counts as one with a source, or with sources for all keys of another layout."""

    def until(one: LayoutKey) -> float:
        found = call.began + state.settings.keep_held_s if not record.whole.get(one) else -inf
        for worker in record.whole.get(one, ()):
            found = max(found, facts.answers_until(state, state.known(worker)))
            if found > state.now:
                break
        return found

    across = layouts.readable_layout_sets(model, record, key) if layouts.can_cross(record, key) else ()
    return max(until(key), *(min(map(until, layout_set)) for layout_set in across), -inf)


def _absent_key(state: State, model: Model, replica: Replica, record: VersionRecord) -> LayoutKey | None:
    """A layout key of the version that no worker holds whole without withdrawing it, nor all of another layout."""

    def can_serve(member: Member) -> bool:
        return member.will_hold(record.version) or member.has_whole_copy(record.version)

    for shard in range(replica.shards):
        mine = state.members.get(replica.members[Shard(shard)]) if Shard(shard) in replica.members else None
        key = mine.layout_key if mine is not None else LayoutKey(replica.shards, Shard(shard))
        is_there = any(can_serve(state.known(worker)) for worker in record.whole.get(key, {}))
        if not is_there and not layouts.is_in_another_layout(state, model, record, key, can_serve):
            return key
    return None


def _unavailable(state: State, model: Model, record: VersionRecord, key: LayoutKey) -> Failure:
    if key.is_boxed and record.roots and not any(map(is_tiled, record.roots.values())):
        text = f"version {record.version} of {model.name} was published without boxes, and not yet with boxes too"
        hint = (
            "its publisher needs room for a copy in host memory, if it is the only holder; its log says what it lacks"
        )
        return Failure("version-unavailable", text, f"{hint}. Or register(..., boxes={{}}) there")
    holders = [state.members.get(worker) for worker in record.holders.get(key, {})]
    leaving = [str(member.worker) for member in holders if member is not None and member.holds(record.version)]
    last = f"; {[*leaving, record.last_holder][0]} held it last" if leaving or record.last_holder else ""
    text = f"no worker holds shard {key.shard} of version {record.version} of {model.name} now{last}"
    older = [
        v for v, r in sorted(model.versions.items(), reverse=True) if v != record.version and any(r.holders.values())
    ]
    hint = f"wait for a newer version, or replicate version {older[0]}" if older else "wait for a newer version"
    return Failure("version-unavailable", text, hint)


def _has_arrived(member: Member, version: Version) -> bool:
    """The shard has the version of its call."""
    return isinstance(member.content.buffer, Holding) and member.content.held == version


def _why_hopeless(state: State, model: Model, record: VersionRecord, member: Member) -> Failure | None:
    """Why this shard can never get the version by this call, or None."""
    unreadable = layouts.why_unreadable(state, model, record, member)
    if unreadable is not None:
        return unreadable
    failures, told = member.report.failures, member.report.reading
    is_of_it = told is not None and told.version == record.version
    if told is not None and is_of_it and told.root and record.roots.get(member.layout_key) not in (None, told.root):
        text = f"{member.worker} would get other content as version {record.version} than other workers have got"
        return Failure("version-conflict", text, "was the version published twice, with different content?")
    if failures and (failures[-1].code in HOPELESS or _has_failed_enough(state, model, record, member)):
        return _failed(record, member, failures[-1])
    is_lost = model.is_lost(record)
    given_up = [worker for worker, failed in member.tries.sources.items() if failed.is_for_good]
    if not (is_lost or given_up) or model.is_listening or member.has_whole_copy(record.version):
        return None
    read = state.reads.current.get(member.worker)
    if read is not None and not slow.is_cut_off(state, read):
        return None
    if is_lost:
        return model.loss(record)
    if _has_hope(state, model, record, member):
        return None
    if failures and not any(worker in record.refused for worker in given_up):
        return _failed(record, member, failures[-1])
    text = f"{member.worker} got bytes of version {record.version} that are not as published, from every holder"
    return Failure("corrupt-transfer", text, "were the published tensors changed in place? weights.check() tells")


def _failed(record: VersionRecord, member: Member, last: TicketFailure) -> Failure:
    count = member.tries.failures
    reads, whence = ("a read", "from") if count == 1 else (f"{count} reads", "the last from")
    text = f"{member.worker} failed {reads} of version {record.version}, {whence} {last.source}: {last.message}"
    return Failure(last.code, text, last.hint or HOPELESS.get(last.code) or STATUS_SAYS)


def _has_failed_enough(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    is_enough = member.tries.failures > state.settings.max_failures
    return is_enough and not _has_hope(state, model, record, member, is_last=True)


def _has_hope(state: State, model: Model, record: VersionRecord, member: Member, *, is_last: bool = False) -> bool:
    """The version may still come: its own key, or every key of another layout set, has a worker that gets all of it."""

    def may_come(key: LayoutKey) -> bool:
        holders = record.holders.get(key, {})
        return any(_may_bring(state, record, member, worker, is_last=is_last) for worker in holders)

    if may_come(member.layout_key):
        return True
    is_boxed = layouts.can_cross(record, member.layout_key)
    return is_boxed and any(
        all(map(may_come, layout_set)) for layout_set in layouts.coming_layout_sets(model, record, member.layout_key)
    )


def _may_bring(state: State, record: VersionRecord, member: Member, worker: WorkerId, *, is_last: bool) -> bool:
    """The worker has all of the version, or gets it by way of workers that this member may still try.

    `is_last`: the member has failed so often that it tries only those that live, and few times each.
    """
    for _ in range(slow.MAX_HOPS):
        source, failed = state.members.get(worker), member.tries.sources.get(worker)
        if source is None or source is member or (failed is not None and failed.is_for_good):
            return False
        if is_last and failed is not None and (failed.times >= TRIES or not facts.is_here(state, source)):
            return False
        if facts.is_full_source(state, source, record.version):
            return True
        read = state.reads.current.get(worker)
        if read is None or read.version != record.version or slow.brings_nothing(state, read):
            return False
        above = [member.tries.sources.get(each.worker) for each in read.sources]
        if any(failed is not None and failed.is_for_good for failed in above):
            return False
        worker = read.source
    return True


# --- The number with which a trainer that was started again goes on: the lowest above every number that was ever
# taken. A shard of several goes on with the number that its siblings have published without it.


def next_version(state: State, name: ModelName) -> Version | None:
    """The lowest free number, 0 for an unknown model; None while a restarted server still listens."""
    model = state.models.get(name)
    if state.is_untold if model is None else model.is_listening:
        return None
    if model is None:
        return Version(0)
    taken = [-1 if model.newest is None else model.newest]
    for replica in model.replicas.values():
        come = replica.come
        if come is not None and come.version is not None and come.done != CLAIMED:
            taken.append(come.version - (come.publish is not None))
    return Version(max(taken) + 1)


# --- How many replicas hold a version by now: back-pressure for a trainer that must not run ahead of its rollouts.
#
# It counts replicas other than the asker's own and other than trainers, all of whose shards live and none of which is
# closing, once they follow the model: they hold something, or have called `replicate` or `update`. A process that only
# loads a version and leaves (`load`) does not follow it. So a dead replica is waited for until its lease ends, and one
# that still starts is not waited for. A newer version is as good; it counts once it is whole in the tensors, not in a
# host copy.


MAX_NAMED = 8  # of those that are missing
EXACT = 1e-9  # 0.7 of 10 is 7, though 0.7 * 10 is a little more


def held_by(state: State, name: ModelName, version: Version, asker: ReplicaName, fraction: float) -> HeldView:
    """The replicas that hold the version or a newer one, and whether they are this fraction of all."""
    model = state.models.get(name)
    if model is None or model.is_listening:
        return HeldView(waits_for="the reference server has restarted, and not all workers have reported to it yet")
    if model.newest is None or model.newest < version:
        newest = f"its newest version is {model.newest}" if model.newest is not None else "nothing was published yet"
        return HeldView(waits_for=f"{name} has no version {version} yet; {newest}")
    holders: list[str] = []
    missing: list[tuple[str, list[Member]]] = []
    for replica in model.replicas.values():
        members = _members(state, replica)
        if replica.name == asker or not _counts(replica, members):
            continue
        if all(member.is_full and _is_past(member, version) for member in members):
            holders.append(replica.name)
        else:
            missing.append((replica.name, members))
    counted = len(holders) + len(missing)
    needed = ceil(fraction * counted - EXACT)
    is_enough = len(holders) >= needed
    waits_for = "" if is_enough else _words(model, version, missing, needed, counted)
    return HeldView(is_enough, tuple(sorted(holders)), counted, waits_for)


def _members(state: State, replica: Replica) -> list[Member]:
    members = [state.members.get(worker) for _, worker in sorted(replica.members.items())]
    return [member for member in members if member is not None]


def _counts(replica: Replica, members: list[Member]) -> bool:
    """It is no trainer, all of it lives and stays, and it follows the model."""
    if replica.publishes or len(members) < replica.shards:
        return False
    if any(member.report.closing or member.hello.is_passing for member in members):
        return False
    call = replica.call
    is_called = replica.finished > 0 or (call is not None and call.verb in facts.FILLS)
    return is_called or any(not isinstance(member.content.buffer, Empty) for member in members)


def _is_past(member: Member, version: Version) -> bool:
    held = version_in(member.content.buffer)
    return held is not None and held >= version


def _words(model: Model, version: Version, missing: list[tuple[str, list[Member]]], needed: int, counted: int) -> str:
    """Which replicas are missing, and how far each of them is."""
    said = [f"{name}{_how_far(members, version)}" for name, members in sorted(missing)[:MAX_NAMED]]
    more = f", and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
    have = counted - len(missing)
    text = f"{have} of {counted} replicas hold version {version} of {model.name}, and {needed} have to"
    return f"{text}; missing: {', '.join(said)}{more}"


def _how_far(members: list[Member], version: Version) -> str:
    """Of the shard that is furthest behind."""
    behind = [member for member in members if not (member.is_full and _is_past(member, version))]
    buffer = behind[0].content.buffer
    shard = f"[{behind[0].shard}] " if len(members) > 1 else " "
    if isinstance(buffer, Filling):
        return f"{shard}(has {buffer.done} of {buffer.chunks or '?'} chunks of {buffer.version})"
    held = version_in(buffer)
    return f"{shard}(holds {held if held is not None else 'nothing'})"
