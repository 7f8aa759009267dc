"""What a caller may not do, told before anything is changed."""

from ..errors import SPOILED, SPOILED_HINT, UsageError
from ..messages import VERBS, Failure, Hello, Holding, Poisoned, Vacated, Withdrawing
from ..names import Version
from ..version_spec import PREFETCHED, parse_spec
from .call import FILLS
from .events import Called
from .state import WorkerState


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
        what = "a call" if event.verb == "choose" else event.verb  # by whoever fills a set
        return Failure("usage", f"{what} on {worker.me} before register()", "register the tensors first")
    if event.verb not in VERBS:
        return Failure("usage", f"there is no call {event.verb!r}")
    if event.verb in (*FILLS, "choose"):
        try:
            parse_spec(event.spec, event.verb)
        except UsageError as error:
            return Failure.of(error)
    if event.missed is not None:
        return None  # the caller has heard why; the siblings are about to
    return _why_not_publish(worker, event) if event.verb == "publish" else None


def update_at_once(worker: WorkerState, hello: Hello, event: Called) -> Version | Failure | None:
    """What an update to "prefetched" comes to where the server need not be asked; None where it has to be.

    If no newer version is whole in a host copy, a replica of one shard keeps what it holds: nobody else has a say, and
    the server could only say the same. If nothing is fetched ahead either, that would be so for ever: a mistake.
    """
    if (event.verb, event.spec) != ("update", PREFETCHED):
        return None
    wrong = why_not_begin(worker, event)
    if wrong is not None:
        return wrong
    newest = worker.copies.newest_whole
    if not isinstance(worker.buffer, Holding) or (newest is not None and newest > worker.buffer.version):
        return None
    in_vain = f'update("prefetched") on {worker.me}, which fetches nothing ahead, would never find a version'
    if hello.prefetch != "always" and worker.copies.prefetch is None:
        return Failure("usage", in_vain, 'open(..., prefetch="always"), or call prefetch() before')
    if not worker.copies.max_copies:
        text = f"{in_vain}: its limit on host memory has no room for a copy of {worker.copies.size_bytes} B"
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
