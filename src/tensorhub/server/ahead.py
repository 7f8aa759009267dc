"""Rules: what a worker fetches into host memory ahead of its caller's call.

Its caller asks for a version, its settings say that it always fetches the newest one, or its site lacks the newest
version and *elects* it to fetch that.
"""

from collections.abc import Iterator

from ..protocol.names import Version
from . import layouts
from . import state as facts
from .members import Member
from .state import State
from .versions import Model, VersionRecord


def wanted_ahead(state: State, model: Model, member: Member) -> Iterator[Version]:
    """Versions that it should have a host copy of, beside those it keeps for others; the most important first."""
    wished, latest = _wished(model, member), _latest(model, member)
    if wished is not None:
        yield wished
    if latest is not None and _fetches(state, model, member, latest):
        yield latest


def _wished(model: Model, member: Member) -> Version | None:
    wish = member.report.prefetch
    return model.resolve(wish)[0] if wish is not None else None


def _latest(model: Model, member: Member) -> Version | None:
    if model.replicas[member.hello.replica].publishes:
        return None
    return model.latest


def _fetches(state: State, model: Model, member: Member, latest: Version) -> bool:
    return member.hello.prefetch == "always" or is_elected(state, model, model.look_up(latest), member)


def is_elected(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """True if its site lacks the version, and this member fetches it ahead of a call for the site."""
    site, key = member.hello.site, member.layout_key
    if len(model.sites) < 2 or not _is_able(state, model, member, record):
        return False
    current = state.reads.current.get(member.worker)
    is_begun = current is not None and current.version == record.version and current.grant.to_host
    if (is_begun and not member.is_dropping_copy(record.version)) or member.copy(record.version) is not None:
        return True  # it was elected before, and has begun
    for worker in record.holders.get(key, {}):
        other = state.members.get(worker)
        if other is None or other.hello.site != site or worker == member.worker:
            continue
        if other.turns_lost > member.turns_lost and worker not in record.whole.get(key, {}):
            continue
        if not facts.is_silent(state, other):  # a worker whose connection broke is back in a moment
            return False
    mates = [mate for mate in facts.members_of(state, model, key) if mate.hello.site == site]
    able = [mate for mate in mates if _is_able(state, model, mate, record)]
    return min(able, key=lambda mate: (mate.turns_lost, mate.worker)) is member


def _is_able(state: State, model: Model, member: Member, record: VersionRecord) -> bool:
    report = member.report
    if model.replicas[member.hello.replica].publishes:
        return False
    has_room = report.copies_left > 0 or member.copy(record.version) is not None
    is_staying = facts.is_here(state, member) and not report.closing and layouts.may_fit(model, record, member)
    return is_staying and has_room and member.hello.prefetch != "never"
