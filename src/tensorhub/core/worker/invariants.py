"""What must be true of a worker after every event, whatever came in. A contradiction is a bug of ours."""

from math import inf

from ..messages import Empty, Filling, Holding, Vacated, Withdrawing
from .state import WorkerState


def contradiction(worker: WorkerState) -> str | None:
    """How a worker contradicts itself, or None."""
    slot, buffer, serving = worker.slot, worker.buffer, worker.memory.serving
    reading = slot.reading
    if slot.may_write and not slot.is_stopping and not isinstance(buffer, Filling | Vacated):
        return f"reads {reading} into a buffer that is {buffer}"
    if isinstance(buffer, Filling) and worker.call is None:
        return f"fills {buffer} and is in no call"
    if isinstance(buffer, Vacated) and serving is not None:
        return f"has vacated {buffer.version} and serves {serving}"
    if reading is not None and slot.closed >= min(slot.parts.open, default=inf if slot.is_across else reading.ticket):
        return f"reads ticket {reading.ticket}, called closed up to {slot.closed}"
    if isinstance(buffer, Empty) and serving is not None:
        return f"serves version {serving} from an empty buffer"
    if isinstance(buffer, Holding | Withdrawing) and serving != buffer.version:
        return f"holds {buffer.version} and serves {serving}"
    if isinstance(buffer, Holding | Withdrawing) and slot.may_write:
        return f"holds {buffer.version} while {reading} still writes"
    copies = worker.copies
    if copies.count > copies.max_copies and not copies.leaving:
        return f"has {copies.count} host copies where {copies.max_copies} are allowed"
    return None
