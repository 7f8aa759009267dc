"""Carries out decisions: the one place where a rule's answer changes the server's state."""

from math import inf

from ..protocol import events
from ..protocol.names import Version
from . import retention
from .groups import GroupCall, Replica
from .journal import Established
from .members import ARRIVALS, NEWS, LayoutKey, LayoutSet, Member, loss_of, plain_layout_set
from .reads import Drained
from .state import State
from .versions import Model

# --- The layout key of each worker, and what follows when it changes: called when a report names another layout.


def note_layout_key(state: State, member: Member) -> None:
    """The worker has registered other tensors: its layout key, and its replica's layout set, may change."""
    model, replica = state.place(member)
    key = member.layout_key.of(member.report.layout)
    if key != member.layout_key:
        if member.hello.reliable:
            note_company(state, model, key)
            model.reliable[member.layout_key].pop(member.worker)
            note_company(state, model, member.layout_key)
            model.reliable.setdefault(key, {})[member.worker] = None
        member.layout_key = key
    if not member.report.layout:
        return
    if key.is_boxed:
        model.has_boxes = True
        state.mark_everyone_dirty(model)  # reliable holders of a version may have another layout
    if not key.is_boxed:
        model.note_layout_set(plain_layout_set(replica.shards))
    keys = _layout_keys_of(state, replica)
    if keys is not None and not _is_mixture(replica.layout_set, keys):
        note_layout_set(model, replica, keys)


def note_filled(state: State, model: Model, replica: Replica) -> None:
    """All of its shards have the same version, which proves that they have registered all of the model."""
    keys = _layout_keys_of(state, replica)
    if keys is not None and keys != replica.layout_set:
        note_layout_set(model, replica, keys)
        state.mark_everyone_dirty(model)


def note_layout_set(model: Model, replica: Replica, keys: LayoutSet) -> None:
    """The shards of the replica have these layout keys."""
    replica.layout_set = keys
    model.note_layout_set(keys)


def _layout_keys_of(state: State, replica: Replica) -> LayoutSet | None:
    """Those of its shards, if all of them live and have registered tensors."""
    members = [state.members.get(replica.members[shard]) for shard in sorted(replica.members)]
    keys = tuple(each.layout_key for each in members if each is not None and each.report.layout)
    return keys if len(keys) == replica.shards else None


def _is_mixture(before: LayoutSet | None, keys: LayoutSet) -> bool:
    """Some of its shards have registered other tensors, and the rest has not yet: is that all of the model?"""
    return before is not None and keys != before and any(key in before for key in keys)


def note_company(state: State, model: Model, key: LayoutKey) -> None:
    """The key's only reliable worker gets company, or loses it: it may have to copy what it holds ahead."""
    reliable = model.reliable.get(key, {})
    member = state.members.get(next(iter(reliable))) if len(reliable) == 1 else None
    if member is not None and (member.content.copies or member.report.copies_left):
        state.mark_dirty(member.worker)


# --- group calls ---


def release(state: State, model: Model, call: GroupCall | None, replica: Replica) -> None:
    """The call is over: what it claimed or was promised is free."""
    record = model.versions.get(call.version) if call is not None and call.version is not None else None
    if record is None:
        return
    was_publishing = record.is_publishing and call is not None and call.verb == "publish"
    was_promised = record.promised.pop(replica.name, 0) is None
    record.is_publishing &= not was_publishing
    if was_publishing or was_promised:
        keys = [key for layout_set in model.known_layout_sets() for key in layout_set if key.shards == replica.shards]
        state.mark_concerned_dirty(model, [(record.version, key) for key in keys])  # the replica wants it no more
    if was_promised:
        state.mark_waiting_dirty(model, ARRIVALS)


# --- what is said -----------------------------------------------------------------------------------------------------


def note_drained(state: State, member: Member, drained: Drained) -> None:
    """The member is about to be told whether its buffer has readers."""
    member.is_drained = drained.version is not None
    if drained.look_again_at < inf:
        state.members.wake(member, drained.look_again_at)


def let_go(state: State, model: Model, member: Member, numbers: tuple[int, ...]) -> None:
    """These host copies of the member are to go, and never count again. What follows from it is decided next."""
    if not numbers:
        return
    going = [copy for copy in member.content.copies if copy.number in numbers and copy.number not in member.releasing]
    if going:
        member.releasing.update((copy.number, None) for copy in going)
        state.mark_dirty(member.worker)
        state.mark_readers_dirty(member.worker)
        concerned = [(copy.version, member.content.layout_key_of(copy.version, is_copy=True)) for copy in going]
        state.mark_concerned_dirty(model, concerned)


def note_changed_versions(state: State) -> bool:
    """Act on versions whose whole holders have changed. Returns whether a worker is dirty."""
    for model in state.models.values():
        if not model.changed:
            continue
        if not model.is_listening:
            lost, back = model.news_of_losses()
            safe = retention.newly_established(state, model)
            if lost or back:
                _tell_losses(state, model, lost, back)
            model.has_died = False
            for record in safe:
                model.note_established(record)
                state.journal.append(Established(model.name, record.version))
            _wake_for_news(state, model)
        model.changed = {}
    return bool(state.dirty)


def _wake_for_news(state: State, model: Model) -> None:
    """Which versions there are, which of them are to be kept, or which is established is not what it was."""
    former, now = model.noted, model.glance()
    if former is now:
        return
    model.noted = now
    before = dict.fromkeys(former.available if former is not None else ())
    after = dict.fromkeys(now.available)
    turned = [version for version in {**before, **after} if (version in before) != (version in after)]
    if former is None or former[1:] != now[1:]:
        state.mark_waiting_dirty(model, NEWS, *map(loss_of, turned))


def _tell_losses(state: State, model: Model, lost: list[Version], back: list[Version]) -> None:
    """Where all workers close of their own will, nothing that they give up is told as lost."""
    is_given_up = not model.has_died and all(_is_closing(state, each) for each in model.replicas.values())
    state.events += [events.Back(model=model.name, version=each) for each in back if model.lost[each]]
    model.note_losses(lost, back, is_told=not is_given_up)
    for version in lost if not is_given_up else ():
        failure = model.loss(model.look_up(version))
        state.events.append(events.Lost(model=model.name, version=version, why=failure.message, hint=failure.hint))
    state.counters["lost_versions"] += len(lost)


def _is_closing(state: State, replica: Replica) -> bool:
    """A shard of it closes, or is not there any more."""
    members = [state.known(worker) for worker in replica.members.values()]
    return len(members) < replica.shards or any(member.report.closing for member in members)
