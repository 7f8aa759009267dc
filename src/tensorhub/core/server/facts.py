"""Questions about the state that several rules ask. None of them changes anything."""

from collections.abc import Iterator

from ..messages import Buffer, Filling, Holding, HostCopy, Poisoned, Withdrawing
from ..names import Digest, Version, WorkerId
from .catalog import Model
from .content import WHOLE
from .groups import GroupCall, Replica
from .lines import Line
from .membership import Member
from .open_reads import OpenRead
from .state import State

FILLS = ("replicate", "update")


def is_silent(state: State, member: Member) -> bool:
    """Nothing has come from it for more than two reports."""
    return state.now > member.silent_at


def is_here(state: State, member: Member) -> bool:
    """It seems to live: its connection is open, and it was heard lately. A dead host leaves its connections open."""
    return member.is_connected and state.now <= member.silent_at


def is_doubtful(state: State, source: Member) -> bool:
    """There is reason to doubt that anybody can read from it. What one reader has learned helps the others."""
    return source.is_doubted or not is_here(state, source)


def is_read_though_poisoned(buffer: Buffer) -> bool:
    """A fill has failed there, and others may still read what it had brought: nobody may change that yet."""
    return isinstance(buffer, Poisoned) and buffer.version is not None


def is_undecided(state: State, member: Member) -> bool:
    """Whether what it holds is what its version is will be known when a restarted server has heard who lives.

    Or, of half of a publish beside half of another one, when the rest of it has come.
    """
    return member.worker in state.models[member.hello.model].roll.doubted


def is_undecided_there(state: State, source: Member, version: Version, from_host: bool) -> bool:
    """It has the version there, and serves it as far as it knows; whether that is what the version is, is undecided.

    Doubt about one version says nothing of the others that the worker has.
    """
    if not is_undecided(state, source):
        return False
    if from_host:
        reported = any(c.version == version and c.whole and not c.leaving for c in source.report.copies)
        return reported and source.keeps_copy(version)
    buffer = source.report.buffer
    if source.holds(version) or not isinstance(buffer, (Holding, Withdrawing)) or buffer.version != version:
        return False
    return isinstance(buffer, Holding) or not (buffer.impatient or source.is_let_go)


def is_wished(state: State, model: Model, member: Member, version: Version) -> bool:
    """The member keeps the version though it has no room."""
    return model.is_wished(version, _wish(state, member))


def gives_way(state: State, model: Model, member: Member, version: Version) -> bool:
    """The member's copy of the version goes where there is no room."""
    return model.gives_way(version, _wish(state, member))


def _wish(state: State, member: Member) -> int:
    return state.settings.retain_of(member.hello.retain, is_reliable=member.hello.reliable)


def may_have(state: State, member: Member, version: Version) -> bool:
    """It says that it has all of the version, and whether that is so is not decided yet: it needs nothing of it."""
    buffer, copies = member.report.buffer, [c for c in member.report.copies if c.whole and not (c.leaving or c.unfit)]
    had = [one.version for one in (buffer, *copies) if isinstance(one, (*WHOLE, HostCopy))]
    return is_undecided(state, member) and version in had


def members_of(state: State, model: Model, line: Line) -> Iterator[Member]:
    """The living members of that line, one of each replica."""
    for replica in model.replicas.values():
        member = state.members.get(replica.members[line.shard]) if line.shard in replica.members else None
        if member is not None and member.line == line:
            yield member


def is_full(member: Member, version: Version, from_host: bool) -> bool:
    """It has all of the version, in its host copy or in its buffer."""
    return member.has_whole_copy(version) if from_host else member.content.held == version


def is_leaving(source: Member, version: Version, from_host: bool) -> bool:
    """The source wants to give up what it has of the version there."""
    buffer = source.content.buffer
    if from_host:
        return source.report.closing
    return isinstance(buffer, Withdrawing) and buffer.version == version


def serves(state: State, source: WorkerId, version: Version, from_host: bool) -> bool:
    """As far as is known, the source still has the version. One whose lease has ended may well go on serving."""
    member = state.members.get(source)
    if member is None or is_undecided_there(state, member, version, from_host):
        return True
    if from_host:
        is_about_to = _is_granted(state, source, version, to_host=True)
        return member.keeps_copy(version) or (is_about_to and not member.loses_copy(version))
    buffer = member.content.buffer
    if isinstance(buffer, (Holding, Filling)) and buffer.version == version:
        return True
    if isinstance(buffer, Withdrawing) and buffer.version == version:
        return not buffer.impatient and not member.is_let_go
    if isinstance(buffer, Filling):
        return False
    return _is_granted(state, source, version, to_host=False)  # it fills the buffer with it next


def _is_granted(state: State, reader: WorkerId, version: Version, *, to_host: bool) -> bool:
    current = state.reads.current.get(reader)
    return current is not None and current.version == version and current.grant.to_host == to_host


def is_full_source(state: State, member: Member, version: Version) -> bool:
    """It has all of the version and may serve it."""
    is_held = member.holds(version) and serves(state, member.worker, version, from_host=False)
    return is_held or member.has_whole_copy(version)


def has_whole(state: State, worker: WorkerId, version: Version) -> bool:
    """It has all of the version, in its buffer or as a host copy that is not about to go."""
    member = state.members.get(worker)
    return member is not None and (member.holds(version) or member.has_whole_copy(version))


def holds_on(state: State, worker: WorkerId, version: Version) -> bool:
    """It is there, and has the version in its buffer, which it does not want to take back."""
    member = state.members.get(worker)
    return member is not None and member.holds_on(version)


def roots_of(state: State, replica: Replica, call: GroupCall) -> dict[Line, Digest]:
    """What those who have come to a publish bring, by line."""
    members = [state.members.get(worker) for worker in replica.members.values()]
    return {m.line: call.arrived[m.shard] for m in members if m is not None and m.shard in call.arrived}


def wanted_version(replica: Replica, member: Member) -> Version | None:
    """The version that this worker is to be filled with now."""
    reported = member.report.call
    call = replica.find(reported.number) if reported is not None else None
    if call is None or call.is_over or call.verb not in FILLS or member.shard not in call.arrived:
        return None
    buffer = member.content.buffer
    if isinstance(buffer, Filling) and buffer.version != call.version:
        return None
    return call.version


def must_wait(state: State, source: Member, reads: list[OpenRead]) -> bool:
    """The source has to keep what these read.

    A source that can cut its readers off waits neither for those whose read was taken back (they have another source,
    or none can help them) nor for those who seem to be gone. Any other source waits until each of them has stopped.
    """
    if not source.hello.revocable:
        return bool(reads)
    readers = [state.members.get(read.reader) for read in reads if not read.is_void]
    return any(reader is not None and is_here(state, reader) for reader in readers)
