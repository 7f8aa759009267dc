"""What a publisher copies to its own host memory while what it has published rests.

Where no other reliable worker has the version it will be the last reliable holder when it withdraws that, and would
have to offload it then, while its caller waits. So it makes the copy before it is needed, and `unpublish` copies
nothing.

Rules:
- Where other workers of its shard are reliable they may have the version in a moment, and the copy would be in vain.
  So it is ordered only once the version has rested for a while.
- It is ordered only where there is room beside what is there, and beside what the caller wants fetched ahead; and,
  where others are reliable, beside what it may have to keep as their heir.
- The copy goes when another reliable worker has all of the version; when the version need not be kept any more; or when
  another reliable worker has come and there is no more room, for the publisher may have to be its heir.
"""

from ...messages import Holding
from ...names import Version
from ..catalog import Model
from ..membership import Member
from ..state import State
from . import covered

REST_S = 1.0  # a GiB over 10 Gbit/s: who is not done by then may take long


def version_to_copy(state: State, model: Model, member: Member) -> Version | None:
    """What it is to copy now, or has copied, because nobody else reliable may have it in time."""
    version = _kept_here(model, member)
    if version is None or member.report.copy_error is not None:
        return None
    spare = 1 if member.report.prefetch is not None else 0
    if covered.has_company(model, member):
        if state.now < member.rested_at or not is_used(state, model, member, version):
            return None
        spare += 1
    return version if member.copy(version) is not None or member.report.copies_left > spare else None


def is_used(state: State, model: Model, member: Member, version: Version) -> bool:
    """The copy that it has made, or is making, will spare it an offload."""
    if version != _kept_here(model, member):
        return False
    reliable = model.reliable.get(member.line, {})
    if len(reliable) > 1 and not member.report.copies_left:
        return False
    whole = model.look_up(version).whole.get(member.line, {})
    if any(other in whole and other not in model.closing for other in reliable if other != member.worker):
        return False
    record = model.look_up(version)

    def counts(other: Member) -> bool:
        return other is not member and other.hello.reliable and other.keeps(version)

    return not covered.by_another_cut(state, model, record, member.line, counts)


def _kept_here(model: Model, member: Member) -> Version | None:
    """The version that it has published, holds and would have to keep."""
    buffer = member.content.buffer
    if not isinstance(buffer, Holding) or not member.hello.reliable or member.report.closing:
        return None
    version = buffer.version
    is_publisher = member.worker.replica in model.look_up(version).publishers
    return version if is_publisher and version in model.retained() else None
