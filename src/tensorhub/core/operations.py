"""How a group operation goes forward: what it resolves to, what it waits for, when it is over.

Called by the server machine with itself as the facts; everything that is changed here belongs to the operation.
"""

from typing import TYPE_CHECKING

from . import claims, granting, retention, rollcall
from .errors import UsageError
from .groups import GroupOperation, Replica, some_shards
from .manifest import layout_difference
from .membership import Member
from .messages import Empty, Failure, Filling, Holding, Poisoned, Spec, Vacated
from .names import Shard, Version
from .references import Model, VersionRecord
from .specs import PREFETCHED

if TYPE_CHECKING:
    from .server import Server

FILLS = ("replicate", "update")
TRIES = 3  # so often a source that lives may fail a reader before it is no hope any more: a link reset, a restart
HOPELESS = ("layout-mismatch", "usage", "transport-missing")  # another source would not help


def advance(server: "Server", model: Model, replica: Replica, operation: GroupOperation) -> None:
    """Take the operation as far as the facts allow."""
    if operation.is_over:
        return
    operation.waiting = _missing(replica)
    incomplete = _why_incomplete(server, replica, operation)
    if incomplete is not None:
        operation.fail(incomplete)
        return
    if operation.verb in FILLS:
        _advance_fill(server, model, replica, operation)
    elif operation.claim is not None and operation.version is None and operation.waiting is None:
        operation.waiting = _why_wait(server, model, replica)
        if operation.waiting is None:
            claims.judge(server, model, replica, operation)
    elif operation.verb == "publish":
        _advance_publish(server, model, replica, operation)
    stuck = _why_stuck(server, model, replica) if not operation.is_over and not server.is_recovering else None
    if stuck is not None:
        _give_up(replica, operation, stuck)
    if not operation.is_over and _is_done(server, replica, operation):
        operation.is_finished = True
        replica.finished = max(replica.finished, operation.number)
        if operation.verb == "publish" and operation.version is not None:
            model.note_exists(operation.version)
            model.record(operation.version).proved = dict.fromkeys(operation.arrived)


def _missing(replica: Replica) -> Failure | None:
    missing = replica.missing()
    if not missing:
        return None
    text = f"{replica.name} waits for shard {some_shards(missing)} of {replica.shards} to call {replica.operation}"
    return Failure("group-incomplete", text, "is every shard running, and making the same calls?")


def _why_incomplete(server: "Server", replica: Replica, operation: GroupOperation) -> Failure | None:
    """A shard that has not come, and that nobody can expect any more. One that lives may take its time."""
    hint, absent = "see that every shard runs, then call again on all of them", []
    for shard in replica.missing():
        worker = replica.members.get(Shard(shard))
        member = server.members.get(worker) if worker is not None else None
        if member is None:
            absent.append(shard)
        elif member.report.closing:
            text = f"shard {shard} of {replica.name} is being closed, and does not come to {operation}"
            return Failure("group-incomplete", text, hint)
    if not absent:
        return None
    patience_s = server.settings.lease_s
    until = max(operation.began, server.recovered_at) + patience_s
    if server.now >= until:
        text = f"shard {some_shards(absent)} of {replica.name} was not there within {patience_s:.3g} s of {operation}"
        return Failure("group-incomplete", text, hint)
    for shard in operation.arrived:
        waiting = server.members.get(replica.members[shard]) if shard in replica.members else None
        if waiting is not None:
            server.members.wake(waiting, until)
    return None


def _why_wait(server: "Server", model: Model, replica: Replica) -> Failure | None:
    """Why the replica can be given no number of its own yet, or None."""
    return rollcall.why_unwitnessed(model, replica) if model.roll.is_over else _recovering(server)


def _recovering(server: "Server") -> Failure:
    left_s = server.recovered_at - server.now
    return Failure("unavailable", f"the reference server has restarted and listens for {left_s:.1f} s more", "retry")


def _why_stuck(server: "Server", model: Model, replica: Replica) -> Failure | None:
    """Why a shard may never leave the version that it holds, as this operation wants."""
    for worker in replica.members.values():
        member = server.members.get(worker)
        failure = retention.why_stuck(server, model, replica, member) if member is not None else None
        if failure is not None:
            return failure
    return None


def _is_done(server: "Server", replica: Replica, operation: GroupOperation) -> bool:
    if operation.claim is not None and operation.version is None:
        return False
    for shard in range(replica.shards):
        worker = replica.members.get(Shard(shard))
        member = server.members.get(worker) if worker is not None else None
        told = member.report.operation if member is not None else None
        if member is None or told is None or told.number != operation.number:
            return False
        buffer = member.report.buffer
        if operation.verb == "unpublish":
            if not isinstance(buffer, Empty | Vacated | Poisoned):
                return False
        elif not isinstance(buffer, Holding) or buffer.version != operation.version:
            return False
    return True


# --- publish ----------------------------------------------------------------------------------------------------------


def _advance_publish(server: "Server", model: Model, replica: Replica, operation: GroupOperation) -> None:
    if operation.version is not None or operation.waiting is not None:
        return
    operation.waiting = _why_wait(server, model, replica)
    if operation.waiting is not None:
        return
    version = Version(int(operation.spec))
    conflict = model.conflict(replica, version, operation.arrived)
    conflict = conflict or claims.conflict_with(server, model, replica, version)
    if conflict is not None:
        operation.fail(conflict)
        return
    record = model.record(version)
    record.roots = dict(operation.arrived)
    for shard, worker in replica.members.items():
        member = server.members.get(worker)
        if member is not None:
            record.layouts[shard] = member.report.layout
    record.claims[replica.name] = None
    operation.version = version


# --- replicate and update ---------------------------------------------------------------------------------------------


def _advance_fill(server: "Server", model: Model, replica: Replica, operation: GroupOperation) -> None:
    if operation.version is None:
        _resolve(server, model, replica, operation)
    version = operation.version
    if version is None or operation.is_over:
        return
    record = model.record(version)
    record.promised[replica.name] = None
    for shard in operation.arrived:
        worker = replica.members.get(shard)
        member = server.members.get(worker) if worker is not None else None
        if member is not None and not operation.is_over:
            failure = _why_hopeless(server, model, record, member)
            if failure is not None:
                _give_up(replica, operation, failure)


def _give_up(replica: Replica, operation: GroupOperation, failure: Failure) -> None:
    """It cannot succeed. All shards hear so together: one that came later would be counted as making the next call."""
    if replica.missing():
        operation.waiting = failure
    else:
        operation.fail(failure)


def _resolve(server: "Server", model: Model, replica: Replica, operation: GroupOperation) -> None:
    if not rollcall.is_whole(server, model, replica):
        operation.waiting = _recovering(server)
        return
    held = _held_by_all(server, replica)
    if operation.spec == PREFETCHED:
        version, failure = _prefetched(server, model, replica, held)
    else:
        version, failure = model.resolve(operation.spec)
    if operation.verb == "update" and held is not None and _is_enough(operation.spec, held, version):
        version, failure = held, None
    if version is None:
        assert failure is not None
        if isinstance(operation.spec, int):
            _give_up(replica, operation, failure)
        else:
            operation.waiting = failure
        return
    record = model.record(version)
    absent = _absent_shard(server, replica, record)
    if absent is None:
        operation.version = version
    else:
        operation.waiting = _unavailable(server, model, record, absent)


def _is_enough(spec: Spec, held: Version, version: Version | None) -> bool:
    """What is held needs no update: nothing newer was asked for, or there is nothing newer."""
    if version is None and isinstance(spec, int):
        return held >= spec  # a number that was never published is not to be had, whatever is held
    return version is None or held >= version


def _prefetched(
    server: "Server", model: Model, replica: Replica, held: Version | None
) -> tuple[Version | None, Failure | None]:
    """The newest version of which each shard of the replica has a whole copy; or what they hold; or the latest."""
    members = [server.known(worker) for worker in replica.members.values()]
    if len(members) < replica.shards:
        text = f"not all shards of {replica.name} are here: nobody knows what they have fetched ahead"
        return None, _missing(replica) or Failure("group-incomplete", text, "is every shard running?")
    for version in sorted(model.versions, reverse=True):  # what somebody has a whole copy of exists
        if all(member.fills_itself(version) for member in members):
            return version, None
    return (held, None) if held is not None else model.resolve("latest")


def _held_by_all(server: "Server", replica: Replica) -> Version | None:
    """The version that each shard of the replica holds, if it is one."""
    held = []
    for worker in replica.members.values():
        member = server.members.get(worker)
        buffer = member.report.buffer if member is not None else None
        held.append(buffer.version if isinstance(buffer, Holding) else None)
    return held[0] if len(held) == replica.shards and held.count(held[0]) == len(held) else None


def _can_serve(member: Member, version: Version) -> bool:
    """It has the whole version, and does not want to leave it."""
    is_held = isinstance(member.report.buffer, Holding) and member.holds(version)
    return is_held or member.has_whole_copy(version)


def _absent_shard(server: "Server", replica: Replica, record: VersionRecord) -> int | None:
    """A shard of the version that nobody, or only somebody about to leave, holds whole."""
    for shard in range(replica.shards):
        holders = (server.members.get(worker) for worker in record.holders.get(Shard(shard), {}))
        if not any(member is not None and _can_serve(member, record.version) for member in holders):
            return shard
    return None


def _unavailable(server: "Server", model: Model, record: VersionRecord, shard: int) -> Failure:
    holders = (server.members.get(worker) for worker in record.holders.get(Shard(shard), {}))
    leaving = [str(member.worker) for member in holders if member is not None and member.holds(record.version)]
    last = f"; {[*leaving, record.last_holder][0]} held it last" if leaving or record.last_holder else ""
    text = f"nobody holds shard {shard} of version {record.version} of {model.name} now{last}"
    older = [
        v for v, r in sorted(model.versions.items(), reverse=True) if v != record.version and any(r.holders.values())
    ]
    hint = f"wait for a newer version, or replicate version {older[0]}" if older else "wait for a newer version"
    return Failure("version-unavailable", text, hint)


def _why_hopeless(server: "Server", model: Model, record: VersionRecord, member: Member) -> Failure | None:
    """Why this shard can never get the version by this operation, or None."""
    if isinstance(member.report.buffer, Holding) and member.report.buffer.version == record.version:
        return None
    theirs = record.layouts.get(member.shard)
    if theirs is not None and theirs != member.report.layout:
        return _layout_mismatch(server, model, record, member)
    failures = member.report.failures
    is_enough = member.failures > server.settings.most_failures and not _has_hope(server, record, member)
    if failures and (is_enough or failures[-1].code in HOPELESS):
        last = failures[-1]
        text = f"{member.worker} failed {member.failures} reads of version {record.version}; last from {last.source}"
        return Failure(last.code, f"{text}: {last.message}", "see `tensorhub status` for who holds it")
    if server.is_recovering or server.reads.current(member.worker) is not None:
        return None
    if member.has_whole_copy(record.version):
        return None
    if model.is_lost(record):
        return model.loss(record)
    return _all_corrupt(server, record, member)


def _has_hope(server: "Server", record: VersionRecord, member: Member) -> bool:
    """Somebody has all of the version who has not failed this reader yet; or not often, and lives."""
    for source in granting.full_sources(server, record, member):
        avoided = member.avoided.get(source.worker)
        if avoided is None or (avoided.times < TRIES and server.is_here(source)):
            return True
    return False


def _all_corrupt(server: "Server", record: VersionRecord, member: Member) -> Failure | None:
    sources = [worker for worker in record.holders.get(member.shard, {}) if worker != member.worker]
    avoided = [member.avoided[worker] for worker in sources if worker in member.avoided]
    if not sources or len(avoided) < len(sources) or any(a.until < float("inf") for a in avoided):
        return None
    text = f"{member.worker} got bytes of version {record.version} that are not as published, from every holder"
    return Failure("corrupt-transfer", text, "were the published tensors changed in place? weights.check() tells")


def _layout_mismatch(server: "Server", model: Model, record: VersionRecord, member: Member) -> Failure:
    mine, theirs = server.layouts.get(member.report.layout), server.layouts.get(record.layouts[member.shard])
    difference = None
    if mine is not None and theirs is not None:
        here, there = f"in {member.worker}", f"in version {record.version}"
        try:
            difference = layout_difference(mine.decode(), theirs.decode(), here=here, there=there)
        except UsageError:
            difference = None  # what is no layout differs too, but no word of it is repeated
    text = difference or f"the tensors of {member.worker} differ from those of version {record.version} of {model.name}"
    return Failure("layout-mismatch", text, "register the same tensors in the same order on both sides")


def wanted_version(replica: Replica, member: Member) -> Version | None:
    """The version that this worker is to be filled with now."""
    told = member.report.operation
    operation = replica.find(told.number) if told is not None else None
    if operation is None or operation.is_over or operation.verb not in FILLS:
        return None
    buffer = member.report.buffer
    if isinstance(buffer, Filling) and buffer.version != operation.version:
        return None
    return operation.version


def release(model: Model, operation: GroupOperation | None, replica: Replica | None = None) -> None:
    """The operation is over: what it claimed or was promised is free."""
    if operation is None or operation.version is None or replica is None:
        return
    record = model.versions.get(operation.version)
    if record is not None:
        record.claims.pop(replica.name, None)
        record.promised.pop(replica.name, None)


# --- draining ---------------------------------------------------------------------------------------------------------


def is_last_holder(server: "Server", record: VersionRecord, leaver: Member) -> bool:
    """Nobody else holds this shard of the version whole and stays."""
    for worker in record.holders.get(leaver.shard, {}):
        member = server.members.get(worker)
        if member is None:
            continue
        is_held = isinstance(member.report.buffer, Holding) and member.holds(record.version)
        if member.has_whole_copy(record.version) or (worker != leaver.worker and is_held):
            return False
    return True


def is_awaited(server: "Server", model: Model, record: VersionRecord, leaver: Member) -> bool:
    """A replica was promised the version, and its worker for this shard has not got it yet."""
    for name in record.promised:
        replica = model.replicas.get(name)
        worker = replica.members.get(leaver.shard) if replica is not None else None
        member = server.members.get(worker) if worker is not None else None
        if member is None or not member.is_connected or member.worker == leaver.worker:
            continue
        if not member.holds(record.version):
            return True
    return False
