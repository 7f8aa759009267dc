"""How a session begins and ends in the server's tables. Called by the server machine, whose tables these are."""

from ..messages import Hello, Report
from . import apply, intake, rollcall
from .catalog import Model
from .groups import Replica
from .membership import Member
from .state import State


def begin(state: State, hello: Hello, sender: str, report: Report) -> Member:
    """Somebody who has no session has reported."""
    model = state.models.get(hello.model)
    if model is None:
        model = state.models[hello.model] = Model(hello.model, hello.shards, state.settings.most_versions)
        model.is_listening, model.keeps_established = state.is_recovering, state.settings.keep_established
        model.roll.is_over = not state.is_recovering
    model.shards = hello.shards  # as of all who live; free when nobody does
    replica = model.replicas.setdefault(hello.replica, Replica(hello.replica, hello.shards))
    member = Member(hello, sender, state.next_number(), state.now + state.settings.lease_s)
    member.has_lived_before = report.session > 0
    replica.members[hello.shard] = member.worker
    state.members.add(member)
    rollcall.begin(state, model, member, report)
    model.sites[hello.site] += 1
    if hello.reliable:
        model.reliable.setdefault(hello.shard, {})[member.worker] = None
    model.retain = max(state.settings.default_retain, model.retain, hello.retain)
    state.counters["sessions"] += 1
    return member


def end(state: State, member: Member, why: str) -> None:
    """It has left, or died, or gave way."""
    model, replica = state.place(member)
    intake.close_reads(state, member, None)
    model.move(member.worker, member.content, None)
    replica.lose(member.shard, why)
    model.forget(member.worker, member.hello.site)
    state.members.remove(member.worker)
    rollcall.end(state, model, member)
    state.forget(member.worker)
    if replica.is_empty:
        apply.release(model, replica.call, replica)
        del model.replicas[replica.name]
    state.mark_everyone_dirty(model)


def connect(state: State, hello: Hello, sender: str) -> None:
    """Somebody has said who it is, over that connection."""
    state.hellos[sender] = hello
    member = state.members.get(hello.worker)
    if member is not None:
        member.sender, member.is_connected, member.hello = sender, True, hello


def disconnect(state: State, sender: str) -> None:
    """The connection is gone."""
    hello = state.hellos.pop(sender, None)
    member = state.members.get(hello.worker) if hello is not None else None
    if member is not None and member.sender == sender:
        member.is_connected = False
        state.mark_busy_dirty(state.models[member.hello.model])  # a source need not wait for it any more
