"""What a worker has, judged from its report, and all that follows from it.

The server believes a report unless it knows better: content that is not what its version is, a copy that was told to
go, a version that is withdrawn for a call which has not been resolved yet.
"""

from msgspec.structs import replace

from ..messages import (
    MAX_COPIES,
    MAX_CROSS_SITE_VERSIONS,
    MAX_PINS,
    Buffer,
    Filling,
    Holding,
    HostCopy,
    Poisoned,
    Report,
    Vacated,
    Withdrawing,
)
from ..names import Digest, Version
from ..sums import add_up
from . import evidence, facts, places
from .catalog import Model
from .content import WHOLE, Content, are_other_copies, version_in
from .groups import Replica
from .lines import Line
from .membership import Member
from .rules import resting
from .state import State
from .watches import NEWS, SERVICE

MAX_SITES = 64  # named in a version's count of what came into each


def take_content(state: State, model: Model, replica: Replica, member: Member, before: Report) -> None:
    """What the worker has in its buffer and beside it, as far as that is the content of its version."""
    report = member.report
    if (
        member.worker in model.roll.doubted
        or report.receipts != before.receipts
        or content_beside(report) != content_beside(before)
    ):
        judge_content(state, model, replica, member, before)
    elif report.buffer != before.buffer or (report.call != before.call and isinstance(report.buffer, Withdrawing)):
        now, then = report.buffer, before.buffer
        if isinstance(now, Filling) and isinstance(then, Filling) and now.version == then.version:
            member.content = Content(now, member.content.copies, member.line)  # nothing but more chunks
        else:
            judge_content(state, model, replica, member, before)


def judge_withdrawals(state: State, model: Model, replica: Replica) -> None:
    """Its call is resolved, or over: who has withdrawn ahead of that leaves what it holds, or holds on."""
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is not None and isinstance(member.report.buffer, Withdrawing):
            judge_content(state, model, replica, member, member.report)


def judge_content(state: State, model: Model, replica: Replica, member: Member, before: Report) -> None:
    """What it has is judged anew, and all that follows from it."""
    report, former = member.report, member.content
    model.roll.doubted.pop(member.worker, None)
    is_news = False
    if report.newest is not None and evidence.believes_newest(state, model, report):
        is_news = model.note_exists(report.newest)
    for version in _published(member):
        if evidence.take_whole(state, model, replica, member, version):
            is_news |= model.note_exists(version)
    buffer, copies = _judged_buffer(state, model, member), _judged_copies(state, model, member)
    member.content = Content(buffer, copies, member.line)  # whether it holds on depends on its copies of now
    if isinstance(buffer, Withdrawing) and not member.is_let_go and _holds_on(replica, member, buffer.version):
        buffer = Holding(buffer.version, buffer.root, buffer.published)
    if type(buffer) is not type(former.buffer) or version_in(buffer) != version_in(former.buffer):
        member.is_drained = False
    content = member.content = Content(buffer, copies, member.line)
    model.move(member.worker, former, content)
    if isinstance(buffer, WHOLE) and _exists_by(state, replica, buffer):
        is_news |= model.note_exists(buffer.version)
    if isinstance(buffer, WHOLE) and buffer.published:
        replica.publishes = True
        model.record(buffer.version).publishers[replica.name] = None
        if type(former.buffer) is not type(buffer) or former.held != buffer.version:
            member.rested_at = state.now + resting.REST_S
            state.members.wake(member, member.rested_at)
    for copy in copies:
        if copy.published and copy.whole and not copy.leaving:  # else it may be of other content
            model.record(copy.version).publishers[replica.name] = None
    for version in content.versions:
        for group, other in evidence.holders_in_dispute(state, model, version):
            judge_content(state, model, group, other, other.report)
            state.mark_dirty(other.worker)
    is_wished = _take_wishes(state, model, member, before)
    if report.cross_site_bytes:
        _count_cross_site(model, member, before)
    if is_wished:
        state.mark_everyone_dirty(model)
    if is_news:
        state.mark_waiting_dirty(model, NEWS)
    is_other_buffer = type(former.buffer) is not type(buffer) or (former.buffer != buffer and member.is_full)
    if is_other_buffer or are_other_copies(former.copies, copies):
        concerned = {**former.places, **content.places}
        state.mark_concerned_dirty(model, concerned)
        if not isinstance(buffer, Holding) or copies or former.copies:
            state.mark_readers_dirty(member.worker)  # whoever reads from its buffer stays once that is whole
        alone = [place for place in concerned if not model.staying.has_other(member.worker, place)]
        if any(model.look_up(version).exists for version, _ in alone):
            state.mark_waiting_dirty(model, SERVICE)
        if model.closing:
            state.mark_everyone_dirty(model)  # one of them may be the heir


def content_beside(report: Report) -> tuple[object, ...]:
    """What it says of content, beside its buffer and what the server has signed of it."""
    what = report.copies, report.newest, report.newest_receipt, report.layout, report.pins, report.closing
    return what, report.cross_site_bytes


def _judged_buffer(state: State, model: Model, member: Member) -> Buffer:
    """Its buffer. One with other content than its version counts as poisoned, and its worker is told."""
    buffer = member.report.buffer
    member.conflict = Digest("")
    if not isinstance(buffer, WHOLE):
        return buffer
    if evidence.accepts(state, model, member, buffer.version, buffer.root, published=buffer.published):
        return buffer
    model.record(buffer.version).publishers.pop(member.hello.replica, None)  # it has published something else
    if not _may_be_right(model, member, buffer.version, member.line, published=buffer.published):
        state.counters["conflicting_holders"] += 1
        member.conflict = buffer.root
    return Poisoned()


def _published(member: Member) -> dict[Version, None]:
    """Of what it has published itself, and has yet."""
    buffer = member.report.buffer
    copied = {copy.version: None for copy in member.report.copies[:MAX_COPIES] if copy.published and copy.whole}
    return {buffer.version: None, **copied} if isinstance(buffer, WHOLE) and buffer.published else copied


def _may_be_right(model: Model, member: Member, version: Version, line: Line, *, published: bool) -> bool:
    """While a restarted server hears who lives, it may still hear of a proof: it judges what differs when that is over.

    So it is with half of a publish beside half of another one, as long as the rest of it may come. Until then that
    counts as no content at all, and nobody is told: what a worker was told cannot be taken back.
    """
    if line in model.record(version).proved:
        return False
    replica = model.replicas[member.hello.replica]
    if model.roll.is_over and not (published and evidence.may_be_whole_yet(model, replica, member, version, line)):
        return False
    model.roll.doubted[member.worker] = None
    return True


def judge_doubted(state: State, model: Model) -> None:
    """The roll call is over: what differed from what was heard before it is judged by what is known now."""
    doubted, model.roll.doubted = model.roll.doubted, {}
    for worker in doubted:
        member = state.members.get(worker)
        if member is not None:
            judge_content(state, model, model.replicas[member.hello.replica], member, member.report)


def _holds_on(replica: Replica, member: Member, held: Version) -> bool:
    """It has withdrawn ahead of what its call resolves to, and leaves what it holds only for a whole copy it has.

    It hears of that with the answer. Until then it counts as one that holds the version.
    """
    asked = member.report.call
    if asked is None or asked.verb not in facts.FILLS or asked.resolved is not None:
        return False
    version = replica.version_of(member.shard, asked, is_put=member.report.ended != asked.number - 1)
    return version is None or version == held or not member.fills_itself(version)


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
        if copy.whole and not copy.leaving:
            about = copy.version, copy.root, copy.layout
            if evidence.accepts(state, model, member, *about, published=copy.published):
                model.note_exists(copy.version)
            else:
                line = member.line.of(copy.layout or member.report.layout)
                if not _may_be_right(model, member, copy.version, line, published=copy.published):
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
    """What it has received from other sites since its report before."""
    for version, received in list(member.report.cross_site_bytes.items())[:MAX_CROSS_SITE_VERSIONS]:
        record = model.versions.get(Version(version))
        news = received - before.cross_site_bytes.get(version, 0)
        if record is not None and news > 0:
            add_up(record.cross_site_bytes, member.hello.site, news, most=MAX_SITES)


def _take_wishes(state: State, model: Model, member: Member, before: Report) -> bool:
    """What it wants kept, and whether it wants to leave. Returns whether others may have to act on it."""
    report = member.report
    is_news = (report.pins, report.closing) != (before.pins, before.closing)
    if report.pins or member.worker in model.pins:
        model.note_pins(member.worker, report.pins[:MAX_PINS])
    if report.closing and not before.closing:
        model.closing[member.worker] = None
        member.closing_since = state.now
        places.note_leaver(model, member.line)
    return is_news


def _exists_by(state: State, replica: Replica, buffer: Holding | Withdrawing | Vacated) -> bool:
    """This buffer shows that its version exists: it was replicated, or its publisher stands by it as a whole."""
    if not buffer.published:
        return True
    group = [state.members.get(worker) for worker in replica.members.values()]
    return sum(m is not None and m.stands_by(buffer.version) for m in group) == replica.shards
