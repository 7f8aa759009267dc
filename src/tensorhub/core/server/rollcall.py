"""How a restarted server finds out that nobody is missing, and what every server does for that (decision 0021).

Rules:
- With all orders a worker gets the *roster*: who lives of its model. It shows the newest in its reports. The roll call
  of a new life is over when exactly those on the newest roster have shown one, and have heard this life.
- Nobody is granted a read, a publish or a claim before another worker knows of it, its *witness*.
- While the roll is called nobody gets a roster, and nobody reads from a worker that has not heard this life.
- A worker that has lived before and is not on the roll is a *stranger*. For one lease it is not drained, and gets no
  roster.

It must never end a roll call by what a worker cannot prove. Called by the server machine, whose tables it changes.
"""

from math import inf

from ..messages import Report, Roster
from . import judging
from .catalog import Model
from .membership import Member
from .receipts import are_equal
from .rules import witness
from .state import State
from .watches import NEWS


def begin(state: State, model: Model, member: Member, report: Report) -> None:
    """A session has begun, with that report."""
    roll = model.roll
    roll.begin(member.worker, member.session, state.notary.session(member.worker, member.session))
    if not report.session:
        return
    told = report.roster
    if roll.is_over or told is None or not _is_proved(state, model, told):
        member.is_stranger = True
        return
    roll.answered.add(state.notary.session(member.worker, report.session))
    roll.unaware[member.worker] = None
    if roll.shown is None or told.number > roll.shown.number:
        roll.shown = told


def end(state: State, model: Model, member: Member) -> None:
    """The session is over."""
    model.roll.end(member.worker, state.notary.session(member.worker, member.session))


def hear(state: State, model: Model, member: Member) -> None:
    """What follows from its report for the roll, and for who waits for a witness."""
    roll, told = model.roll, member.report.roster
    if member.report.session != member.session:
        return  # it has not heard of this session yet: what it shows is of a former one
    for worker in member.awaited_by:
        state.mark_dirty(worker)
    member.awaited_by = {}
    roll.unaware.pop(member.worker, None)
    if not roll.is_over:
        if roll.is_complete:
            state.counters["roll_calls_answered"] += 1
            close(state, model)
    elif told is not None and told.number > roll.upto and member.worker in roll.witnessed:
        for worker in roll.witness(told.number) if _is_proved(state, model, told) else ():
            state.mark_dirty(worker)
    if not witness.is_asked(model, member):
        member.asked_since = inf


def close(state: State, model: Model) -> None:
    """The roll call is over: nobody is missing, or a lease is over."""
    roll = model.roll
    roll.is_over = True
    roll.witness(state.next_number())  # the first roster has all who are here
    roll.shown, roll.unaware = None, {}
    judging.judge_doubted(state, model)
    model.changed.update(dict.fromkeys(model.versions))
    state.mark_everyone_dirty(model)
    for name in state.bound.get(model.name, ()):
        state.mark_waiting_dirty(state.models[name], NEWS)


def end_recovery(state: State) -> None:
    """A lease is over: whoever has not reported has no session any more."""
    state.is_recovering = False
    for model in state.models.values():
        model.is_listening = False
        if not model.roll.is_over:
            close(state, model)
        model.changed.update(dict.fromkeys(model.versions))
        state.mark_everyone_dirty(model)


def _is_proved(state: State, model: Model, told: Roster) -> bool:
    """A server with this key has said so."""
    return are_equal(state.notary.roster(model.name, told.number, told.count, told.digest), told.receipt)


# --- what orders carry ------------------------------------------------------------------------------------------------


def roster_for(state: State, model: Model, member: Member) -> Roster | None:
    """What it is to show to the next life of the server."""
    roll = model.roll
    if not roll.is_over or witness.is_strange(state, member):
        return None
    if roll.roster is None:
        number, count, digest = state.next_number(), roll.living.count, roll.living.digest
        roll.roster = Roster(number, count, digest, state.notary.roster(model.name, number, count, digest))
    return roll.roster
