"""Between datacenters each shard of a version travels once: one worker of a site, the *seed*, reads it from afar.

Who is the seed follows from how things are: who already reads across; else, of those that want the version now and have
no source, the one that has most of it, so that a seed that died is replaced where the least has to come again. The
others of the site wait for it, or read behind it. Ahead of anybody's call, a site that lacks the newest version
*elects* a worker to fetch it into host memory. Nobody waits for one who has gone, though its lease may still last.
"""

from typing import TYPE_CHECKING

from . import granting
from .membership import Member
from .references import Model, VersionRecord

if TYPE_CHECKING:
    from .server import Server


def may_cross(server: "Server", model: Model, record: VersionRecord, reader: Member) -> bool:
    """The reader is the seed of its site for its shard: nobody else is to read that across."""
    best: tuple[int, object] | None = None
    for member in server.members_of(model, reader.shard):
        if member.hello.site != reader.hello.site or server.reads.current(member.worker) is not None:
            continue
        if not server.is_here(member):
            continue
        replica = model.replicas[member.hello.replica]
        wanted = granting.wanted_read(server, model, replica, member)
        if wanted is not None and wanted.version == record.version:
            rank = (-member.done(from_host=wanted.to_host, version=record.version), member.worker)
            best = rank if best is None or rank < best else best
    return best is None or best[1] == reader.worker


def is_elected(server: "Server", model: Model, record: VersionRecord, member: Member) -> bool:
    """The member is to fetch the version ahead for its site, where nobody has any of it."""
    site, shard = member.hello.site, member.shard
    if len(model.sites) < 2 or not _is_able(server, model, member, record):
        return False
    current = server.reads.current(member.worker)
    is_begun = current is not None and current.version == record.version and current.grant.to_host
    if (is_begun and not member.loses_copy(record.version)) or member.copy(record.version) is not None:
        return True  # it was elected before, and has begun
    for worker in record.holders.get(shard, {}):
        other = server.members.get(worker)
        if other is None or other.hello.site != site or worker == member.worker:
            continue
        if not other.is_silent(server.now, server.settings):  # one whose line broke is back in a moment
            return False
    mates = [mate for mate in server.members_of(model, shard) if mate.hello.site == site]
    return min(mate.worker for mate in mates if _is_able(server, model, mate, record)) == member.worker


def _is_able(server: "Server", model: Model, member: Member, record: VersionRecord) -> bool:
    report = member.report
    if model.replicas[member.hello.replica].publishes:
        return False
    has_room = report.copies_left > 0 or member.copy(record.version) is not None
    is_staying = server.is_here(member) and not report.closing and member.fits(record.layouts.get(member.shard))
    return is_staying and has_room and member.hello.prefetch != "never"
