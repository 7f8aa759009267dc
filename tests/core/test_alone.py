"""What a worker does without the server, and when."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import Answer, Failure, Holding, Poisoned, Step, Vacated, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version
from tensorhub.worker import events

from .kit import Conversation, orders

ONE, TWO, ROOT = Version(1), Version(2), Digest("r")
ALONE_S = 5.0  # the lease of these orders is 4 s, and a report is due each second


class Writer(Conversation):
    """It has published version 1."""

    epoch = Number(7)

    @classmethod
    def made(cls, **more: object) -> "Writer":
        it = cls.begun()
        it.tell(events.Called("publish", 1, 60.0, root=ROOT))
        it.tell(events.Received(orders(2, answer=it.resolved(1))))
        answer = Answer(1, ONE, finished=True, epoch=cls.epoch)
        it.tell(events.Received(orders(3, answer=answer, newest=ONE, **more)))
        return it

    def waits(self, until: float, *, is_called: bool = True) -> None:
        """Time goes on; the machine is called when it wants to be."""
        while is_called and self.worker.next_deadline() < until:
            self.now = max(self.now, self.worker.next_deadline())
            self.tell(events.Tick())
        self.now = until
        self.tell(events.Tick())

    def trains(self, version: int) -> None:
        self.tell(events.Called("unpublish", "", self.now + 60, claim=Version(version)))
        if self.worker.state.memory.is_stopping:
            assert self.worker.held is not None
            self.tell(events.ServingStopped(self.worker.held))
        self.tell(events.Called("publish", version, self.now + 60, root=ROOT))

    def ended(self) -> list[Version | None]:
        return [each.version for each in self.wanted if isinstance(each, events.Finished) and each.error is None]


def test_time_for_which_the_process_stood_still_does_not_count() -> None:
    it = Writer.made()
    it.tell(events.Called("unpublish", "", 60.0))
    it.waits(3 * ALONE_S, is_called=False)
    assert not it.wants(events.StopServing(ONE))
    it.waits(4 * ALONE_S)
    assert it.wants(events.StopServing(ONE))


def test_a_number_that_is_not_above_all_that_the_worker_knows_is_refused() -> None:
    it = Writer.made()
    it.tell(events.Disconnected())
    it.waits(ALONE_S)
    it.trains(3)
    it.tell(events.Called("unpublish", "", it.now + 60, claim=Version(3)))
    assert it.errors == ["version-conflict"]
    assert it.worker.held == 3
    it.trains(4)
    assert it.ended()[1:] == [None, 3, None, 4]


def test_only_the_writer_takes_back_what_it_holds_without_the_server() -> None:
    """Another worker's holder may be the only one, and it may have readers: it waits."""
    it = Writer.made()
    it.worker.state.writes = Number(0)
    it.tell(events.Disconnected())
    it.waits(ALONE_S)
    it.tell(events.Called("unpublish", "", it.now + 9.0))
    it.waits(it.now + 9.0)
    assert it.errors == ["deadline-exceeded"]
    assert it.worker.held == ONE


def has_published_alone() -> Writer:
    """Version 3, when a server is back."""
    it = Writer.made()
    it.tell(events.Disconnected())
    it.waits(ALONE_S)
    it.trains(3)
    it.tell(events.Connected())
    return it


def is_judged(it: Writer, number: int, **how: object) -> None:
    step = it.worker.state.step
    assert step is not None
    assert step.publish is not None
    judged = Answer(step.publish.number, **how)  # type: ignore[arg-type]
    it.tell(events.Received(replace(orders(number, judged=judged), acknowledged=it.worker.reported)))


@pytest.mark.parametrize(
    ("code", "buffer"),
    [
        ("version-conflict", Poisoned(Version(3))),
        ("group-incomplete", Holding(Version(3), ROOT, True, is_pending=True)),
    ],
)
def test_what_the_server_refuses_later_is_no_version(code: str, buffer: object) -> None:
    it = has_published_alone()
    is_judged(it, 9, error=Failure(code, "it says why"))
    assert it.worker.buffer == buffer
    assert it.worker.state.step == Step(alone=3)
    assert it.errors == []
    assert any(isinstance(each, events.Warn) and "is no version" in each.text for each in it.wanted)


def test_what_the_server_accepts_later_gets_its_epoch_and_is_a_version() -> None:
    it = has_published_alone()
    is_judged(it, 9, version=Version(3), epoch=Number(8))
    assert it.worker.buffer == Holding(Version(3), ROOT, True, Number(8), is_pending=True)
    is_judged(it, 10, version=Version(3), epoch=Number(8), finished=True)
    assert it.worker.buffer == Holding(Version(3), ROOT, True, Number(8))
    assert it.worker.state.step is None


def test_it_is_judged_also_while_the_next_call_withdraws_it() -> None:
    it = has_published_alone()
    it.tell(events.Received(replace(orders(9), acknowledged=it.worker.reported)))
    it.tell(events.Called("unpublish", "", it.now + 60))
    assert isinstance(it.worker.buffer, Withdrawing)
    is_judged(it, 10, version=Version(3), epoch=Number(8), finished=True)
    assert it.worker.buffer == Withdrawing(Version(3), ROOT, True, Number(8))


@pytest.mark.parametrize(
    ("resolved", "finished", "expected"), [(None, 1, [ONE]), (ONE, 1, [ONE]), (TWO, 1, []), (None, 0, [])]
)
def test_an_update_of_several_shards_keeps_only_what_all_of_them_hold(
    resolved: Version | None, finished: int, expected: list[Version]
) -> None:
    it = Writer.made()
    state = it.worker.state
    state.shards, state.finished, state.memory.buffer = 2, finished, Vacated(ONE, ROOT)
    state.memory.serving = None
    it.tell(events.Called("update", "latest", it.now + 60))
    assert state.call is not None
    state.call.resolved = resolved
    it.waits(ALONE_S)
    assert it.ended()[1:] == expected
