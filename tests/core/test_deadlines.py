"""What a call says when its time has run out: always that, and what was missing at the end."""

import pytest

from tensorhub.protocol.messages import Answer, Failure, LayoutInfo, Orders, Refusal
from tensorhub.protocol.names import Number, Ticket, Version
from tensorhub.worker import events
from tensorhub.worker.machine import Worker

from .kit import LAYOUT, grant, worker


class Waiting:
    """A worker whose caller waits in an update until 60 s."""

    def __init__(self) -> None:
        self.worker = Worker(worker("rollout"))
        self.ended: list[events.Finished] = []
        self.number = 0
        self.tell(events.Connected(), events.Registered(LayoutInfo.of(LAYOUT), LAYOUT.digest(), 16, 1))
        self.tell(events.Called("update", "latest", 60.0))
        self.order()

    def tell(self, *told: events.Event, now: float = 0.0) -> None:
        for event in told:
            self.ended += [e for e in self.worker.handle(event, now=now) if isinstance(e, events.Finished)]

    def order(self, **more: object) -> None:
        self.number += 1
        acknowledged = self.worker.reported
        orders = Orders(Number(self.number), Number(1), acknowledged, 100.0, 90.0, 1.0, position=0, **more)  # type: ignore[arg-type]
        self.tell(events.Received(orders))

    def failure(self) -> Failure:
        self.tell(events.Tick(), now=60.0)
        (finished,) = self.ended
        assert finished.error is not None
        return finished.error


@pytest.mark.parametrize("code", ["group-incomplete", "version-unavailable", "closed"])
def test_whatever_was_waited_for_time_ran_out(code: str) -> None:
    it = Waiting()
    it.order(answer=Answer(1, waiting=Failure(code, "the moon is not full", "wait for it")))
    failure = it.failure()
    assert failure.code == "deadline-exceeded"
    assert "within 60 s: the moon is not full" in failure.message
    assert failure.hint == "wait for it"


def test_a_server_that_is_away_is_named_and_how_far_it_got() -> None:
    it = Waiting()
    it.order(answer=Answer(1, Version(3)))
    it.tell(events.Disconnected())
    failure = it.failure()
    assert failure.code == "deadline-exceeded"
    assert "0 of ? chunks of version 3 were in place; the reference server does not answer" in failure.message


def test_a_server_that_refuses_for_now_is_quoted() -> None:
    it = Waiting()
    it.tell(
        events.Received(Refusal("shard-taken", "somebody else is here", "wait", retry_s=1.0)), events.Disconnected()
    )
    failure = it.failure()
    assert failure.code == "deadline-exceeded"
    assert "somebody else is here" in failure.message
    assert failure.hint == "wait"


def test_what_was_waited_for_before_is_not_said() -> None:
    it = Waiting()
    it.order(answer=Answer(1, waiting=Failure("group-incomplete", "shard 1 is missing")))
    it.order(answer=Answer(1, Version(3)))
    failure = it.failure()
    assert "missing" not in failure.message
    assert "chunks of version 3" in failure.message
    assert it.worker.is_registered


def test_why_the_last_read_had_failed_is_said_to_the_caller_of_that_call_only() -> None:
    it = Waiting()
    source = worker("trainer")
    it.order(answer=Answer(1, Version(3)), grant=grant(9, source=source, version=3))
    it.tell(events.ReadMeasured(Ticket(9), "tcp", "one stream", "", 0))
    it.tell(events.ReadEnded(Ticket(9), failure=Failure("source-lost", "all 64 connections are taken")))
    it.order(answer=Answer(1, Version(3)))
    said = "the last read, from policy/trainer[0] by tcp, had failed: all 64 connections are taken"
    assert said in it.failure().message
    it.ended.clear()
    it.tell(events.Called("update", "latest", 90.0), now=61.0)
    it.tell(events.Tick(), now=90.0)
    assert "had failed" not in str(it.ended)
