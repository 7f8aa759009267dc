"""How a restarted server finds out that nobody is missing, and what it does all the time to that end (decision 0021).

Rules:
- With all orders a worker gets the *roster*: who lives of its model. It shows the newest in its reports. The roll call
  of a new life is over when those who have shown one are just those of the newest, and have heard this life.
- Nobody is granted a read, a publish or a claim that no other worker knows of: it has no witness.
- While the roll is called nobody gets a roster, and nobody reads from a worker that has not heard this life.
- Who has lived before and was not on the roll is a *stranger*. For one lease it is not drained, and gets no roster.

It must never end a roll call by what a worker cannot prove. Called by the server machine, whose tables it changes.
"""

from itertools import islice
from typing import TYPE_CHECKING

from .groups import Replica
from .membership import Member
from .messages import Failure, Report, Roster
from .receipts import are_equal
from .references import Model
from .selection import Candidate

if TYPE_CHECKING:
    from .server import Server

MOST_ASKED = 16  # of whom one should be there; the others' usual reports will do too


def begin(server: "Server", model: Model, member: Member, report: Report) -> None:
    """A session has begun, with that report."""
    roll = model.roll
    roll.begin(member.worker, member.session, server.notary.session(member.worker, member.session))
    if not report.session:
        return
    told = report.roster
    if roll.is_over or told is None or not _is_proved(server, model, told):
        member.is_stranger = True
        return
    roll.answered.add(server.notary.session(member.worker, report.session))
    roll.unaware[member.worker] = None
    if roll.shown is None or told.number > roll.shown.number:
        roll.shown = told


def end(server: "Server", model: Model, member: Member) -> None:
    """The session is over."""
    model.roll.end(member.worker, server.notary.session(member.worker, member.session))


def hear(server: "Server", model: Model, member: Member) -> None:
    """What follows from its report for the roll, and for who waits for a witness."""
    roll, told = model.roll, member.report.roster
    if member.report.session != member.session:
        return  # it has not heard of this session yet: what it shows is of a former one
    for worker in member.awaited_by:
        server.touch(worker)
    member.awaited_by = {}
    roll.unaware.pop(member.worker, None)
    if not roll.is_over:
        if roll.is_complete:
            server.counters["roll_calls_answered"] += 1
            close(server, model)
    elif told is not None and told.number > roll.upto and member.worker in roll.witnessed:
        for worker in roll.witness(told.number) if _is_proved(server, model, told) else ():
            server.touch(worker)


def close(server: "Server", model: Model) -> None:
    """The roll call is over: nobody is missing, or a lease is over."""
    roll = model.roll
    roll.is_over = True
    roll.witness(server.next_number())  # the first roster has all who are here
    roll.shown, roll.unaware = None, {}
    model.changed.update(dict.fromkeys(model.versions))
    server.touch_all(model)


def _is_proved(server: "Server", model: Model, told: Roster) -> bool:
    """A server with this key has said so."""
    return are_equal(server.notary.roster(model.name, told.number, told.count, told.digest), told.receipt)


# --- what orders carry ------------------------------------------------------------------------------------------------


def roster_for(server: "Server", model: Model, member: Member) -> Roster | None:
    """What it is to show to the next life of the server."""
    roll = model.roll
    if not roll.is_over or is_strange(server, member):
        return None
    if roll.roster is None:
        number, count, digest = server.next_number(), roll.living.count, roll.living.digest
        roll.roster = Roster(number, count, digest, server.notary.roster(model.name, number, count, digest))
    return roll.roster


def is_asked(model: Model, member: Member) -> bool:
    """Somebody waits for it to say that it knows the roster."""
    return member.asked > model.roll.upto


# --- what has to wait -------------------------------------------------------------------------------------------------


def is_strange(server: "Server", member: Member) -> bool:
    """A life before this one may have let others read from it of whom nobody else has heard."""
    return member.is_stranger and server.is_recovering


def is_whole(server: "Server", model: Model, replica: Replica) -> bool:
    """All of the replica whom a life before this one may have answered have said what they were answered."""
    return model.roll.is_over and (not server.is_recovering or len(replica.members) == replica.shards)


def why_unwitnessed(model: Model, replica: Replica) -> Failure | None:
    """Why nothing can be promised to the replica yet that all others have to respect."""
    for worker in replica.members.values():
        if worker in model.roll.unwitnessed:
            return Failure("unavailable", f"{worker} has just come, and no other worker has heard of it yet", "retry")
    return None


def seek_witness(server: "Server", model: Model, member: Member) -> None:
    """Who has none asks the one that came last before it, so that not everybody asks the same."""
    roll = model.roll
    if not roll.is_over or member.worker not in roll.unwitnessed:
        return
    if not roll.witnessed:
        for worker in roll.witness(next(iter(roll.unwitnessed.values()))):  # the oldest
            server.touch(worker)
    for worker in islice(reversed(roll.witnessed), MOST_ASKED):
        if _ask(server, member, server.known(worker)):
            return


def _ask(server: "Server", member: Member, other: Member) -> bool:
    """Have the other one say that it has heard of the member. False: it would not."""
    if other is member or not server.is_here(other) or other.report.closing or is_strange(server, other):
        return False
    if other.asked < member.session:
        other.asked = member.session
        server.touch(other.worker)
    return True


def allowed(server: "Server", model: Model, reader: Member, found: list[Candidate]) -> list[Candidate]:
    """Those whom the reader may be given."""
    if model.roll.is_over:
        return found if reader.worker in model.roll.witnessed else []
    return [candidate for candidate in found if _has_heard_us(server.known(candidate.worker))]


def _has_heard_us(member: Member) -> bool:
    return member.report.session == member.session


def wait_for(server: "Server", model: Model, reader: Member, found: list[Candidate], best: Candidate) -> None:
    """None of these may be given yet: have it decided again as soon as one may."""
    if not model.roll.is_over:
        for candidate in found:
            server.known(candidate.worker).awaited_by[reader.worker] = None
    elif best.worker in model.roll.witnessed:
        _ask(server, reader, server.known(best.worker))
