"""Steps of a call: what is refused, how it ends by its deadline, and how a worker leaves."""

from collections.abc import Iterator

from ..protocol.errors import SPOILED, SPOILED_HINT, UsageError
from ..protocol.messages import (
    PREFETCHED,
    VERBS,
    Empty,
    Failure,
    Filling,
    Hello,
    Holding,
    Poisoned,
    Vacated,
    Withdrawing,
    named,
    parse_spec,
)
from ..protocol.names import Number, Version
from . import events, reads
from .events import Called
from .state import FILLS, Call, Departure, WorkerState

# --- the caller's mistakes --------------------------------------------------------------------------------------------


def why_not_begin(worker: WorkerState, event: Called) -> Failure | None:
    """The caller's mistake, if the call is one."""
    if worker.departure is not None:
        return Failure("closed", f"{worker.me} was closed", "open it again")
    if worker.call is not None:
        hint = "one call at a time on one Weights: wait for the first"
        return Failure("usage", f"{event.verb} on {worker.me} while its {worker.call} has not ended", hint)
    if worker.refusal is not None and worker.refusal.retry_s <= 0:
        return Failure(worker.refusal.code, worker.refusal.message, worker.refusal.hint)
    if worker.layout is None:
        return Failure("usage", f"{event.verb} on {worker.me} before register()", "register the tensors first")
    if event.verb not in VERBS:
        return Failure("usage", f"there is no call {event.verb!r}")
    if event.verb in FILLS:
        try:
            parse_spec(event.spec, event.verb)
        except UsageError as error:
            return Failure.of(error)
    if event.missed is not None:
        return None  # the caller has heard why; the siblings are about to
    return _why_not_publish(worker, event) if event.verb == "publish" else None


def update_at_once(worker: WorkerState, hello: Hello, event: Called) -> Version | Failure | None:
    """The result of an update to "prefetched" without the server; None if the server must be asked.

    If no newer version is whole in a host copy, a replica of one shard keeps what it holds. If nothing is fetched ahead
    either, that would be so for ever: a mistake.
    """
    if (event.verb, event.spec) != ("update", PREFETCHED):
        return None
    wrong = why_not_begin(worker, event)
    if wrong is not None:
        return wrong
    newest = worker.copies.newest_whole
    if not isinstance(worker.buffer, Holding) or (newest is not None and newest > worker.buffer.version):
        return None
    text_never = f'update("prefetched") on {worker.me}, which fetches nothing ahead, would never find a version'
    if hello.prefetch != "always" and worker.copies.prefetch is None:
        return Failure("usage", text_never, 'open(..., prefetch="always"), or call prefetch() before')
    if not worker.copies.max_copies:
        text = f"{text_never}: its limit on host memory has no room for a copy of {worker.copies.size_bytes} B"
        return Failure("usage", text, 'raise host_bytes, give it more memory, or update to "latest"')
    return worker.buffer.version if hello.shards == 1 else None


def _why_not_publish(worker: WorkerState, event: Called) -> Failure | None:
    try:
        version = parse_spec(event.spec) if isinstance(event.spec, int) and not isinstance(event.spec, bool) else None
    except UsageError as error:
        return Failure.of(error)
    if version is None:
        return Failure("usage", f"publish needs a version number, not {event.spec!r}", "publish(7)")
    match worker.buffer:
        case Poisoned():
            return Failure("usage", f"{worker.me} is {SPOILED}", SPOILED_HINT)
        case Holding(version=held, root=root) if held == version and root != event.root:
            text = f"{worker.me} holds version {version}, but its tensors were changed since"
            return Failure("version-conflict", text, "unpublish() before changing tensors, then publish a higher one")
        case Holding(version=held) if held != version:
            hint = "unpublish() first, or use mutating(version=...)"
            return Failure("not-drained", f"{worker.me} still holds version {held}, which others may read", hint)
        case Withdrawing(version=held) | Vacated(version=held):
            hint = "call unpublish() again and let it succeed"
            return Failure("not-drained", f"{worker.me} is still withdrawing version {held}", hint)
    return None


# --- deadlines --------------------------------------------------------------------------------------------------------


UNANSWERED = 3  # reports: a server that has answered none of them is no help now, even if it lives


def deadline_failure(worker: WorkerState, call: Call) -> Failure:
    """Always that time ran out, whatever was waited for: a longer timeout, or a retry, may be all that is needed."""
    text = f"{call} of {worker.me} did not end within {call.deadline - call.started:.3g} s"
    waiting = call.answer.waiting if call.answer is not None else None
    unanswered_s = worker.book.unanswered_s(call.deadline)
    is_unheard = not worker.connected or unanswered_s > UNANSWERED * worker.book.every_s
    missing = [*_how_far(worker, call, is_unheard=is_unheard)]
    hint = "retry, or give it a longer timeout"
    if not worker.connected and worker.refusal is not None:
        missing.append(f"the reference server refuses this worker for now: {worker.refusal.message}")
        hint = worker.refusal.hint or hint
    elif not worker.connected:
        missing.append("the reference server does not answer")
        hint = "is it running?"
    elif is_unheard:
        missing.append(f"the reference server has not answered for {unanswered_s:.3g} s")
        hint = "has it too much to do, or does it stand still?"
    elif waiting is not None:
        missing.append(waiting.message)
        hint = waiting.hint or hint
    elif call.answer is None:
        missing.append("the reference server has not answered")
    return Failure("deadline-exceeded", f"{text}: {'; '.join(missing)}" if missing else text, hint)


def _how_far(worker: WorkerState, call: Call, *, is_unheard: bool) -> Iterator[str]:
    buffer = worker.buffer
    if worker.copies.copying is not None:
        way, version = worker.copies.copying
        yield f"version {version} was being copied {'to' if way == 'out' else 'from'} host memory"
    elif isinstance(buffer, Withdrawing) or (isinstance(buffer, Poisoned) and buffer.version is not None):
        why = "the server has not said that it is drained" if is_unheard else "it still has readers"
        yield f"version {buffer.version} is being withdrawn, and {why}"
    elif isinstance(buffer, Holding) and call.fills and call.resolved not in (None, buffer.version):
        yield f"no source of version {call.resolved} has answered; version {buffer.version} is still held"
    elif isinstance(buffer, Vacated) and call.fills:
        yield f"not a byte of version {call.resolved} had come; version {buffer.version} is held again"
    for version, times in worker.copies.failed.items():
        yield f"copying version {version} from host memory failed {times} times"
    if isinstance(buffer, Filling):
        source = f" from {named(worker.reading.sources)}" if worker.reading is not None else ""
        yield f"{buffer.done} of {buffer.chunks or '?'} chunks of version {buffer.version} were in place{source}"
    if call.fills and worker.slot.last_failure:
        yield worker.slot.last_failure


# --- steps of a call --------------------------------------------------------------------------------------------------


def take(worker: WorkerState, event: events.Called) -> None:
    """The caller has called: begin, unless that is a mistake."""
    wrong = why_not_begin(worker, event)
    if wrong is not None:
        worker.want(events.Finished(0, error=wrong))
        return
    worker.call = Call(event.verb, event.spec, event.root, worker.now, event.deadline, event.claim)
    worker.call.floor = worker.memory.held if event.verb == "update" else None
    worker.missed = event.missed
    worker.call.waits, worker.call.metadata, worker.call.grid = event.waits, event.metadata, event.grid
    worker.call.former, worker.call.hash_s = event.former, event.hash_s
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
    if worker.now >= call.impatient_at and (worker.memory.is_stopping or not reads.is_ahead(worker)):
        reads.hurry(worker)
    if call.fills:
        reads.begin(worker, call)
    elif call.verb == "unpublish" and isinstance(worker.buffer, Holding) and call.may_withdraw:
        reads.withdraw(worker)
    elif call.verb == "publish" and call.resolved is not None:
        _publish(worker, call, call.resolved)


def _publish(worker: WorkerState, call: Call, version: Version) -> None:
    held = worker.buffer
    if _is_free(worker):
        worker.want(worker.memory.publish(version, call.root, call.epoch))
        worker.note(f"published version {version}")
    elif isinstance(held, Holding) and held.version == version and held.epoch != call.epoch:
        worker.memory.publish_again(call.epoch)


def _is_free(worker: WorkerState) -> bool:
    return isinstance(worker.buffer, Empty) and worker.is_untouched


def _say_delay(worker: WorkerState, call: Call) -> None:
    """Warn once that a shard lives and does not come. If it were dead, the server would have said so by now."""
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
    reads.hold_on(worker)
    reads.take_back(worker)


def _end_well(worker: WorkerState, call: Call) -> None:
    _end(worker, call)
    reads.hold_on(worker)  # it had withdrawn ahead, and holds what it was to bring
    worker.finished = call.number or worker.finished
    worker.memory.note_published()
    if isinstance(worker.buffer, Vacated):
        worker.memory.let_go()
    kept = call.answer.waiting if call.answer is not None else None
    if kept is not None and kept != worker.kept:
        worker.note(f"{call} ended: {kept.message}")
        worker.want(events.Warn(f"{kept.message} ({kept.hint})"))
    worker.kept = kept
    worker.want(events.Finished(call.number or 0, version=worker.memory.held))
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


def take_superseded(worker: WorkerState, epoch: Number) -> None:
    """What is held with that epoch is not its version: another publish of that number is finished. Let it go."""
    buffer = worker.buffer
    if not epoch or not isinstance(buffer, Holding | Withdrawing | Vacated) or buffer.epoch != epoch:
        return
    text = f"what {worker.me} holds does not count as version {buffer.version}: another publish of that number does"
    hint = "publish it under a higher number" if buffer.published else "replicate the version again"
    worker.memory.disown(next_report=worker.next_report)
    worker.note(text)
    worker.want(events.Warn(f"{text} ({hint})"))
    if worker.call is not None:
        fail(worker, Failure("version-conflict", text, hint))


# --- leaving ----------------------------------------------------------------------------------------------------------


def begin(worker: WorkerState, deadline: float) -> None:
    """The caller wants to leave by then."""
    if worker.departure is None:
        worker.departure = Departure(worker.now, deadline)
        if worker.call is not None:
            text = f"{worker.me} was closed during {worker.call.verb}"
            fail(worker, Failure("closed", text))


def advance_closing(worker: WorkerState) -> None:
    """Take the step of leaving that how things are now allows."""
    departure = worker.departure
    if departure is None or departure.has_left:
        return
    if isinstance(worker.buffer, Holding):
        reads.withdraw(worker)
    if worker.now >= departure.impatient_at:
        departure.is_hurried = True
        worker.copies.leave_all(next_report=worker.next_report)
        reads.hurry(worker)
    is_alone = not worker.connected
    if worker.now >= departure.deadline or (is_alone and worker.now >= alone_until(worker)):
        worker.slot.stop("closing")
        worker.want(worker.memory.stop_serving())
        leave(worker, departure, drained=not isinstance(worker.buffer, Withdrawing))
    elif _is_gone(worker) and not departure.leaving_in:
        departure.leaving_in = worker.next_report
    if is_alone and not departure.is_alone and not departure.has_left:
        still_s = min(alone_until(worker), departure.deadline) - worker.now
        text = "closes, and waits for the reference server, which knows which workers need what is here"
        worker.want(events.Warn(f"{worker.me} {text}: for {still_s:.3g} s at most"))
    departure.is_alone = is_alone or (departure.is_alone and not worker.has_heard)


def alone_until(worker: WorkerState) -> float:
    """How long it waits for the server to come back: that knows which workers need what is here.

    There is nothing to wait for if nothing is held, or if no server has known this worker or will accept it.
    """
    holds_something = isinstance(worker.buffer, Withdrawing) or bool(worker.copies.by_version)
    is_refused = worker.refusal is not None and worker.refusal.retry_s <= 0
    if not holds_something or not worker.session or is_refused:
        return worker.now
    begun = worker.departure.started if worker.departure is not None else worker.now
    return max(worker.alone_since, begun) + worker.patience_s


def leave(worker: WorkerState, departure: Departure, *, drained: bool) -> None:
    """Tell the shell that nothing keeps this worker any more."""
    if not departure.has_left:
        departure.has_left = True
        worker.want(events.Left(drained))


def _is_gone(worker: WorkerState) -> bool:
    """Nothing is held here any more, and no worker reads or writes here."""
    return not worker.copies.by_version and worker.is_untouched and worker.reading is None
