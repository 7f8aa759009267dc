"""A process of a run: trainer, rollout or reference server. It may be killed at any time.

    trainer  begins with the seed's weights, with the checkpoint file or with what its peers hold; then, for each step:
             wait for samples, compute, change the weights inside `mutating`, every ten steps write the file
    rollout  gets weights; then makes samples, hands them over, and updates, until the trainer wants no more

To compute is to sleep, and to hold the interpreter for a part of the time (`..interpreter`). The number of a step goes
with its version as metadata: after a trainer was killed the two differ, because numbers of versions that are lost are
not given again.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tensorhub
from tensorhub import SessionLost, TransferError, Unavailable, VersionConflict
from tensorhub.runtime.config import server_settings
from tensorhub.runtime.serving import run_server

from ...demo.logs import EventLog, now
from ...demo.samples import Batch, Inbox, PatientOutbox
from ..content import fingerprint
from ..interpreter import Interpreter
from ..job import MODEL
from ..worker import Signals
from .content import Weights
from .events import Began, Done, Ended, Held, Kept, Listening, Saved
from .plan import Task

RETRYABLE = (Unavailable, SessionLost, TransferError)
CALL_S = 60.0
TRY_S = 10.0  # of a rollout, to update
RETRY_S = 0.1
PATIENCE_S = 60.0
HEADER_BYTES = 8


def main(task: Task) -> None:
    """The whole life of the process."""
    with EventLog(Path(task.events), task.name) as log:
        time.sleep(task.start_s)  # stands for the start of a program
        if task.role == "server":
            serve(task, log)
        elif task.role == "trainer":
            Trainer(task, log).train()
        else:
            Rollout(task, log).work()


def serve(task: Task, log: EventLog) -> None:
    """The reference server; one that was killed comes back with an empty memory."""
    host, _, port = task.server.rpartition(":")

    def tell(address: str) -> None:
        log.write(Listening(time=now(), process=task.name))

    is_fresh = not task.is_again or task.way == "file"  # then nobody lives who could tell it anything
    settings = server_settings(lease_s=task.lease_s)
    run_server(host, int(port), settings=settings, fresh=is_fresh, on_ready=tell)


class Worker:
    """What trainer and rollouts share."""

    def __init__(self, task: Task, log: EventLog) -> None:
        self.task, self.log = task, log
        self.content = Weights(task.size_bytes, task.seed)
        self.hub = self.open()
        self.hub.register(self.content.tensors)

    def open(self) -> tensorhub.Weights:
        """Join, and try again while the server is away or the machine too busy."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return tensorhub.open(MODEL, replica=self.task.replica, server=self.task.server, call_timeout=CALL_S)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def compute(self) -> None:
        """For the time of a step."""
        until = time.monotonic() + self.task.step_s
        Interpreter(self.task.held_share, lambda: 0).compute(until, lambda: False)

    @property
    def published_step(self) -> int:
        """Of the version held."""
        assert self.hub.metadata is not None, "asked of a version that is held"
        step = self.hub.metadata["step"]
        assert isinstance(step, int), "the trainer publishes it"
        return step

    def tell_held(self, step: int, version: int, source: str, *, is_first: bool) -> None:
        """Write down what this holds, hashed."""
        sha256 = fingerprint(self.content.tensors)
        self.log.write(
            Held(
                time=now(),
                process=self.task.name,
                step=step,
                version=version,
                sha256=sha256,
                is_first=is_first,
                source=source,
            )
        )

    def end(self) -> None:
        """Write down that all is done, and serve others until told to leave; before that, to be told is to die."""
        signals = Signals()
        self.log.write(Ended(time=now(), process=self.task.name))
        signals.wait_leave()
        self.hub.close(timeout=5)


class Trainer(Worker):
    """Begins, or goes on where others are, and makes all steps that are missing."""

    def train(self) -> None:
        """Until the last step is done and the director says leave."""
        task = self.task
        step, version = self.refill() if task.is_again and task.way != "file" else self.begin()
        inbox = Inbox(task.samples)
        while step < task.steps:
            for _ in range(task.batches):
                inbox.take(PATIENCE_S)
            step += 1
            self.log.write(Began(time=now(), process=task.name, step=step))
            self.compute()
            computed = time.monotonic()
            with self.writing(version, step):
                self.content.step(step)
            publish_s = time.monotonic() - computed
            self.log.write(Done(time=now(), process=task.name, step=step, version=version, publish_s=publish_s))
            version += 1
            if step % task.checkpoint_every == 0:
                began = time.monotonic()
                save(Path(task.checkpoint), step, self.content)
                self.log.write(Saved(time=now(), process=task.name, step=step, seconds=time.monotonic() - began))
        self.tell_held(step, version - 1, "steps", is_first=False)
        inbox.end()
        self.end()

    @contextmanager
    def writing(self, version: int, step: int) -> Iterator[None]:
        """Make a version. Waits for the writer's place, which a killed trainer with another name keeps for a lease."""
        deadline = time.monotonic() + PATIENCE_S
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self.hub.mutating(version=version, metadata={"step": step}))
                    break
                except VersionConflict:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(RETRY_S)
            yield

    def begin(self) -> tuple[int, int]:
        """With the checkpoint file, else with the seed's weights. Returns the step, and the next version's number."""
        path = Path(self.task.checkpoint)
        is_saved = path.exists()
        step = load(path, self.content) if is_saved else 0
        self.hub.publish(step, metadata={"step": step})
        self.tell_held(step, step, "file" if is_saved else "seed", is_first=True)
        return step, step + 1

    def refill(self) -> tuple[int, int]:
        """With the newest that the others hold. Returns the same."""
        held = self.hub.replicate("latest")
        step = self.published_step
        self.tell_held(step, held, "peers", is_first=True)
        return step, tensorhub.connect(self.task.server).next_version(MODEL)


class Rollout(Worker):
    """Makes samples with the newest weights that it can get."""

    def work(self) -> None:
        """Until the trainer wants no more samples; then get the last version, and wait for the director."""
        task, hub = self.task, self.hub
        self.join()
        with PatientOutbox(task.samples, timeout_s=PATIENCE_S) as outbox:
            is_over = False
            while not is_over:
                self.compute()
                assert hub.version is not None, "join and update return only with a whole version"
                is_over = outbox.send(Batch(task.name, hub.version, b"", b"", b"")).is_last
                self.update()
        while self.published_step < task.steps:
            time.sleep(RETRY_S)
            self.update()
        self.end()

    def join(self) -> None:
        """Get the newest weights for the first time."""
        while self.hub.version is None:
            try:
                self.hub.replicate("latest", timeout=TRY_S)
            except RETRYABLE as error:
                self.tell_kept(error)
        self.tell_held(self.published_step, self.hub.version, "peers", is_first=True)

    def update(self) -> None:
        """Get the newest weights; or keep those there are if that cannot be had now. Returns only with some."""
        before = self.hub.version
        while True:
            try:
                version = self.hub.update("latest", timeout=TRY_S)
            except RETRYABLE as error:
                self.tell_kept(error)
                if self.hub.version is not None:
                    return
            else:
                if version != before:
                    self.tell_held(self.published_step, version, "peers", is_first=False)
                return

    def tell_kept(self, error: Exception) -> None:
        """Write down that weights could not be had, and wait a little."""
        step = -1 if self.hub.version is None else self.published_step
        self.log.write(Kept(time=now(), process=self.task.name, step=step, error=f"{type(error).__name__}: {error}"))
        time.sleep(RETRY_S)


def save(path: Path, step: int, content: Weights) -> None:
    """Write a checkpoint: whole or not at all.

    It is not forced to the disk (`fsync`): whoever is killed here is a process and not a machine, and the time that it
    would take should not count against those who need the file.
    """
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(step.to_bytes(HEADER_BYTES, "little"))
        for tensor in content.tensors.values():
            file.write(tensor.data)
    os.replace(beside, path)


def load(path: Path, content: Weights) -> int:
    """Read a checkpoint into the tensors. Returns its step."""
    with path.open("rb") as file:
        step = int.from_bytes(file.read(HEADER_BYTES), "little")
        for tensor in content.tensors.values():
            if file.readinto(tensor.data) != len(tensor):
                raise ValueError(f"{path} is shorter than the weights")
    return step
