"""Messages, effects and states in the short form that transcripts use.

Numbers of the server (tickets, sessions) are shown in the order in which they first appear: t1, t2, s1. A line that
says no more than the one before it in the same direction is not shown, so what is left is news.
"""

from tensorhub.protocol.messages import (
    Answer,
    Buffer,
    Failure,
    Filling,
    Grant,
    Hello,
    Holding,
    HostCopy,
    LayoutInfo,
    Orders,
    Poisoned,
    Refusal,
    Report,
    Source,
    ToServer,
    ToWorker,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import WorkerId
from tensorhub.worker.events import (
    CopyIn,
    CopyOut,
    Delayed,
    DropCopy,
    Effect,
    Finished,
    Left,
    OpenRead,
    StartRead,
    StartServing,
    StopRead,
    StopServing,
    Warn,
)


def name_of(worker: WorkerId) -> str:
    """`trainer/0`; the model goes without saying."""
    return f"{worker.replica}/{worker.shard}"


def names_of(sources: tuple[Source, ...]) -> str:
    """`trainer/0`; of a read across all of them."""
    return " and ".join(name_of(source.worker) for source in sources)


class Words:
    """Short forms, and what each side was last heard to say."""

    def __init__(self) -> None:
        self._tickets: dict[int, str] = {}
        self._granted_to: dict[int, str] = {}
        self._sessions: dict[int, str] = {}
        self._last: dict[tuple[str, str], object] = {}

    def forget(self, who: str) -> None:
        """A new connection: whatever is said is news again."""
        for key in [key for key in self._last if key[0] == who]:
            del self._last[key]

    def is_news(self, who: str, what: str, value: object) -> bool:
        """Whether this differs from what was last said of it."""
        is_new = self._last.get((who, what)) != value
        self._last[who, what] = value
        return is_new

    def ticket(self, number: int) -> str:
        return self._tickets.setdefault(number, f"t{len(self._tickets) + 1}")

    def session(self, number: int) -> str:
        return self._sessions.setdefault(number, f"s{len(self._sessions) + 1}")

    # --- what workers say ---------------------------------------------------------------------------------------------

    def to_server(self, who: str, message: ToServer) -> str | None:
        """What the worker says; None if that is nothing new."""
        match message:
            case Hello(shards=shards):
                return f"{who} says hello, of {shards} shards" if shards > 1 else f"{who} says hello"
            case LayoutInfo():
                return None
            case Report():
                steady, rest = self.report(message), self._standing(who, message)
                is_news = self.is_news(who, "report", (steady, rest))
                news = [text for what, text in rest if self.is_news(who, what, text)]
                return f"{who} says {', '.join([steady, *news])}" if is_news else None

    def report(self, report: Report) -> str:
        """What is always shown of a report."""
        parts = [buffer_text(report.buffer)]
        if report.call is not None:
            call = report.call
            waiting = " waiting" if call.waits else f" saying {call.metadata}" if call.metadata else ""
            claim = f" claims {call.claim}" if call.claim is not None else ""
            resolved = f" = {call.resolved}" if call.resolved is not None and call.verb != "unpublish" else ""
            parts.append(f"call {call.number}: {call_text(call.verb, call.spec)}{waiting}{claim}{resolved}")
        if report.reading is not None:
            root = f" [{report.reading.root}]" if report.reading.root else ""
            parts.append(f"reads {self.ticket(report.reading.ticket)}{root} from {names_of(report.reading.sources)}")
        parts += [f"{self.ticket(failure.ticket)} failed: {failure.code}" for failure in report.failures]
        parts += [copy_text(copy) for copy in report.copies]
        if report.pins:
            parts.append(f"pins {', '.join(map(str, report.pins))}")
        if report.prefetch is not None:
            parts.append(f"wants {report.prefetch} ahead")
        if report.closing:
            parts.append("leaving" if report.left else "wants to leave")
        return ", ".join(parts)

    def _standing(self, who: str, report: Report) -> list[tuple[str, str]]:
        """What stands for long, and is shown when it changes."""
        mine = [ticket for ticket, reader in self._granted_to.items() if reader == who and ticket <= report.closed]
        standing = []
        if mine:
            standing.append(("closed", f"closed {self.ticket(max(mine))}"))
        if report.ended:
            how = "" if report.finished == report.ended else " badly"
            standing.append(("ended", f"ended {report.ended}{how}"))
        return standing

    # --- what the server says -----------------------------------------------------------------------------------------

    def to_worker(self, who: str, message: ToWorker) -> str | None:
        """What the server says; None if that is nothing new."""
        match message:
            case Orders():
                text = self.orders(who, message)
                position = "?" if message.position is None else str(message.position)
                where = f"{self.session(message.session)} at {position}"
                is_news = self.is_news(who, "orders", (text, where))
                news = [where] if self.is_news(who, "where", where) else []
                said = ", ".join([*news, text] if text else news)
                return f"{who} hears {said}" if is_news and said else None
            case Refusal(retry_s=retry_s):
                again = f"; come back in {retry_s:.1f} s" if retry_s > 0 else ""
                return f"{who} is refused: {failure_text(message)}{again}"

    def orders(self, who: str, orders: Orders) -> str:
        """What is always shown of orders."""
        parts = []
        if orders.answer is not None:
            parts.append(answer_text(orders.answer))
        if orders.grant is not None:
            self._granted_to[orders.grant.ticket] = who
            parts.append(self.grant(orders.grant))
        if orders.drained is not None:
            parts.append(f"drained {orders.drained}")
        if orders.offload is not None:
            parts.append(f"offload {orders.offload}")
        if orders.fetch is not None:
            parts.append(f"fetch {orders.fetch}")
        parts += [f"release copy {number}" for number in orders.release]
        parts += ["what it holds is superseded"] if orders.superseded else []
        return ", ".join(parts)

    def grant(self, grant: Grant) -> str:
        where = f"{self.ticket(grant.ticket)}: version {grant.version} from {names_of(grant.sources)}"
        into = " into host memory" if grant.to_host else ""
        return f"grant {where}{into} ({grant.reason})"

    # --- what the worker does -----------------------------------------------------------------------------------------

    def effect(self, who: str, effect: Effect) -> str | None:
        """What the worker wants done; None for what is shown elsewhere or not at all."""
        match effect:
            case OpenRead(grant=grant):
                return f"{who} opens version {grant.version} at {names_of(grant.sources)}, {self.ticket(grant.ticket)}"
            case StartRead(grant=grant):
                where = f"version {grant.version} from {names_of(grant.sources)}"
                where += " into host memory" if grant.to_host else ""
                if grant.shares:
                    where = f"version {grant.version} from {names_of(grant.sources)}, to share its host copy"
                return f"{who} starts to read {where}, {self.ticket(grant.ticket)}"
            case StopRead(ticket=ticket):
                return f"{who} stops {self.ticket(ticket)}"
            case StartServing(version=version):
                return f"{who} serves version {version}"
            case StopServing(version=version):
                return f"{who} stops serving version {version}"
            case CopyOut(version=version):
                return f"{who} copies version {version} to host memory"
            case CopyIn(version=version):
                return f"{who} fills its tensors from its host copy of version {version}"
            case DropCopy(version=version):
                return f"{who} drops its host copy of version {version}"
            case Delayed(why=why):
                return f"{who} WARNS {failure_text(why)}"
            case Warn(text=text):
                return f"{who} WARNS: {text}"
            case Finished(version=version, error=None):
                return f"{who} RETURNS" + ("" if version is None else f" {version}")
            case Finished(error=Failure() as error):
                return f"{who} RAISES {failure_text(error)}"
            case Left(drained=drained):
                return f"{who} leaves" + ("" if drained else ", its readers cut off")
        return None


def buffer_text(buffer: Buffer) -> str:
    match buffer:
        case Filling(version=version, done=done, chunks=chunks):
            return f"filling {version}" + (f" ({done} of {chunks})" if chunks else "")
        case Holding(version=version, root=root, published=published, is_pending=is_pending):
            how = " published" if published and not is_pending else " being published" if published else ""
            return f"holding {version} [{root}]{how}"
        case Withdrawing(version=version, impatient=impatient):
            return f"withdrawing {version}" + (" impatiently" if impatient else "")
        case Vacated(version=version):
            return f"vacated {version}"
        case Poisoned(version=version):
            return "poisoned" + (f" (readers of {version})" if version is not None else "")
    return "empty"


def copy_text(copy: HostCopy) -> str:
    state = "about to go" if copy.dropping else "whole" if copy.whole else "filling"
    state += ", shared" if copy.shared else ""
    if copy.unfit and not copy.dropping:
        state += ", unfit for the tensors"
    return f"copy {copy.number} of {copy.version} {state}"


def call_text(verb: str, spec: int | str) -> str:
    return f"{verb}({spec})"


def answer_text(answer: Answer) -> str:
    version = "" if answer.version is None else f" is version {answer.version}"
    if answer.instead:
        return f"call {answer.number} is over, call {answer.instead} instead"
    if answer.past is not None:
        return f"call {answer.number} is behind another shard"
    if answer.error is not None:
        return f"call {answer.number}{version} FAILED: {answer.error.code}"
    if answer.finished:
        return f"call {answer.number}{version} FINISHED"
    if answer.waiting is not None:
        return f"call {answer.number}{version} waits: {answer.waiting.message}"
    return f"call {answer.number}{version}" + ("" if version else " noted")


def failure_text(failure: Failure | Refusal) -> str:
    hint = f" (hint: {failure.hint})" if failure.hint else ""
    return f"{failure.code}: {failure.message}{hint}"
