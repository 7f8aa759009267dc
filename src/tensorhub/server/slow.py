"""Slow reads: which read is slow, and which source its reader gets instead.

A read is **slow** if one of these holds. No other read moves.

1. It has brought nothing for `slow_s`, although its reader reports. Less than a sixteenth of a chunk is nothing.
2. Its rate over the last `slow_s` is less than a third of the usual rate.
3. It waits for its source, and the source's own read is *stuck*: slow by 1 or 2, and without a better source.
4. Its reader was left as a source, and another reader gets enough from the source that both have: it gives way.
5. It comes from another site, and has not begun. It moves into its own site: each shard crosses into a site once.

A read **waits** if its source is filling, and has had nothing more for it within `slow_s`. Rules 1 and 2 do not apply
to it: the read of its source is the one to look at.

The **usual** rate is what the best quarter of the version's last readers got, each at its best, over the same kind of
way: on one host, between hosts, or between sites. A read does not count while it waits, or while its source's read is
slow. The median of all reads would be no measure: most of them wait behind a slow relay, and get as little as that.

A slow read **moves** to the best candidate that is sound:

- A source that was left lately is *avoided* by all readers of the model, for twice as long each time. It is forgiven
  when a read from it is not slow. Only a read that brings nothing takes an avoided source, where there is no other.
- A source that is filling is sound if no read above it is slow, up to a source that has everything.
- A source that has everything is sound. Of several, one without readers is taken.
- A reader that is slow at two sources in a row is at fault itself, and the source that it left is forgiven.
- Of the sources that serve already, the source's own source comes first. The two then change places.
- A reader leaves its own site only if nothing comes, and if the server lets it read across sites.
- A reader waits twice as long after each of its moves.

What follows:

- A link that is slow for all makes hardly any reader move: the rates fall together, and no candidate is sound.
- A relay with a slow link loses its reader to its own source. It gives way, or is slow beside that reader, and moves
  behind it.
- A third is beyond what one more reader on a link explains, which is a half. A move costs the chunks under way.
"""

from math import inf
from typing import NamedTuple

from ..protocol.messages import Holding, Withdrawing
from . import state as facts
from .members import Avoided, Member, OpenRead, Tier, upper_quartile
from .selection import Candidate, choose_source
from .sources import may_cross, possible
from .state import State
from .versions import Model, VersionRecord

TIMES = 3.0  # slower than usual
MAX_READERS = 16  # of a version, whose rates are the usual ones: the better half of a small fleet
MAX_DOUBLINGS = 5  # of the time for which a source is avoided, or a reader stays: 12 s become 6 min, and 3 s 96 s
AVOID = 4  # times `slow_s`: longer than its reader stays at the next source
MAX_HOPS = 64  # of a chain of readers
REPORTS = 2  # at least, for a rate

Choice = tuple[Candidate, str]


class Slow(NamedTuple):
    """Why a read is to move."""

    why: str
    is_own: bool = False  # by what it brings itself
    is_still: bool = False  # nothing comes at all
    is_fault: bool = True  # its source is avoided from now on
    goes: str = ""  # "behind": to a source that is filling; "near": to one in its own site


# --- What the server knows of one read.


def window_s(state: State) -> float:
    """Over how long a read is measured: `slow_s`, or longer where workers report seldom."""
    return max(state.settings.slow_s, REPORTS * state.report_s)


def tier_of(state: State, read: OpenRead) -> Tier:
    """Over what kind of way it reads: (from another site, from another host)."""
    reader, source = state.members.get(read.reader), state.members.get(read.source)
    if reader is None or source is None:
        return read.grant.source.is_cross_site, True
    return source.hello.site != reader.hello.site, source.hello.host != reader.hello.host


def is_still(state: State, read: OpenRead) -> bool:
    """It has brought nothing for long, and its reader is there to say so."""
    if not read.pace.is_still(state.now, window_s(state)):
        return False
    reader = state.members.get(read.reader)
    return reader is not None and facts.is_here(state, reader)


def brings_nothing(state: State, read: OpenRead) -> bool:
    """It has brought nothing for long, and its source has no session: it may be that nothing will come.

    Right after a restart it is not known yet which workers have none.
    """
    if state.models[read.reader.model].is_listening or not read.pace.is_still(state.now, window_s(state)):
        return False
    return any(each.worker not in state.members for each in read.sources)


def feed_of(state: State, read: OpenRead) -> OpenRead | None:
    """The read by which its source, if that is here and filling, gets the version itself."""
    feed = state.reads.current.get(read.source) if _is_filling(state, read) else None
    is_same = feed is not None and (feed.version, feed.grant.to_host) == (read.version, read.from_host)
    return feed if is_same else None


def is_paused(state: State, read: OpenRead) -> bool:
    """Its source is here, has a part of the version, and does not read the rest: it has something else to do."""
    return _is_filling(state, read) and feed_of(state, read) is None


def _is_filling(state: State, read: OpenRead) -> bool:
    source = state.members.get(read.source)
    is_here = source is not None and facts.is_here(state, source)
    return source is not None and is_here and not facts.is_full(source, read.version, read.from_host)


def begins_until(state: State, read: OpenRead) -> float:
    """Until then its reader may take to stop a former read; inf: there is none."""
    reader = state.members.get(read.reader)
    told = reader.report.reading if reader is not None and facts.is_here(state, reader) else None
    return read.began_at + window_s(state) if told is not None and told.ticket < read.ticket else inf


def cannot_begin(state: State, read: OpenRead) -> bool:
    """Its reader has had permission for long, and does not stop a former read."""
    return begins_until(state, read) <= state.now


def is_cut_off(state: State, read: OpenRead) -> bool:
    """It brings nothing, and nothing will come: its source, or one further up, has no session or does not read on."""
    above: OpenRead | None = read
    for _ in range(MAX_HOPS):
        if above is None:
            return False
        if brings_nothing(state, above):
            return True
        if is_paused(state, above):
            return is_still(state, above)
        if not (is_still(state, above) or waits_for_source(state, above)):
            return False
        above = feed_of(state, above)
    return False


def note(state: State, reader: Member) -> None:
    """Takes in what the reader's report says of its read."""
    told, read = reader.report.reading, state.reads.current.get(reader.worker)
    if told is None or read is None or told.ticket != read.ticket:
        return
    done, chunks, is_filled = reader.filled(read.version, to_host=read.grant.to_host)
    if told.is_opened and not is_filled:
        read.pace.restart(state.now)  # it has the manifest, and waits for its buffer
        read.began_at = state.now
        return
    chunk_bytes, arrived = reader.report.size_bytes // max(chunks, 1) if chunks else 0, max(0, told.arrived_bytes)
    read.pace.note(state.now, arrived_bytes=arrived, done=done, chunk_bytes=chunk_bytes, over_s=window_s(state))
    if read.is_across:
        return  # from several sources at once: its rate says nothing of any of them
    source, record = state.members.get(read.source), state.models[reader.hello.model].versions.get(read.version)
    if source is None or record is None:
        return
    feed = feed_of(state, read)
    if feed is not None and source.filled(read.version, to_host=read.from_host)[0] <= done:
        read.pace.wait(state.now)
    if not read.pace.rate:
        return
    if not waits_for_source(state, read) and (feed is None or _by_itself(state, record, feed) is None):
        record.note_rate(tier_of(state, read), reader.worker, read.pace.rate, MAX_READERS)
    if source.avoided.times and why_slow(state, record, read) is None:
        source.avoided = Avoided()


def note_end(state: State, record: VersionRecord, reader: Member, read: OpenRead) -> None:
    """The read is over. If it has brought all of the version, its rate is a usual one."""
    is_whole = reader.has_whole_copy(read.version) if read.grant.to_host else reader.holds(read.version)
    took_s = state.now - read.began_at
    is_all_its_own = is_whole and not (
        read.is_void or read.is_across or read.pace.first or waits_for_source(state, read)
    )
    if is_all_its_own and read.source in state.members and took_s > 0:
        record.note_rate(tier_of(state, read), reader.worker, reader.report.size_bytes / took_s, MAX_READERS)


# --- Which read is slow.


def why_slow(state: State, record: VersionRecord, read: OpenRead) -> Slow | None:
    """Why the read is to move, or None."""
    slow = _by_itself(state, record, read) or _by_its_source(state, record, read)
    return slow or _gives_way(state, record, read) or _goes_near(state, read)


def _by_itself(state: State, record: VersionRecord, read: OpenRead) -> Slow | None:
    """It is slow by what it brings."""
    pace, name = read.pace, read.source.replica
    if is_still(state, read):
        return Slow(f"; left {name}: nothing came for {state.now - pace.moved_at:.1f} s", is_own=True, is_still=True)
    if pace.rate is None or read.is_across or waits_for_source(state, read):
        return None
    usual = upper_quartile(record.rates.get(tier_of(state, read), {}).values())
    if usual is None or pace.rate * TIMES >= usual:
        return None
    feed = feed_of(state, read)
    if feed is not None and feed.pace.rate is None:
        return None  # its source has moved just now: what came so far says nothing
    return Slow(f"; left {name}: {pace.rate:.3g} B/s, where {usual:.3g} are usual", is_own=True)


def _by_its_source(state: State, record: VersionRecord, read: OpenRead) -> Slow | None:
    """It waits for its source, whose read is stuck."""
    feed = feed_of(state, read) if waits_for_source(state, read) else None
    if feed is None:
        return None
    if cannot_begin(state, feed):
        return Slow(f"; left {read.source.replica}: it cannot begin", is_still=True)
    slow = _by_itself(state, record, feed) if feed.is_stuck else None
    return (
        Slow(f"; left {read.source.replica}, which {slow.why[2:]}", is_still=slow.is_still)
        if slow is not None
        else None
    )


def _gives_way(state: State, record: VersionRecord, read: OpenRead) -> Slow | None:
    """Its reader is avoided itself, and another reader gets enough from its source."""
    reader = state.members.get(read.reader)
    if reader is None or reader.avoided.until <= state.now:
        return None
    for other in state.reads.from_source(read.source):
        is_other = other is not read and not other.is_void and other.version == read.version
        if is_other and other.pace.rate and _by_itself(state, record, other) is None:
            return Slow(f"; gives way to {other.reader.replica}", is_fault=False, goes="behind")
    return None


def _goes_near(state: State, read: OpenRead) -> Slow | None:
    """It comes from another site, and has not begun: a former read, or what the buffer holds, stands in the way."""
    reader = state.members.get(read.reader)
    if reader is None or read.source not in state.members or not tier_of(state, read)[0]:
        return None
    reading, buffer = reader.report.reading, reader.content.buffer
    is_its_turn = reading is not None and reading.ticket == read.ticket
    if is_its_turn and (read.grant.to_host or not isinstance(buffer, Holding | Withdrawing)):
        return None
    return Slow("", is_fault=False, goes="near")


def waits_for_source(state: State, read: OpenRead) -> bool:
    """Its source had nothing more for it lately."""
    return state.now < read.pace.waited_at + window_s(state)


# --- Where its reader goes.


def move(state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead) -> bool:
    """Gives the reader a better source if its read is slow and there is one."""
    if reader.layout_key not in record.roots:
        return False
    slow = why_slow(state, record, read)
    if slow is None:
        read.is_stuck = False
        return False
    left = state.members.get(read.left) if read.left is not None else None
    if left is not None and slow.is_own and not (slow.is_still or read.is_stuck):
        left.avoided = Avoided()  # its reader is at fault
    choice = _better(state, model, record, reader, read, slow)
    if choice is None:
        state.call_stuck(read, is_stuck=slow.is_own)
        return False
    if slow.is_fault:
        avoid(state, read)
    best, reason = choice
    why = slow.why.removeprefix("; ").removeprefix(f"left {read.source.replica}: ")
    state.take_back(read, why or "it is in another site", "slow" if why else "far")
    state.give(
        *(reader, record, [best.place], reason + slow.why),
        to_host=read.grant.to_host,
        moves=read.moves + 1,
        left=read.source if slow.is_own else None,
    )
    state.counters["moved"] += 1
    return True


def may_move(state: State, read: OpenRead) -> bool:
    """It is long enough ago that its reader moved."""
    stays_s = window_s(state) * 2.0 ** min(read.moves, MAX_DOUBLINGS) if read.moves else 0.0
    return state.now >= read.began_at + stays_s


def avoid(state: State, read: OpenRead) -> None:
    """A reader leaves the sources of this read because it is slow."""
    for each in read.sources:
        source = state.members.get(each.worker)
        if source is not None and source.avoided.until <= state.now:
            source.avoided = source.avoided.again(state.now, AVOID * window_s(state), MAX_DOUBLINGS)


def _better(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead, slow: Slow
) -> Choice | None:
    """The best sound source, if the reader may move now."""
    if not may_move(state, read):
        return None
    is_cross_site, is_lost, feed = tier_of(state, read)[0], brings_nothing(state, read), feed_of(state, read)
    found = [
        candidate
        for candidate in possible(state, model, record, reader)
        if _is_sound(state, record, read, candidate, without_source=slow.is_still)
        and (slow.is_still or not (candidate.is_slow or candidate.worker == read.left))
        and not (slow.goes == "behind" and candidate.is_full)
        and not (slow.goes == "near" and not candidate.is_same_site)
        and (not candidate.is_withdrawing or (is_lost and candidate.is_full))
        and (candidate.is_same_site or slow.is_still or (is_cross_site and not candidate.leaving_site))
    ]
    is_far = not is_cross_site and not all(candidate.is_same_site for candidate in found)
    if is_far and not may_cross(state, model, record, reader):
        found = [candidate for candidate in found if candidate.is_same_site]
    found = [candidate for candidate in found if not candidate.is_slow] or found
    idle = [candidate for candidate in found if not candidate.load]
    above = [candidate for candidate in found if feed is not None and candidate.worker == feed.source]
    return choose_source(idle or above or found, now=state.now)


def _is_sound(
    state: State, record: VersionRecord, read: OpenRead, candidate: Candidate, *, without_source: bool = False
) -> bool:
    """The candidate seems to get, or to have, what the reader needs.

    `without_source`: it does not read from the reader's present source either.
    """
    if candidate.worker == read.source or candidate.is_doubtful or candidate.avoided_until > state.now:
        return False
    if candidate.is_full:
        return True
    above = state.reads.current.get(candidate.worker)
    for _ in range(MAX_HOPS):
        if above is None or above.version != record.version or (without_source and above.source == read.source):
            return False
        source = state.members.get(above.source)
        if source is None or facts.is_doubtful(state, source) or cannot_begin(state, above):
            return False
        if above.is_stuck or _by_itself(state, record, above) is not None:
            return False
        if facts.is_full(source, above.version, above.from_host):
            return True
        above = state.reads.current.get(above.source)
    return False
