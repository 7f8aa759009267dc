"""The steps of a caller's call, from its beginning to its end."""

from ..messages import Empty, Failure, Filling, Holding, Vacated, Withdrawing
from ..names import Digest
from . import events, filling
from .call import Call
from .deadlines import deadline_failure
from .mistakes import why_not_begin
from .state import WorkerState


def take(worker: WorkerState, event: events.Called) -> None:
    """The caller has called: begin, unless that is a mistake."""
    wrong = why_not_begin(worker, event)
    if wrong is not None:
        worker.want(events.Finished(0, error=wrong))
        return
    worker.call = Call(event.verb, event.spec, event.root, worker.now, event.deadline, event.claim)
    worker.call.floor = worker.memory.held if event.verb == "update" else event.floor
    worker.call.is_held_back = event.is_held_back
    worker.missed = event.missed
    worker.call.waits, worker.call.metadata, worker.call.grid = event.waits, event.metadata, event.grid
    worker.slot.forget_failures()
    worker.copies.new_call()
    worker.note(f"called {event.verb} {event.spec}")


def advance(worker: WorkerState) -> None:
    """Take the step of the call that how things are now allows."""
    call = worker.call
    if call is None:
        return
    if call.number is None and (worker.ended or worker.position is not None):
        call.number = _last_position(worker) + 1
    answer, is_late = call.answer, worker.now >= call.deadline
    if call.is_called_again and not is_late:
        _call_again(worker, call)
    elif answer is not None and answer.error is not None:
        fail(worker, answer.error)
    elif answer is not None and answer.finished:
        _end_well(worker, call)
    elif call.hopeless is not None:
        fail(worker, call.hopeless)
    elif is_late:
        fail(worker, deadline_failure(worker, call))
    else:
        _advance_buffer(worker, call)
        _say_delay(worker, call)


def _last_position(worker: WorkerState) -> int:
    """After which the call comes. One that it could not make: also after what it knows to be over."""
    told = worker.position or 0
    return max(worker.ended, told) if worker.missed is not None else worker.ended or told


def _advance_buffer(worker: WorkerState, call: Call) -> None:
    """Withdraw, publish or fill, as far as that is possible now."""
    is_ahead = call.fills and call.resolved is None and not worker.memory.is_stopping
    if worker.now >= call.impatient_at and not is_ahead:
        filling.hurry(worker)
    if call.fills:
        filling.begin(worker, call)
    elif call.verb == "unpublish" and isinstance(worker.buffer, Holding) and call.may_withdraw:
        filling.withdraw(worker)
    elif call.verb == "publish" and call.resolved is not None and _is_free(worker):
        worker.want(worker.memory.publish(call.resolved, call.root))
        worker.note(f"published version {call.resolved}")


def _is_free(worker: WorkerState) -> bool:
    return isinstance(worker.buffer, Empty) and worker.is_untouched


def _say_delay(worker: WorkerState, call: Call) -> None:
    """Say once that a shard lives and does not come: if it were dead, the server would have told by now."""
    why = call.awaits_shard
    if why is not None and not call.is_delayed and worker.now >= call.started + worker.patience_s:
        call.is_delayed = True
        worker.note(f"{call} waits: {why.message}")
        worker.want(events.Delayed(call.number or 0, why))


# --- how it ends ------------------------------------------------------------------------------------------------------


def fail(worker: WorkerState, failure: Failure) -> None:
    """End the call with an error."""
    call = worker.call
    assert call is not None
    worker.note(f"{call.verb} {call.spec} failed: {failure.code}: {failure.message}")
    worker.want(events.Finished(call.number or 0, error=failure))
    end_badly(worker)


def end_badly(worker: WorkerState) -> None:
    """The call is over and has not succeeded: its fill is poisoned, and its withdrawal is taken back."""
    call = worker.call
    assert call is not None
    _end(worker, call)
    if isinstance(worker.buffer, Filling):
        _give_up_fill(worker)
        return
    if worker.slot.is_into_buffer:
        worker.slot.give_up("the call ended")
    filling.hold_on(worker)
    filling.take_back(worker)


def _end_well(worker: WorkerState, call: Call) -> None:
    _end(worker, call)
    filling.hold_on(worker)  # it had withdrawn ahead, and holds what it was to bring
    worker.finished = call.number or worker.finished
    worker.claim = call.claim  # whatever was claimed before is published by now, or never will be
    if isinstance(worker.buffer, Vacated):
        worker.memory.let_go()
    version = call.resolved if call.verb == "choose" else worker.memory.held
    worker.want(events.Finished(call.number or 0, version=version))
    if isinstance(worker.buffer, Filling):  # no server may say so before it has heard that the version is held
        _give_up_fill(worker)


def _call_again(worker: WorkerState, call: Call) -> None:
    """End the call without a word to its caller, and make the same call as the replica's next one."""
    worker.note(f"calls {call} again: version {call.resolved} is lost")
    end_badly(worker)
    worker.call = call.again()


def _end(worker: WorkerState, call: Call) -> None:
    worker.call = None
    worker.slot.forget_failures()
    if call.number is not None:
        worker.ended = call.number


def _give_up_fill(worker: WorkerState) -> None:
    worker.memory.cut_short(next_report=worker.next_report)
    if worker.slot.is_into_buffer or worker.reading is None:
        worker.slot.give_up("the call failed")


def take_conflict(worker: WorkerState, root: Digest) -> None:
    """Content with this root does not count as its version: another publish of that number is finished. Let it go.

    It may be the same all the same: a publish that never ended counts for nothing, and what it made cannot be compared
    where nobody is heard who has that shard of the other one.
    """
    buffer = worker.buffer
    if not root or not isinstance(buffer, Holding | Withdrawing | Vacated) or buffer.root != root:
        return
    text = f"what {worker.me} holds does not count as version {buffer.version}: another publish of that number does"
    hint = "publish it under a higher number" if buffer.published else "replicate the version again"
    worker.memory.disown(next_report=worker.next_report)
    worker.note(text)
    worker.want(events.Warn(f"{text} ({hint})"))
    if worker.call is not None:
        fail(worker, Failure("version-conflict", text, hint))
