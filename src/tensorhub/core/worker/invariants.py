"""What must be true of a worker after every event, whatever came in. A contradiction is a bug of ours."""

from typing import TYPE_CHECKING

from ..messages import Empty, Filling, Holding, Vacated, Withdrawing

if TYPE_CHECKING:
    from .machine import Worker


def worker_contradiction(worker: "Worker") -> str | None:
    """How a worker machine contradicts itself, or None."""
    reading, buffer, serving = worker.reading, worker.buffer, worker.serving
    may_write = worker.slot.may_write
    if may_write and not worker.slot.is_stopping and not isinstance(buffer, Filling | Vacated):
        return f"reads {reading} into a buffer that is {buffer}"
    if isinstance(buffer, Vacated) and serving is not None:
        return f"has vacated {buffer.version} and serves {serving}"
    if reading is not None and worker.slot.closed >= reading.ticket:
        return f"reads ticket {reading.ticket}, called closed up to {worker.slot.closed}"
    if isinstance(buffer, Empty) and serving is not None and not worker.is_stopping_serving:
        return f"serves version {serving} from an empty buffer"
    if isinstance(buffer, Holding) and serving != buffer.version:
        return f"holds {buffer.version} and serves {serving}"
    if isinstance(buffer, Holding | Withdrawing) and may_write:
        return f"holds {buffer.version} while {reading} still writes"
    shelf = worker.shelf
    count = sum(copy.layout == shelf.layout for copy in shelf.copies.values())
    if count > shelf.most and not shelf.leaving:
        return f"has {count} host copies where {shelf.most} are allowed"
    return None
