"""What a worker should be reading now: its caller's call comes before what is fetched ahead."""

from typing import NamedTuple

from ...names import Version
from .. import facts
from ..catalog import Model
from ..groups import Replica
from ..membership import Member
from ..state import State
from . import retention


class Wanted(NamedTuple):
    """A read that a worker should have."""

    version: Version
    to_host: bool


def wanted_read(state: State, model: Model, replica: Replica, member: Member) -> Wanted | None:
    """What this worker should be reading now, and can. Its caller's call comes before what is fetched ahead."""
    version = facts.wanted_version(replica, member)
    if version is not None and facts.may_have(state, member, version):
        return None
    if version is None or member.holds(version) or member.fills_itself(version):
        version = retention.version_to_fetch(state, model, replica, member)
        is_whole = version is not None and member.has_whole_copy(version)
        return Wanted(version, True) if version is not None and not is_whole else None
    if _is_to_hear_that_it_goes(state, model, member, version):
        return None
    copy, current = member.copy(version), state.reads.current.get(member.worker)
    if copy is not None and not copy.unfit:
        return Wanted(version, True)
    is_coming = current is not None and current.version == version and current.grant.to_host
    if is_coming and not member.loses_copy(version):
        return Wanted(version, True)  # which is about to begin
    return None if facts.is_read_though_poisoned(member.content.buffer) else Wanted(version, False)


def _is_to_hear_that_it_goes(state: State, model: Model, member: Member, version: Version) -> bool:
    """A whole copy of it is to go, and the worker was not told yet: it fills itself from that, and would not read."""
    going = [c.number for c in member.report.copies if c.version == version and c.whole and not (c.leaving or c.unfit)]
    going = [number for number in going if number in member.releasing]
    return bool(going) and not set(going) <= set(retention.copies_to_release(state, model, member))
