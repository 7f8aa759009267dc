"""The caller's operation at one worker: may it begin, and what its error says when time has run out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..messages import VERBS, Answer, Failure, Filling, Hello, Holding, Operation, Poisoned, Spec, Vacated, Withdrawing
from ..names import Digest, Version
from ..specs import PREFETCHED, call_text, parse_spec
from .events import Called

if TYPE_CHECKING:
    from .machine import Worker

FILLS = ("replicate", "update")
UNANSWERED = 3  # reports: a server that has answered none of them lives, perhaps, and is no help now


@dataclass
class Call:
    """One operation, from the caller's call to its end. A worker has one at a time."""

    verb: str
    spec: Spec
    root: Digest
    started: float
    deadline: float
    claim: Version | None = None  # of an unpublish
    number: int | None = None  # its position; unknown until the server has told where the group is
    resolved: Version | None = None
    answer: Answer | None = None
    is_delayed: bool = False  # the caller was told why it waits so long

    @property
    def awaits_shard(self) -> Failure | None:
        """What the server last said of shards that have not come to this call."""
        waiting = self.answer.waiting if self.answer is not None else None
        return waiting if waiting is not None and waiting.code == "group-incomplete" else None

    @property
    def impatient_at(self) -> float:
        """Half the time is for readers to finish or move; then those who still read are cut off."""
        return self.started + (self.deadline - self.started) / 2

    def take(self, answer: Answer | None) -> bool:
        """The server has answered. Returns whether it has just said which version it is."""
        if answer is None or answer.number != self.number:
            return False
        self.answer = answer
        is_news = self.resolved is None and answer.version is not None
        self.resolved = answer.version if is_news else self.resolved
        return is_news

    def told(self) -> Operation | None:
        """As a report tells it."""
        if self.number is None:
            return None
        return Operation(self.number, self.verb, self.spec, self.root, self.resolved, self.claim)

    @property
    def may_withdraw(self) -> bool:
        """The server knows of the call, and has granted what it claims: what is refused must have changed nothing."""
        return self.number is not None and (self.claim is None or self.resolved is not None)

    def __str__(self) -> str:
        return call_text(self.verb, self.spec, self.claim)


def why_not_begin(worker: "Worker", event: Called) -> Failure | None:
    """The caller's mistake, if it is one, before anything was changed."""
    if worker.is_closing:
        return Failure("closed", f"{worker.me} was closed", "open it again")
    if worker.call is not None:
        hint = "one call at a time on one Weights: wait for the first"
        return Failure("usage", f"{event.verb} on {worker.me} while its {worker.call} has not ended", hint)
    if worker.refusal is not None and worker.refusal.retry_s <= 0:
        return Failure(worker.refusal.code, worker.refusal.message, worker.refusal.hint)
    if worker.layout is None:
        return Failure("usage", f"{event.verb} on {worker.me} before register()", "register the tensors first")
    if event.verb not in VERBS:
        return Failure("usage", f"there is no operation {event.verb!r}")
    if event.verb in FILLS:
        try:
            parse_spec(event.spec, event.verb)
        except UsageError as error:
            return Failure(error.code, str(error), error.hint or "")
    return _why_not_publish(worker, event) if event.verb == "publish" else None


def update_at_once(worker: "Worker", hello: Hello, event: Called) -> Version | Failure | None:
    """What an update to "prefetched" comes to where the server need not be asked; None where it has to be.

    Where nothing newer is here whole, a replica of one shard keeps what it holds: nobody else has a say in it, and the
    server could only say the same. Where nothing is fetched ahead either, the caller would run one version for ever.
    """
    if (event.verb, event.spec) != ("update", PREFETCHED):
        return None
    wrong = why_not_begin(worker, event)
    if wrong is not None:
        return wrong
    if not isinstance(worker.buffer, Holding) or worker.shelf.has_newer(worker.buffer.version):
        return None
    if hello.prefetch != "always" and worker.shelf.prefetch is None:
        text = f'update("prefetched") on {worker.me}, which fetches nothing ahead, would never find a version'
        return Failure("usage", text, 'open(..., prefetch="always"), or call prefetch() before')
    return worker.buffer.version if hello.shards == 1 else None


def _why_not_publish(worker: "Worker", event: Called) -> Failure | None:
    try:
        version = parse_spec(event.spec)
    except UsageError as error:
        return Failure(error.code, str(error), error.hint or "")
    if version is None:
        return Failure("usage", f"publish needs a version number, not {event.spec!r}")
    match worker.buffer:
        case Poisoned():
            hint = "replicate a version, or register() again once good content is in the tensors"
            return Failure("usage", f"{worker.me} is poisoned: its last fill failed half-way", hint)
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


def deadline_failure(worker: "Worker", call: Call) -> Failure:
    """A call has not ended in time: what was missing at the end, how far it got, what to do next.

    Whatever it waited for, what happened is that time ran out: a longer timeout, or a retry, may be all that is needed.
    """
    text = f"{call} of {worker.me} did not end within {call.deadline - call.started:.3g} s"
    missing = [*_how_far(worker, call)]
    waiting = call.answer.waiting if call.answer is not None else None
    unanswered_s = worker.book.unanswered_s(call.deadline)
    hint = "retry, or give it a longer timeout"
    if not worker.connected and worker.refusal is not None:
        missing.append(f"the reference server refuses this worker for now: {worker.refusal.message}")
        hint = worker.refusal.hint or hint
    elif not worker.connected:
        missing.append("the reference server does not answer")
        hint = "is it running?"
    elif unanswered_s > UNANSWERED * worker.book.every_s:
        missing.append(f"the reference server has not answered for {unanswered_s:.3g} s")
        hint = "has it too much to do, or does it stand still?"
    elif waiting is not None:
        missing.append(waiting.message)
        hint = waiting.hint or hint
    elif call.answer is None:
        missing.append("the reference server has not answered")
    return Failure("deadline-exceeded", f"{text}: {'; '.join(missing)}" if missing else text, hint)


def _how_far(worker: "Worker", call: Call) -> Iterator[str]:
    buffer = worker.buffer
    if worker.shelf.copying is not None:
        way, version = worker.shelf.copying
        yield f"version {version} was being copied {'to' if way == 'out' else 'from'} host memory"
    elif isinstance(buffer, Withdrawing):
        yield f"version {buffer.version} still has readers"
    elif isinstance(buffer, Holding) and call.verb in FILLS and call.resolved not in (None, buffer.version):
        yield f"no source of version {call.resolved} has answered; version {buffer.version} is still held"
    elif isinstance(buffer, Vacated) and call.verb in FILLS:
        yield f"not a byte of version {call.resolved} had come; version {buffer.version} is held again"
    for version, times in worker.shelf.failed.items():
        yield f"copying version {version} from host memory failed {times} times"
    if isinstance(buffer, Filling):
        done, chunks = worker.progress
        source = f" from {worker.reading.source}" if worker.reading is not None else ""
        yield f"{done} of {chunks or '?'} chunks of version {buffer.version} were in place{source}"
