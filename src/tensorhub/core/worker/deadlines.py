"""The error of a call whose time has run out: what was missing at the end, how far it got, and what to do next."""

from collections.abc import Iterator

from ..messages import Failure, Filling, Holding, Poisoned, Vacated, Withdrawing
from .call import Call
from .state import WorkerState

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
        who = "nobody has said that nobody reads it any more" if is_unheard else "it still has readers"
        yield f"version {buffer.version} is being withdrawn, and {who}"
    elif isinstance(buffer, Holding) and call.fills and call.resolved not in (None, buffer.version):
        yield f"no source of version {call.resolved} has answered; version {buffer.version} is still held"
    elif isinstance(buffer, Vacated) and call.fills:
        yield f"not a byte of version {call.resolved} had come; version {buffer.version} is held again"
    for version, times in worker.copies.failed.items():
        yield f"copying version {version} from host memory failed {times} times"
    if isinstance(buffer, Filling):
        source = f" from {worker.reading.source}" if worker.reading is not None else ""
        yield f"{buffer.done} of {buffer.chunks or '?'} chunks of version {buffer.version} were in place{source}"
    if call.fills and worker.slot.last_failure:
        yield worker.slot.last_failure
