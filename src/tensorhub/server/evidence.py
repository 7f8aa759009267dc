"""Judges what a worker reports to hold, and which of two workers to believe where they differ."""

from itertools import islice

from msgspec.structs import replace

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
    Vacated,
    Withdrawing,
    add_up,
)
from ..protocol.names import Digest, ReplicaName, Shard, Version, WorkerId, era_in, is_tiled
from . import state as facts
from .groups import Replica
from .members import (
    NEWS,
    SERVICE,
    WHOLE,
    Content,
    FailedSource,
    LayoutKey,
    Member,
    are_other_copies,
    sources_of,
    version_in,
)
from .state import State
from .versions import Model, Taken, VersionRecord, are_equal, publisher_in, says_established

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
        if _is_of_proved(state, record, member, reading):
            record.proved[key] = None
        state.mark_waiting_dirty(model, sources_of(reading.version, key))
        return
    state.counters["conflicting_holders"] += 1
    for source in reading.sources:
        failed = member.tries.sources.setdefault(source.worker, FailedSource(0.0, 0))
        failed.until = max(failed.until, state.now + state.settings.leave_s)


def _is_of_proved(state: State, record: VersionRecord, member: Member, reading: Reading) -> bool:
    """It has it from the manifests of sources that were granted here, and each of them is proved."""
    proved = [record.roots[key] for key in record.proved if key in record.roots]
    read = next((read for read in state.reads.of(member.worker) if read.ticket == reading.ticket), None)
    return read is not None and all(source.root in proved for source in read.sources)


# --- Which of two workers to believe where they differ: the one with a receipt, of this life of the server or
# another.
#
# A receipt says that the content of a shard is what all shards of a replica have published. Content without one was
# left by a publish that never finished. It yields to content with one, whichever is heard first, and its worker is
# told.


NO_LAYOUT = Digest("")


def owed(state: State, model: Model, member: Member) -> dict[int, str]:
    """Receipts for what it holds, and for what it reads: it may have all of that by the time it is heard again.

    Only for what is proved: else half of a publish that never finished could come to be believed more than another one.
    """
    found: dict[int, list[str]] = {}
    if not model.roll.is_over:
        return {}
    read = state.reads.current.get(member.worker)
    coming = [(read.version, None, member.layout_key)] if read is not None else []
    for version, root, key in [*coming, *_held(member.content)]:
        record = model.versions.get(version)
        if record is None or not record.exists or key not in record.proved or root not in (None, record.roots[key]):
            continue
        own = member.hello.replica
        if own in record.claims:
            continue  # its own publish has not ended: another one's name would speak against its siblings
        publisher = own if own in record.named else next(iter(record.named), "")
        about = model.name, version, member.shard, record.roots[key], publisher
        found.setdefault(version, []).append(state.notary.content(*about, is_established=record.is_established))
    shown = member.report.receipts  # of a version that it has in two layouts it has one of the two
    return {version: each[-1] for version, each in found.items() if shown.get(version) not in each}


def _held(content: Content) -> list[tuple[Version, Digest, LayoutKey]]:
    buffer = content.buffer
    whole = [copy for copy in content.copies if copy.whole] if content.copies else []
    found = [(copy.version, copy.root, content.layout_key_of(copy.version, is_copy=True)) for copy in whole]
    if isinstance(buffer, WHOLE):
        found.append((buffer.version, buffer.root, content.layout_key))
    return found


def believes_newest(state: State, model: Model, report: Report) -> bool:
    """The highest number that the worker has heard of was once taken, and it can show that."""
    if report.newest is None:
        return False
    if model.newest is not None and report.newest <= model.newest:
        return True
    if is_of_a_former_era(model, report):
        return False
    return are_equal(state.notary.newest(model.name, report.newest, model.era), report.newest_receipt)


def is_of_a_former_era(model: Model, report: Report) -> bool:
    """The worker has not heard that the model was begun anew: what it holds, and knows of numbers, is void."""
    return era_in(report.newest_receipt) < model.era


def take_era(state: State, model: Model, report: Report) -> bool:
    """A server before this one has begun the model anew. Returns whether that is news."""
    era = era_in(report.newest_receipt)
    if era <= model.era:
        return False
    if not are_equal(state.notary.newest(model.name, report.newest, era), report.newest_receipt):
        return False
    model.begin_anew(era)
    return True


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
    if is_of_a_former_era(model, member.report):
        return False
    layout = layout or member.report.layout
    record, key = model.record(version), member.layout_key.of(layout)
    if _is_proved(state, model, member, version, root):
        receipt = member.report.receipts[version]
        if record.roots.get(key, root) != root and key not in record.proved:
            record.roots[key], record.layouts[key] = root, layout
            record.disputed[key] = None  # who counts as a holder by the other root is looked at again
        if record.roots.get(key, root) == root:
            _take_proof(model, record, key, receipt)
    elif key not in record.proved and not _may_count(state, model, record, member, key, root, published=published):
        return False
    elif key not in record.proved and record.roots.get(key, root) != root:
        if not published and not record.claims and _is_half_only(record, key):
            record.roots[key], record.layouts[key] = root, layout  # its reader had it from a worker that had all of it
            record.disputed[key] = None
        elif _is_gone(state, record, member, key):
            del record.roots[key], record.layouts[key]
    return model.bind_content(member.worker, version, key, root, layout)


def _is_proved(state: State, model: Model, member: Member, version: Version, root: Digest) -> bool:
    """The worker has a receipt for that content."""
    receipt = member.report.receipts.get(version, "")
    if not receipt:
        return False
    about = model.name, version, member.shard, root, publisher_in(receipt)
    return are_equal(state.notary.content(*about, is_established=says_established(receipt)), receipt)


def _take_proof(model: Model, record: VersionRecord, key: LayoutKey, receipt: str) -> None:
    """What the receipt says of the version, apart from its content."""
    record.proved[key] = None
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
    state: State, model: Model, record: VersionRecord, member: Member, key: LayoutKey, root: Digest, *, published: bool
) -> bool:
    """Nothing speaks against it where nothing proves what that shard is: no version is made of two publishes."""
    if published and not model.roll.is_over:
        return False  # whether that publish has finished is not known before all are heard
    if _is_other_than_taken(record, key, root):
        return False
    return not published or not (
        _is_left_over(record, member)
        or _is_of_another_try(record, member, key, root)
        or _is_beside_another(state, model, record, member, key)
    )


def _is_left_over(record: VersionRecord, member: Member) -> bool:
    """It was published there, and another replica is known to have published the version: the publish never finished.

    A replica that has finished its publish has a receipt on one of its shards.
    """
    own = member.hello.replica
    return bool(record.named) and own not in record.named and own not in record.claims


def _is_of_another_try(record: VersionRecord, member: Member, key: LayoutKey, root: Digest) -> bool:
    """This server has let its replica publish something else under that number, once more perhaps."""
    return record.accepted.get(member.hello.replica, {}).get(key, root) != root


def _is_other_than_taken(record: VersionRecord, key: LayoutKey, root: Digest) -> bool:
    """The server has taken other content for that shard, and some worker still has it."""
    taken = record.taken
    if taken is None or key in record.proved or taken.roots.get(key, root) == root:
        return False
    return any(record.roots.get(each) == what and record.whole.get(each) for each, what in taken.roots.items())


def _is_beside_another(state: State, model: Model, record: VersionRecord, member: Member, key: LayoutKey) -> bool:
    """It seems to be half of a publish beside half of another publish, and no other worker has that key."""
    own = member.hello.replica
    if any(own in those for those in (record.named, record.accepted, _takers(record))):
        return False
    if any(worker != member.worker for worker in islice(record.whole.get(key, {}), 2)):
        return False  # that has the same content, or another one
    if _made_by(state, model.replicas[own], record.version) is not None:
        return False
    rivals = [model.replicas[name] for name in record.publishers if name != own and name in model.replicas]
    held = record.whole.values()
    return any(worker in each for rival in rivals for worker in rival.members.values() for each in held)


def _takers(record: VersionRecord) -> tuple[ReplicaName, ...]:
    """The replica that has published what the version was taken for, if it was."""
    return (record.taken.publisher,) if record.taken is not None else ()


def _is_half_only(record: VersionRecord, key: LayoutKey) -> bool:
    """Only publishers hold that key, and no publish of it is known to have finished."""
    holders = record.whole.get(key, {})
    known = *_takers(record), *record.accepted
    are_halves = all(each.replica in record.publishers and each.replica not in known for each in holders)
    return bool(holders) and are_halves


def may_be_whole_yet(model: Model, replica: Replica, member: Member, version: Version, key: LayoutKey) -> bool:
    """What the replica has published may turn out to be the version: a shard is away, or on its way to it.

    Only while nothing else is known of that key, and the worker is not closing.
    """
    record, call = model.record(version), replica.call
    if member.report.closing or (record.named and replica.name not in record.named):
        return False
    if any(worker.replica not in record.publishers for worker in record.whole.get(key, {})):
        return False
    is_made = call is not None and not call.is_over and (call.verb, call.version) == ("publish", version)
    return is_made or len(replica.members) < replica.shards


def take_whole(state: State, model: Model, replica: Replica, member: Member, version: Version) -> bool:
    """All shards of its replica stand by what they have published: that is the version, if nothing speaks against it.

    That proves it where this server has let them publish it. Else one before it did, and may have let others, too:
    then half of another publish is no measure for it, and a proof is. Returns whether that is news.
    """
    record, name = model.record(version), replica.name
    if member.layout_key.of(member.report.layout) in record.proved:
        return False  # as it mostly is: there may be thousands of shards
    is_known = bool(record.named) and name not in record.named
    if not model.roll.is_over or is_known or record.claims:
        return False  # a publish that goes on proves it when it ends
    made, accepted = _made_by(state, replica, version), record.accepted.get(name, {})
    if made is None or any(key in record.proved and record.roots[key] != root for key, (root, _) in made.items()):
        return False
    if any(accepted.get(key, root) != root for key, (root, _) in made.items()):
        return False  # a shard has it of another try
    if record.taken is not None and record.taken.publisher != name and any(record.whole.values()):
        return False  # another replica was first
    if any(_is_other_than_taken(record, key, root) for key, (root, _) in made.items()):
        return False  # a shard has it of another try
    record.taken = Taken(name, {key: root for key, (root, _) in made.items()})
    is_news = False
    for key, (root, layout) in made.items():
        if record.roots.get(key) != root:
            record.roots[key], record.layouts[key] = root, layout
            record.disputed[key], is_news = None, True
    if accepted and any(key not in record.proved for key in made):
        record.note_published(made, name)
        is_news = True
    return is_news


def _made_by(state: State, replica: Replica, version: Version) -> dict[LayoutKey, tuple[Digest, Digest]] | None:
    """By layout key: (root, layout) of what each shard has published and keeps. None: some shard does not."""
    found: dict[LayoutKey, tuple[Digest, Digest]] = {}
    for shard in range(replica.shards):
        member = state.members.get(replica.members[Shard(shard)]) if Shard(shard) in replica.members else None
        root = _published_by(member, version) if member is not None else None
        if member is None or root is None:
            return None
        found[member.layout_key.of(member.report.layout)] = root, member.report.layout
    return found


def _published_by(member: Member, version: Version) -> Digest | None:
    buffer, report = member.report.buffer, member.report
    if isinstance(buffer, (Holding, Withdrawing)) and buffer.version == version and buffer.published:
        return buffer.root if isinstance(buffer, Holding) or not member.may_drop else None
    for copy in report.copies:
        is_kept = copy.whole and not copy.dropping and copy.number not in member.releasing
        if copy.version == version and copy.published and is_kept and copy.layout in (NO_LAYOUT, report.layout):
            return copy.root
    return None


def _has_another(state: State, record: VersionRecord, member: Member, key: LayoutKey) -> bool:
    """Another worker holds the content that the version is taken for, or reads it."""
    mine = [one for one in (member.report.buffer, *member.report.copies) if isinstance(one, (*WHOLE, HostCopy))]
    if len({(one.root, one.published) for one in mine if one.version == record.version}) > 1:
        return True  # it says two things of it, and may count by the other one
    if any(worker != member.worker for worker in islice(record.whole.get(key, {}), 2)):
        return True
    reads = [state.reads.current.get(worker) for worker in record.holders.get(key, {}) if worker != member.worker]
    return any(each is not None and each.grant.root == record.roots[key] for each in reads)


def _is_gone(state: State, record: VersionRecord, member: Member, key: LayoutKey) -> bool:
    """No worker that held, read or published that content is left."""
    return not record.claims and not _has_another(state, record, member, key)


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
    record, key = model.record(made.version), member.layout_key
    if key in record.proved:
        return False
    siblings = [state.members.get(worker) for worker in replica.members.values()]
    witnesses = [each for each in siblings if each is not None and each.report.finished == call.number]
    if any(each.former_session >= member.former_seen for each in witnesses):
        return False
    if record.roots.get(key) != made.root:
        record.roots[key], record.layouts[key] = made.root, member.report.layout
        record.disputed[key] = None
    record.note_published([key], replica.name)
    return True


def holders_in_dispute(state: State, model: Model, version: Version) -> list[tuple[Replica, Member]]:
    """Those that count as holders of other content than the version turned out to be, or may do so."""
    record = model.versions.get(version)
    if record is None or not (record.disputed or record.is_unsettled):
        return []
    keys, record.disputed = list(record.disputed), {}
    members = [(key, state.known(worker)) for key in keys for worker in record.whole.get(key, {})]
    found = [
        (model.replicas[member.hello.replica], member)
        for key, member in members
        if any(each[::2] == (version, key) and each[1] != record.roots[key] for each in _held(member.content))
    ]
    if record.is_unsettled:
        record.is_unsettled = False
        others = [model.replicas[name] for name in record.publishers if name in model.replicas]
        living = [(each, state.members.get(worker)) for each in others for worker in each.members.values()]
        found += [
            (each, member) for each, member in living if member is not None and version in member.content.versions
        ]
    return found


# --- What a worker has, judged from its report, and all that follows from it.
#
# The server believes a report unless it knows better: content that is not what its version is, a copy that was told to
# go, a version that is withdrawn for a call which has not been resolved yet.


MAX_JUDGED = 3  # times that one worker is judged anew because of one report
MAX_SITES = 64  # named in a version's count of what came into each


def take_content(state: State, model: Model, replica: Replica, member: Member, before: Report) -> None:
    """What the worker has in its buffer and beside it, as far as that is the content of its version."""
    report = member.report
    if (
        member.worker in model.roll.undecided
        or report.receipts != before.receipts
        or content_beside(report) != content_beside(before)
    ):
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


def judge_content(
    state: State,
    model: Model,
    replica: Replica,
    member: Member,
    before: Report,
    above: tuple[WorkerId, ...] = (),
) -> None:
    """What it has is judged anew, and all that follows from it.

    `above` were judged anew because of each other. Workers that contradict themselves would go on without an end.
    """
    report, former = member.report, member.content
    model.roll.undecided.pop(member.worker, None)
    is_news = take_era(state, model, report)
    if report.newest is not None and believes_newest(state, model, report):
        is_news = model.note_exists(report.newest)
    for version in _published(member):
        if not is_of_a_former_era(model, report) and take_whole(state, model, replica, member, version):
            is_news |= model.note_exists(version)
    buffer, copies = _judged_buffer(state, model, member), _judged_copies(state, model, member)
    member.content = Content(buffer, copies, member.layout_key)  # whether it holds on depends on its copies of now
    if isinstance(buffer, Withdrawing) and not member.may_drop and _holds_on(replica, member, buffer.version):
        buffer = Holding(buffer.version, buffer.root, buffer.published)
    if type(buffer) is not type(former.buffer) or version_in(buffer) != version_in(former.buffer):
        member.is_drained = False
    content = member.content = Content(buffer, copies, member.layout_key)
    model.move(member.worker, former, content)
    if isinstance(buffer, WHOLE) and _exists_by(state, replica, buffer):
        is_news |= model.note_exists(buffer.version)
    if isinstance(buffer, WHOLE) and buffer.published:
        replica.publishes = True
        model.record(buffer.version).publishers[replica.name] = None
    for copy in copies:
        if copy.published and copy.whole and not copy.dropping:  # else it may be of other content
            model.record(copy.version).publishers[replica.name] = None
    for version in content.versions:
        for group, other in holders_in_dispute(state, model, version):
            if above.count(other.worker) < MAX_JUDGED:
                judge_content(state, model, group, other, other.report, (*above, other.worker))
            state.mark_dirty(other.worker)
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
    if accepts(state, model, member, buffer.version, buffer.root, published=buffer.published):
        return buffer
    model.record(buffer.version).publishers.pop(member.hello.replica, None)  # it has published something else
    if not _may_be_right(model, member, buffer.version, member.layout_key, published=buffer.published):
        state.counters["conflicting_holders"] += 1
        member.conflict = buffer.root
    return Poisoned()


def _published(member: Member) -> dict[Version, None]:
    """Of what it has published itself, and has yet."""
    buffer = member.report.buffer
    copied = {copy.version: None for copy in member.report.copies[:MAX_COPIES] if copy.published and copy.whole}
    return {buffer.version: None, **copied} if isinstance(buffer, WHOLE) and buffer.published else copied


def _may_be_right(model: Model, member: Member, version: Version, key: LayoutKey, *, published: bool) -> bool:
    """While a restarted server hears who lives, it may still hear of a proof: it judges what differs when that is over.

    So it is with half of a publish beside half of another one, as long as the rest of it may come. Until then that
    counts as no content, and no worker is told: an order cannot be taken back.
    """
    if key in model.record(version).proved:
        return False
    replica = model.replicas[member.hello.replica]
    if model.roll.is_over and not (published and may_be_whole_yet(model, replica, member, version, key)):
        return False
    model.roll.undecided[member.worker] = None
    return True


def judge_doubted(state: State, model: Model) -> None:
    """The roll call is over: what differed from what was heard before it is judged by what is known now."""
    undecided, model.roll.undecided = model.roll.undecided, {}
    for worker in undecided:
        member = state.members.get(worker)
        if member is not None:
            judge_content(state, model, model.replicas[member.hello.replica], member, member.report)


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
            about = copy.version, copy.root, copy.layout
            if accepts(state, model, member, *about, published=copy.published):
                model.note_exists(copy.version)
            else:
                key = member.layout_key.of(copy.layout or member.report.layout)
                if not _may_be_right(model, member, copy.version, key, published=copy.published):
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


def _take_pins(state: State, model: Model, member: Member, before: Report) -> bool:
    """What it wants kept, and whether it wants to leave. Returns whether others may have to act on it."""
    report = member.report
    is_news = (report.pins, report.closing) != (before.pins, before.closing)
    if report.pins or member.worker in model.pins:
        model.note_pins(member.worker, report.pins[:MAX_PINS])
    if report.closing and not before.closing:
        model.closing[member.worker] = None
    return is_news


def _exists_by(state: State, replica: Replica, buffer: Holding | Withdrawing | Vacated) -> bool:
    """This buffer shows that its version exists: it was replicated, or its publisher stands by it as a whole."""
    if not buffer.published:
        return True
    group = [state.members.get(worker) for worker in replica.members.values()]
    return sum(m is not None and m.holds_until_told(buffer.version) for m in group) == replica.shards
