"""When a reader leaves a source that still serves it: which stands still, is far too slow, or is busier than another.

Rules:
- A source from which nothing comes for two reports is left for any that would do better, the publisher too.
- So is one from which far less comes than it receives itself, if it is filling; else than other readers of the version
  get, or this reader got before, or reads of the model that have ended brought lately.
- Who merely waits for what its source waits for stays: the one nearest to the root moves. If that one has moved and is
  slow still, or has nowhere to go, it is slow itself, and those behind it look for themselves.
- Who leaves a filling source for that one's own source, and gets more there, takes its place: the slow one gives way,
  and reads behind the others. If it gets no more it goes back.
- A source that was left is the reader's last choice for a while, and each move of a reader waits twice as long as the
  one before. A source that serves others is taken only if it has brought more, of late, than it brings now.
- One by which nothing came is remembered, though there was nobody to go to: the next version is read from another.

It must never: move all readers of a source at once to another one that serves already.
"""

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from . import granting, sites
from .membership import Member
from .names import WorkerId
from .open_reads import OpenRead
from .pace import is_too_slow, usual
from .references import Model, VersionRecord
from .selection import Candidate, choose_source

if TYPE_CHECKING:
    from .server import Server

BETTER = 1.25  # times what came from the slow one, though they share its source now: half is at least 1.5 times a third
WORTH = 2.0  # times what comes now: less is not worth a chunk that has to come again
MOST_HOPS = 64  # of a chain; who is further from the root is nobody's way out
MOST_LATELY = 16  # reads that have ended, of which the usual rate is known: the better half of a small fleet's update
REPORTS = 1.75  # without anything: two, less what the second may come early


def patience_s(server: "Server") -> float:
    """How long a read may stand still."""
    return max(server.settings.stalled_s, REPORTS * server.settings.report_s_of(len(server.members)))


def window_s(server: "Server") -> float:
    """Over how long a rate is measured."""
    return max(server.settings.slow_s, 2 * server.settings.report_s_of(len(server.members)))


def note_pace(server: "Server", reader: Member) -> None:
    """What the reader's report says of its open read."""
    told, now = reader.report.reading, server.now
    read = server.reads.current(reader.worker)
    if told is None or read is None or told.ticket != read.ticket:
        return
    done, chunks, is_filled = reader.filled(read.version, to_host=read.grant.to_host)
    if told.is_opened and not is_filled:
        read.pace.rest(now)  # it has the manifest, and waits for its buffer
        read.began_at = now
        return
    chunk_bytes = reader.report.size_bytes // chunks if chunks > 0 else 0
    arrived = max(0, told.arrived_bytes)
    read.pace.note(now, arrived_bytes=arrived, done=done, chunk_bytes=chunk_bytes, over_s=window_s(server))
    if reader.paced != read.version:
        reader.paced, reader.best, reader.moves, reader.may_move_at = read.version, {}, 0, -inf
    tier = _tier(server, read)
    reader.best[tier] = max(reader.best.get(tier, 0.0), read.pace.rate or 0.0)
    source = server.members.get(read.source)
    if source is not None:
        its_own = _its_own(server, read)
        is_hopeless = its_own is not None and its_own.pace.is_stuck and _is_held_up(server, its_own)
        has_no_more = source.filled(read.version, to_host=read.grant.from_host)[0] <= done
        if its_own is not None and has_no_more and not is_hopeless:
            read.pace.wait(now)
        rates = [one.pace.rate or 0.0 for one in server.reads.from_source(read.source) if not one.is_void]
        source.capacity.note(now, sum(rates), 4 * window_s(server))


def note_ended(server: "Server", model: Model, reader: Member, read: OpenRead) -> None:
    """A read is over. If it has brought all that was missing, those that come later are compared with it."""
    is_whole = reader.has_whole_copy(read.version) if read.grant.to_host else reader.holds(read.version)
    took_s = server.now - read.began_at
    if read.is_void or not is_whole or took_s <= 0.0 or server.members.get(read.source) is None:
        return
    rates = model.lately.setdefault(_tier(server, read), deque(maxlen=MOST_LATELY))
    rates.append(reader.report.size_bytes * (1.0 - read.had) / took_s)


def leave_slow(server: "Server", model: Model, record: VersionRecord, reader: Member, read: OpenRead) -> bool:
    """Move the reader if its source stands still or is far too slow, and another one would do better."""
    if reader.shard not in record.roots:
        return False
    if _settle_places(server, model, record, reader, read):
        return True
    found = _why_leave(server, model, record, reader, read)
    if found is None:
        read.pace.is_stuck = read.pace.is_stuck and read.pace.rate is None
        return False
    why, needed = found
    is_looked_for = server.now >= reader.may_move_at
    choice = _way_out(server, model, record, reader, read, needed) if is_looked_for else None
    if choice is None:
        if is_looked_for:
            reader.may_move_at = server.now + window_s(server)
        _note_stuck(server, reader, read)
        return False
    best, reason = choice
    reader.may_move_at = server.now + 2 * window_s(server) * 2.0 ** min(reader.moves, 16)
    reader.moves += 1
    reader.left = {worker: until for worker, until in reader.left.items() if until > server.now}
    reader.left[read.source] = server.now + server.settings.leave_s
    source, its_own = server.members.get(read.source), _its_own(server, read)
    if source is not None:
        source.slow_until = server.now + server.settings.leave_s
    granting.void(server, read)
    moved = granting.give(server, record, reader, (best, f"{reason}; {why}"), to_host=read.grant.to_host)
    if its_own is not None and its_own.source == best.worker:
        moved.instead_of, moved.must_beat = read.source, BETTER * (read.pace.rate or 0.0)
    server.counters["left_slow"] += 1
    return True


def _note_stuck(server: "Server", reader: Member, read: OpenRead) -> None:
    """It is slow, and nobody would do better, or it was tried in vain."""
    if not read.pace.is_stuck:
        read.pace.is_stuck = True
        for behind in server.reads.from_source(reader.worker):
            server.touch(behind.reader)  # who need not wait for it any more
    source = server.members.get(read.source)
    if not reader.moves:
        is_whole = source is not None and granting.is_full(source, read.version, read.grant.from_host)
        if source is not None and is_whole and read.pace.is_still(server.now, patience_s(server)):
            source.slow_until = server.now + server.settings.leave_s  # there will be others to choose from again
        return
    for worker in reader.left:
        left = server.members.get(worker)
        if left is not None:
            left.slow_until = -inf  # it was not that one who is slow
    if source is not None:
        source.capacity.forget(server.now)  # nor has this one more to give


def _way_out(
    server: "Server", model: Model, record: VersionRecord, reader: Member, read: OpenRead, needed: float
) -> tuple[Candidate, str] | None:
    """A source that would do better: an idle one; or its own source's, if that one can give way; or any."""
    better = [c for c in granting.candidates(server, model, record, reader) if _is_better(server, read, c, needed)]
    if not _tier(server, read)[0] and not sites.may_cross(server, model, record, reader):
        better = [candidate for candidate in better if candidate.is_same_site]
    its_own = server.reads.current(read.source)
    first = [candidate for candidate in better if not candidate.load and not candidate.is_slow]
    if its_own is not None and its_own.version == read.version:
        first = first or [candidate for candidate in better if candidate.worker == its_own.source]
    return choose_source(first or better, now=server.now)


def _why_leave(
    server: "Server", model: Model, record: VersionRecord, reader: Member, read: OpenRead
) -> tuple[str, float] | None:
    """(the reason in words, how much another source must bring), or None: it stays."""
    pace, name = read.pace, read.source.replica
    if pace.is_still(server.now, patience_s(server)):
        return f"left {name}: nothing came for {server.now - pace.moved_at:.1f} s", 0.0
    its_own = _its_own(server, read)
    is_hopeless = its_own is not None and its_own.pace.is_stuck
    if server.now < pace.waited_at + window_s(server) and not is_hopeless:
        return None  # what came was what its source had
    if its_own is None or is_hopeless:
        best = reader.best.get(_tier(server, read), 0.0)
        others, whose = max(best, _usual(server, record, read) or 0.0), "others get, or it got before,"
        lately = _lately(server, model, read)
        if lately > others:
            others, whose = lately, "reads brought lately"
    else:
        others, whose = its_own.pace.rate or 0.0, "it receives"
    times, rate = server.settings.slow_times, pace.rate or 0.0
    if not is_too_slow(pace, others, times):
        return None
    return f"left {name}: {rate:.3g} B/s, where {whose} {others:.3g}", max(WORTH * rate, others / times)


def _its_own(server: "Server", read: OpenRead) -> OpenRead | None:
    """The read by which a filling source that lives itself gets the version."""
    source = server.members.get(read.source)
    if source is None or not server.is_here(source) or granting.is_full(source, read.version, read.grant.from_host):
        return None
    its_own = server.reads.current(read.source)
    if its_own is None or (its_own.version, its_own.grant.to_host) != (read.version, read.grant.from_host):
        return None
    return its_own


def _is_better(server: "Server", read: OpenRead, candidate: Candidate, needed: float) -> bool:
    """It would bring so much, as far as can be known."""
    if candidate.worker == read.source or candidate.is_doubtful or candidate.is_withdrawing:
        return False
    is_still = read.pace.is_still(server.now, patience_s(server))
    if not candidate.is_same_site and not is_still and (candidate.leaving_site or not _tier(server, read)[0]):
        return False
    if not candidate.is_full:
        its_own = server.reads.current(candidate.worker)
        rate = its_own.pace.rate if its_own is not None else None
        is_enough = is_still if rate is None else rate >= needed
        return is_enough and _is_sound(server, candidate.worker, without=read.source)
    if not candidate.load:
        return True
    source, its_own = server.known(candidate.worker), server.reads.current(read.source)
    others = [one for one in server.reads.from_source(candidate.worker) if not one.is_void]
    if is_still:
        return not any(_is_held_up(server, one) for one in others)
    if any(one.pace.rate is None for one in others):
        return False  # it serves somebody of whom too little is known yet
    spare = source.capacity.best - sum(one.pace.rate or 0.0 for one in others)
    if its_own is not None and its_own.source == candidate.worker:
        spare += its_own.pace.rate or 0.0  # which gives way
    return max(spare, source.capacity.best / (candidate.load + 1)) >= needed


def _is_held_up(server: "Server", read: OpenRead) -> bool:
    """Nothing comes by it, as a reader says who is there to say so."""
    reader = server.members.get(read.reader)
    return reader is not None and server.is_here(reader) and read.pace.is_still(server.now, patience_s(server))


def _is_sound(server: "Server", worker: WorkerId, *, without: WorkerId) -> bool:
    """It is filling, and so is whoever it waits for, up to somebody who has everything; none of them is that one."""
    read = server.reads.current(worker)
    for _ in range(MOST_HOPS):
        if read is None or read.source == without or read.pace.is_stuck or _is_held_up(server, read):
            return False
        source = server.members.get(read.source)
        if source is None or server.is_doubtful(source):
            return False
        if granting.is_full(source, read.version, read.grant.from_host):
            return True
        read = server.reads.current(read.source)
    return False


def _settle_places(server: "Server", model: Model, record: VersionRecord, reader: Member, read: OpenRead) -> bool:
    """Of a slow source and who has left it for its own source only one stays there: who gets more out of it."""
    slow = server.members.get(read.instead_of) if read.instead_of is not None else None
    if slow is not None and read.pace.rate is not None:
        read.instead_of = None
        its_own = server.reads.current(slow.worker)
        if its_own is not None and (its_own.source, its_own.version) == (read.source, read.version):
            if read.pace.rate < read.must_beat:
                _note_stuck(server, reader, read)
                return _follow(server, model, record, reader, read, slow.worker, "no better than")
            slow.gives_way_to = reader.worker
            server.touch(slow.worker)
    other = reader.gives_way_to
    theirs = server.reads.current(other) if other is not None else None
    if other is None or theirs is None or (theirs.source, theirs.version) != (read.source, read.version):
        reader.gives_way_to = None
        return False
    if other in server.reads.readers_behind(reader.worker, read.version):
        return False  # until it has let go of it
    reader.gives_way_to = None
    return _follow(server, model, record, reader, read, other, "gives way to")


def _follow(
    server: "Server", model: Model, record: VersionRecord, reader: Member, read: OpenRead, other: WorkerId, why: str
) -> bool:
    """Read behind that one, or behind the last of those who do."""
    found = [
        candidate
        for candidate in granting.candidates(server, model, record, reader)
        if not candidate.is_full and (candidate.worker == other or not (candidate.load or candidate.is_doubtful))
        if candidate.worker == other or other in server.reads.chain(candidate.worker)
    ]
    best = min(found, key=lambda candidate: (candidate.load, candidate.worker), default=None)
    if best is None:
        return False
    granting.void(server, read)
    choice = best, f"relay, filling, {best.done} chunks in place; {why} {other.replica}"
    moved = granting.give(server, record, reader, choice, to_host=read.grant.to_host)
    moved.pace.is_stuck = read.pace.is_stuck
    return True


def _tier(server: "Server", read: OpenRead) -> tuple[bool, bool]:
    """How far the read comes: (from another site, from another host)."""
    reader, source = server.members.get(read.reader), server.members.get(read.source)
    if reader is None or source is None:
        return read.grant.is_far, True
    return source.hello.site != reader.hello.site, source.hello.host != reader.hello.host


def _usual(server: "Server", record: VersionRecord, read: OpenRead) -> float | None:
    """What others get that read the version over such a distance. Found anew once a report."""
    tier = _tier(server, read)
    if server.now >= record.usual_until:
        found: dict[tuple[bool, bool], list[float]] = {}
        for holders in record.holders.values():
            for worker in holders:
                one = server.reads.current(worker)
                if one is not None and one.version == record.version and one.pace.rate is not None:
                    found.setdefault(_tier(server, one), []).append(one.pace.rate)
        record.usual = {each: usual(rates) for each, rates in found.items()}
        record.usual_until = server.now + server.settings.report_s_of(len(server.members))
    return record.usual.get(tier)


def _lately(server: "Server", model: Model, read: OpenRead) -> float:
    """What reads of the model that have ended brought over such a distance, 0.0 where that is not known.

    Of a source that serves others too a read can get no more than its present share of that.
    """
    tier = _tier(server, read)
    lately = usual(list(model.lately.get(tier, ())))
    rates = [one.pace.rate for one in _beside(server, read) if _tier(server, one) == tier]
    known = [rate for rate in rates if rate is not None]
    if lately is None or len(known) < len(rates):
        return 0.0
    total = sum(known)
    return lately * (read.pace.rate or 0.0) / total if total else lately


def _beside(server: "Server", read: OpenRead) -> list[OpenRead]:
    """Those that its source serves now, itself too."""
    return [one for one in server.reads.from_source(read.source) if not one.is_void]


def to_idle(server: "Server", model: Model, record: VersionRecord, reader: Member, read: OpenRead) -> bool:
    """Move the reader if that is sure to help: to an idle source that has everything and is no further away.

    It leaves one that is itself still filling, whose pace it follows, or one that serves others too. It never goes
    back: who reads from a whole source alone stays there. Between sites the pace is the uplink's: it leaves only one
    that it shares, for one that is idle.
    """
    if server.now < read.looked_at + server.settings.rebalance_s or reader.shard not in record.roots:
        return False
    read.looked_at = server.now
    source = server.known(read.source)
    if granting.is_full(source, read.version, read.grant.from_host) and server.reads.load(read.source) < 2:
        return False
    is_far = source.hello.site != reader.hello.site
    is_shared = is_far and granting.reads_leaving(server, record, reader)[source.hello.site] > 0
    better = [
        candidate
        for candidate in granting.candidates(server, model, record, reader)
        if candidate.is_full and not candidate.load and not candidate.published
        if not candidate.is_withdrawing and not candidate.is_doubtful and not candidate.is_slow
        if candidate.is_same_site or (is_shared and not candidate.leaving_site)
    ]
    choice = choose_source(better, now=server.now)
    if choice is None:
        return False
    granting.void(server, read)
    granting.give(server, record, reader, choice, to_host=read.grant.to_host)
    server.counters["rebalanced"] += 1
    return True
