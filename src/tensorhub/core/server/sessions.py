"""How a session begins and ends in the server's tables. Called by the server machine, whose tables these are."""

from math import inf

from ..messages import Hello, Report
from . import apply, intake, places, rollcall
from .catalog import Model
from .content import NOTHING
from .groups import Replica
from .lines import Place
from .membership import Member
from .state import State
from .watches import ARRIVALS


def begin(state: State, hello: Hello, sender: str, report: Report) -> Member:
    """Somebody who has no session has reported."""
    model = state.models.get(hello.model)
    state.left.pop(hello.model, None)
    if model is None:
        if len(state.models) >= state.settings.most_models and (old := state.model_to_forget()) is not None:
            state.forget_model(old)
        model = state.models[hello.model] = Model(hello.model, hello.shards, state.settings.most_versions)
        model.is_listening, model.keeps_established = state.is_recovering, state.settings.keep_established
        model.roll.is_over, model.others = not state.is_recovering, state.models
    if not model.replicas:
        model.cuts = {}
        if not report.session:  # a new job: what those before it wanted kept is over with them
            model.retain = 0
    model.shards = hello.shards
    replica = model.replicas.setdefault(hello.replica, Replica(hello.replica, hello.shards))
    member = Member(hello, sender, state.next_number(), state.now + state.settings.lease_s)
    member.note_heard(state.now, state.settings)
    member.former_session, member.former_seen = report.session, report.seen
    replica.join(hello.shard, member.worker, is_in_call=report.call is not None)
    state.members.add(member)
    state.note_size()
    rollcall.begin(state, model, member, report)
    _take_place(state, model, member)
    if hello.retain > state.settings.most_retain:
        text = f"{hello.worker} asks to keep {hello.retain} versions, and may ask for {state.settings.most_retain}"
        state.said.append(f"{text}: TENSORHUB_MOST_RETAIN of this server")
    model.retain = max(model.retain, state.settings.retain_of(hello.retain, is_reliable=hello.reliable))
    state.counters["sessions"] += 1
    return member


def end(state: State, member: Member, why: str) -> None:
    """It has left, or died, or gave way."""
    model, replica = state.place(member)
    had = concerned(state, member)
    if member.is_connected:
        state.spent[member.sender] = None
    intake.close_reads(state, member, None)
    model.move(member.worker, member.content, NOTHING)
    awaited_since = state.now if _is_of_a_former_job(state, replica, member) else None
    replica.lose(member.shard, why, is_awaited_since=awaited_since)
    model.forget(member.worker)
    _leave_place(state, model, member)
    del state.members[member.worker]
    state.note_size()
    rollcall.end(state, model, member)
    state.forget(member.worker)
    if replica.is_empty:
        apply.release(state, model, replica.call, replica)
        del model.replicas[replica.name]
    if not model.replicas:
        state.left[model.name] = state.now
        state.forget_at = min(state.forget_at, state.now + state.settings.lease_s)
    if model.closing or len(model.sites) > 1:
        state.mark_everyone_dirty(model)
    else:
        state.mark_replica_dirty(replica)
        state.mark_concerned_dirty(model, had)
        state.mark_readers_dirty(member.worker)
        state.mark_waiting_dirty(model, ARRIVALS)
    apply.offer_keeper(state, model, member)
    apply.note_changed_versions(state)  # what is lost with it is said at once, though nobody may be dirty


def forget_models(state: State) -> None:
    """Models that no worker was of for a lease are forgotten.

    One that has had a version is not: its numbers are used once only (G3), as long as this server lives (G9).
    """
    unnamed = {name: since for name, since in state.left.items() if state.models[name].newest is None}
    state.forget_at = inf
    for name, since in unnamed.items():
        if since + state.settings.lease_s > state.now:
            state.forget_at = since + state.settings.lease_s
            break
        state.forget_model(name)


def _take_place(state: State, model: Model, member: Member) -> None:
    """It is where its hello says, is of that set, and counts for retention if it says so."""
    hello = member.hello
    if model.companions.join(member.worker, hello.companions):
        _note_sets(state, model)
    model.take_place(member.worker, hello.site, hello.host)
    if hello.reliable:
        places.note_company(state, model, member.line)
        model.reliable.setdefault(member.line, {})[member.worker] = None


def _leave_place(state: State, model: Model, member: Member) -> None:
    if model.companions.leave(member.worker, member.hello.companions):
        _note_sets(state, model)
    if model.reliable.get(member.line, {}).pop(member.worker, 0) is None:
        places.note_company(state, model, member.line)
        places.note_leaver(model, member.line)
    model.leave_place(member.worker, member.hello.site, member.hello.host)


def _note_sets(state: State, model: Model) -> None:
    """With which other models it belongs together is not what it was: what is to be kept follows from those too."""
    names = model.companions.names
    for name in [each for each, bound in state.bound.items() if model.name in bound and each not in names]:
        del state.bound[name][model.name]
        if not state.bound[name]:
            del state.bound[name]
    for name in names:
        state.bound.setdefault(name, {})[model.name] = None
    state.mark_everyone_dirty(model)


def _is_of_a_former_job(state: State, replica: Replica, member: Member) -> bool:
    """It has made calls, and of those who have come to the present one nobody ever has: it belongs to what was before.

    A job that is started again at once meets what is left of its former self, until the leases of that end.
    """
    call = replica.call
    if call is None or call.is_over or member.shard in call.arrived or not member.report.ended:
        return False
    others = [state.members.get(replica.members[shard]) for shard in call.arrived if shard in replica.members]
    return bool(others) and all(other is not None and not other.report.ended for other in others)


def connect(state: State, hello: Hello, sender: str) -> None:
    """Somebody has said who it is, over that connection."""
    state.hellos[sender], state.speakers[sender] = hello, hello.worker
    member = state.members.get(hello.worker)
    if member is not None:
        was_reached, member.is_connected = member.is_connected, True
        if member.sender != sender and member.sender in state.hellos:
            state.spent[member.sender] = None  # what is late on the former line begins no session when this one is over
        model = state.models[hello.model]
        _leave_place(state, model, member)
        member.sender, member.hello = sender, hello
        _take_place(state, model, member)  # one that lies may be elsewhere now, or count where it did not
        if not was_reached:
            _note_reach(state, member)


def disconnect(state: State, sender: str) -> None:
    """The connection is gone."""
    state.spent.pop(sender, None)
    hello = state.hellos.pop(sender, None)
    member = state.members.get(state.speakers.pop(sender)) if hello is not None else None
    if member is not None and member.sender == sender:
        member.is_connected = False
        _note_reach(state, member)


def _note_reach(state: State, member: Member) -> None:
    """Whether it can be reached is not what it was: a source need not wait for it any more, or has to."""
    model, replica = state.place(member)
    state.mark_replica_dirty(replica)
    state.mark_concerned_dirty(model, concerned(state, member))
    state.mark_readers_dirty(member.worker)
    state.mark_waiting_dirty(model, ARRIVALS)
    for read in state.reads.of(member.worker):
        state.mark_dirty(read.source)
    apply.offer_keeper(state, model, member)


def concerned(state: State, member: Member) -> list[Place]:
    """The versions, and of which line, for which it matters to others what becomes of the member."""
    found = dict.fromkeys(member.content.places)
    found.update(((read.version, read.line), None) for read in state.reads.of(member.worker))
    _, replica = state.place(member)
    if replica.call is not None and replica.call.version is not None:
        found[replica.call.version, member.line] = None
    return list(found)
