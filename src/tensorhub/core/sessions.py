"""How a session begins and ends in the server's tables. Called by the server machine, whose tables these are."""

from typing import TYPE_CHECKING

from . import hearing, operations, rollcall
from .groups import Replica
from .membership import Member
from .messages import Hello, Report
from .references import Model

if TYPE_CHECKING:
    from .server import Server


def begin(server: "Server", hello: Hello, sender: str, report: Report) -> Member:
    """Somebody who has no session has reported."""
    model = server.models.get(hello.model)
    if model is None:
        model = server.models[hello.model] = Model(hello.model, hello.shards, server.settings.most_versions)
        model.is_listening, model.keeps_established = server.is_recovering, server.settings.keep_established
        model.roll.is_over = not server.is_recovering
    model.shards = hello.shards  # as of all who live; free when nobody does
    replica = model.replicas.setdefault(hello.replica, Replica(hello.replica, hello.shards))
    member = Member(hello, sender, server.next_number(), server.now + server.settings.lease_s)
    member.has_lived_before = report.session > 0
    replica.members[hello.shard] = member.worker
    server.members.add(member)
    rollcall.begin(server, model, member, report)
    model.sites[hello.site] += 1
    if hello.reliable:
        model.reliable.setdefault(hello.shard, {})[member.worker] = None
    model.retain = max(server.settings.default_retain, model.retain, hello.retain)
    server.counters["sessions"] += 1
    return member


def end(server: "Server", member: Member, why: str) -> None:
    """It has left, or died, or gave way."""
    model, replica = server.place(member)
    hearing.close_reads(server, member, None)
    model.move(member.worker, member.report, None)
    replica.lose(member.shard, why)
    model.forget(member.worker, member.hello.site)
    server.members.remove(member.worker)
    rollcall.end(server, model, member)
    server.forget(member.worker)
    if replica.is_empty:
        operations.release(model, replica.operation, replica)
        del model.replicas[replica.name]
    server.touch_all(model)
