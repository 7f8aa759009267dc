"""Which version a call means by now. An update never goes back: not behind what is held, nor what was held before.

What was held before counts where a call is made once more: the version that it was to bring was lost after a part of it
had been written over the former one. Its caller still waits in one and the same call.
"""

from ...messages import Failure, Filling, Holding, Spec, Vacated, Withdrawing
from ...names import Version
from ...version_spec import PREFETCHED
from ..catalog import Model
from ..groups import GroupCall, Replica
from ..membership import Member
from ..state import State


def meant_by(
    state: State, model: Model, replica: Replica, call: GroupCall
) -> tuple[Version, None] | tuple[None, Failure]:
    """The version, or why there is none now."""
    held = _held_by_all(state, replica, call)
    if call.spec == PREFETCHED:
        version, failure = _prefetched(state, model, replica, held)
    else:
        version, failure = model.resolve(call.spec)
    if call.verb == "update" and held is not None and is_enough(call.spec, held, version):
        return held, None
    if version is None:
        assert failure is not None
        return None, failure
    floor = _had_by_all(state, replica, call)
    if floor is None or version >= floor:
        return version, None
    newer = [each for each in model.available() if each >= floor]
    if newer:
        return newer[-1], None
    return None, all_older(model, replica, floor)


def all_older(model: Model, replica: Replica, floor: Version) -> Failure:
    """Why an update finds no version."""
    text = f"nothing as new as version {floor} of {model.name} is left, which {replica.name} had when it called"
    hint = 'an update never goes back; replicate("latest") takes what there is'
    return Failure("version-unavailable", text, hint)


def is_known(state: State, replica: Replica, call: GroupCall) -> bool:
    """What each shard of the replica holds, or can hold again, is known.

    It is not where one is gone, or still fills its buffer for a call before this one: when it has heard how that one
    ended, it may have all of the version after all.
    """
    members = [state.members.get(worker) for worker in replica.members.values()]
    return len(members) == replica.shards and not any(_still_fills(call, member) for member in members)


def is_older(state: State, replica: Replica, call: GroupCall, version: Version) -> bool:
    """The version is older than what some shard had. All must have come before it is sure that they had different ones.

    Who is about to make its call once more holds what that call has brought until it comes, or nothing; only then it
    says what it had.
    """
    return any(each is not None and each > version for each in _had(state, replica, call))


def _still_fills(call: GroupCall, member: Member | None) -> bool:
    if member is None or not isinstance(member.content.buffer, Filling):
        return False
    told = member.report.call
    return told is None or told.number < call.number


def is_enough(spec: Spec, held: Version, version: Version | None) -> bool:
    """What is held needs no update: nothing newer was asked for, or there is nothing newer."""
    if version is None and isinstance(spec, int):
        return held >= spec  # a number that was never published is not to be had, whatever is held
    return version is None or held >= version


def _prefetched(
    state: State, model: Model, replica: Replica, held: Version | None
) -> tuple[Version | None, Failure | None]:
    """The newest version of which each shard of the replica has a whole copy; or what they hold; or the latest."""
    members = [state.known(worker) for worker in replica.members.values()]  # all of them: it is of an update
    for version in sorted(model.versions, reverse=True):  # what somebody has a whole copy of exists
        if all(member.fills_itself(version) for member in members):
            return version, None
    return (held, None) if held is not None else model.resolve("latest")


def _held_by_all(state: State, replica: Replica, call: GroupCall) -> Version | None:
    """The version that each shard of the replica holds, if it is one."""
    members = [state.members.get(worker) for worker in replica.members.values()]
    held = [_held(replica, call, member) if member is not None else None for member in members]
    return held[0] if len(held) == replica.shards and held.count(held[0]) == len(held) else None


def _held(replica: Replica, call: GroupCall, member: Member) -> Version | None:
    """What it holds, or can hold again: nothing has been written over it yet.

    It had withdrawn for a call before this one, which did not end well. Where it has come to this call since, that says
    what it held when it came.
    """
    buffer, told = member.content.buffer, member.report.call
    if isinstance(buffer, Holding):
        return buffer.version
    if not isinstance(buffer, Withdrawing | Vacated):
        return None
    is_former = told is None or replica.finished < told.number < call.number
    is_this = told is not None and told.number == call.number and told.floor == buffer.version
    return buffer.version if is_former or is_this else None


def _had_by_all(state: State, replica: Replica, call: GroupCall) -> Version | None:
    """The version that each shard of the replica held when its caller began to wait, if it is one."""
    had = _had(state, replica, call)
    return had[0] if len(had) == replica.shards and had.count(had[0]) == len(had) else None


def _had(state: State, replica: Replica, call: GroupCall) -> list[Version | None]:
    """What each of its shards held when its caller began to wait. Who has not come yet will have held what it holds.

    Unless it makes its call once more: see `is_older`.
    """
    had = []
    for worker in replica.members.values():
        member = state.members.get(worker)
        asked = member.report.call if member is not None else None
        if asked is not None and asked.number == call.number:
            had.append(asked.floor)
        else:
            had.append(_held(replica, call, member) if member is not None else None)
    return had


def may_come(model: Model, number: int) -> bool:
    """Numbers only rise: one that a newer one has passed by is never published."""
    return model.newest is None or model.newest < number
