"""Which of two workers to believe where they differ: the one with a receipt, of this life of the server or another.

A receipt says that the content of a shard is what all shards of a replica have published. Content without one was left
by a publish that never finished. It yields to content with one, whichever is heard first, and its worker is told.
"""

from ..messages import Report
from ..names import Digest, ReplicaName, Version
from .catalog import Model
from .content import WHOLE, Content
from .groups import Replica
from .lines import Line
from .membership import Member
from .receipts import are_equal, publisher_in
from .state import State

NO_LAYOUT = Digest("")


def owed(state: State, model: Model, member: Member) -> dict[int, str]:
    """Receipts for what it holds, and for what it reads: it may have all of that by the time it is heard again."""
    found: dict[int, str] = {}
    if not model.roll.is_over:
        return found
    read = state.reads.current.get(member.worker)
    coming = [(read.version, None, member.line)] if read is not None else []
    for version, root, line in [*coming, *_held(member.content)]:
        if version in member.report.receipts:
            continue
        record = model.versions.get(version)
        known = record.roots.get(line) if record is not None and record.exists else None
        if record is not None and known is not None and root in (None, known):
            publisher = next(iter(record.publishers), "")
            found[version] = state.notary.content(model.name, version, member.shard, known, publisher)
    return found


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
    state: State, model: Model, member: Member, version: Version, root: Digest, layout: Digest = NO_LAYOUT
) -> bool:
    """The content that the worker has as that version is what the version is, as far as is known.

    `layout` is that of a copy of tensors that were registered before.
    """
    layout = layout or member.report.layout
    record, line = model.record(version), member.line.of(layout)
    receipt = member.report.receipts.get(version, "")
    publisher = publisher_in(receipt)
    signed = state.notary.content(model.name, version, member.shard, root, publisher) if receipt else ""
    is_proved = bool(receipt) and are_equal(signed, receipt)
    known = record.roots.get(line)
    if is_proved and known not in (None, root) and line not in record.proved:
        record.roots[line], record.layouts[line] = root, layout
        record.disputed[line] = None  # who counts as a holder by the other root is looked at again
    if is_proved and record.roots.get(line, root) == root:
        record.proved[line] = None
        model.note_exists(version)
        if publisher and not record.publishers:  # a server before this one knew
            record.publishers[ReplicaName(publisher)] = None
            model.changed[version] = None
    return model.bind_content(member.worker, version, line, root, layout)


def holders_in_dispute(state: State, model: Model, version: Version) -> list[tuple[Replica, Member]]:
    """Those that count as holders of other content than the version turned out to be."""
    record = model.versions.get(version)
    if record is None or not record.disputed:
        return []
    lines, record.disputed = list(record.disputed), {}
    members = [(line, state.known(worker)) for line in lines for worker in record.whole.get(line, {})]
    return [
        (model.replicas[member.hello.replica], member)
        for line, member in members
        if any(each[::2] == (version, line) and each[1] != record.roots[line] for each in _held(member.content))
    ]
