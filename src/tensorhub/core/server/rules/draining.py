"""When a worker may change its buffer: nobody reads from it any more, and nobody was promised what only it has."""

from math import inf
from typing import NamedTuple

from ...messages import Holding, Poisoned, Withdrawing
from ...names import Version
from .. import facts
from ..catalog import Model
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import covered, crossing, retention, witness


class Drained(NamedTuple):
    """Which version nobody reads any more, if any, and when to ask again although nothing may have been heard."""

    version: Version | None = None
    look_again_at: float = inf


NOT_DRAINED = Drained()


def drained_version(state: State, model: Model, member: Member) -> Drained:
    """The version that this worker wants to leave, if nobody reads it there any more or still has to."""
    buffer = member.content.buffer
    if not isinstance(buffer, (Withdrawing, Poisoned)) or buffer.version is None:
        return NOT_DRAINED
    if not model.roll.is_over or witness.is_strange(state, member):
        return NOT_DRAINED
    if _has_readers(state, member, buffer.version):
        return NOT_DRAINED
    if isinstance(buffer, Poisoned) or member.is_drained:
        return Drained(buffer.version)
    if retention.must_stay(state, model, member):
        patience_until = member.closing_since + state.settings.spot_heir_s
        is_patient = member.report.closing and patience_until > state.now
        return Drained(look_again_at=patience_until if is_patient else inf)
    if retention.is_in_doubt(state, model, member):
        return NOT_DRAINED
    if buffer.impatient:
        return Drained(buffer.version)
    record = model.versions.get(buffer.version)
    if record is None or not record.promised:
        return Drained(buffer.version)
    is_last = is_last_holder(state, model, record, member)
    is_needed = is_last and is_awaited(state, model, record, member)
    return Drained(None if is_needed else buffer.version)


def _has_readers(state: State, source: Member, version: Version) -> bool:
    """Somebody must be waited for before the source may change its buffer.

    A reader that has only opened there what comes next reads nothing of what the buffer has now.
    """
    return facts.must_wait(state, source, state.reads.from_buffer(source.worker, version))


def is_last_holder(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """Nobody else holds this line of the version whole and stays, nor all lines of another cut."""
    for worker in record.holders.get(leaver.line, {}):
        member = state.members.get(worker)
        if member is None:
            continue
        is_held = isinstance(member.content.buffer, Holding) and member.holds(record.version)
        if member.has_whole_copy(record.version) or (worker != leaver.worker and is_held):
            return False

    def counts(member: Member) -> bool:
        return member is not leaver and (member.stays(record.version) or member.has_whole_copy(record.version))

    return not covered.by_another_cut(state, model, record, leaver.line, counts)


def is_awaited(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """A replica was promised the version, and a worker of it that could read it here has not got it yet."""
    is_for_all = crossing.is_readable(record, leaver.line)
    for name in record.promised:
        replica = model.replicas.get(name)
        for worker in replica.members.values() if replica is not None else ():
            member = state.members.get(worker)
            if member is None or not member.is_connected or member.worker == leaver.worker:
                continue
            is_reader = member.line == leaver.line or (is_for_all and member.line.is_boxed)
            if is_reader and not member.holds(record.version):
                return True
    return False
