"""Which of two workers to believe where they differ: the one with a receipt, of this life of the server or another.

A receipt says that the content of a shard is what all shards of a replica have published. Content without one was left
by a publish that never finished. It yields to content with one, whichever is heard first, and its worker is told.
"""

from itertools import islice

from ..messages import Holding, HostCopy, Report
from ..names import Digest, ReplicaName, Version
from .catalog import Model
from .content import WHOLE, Content
from .groups import Replica
from .lines import Line
from .membership import Member
from .receipts import are_equal, publisher_in, says_established
from .records import VersionRecord
from .state import State

NO_LAYOUT = Digest("")


def owed(state: State, model: Model, member: Member) -> dict[int, str]:
    """Receipts for what it holds, and for what it reads: it may have all of that by the time it is heard again.

    Only for what is proved: else half of a publish that never finished could come to be believed more than another one.
    """
    found: dict[int, list[str]] = {}
    if not model.roll.is_over:
        return {}
    read = state.reads.current.get(member.worker)
    coming = [(read.version, None, member.line)] if read is not None else []
    for version, root, line in [*coming, *_held(member.content)]:
        record = model.versions.get(version)
        if record is None or not record.exists or line not in record.proved or root not in (None, record.roots[line]):
            continue
        own = member.hello.replica
        if own in record.claims:
            continue  # its own publish has not ended: another one's name would speak against its siblings
        publisher = own if own in record.named else next(iter(record.named), "")
        about = model.name, version, member.shard, record.roots[line], publisher
        found.setdefault(version, []).append(state.notary.content(*about, is_established=record.is_established))
    shown = member.report.receipts  # of a version that it has in two layouts it has one of the two
    return {version: each[-1] for version, each in found.items() if shown.get(version) not in each}


def _held(content: Content) -> list[tuple[Version, Digest, Line]]:
    buffer = content.buffer
    whole = [copy for copy in content.copies if copy.whole] if content.copies else []
    found = [(copy.version, copy.root, content.line_of(copy.version, is_copy=True)) for copy in whole]
    if isinstance(buffer, WHOLE):
        found.append((buffer.version, buffer.root, content.line))
    return found


def believes_newest(state: State, model: Model, report: Report) -> bool:
    """The highest number that the worker has heard of was once taken, and it can show that."""
    if report.newest is None:
        return False
    if model.newest is not None and report.newest <= model.newest:
        return True
    return are_equal(state.notary.newest(model.name, report.newest), report.newest_receipt)


def accepts(
    state: State,
    model: Model,
    member: Member,
    version: Version,
    root: Digest,
    layout: Digest = NO_LAYOUT,
    *,
    published: bool = False,
) -> bool:
    """The content that the worker has as that version is what the version is, as far as is known.

    `layout` is that of a copy of tensors that were registered before. `published`: by this worker itself.
    """
    layout = layout or member.report.layout
    record, line = model.record(version), member.line.of(layout)
    if _is_proved(state, model, member, version, root):
        receipt = member.report.receipts[version]
        if record.roots.get(line, root) != root and line not in record.proved:
            record.roots[line], record.layouts[line] = root, layout
            record.disputed[line] = None  # who counts as a holder by the other root is looked at again
        if record.roots.get(line, root) == root:
            _take_proof(model, record, line, receipt)
    elif published and not model.roll.is_over and line not in record.proved:
        return False  # whether that publish has finished is not known before all are heard
    elif published and _is_left_over(record, member, line):
        if record.roots.get(line) == root and not _has_another(state, record, member, line):
            del record.roots[line], record.layouts[line]  # it was heard first, and is no measure for others
        return False
    elif record.roots.get(line, root) != root and line not in record.proved and _is_gone(state, record, member, line):
        del record.roots[line], record.layouts[line]
    return model.bind_content(member.worker, version, line, root, layout)


def _is_proved(state: State, model: Model, member: Member, version: Version, root: Digest) -> bool:
    """The worker has a receipt for that content."""
    receipt = member.report.receipts.get(version, "")
    if not receipt:
        return False
    about = model.name, version, member.shard, root, publisher_in(receipt)
    return are_equal(state.notary.content(*about, is_established=says_established(receipt)), receipt)


def _take_proof(model: Model, record: VersionRecord, line: Line, receipt: str) -> None:
    """What the receipt says of the version, apart from its content."""
    record.proved[line] = None
    model.note_exists(record.version)
    publisher = ReplicaName(publisher_in(receipt))
    if publisher:
        record.note_named(publisher)
    if publisher and not record.publishers:  # a server before this one knew
        record.publishers[publisher] = None
        model.changed[record.version] = None
    if says_established(receipt) and not record.is_established:
        model.note_established(record)


def _is_left_over(record: VersionRecord, member: Member, line: Line) -> bool:
    """It was published there, and another replica is known to have published the version: the publish never finished.

    Who has finished one has a receipt, or another shard of its replica has.
    """
    own = member.hello.replica
    return line not in record.proved and bool(record.named) and own not in record.named and own not in record.claims


def _has_another(state: State, record: VersionRecord, member: Member, line: Line) -> bool:
    """Somebody else has what the version is taken for, or reads that. Others may be filling with what it really is."""
    mine = [one for one in (member.report.buffer, *member.report.copies) if isinstance(one, (*WHOLE, HostCopy))]
    if len({(one.root, one.published) for one in mine if one.version == record.version}) > 1:
        return True  # it says two things of it, and may count by the other one
    if any(worker != member.worker for worker in islice(record.whole.get(line, {}), 2)):
        return True
    reads = [state.reads.current.get(worker) for worker in record.holders.get(line, {}) if worker != member.worker]
    return any(each is not None and each.grant.root == record.roots[line] for each in reads)


def _is_gone(state: State, record: VersionRecord, member: Member, line: Line) -> bool:
    """Whoever had, got or published that content is gone."""
    return not record.claims and not _has_another(state, record, member, line)


def take_inherited(state: State, model: Model, replica: Replica, member: Member) -> bool:
    """It hears now that its publish has ended, as a server before this one had found: that proves its content.

    Returns whether that is news. The server before spoke to it and to those who say so as one replica. A process that a
    newer one of its name has replaced meanwhile was not spoken to since: calls are counted anew by then, and its own
    may have the same number.
    """
    made, call = member.report.buffer, member.report.call
    if call is None or call.verb != "publish" or call.number != replica.finished:
        return False
    if not isinstance(made, Holding) or not made.published or made.version != call.resolved:
        return False
    record, line = model.record(made.version), member.line
    if line in record.proved:
        return False
    siblings = [state.members.get(worker) for worker in replica.members.values()]
    witnesses = [each for each in siblings if each is not None and each.report.finished == call.number]
    if any(each.former_session >= member.former_seen for each in witnesses):
        return False
    if record.roots.get(line) != made.root:
        record.roots[line], record.layouts[line] = made.root, member.report.layout
        record.disputed[line] = None
    record.note_published([line], replica.name)
    return True


def holders_in_dispute(state: State, model: Model, version: Version) -> list[tuple[Replica, Member]]:
    """Those that count as holders of other content than the version turned out to be, or may do so."""
    record = model.versions.get(version)
    if record is None or not (record.disputed or record.is_unsettled):
        return []
    lines, record.disputed = list(record.disputed), {}
    members = [(line, state.known(worker)) for line in lines for worker in record.whole.get(line, {})]
    found = [
        (model.replicas[member.hello.replica], member)
        for line, member in members
        if any(each[::2] == (version, line) and each[1] != record.roots[line] for each in _held(member.content))
    ]
    if record.is_unsettled:
        record.is_unsettled = False
        others = [model.replicas[name] for name in record.publishers if name in model.replicas]
        living = [(each, state.members.get(worker)) for each in others for worker in each.members.values()]
        found += [
            (each, member) for each, member in living if member is not None and version in member.content.versions
        ]
    return found
