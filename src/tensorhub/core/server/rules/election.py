"""What a worker fetches into host memory ahead of its caller's call.

Its caller may wish for a version, its settings may say that it always fetches the newest one, and a site that lacks the
newest version *elects* a worker to fetch it.
"""

from collections.abc import Iterator

from ...names import Version
from .. import facts
from ..catalog import Model
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import crossing


def wanted_ahead(state: State, model: Model, member: Member) -> Iterator[Version]:
    """What it should have a host copy of, apart from what it has to keep for others; the most important first."""
    wished, latest = _wished(model, member), _latest(model, member)
    if wished is not None:
        yield wished
    if latest is not None and _fetches(state, model, member, latest):
        yield latest


def is_wanted_ahead(state: State, model: Model, member: Member, version: Version) -> bool:
    """The version is one of those."""
    if version == _wished(model, member):
        return True
    return version == _latest(model, member) and _fetches(state, model, member, version)


def _wished(model: Model, member: Member) -> Version | None:
    wish = member.report.prefetch
    return model.resolve(wish, member.hello.companions)[0] if wish is not None else None


def _latest(model: Model, member: Member) -> Version | None:
    if model.replicas[member.hello.replica].publishes:
        return None
    return next(iter(model.available(member.hello.companions)), None)


def _fetches(state: State, model: Model, member: Member, latest: Version) -> bool:
    return member.hello.prefetch == "always" or is_elected(state, model, model.look_up(latest), member)


def is_elected(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """The member is to fetch the version ahead for its site, where nobody has any of it."""
    site, line = member.hello.site, member.line
    if len(model.sites) < 2 or not _is_able(state, model, member, record):
        return False
    current = state.reads.current.get(member.worker)
    is_begun = current is not None and current.version == record.version and current.grant.to_host
    if (is_begun and not member.loses_copy(record.version)) or member.copy(record.version) is not None:
        return True  # it was elected before, and has begun
    for worker in record.holders.get(line, {}):
        other = state.members.get(worker)
        if other is None or other.hello.site != site or worker == member.worker:
            continue
        if other.turns_lost > member.turns_lost and worker not in record.whole.get(line, {}):
            continue
        if not facts.is_silent(state, other):  # one whose line broke is back in a moment
            return False
    mates = [mate for mate in facts.members_of(state, model, line) if mate.hello.site == site]
    able = [mate for mate in mates if _is_able(state, model, mate, record)]
    return min(able, key=lambda mate: (mate.turns_lost, mate.worker)) is member


def _is_able(state: State, model: Model, member: Member, record: VersionRecord) -> bool:
    report = member.report
    if model.replicas[member.hello.replica].publishes:
        return False
    if member.hello.companions and record.version not in model.available(member.hello.companions)[:1]:
        return False  # it wants another one: the newest of its set
    has_room = report.copies_left > 0 or member.copy(record.version) is not None
    is_staying = facts.is_here(state, member) and not report.closing and crossing.may_fit(model, record, member)
    return is_staying and has_room and member.hello.prefetch != "never"
