"""The steps of leaving: withdraw, let heirs and readers finish for nearly all of the time, then go."""

from ..messages import Failure, Holding, Withdrawing
from . import calling, events, filling
from .departure import Departure
from .state import WorkerState


def begin(worker: WorkerState, deadline: float) -> None:
    """The caller wants to leave by then."""
    if worker.departure is None:
        worker.departure = Departure(worker.now, deadline)
        if worker.call is not None:
            text = f"{worker.me} was closed during {worker.call.verb}"
            calling.fail(worker, Failure("closed", text))


def advance(worker: WorkerState) -> None:
    """Take the step of leaving that how things are now allows."""
    departure = worker.departure
    if departure is None or departure.has_left:
        return
    if isinstance(worker.buffer, Holding):
        filling.withdraw(worker)
    if worker.now >= departure.impatient_at:
        departure.is_hurried = True
        worker.copies.leave_all(next_report=worker.next_report)
        filling.hurry(worker)
    is_alone = not worker.connected
    if worker.now >= departure.deadline or (is_alone and worker.now >= alone_until(worker)):
        worker.slot.stop("closing")
        worker.want(worker.memory.stop_serving())
        leave(worker, departure, drained=not isinstance(worker.buffer, Withdrawing))
    elif _is_gone(worker) and not departure.leaving_in:
        departure.leaving_in = worker.next_report
    if is_alone and not departure.is_alone and not departure.has_left:
        still_s = min(alone_until(worker), departure.deadline) - worker.now
        text = "closes, and waits for the reference server, which alone knows who needs what is here"
        worker.want(events.Warn(f"{worker.me} {text}: for {still_s:.3g} s at most"))
    departure.is_alone = is_alone or (departure.is_alone and not worker.has_heard)


def alone_until(worker: WorkerState) -> float:
    """How long it stays without a connection to the server: that may be back in a moment, and know who needs it.

    Where nothing is held, or no server ever knew this worker or will any more, there is nothing to wait for.
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
    """Nothing is held here any more, and nobody reads or writes here: what was held was served until it was left."""
    return not worker.copies.by_version and worker.is_untouched and worker.reading is None
