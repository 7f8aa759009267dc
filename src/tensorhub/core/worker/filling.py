"""When the registered memory goes from one version to another, so that no version is given up for nothing.

The new version is opened at a source while the old one is still held and served. Only then is the old one withdrawn.
Once it is drained it is vacated: nobody reads it here, and all of its bytes are. The first byte that may be written
makes the buffer *filling*. If the call ends before that, the old version is held again.

What an update is likely to bring may be whole in host memory already. Then the old version is withdrawn with the call:
the server can say which version it is, and that nobody reads the old one, in one answer. If it is another version, the
old one is held again until that is within reach.
"""

from ..errors import UsageError
from ..messages import Empty, Failure, Filling, Holding, Poisoned, Vacated, Withdrawing
from ..names import Ticket, Version
from ..version_spec import PREFETCHED, parse_spec
from .call import Call
from .events import Effect
from .state import WorkerState

# --- what the data plane tells ----------------------------------------------------------------------------------------


def touched(worker: WorkerState, ticket: Ticket) -> None:
    """The read may write the buffer from now on: what was vacated is gone."""
    reading = worker.reading
    if reading is None or reading.to_host or reading.ticket != ticket or not isinstance(worker.buffer, Vacated):
        return
    worker.memory.touch(reading.version)
    if worker.call is None:  # it ended a moment ago
        worker.memory.cut_short(next_report=worker.next_report)


def serving_stopped(worker: WorkerState, version: Version) -> None:
    """Nobody reads the registered memory any more, and nobody can."""
    worker.memory.serving_stopped(version, is_leaving=worker.departure is not None)
    take_back(worker)
    worker.note(f"version {version} withdrawn")


def copied_out(worker: WorkerState, version: Version, failure: Failure | None) -> None:
    """An offload has ended."""
    worker.copies.copied_out(version, failure)
    worker.note(f"offload of version {version} ended: {failure.message if failure else 'done'}")


def copied_in(worker: WorkerState, version: Version, failure: Failure | None) -> None:
    """The buffer is as the host copy; or the copy was no good, or copying failed."""
    root = worker.copies.copied_in(version, failure, next_report=worker.next_report)
    if failure is not None:
        worker.note(f"filling from the host copy of version {version} failed: {failure.message}")
        if failure.code == UsageError.code and worker.call is not None and worker.call.fills:
            worker.call.hopeless = failure  # its tensors are not there: whoever has the version, it cannot be had here
    if root is not None and isinstance(worker.buffer, Filling) and worker.buffer.version == version:
        worker.want(worker.memory.complete(root))
        worker.note(f"holds version {version}, from its host copy")


# --- steps ------------------------------------------------------------------------------------------------------------


def begin(worker: WorkerState, call: Call) -> None:
    """Free the buffer for the version of the call, as far as that is possible now."""
    version = call.resolved
    if version is None:
        _withdraw_ahead(worker, call)
        return
    match worker.buffer:
        case Holding(version=held) if held != version and worker.has_within_reach(version) and not call.is_held_back:
            withdraw(worker)
        case Withdrawing(version=held) if held == version or not worker.has_within_reach(version):
            hold_on(worker)
        case Vacated(version=held) if held == version:
            take_back(worker)
        case Vacated() if worker.is_untouched and worker.copies.whole(version) is not None:
            worker.memory.begin_fill(version)
        case Empty() | Poisoned() if worker.is_untouched:
            worker.memory.begin_fill(version)


def withdraw(worker: WorkerState) -> None:
    """Ask to take the promise back."""
    worker.memory.withdraw(next_report=worker.next_report)
    worker.note(f"withdraws version {worker.memory.held}")


def _withdraw_ahead(worker: WorkerState, call: Call) -> None:
    """Ask for it with the call, if what that brings is likely to be here. Not for long: a shard may not have come."""
    is_likely = worker.now < call.impatient_at and worker.copies.whole(_likely_version(worker, call)) is not None
    if not is_likely:
        hold_on(worker)
    elif isinstance(worker.buffer, Holding) and is_likely and call.number is not None and not call.is_held_back:
        withdraw(worker)


def _likely_version(worker: WorkerState, call: Call) -> Version | None:
    """What an update will bring, as far as can be known here; None where what is held may be enough."""
    held = worker.memory.held
    if call.verb != "update" or held is None:
        return None
    version = worker.copies.newest_whole if call.spec == PREFETCHED else parse_spec(call.spec)
    if call.spec == "latest":
        version = worker.proofs.newest
    return version if version is not None and version > held else None


def hold_on(worker: WorkerState) -> None:
    """Hold again what was to be withdrawn, if anything was, unless that is done already, or the worker leaves."""
    if isinstance(worker.buffer, Withdrawing) and not worker.memory.is_stopping and worker.departure is None:
        worker.memory.keep()
        worker.note(f"holds version {worker.memory.held} on")


def hurry(worker: WorkerState) -> None:
    """Half of the time is over: whoever still reads what is withdrawn is cut off."""
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
        step = copies.copy_out(buffer)
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
