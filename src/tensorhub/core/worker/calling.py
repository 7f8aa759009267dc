"""The steps of a caller's call, and of leaving, at one worker. Called by the worker machine, which they change."""

from typing import TYPE_CHECKING

from ..messages import Empty, Failure, Filling, Holding, Poisoned, Vacated, Withdrawing
from ..names import Digest
from . import events, filling
from .call import FILLS, Call, why_not_begin

if TYPE_CHECKING:
    from .machine import Worker


def take(worker: "Worker", event: events.Called, now: float) -> None:
    """The caller has called: begin, unless that is a mistake."""
    wrong = why_not_begin(worker, event)
    if wrong is not None:
        worker.effects.append(events.Finished(0, error=wrong))
        return
    worker.call = Call(event.verb, event.spec, event.root, now, event.deadline, event.claim)
    worker.failures, worker.shelf.error, worker.opened = [], None, None
    worker.shelf.failed = {}
    worker.note(now, f"called {event.verb} {event.spec}")


def advance(worker: "Worker", call: Call, now: float) -> None:
    """Take the step of the call that how things are now allows."""
    if isinstance(worker.buffer, Withdrawing) and not worker.buffer.impatient and now >= call.impatient_at:
        withdraw(worker, impatient=True, now=now)
    match worker.buffer:
        case Holding(version=version) if call.verb == "unpublish" and call.may_withdraw:
            withdraw(worker, impatient=False, now=now)
        case Holding(version=version) if call.verb in FILLS and call.resolved not in (None, version):
            if filling.is_opened(worker, call.resolved):
                withdraw(worker, impatient=False, now=now)
        case Vacated(version=version) if call.verb in FILLS and call.resolved is not None:
            if call.resolved == version:
                filling.give_back(worker, now)
            elif worker.is_untouched and worker.shelf.whole(call.resolved) is not None:
                worker.buffer = Filling(call.resolved)
        case Empty() if call.verb == "publish" and call.resolved is not None and worker.is_untouched:
            worker.buffer = Holding(call.resolved, call.root, published=True)
            worker.serving = call.resolved
            worker.effects.append(events.StartServing(call.resolved, call.root))
            worker.note(now, f"published version {call.resolved}")
        case Empty() | Poisoned() if call.verb in FILLS and call.resolved is not None and worker.is_untouched:
            worker.buffer = Filling(call.resolved)


def say_delay(worker: "Worker", call: Call, now: float) -> None:
    """Say once why the call waits, when every death would have been told by now: a shard lives and does not come."""
    why = call.awaits_shard
    if why is not None and not call.is_delayed and now >= call.started + worker.patience_s:
        call.is_delayed = True
        worker.note(now, f"{call} waits: {why.message}")
        worker.effects.append(events.Delayed(call.number or 0, why))


def withdraw(worker: "Worker", *, impatient: bool, now: float) -> None:
    """Ask to take the promise back."""
    assert isinstance(worker.buffer, Holding | Withdrawing)
    if isinstance(worker.buffer, Holding):
        worker.withdrawn_in = worker.book.number + 1
    worker.buffer = Withdrawing(worker.buffer.version, worker.buffer.root, worker.buffer.published, impatient)
    worker.note(now, f"withdraws version {worker.buffer.version}" + (", impatient" if impatient else ""))


def retries(call: Call) -> bool:
    """Its version was lost, and what it wants may be another version by now: it is called once more, by ourselves.

    All shards of the replica have heard so together, and all do the same.
    """
    error = call.answer.error if call.answer is not None else None
    is_lost = error is not None and error.code == "version-unavailable"
    return is_lost and call.verb in FILLS and not isinstance(call.spec, int)


def again(worker: "Worker", call: Call, now: float) -> None:
    """End the call without a word to its caller, and make the same call as the replica's next operation."""
    worker.note(now, f"calls {call} again: version {call.resolved} is lost")
    end(worker, well=False, now=now)
    worker.call = Call(call.verb, call.spec, call.root, call.started, call.deadline)
    worker.opened = None


def fail(worker: "Worker", failure: Failure, now: float) -> None:
    """End the call with an error."""
    call = worker.call
    assert call is not None
    worker.note(now, f"{call.verb} {call.spec} failed: {failure.code}: {failure.message}")
    worker.effects.append(events.Finished(call.number or 0, error=failure))
    end(worker, well=False, now=now)


def end(worker: "Worker", *, well: bool, now: float) -> None:
    """The call is over; one that was cut short leaves a fill poisoned, and takes a withdrawal back."""
    call = worker.call
    assert call is not None
    worker.call, worker.failures = None, []
    if call.number is not None:
        worker.ended = call.number
        worker.finished = call.number if well else worker.finished
    if well:
        worker.claim = call.claim  # whatever was claimed before has been published, or is not to be any more
        if isinstance(worker.buffer, Vacated):
            worker.buffer = Empty()
        worker.effects.append(events.Finished(call.number or 0, version=worker.held))
        worker.note_newest(worker.held)
        return
    if isinstance(worker.buffer, Filling):
        filling.poison(worker)
        if worker.reading is None or not worker.reading.to_host:
            worker.slot.grant = None
            worker.slot.stop("the call failed")
        return
    if worker.reading is not None and not worker.reading.to_host:
        worker.slot.grant = None
        worker.slot.stop("the call ended")
    if isinstance(worker.buffer, Withdrawing) and not worker.is_stopping_serving and worker.closing is None:
        worker.buffer = Holding(worker.buffer.version, worker.buffer.root, worker.buffer.published)
        worker.withdrawn_in = 0
    filling.give_back(worker, now)


def take_conflict(worker: "Worker", root: Digest, now: float) -> None:
    """What is held is not what its version is: another publish of that number was finished. It is not held any more."""
    buffer = worker.buffer
    if not root or not isinstance(buffer, Holding | Withdrawing | Vacated) or buffer.root != root:
        return
    text = f"what {worker.me} holds as version {buffer.version} is not what was published as version {buffer.version}"
    hint = "publish it under a higher number" if buffer.published else "replicate the version again"
    worker.is_disowned = buffer.published
    if worker.serving is None:
        worker.buffer = Empty() if buffer.published else Poisoned()
    else:
        filling.poison(worker)
    worker.note(now, text)
    worker.effects.append(events.Warn(f"{text} ({hint})"))
    if worker.call is not None:
        fail(worker, Failure("version-conflict", text, hint), now)


def advance_closing(worker: "Worker", now: float) -> None:
    """Leave: withdraw, let heirs and readers finish for half of the time, then go."""
    closing = worker.closing
    if closing is None or worker.has_left:
        return
    if isinstance(worker.buffer, Holding):
        withdraw(worker, impatient=False, now=now)
    if now >= closing.impatient_at:
        worker.is_hurried = True
        worker.shelf.leave_all(next_report=worker.book.number + 1)
        if isinstance(worker.buffer, Withdrawing) and not worker.buffer.impatient:
            withdraw(worker, impatient=True, now=now)
    if now >= closing.deadline or not worker.connected:
        worker.slot.stop("closing")
        worker.stop_serving(now)
        leave(worker, drained=not isinstance(worker.buffer, Withdrawing))
    elif _is_gone(worker) and not worker.leaving_in:
        worker.leaving_in = worker.book.number + 1


def leave(worker: "Worker", *, drained: bool) -> None:
    """Tell the shell that nothing keeps this worker any more."""
    if not worker.has_left:
        worker.has_left = True
        worker.effects.append(events.Left(drained))


def _is_gone(worker: "Worker") -> bool:
    """Nothing is held here any more, and nobody reads or writes here."""
    is_empty = isinstance(worker.buffer, Empty | Poisoned) and not worker.shelf.copies
    return is_empty and worker.is_untouched and worker.reading is None
