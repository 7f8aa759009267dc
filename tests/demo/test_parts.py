"""Parts of the demo: a step of the gradient, samples over sockets, and processes that are not left behind."""

import queue
import socket
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from bench.demo import grpo, task
from bench.demo.policy import Policy
from bench.demo.processes import free_address
from bench.demo.samples import ROOM, Batch, Inbox, Outbox, PatientOutbox
from bench.demo.trainer import loss_of

DEADLINE_S = 20.0


def test_only_the_right_answer_is_rewarded() -> None:
    texts = {"dbf=bdf": 1, "abc=abc": 1, "dbf=dbf": 0, "dbf=bd=": 0, "dbf=bbb": 0, "dbf=bde": 0}
    rows = np.array([tokens_of(text) for text in texts], np.uint8)
    assert task.reward(rows).tolist() == list(texts.values())


def tokens_of(text: str) -> list[int]:
    return [(task.ALPHABET + "=").index(letter) for letter in text]


def test_steps_make_the_rewarded_answer_likelier() -> None:
    """One prompt, one of whose answers is right: a few steps and it is drawn most of the time."""
    torch.set_num_threads(1)
    policy = Policy(6)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    right, wrong = tokens_of("dbf=bdf"), tokens_of("dbf=fed")
    tokens = np.array([right] + [wrong] * (grpo.GROUP - 1), np.uint8)
    as_long = torch.from_numpy(tokens).long()

    def log_probabilities() -> torch.Tensor:
        return grpo.log_probabilities(policy(as_long), as_long)

    first = log_probabilities()[0].sum().item()
    for _ in range(10):
        old = log_probabilities().detach().numpy()
        batch = Batch("rollout-0", 0, tokens.tobytes(), old.tobytes(), task.reward(tokens).tobytes())
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(policy, [batch]))
        optimizer.step()
    assert log_probabilities()[0].sum().item() > first + 1


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


def test_samples_wait_for_room_and_hear_of_the_end(inbox: Inbox, address: str) -> None:
    answers: queue.Queue[bool] = queue.Queue()

    def send() -> None:
        with Outbox(address, timeout_s=DEADLINE_S) as outbox:
            while not (is_last := outbox.send(batch_of()).is_last):
                answers.put(is_last)
            answers.put(is_last)

    threading.Thread(target=send, daemon=True).start()
    assert [answers.get(timeout=DEADLINE_S) for _ in range(ROOM)] == [False] * ROOM
    assert inbox.take(DEADLINE_S) == batch_of()
    assert not answers.get(timeout=DEADLINE_S)
    inbox.end()
    assert answers.get(timeout=DEADLINE_S)


def test_half_a_frame_and_garbage_harm_no_sample(inbox: Inbox, address: str) -> None:
    host, _, port = address.rpartition(":")
    misshapen = msgspec.msgpack.encode(Batch("rollout-0", 1, b"123", b"", b""))
    for said in (b"\x00\x00\x10\x00half", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02hi",
                 len(misshapen).to_bytes(4, "big") + misshapen):  # fmt: skip
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            stranger.sendall(said)
    with Outbox(address, timeout_s=DEADLINE_S) as outbox:
        outbox.send(batch_of())
    assert inbox.take(DEADLINE_S) == batch_of(), "and nothing else had been taken"


def test_a_patient_rollout_outlives_the_trainer(address: str) -> None:
    host, _, port = address.rpartition(":")
    first = socket.create_server((host, int(port)))
    started: list[Inbox] = []
    with PatientOutbox(address, timeout_s=DEADLINE_S) as outbox:
        taken, _ = first.accept()
        first.close()
        taken.close()  # as when the trainer is killed: what was on its way to it is lost
        again = threading.Timer(0.3, lambda: started.append(Inbox(address)))
        again.start()
        assert not outbox.send(batch_of(version=1)).is_last
        assert not outbox.send(batch_of(version=2)).is_last
    again.join(DEADLINE_S)
    assert started[0].take(DEADLINE_S).version == 2
    started[0].close()
