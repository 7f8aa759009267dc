"""How a worker's buffer goes from one version to another, and what keeps the old one from being given up for nothing.

A read is *opened* while the old version is still held and served. Only then is the old version withdrawn. Drained, it
is vacated: nobody reads it here, and its bytes are all there. The first byte that may be written makes the buffer
*filling*. A call that ends before that has the old version back. Called by the worker machine, which this changes.
"""

from typing import TYPE_CHECKING

from ..errors import InvariantViolation
from ..messages import (
    MOST_FAILURES,
    MOST_WORDS,
    Empty,
    Failure,
    Filling,
    Grant,
    Holding,
    Poisoned,
    TicketFailure,
    Vacated,
    shortened,
)
from ..names import Version
from . import events
from .call import FILLS

if TYPE_CHECKING:
    from .machine import Worker


# --- what the data plane tells ----------------------------------------------------------------------------------------


def opened(worker: "Worker", event: events.ReadOpened, now: float) -> None:
    """The source has what was granted: the old version may be withdrawn for it."""
    reading = worker.slot.note_opened(event.ticket)
    if reading is not None:
        worker.opened = reading.version
        worker.note(now, f"has opened version {reading.version} at {reading.source}")


def touched(worker: "Worker", event: events.ReadTouched) -> None:
    """What was vacated is gone."""
    reading = worker.reading
    if reading is None or reading.to_host or reading.ticket != event.ticket or not isinstance(worker.buffer, Vacated):
        return
    worker.buffer, worker.serving = Filling(reading.version), reading.version
    if worker.call is None:  # it ended a moment ago
        poison(worker)


def poison(worker: "Worker") -> None:
    """A fill was cut short: its bytes are no version. Who reads behind it has to go first."""
    worker.buffer = Poisoned(worker.serving)
    worker.withdrawn_in = worker.book.number + 1 if worker.serving is not None else 0


def barred(worker: "Worker", event: events.ReadBarred, now: float) -> None:
    """A read that was told to stop writes no more. If it wrote nothing and the call is over, the old one is back."""
    if not worker.slot.bar(event.ticket):
        return
    if event.is_touched:
        touched(worker, events.ReadTouched(event.ticket))
    give_back(worker, now)


def advanced(worker: "Worker", event: events.ReadAdvanced) -> None:
    """More chunks are in place."""
    reading = worker.reading
    if reading is None or reading.ticket != event.ticket:
        return
    if reading.to_host:
        worker.shelf.advanced(reading.version, event.done, event.chunks)
        return
    if event.done:
        touched(worker, events.ReadTouched(event.ticket))
    if isinstance(worker.buffer, Filling):
        worker.buffer = Filling(worker.buffer.version, max(worker.buffer.done, event.done), event.chunks)


def ended(worker: "Worker", event: events.ReadEnded, now: float) -> None:
    """No byte of a read can land any more."""
    if event.complete:
        touched(worker, events.ReadTouched(event.ticket))  # of no bytes at all, it touched none
    reading, by_itself = worker.slot.ended(event.ticket)
    if event.complete and reading.to_host:
        worker.shelf.filled(reading.version)
        worker.note(now, f"has a host copy of version {reading.version}, last chunk from {reading.source}")
    elif event.complete and isinstance(worker.buffer, Filling) and worker.buffer.version == reading.version:
        worker.buffer = Holding(reading.version, worker.slot.root)
        worker.note(now, f"holds version {reading.version}, last chunk from {reading.source}")
    elif event.failure is not None and by_itself:
        why = shortened(event.failure.message, MOST_WORDS)
        told = TicketFailure(event.ticket, reading.source, event.failure.code, why)
        worker.failures = [*worker.failures, told][-MOST_FAILURES:]
        worker.note(now, f"read {event.ticket} from {reading.source} failed: {event.failure.message}")
    give_back(worker, now)


def serving_stopped(worker: "Worker", version: Version, now: float) -> None:
    """Nobody reads the buffer any more, and nobody can."""
    if not worker.is_stopping_serving or worker.serving != version:
        raise InvariantViolation(f"{worker.me}: serving {version} stopped, but it serves {worker.serving}")
    worker.serving, worker.is_stopping_serving, worker.withdrawn_in = None, False, 0
    old = worker.withdrawn
    if isinstance(worker.buffer, Poisoned):
        worker.buffer = Empty() if worker.is_disowned else Poisoned()
        worker.is_disowned = False
    elif old is None or worker.closing is not None:
        worker.buffer = Empty()
    else:
        worker.buffer = Vacated(old.version, old.root, old.published)
        give_back(worker, now)
    worker.note(now, f"version {version} withdrawn")


def copied_in(worker: "Worker", version: Version, failure: Failure | None, now: float) -> None:
    """The buffer is as the host copy, or it is not: the copy was no good, or copying failed."""
    root = worker.shelf.copied_in(version, failure, next_report=worker.book.number + 1)
    if failure is not None:
        worker.note(now, f"filling from the host copy of version {version} failed: {failure.message}")
    if root is not None and isinstance(worker.buffer, Filling) and worker.buffer.version == version:
        worker.buffer = Holding(version, root)
        worker.serving = version
        worker.effects.append(events.StartServing(version, root))
        worker.note(now, f"holds version {version}, from its host copy")


def give_back(worker: "Worker", now: float) -> None:
    """Hold the vacated version again: its call is over, or a new one wants just that; nothing was written over it."""
    buffer, call = worker.buffer, worker.call
    if not isinstance(buffer, Vacated) or worker.slot.may_write:
        return
    if call is not None and (call.verb not in FILLS or call.resolved != buffer.version):
        return
    worker.buffer, worker.serving = Holding(buffer.version, buffer.root, buffer.published), buffer.version
    worker.effects.append(events.StartServing(buffer.version, buffer.root))
    worker.note(now, f"holds version {buffer.version} again, nothing was written over it")


# --- steps ------------------------------------------------------------------------------------------------------------


def is_opened(worker: "Worker", version: Version | None) -> bool:
    """What is to come after the old version is within reach: at a source that has answered, or in a host copy."""
    return version is not None and (worker.opened == version or worker.shelf.whole(version) is not None)


def is_wanted(worker: "Worker", grant: Grant | None) -> bool:
    """What is granted can be opened or read now, or is being read."""
    call = worker.call
    if grant is None:
        return False
    if grant.to_host:
        return worker.shelf.may_fetch(grant.version, call.resolved if call is not None else None)
    if call is None or call.verb not in FILLS or call.resolved != grant.version:
        return False
    if isinstance(worker.buffer, Filling):
        return worker.buffer.version == grant.version and worker.shelf.copying is None
    is_other = not isinstance(worker.buffer, Empty | Poisoned) and worker.buffer.version != grant.version
    return is_other and worker.shelf.whole(grant.version) is None


def advance_read(worker: "Worker", now: float) -> None:
    """Open, begin or stop the read, as what is granted and wanted has it."""
    slot, call = worker.slot, worker.call
    wanted = is_wanted(worker, slot.grant)
    may_be_wanted = call is not None and call.verb in FILLS and not isinstance(worker.buffer, Holding)
    if slot.grant is not None and not wanted and not (may_be_wanted and not slot.grant.to_host):
        slot.grant, worker.is_urgent = None, True  # so that its source need not wait for us
    slot.stop_unless_granted(is_wanted=wanted)
    if slot.may_start(is_wanted=wanted, now=now):
        _begin(worker, now)
    elif slot.is_opened and not slot.is_stopping and isinstance(worker.buffer, Vacated):
        slot.go_on()
    for effect in slot.effects:
        if isinstance(effect, events.StopRead):
            worker.note(now, f"stops ticket {effect.ticket}: {slot.stop_reason}")
    worker.effects += slot.take_effects()


def _begin(worker: "Worker", now: float) -> None:
    slot = worker.slot
    grant = slot.grant
    assert grant is not None
    if grant.to_host:
        slot.start()
        worker.shelf.begun(grant.version, grant.root)
    elif isinstance(worker.buffer, Filling):
        if worker.is_stopping_serving:
            return
        slot.start()
        worker.serving = grant.version
    elif worker.opened != grant.version:
        slot.start(is_only_opened=True)
    elif isinstance(worker.buffer, Vacated):
        slot.start()
    else:
        return  # opened before, at another source: it is read once the buffer is free
    verb = "reads" if not slot.is_opening else "opens"
    worker.note(now, f"{verb} {grant.version} at {grant.source}, ticket {grant.ticket}: {grant.reason}")
