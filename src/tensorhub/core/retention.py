"""Which versions must be kept, and by whose host copies: what each worker is to offload, to fetch and to release.

A version is *retained* while it is among the newest `retain` of its model, or pinned. What counts as a reference of it
is a reliable worker's buffer that holds it, or its host copy, as long as that worker does not want to leave for good.

Rules:
- What has lost a shard altogether, as far as is known, is the first to go where there is no room.
- The last reference does not leave: its worker offloads it to its own host memory first. Of several that leave together
  only the first by name has to; the others are safe as long as that one has not been let go.
- A worker that closes cannot keep what it has: another reliable worker, the *heir*, fetches a copy; where there is none
  that could, nothing is left to wait for.
- A copy is released as soon as a buffer holds the version, or a copy elsewhere that comes first by name; nobody reads
  it; and its worker is not about to use it. What was once told to go is never counted again.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from . import operations, sites
from .groups import Replica
from .membership import Member
from .messages import Failure, Filling, Holding, HostCopy, Withdrawing
from .names import Shard, Version, WorkerId
from .references import Model, VersionRecord

if TYPE_CHECKING:
    from .server import Server


class Duties(NamedTuple):
    """What a worker is to do with its host memory."""

    offload: Version | None = None
    fetch: Version | None = None
    release: tuple[int, ...] = ()  # numbers of copies


def duties_of(server: "Server", model: Model, replica: Replica, member: Member) -> Duties:
    """The present duties of one worker. What it is told to release never counts again."""
    if server.is_recovering:
        return Duties()
    offload, fetch = version_to_offload(server, model, member), version_to_fetch(server, model, replica, member)
    member.releasing.update(dict.fromkeys(_not_needed(server, model, replica, member)))
    return Duties(offload, fetch, tuple(member.releasing))


def _not_needed(server: "Server", model: Model, replica: Replica, member: Member) -> list[int]:
    """Its host copies, by number, that may go, or have to: one made ahead gives way to one that must be kept."""
    copies = [copy for copy in member.report.copies if not copy.leaving]
    if not copies:
        return []
    is_squeezed = _is_squeezed(version_to_offload(server, model, member), member)
    return [copy.number for copy in copies if not _is_needed(server, model, replica, member, copy, is_squeezed)]


def _is_squeezed(offload: Version | None, member: Member) -> bool:
    """There is no room for what it has to offload."""
    return offload is not None and not member.report.copies_left and member.copy(offload) is None


def must_stay(server: "Server", model: Model, member: Member) -> bool:
    """The worker's buffer is the last reference of a retained version, which can still be saved."""
    buffer = member.report.buffer
    if not isinstance(buffer, Withdrawing) or not _counts(model, member, buffer.version):
        return False
    record, error = model.record(buffer.version), member.report.copy_error
    if error is not None and error.code == "corrupt-transfer":
        return False  # its tensors were changed while they were published: there is nothing left to keep
    if _is_kept_elsewhere(server, record, member, is_copy=False):
        return False
    if _is_squeezed(record.version, member) and not is_whole(server, model, record):
        return False
    if not member.report.closing:
        return True
    return not buffer.impatient and _is_saved(server, model, record, member.shard)


def version_to_offload(server: "Server", model: Model, member: Member) -> Version | None:
    """What it has to copy to its own host memory before its buffer may change."""
    buffer = member.report.buffer
    if not isinstance(buffer, Withdrawing) or member.report.closing or member.is_drained:
        return None
    return buffer.version if must_stay(server, model, member) else None


def why_stuck(server: "Server", model: Model, replica: Replica, member: Member) -> Failure | None:
    """Why the version that it wants to leave, and may not, cannot be offloaded; None where it can or need not."""
    version = version_to_offload(server, model, member)
    if version is None or member.has_whole_copy(version):
        return None
    report = member.report
    if report.copy_error is not None:
        return report.copy_error
    if not _is_squeezed(version, member) or any(copy.leaving for copy in report.copies):
        return None
    if member.releasing or _not_needed(server, model, replica, member):
        return None  # room will be made
    kept = ", ".join(str(copy.version) for copy in report.copies) or "none"
    text = (
        f"{member.worker} is the last reliable holder of version {version} of {model.name}, "
        f"and its limit on host memory allows no further copy of {report.size_bytes} B (it has: {kept})"
    )
    return Failure("host-memory-full", text, "raise host_bytes, unpin a version, or add reliable replicas")


def version_to_fetch(server: "Server", model: Model, replica: Replica, member: Member) -> Version | None:
    """What it is to fill a host copy with, as far as there is room."""
    report = member.report
    if server.is_recovering or report.closing:
        return None
    if _is_squeezed(version_to_offload(server, model, member), member):
        return None
    filled = operations.wanted_version(replica, member)
    for version in _wanted_copies(server, model, replica, member):
        record = model.versions.get(version)
        if record is None or not record.exists or member.holds(version):
            continue
        if not member.fits(record.layouts.get(member.shard)):
            continue
        copy = member.copy(version)
        if copy is None and (version == filled or not report.copies_left):
            continue  # the buffer is filled at once, or there is no room
        return version
    return None


def _wanted_copies(server: "Server", model: Model, replica: Replica, member: Member) -> Iterator[Version]:
    """What it should have a host copy of, the most important first."""
    if model.closing and member.hello.reliable:
        for version in model.retained():
            if heir_of(server, model, model.record(version), member.shard) == member.worker:
                yield version
    if member.report.prefetch is not None:
        version_wished, _ = model.resolve(member.report.prefetch)
        if version_wished is not None:
            yield version_wished
    if model.newest is None or replica.publishes:
        return
    if member.hello.prefetch == "always" or sites.is_elected(server, model, model.record(model.newest), member):
        yield model.newest


def heir_of(server: "Server", model: Model, record: VersionRecord, shard: Shard) -> WorkerId | None:
    """The worker that has to fetch a version of which only such as want to leave are reliable references."""
    if not model.closing:
        return None
    is_left = False
    for worker in record.holders.get(shard, {}):
        member = server.members.get(worker)
        if member is None or not member.hello.reliable:
            continue
        if not member.report.closing and (member.holds(record.version) or member.has_whole_copy(record.version)):
            return None
        is_left |= member.holds(record.version) or member.has_whole_copy(record.version)
    if not is_left:
        return None
    able = [member for member in server.members_of(model, shard) if _can_inherit(member, record)]
    return min(able, key=lambda m: (m.copy(record.version) is None, m.worker)).worker if able else None


def _can_inherit(member: Member, record: VersionRecord) -> bool:
    report = member.report
    has_room = report.copies_left > 0 or member.copy(record.version) is not None
    is_staying = member.hello.reliable and member.is_connected and not report.closing
    return is_staying and has_room and member.fits(record.layouts.get(member.shard))


def _counts(model: Model, member: Member, version: Version) -> bool:
    return member.hello.reliable and version in model.retained()


def is_whole(server: "Server", model: Model, record: VersionRecord) -> bool:
    """Somebody is known to have each of its shards. Otherwise it seems lost, though who has it may only be cut off."""
    for shard in range(model.shards):
        holders = (server.members.get(worker) for worker in record.holders.get(Shard(shard), {}))
        if not any(m is not None and (m.holds(record.version) or m.has_whole_copy(record.version)) for m in holders):
            return False
    return True


def _is_saved(server: "Server", model: Model, record: VersionRecord, shard: Shard) -> bool:
    """A reliable worker that stays is about to have the version."""
    if heir_of(server, model, record, shard) is not None:
        return True
    for worker in record.holders.get(shard, {}):
        member = server.members.get(worker)
        if member is not None and member.hello.reliable and member.is_connected and not member.report.closing:
            buffer = member.report.buffer
            if isinstance(buffer, Filling) and buffer.version == record.version:
                return True
    return False


def _is_kept_elsewhere(server: "Server", record: VersionRecord, leaver: Member, *, is_copy: bool) -> bool:
    """A reference stays when the leaver's buffer, or its copy, goes."""
    version = record.version
    for worker in record.holders.get(leaver.shard, {}):
        member = server.members.get(worker)
        if member is None or not member.hello.reliable or member.report.closing:
            continue
        is_self, comes_first = worker == leaver.worker, worker < leaver.worker or leaver.report.closing
        if member.stays(version) and (is_copy or not is_self):
            return True
        if member.has_whole_copy(version) and (not is_copy or (comes_first and not is_self)):
            return True
        buffer = member.report.buffer
        is_keeper = isinstance(buffer, Withdrawing) and buffer.version == version and not member.is_drained
        if not is_copy and not is_self and is_keeper and comes_first:
            return True
    return False


def _is_needed(
    server: "Server",
    model: Model,
    replica: Replica,
    member: Member,
    copy: HostCopy,
    is_squeezed: bool,
) -> bool:
    version, reading = copy.version, server.reads.current(member.worker)
    if copy.number in member.releasing:
        return False
    if version == version_to_offload(server, model, member) or server.reads.are_from_copy(member.worker, version):
        return True
    is_read = reading is not None and reading.grant.to_host and reading.version == version
    is_used = operations.wanted_version(replica, member) == version and not member.holds(version)
    if not is_squeezed and (is_read or is_used or version == version_to_fetch(server, model, replica, member)):
        return True
    record = model.record(version)
    if not copy.whole:
        return False
    is_last = _counts(model, member, version) and not _is_kept_elsewhere(server, record, member, is_copy=True)
    if is_last and (not is_squeezed or is_whole(server, model, record)):
        return not member.report.closing or _is_saved(server, model, record, member.shard)
    return bool(record.promised) and not any(
        other.holds(version) and isinstance(other.report.buffer, Holding)
        for other in (server.members.get(worker) for worker in record.holders.get(member.shard, {}))
        if other is not None
    )
