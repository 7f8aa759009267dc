"""The table of what may become of a buffer: each line of it happens to some worker, and nothing else can happen."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tensorhub.protocol.errors import InvariantViolation
from tensorhub.protocol.messages import (
    Buffer,
    Empty,
    Filling,
    Grant,
    Holding,
    LayoutInfo,
    Orders,
    Poisoned,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.worker import events
from tensorhub.worker.buffer import TRANSITIONS, RegisteredMemory

from .kit import LAYOUT, Conversation, grant, orders, worker

EPOCH = Number(50)
ROOT = Digest("r")
ONE, TWO = Version(1), Version(2)
REGISTERED = events.Registered(LayoutInfo(LAYOUT), Digest("l"), 16, 2)

Taken = tuple[str, type[Buffer], type[Buffer]]
TABLE: list[Taken] = [(each.trigger, each.before, each.after) for each in TRANSITIONS]


def name_of(taken: Taken) -> str:
    trigger, before, after = taken
    return f"{before.__name__}-{trigger}-{after.__name__}"


class Life(Conversation):
    """A worker to which one thing after another happens, as far as some line of the table."""

    epoch = EPOCH

    @classmethod
    def begun(cls, *, max_copies: int = 2) -> "Life":
        found = super().begun(max_copies=max_copies)
        assert isinstance(found, cls)
        return found

    def ordered(self, **more: object) -> None:
        """The server has heard everything, and says this."""
        number = Number(self.worker.state.seen + 1)
        told = replace(orders(number, **more), acknowledged=self.worker.reported)
        assert isinstance(told, Orders)
        self.tell(events.Received(told))

    def called(self, verb: str, spec: int | str = "", *, version: Version | None = None, **more: object) -> None:
        """The caller calls, and the server says which version that is."""
        self.tell(events.Called(verb, spec, 60.0, ROOT if verb == "publish" else Digest("")))
        if version is not None:
            self.ordered(answer=self.resolved(version), **more)

    def granted(self, version: Version, **more: object) -> Grant:
        """A read is granted: of the version that the call under way is about, into the buffer."""
        given = replace(grant(self.worker.state.seen + 1, version=version), epoch=EPOCH)
        self.ordered(answer=self.resolved(version), grant=given, **more)
        return given

    def drained(self) -> None:
        """Nobody reads what is withdrawn, the server says; and the shell stops serving it."""
        call, slot = self.worker.call, self.worker.state.slot
        answer = self.resolved(call.resolved) if call is not None and call.resolved is not None else None
        self.ordered(drained=self.worker.state.memory.serving, answer=answer, grant=slot.grant)
        self.stopped()

    def stopped(self) -> None:
        serving = self.worker.state.memory.serving
        assert serving is not None
        assert self.wants(events.StopServing(serving))
        self.tell(events.ServingStopped(serving))

    def ended(self) -> None:
        """The call has ended well in the whole group."""
        call = self.worker.call
        assert call is not None
        self.ordered(answer=replace(self.resolved(call.resolved or 0), version=call.resolved, finished=True))


# --- how far lives go -------------------------------------------------------------------------------------------------


def publishing() -> Life:
    it = Life.begun()
    it.called("publish", 1, version=ONE)
    return it


def published() -> Life:
    it = publishing()
    it.ended()
    return it


def publishes_again() -> Life:
    """The publish has failed on another shard. The next one of the same tensors has an epoch of its own."""
    it = publishing()
    it.tell(events.Cancelled())
    it.tell(events.Called("publish", 1, 60.0, ROOT))
    it.ordered(answer=replace(it.resolved(ONE), epoch=Number(EPOCH + 1)))
    return it


def filling() -> Life:
    it = Life.begun()
    it.called("replicate", 1, version=ONE)
    return it


def read_into() -> Life:
    it = filling()
    given = it.granted(ONE)
    it.tell(events.ReadAdvanced(given.ticket, 1, 4))
    return it


def replicated() -> Life:
    it = read_into()
    it.tell(events.ReadEnded(ticket_of(it), complete=True))
    it.ended()
    return it


def ticket_of(it: Life) -> Ticket:
    assert it.worker.reading is not None
    return it.worker.reading.ticket


def poisoned() -> Life:
    it = filling()
    it.tell(events.Cancelled())
    return it


def withdrawing(before: Callable[[], Life] = published) -> Life:
    """It updates to version 2, which has been opened at its source."""
    it = before()
    it.called("update", 2, version=TWO)
    given = it.granted(TWO)
    it.tell(events.ReadOpened(given.ticket))
    return it


def vacated(before: Callable[[], Life] = published) -> Life:
    it = withdrawing(before)
    it.drained()
    return it


def vacated_by_unpublish(before: Callable[[], Life] = published) -> Life:
    it = before()
    it.called("unpublish")
    it.drained()
    return it


def conflict(it: Life) -> Life:
    it.ordered(superseded=EPOCH)
    return it


def told(it: Life, *last: events.Event) -> Life:
    it.tell(*last)
    return it


# --- and the last step ------------------------------------------------------------------------------------------------


def fills_again() -> Life:
    it = poisoned()
    it.called("replicate", 1, version=ONE)
    return it


def fills_from_a_copy() -> Life:
    """What it updates to has been fetched ahead."""
    it = published()
    ahead = replace(grant(it.worker.state.seen + 1, version=2), to_host=True)
    it.ordered(grant=ahead, fetch=TWO)
    it.tell(events.ReadEnded(ahead.ticket, complete=True))
    it.called("update", 2, version=TWO)
    it.drained()
    assert it.wants(events.CopyIn(TWO))
    return it


def touches() -> Life:
    it = vacated()
    return told(it, events.ReadTouched(ticket_of(it)))


def hurries() -> Life:
    it = withdrawing()
    it.now = 30.0
    it.tell(events.Tick())
    return it


def leaves() -> Life:
    it = published()
    it.tell(events.Closing(60.0))
    it.drained()
    return it


def spoiled_and_free() -> Life:
    it = told(read_into(), events.Cancelled())
    it.tell(events.ReadEnded(ticket_of(it)))
    it.drained()
    return it


def disowned_and_free() -> Life:
    it = conflict(published())
    it.drained()
    return it


def takes_back() -> Life:
    it = vacated()
    it.tell(events.Cancelled())
    assert isinstance(it.worker.buffer, Vacated)  # the read might have written, until its shell has said
    it.tell(events.ReadBarred(ticket_of(it), is_touched=False))
    return it


def unpublishes() -> Life:
    it = vacated_by_unpublish()
    it.ended()
    return it


LIVES: dict[Taken, Callable[[], Life]] = {
    ("register", Empty, Empty): Life.begun,
    ("register", Poisoned, Empty): lambda: told(poisoned(), REGISTERED),
    ("publish", Empty, Holding): publishing,
    ("publish_again", Holding, Holding): publishes_again,
    ("note_published", Holding, Holding): published,
    ("begin_fill", Empty, Filling): filling,
    ("begin_fill", Poisoned, Filling): fills_again,
    ("begin_fill", Vacated, Filling): fills_from_a_copy,
    ("touch", Vacated, Filling): touches,
    ("advance", Filling, Filling): read_into,
    ("complete", Filling, Holding): replicated,
    ("cut_short", Filling, Poisoned): lambda: told(read_into(), events.Cancelled()),
    ("withdraw", Holding, Withdrawing): withdrawing,
    ("hurry", Withdrawing, Withdrawing): hurries,
    ("keep", Withdrawing, Holding): lambda: told(withdrawing(), events.Cancelled()),
    ("serving_stopped", Withdrawing, Vacated): vacated,
    ("serving_stopped", Withdrawing, Empty): leaves,
    ("serving_stopped", Poisoned, Poisoned): spoiled_and_free,
    ("serving_stopped", Poisoned, Empty): disowned_and_free,
    ("take_back", Vacated, Holding): takes_back,
    ("let_go", Vacated, Empty): unpublishes,
    ("disown", Holding, Poisoned): lambda: conflict(published()),
    ("disown", Withdrawing, Poisoned): lambda: conflict(withdrawing()),
    ("disown", Vacated, Poisoned): lambda: conflict(vacated_by_unpublish(replicated)),
    ("disown", Vacated, Empty): lambda: conflict(vacated_by_unpublish()),
}


@pytest.mark.parametrize("line", TABLE, ids=name_of)
def test_every_line_of_the_table_happens(line: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Taken] = []
    become = RegisteredMemory._become

    def recorded(self: RegisteredMemory, trigger: str, after: Buffer) -> None:
        steps.append((trigger, type(self.buffer), type(after)))
        become(self, trigger, after)

    monkeypatch.setattr(RegisteredMemory, "_become", recorded)
    it = LIVES[line]()
    assert steps[-1] == line
    assert type(it.worker.buffer) is line[2]


def test_every_line_is_named_for_a_method_and_has_a_life() -> None:
    assert sorted(map(name_of, LIVES)) == sorted(map(name_of, TABLE))
    assert all(each.why and callable(getattr(RegisteredMemory, each.trigger)) for each in TRANSITIONS)


# --- what is not in the table -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "buffer"),
    [
        (lambda it: it.register(), Holding(ONE, ROOT)),
        (lambda it: it.publish(TWO, ROOT, Number(9)), Holding(ONE, ROOT)),
        (lambda it: it.begin_fill(TWO), Withdrawing(ONE, ROOT)),
        (lambda it: it.touch(TWO), Holding(ONE, ROOT)),
        (lambda it: it.complete(ROOT, Number(9)), Poisoned()),
        (lambda it: it.keep(), Vacated(ONE, ROOT)),
        (lambda it: it.take_back(), Poisoned()),
        (lambda it: it.let_go(), Holding(ONE, ROOT)),
    ],
)
def test_what_is_not_in_the_table_is_our_bug(trigger: Callable[[RegisteredMemory], object], buffer: Buffer) -> None:
    it = RegisteredMemory(worker("rollout"), buffer)
    with pytest.raises(InvariantViolation):
        trigger(it)
    assert it.buffer == buffer


@pytest.mark.parametrize("is_stopping", [True, False])
def test_only_what_is_being_stopped_may_have_stopped(is_stopping: bool) -> None:
    it = RegisteredMemory(worker("rollout"), Withdrawing(ONE, ROOT), serving=ONE, is_stopping=is_stopping)
    with pytest.raises(InvariantViolation, match="stopped, but it serves 1"):
        it.serving_stopped(TWO if is_stopping else ONE, is_leaving=False)
    assert (it.buffer, it.serving) == (Withdrawing(ONE, ROOT), ONE)


# --- what goes with the buffer ----------------------------------------------------------------------------------------


def test_what_was_disowned_with_nobody_reading_leaves_no_trace_in_the_next_fill() -> None:
    it = conflict(vacated_by_unpublish())
    assert it.worker.buffer == Empty()
    it.called("replicate", 3, version=Version(3))
    given = it.granted(Version(3))
    it.tell(events.ReadAdvanced(given.ticket, 1, 4), events.Cancelled(), events.ReadEnded(given.ticket))
    it.drained()
    assert it.worker.buffer == Poisoned()  # spoiled by the fill: it may not be published


def test_a_server_that_says_finished_too_early_leaves_no_fill_behind() -> None:
    it = read_into()
    it.ended()
    assert isinstance(it.worker.buffer, Poisoned)
    assert it.wants(events.StopRead(ticket_of(it)))
