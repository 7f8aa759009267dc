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
    copy, current = member.copy(version), state.reads.current.get(member.worker)
    if copy is not None and not copy.unfit:
        return Wanted(version, True)
    is_coming = current is not None and current.version == version and current.grant.to_host
    if is_coming and not member.loses_copy(version):
        return Wanted(version, True)  # which is about to begin
    return None if facts.is_read_though_poisoned(member.content.buffer) else Wanted(version, False)
