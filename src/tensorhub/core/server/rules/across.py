"""Who reads a version out of another cut than its own, from whom, and what becomes of each part of such a read.

Rules:
- A worker reads across only where nobody sound of its own line could be its source; and only one of each line and site
  does: the one that has most of it. The others wait until it has said what the version is in their line, and then read
  behind it.
- It has one source for each line of a cut, all at once. Only such as have all of the version are taken: so nobody reads
  behind himself, however versions go from cut to cut.
- Each part is for itself. One whose source leaves, is gone, or stands still, is given another source; one that failed,
  too. What has brought its share needs none any more.
- A cut of which a line has no source any more is left for another one that has all, or for the reader's own line. A
  source that has lost its session and brings nothing is none.

It must never: mix two cuts in one plan, or give parts of content without tiles.
"""

from collections.abc import Generator, Iterator, Mapping
from math import inf

from .. import facts
from ..catalog import Model
from ..decisions import CallStuck, Cross, Decision, Give, Leave, LookAgain, TakeBack
from ..lines import Cut, Line
from ..membership import Crossing, Member
from ..open_reads import OpenRead
from ..records import VersionRecord
from ..state import State
from . import crossing, progress, retention, sources, witness
from .selection import Candidate, choose_source
from .wanted import Wanted

Choice = tuple[Candidate, str]


def set_out(
    state: State,
    model: Model,
    record: VersionRecord,
    member: Member,
    *,
    to_host: bool,
    other_than: Cut | None = None,
) -> Generator[Decision, None, bool]:
    """Let it read out of another cut, if it is the one of its line and site to do so. Not out of `other_than`."""
    if not crossing.can_cross(record, member.line):
        return False
    if not _is_elected(state, model, record, member):
        yield from see_that_it_begins(state, model, record, member)
        return False
    if _is_about_to_end(member, record, to_host):
        return True
    best: tuple[tuple[object, ...], Cut, list[Choice]] | None = None
    for number, cut in enumerate(crossing.cuts_to_read(model, record, member.line)):
        found = [_choose(state, model, record, member, line) for line in cut]
        chosen = [choice for choice in found if choice is not None]
        if len(chosen) == len(cut) and cut != other_than:
            rank = (*_rank(chosen), number)
            best = (rank, cut, chosen) if best is None or rank < best[0] else best
    if best is None:
        yield from _wait(state, model, record, member)
        return False
    _, cut, chosen = best
    yield Cross(member, record.version, to_host, cut)
    for line, choice in zip(cut, chosen, strict=True):
        yield _part(record, member, line, choice, to_host=to_host)
    return True


def instead_of(
    state: State, model: Model, record: VersionRecord, member: Member, read: OpenRead, *, is_in_need: bool = False
) -> Generator[Decision, None, bool]:
    """Its source is too slow, and no other one of its line would do better: let it read out of another cut.

    `is_in_need`: nothing will come from its source. Also from such as are slow, or want to leave the version.
    """
    if not crossing.can_cross(record, member.line) or not _is_elected(state, model, record, member):
        return False

    def would_do(line: Line) -> bool:
        return _would_do(_choose(state, model, record, member, line), is_in_need=is_in_need)

    if not any(all(would_do(line) for line in cut) for cut in crossing.cuts_to_read(model, record, member.line)):
        return False
    if not progress.is_paused(state, read):  # one that does something else was not slow
        yield Leave(member, read, state.now + progress.window_s(state))
    yield TakeBack(read)
    return (yield from set_out(state, model, record, member, to_host=read.grant.to_host))


def keep_up(state: State, model: Model, record: VersionRecord, member: Member, wanted: Wanted) -> Iterator[Decision]:
    """It reads across: see that each line has a source, or has brought all."""
    plan = _plan(member, wanted)
    if plan is None:
        if model.roll.is_over:  # granted before a restart, out of a cut that nobody remembers
            yield from take_back(state, member)
            yield from set_out(state, model, record, member, to_host=wanted.to_host)
        return
    for line in plan.cut:
        if line not in plan.done:
            part = state.reads.parts.get(member.worker, {}).get(line)
            yield from _keep_part(state, model, record, member, line, part, to_host=wanted.to_host)
    parts = dict(state.reads.parts.get(member.worker, {}))
    if not _is_short(state, plan, parts):
        return
    is_missing = any(line not in plan.done and line not in parts for line in plan.cut)

    def would_do(line: Line) -> bool:
        choice = _choose(state, model, record, member, line)
        return choice is not None and (is_missing or _would_do(choice, is_in_need=True))

    others = [cut for cut in crossing.cuts_to_read(model, record, member.line) if cut != plan.cut]
    if any(all(map(would_do, cut)) for cut in others):
        for part in parts.values():
            if progress.is_in_vain(state, part):
                yield Leave(member, part, state.now + progress.window_s(state))
        yield from take_back(state, member)
        yield from set_out(state, model, record, member, to_host=wanted.to_host, other_than=plan.cut)


def take_back(state: State, member: Member) -> Iterator[Decision]:
    """It may go on with nothing that it reads."""
    for read in state.reads.going_on(member.worker):
        yield TakeBack(read)


def is_short(state: State, member: Member) -> bool:
    """It reads across, and of what it needs a part has no source, or one from which nothing will come."""
    plan, parts = member.crossing, state.reads.parts.get(member.worker)
    return plan is not None and parts is not None and _is_short(state, plan, parts)


def _is_short(state: State, plan: Crossing, parts: Mapping[Line, OpenRead]) -> bool:
    needed = [parts.get(line) for line in plan.cut if line not in plan.done]
    return any(part is None or progress.is_in_vain(state, part) for part in needed)


def is_looking(state: State, member: Member, wanted: Wanted) -> bool:
    """Of what it reads across a part has no source, or one that it is to leave as soon as there is another."""
    plan, parts = _plan(member, wanted), state.reads.parts.get(member.worker, {})
    if plan is None:
        return True
    for line in plan.cut:
        part = parts.get(line)
        if line not in plan.done and (part is None or _why_replace(state, member, part) is not None):
            return True
    return False


def _plan(member: Member, wanted: Wanted) -> Crossing | None:
    plan = member.crossing
    return plan if plan is not None and (plan.version, plan.to_host) == wanted else None


def _is_elected(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """Nobody else of its line and site reads the version across, or should do so before it.

    One to whom nothing comes keeps nobody from it.
    """
    for other in facts.members_of(state, model, member.line):
        read = state.reads.current.get(other.worker)
        if other is member or other.hello.site != member.hello.site or read is None or read.version != record.version:
            continue
        if other.turns_lost > member.turns_lost or retention.waits_for_its_readers(state, other, record.version):
            continue
        if (
            read.part is not None
            and facts.is_here(state, other)
            and not (progress.is_held_up(state, read) or progress.cannot_begin(state, read))
        ):
            return False
    return sources.may_cross(state, model, record, member)


def see_that_it_begins(state: State, model: Model, record: VersionRecord, member: Member) -> Iterator[Decision]:
    """It waits for another one that reads across; look again if that one has not begun by then."""
    for other in facts.members_of(state, model, member.line):
        read = state.reads.current.get(other.worker)
        if other is not member and read is not None and read.version == record.version:
            until = progress.begins_until(state, read)
            if state.now < until < inf:
                yield LookAgain(member, until)


def _is_about_to_end(member: Member, record: VersionRecord, to_host: bool) -> bool:
    """All of its parts have brought their share, and it has not said yet that it is done."""
    plan, told = member.crossing, member.report.across
    if plan is None or told is None or (plan.version, plan.to_host) != (record.version, to_host):
        return False
    return told.version == record.version and not told.parts and all(line in plan.done for line in plan.cut)


# --- one part ---------------------------------------------------------------------------------------------------------


def _keep_part(
    state: State,
    model: Model,
    record: VersionRecord,
    member: Member,
    line: Line,
    part: OpenRead | None,
    *,
    to_host: bool,
) -> Iterator[Decision]:
    """See that the line has a source, if there is one."""
    why = _why_replace(state, member, part) if part is not None else ""
    is_in_vain = part is not None and progress.is_in_vain(state, part)
    if part is not None and is_in_vain != part.pace.is_stuck:
        yield CallStuck(part, is_in_vain)
    if why is None:
        return
    choice = _choose(state, model, record, member, line, instead_of=part)
    if choice is None:
        if part is None:
            yield from _wait(state, model, record, member)
        elif not _serves(state, part):
            yield TakeBack(part)
        return
    if part is not None and _is_still(state, part):
        yield Leave(member, part, state.now + progress.window_s(state))
    if part is not None:
        yield TakeBack(part)
    yield _part(record, member, line, choice, to_host=to_host, why=why)


def _why_replace(state: State, member: Member, part: OpenRead) -> str | None:
    """Why this part is to have another source, if there is one; None: it is to stay as it is."""
    source, name = state.members.get(part.source), part.source.replica
    if not _serves(state, part):
        return f"; {name} has it no more"
    if source is not None and facts.is_leaving(source, part.version, part.grant.from_host):
        return f"; {name} leaves it"
    if progress.is_in_vain(state, part) or (
        source is not None and _is_still(state, part) and state.now >= member.may_move_at
    ):
        return f"; left {name}: nothing came for {state.now - part.pace.moved_at:.1f} s"
    return None


def _serves(state: State, part: OpenRead) -> bool:
    return facts.serves(state, part.source, part.version, part.grant.from_host)


def _is_still(state: State, part: OpenRead) -> bool:
    return part.pace.is_still(state.now, progress.patience_s(state))


def _choose(
    state: State,
    model: Model,
    record: VersionRecord,
    member: Member,
    line: Line,
    *,
    instead_of: OpenRead | None = None,
) -> Choice | None:
    """The best source for that line. `instead_of`: for what is read now only such as will do better."""
    found = witness.allowed(state, model, member, sources.whole_sources(state, record, member, line))
    if instead_of is not None:
        former, is_in_need = (instead_of.source, instead_of.grant.from_host), progress.is_in_vain(state, instead_of)
        found = [
            candidate
            for candidate in found
            if (is_in_need or not candidate.is_withdrawing)
            and not candidate.is_doubtful
            and (candidate.worker, candidate.from_host) != former
        ]
    return choose_source(found, now=state.now)


def _would_do(choice: Choice | None, *, is_in_need: bool) -> bool:
    """There is one, and nothing is to be said against it; or it is better than none for who is in need."""
    if choice is None or choice[0].is_doubtful:
        return False
    return is_in_need or not (choice[0].is_slow or choice[0].is_withdrawing)


def _wait(state: State, model: Model, record: VersionRecord, member: Member) -> Iterator[Decision]:
    """Nothing can be given now: see to it that it is looked at again when something may be."""
    soonest = inf
    for line in dict.fromkeys(each for cut in crossing.cuts_to_read(model, record, member.line) for each in cut):
        possible = sources.whole_sources(state, record, member, line)
        allowed = witness.allowed(state, model, member, possible)
        best = choose_source(possible, now=state.now)
        if not allowed and best is not None:
            yield from witness.wait_for(state, model, member, possible, best[0])
        soonest = min([soonest, *[each.avoided_until for each in allowed if each.avoided_until > state.now]])
    if soonest < inf:
        yield LookAgain(member, soonest)


def _part(
    record: VersionRecord, member: Member, line: Line, choice: Choice, *, to_host: bool, why: str = ""
) -> Decision:
    source, reason = choice
    text = f"across, shard {line.shard} of {line.shards}: {reason}{why}"
    return Give(member, record, source.worker, text, source.from_host, to_host, part=line)


def _rank(chosen: list[Choice]) -> tuple[object, ...]:
    """Of cuts: sound sources before others, near before far, idle before busy; then few before many."""
    found = [candidate for candidate, _ in chosen]
    return (
        any(each.is_doubtful for each in found),
        any(each.is_withdrawing for each in found),
        sum(not each.is_same_site for each in found),
        any(each.is_slow for each in found),
        max(each.load for each in found),
        any(each.published for each in found),
        len(found),
    )
