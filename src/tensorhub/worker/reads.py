"""Steps of a read: when it opens, begins and stops, and when the buffer changes its version."""

from ..protocol.errors import HostMemoryFull, UsageError
from ..protocol.messages import (
    PREFETCHED,
    Empty,
    Failure,
    Filling,
    Grant,
    Holding,
    Poisoned,
    Vacated,
    Withdrawing,
    named,
    parse_spec,
)
from ..protocol.names import Digest, Ticket, Version
from . import events
from .events import Effect
from .state import Call, WorkerState

# --- from one version to the next -------------------------------------------------------------------------------------
#
# The new version is opened at a source while the old one is held and served. Then the old one is withdrawn. Once it is
# drained it is *vacated*: no peer reads it here, and all of it is here. The first byte that may be written makes the
# buffer *filling*. If the call ends before that, the old version is held again.
#
# An update withdraws the old version with its call, if it may bring another one. One answer of the server then says
# which version it is, where it is read, and that the old one is drained. The old one is served until the new one is
# within reach. If no source can be opened, it is held again.


def touched(worker: WorkerState, ticket: Ticket) -> None:
    """The read may write the buffer from now on: what was vacated is gone."""
    reading = worker.reading
    if reading is None or reading.to_host or reading.ticket != ticket or not isinstance(worker.buffer, Vacated):
        return
    worker.memory.touch(reading.version)
    if worker.call is None:  # it ended a moment ago
        worker.memory.cut_short(next_report=worker.next_report)


def serving_stopped(worker: WorkerState, version: Version) -> None:
    """No peer reads the registered memory any more, and none can."""
    worker.memory.serving_stopped(version, is_leaving=worker.departure is not None)
    take_back(worker)
    worker.note(f"version {version} withdrawn")


def copied_out(worker: WorkerState, version: Version, failure: Failure | None) -> None:
    """Called when an offload has ended."""
    worker.copies.copied_out(version, failure)
    worker.note(f"offload of version {version} ended: {failure.message if failure else 'done'}")


def copied_in(worker: WorkerState, version: Version, failure: Failure | None) -> None:
    """The buffer is as the host copy; or the copy was no good, or copying failed."""
    copy = worker.copies.copied_in(version, failure, next_report=worker.next_report)
    if failure is not None:
        worker.note(f"filling from the host copy of version {version} failed: {failure.message}")
        if failure.code == UsageError.code and worker.call is not None and worker.call.fills:
            worker.call.hopeless = failure  # its tensors are not there: no source can help
    if copy is not None and isinstance(worker.buffer, Filling) and worker.buffer.version == version:
        worker.want(worker.memory.complete(copy.root, copy.epoch))
        worker.note(f"holds version {version}, from its host copy")


def begin(worker: WorkerState, call: Call) -> None:
    """Free the buffer for the version of the call, as far as that is possible now."""
    version = call.resolved
    if version is None:
        _withdraw_ahead(worker, call)
        return
    match worker.buffer:
        case Holding(version=held) if held != version and worker.has_within_reach(version):
            withdraw(worker)
        case Withdrawing(version=held) if held == version or not _may_come_within_reach(worker, call, version):
            hold_on(worker)
        case Vacated(version=held) if held == version:
            take_back(worker)
        case Vacated() if worker.is_untouched and worker.copies.whole(version) is not None:
            worker.memory.begin_fill(version)
        case Empty() | Poisoned() if worker.is_untouched:
            worker.memory.begin_fill(version)


def _may_come_within_reach(worker: WorkerState, call: Call, version: Version) -> bool:
    """It is within reach, or is being opened at a source that is granted. Not for long: that may not answer."""
    offer = worker.slot.grant
    is_granted = offer is not None and offer.version == version and not offer.to_host
    return worker.has_within_reach(version) or (is_granted and worker.now < call.impatient_at)


def withdraw(worker: WorkerState) -> None:
    """Ask to take the promise back."""
    worker.memory.withdraw(next_report=worker.next_report)
    worker.note(f"withdraws version {worker.memory.held}")


def stop_drained(worker: WorkerState) -> None:
    """No peer reads here, as the server has said: serve it no more, once what comes next is within reach."""
    if worker.memory.is_drained and worker.copies.copying is None and not is_ahead(worker):
        worker.want(worker.memory.stop_serving())


def is_ahead(worker: WorkerState) -> bool:
    """It withdraws what it holds for a call whose version is not within reach yet."""
    call = worker.call
    if not isinstance(worker.buffer, Withdrawing) or worker.departure is not None or call is None or not call.fills:
        return False
    return call.resolved is None or not worker.has_within_reach(call.resolved)


def _withdraw_ahead(worker: WorkerState, call: Call) -> None:
    """Withdraw with the call if it may bring another version. Not for long: another shard may never call."""
    if worker.now >= call.impatient_at or not _may_bring_another(worker, call):
        hold_on(worker)
    elif isinstance(worker.buffer, Holding) and call.number is not None:
        withdraw(worker)


def _may_bring_another(worker: WorkerState, call: Call) -> bool:
    """The call is an update, and its version is newer than the held one, or not known yet."""
    held = worker.memory.held
    if call.verb != "update" or held is None:
        return False
    version = worker.copies.newest_whole if call.spec == PREFETCHED else parse_spec(call.spec)
    return version > held if version is not None else call.spec != PREFETCHED


def hold_on(worker: WorkerState) -> None:
    """Hold again what was to be withdrawn, if anything was, unless that is done already, or the worker leaves."""
    if isinstance(worker.buffer, Withdrawing) and not worker.memory.is_stopping and worker.departure is None:
        worker.memory.keep()
        worker.note(f"holds version {worker.memory.held} on")


def hurry(worker: WorkerState) -> None:
    """Half of the time is over: readers of what is withdrawn are cut off."""
    if isinstance(worker.buffer, Withdrawing) and not worker.buffer.impatient:
        worker.memory.hurry()
        worker.note(f"withdraws version {worker.memory.held}, impatient")


def take_back(worker: WorkerState) -> None:
    """Hold the vacated version again, if its call is over or wants just that, and nothing was written over it."""
    buffer, call = worker.buffer, worker.call
    if not isinstance(buffer, Vacated) or worker.slot.may_write:
        return
    if call is not None and (not call.fills or call.resolved != buffer.version):
        return
    worker.want(worker.memory.take_back())
    worker.note(f"holds version {buffer.version} again, nothing was written over it")


def advance_copies(worker: WorkerState) -> None:
    """Offload, fill from a host copy, and drop the copies that may go."""
    step: Effect | None = None
    buffer, copies = worker.buffer, worker.copies
    if isinstance(buffer, Holding | Withdrawing) and not worker.memory.is_stopping:
        step = copies.copy_to_host(buffer)
    elif isinstance(buffer, Filling) and not worker.slot.is_into_buffer:
        if worker.is_untouched:
            step = copies.copy_in(buffer.version)
        elif worker.memory.serving is not None and copies.whole(buffer.version) is not None:
            # A read had filled a part of it: the peers that read that part must go first.
            worker.memory.cut_short(next_report=worker.next_report)
    if step is not None:
        worker.note(f"begins: {step}")
        worker.want(step)
    worker.effects += copies.drop_what_may_go(worker.reading)


# --- the open read ----------------------------------------------------------------------------------------------------


def opened(worker: WorkerState, ticket: Ticket, root: Digest) -> None:
    """The sources have what was granted: the old version may be withdrawn for it. `root`: of what is read across."""
    reading = worker.slot.note_opened(ticket, root)
    if reading is not None:
        worker.is_urgent |= reading.is_across  # other workers wait to hear what it is
        worker.note(f"has opened version {reading.version} at {named(reading.sources)}")
        if worker.call is not None:
            worker.call.opened = reading.version


def barred(worker: WorkerState, event: events.ReadBarred) -> None:
    """A read that was told to stop writes no more. The old version is back if nothing was written."""
    if not worker.slot.bar(event.ticket):
        return
    if event.is_touched:
        touched(worker, event.ticket)
    take_back(worker)


def advanced(worker: WorkerState, event: events.ReadAdvanced) -> None:
    """Called when more chunks are in place."""
    reading = worker.reading
    if reading is None or reading.ticket != event.ticket:
        return
    if reading.to_host:
        if reading.version in worker.copies.by_version:
            worker.copies.advanced(reading.version, event.done, event.chunks)
        return
    if event.done:
        touched(worker, event.ticket)
    if isinstance(worker.buffer, Filling):
        worker.memory.advance(event.done, event.chunks)


def not_shared(worker: WorkerState, event: events.NotShared) -> None:
    """A host copy of its own is made; without room for one the read is not wanted any more, and is stopped."""
    reading = worker.slot.not_shared(event.ticket)
    if reading is not None and worker.copies.may_begin(reading.version):
        worker.copies.begun(reading.version, worker.slot.root, worker.slot.epoch)
        worker.note(f"cannot map the host copy of version {reading.version} of {named(reading.sources)}, and reads it")


def ended(worker: WorkerState, event: events.ReadEnded) -> None:
    """No byte of a read can land any more."""
    if event.complete:
        touched(worker, event.ticket)  # a version of no bytes has touched none
    reading, by_itself = worker.slot.ended(event.ticket)
    if event.complete:
        worker.slot.note_done(reading, worker.now)
    worker.is_urgent = True  # another worker may wait for that
    if event.complete and reading.shares:
        worker.copies.shared(reading.version, worker.slot.root, worker.slot.epoch)
        worker.note(f"shares the host copy of version {reading.version} of {named(reading.sources)}")
    elif event.complete and reading.to_host:
        worker.copies.filled(reading.version)
        worker.note(f"has a host copy of version {reading.version}, last chunk from {named(reading.sources)}")
    elif event.complete and isinstance(worker.buffer, Filling) and worker.buffer.version == reading.version:
        worker.want(worker.memory.complete(worker.slot.root, worker.slot.epoch))
        worker.note(f"holds version {reading.version}, last chunk from {named(reading.sources)}")
    elif event.failure is not None and by_itself and reading.to_host and event.failure.code == HostMemoryFull.code:
        if reading.version in worker.copies.by_version:
            worker.copies.leave(reading.version, next_report=worker.next_report)
        worker.note(f"no memory for a host copy of version {reading.version}: {event.failure.message}")
    elif event.failure is not None and by_itself:
        worker.slot.failed(reading, event.failure, event.source)
        worker.note(f"read {event.ticket} from {named(reading.sources)} failed: {event.failure.message}")
    take_back(worker)


def advance(worker: WorkerState) -> None:
    """Open, begin or stop a read, as grant and buffer have it now."""
    slot, call = worker.slot, worker.call
    wanted, grant = _is_wanted(worker, slot.grant), slot.grant
    may_be_wanted = call is not None and call.fills and not isinstance(worker.buffer, Holding)
    if grant is not None and not wanted and (grant.to_host or not may_be_wanted):
        slot.grant = None
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
    if reading is None or not (reading.is_across and reading.to_host):
        return False
    return reading.version not in worker.copies.by_version and slot.layout != worker.copies.layout


def _go_on(worker: WorkerState) -> None:
    """Read what was opened, if that may be written now."""
    slot, reading = worker.slot, worker.reading
    assert reading is not None
    slot.began_at = worker.now
    if reading.to_host:
        slot.go_on()
        worker.copies.begun(reading.version, slot.root, slot.epoch)
    elif isinstance(worker.buffer, Vacated):
        slot.go_on()
    elif reading.is_across and isinstance(worker.buffer, Filling) and not worker.memory.is_stopping:
        slot.go_on()
        worker.memory.serve_fill()


def _begin(worker: WorkerState) -> None:
    """Open or read what is granted. What is read across is opened in any case: its root is known only then."""
    slot, grant, buffer = worker.slot, worker.slot.grant, worker.buffer
    assert grant is not None
    is_filling = isinstance(buffer, Filling) and not grant.to_host
    is_opened = worker.call is not None and worker.call.opened == grant.version
    if is_filling and worker.memory.is_stopping:
        return
    if is_opened and not (grant.to_host or isinstance(buffer, Filling | Vacated)):
        return  # it was opened before, at another source: it is read once the buffer is free
    may_read = grant.to_host or is_filling or (is_opened and isinstance(buffer, Vacated))
    slot.start(worker.copies.layout, is_only_opened=grant.is_across or not may_read)
    slot.began_at = worker.now
    if not slot.is_opening:
        if grant.shares:
            worker.copies.begun_to_share()
        elif grant.to_host:
            worker.copies.begun(grant.version, grant.root, grant.epoch)
        elif is_filling:
            worker.memory.serve_fill()
    verb = "reads" if not slot.is_opening else "opens"
    worker.note(f"{verb} {grant.version} at {named(grant.sources)}, ticket {grant.ticket}: {grant.reason}")
