"""How samples get from the rollouts to the trainer: one socket each, one frame there, one frame back.

A frame is four bytes of length and a MessagePack body. The trainer answers a batch only when it has room for it, so
rollouts never run far ahead; the answer also says when there is nothing more to do. A rollout that is killed leaves
half a frame behind, which ends its connection and nothing else.
"""

import queue
import socket
import socketserver
import struct
import threading
import time
from types import TracebackType

import msgspec
import numpy as np

from . import task

ROOM = 2  # batches that wait in the trainer: one more for each would make samples older, not training faster
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")


class Batch(msgspec.Struct, frozen=True):
    """Answers of one policy: rows of prompt and answer, their log-probabilities when sampled, their rewards."""

    replica: str
    version: int
    tokens: bytes  # uint8, (answers, prompt and answer tokens); the answers to one prompt lie together
    log_probabilities: bytes  # float32, (answers, answer tokens)
    rewards: bytes  # float32, (answers)

    def arrays(self) -> tuple[task.Tokens, task.Floats, task.Floats]:
        """Tokens, log-probabilities and rewards, in their shapes. Raises `ValueError` where they do not fit."""
        rewards = np.frombuffer(self.rewards, np.float32)
        tokens = np.frombuffer(self.tokens, np.uint8).reshape(len(rewards), task.PROMPT_TOKENS + task.ANSWER_TOKENS)
        old = np.frombuffer(self.log_probabilities, np.float32).reshape(len(rewards), task.ANSWER_TOKENS)
        return tokens, old, rewards


class Answer(msgspec.Struct, frozen=True):
    """What the trainer says to a batch that it has taken."""

    is_last: bool  # training is over: send no more


_batch = msgspec.msgpack.Decoder(Batch)
_answer = msgspec.msgpack.Decoder(Answer)


class Inbox:
    """The trainer's end. Listens from the start."""

    def __init__(self, address: str) -> None:
        self._batches: queue.Queue[Batch] = queue.Queue(ROOM)
        self._is_over = threading.Event()
        self._server = _Listener(_split(address), self)
        threading.Thread(target=self._server.serve_forever, name="inbox", daemon=True).start()

    def take(self, timeout_s: float) -> Batch:
        """The next batch of any rollout. Raises `queue.Empty`."""
        return self._batches.get(timeout=timeout_s)

    def end(self) -> None:
        """From now on every rollout that sends a batch hears that it was the last one."""
        self._is_over.set()

    def put(self, batch: Batch) -> Answer:
        """Called by the connections: waits for room."""
        while not self._is_over.is_set():
            try:
                self._batches.put(batch, timeout=0.1)
            except queue.Full:
                continue
            return Answer(is_last=self._is_over.is_set())
        return Answer(is_last=True)

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], inbox: Inbox) -> None:
        self.inbox = inbox
        super().__init__(address, _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        try:
            while (frame := _receive(self.request)) is not None:
                batch = _batch.decode(frame)
                batch.arrays()
                _send(self.request, msgspec.msgpack.encode(self.server.inbox.put(batch)))
        except (OSError, ValueError, msgspec.MsgspecError):
            return  # the rollout was killed, or a stranger called: nothing of it was taken


class Outbox:
    """A rollout's end. Waits until the trainer listens. Raises `OSError` once it does not any more."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket = socket.create_connection(_split(address), timeout=timeout_s)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self._socket.settimeout(None)  # room may take as long as a training step, or a server's restart

    def __enter__(self) -> "Outbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def send(self, batch: Batch) -> Answer:
        """Hand over a batch; returns when the trainer has taken it."""
        _send(self._socket, msgspec.msgpack.encode(batch))
        frame = _receive(self._socket)
        if frame is None:
            raise ConnectionResetError("the trainer has gone")
        return _answer.decode(frame)


class PatientOutbox:
    """Outlives the trainer: a batch that nobody took is lost, and the next one goes to the trainer that comes back."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._outbox = Outbox(address, timeout_s=timeout_s)

    def __enter__(self) -> "PatientOutbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outbox.close()

    def send(self, batch: Batch) -> Answer:
        """Hand over a batch; returns when the trainer has taken it, or there is another trainer."""
        try:
            return self._outbox.send(batch)
        except OSError:
            self._outbox.close()
            self._outbox = Outbox(self._address, timeout_s=self._timeout_s)
            return Answer(is_last=False)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket) -> bytes | None:
    """One frame; None where the other side ended, be it in the middle of one."""
    header = _exactly(connection, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} B")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size_bytes: int) -> bytes | None:
    found = bytearray()
    while len(found) < size_bytes:
        piece = connection.recv(size_bytes - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)
