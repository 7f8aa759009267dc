"""When a reader leaves a source that still serves it: one that stands still, is far too slow, or serves others too.

Rules:
- A source from which nothing comes for two reports is left for any that would do better, even for the publisher.
- A source that is filling is left if it brings far less than it receives. Any other is left if it brings far less than
  other readers of the version get, than this reader got before, or than reads of the model brought lately.
- A reader that merely waits for what its source waits for stays: the one nearest to the root moves. If that one has
  moved and is still slow, or has nowhere to go, it is slow itself, and those behind it look for other sources.
- A reader that leaves a filling source for that one's own source, and gets more there, takes its place: the slow one
  gives way, and reads behind the others. A reader that gets no more there goes back.
- A reader leaves its own site only where nobody there would do better, or where all who would were left as slow too.
- A source that was left is the reader's last choice for a while, and each move of a reader waits twice as long as the
  one before. A source that serves others is taken only if it has brought more, lately, than it brings now.
- A source from which nothing came is remembered even if there was no other: the next version is read from another one.

It must never: move all readers of a source at once to another one that serves already.
"""

from collections.abc import Generator, Iterator
from math import inf

from ...messages import Holding, Withdrawing
from ...names import WorkerId
from .. import facts
from ..catalog import Model
from ..decisions import (
    CallSlow,
    CallStuck,
    Decision,
    ForgetCapacity,
    Give,
    GiveWay,
    Leave,
    LookedForBetter,
    NoteUsualRates,
    SettlePlaces,
    StayFor,
    TakeBack,
)
from ..membership import Member
from ..open_reads import OpenRead
from ..pace import Tier, is_too_slow, usual
from ..records import VersionRecord
from ..state import State
from . import progress, sources
from .selection import Candidate, choose_source

BETTER = 1.25  # times what came from the slow one, though they share its source now: half is at least 1.5 times a third
WORTH = 2.0  # times what comes now: less is not worth a chunk that has to come again


def leave_slow(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead
) -> Generator[Decision, None, bool]:
    """Move the reader if its source stands still or is far too slow, and another one would do better."""
    if reader.line not in record.roots:
        return False
    shares_a_source = read.instead_of is not None or reader.gives_way_to is not None
    if shares_a_source and (yield from _settle_places(state, model, record, reader, read)):
        return True
    found = yield from _why_leave(state, model, record, reader, read)
    if found is None:
        if read.pace.is_stuck and read.pace.rate is not None:
            yield CallStuck(read, False)
        return False
    why, needed = found
    is_in_vain, window_s = progress.is_in_vain(state, read), progress.window_s(state)
    is_looked_for = state.now >= reader.may_move_at
    if is_in_vain and not is_looked_for:  # at once, and now and then
        is_looked_for = not read.pace.is_stuck or state.now >= read.looked_at + window_s
    choice = _way_out(state, model, record, reader, read, needed) if is_looked_for else None
    if choice is None:
        if is_looked_for and is_in_vain:
            yield LookedForBetter(read)
        if is_looked_for:
            yield StayFor(reader, max(reader.may_move_at, state.now + window_s))
        yield from _note_stuck(state, reader, read)
        return False
    best, reason = choice
    its_own = progress.its_own(state, read)
    takes_its_place = its_own is not None and its_own.source == best.worker
    yield Leave(reader, read, state.now + 2 * window_s * 2.0 ** min(reader.moves, 16))
    yield TakeBack(read)
    yield Give(
        *(reader, record, best.worker, f"{reason}; {why}", best.from_host, read.grant.to_host),
        instead_of=read.source if takes_its_place else None,
        must_beat=BETTER * (read.pace.rate or 0.0) if takes_its_place else 0.0,
        counted_as="left_slow",
    )
    return True


def _note_stuck(state: State, reader: Member, read: OpenRead) -> Iterator[Decision]:
    """It is slow, and nobody would do better, or it was tried in vain."""
    if not read.pace.is_stuck:
        yield CallStuck(read, True)
    source = state.members.get(read.source)
    if not reader.moves:
        is_whole = source is not None and facts.is_full(source, read.version, read.grant.from_host)
        if source is not None and is_whole and read.pace.is_still(state.now, progress.patience_s(state)):
            yield CallSlow(source, state.now + state.settings.leave_s)  # there will be others to choose from again
        return
    for worker in reader.left:
        left = state.members.get(worker)
        if left is not None:
            yield CallSlow(left, -inf)  # it was not that one who is slow
    if source is not None:
        yield ForgetCapacity(source)  # nor has this one more to give


def _way_out(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead, needed: float
) -> tuple[Candidate, str] | None:
    """A source that would do better: an idle one; or its own source's, if that one can give way; or any."""
    better = [c for c in sources.candidates(state, model, record, reader) if _is_better(state, read, c, needed)]
    if not progress.tier(state, read)[0]:
        near = [candidate for candidate in better if candidate.is_same_site and candidate.avoided_until <= state.now]
        is_needed = all(candidate.is_slow for candidate in near) and sources.may_cross(state, model, record, reader)
        better = better if is_needed else near
    its_own = state.reads.current.get(read.source)
    first = [each for each in better if not (each.load or each.is_slow or each.is_withdrawing)]
    if its_own is not None and its_own.version == read.version:
        first = first or [candidate for candidate in better if candidate.worker == its_own.source]
    return choose_source(first or better, now=state.now)


def _why_leave(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead
) -> Generator[Decision, None, tuple[str, float] | None]:
    """(the reason in words, how much another source must bring), or None: it stays."""
    pace, name = read.pace, read.source.replica
    if pace.is_still(state.now, progress.patience_s(state)):
        return f"left {name}: nothing came for {state.now - pace.moved_at:.1f} s", 0.0
    if pace.rate is None:
        return None  # too little is known yet
    its_own = progress.its_own(state, read)
    is_hopeless = its_own is not None and its_own.pace.is_stuck
    if state.now < pace.waited_at + progress.window_s(state) and not is_hopeless:
        return None  # what came was what its source had
    if its_own is None or is_hopeless:
        best = reader.best.get(progress.tier(state, read), 0.0)
        usual_rate = yield from _usual(state, record, read)
        others, whose = max(best, usual_rate or 0.0), "others get, or it got before,"
        lately = _lately(state, model, read)
        if lately > others:
            others, whose = lately, "reads brought lately"
    else:
        others, whose = its_own.pace.rate or 0.0, "it receives"
    times, rate = state.settings.slow_times, pace.rate or 0.0
    if not is_too_slow(pace, others, times):
        return None
    return f"left {name}: {rate:.3g} B/s, where {whose} {others:.3g}", max(WORTH * rate, others / times)


def _is_better(state: State, read: OpenRead, candidate: Candidate, needed: float) -> bool:
    """It would bring so much, as far as can be known. Who wants to leave the version is better than what is in vain."""
    if candidate.worker == read.source or candidate.is_doubtful:
        return False
    if candidate.is_withdrawing and not (candidate.is_full and progress.is_in_vain(state, read)):
        return False
    is_still = read.pace.is_still(state.now, progress.patience_s(state))
    if not candidate.is_same_site and not is_still and (candidate.leaving_site or not progress.tier(state, read)[0]):
        return False
    if not candidate.is_full:
        its_own = state.reads.current.get(candidate.worker)
        rate = its_own.pace.rate if its_own is not None else None
        is_enough = is_still if rate is None else rate >= needed
        return is_enough and _is_sound(state, candidate.worker, without=read.source)
    if not candidate.load:
        return True
    source, its_own = state.known(candidate.worker), state.reads.current.get(read.source)
    others = [one for one in state.reads.from_source(candidate.worker) if not one.is_void]
    if is_still:
        return progress.is_in_vain(state, read) or not any(progress.is_held_up(state, one) for one in others)
    if any(one.pace.rate is None for one in others):
        return False  # it serves somebody of whom too little is known yet
    spare = source.capacity.best - sum(one.pace.rate or 0.0 for one in others)
    if its_own is not None and its_own.source == candidate.worker:
        spare += its_own.pace.rate or 0.0  # which gives way
    return max(spare, source.capacity.best / (candidate.load + 1)) >= needed


def _is_sound(state: State, worker: WorkerId, *, without: WorkerId) -> bool:
    """It is filling, and so is each source above it, up to one that has everything. None of them is `without`."""
    read = state.reads.current.get(worker)
    for _ in range(progress.MAX_HOPS):  # nobody moves to a source that is further from the root
        if read is None or read.source == without or read.pace.is_stuck or progress.is_held_up(state, read):
            return False
        source = state.members.get(read.source)
        if source is None or facts.is_doubtful(state, source):
            return False
        if facts.is_full(source, read.version, read.grant.from_host):
            return True
        read = state.reads.current.get(read.source)
    return False


def _settle_places(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead
) -> Generator[Decision, None, bool]:
    """Of a slow source and the reader that left it for its own source only one stays there: the one that gets more."""
    slow = state.members.get(read.instead_of) if read.instead_of is not None else None
    if slow is not None and read.pace.rate is not None:
        yield SettlePlaces(read)
        its_own = state.reads.current.get(slow.worker)
        if its_own is not None and (its_own.source, its_own.version) == (read.source, read.version):
            if read.pace.rate < read.must_beat:
                yield from _note_stuck(state, reader, read)
                return (yield from _follow(state, model, record, reader, read, slow.worker, "no better than"))
            yield GiveWay(slow, reader.worker)
    other = reader.gives_way_to
    theirs = state.reads.current.get(other) if other is not None else None
    if other is None or theirs is None or (theirs.source, theirs.version) != (read.source, read.version):
        if other is not None:
            yield GiveWay(reader, None)
        return False
    if other in state.reads.readers_behind(reader.worker, read.version):
        return False  # until it has let go of it
    yield GiveWay(reader, None)
    return (yield from _follow(state, model, record, reader, read, other, "gives way to"))


def _follow(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead, other: WorkerId, why: str
) -> Generator[Decision, None, bool]:
    """Read behind that one, or behind the last of those who do."""
    found = [
        candidate
        for candidate in sources.candidates(state, model, record, reader)
        if not candidate.is_full and (candidate.worker == other or not (candidate.load or candidate.is_doubtful))
        if candidate.worker == other or other in state.reads.chain(candidate.worker)
    ]
    best = min(found, key=lambda candidate: (candidate.load, candidate.worker), default=None)
    if best is None:
        return False
    reason = f"relay, filling, {best.done} chunks in place; {why} {other.replica}"
    yield TakeBack(read)
    is_stuck = read.pace.is_stuck
    yield Give(reader, record, best.worker, reason, best.from_host, read.grant.to_host, is_stuck=is_stuck)
    return True


def _usual(state: State, record: VersionRecord, read: OpenRead) -> Generator[Decision, None, float | None]:
    """What readers of the version get over such a distance. Worked out once in the time between two reports."""
    tier = progress.tier(state, read)
    if state.now >= record.usual_until:
        found: dict[Tier, list[float]] = {}
        for holders in record.holders.values():
            for worker in holders:
                one = state.reads.current.get(worker)
                if one is None or one.part is not None or one.version != record.version or one.pace.rate is None:
                    continue
                if one.source in state.members:  # else it is not known over what distance
                    found.setdefault(progress.tier(state, one), []).append(one.pace.rate)
        rates = {each: usual(those) for each, those in found.items()}
        yield NoteUsualRates(record, rates, state.now + state.report_s)
    return record.usual.get(tier)


def _lately(state: State, model: Model, read: OpenRead) -> float:
    """What reads of the model that have ended brought over such a distance, 0.0 where that is not known.

    Of a source that serves others too a read can get no more than its present share of that.
    """
    tier = progress.tier(state, read)
    lately = usual(list(model.lately.get(tier, ())))
    rates = [one.pace.rate for one in _beside(state, read) if progress.tier(state, one) == tier]
    known = [rate for rate in rates if rate is not None]
    if lately is None or len(known) < len(rates):
        return 0.0
    total = sum(known)
    return lately * (read.pace.rate or 0.0) / total if total else lately


def _beside(state: State, read: OpenRead) -> list[OpenRead]:
    """The reads that its source serves now, this one too."""
    return [one for one in state.reads.from_source(read.source) if not one.is_void]


def to_idle(
    state: State, model: Model, record: VersionRecord, reader: Member, read: OpenRead
) -> Generator[Decision, None, bool]:
    """Move the reader if that is sure to help: to an idle source that has everything and is no further away.

    It leaves a source that is itself still filling, whose pace it follows, or one that serves others too. It never goes
    back: a reader that has a whole source to itself stays there. Between sites the pace is the uplink's: a reader
    leaves only one that it shares, for one that is idle. But while it cannot begin it leaves any, for whoever in its
    own site has the version or gets it.
    """
    if state.now < read.looked_at + state.settings.rebalance_s or reader.line not in record.roots:
        return False
    yield LookedForBetter(read)
    source = state.known(read.source)
    is_cross_site = source.hello.site != reader.hello.site
    may_go_near = is_cross_site and not _has_begun(reader, read)
    is_its_own = facts.is_full(source, read.version, read.grant.from_host) and state.reads.load(read.source) < 2
    if is_its_own and not may_go_near:
        return False
    is_shared = is_cross_site and sources.reads_leaving(state, record, reader)[source.hello.site] > 0
    better = [
        candidate
        for candidate in _for_idle(state, model, record, reader, is_among_all=is_shared or may_go_near)
        if not candidate.is_withdrawing and not candidate.is_doubtful and not candidate.is_slow
        if _is_idle(candidate, is_shared) or (may_go_near and _is_near(state, reader, candidate))
    ]
    choice = choose_source(better, now=state.now)
    if choice is None:
        return False
    best, reason = choice
    yield TakeBack(read)
    to_host = read.grant.to_host
    yield Give(reader, record, best.worker, reason, best.from_host, to_host, counted_as="rebalanced")
    return True


def _has_begun(reader: Member, read: OpenRead) -> bool:
    """It reads, or may any moment: no former read of its own, and nothing that its buffer holds, stands in the way."""
    reading, buffer = reader.report.reading, reader.content.buffer
    if reading is None or reading.ticket != read.ticket:
        return False
    return read.grant.to_host or not isinstance(buffer, Holding | Withdrawing)


def _is_idle(candidate: Candidate, is_shared: bool) -> bool:
    """It has everything and serves nobody; in another site, no other read leaves that one."""
    is_all_its_own = candidate.is_full and not candidate.load and not candidate.published
    return is_all_its_own and (candidate.is_same_site or (is_shared and not candidate.leaving_site))


def _is_near(state: State, reader: Member, candidate: Candidate) -> bool:
    """It is in the reader's own site, and has the version, or gets it."""
    if not candidate.is_same_site or candidate.avoided_until > state.now:
        return False
    return candidate.is_full or _is_sound(state, candidate.worker, without=reader.worker)


def _for_idle(
    state: State, model: Model, record: VersionRecord, reader: Member, *, is_among_all: bool
) -> list[Candidate]:
    """Among whom an idle source is looked for; where any other may do, or one in another site, among all."""
    if is_among_all or not model.roll.is_over:
        return sources.candidates(state, model, record, reader)
    return sources.idle(state, model, record, reader)
