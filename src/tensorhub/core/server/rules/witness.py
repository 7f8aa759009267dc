"""Nobody gets a read, a publish or a claim before another worker knows of it: after a restart it would be forgotten.

A worker that has lived before and is not on the roll is a *stranger*: a former life may have let others read from it of
whom nobody else has heard (see `rollcall`).
"""

from collections.abc import Generator, Iterator
from math import inf

from ...messages import Failure
from .. import facts
from ..catalog import Model
from ..decisions import AskToWitness, AwaitWord, Decision, Witness
from ..groups import Replica
from ..membership import Member
from ..state import State
from .selection import Candidate

LATE_REPORTS = 3  # times the pause between two reports: who is asked answers at once
MAX_ASKED = 16  # of whom one should be there; the others' usual reports will do too


def is_asked(model: Model, member: Member) -> bool:
    """Somebody waits for it to say that it knows the roster."""
    return member.asked > model.roll.upto


def is_strange(state: State, member: Member) -> bool:
    """A former life may have let others read from it of whom nobody else has heard."""
    return member.is_stranger and state.is_recovering


def is_whole(state: State, model: Model, replica: Replica) -> bool:
    """All of the replica whom a life before this one may have answered have said what they were answered."""
    return model.roll.is_over and (not state.is_recovering or len(replica.members) == replica.shards)


def why_unwitnessed(model: Model, replica: Replica) -> Failure | None:
    """Why nothing can be promised to the replica yet that all others have to respect."""
    for worker in replica.members.values():
        if worker in model.roll.unwitnessed:
            return Failure("unavailable", f"{worker} has just come, and no other worker has heard of it yet", "retry")
    return None


def seek_witness(state: State, model: Model, member: Member) -> Iterator[Decision]:
    """A worker without a witness asks the one that came last before it, so that not everybody asks the same one.

    One that reports and does not say what it was asked, though that takes a round trip, is passed over for the next. If
    all go on like that for a lease, nobody is there who would know of the others, as when the first one came.
    """
    roll = model.roll
    if not roll.is_over or member.worker not in roll.unwitnessed:
        return
    if all(_asked_for_s(state, model, state.known(each)) >= state.settings.lease_s for each in roll.witnessed):
        yield Witness(model, next(iter(roll.unwitnessed.values())))  # the oldest
    tried = 0
    for worker in reversed(roll.witnessed):
        other = state.known(worker)
        if _asked_for_s(state, model, other) >= LATE_REPORTS * state.report_s:
            continue
        tried += 1
        if (yield from _ask(state, member, other)) or tried == MAX_ASKED:
            return


def _asked_for_s(state: State, model: Model, other: Member) -> float:
    """For how long it has been asked for what it does not say."""
    return state.now - other.asked_since if is_asked(model, other) else -inf


def _ask(state: State, member: Member, other: Member) -> Generator[Decision, None, bool]:
    """Have the other one say that it has heard of the member. False: it would not."""
    if other is member or not facts.is_here(state, other) or other.report.closing or is_strange(state, other):
        return False
    if other.asked < member.session:
        since = other.asked_since if is_asked(state.models[member.hello.model], other) else state.now
        yield AskToWitness(other, member.session, since)
    return True


def allowed(state: State, model: Model, reader: Member, found: list[Candidate]) -> list[Candidate]:
    """Those whom the reader may be given."""
    if model.roll.is_over:
        return found if reader.worker in model.roll.witnessed else []
    return [candidate for candidate in found if _has_heard_us(state.known(candidate.worker))]


def _has_heard_us(member: Member) -> bool:
    return member.report.session == member.session


def wait_for(state: State, model: Model, reader: Member, found: list[Candidate], best: Candidate) -> Iterator[Decision]:
    """None of these may be given yet: have it decided again as soon as one may."""
    if not model.roll.is_over:
        for candidate in found:
            yield AwaitWord(state.known(candidate.worker), reader.worker)
    elif best.worker in model.roll.witnessed:
        yield from _ask(state, reader, state.known(best.worker))


def recovering(state: State) -> Failure:
    """What a call waits for in the first lease after a restart."""
    left_s = state.recovered_at - state.now
    return Failure("unavailable", f"the reference server has restarted and listens for {left_s:.1f} s more", "retry")
