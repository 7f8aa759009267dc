"""Reads: when one is opened, begun and stopped, and what it brings to the buffer or to a host copy."""

from ..errors import HostMemoryFull
from ..messages import Empty, Filling, Grant, Holding, Poisoned, Reading, Vacated
from ..names import Digest, Ticket
from . import events, filling
from .events_across import PartEnded
from .state import WorkerState

# --- what the data plane tells ----------------------------------------------------------------------------------------


def opened(worker: WorkerState, ticket: Ticket, root: Digest | None = None) -> None:
    """The source has what was granted: the old version may be withdrawn for it. `root`: of what is read across."""
    reading = worker.slot.note_opened(ticket, root)
    worker.is_urgent |= reading is not None and root is not None  # others wait to hear what it is
    if reading is not None:
        worker.note(f"has opened version {reading.version} at {reading.source}")
        if worker.call is not None:
            worker.call.opened = reading.version


def barred(worker: WorkerState, event: events.ReadBarred) -> None:
    """A read that was told to stop writes no more. The old version is back if nothing was written and nobody calls."""
    if not worker.slot.bar(event.ticket):
        return
    if event.is_touched:
        filling.touched(worker, event.ticket)
    filling.take_back(worker)


def advanced(worker: WorkerState, event: events.ReadAdvanced) -> None:
    """More chunks are in place."""
    reading = worker.reading
    if reading is None or reading.ticket != event.ticket:
        return
    if reading.to_host:
        if reading.version in worker.copies.by_version:
            worker.copies.advanced(reading.version, event.done, event.chunks)
        return
    if event.done:
        filling.touched(worker, event.ticket)
    if isinstance(worker.buffer, Filling):
        worker.memory.advance(event.done, event.chunks)


def not_shared(worker: WorkerState, event: events.NotShared) -> None:
    """A host copy of its own is made; without room for one the read is not wanted any more, and is stopped."""
    reading = worker.slot.not_shared(event.ticket)
    if reading is not None and worker.copies.may_begin(reading.version):
        worker.copies.begun(reading.version, worker.slot.root)
        worker.note(f"cannot map the host copy of version {reading.version} of {reading.source}, and reads it")


def part_ended(worker: WorkerState, event: PartEnded) -> None:
    """One source of a read across is done with; the others go on."""
    reading, slot = worker.reading, worker.slot
    if reading is None or not slot.is_across or reading.ticket != event.ticket:
        return
    found = slot.parts.ended(event.part, brought=event.brought)
    if found is None:
        return
    grant, by_itself = found
    worker.is_urgent = True
    if event.failure is not None and by_itself:
        slot.failed(Reading(grant.ticket, grant.source, grant.version), event.failure)
        worker.note(f"part {event.part} from {grant.source} failed: {event.failure.message}")


def ended(worker: WorkerState, event: events.ReadEnded) -> None:
    """No byte of a read can land any more."""
    if event.complete:
        filling.touched(worker, event.ticket)  # a version of no bytes has touched none
    reading, by_itself = worker.slot.ended(event.ticket)
    worker.is_urgent = True  # somebody may wait for that; and the server need not have heard of it yet
    if event.complete and reading.shares:
        worker.copies.shared(reading.version, worker.slot.root)
        worker.note(f"shares the host copy of version {reading.version} of {reading.source}")
    elif event.complete and reading.to_host:
        worker.copies.filled(reading.version)
        worker.note(f"has a host copy of version {reading.version}, last chunk from {reading.source}")
    elif event.complete and isinstance(worker.buffer, Filling) and worker.buffer.version == reading.version:
        worker.want(worker.memory.complete(worker.slot.root))
        worker.note(f"holds version {reading.version}, last chunk from {reading.source}")
    elif event.failure is not None and by_itself and reading.to_host and event.failure.code == HostMemoryFull.code:
        if reading.version in worker.copies.by_version:
            worker.copies.leave(reading.version, next_report=worker.next_report)
        worker.note(f"no memory for a host copy of version {reading.version}: {event.failure.message}")
    elif event.failure is not None and by_itself:
        worker.slot.failed(reading, event.failure)
        worker.note(f"read {event.ticket} from {reading.source} failed: {event.failure.message}")
    filling.take_back(worker)


# --- steps ------------------------------------------------------------------------------------------------------------


def advance(worker: WorkerState) -> None:
    """Open, begin or stop a read, as grant and buffer have it now."""
    slot, call = worker.slot, worker.call
    wanted, offer = _is_wanted(worker, slot.offer), slot.offer
    may_be_wanted = call is not None and call.fills and not isinstance(worker.buffer, Holding)
    if offer is not None and not wanted and (offer.to_host or not may_be_wanted):
        slot.decline()
        worker.is_urgent = True  # its source need not wait for us
    slot.stop_unless_granted(is_wanted=wanted)
    if slot.may_start(is_wanted=wanted, now=worker.now):
        _begin(worker)
    elif slot.is_opened and not slot.is_stopping:
        _go_on(worker)
    for effect in slot.effects:
        if isinstance(effect, events.StopRead):
            worker.note(f"stops ticket {effect.ticket}: {slot.stop_reason}")
    worker.effects += slot.take_effects()


def _is_wanted(worker: WorkerState, grant: Grant | None) -> bool:
    """What is granted can be opened or read now, or is being read."""
    call = worker.call
    if grant is None:
        return False
    if grant.to_host:
        may_fetch = worker.copies.may_fetch(grant.version, call.resolved if call is not None else None)
        return may_fetch and not _is_of_other_tensors(worker)
    if call is None or not call.fills or call.resolved != grant.version:
        return False
    if isinstance(worker.buffer, Filling):
        return worker.buffer.version == grant.version and worker.copies.copying is None
    is_other = not isinstance(worker.buffer, Empty | Poisoned) and worker.buffer.version != grant.version
    return is_other and worker.copies.whole(grant.version) is None


def _is_of_other_tensors(worker: WorkerState) -> bool:
    """What is opened across for a host copy was worked out for tensors that are not registered any more."""
    slot, reading = worker.slot, worker.reading
    if reading is None or not (slot.is_across and reading.to_host):
        return False
    return reading.version not in worker.copies.by_version and slot.layout != worker.copies.layout


def _go_on(worker: WorkerState) -> None:
    """Read what was opened, if that may be written now."""
    slot, reading = worker.slot, worker.reading
    assert reading is not None
    if isinstance(worker.buffer, Vacated) and not reading.to_host:
        slot.go_on()
    elif reading.to_host:
        slot.go_on()
        worker.copies.begun(reading.version, slot.root)
    elif slot.is_across and isinstance(worker.buffer, Filling) and not worker.memory.is_stopping:
        slot.go_on()
        worker.memory.serve_fill()


def _begin_across(worker: WorkerState, grant: Grant) -> None:
    """Open it in any case: what it is has to be known before a byte is written."""
    is_free = grant.to_host or isinstance(worker.buffer, Filling | Vacated)
    if not is_free and worker.call is not None and worker.call.opened == grant.version:
        return  # it was opened before, at other sources: it is read once the buffer is free
    worker.slot.start_across()
    worker.slot.layout = worker.copies.layout
    tickets = ", ".join(str(part) for part in worker.slot.parts.open)
    worker.note(f"opens {grant.version} across {len(worker.slot.parts.open)} sources, tickets {tickets}")


def _begin(worker: WorkerState) -> None:
    slot, grant = worker.slot, worker.slot.offer
    assert grant is not None
    if slot.grant is None:
        _begin_across(worker, grant)
        return
    if grant.to_host:
        slot.start()
        if grant.shares:
            worker.copies.begun_to_share()
        else:
            worker.copies.begun(grant.version, grant.root)
    elif isinstance(worker.buffer, Filling):
        if worker.memory.is_stopping:
            return
        slot.start()
        worker.memory.serve_fill()
    elif worker.call is None or worker.call.opened != grant.version:
        slot.start(is_only_opened=True)
    elif isinstance(worker.buffer, Vacated):
        slot.start()
    else:
        return  # it was opened before, at another source: it is read once the buffer is free
    verb = "reads" if not slot.is_opening else "opens"
    worker.note(f"{verb} {grant.version} at {grant.source}, ticket {grant.ticket}: {grant.reason}")
