"""One host fetches each host copy once: who needs the same copy waits for it, and then shares its memory.

Rules:
- Workers share if they name the same place, which says that each can map what the other has; and have the same line,
  layout and site. A name of a host alone proves nothing.
- While one of them fetches a version into host memory, those that have nothing of it wait. Nobody waits for one who has
  gone, falls silent, or gets nothing: then the next one fetches.
- A whole copy is mapped by the others. Each of them is a holder as any other: what becomes of the one who fetched it
  takes nothing away from them.
- Who finds that it cannot map reads instead, at once, and fetches its own copies for a while.
"""

from collections.abc import Iterator

from .. import facts
from ..catalog import Model
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import crossing, progress, sources
from .selection import Candidate

MOMENT = 0.125  # of the time between two reports


def copies_to_share(state: State, model: Model, record: VersionRecord, member: Member) -> list[Candidate]:
    """The host copies of the version that the member could map."""
    if not _may_share(state, record, member):
        return []
    behind = state.reads.readers_behind(member.worker, record.version)
    found = [
        sources.host_copy_of(state, record, member, mate)
        for mate in _mates(state, model, member)
        if mate.worker not in behind and not mate.report.closing and _may_be_shared(mate, record)
    ]
    return [each for each in found if each is not None and not each.is_doubtful]


def awaited_until(state: State, model: Model, record: VersionRecord, member: Member) -> float | None:
    """Another worker fetches what the member could share: when to look whether it still does. None: nobody does."""
    if not _may_share(state, record, member):
        return None
    for mate in _mates(state, model, member):
        read = state.reads.current.get(mate.worker)
        if read is None or read.version != record.version or not read.grant.to_host or not facts.is_here(state, mate):
            continue
        if crossing.may_fit(model, record, mate) and not progress.is_held_up(state, read):
            is_silent_at = mate.silent_at + MOMENT * state.report_s
            return min(is_silent_at, state.now + progress.patience_s(state))
    return None


def _may_share(state: State, record: VersionRecord, member: Member) -> bool:
    """It has nothing of the version in host memory yet, and is not known to be unable."""
    return bool(member.hello.place) and member.copy(record.version) is None and member.alone_until <= state.now


def _may_be_shared(mate: Member, record: VersionRecord) -> bool:
    """Its copy is not of what it has published itself, nor of tensors that were registered before.

    A publisher uses the same memory again for the next version, and would have to touch other pages instead.
    """
    copy = mate.copy(record.version)
    return copy is not None and not copy.layout and not copy.published


def _mates(state: State, model: Model, member: Member) -> Iterator[Member]:
    """The others of its host that could share with it."""
    here = member.hello
    for worker in model.hosts.get(here.host, ()):
        mate = state.members.get(worker) if worker.shard == member.shard and worker != member.worker else None
        if mate is None or mate.line != member.line or mate.alone_until > state.now:
            continue
        if (mate.hello.place, mate.hello.site) == (here.place, here.site):
            yield mate
