"""What a report changes in the server's tables. Called by the server machine, whose tables these are."""

from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from . import evidence, moving, operations
from .groups import Replica
from .membership import Avoided, Member
from .messages import (
    MOST_COPIES,
    MOST_FAR,
    MOST_PINS,
    Grant,
    Holding,
    HostCopy,
    Poisoned,
    Report,
    TicketFailure,
    Vacated,
    Withdrawing,
)
from .names import Digest, Ticket, Version
from .open_reads import OpenRead
from .references import Model, version_in, versions_in
from .sums import add_up

if TYPE_CHECKING:
    from .server import Server

MOST_SITES = 64  # of which it is told what came into them of one version
WHOLE = Holding | Withdrawing | Vacated  # buffers that have all of a version


def take_content(server: "Server", model: Model, replica: Replica, member: Member, before: Report) -> None:
    """What the worker has in its buffer and beside it."""
    report, worker = member.report, member.worker
    is_news = False
    if report.newest is not None and evidence.believes_newest(server, model, report):
        is_news = model.note_exists(report.newest)
    buffer = report.buffer
    if type(buffer) is not type(before.buffer) or version_in(buffer) != version_in(before.buffer):
        member.is_drained = False
    member.conflict = Digest("")
    if isinstance(buffer, WHOLE) and not evidence.accepts(server, model, member, buffer.version, buffer.root):
        server.counters["conflicting_holders"] += 1
        member.conflict = buffer.root
        buffer = Poisoned()  # not what that version is: nobody reads it here, and it is told so
        report = member.report = replace(report, buffer=buffer)
    report = member.report = replace(report, copies=_good_copies(server, model, member), pins=report.pins[:MOST_PINS])
    model.move(worker, before, report)
    if isinstance(buffer, WHOLE) and _exists_by(server, replica, buffer):
        is_news |= model.note_exists(buffer.version)
    if isinstance(buffer, WHOLE) and buffer.published:
        replica.publishes = True
        model.record(buffer.version).publishers[replica.name] = None
    for copy in report.copies:
        if copy.published:
            model.record(copy.version).publishers[replica.name] = None
    for version in versions_in(report):
        for group, other in evidence.holders_in_dispute(server, model, version):
            take_content(server, model, group, other, other.report)
            server.touch(other.worker)
    is_news |= _take_wishes(server, model, member, before)
    _count_far(model, member, before)
    if is_news or [c.whole for c in before.copies] != [c.whole for c in report.copies]:
        server.touch_all(model)
    elif type(before.buffer) is not type(buffer) or (before.buffer != buffer and member.is_full):
        server.touch_model(model)


def _good_copies(server: "Server", model: Model, member: Member) -> tuple[HostCopy, ...]:
    """Its host copies, without those whose content is not that of their version. One that is whole makes it exist."""
    found = []
    for copy in member.report.copies[:MOST_COPIES]:
        if copy.whole and not copy.leaving:
            if not evidence.accepts(server, model, member, copy.version, copy.root, copy.layout):
                server.counters["conflicting_holders"] += 1
                member.releasing[copy.number] = None
                copy = replace(copy, whole=False)
            else:
                model.note_exists(copy.version)
        elif member.gives_up(copy) and copy.number not in member.releasing:
            member.releasing[copy.number] = None
            for read in server.reads.from_copy(member.worker, copy.version):
                server.touch(read.reader)  # it is given another source
        found.append(copy)
    kept = dict.fromkeys(copy.number for copy in found)
    member.releasing = {number: None for number in member.releasing if number in kept}
    return tuple(found)


def _count_far(model: Model, member: Member, before: Report) -> None:
    """What it has received from other sites since its report before."""
    for version, received in list(member.report.far_bytes.items())[:MOST_FAR]:
        record = model.versions.get(Version(version))
        news = received - before.far_bytes.get(version, 0)
        if record is not None and news > 0:
            add_up(record.far_bytes, member.hello.site, news, most=MOST_SITES)


def _take_wishes(server: "Server", model: Model, member: Member, before: Report) -> bool:
    """What it wants kept, and whether it wants to leave. Returns whether others may have to act on it."""
    report = member.report
    is_news = (report.pins, report.closing) != (before.pins, before.closing)
    model.pins.pop(member.worker, None)
    if report.pins:
        model.pins[member.worker] = report.pins
    if report.closing and not before.closing:
        model.closing[member.worker] = None
        member.closing_since = server.now
    return is_news


def _exists_by(server: "Server", replica: Replica, buffer: Holding | Withdrawing | Vacated) -> bool:
    """This buffer shows that its version exists: it was replicated, or the whole replica has published it."""
    if not buffer.published:
        return True
    group = [server.members.get(worker) for worker in replica.members.values()]
    found = [m.report.buffer for m in group if m is not None and m.is_full]
    whole = [held for held in found if version_in(held) == buffer.version]
    return len(whole) == replica.shards


def take_reads(server: "Server", member: Member) -> None:
    """What the worker reads, what it does not read any more, and what has failed."""
    report, worker = member.report, member.worker
    close_reads(server, member, report.closed)
    reading = report.reading
    is_known = reading is None or any(read.ticket == reading.ticket for read in server.reads.of(worker))
    if reading is not None and not is_known and server.is_recovering and _may_adopt(server, report):
        text = "granted before a restart"
        grant = Grant(
            *(reading.ticket, reading.version, Digest(""), reading.source, (), text),
            from_host=reading.from_host,
            to_host=reading.to_host,
        )
        behind = server.reads.readers_behind(worker, reading.version)
        is_void = reading.source in behind or server.reads.current(worker) is not None
        server.reads.add(OpenRead(grant, worker, is_void))
    moving.note_pace(server, member)
    number = report.operation.number if report.operation is not None else 0
    if number != member.operation_number:
        member.operation_number, member.failures, member.chunks, member.avoided = number, 0, 0, {}
    for failure in report.failures:
        if failure.ticket > member.last_failed:
            member.last_failed = failure.ticket
            _count_failure(server, member, failure)


def _count_failure(server: "Server", reader: Member, failure: TicketFailure) -> None:
    """What follows from a failed read: for its reader, and for all who might choose that source too."""
    if reader.chunks_in_place > reader.chunks:
        reader.chunks, reader.failures = reader.chunks_in_place, 0
    reader.failures += 1
    avoided = reader.avoided.setdefault(failure.source, Avoided(0.0, 0))
    avoided.times += 1
    is_hopeless = failure.code == "corrupt-transfer" and avoided.times > 1
    avoided.until = inf if is_hopeless else server.now + server.settings.avoid_s
    source = server.members.get(failure.source)
    if source is not None:
        source.is_doubted = True
    server.counters["failed_reads"] += 1


def _may_adopt(server: "Server", report: Report) -> bool:
    """A server before this one may have granted what the worker reads."""
    reading = report.reading
    return reading is not None and reading.ticket > report.closed and server.numbers.is_ours(reading.ticket)


def close_reads(server: "Server", member: Member, upto: Ticket | None) -> None:
    """The member reads no ticket up to this one any more; it counts as a holder only by what it has."""
    model = server.models[member.hello.model]
    for read in server.reads.close(member.worker, upto):
        server.touch(read.source)
        record = model.versions.get(read.version)
        moving.note_ended(server, model, member, read)
        still = server.reads.current(member.worker)
        is_read = still is not None and still.version == read.version
        if record is not None and not is_read and read.version not in versions_in(member.report):
            record.holders.get(member.shard, {}).pop(member.worker, None)


def take_operation(server: "Server", replica: Replica, member: Member) -> None:
    """What the worker's caller waits for."""
    report = member.report
    was_over = replica.operation is None or replica.operation.is_over
    replica.note_ended(member.shard, report.ended, report.finished)
    former = replica.operation
    if report.operation is not None:
        replica.arrive(member.shard, report.operation, now=server.now)
    if former is not replica.operation:
        operations.release(server.models[member.hello.model], former, replica)
    if not was_over or report.operation is not None:
        server.touch_replica(replica)
