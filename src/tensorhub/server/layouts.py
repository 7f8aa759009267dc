"""Rules about layouts: which versions a worker's layout can read, and where a version is held."""

from collections.abc import Callable, Iterator

from ..protocol.errors import UsageError
from ..protocol.manifest import difference_hint, layout_difference
from ..protocol.messages import MAX_READ_SOURCES, Failure, Spec
from ..protocol.names import Digest, ModelName, ReplicaName, Shard, is_tiled
from ..protocol.status import DescribedView, LayoutsView, ShardView, SourceView
from . import state as facts
from .groups import Replica
from .members import LayoutKey, LayoutSet, Member
from .state import State
from .versions import Model, VersionRecord

# --- Whether a version can be read into the tensors of a worker: with its own layout key, or across layouts.


def may_fit(model: Model, record: VersionRecord, member: Member) -> bool:
    """The version can fill its tensors, as far as is known."""
    theirs = record.layouts.get(member.layout_key)
    if theirs is not None or not member.report.layout:
        return member.fits(theirs)
    return (
        not record.roots
        or _is_of_its_layout_set(model, record, member.layout_key)
        or can_cross(record, member.layout_key)
    )


def can_cross(record: VersionRecord, key: LayoutKey) -> bool:
    """Both sides have boxes, and there is a digest for each tile."""
    return key.is_boxed and any(is_readable(record, other) for other in record.roots)


def is_readable(record: VersionRecord, key: LayoutKey) -> bool:
    """Workers with another layout can read this shard of the version."""
    return key.is_boxed and is_tiled(record.roots.get(key, Digest("")))


def readable_layout_sets(model: Model, record: VersionRecord, key: LayoutKey) -> Iterator[LayoutSet]:
    """The other layout sets that hold all of the version, as far as is known, and can be read."""
    for layout_set in coming_layout_sets(model, record, key):
        if all(is_readable(record, each) and record.whole.get(each) for each in layout_set):
            yield layout_set


def coming_layout_sets(model: Model, record: VersionRecord, key: LayoutKey) -> Iterator[LayoutSet]:
    """The other layout sets that can be read once they hold all of the version."""
    for layout_set in model.layout_sets:
        if key in layout_set or len(layout_set) > MAX_READ_SOURCES:
            continue
        if all(is_readable(record, each) if each in record.roots else each.is_boxed for each in layout_set):
            yield layout_set


def _is_of_its_layout_set(model: Model, record: VersionRecord, key: LayoutKey) -> bool:
    """Some shard of a layout set with that key is known for the version."""
    return any(
        key in layout_set and any(other in record.roots for other in layout_set)
        for layout_set in model.known_layout_sets()
    )


def why_unreadable(state: State, model: Model, record: VersionRecord, member: Member) -> Failure | None:
    """Why the version can never be read into the tensors of this worker; None if it can, as far as is known."""
    if not member.report.layout:
        return None
    if may_fit(model, record, member):
        return _why_too_wide(model, record, member) or _why_only_with_boxes(record, member)
    key, layouts = member.layout_key, record.layouts
    name = f"version {record.version} of {model.name}"
    if record.roots and key.is_boxed != any(each.is_boxed for each in record.roots):
        if key.is_boxed and _is_to_be_boxed(state, model, record):
            return None
        published, registered = ("without", "with") if key.is_boxed else ("with", "without")
        text = f"{name} was published {published} boxes, and {member.worker} has registered {registered} them"
        hint = "register(..., boxes={...}) on both sides, or on neither; boxes={} says that all tensors are whole"
        return Failure("layout-mismatch", text, hint)
    its = key if key in layouts else next((each for each in layouts if each[:2] == key[:2]), None)
    difference = _difference(state, record, member, layouts[its]) if its is not None else None
    if difference is None and key.is_boxed:
        text = f"{name} has no digests of tiles, and {member.worker} has another layout"
        return Failure("layout-mismatch", text, "publish it with boxes too, or register the same tensors as there")
    if difference is None and its is None:
        others = ", ".join(map(str, sorted({each.shards for each in record.roots})))
        text = f"{member.worker} was opened with shards={key.shards}, {name} was published with shards={others}"
        hint = "open as many shards on both sides, or say with boxes what each of them has"
        return Failure("layout-mismatch", text, hint)
    if difference is None:
        text = f"the tensors of {member.worker} differ from those of {name}"
        return Failure("layout-mismatch", text, "register the same tensors in the same order on both sides")
    return Failure("layout-mismatch", *difference)


def _is_to_be_boxed(state: State, model: Model, record: VersionRecord) -> bool:
    """Its publisher, of one shard, is told to publish it with boxes too, or is about to."""
    if record.version != model.newest:
        return False
    replica = model.replicas.get(record.publisher) if record.publisher is not None else None
    workers = replica.members.values() if replica is not None and replica.shards == 1 else ()
    members = [state.members[worker] for worker in workers if worker in state.members]
    return any(each.report.can_box or each.layout_key.is_boxed for each in members if not each.report.closing)


def _why_only_with_boxes(record: VersionRecord, member: Member) -> Failure | None:
    """No worker has it without boxes any more, and it can be had with boxes."""
    key = member.layout_key
    if key.is_boxed or not member.report.can_box or record.holders.get(key):
        return None
    if not any(is_tiled(root) and record.whole.get(each) for each, root in record.roots.items()):
        return None
    text = f"version {record.version} is held with boxes only, and {member.worker} has registered without them"
    return Failure("layout-mismatch", text, "register(..., boxes={}) says that all tensors are whole")


def _why_too_wide(model: Model, record: VersionRecord, member: Member) -> Failure | None:
    """The version has too many shards to be read across layouts. (Workers with its layout can read it.)"""
    key = member.layout_key
    if not key.is_boxed or key in record.layouts or not can_cross(record, key):
        return None
    layout_sets = [
        layout_set
        for layout_set in model.layout_sets
        if key not in layout_set and all(is_readable(record, each) for each in layout_set)
    ]
    if not layout_sets or any(len(layout_set) <= MAX_READ_SOURCES for layout_set in layout_sets):
        return None
    text = f"version {record.version} of {model.name} has {min(map(len, layout_sets))} shards, and"
    text = f"{text} {member.worker} has another layout: one read takes at most {MAX_READ_SOURCES} shards"
    return Failure("layout-mismatch", text, "publish it from fewer ranks, each with more of it")


def _difference(state: State, record: VersionRecord, member: Member, layout: Digest) -> tuple[str, str] | None:
    """In words, and what to do."""
    mine, theirs = state.layouts.get(member.report.layout), state.layouts.get(layout)
    if mine is None or theirs is None:
        return None
    here, there = f"in {member.worker}", f"in version {record.version}"
    try:
        ours, others = mine.decode(), theirs.decode()
    except UsageError:
        return None  # what is no layout differs too, but no word of it is repeated
    text = layout_difference(ours, others, here=here, there=there)
    return (text, difference_hint(ours, others, shards=member.layout_key.shards)) if text is not None else None


# --- Where a version is, in any layout: whether all of it is held, and whether a part is held in another layout.


def is_whole(state: State, model: Model, record: VersionRecord) -> bool:
    """Each of its shards is known to be held. Otherwise it seems lost, though a holder may only be cut off."""
    return any(all(_is_key_whole(state, record, key) for key in layout_set) for layout_set in model.known_layout_sets())


def _is_key_whole(state: State, record: VersionRecord, key: LayoutKey) -> bool:
    return any(facts.has_whole(state, worker, record.version) for worker in record.holders.get(key, {}))


def is_in_another_layout(
    state: State, model: Model, record: VersionRecord, key: LayoutKey, counts: Callable[[Member], bool]
) -> bool:
    """Workers that count hold the content of that key in another layout."""
    if not key.is_boxed:
        return False
    for layout_set in readable_layout_sets(model, record, key):
        if all(any(counts(state.known(worker)) for worker in record.whole[each]) for each in layout_set):
            return True
    return False


def has_company(model: Model, member: Member) -> bool:
    """Another reliable worker could have the version: one with its layout, or all of another layout."""
    if len(model.reliable.get(member.layout_key, {})) > 1:
        return True
    if not member.layout_key.is_boxed:
        return False
    others = [
        layout_set
        for layout_set in model.layout_sets
        if member.layout_key not in layout_set and all(key.is_boxed for key in layout_set)
    ]
    return any(
        all(any(w not in model.closing for w in model.reliable.get(key, {})) for key in layout_set)
        for layout_set in others
    )


# --- The layouts of the living replicas of a model. A publisher divides its tensors into tiles for all of them.


def living_layouts(state: State, name: ModelName, asker: ReplicaName | None = None) -> LayoutsView:
    """The boxes of every living worker of the model, each once, and which workers have them.

    And which shards of the asker's replica are there.
    """
    model = state.models.get(name)
    numbers: dict[bytes, int] = {}
    shards: list[ShardView] = []
    replicas = model.replicas.values() if model is not None else ()
    for replica in replicas:
        for shard, worker in replica.members.items():
            member = state.members.get(worker)
            layout = state.layouts.get(member.report.layout) if member is not None else None
            if layout is not None and layout.boxes:
                number = numbers.setdefault(layout.boxes, len(numbers))
                shards.append(ShardView(replica.name, shard, replica.shards, number))
    mine = model.replicas.get(asker) if model is not None and asker is not None else None
    here, missed = _siblings(state, mine) if mine is not None else ((), "")
    is_listening = state.is_untold if model is None else model.is_listening
    patience_s = state.settings.lease_s if not is_listening else None
    return LayoutsView(tuple(shards), tuple(numbers), here, missed, patience_s)


def _siblings(state: State, replica: Replica) -> tuple[tuple[int, ...], str]:
    members = [(shard, state.members.get(worker)) for shard, worker in replica.members.items()]
    here = tuple(sorted(shard for shard, member in members if member is not None and not member.report.closing))
    if replica.missed is None or replica.missed[0] in here:
        return here, ""
    shard, why = replica.missed
    return here, f"shard {shard} of {replica.name} could not make its last call, and has left: {why.message}"


# --- What a version is and which workers have it, for a client without tensors: one shard at a time.


MAX_SOURCES = 8  # one of which should answer

LISTENS = Failure(
    "unavailable", "the reference server has restarted, and not all workers have reported to it yet", "retry"
)


def describe(state: State, name: ModelName, spec: Spec, shard: Shard) -> DescribedView:
    """The layout of that shard of the version that the spec means now, and its whole holders."""
    model = state.models.get(name)
    if model is None:
        unknown = Failure("version-unavailable", f"no model {name!r} is known", "is its trainer running?")
        return DescribedView(failure=LISTENS if state.is_untold else unknown)
    if model.is_listening:
        return DescribedView(failure=LISTENS)
    version, failure = model.resolve(spec)
    if version is None:
        return DescribedView(failure=failure)
    record = model.look_up(version)
    layout_set = _layout_set_of(model, record)
    if shard >= len(layout_set):
        text = f"{name} has {len(layout_set)} shards, and none is number {shard}"
        return DescribedView(failure=Failure("usage", text, "shards count from 0"))
    key = layout_set[shard]
    layout = state.layouts.get(record.layouts[key]) if key in record.layouts else None
    if layout is None:
        text = f"no worker has said how shard {shard} of version {version} of {name} is laid out"
        return DescribedView(failure=Failure("version-unavailable", text, "wait until a worker registers it"))
    sources = tuple(_sources(state, model, record, key)[:MAX_SOURCES])
    return DescribedView(version, len(layout_set), record.roots[key], bytes(layout.layout), sources)


def _layout_set_of(model: Model, record: VersionRecord) -> LayoutSet:
    """The layout in which the version is described: one that is held whole, if there is one."""
    layout_sets = list(model.known_layout_sets())
    return next(
        (layout_set for layout_set in layout_sets if all(record.whole.get(key) for key in layout_set)), layout_sets[0]
    )


def _sources(state: State, model: Model, record: VersionRecord, key: LayoutKey) -> list[SourceView]:
    """The most promising sources first."""
    found = []
    for member in [state.known(worker) for worker in record.whole.get(key, {})]:
        from_host = not member.holds(record.version)
        likely = facts.is_here(state, member), not member.report.closing, not from_host
        found.append((tuple(not each for each in likely), member.worker, from_host, member.hello.endpoints))
    return [SourceView(str(worker), endpoints, from_host) for _, worker, from_host, endpoints in sorted(found)]
