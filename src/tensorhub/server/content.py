"""Judges what a worker reports to hold: what of it counts as its version, and all that follows from it."""

from msgspec.structs import replace

from ..protocol import events
from ..protocol.messages import (
    MAX_COPIES,
    MAX_CROSS_SITE_VERSIONS,
    MAX_PINS,
    Buffer,
    Filling,
    Holding,
    HostCopy,
    Poisoned,
    Reading,
    Report,
    Withdrawing,
    add_up,
)
from ..protocol.names import Digest, Number, Version, WorkerId, is_tiled
from . import state as facts
from .groups import Replica
from .members import (
    NEWS,
    SERVICE,
    WHOLE,
    Content,
    FailedSource,
    Member,
    are_other_copies,
    name_of,
    sources_of,
    version_in,
)
from .state import State
from .versions import Model

# --- What a version is in a layout that no publisher has: the first reader across layouts says it.


def bind(state: State, member: Member, reading: Reading) -> None:
    """It has worked out the root for its layout key. Readers after the first one have to say the same."""
    model, key = state.models[member.hello.model], member.layout_key
    record = model.record(reading.version)
    known = record.roots.get(key)
    if known == reading.root:
        return
    if known is None and is_tiled(reading.root) and key.is_boxed:
        record.roots[key], record.layouts[key] = reading.root, member.report.layout
        state.mark_waiting_dirty(model, sources_of(reading.version, key))
        return
    state.counters["conflicting_holders"] += 1
    for source in reading.sources:
        failed = member.tries.sources.setdefault(source.worker, FailedSource(0.0, 0))
        failed.until = max(failed.until, state.now + state.settings.leave_s)


NO_LAYOUT = Digest("")


# --- What a worker has, judged from its report, and all that follows from it.
#
# The server believes a report unless it knows better: content that is not what its version is, a copy that was told to
# go, a version that is withdrawn for a call which has not been resolved yet.


MAX_SITES = 64  # named in a version's count of what came into each


def take_content(state: State, model: Model, replica: Replica, member: Member, before: Report) -> None:
    """What the worker has in its buffer and beside it, as far as that is the content of its version."""
    report = member.report
    if content_beside(report) != content_beside(before):
        judge_content(state, model, replica, member, before)
    elif report.buffer != before.buffer or (report.call != before.call and isinstance(report.buffer, Withdrawing)):
        now, then = report.buffer, before.buffer
        if isinstance(now, Filling) and isinstance(then, Filling) and now.version == then.version:
            member.content = Content(now, member.content.copies, member.layout_key)  # nothing but more chunks
        else:
            judge_content(state, model, replica, member, before)


def judge_withdrawals(state: State, model: Model, replica: Replica) -> None:
    """Its call is resolved, or over: who has withdrawn ahead of that leaves what it holds, or holds on."""
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is not None and isinstance(member.report.buffer, Withdrawing):
            judge_content(state, model, replica, member, member.report)


def judge_content(state: State, model: Model, replica: Replica, member: Member, before: Report) -> None:
    """What it has is judged anew, and all that follows from it.

    Its report may show that another publish of a version is finished than was known. Then the workers that have counted
    by the one known before are judged, too: an epoch only rises, so that comes to an end.
    """
    report, former = member.report, member.content
    had = model.newest, len(model.available())
    if report.newest is not None:
        model.note_newest(report.newest, report.newest_epoch)
    outdated = _take_finished(model, report)
    buffer, copies = _judged_buffer(state, model, member), _judged_copies(state, model, member)
    member.content = Content(buffer, copies, member.layout_key)  # whether it holds on depends on its copies of now
    if isinstance(buffer, Withdrawing) and not member.may_drop and _holds_on(replica, member, buffer.version):
        buffer = Holding(buffer.version, buffer.root, buffer.published, buffer.epoch, buffer.is_pending)
    if type(buffer) is not type(former.buffer) or version_in(buffer) != version_in(former.buffer):
        member.is_drained = False
    content = member.content = Content(buffer, copies, member.layout_key)
    if before.number:
        _tell_offloads(state, member, former, content)
    model.move(member.worker, former, content)
    if isinstance(buffer, WHOLE) and buffer.published:
        replica.publishes = True
        model.record(buffer.version).publisher = replica.name
    for copy in copies:
        if copy.published and copy.whole and not copy.dropping:  # else it may be of other content
            model.record(copy.version).publisher = replica.name
    for worker in outdated:
        other = state.members.get(worker)
        if other is not None and other is not member:
            judge_content(state, model, model.replicas[other.hello.replica], other, other.report)
            state.mark_dirty(worker)
    is_news = had != (model.newest, len(model.available()))
    has_new_pins = _take_pins(state, model, member, before)
    if report.cross_site_bytes:
        _count_cross_site(model, member, before)
    if has_new_pins:
        state.mark_everyone_dirty(model)
    if is_news:
        state.mark_waiting_dirty(model, NEWS)
    is_other_buffer = type(former.buffer) is not type(buffer) or (former.buffer != buffer and member.is_full)
    if is_other_buffer or are_other_copies(former.copies, copies):
        concerned = {**former.places, **content.places}
        state.mark_concerned_dirty(model, concerned)
        if not isinstance(buffer, Holding) or copies or former.copies:
            state.mark_readers_dirty(member.worker)  # a reader of its buffer may stay once that is whole
        alone = [place for place in concerned if not model.buffer_holders.has_other(member.worker, place)]
        if any(model.look_up(version).exists for version, _ in alone):
            state.mark_waiting_dirty(model, SERVICE)
        if model.closing:
            state.mark_everyone_dirty(model)  # one of them may be chosen for a handover


def _tell_offloads(state: State, member: Member, former: Content, content: Content) -> None:
    """Tells of host copies that are whole now and were copied out of the tensors: no read has brought them."""
    was_whole = [copy.number for copy in former.copies if copy.whole]
    for copy in content.copies:
        is_new = copy.whole and not copy.dropping and copy.number not in was_whole
        reads = [*state.reads.of(member.worker)] if is_new else []
        if is_new and not any(read.version == copy.version and read.grant.to_host for read in reads):
            size_bytes = member.report.size_bytes
            event = events.Offloaded(**name_of(member.worker), version=copy.version, size_bytes=size_bytes)
            state.events.append(event)


def content_beside(report: Report) -> tuple[object, ...]:
    """The content that the worker reports beside its buffer."""
    what = report.copies, report.newest, report.newest_epoch, report.layout, report.pins, report.closing
    return what, report.cross_site_bytes


def _take_finished(model: Model, report: Report) -> list[WorkerId]:
    """What it has of finished publishes makes these versions exist. Returns the workers to be judged anew."""
    outdated: list[WorkerId] = []
    for version, epoch, is_pending in _epochs_in(report):
        if epoch < model.began:
            continue
        record = model.record(version)
        if (not is_pending, epoch) <= (record.exists, record.epoch):
            continue
        if epoch != record.epoch:
            outdated += record.begin(epoch)
        if not is_pending:
            model.note_exists(record)
    return outdated


def _epochs_in(report: Report) -> list[tuple[Version, Number, bool]]:
    """(version, epoch, whether its publish may not have finished) of all that it has whole."""
    found = [(each.version, each.epoch, False) for each in report.copies[:MAX_COPIES] if each.whole]
    buffer = report.buffer
    return [*found, (buffer.version, buffer.epoch, buffer.is_pending)] if isinstance(buffer, WHOLE) else found


def _accepts(
    model: Model, member: Member, version: Version, root: Digest, epoch: Number, layout: Digest = NO_LAYOUT
) -> bool:
    """The content that the worker has as that version is what the version is, as far as is known.

    `layout` is that of a copy of tensors that were registered before.
    """
    layout = layout or member.report.layout
    record, key = model.record(version), member.layout_key.of(layout)
    if epoch < model.began or not record.accepts(key, root, epoch):
        return False
    record.roots.setdefault(key, root)
    record.layouts.setdefault(key, layout)
    model.add_holder(record, member.worker, key)  # what it has beside that may take the room of an unused version
    return True


def _judged_buffer(state: State, model: Model, member: Member) -> Buffer:
    """Its buffer. One with other content than its version counts as poisoned; if that exists, its worker is told."""
    buffer = member.report.buffer
    member.superseded = Number(0)
    if not isinstance(buffer, WHOLE) or _accepts(model, member, buffer.version, buffer.root, buffer.epoch):
        return buffer
    if model.record(buffer.version).exists or buffer.epoch < model.began:
        state.counters["conflicting_holders"] += 1
        member.superseded = buffer.epoch
    return Poisoned()


def _holds_on(replica: Replica, member: Member, held: Version) -> bool:
    """It has withdrawn with its call, which is not resolved, or to what it holds.

    It hears of that with the answer. Until then it counts as one that holds the version.
    """
    asked = member.report.call
    if asked is None or asked.verb not in facts.FILLS or asked.resolved is not None:
        return False
    version = replica.version_of(member.shard, asked, is_put=member.report.ended != asked.number - 1)
    return version is None or version == held


def _judged_copies(state: State, model: Model, member: Member) -> tuple[HostCopy, ...]:
    """Its host copies. A whole one makes its version exist.

    One with other content than its version counts as not whole; so does one that was told to go before it was whole.
    """
    if not member.report.copies:
        member.releasing = {}
        return ()
    found = []
    unfinished = [copy.number for copy in member.content.copies if not copy.whole]
    for copy in member.report.copies[:MAX_COPIES]:
        if copy.number in member.releasing and copy.number in unfinished:
            copy = replace(copy, whole=False)
        if copy.whole and not copy.dropping:
            if not _accepts(model, member, copy.version, copy.root, copy.epoch, copy.layout):
                state.counters["conflicting_holders"] += 1
                member.releasing[copy.number] = None
                copy = replace(copy, whole=False)
        elif member.gives_up(copy) and copy.number not in member.releasing:
            member.releasing[copy.number] = None
            for read in state.reads.from_copy(member.worker, copy.version):
                state.mark_dirty(read.reader)  # it is given another source
        found.append(copy)
    kept = dict.fromkeys(copy.number for copy in found)
    member.releasing = {number: None for number in member.releasing if number in kept}
    return tuple(found)


def _count_cross_site(model: Model, member: Member, before: Report) -> None:
    """Counts the bytes received from other sites since the report before."""
    for version, received in list(member.report.cross_site_bytes.items())[:MAX_CROSS_SITE_VERSIONS]:
        record = model.versions.get(Version(version))
        news = received - before.cross_site_bytes.get(version, 0)
        if record is not None and news > 0:
            add_up(record.cross_site_bytes, member.hello.site, news, most=MAX_SITES)


def _take_pins(state: State, model: Model, member: Member, before: Report) -> bool:
    """What it wants kept, and whether it wants to leave. Returns whether others may have to act on it."""
    report = member.report
    is_news = (report.pins, report.closing) != (before.pins, before.closing)
    if report.pins or member.worker in model.pins:
        model.note_pins(member.worker, report.pins[:MAX_PINS])
    if report.closing and not before.closing:
        model.closing[member.worker] = state.now
    return is_news
