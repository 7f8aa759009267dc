"""Steps of a call: what is refused, how it ends by its deadline or without the server, and how a worker leaves."""

from collections.abc import Iterator

from ..protocol.errors import HIGHER, SPOILED, SPOILED_HINT, UsageError
from ..protocol.messages import (
    CLAIMED,
    PREFETCHED,
    PUBLISHED,
    UNPUBLISHED,
    VERBS,
    Answer,
    Empty,
    Failure,
    Filling,
    Hello,
    Holding,
    Poisoned,
    Step,
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
    missing = [*how_far(worker, call, is_unheard=is_unheard)]
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


def how_far(worker: WorkerState, call: Call, *, is_unheard: bool = False) -> Iterator[str]:
    """How far the call has come, in words. `is_unheard`: the server has not answered for long."""
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
    call = Call(event.verb, event.spec, event.root, worker.now, event.deadline, event.claim)
    call.floor = worker.memory.held if event.verb == "update" else None
    call.waits, call.metadata, call.grid = event.waits, event.metadata, event.grid
    call.former, call.hash_s = event.former, event.hash_s
    worker.note(f"called {event.verb} {event.spec}")
    worker.call, worker.missed = call, event.missed
    worker.slot.forget_failures()
    worker.copies.new_call()


def advance(worker: WorkerState) -> None:
    """Take the step of the call that how things are now allows."""
    if worker.call is not None:
        _advance(worker, worker.call)


def cancel(worker: WorkerState) -> None:
    """The caller does not wait for its call any more."""
    if worker.call is not None:
        end_badly(worker)


def _advance(worker: WorkerState, call: Call) -> None:
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
    elif _may_go_alone(worker, call) and _go_alone(worker, call):
        pass
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
    elif call.verb == "unpublish" and isinstance(worker.buffer, Holding) and may_withdraw(worker, call):
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
    if worker.step is not None and worker.step.publish is not None and call.spec != worker.step.version:
        _say_no_version(worker, worker.step, Failure("group-incomplete", "its siblings have gone on without it"))
    worker.step = None
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


# --- without the server -----------------------------------------------------------------------------------------------
#
# When the server has said nothing for a lease, no reader trusts a read that it has granted. Then a writer's `unpublish`
# and `publish` end without it, and an update keeps what is held. Each shard decides so by itself. The next report tells
# the server how far the shard has come, and the server has the other shards end what leads there by themselves, too.
# When all of them hold what was published, the server judges it.


def may_withdraw(worker: WorkerState, call: Call) -> bool:
    """The server has granted what an unpublish claims, or is not asked."""
    return call.may_withdraw or _may_go_alone(worker, call)


def _may_go_alone(worker: WorkerState, call: Call) -> bool:
    """The call ends without the server."""
    if call.number is None or not (worker.is_alone or call.is_passed):
        return False
    return call.fills or call.is_passed or worker.writes > 0


def _go_alone(worker: WorkerState, call: Call) -> bool:
    """Take the next step without the server. False: the call waits, as it does with one."""
    if call.fills:
        return _keep_alone(worker, call)
    wrong = _why_not_alone(worker, call)
    if wrong is not None:
        fail(worker, wrong)
        return True
    return _publish_alone(worker, call) if call.verb == "publish" else _unpublish_alone(worker, call)


def _why_not_alone(worker: WorkerState, call: Call) -> Failure | None:
    """Why the number cannot be published, as far as is known here."""
    made = worker.step.version if worker.step is not None and worker.step.done >= PUBLISHED else None
    known = [each for each in (worker.newest, made) if each is not None]
    version = call.claim if call.claim is not None else call.spec if call.verb == "publish" else None
    is_again = call.verb == "publish" and version == worker.memory.held
    if not isinstance(version, int) or is_again or call.resolved is not None:
        return None
    if known and version <= max(known):
        text = f"version {version} of {worker.me.model} is not higher than the newest, {max(known)}"
        return Failure("version-conflict", text, f"versions only rise: {HIGHER}")
    if call.claim is not None and isinstance(worker.buffer, Poisoned):
        return Failure("usage", f"{worker.me} is {SPOILED}", SPOILED_HINT)
    return None


def _unpublish_alone(worker: WorkerState, call: Call) -> bool:
    """Cut the readers off: none trusts what it reads here. One that does has its source's digests.

    A shard that follows another one's lead hears the server, and waits until that says that it has no readers.
    """
    if isinstance(worker.buffer, Holding):
        reads.withdraw(worker)
    if worker.memory.serving is not None:
        if worker.now >= call.impatient_at:
            reads.hurry(worker)
        if worker.copies.copying is None and worker.is_alone:
            worker.want(worker.memory.stop_serving())
        return worker.now < call.deadline
    _end_alone(worker, call)
    if isinstance(worker.buffer, Vacated):
        worker.memory.let_go()
    worker.want(events.Finished(call.number or 0))
    return True


def _publish_alone(worker: WorkerState, call: Call) -> bool:
    """The caller has its version, which the server judges later."""
    version = Version(int(call.spec))
    if _is_free(worker):
        _publish(worker, call, version)
    if not isinstance(worker.buffer, Holding) or worker.buffer.version != version:
        return False
    _end_alone(worker, call)
    worker.want(events.Finished(call.number or 0, version=version))
    return True


def _keep_alone(worker: WorkerState, call: Call) -> bool:
    """An update ends with what is held.

    All shards of a replica hold the same if the call before this one has ended well, and none has a newer one yet.
    """
    memory, held = worker.memory, worker.memory.held
    is_one = worker.shards == 1 or (worker.finished == worker.ended and call.resolved in (None, call.floor))
    may_keep = call.verb == "update" and not isinstance(call.spec, int) and is_one
    if may_keep and held is not None and not worker.slot.may_write and not memory.is_stopping:
        if worker.slot.is_into_buffer:
            worker.slot.give_up("the server is gone")
        _end_alone(worker, call)
        reads.hold_on(worker)
        reads.take_back(worker)
        worker.want(events.Finished(call.number or 0, version=held))
        return True
    if call.is_passed and not (may_keep and held is not None):
        text = f"another shard of {worker.me.replica} went on without the reference server at {call}"
        fail(worker, Failure("group-incomplete", text, "retry on all shards"))
        return True
    return False


def _end_alone(worker: WorkerState, call: Call) -> None:
    worker.note(f"{call} ended without the server")
    _end(worker, call)
    worker.finished = worker.ended
    _note_step(worker, call)
    _say_alone(worker)


def _note_step(worker: WorkerState, call: Call) -> None:
    """The call has ended well without the server."""
    former = worker.step or Step()
    version, done = former.version, former.done
    if call.verb == "publish":
        version, done = Version(int(call.spec)), PUBLISHED
    elif call.claim is not None:
        version, done = call.claim, CLAIMED
    elif call.verb == "unpublish":
        version, done = _unpublished(worker, call, former)
    publish = call.for_report() if call.verb == "publish" else former.publish if call.fills else None
    worker.step = Step(version, done, worker.ended, publish)


def _unpublished(worker: WorkerState, call: Call, former: Step) -> tuple[Version | None, int]:
    """How far an unpublish has come. One of nothing comes as far as the sibling that is past it."""
    past = call.answer.past if call.answer is not None else None
    if worker.memory.held is not None:
        return worker.memory.held, UNPUBLISHED
    if past is not None and past.version is not None:
        return past.version, UNPUBLISHED if past.done == UNPUBLISHED else CLAIMED
    if former.version is not None:
        return former.version, former.done
    return worker.newest if worker.newest is not None else Version(0), UNPUBLISHED


def take_judged(worker: WorkerState, judged: Answer | None) -> None:
    """The server says what became of a publish that has ended without it."""
    step, buffer = worker.step, worker.buffer
    if judged is None or step is None or step.publish is None or judged.number != step.publish.number:
        return
    version = step.version
    if judged.error is not None:
        worker.step, why = Step(alone=step.alone), judged.error
        _say_no_version(worker, step, why)
        if why.code == "version-conflict" and isinstance(buffer, Holding) and buffer.version == version:
            worker.memory.disown(next_report=worker.next_report)
    else:
        worker.writes = max(worker.writes, judged.epoch)
        if isinstance(buffer, Holding | Withdrawing) and buffer.version == version and buffer.epoch != judged.epoch:
            worker.memory.publish_again(judged.epoch)
        if judged.finished:
            worker.step = None
            worker.memory.note_published()
            worker.note(f"version {version}, published without the server, is a version")


def _say_no_version(worker: WorkerState, step: Step, why: Failure) -> None:
    text = f"version {step.version}, which {worker.me} published without the reference server, is no version"
    hint = f" ({why.hint})" if why.hint else ""
    worker.want(events.Warn(f"{text}: {why.code}: {why.message}{hint}"))


def _say_alone(worker: WorkerState) -> None:
    if worker.is_alone and not worker.says_alone:
        worker.says_alone = True
        silent_s = worker.now - worker.heard_at
        text = f"{worker.me} goes on without the reference server, which has said nothing for {silent_s:.0f} s"
        worker.want(events.Warn(text))


# --- leaving ----------------------------------------------------------------------------------------------------------


def begin(worker: WorkerState, deadline: float) -> None:
    """The caller wants to leave by then."""
    if worker.departure is None:
        worker.departure = Departure(worker.now, deadline)
        while worker.call is not None:
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
