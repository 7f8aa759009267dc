"""Samples over sockets: they arrive as sent, wait for room, and a rollout that dies takes nobody with it."""

import queue
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from bench.demo import task
from bench.demo.processes import free_address
from bench.demo.samples import ROOM, Batch, Inbox, Outbox, PatientOutbox

DEADLINE_S = 20.0


def batch_of(replica: str = "rollout-0", version: int = 7) -> Batch:
    random = np.random.default_rng(version)
    tokens = random.integers(0, task.VOCABULARY, (4, task.PROMPT_TOKENS + task.ANSWER_TOKENS)).astype(np.uint8)
    old = random.random((4, task.ANSWER_TOKENS)).astype(np.float32)
    return Batch(replica, version, tokens.tobytes(), old.tobytes(), np.array([0, 1, 0, 0], np.float32).tobytes())


@pytest.fixture
def address() -> str:
    return free_address()


@pytest.fixture
def inbox(address: str) -> Iterator[Inbox]:
    inbox = Inbox(address)
    yield inbox
    inbox.end()
    inbox.close()


def test_a_batch_arrives_as_it_was_sent(inbox: Inbox, address: str) -> None:
    with Outbox(address, timeout_s=DEADLINE_S) as outbox:
        assert not outbox.send(batch_of()).is_last
    assert inbox.take(DEADLINE_S) == batch_of()
    tokens, old, rewards = batch_of().arrays()
    assert tokens.shape == (4, task.PROMPT_TOKENS + task.ANSWER_TOKENS)
    assert old.shape == (4, task.ANSWER_TOKENS)
    assert rewards.tolist() == [0, 1, 0, 0]


def test_a_rollout_waits_while_there_is_no_room(inbox: Inbox, address: str) -> None:
    sent: list[int] = []

    def send() -> None:
        with Outbox(address, timeout_s=DEADLINE_S) as outbox:
            for version in range(ROOM + 2):
                outbox.send(batch_of(version=version))
                sent.append(version)

    thread = threading.Thread(target=send)
    thread.start()
    for version in range(ROOM + 2):
        assert len(sent) <= version + ROOM
        assert inbox.take(DEADLINE_S).version == version
    thread.join(DEADLINE_S)
    assert sent == list(range(ROOM + 2))


def test_who_waits_for_room_hears_of_the_end(inbox: Inbox, address: str) -> None:
    answers: queue.Queue[bool] = queue.Queue()

    def send() -> None:
        with Outbox(address, timeout_s=DEADLINE_S) as outbox:
            while not (is_last := outbox.send(batch_of()).is_last):
                answers.put(is_last)
            answers.put(is_last)

    threading.Thread(target=send, daemon=True).start()
    assert [answers.get(timeout=DEADLINE_S) for _ in range(ROOM)] == [False] * ROOM
    inbox.end()
    assert answers.get(timeout=DEADLINE_S)


def test_half_a_frame_and_garbage_harm_nobody(inbox: Inbox, address: str) -> None:
    host, _, port = address.rpartition(":")
    misshapen = msgspec.msgpack.encode(Batch("rollout-0", 1, b"123", b"", b""))
    for said in (b"\x00\x00\x10\x00half", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02hi",
                 len(misshapen).to_bytes(4, "big") + misshapen):  # fmt: skip
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            stranger.sendall(said)
    with Outbox(address, timeout_s=DEADLINE_S) as outbox:
        outbox.send(batch_of())
    assert inbox.take(DEADLINE_S) == batch_of(), "and nothing else had been taken"


def test_a_rollout_may_come_before_the_trainer(address: str) -> None:
    started: list[Inbox] = []
    trainer = threading.Timer(0.3, lambda: started.append(Inbox(address)))
    trainer.start()
    with Outbox(address, timeout_s=DEADLINE_S) as outbox:
        outbox.send(batch_of())
    trainer.join(DEADLINE_S)
    assert started[0].take(DEADLINE_S) == batch_of()
    started[0].close()


def test_a_patient_rollout_outlives_the_trainer(address: str) -> None:
    host, _, port = address.rpartition(":")
    first = socket.create_server((host, int(port)))
    with PatientOutbox(address, timeout_s=DEADLINE_S) as outbox:
        taken, _ = first.accept()
        first.close()
        taken.close()  # as when the trainer is killed: what was on its way to it is lost
        again = threading.Timer(0.3, lambda: started.append(Inbox(address)))
        started: list[Inbox] = []
        again.start()
        assert not outbox.send(batch_of(version=1)).is_last
        assert not outbox.send(batch_of(version=2)).is_last
    again.join(DEADLINE_S)
    assert started[0].take(DEADLINE_S).version == 2
    started[0].close()


def test_a_trainer_that_never_comes_is_an_error_in_time(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match=r".+"):
        Outbox(address, timeout_s=0.3)
    assert time.monotonic() - began < DEADLINE_S
