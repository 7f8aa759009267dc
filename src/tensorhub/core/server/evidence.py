"""Which of two workers to believe where they differ: the one with a receipt, of this life of the server or another.

A receipt says that the content of a shard is what all shards of a replica have published. Content without one was left
by a publish that never finished. It yields to content with one, whichever is heard first, and its worker is told.
"""

from itertools import islice

from ..messages import Holding, HostCopy, Report, Withdrawing
from ..names import Digest, ReplicaName, Shard, Version
from .catalog import Model
from .content import WHOLE, Content
from .groups import Replica
from .lines import Line
from .membership import Member
from .receipts import are_equal, publisher_in, says_established
from .records import Taken, VersionRecord
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
    elif line not in record.proved and not _may_count(state, model, record, member, line, root, published=published):
        return False
    elif line not in record.proved and record.roots.get(line, root) != root:
        if not published and not record.claims and _is_half_only(record, line):
            record.roots[line], record.layouts[line] = root, layout  # its reader had it from somebody who had it all
            record.disputed[line] = None
        elif _is_gone(state, record, member, line):
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


def _may_count(
    state: State, model: Model, record: VersionRecord, member: Member, line: Line, root: Digest, *, published: bool
) -> bool:
    """Nothing speaks against it where nothing proves what that shard is: no version is made of two publishes."""
    if published and not model.roll.is_over:
        return False  # whether that publish has finished is not known before all are heard
    if _is_other_than_taken(record, line, root):
        return False
    return not published or not (
        _is_left_over(record, member)
        or _is_of_another_try(record, member, line, root)
        or _is_beside_another(state, model, record, member, line)
    )


def _is_left_over(record: VersionRecord, member: Member) -> bool:
    """It was published there, and another replica is known to have published the version: the publish never finished.

    Who has finished one has a receipt, or another shard of its replica has.
    """
    own = member.hello.replica
    return bool(record.named) and own not in record.named and own not in record.claims


def _is_of_another_try(record: VersionRecord, member: Member, line: Line, root: Digest) -> bool:
    """This server has let its replica publish something else under that number, once more perhaps."""
    return record.accepted.get(member.hello.replica, {}).get(line, root) != root


def _is_other_than_taken(record: VersionRecord, line: Line, root: Digest) -> bool:
    """This server took something else for that shard, and somebody has some of that version yet."""
    taken = record.taken
    if taken is None or line in record.proved or taken.roots.get(line, root) == root:
        return False
    return any(record.roots.get(each) == what and record.whole.get(each) for each, what in taken.roots.items())


def _is_beside_another(state: State, model: Model, record: VersionRecord, member: Member, line: Line) -> bool:
    """It is half of a publish, as far as is known, beside half of another one, and nobody else has that line."""
    own = member.hello.replica
    if any(own in those for those in (record.named, record.accepted, _takers(record))):
        return False
    if any(worker != member.worker for worker in islice(record.whole.get(line, {}), 2)):
        return False  # that has the same content, or another one
    if _made_by(state, model.replicas[own], record.version) is not None:
        return False
    rivals = [model.replicas[name] for name in record.publishers if name != own and name in model.replicas]
    held = record.whole.values()
    return any(worker in each for rival in rivals for worker in rival.members.values() for each in held)


def _takers(record: VersionRecord) -> tuple[ReplicaName, ...]:
    """The replica that has published what the version was taken for, if it was."""
    return (record.taken.publisher,) if record.taken is not None else ()


def _is_half_only(record: VersionRecord, line: Line) -> bool:
    """Nobody has that line but who has published it, and it is not known whether any of them to the end."""
    holders = record.whole.get(line, {})
    known = *_takers(record), *record.accepted
    are_halves = all(each.replica in record.publishers and each.replica not in known for each in holders)
    return bool(holders) and are_halves


def may_be_whole_yet(model: Model, replica: Replica, member: Member, version: Version, line: Line) -> bool:
    """What the replica has published may turn out to be the version: a shard is away, or on its way to it.

    As long as nothing is known of that line but what others have published, and the worker does not want to leave.
    """
    record, call = model.record(version), replica.call
    if member.report.closing or (record.named and replica.name not in record.named):
        return False
    if any(worker.replica not in record.publishers for worker in record.whole.get(line, {})):
        return False
    is_made = call is not None and not call.is_over and (call.verb, call.version) == ("publish", version)
    return is_made or len(replica.members) < replica.shards


def take_whole(state: State, model: Model, replica: Replica, member: Member, version: Version) -> bool:
    """All shards of its replica stand by what they have published: that is the version, if nothing speaks against it.

    That proves it where this server has let them publish it. Else one before it did, and may have let others, too:
    then half of another publish is no measure for it, and a proof is. Returns whether that is news.
    """
    record, name = model.record(version), replica.name
    if member.line.of(member.report.layout) in record.proved:
        return False  # as it mostly is: there may be thousands of shards
    is_known = bool(record.named) and name not in record.named
    if not model.roll.is_over or is_known or record.claims:
        return False  # a publish that goes on proves it when it ends
    made, accepted = _made_by(state, replica, version), record.accepted.get(name, {})
    if made is None or any(line in record.proved and record.roots[line] != root for line, (root, _) in made.items()):
        return False
    if any(accepted.get(line, root) != root for line, (root, _) in made.items()):
        return False  # a shard has it of another try
    if record.taken is not None and record.taken.publisher != name and any(record.whole.values()):
        return False  # whoever was first
    if any(_is_other_than_taken(record, line, root) for line, (root, _) in made.items()):
        return False  # a shard has it of another try
    record.taken = Taken(name, {line: root for line, (root, _) in made.items()})
    is_news = False
    for line, (root, layout) in made.items():
        if record.roots.get(line) != root:
            record.roots[line], record.layouts[line] = root, layout
            record.disputed[line], is_news = None, True
    if accepted and any(line not in record.proved for line in made):
        record.note_published(made, name)
        is_news = True
    return is_news


def _made_by(state: State, replica: Replica, version: Version) -> dict[Line, tuple[Digest, Digest]] | None:
    """By line: (root, layout) of what each shard says that it has published, and does not give up. None: not all do."""
    found: dict[Line, tuple[Digest, Digest]] = {}
    for shard in range(replica.shards):
        member = state.members.get(replica.members[Shard(shard)]) if Shard(shard) in replica.members else None
        root = _published_by(member, version) if member is not None else None
        if member is None or root is None:
            return None
        found[member.line.of(member.report.layout)] = root, member.report.layout
    return found


def _published_by(member: Member, version: Version) -> Digest | None:
    buffer, report = member.report.buffer, member.report
    if isinstance(buffer, (Holding, Withdrawing)) and buffer.version == version and buffer.published:
        return buffer.root if isinstance(buffer, Holding) or not member.is_let_go else None
    for copy in report.copies:
        is_kept = copy.whole and not copy.leaving and copy.number not in member.releasing
        if copy.version == version and copy.published and is_kept and copy.layout in (NO_LAYOUT, report.layout):
            return copy.root
    return None


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
