"""A worker of the laboratory: computes for a set time, gets or gives weights, and writes down how long that took.

To compute is to sleep: it stands for a GPU's work, and takes nothing from the two that is measured, the links and the
stall. For a part of that time it holds its interpreter, as the Python of a trainer or an engine does. The hash of what
it holds is computed in that time too.
"""

import os
import random
import signal
import time
from pathlib import Path

from ..demo.logs import EventLog, now
from . import content
from .events import Computed, Ended, Kept, Published, Updated
from .interpreter import Interpreter
from .job import Job
from .strategies.base import NotNow
from .strategies.choose import STRATEGIES, rollout_side, trainer_side
from .watch import look_on

POLL_S = 0.02
RETRY_S = 0.1
JOIN_S = 60.0


class Signals:
    """What the director says: go (SIGUSR1), make one version more (SIGUSR2), leave (SIGTERM)."""

    def __init__(self) -> None:
        self.is_go = False
        self.is_finishing = False
        self.is_leaving = False
        signal.signal(signal.SIGUSR1, self._go)
        signal.signal(signal.SIGUSR2, self._finish)
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _go(self, *_: object) -> None:
        self.is_go = True

    def _finish(self, *_: object) -> None:
        self.is_finishing = True

    def _leave(self, *_: object) -> None:
        self.is_leaving = True

    def wait_go(self) -> None:
        """Until the director says go, or leave."""
        while not self.is_go and not self.is_leaving:
            time.sleep(POLL_S)

    def wait_leave(self) -> None:
        """Until the director says leave."""
        while not self.is_leaving:
            time.sleep(POLL_S)


class Computer:
    """What a worker does between two versions."""

    def __init__(self, job: Job, log: EventLog, signals: Signals) -> None:
        self._job, self._log, self._signals = job, log, signals
        self._interpreter = Interpreter(job.held_share)

    def compute(self, until: float) -> None:
        """Until that moment, or until told to leave; then write down how long the slices took."""
        slices = self._interpreter.compute(until, lambda: self._signals.is_leaving)
        if self._job.held_share:
            self._log.write(Computed(time=now(), process=self._job.name, slices=slices))


def main(job: Job) -> None:
    """The whole life of the process."""
    signals = Signals()
    with EventLog(Path(job.events), job.name) as log:
        if job.role == "trainer":
            train(job, log, signals)
        elif job.role == "rollout":
            roll_out(job, log, signals)
        elif job.role == "store":
            keep_store(job, log, signals)
        else:
            look_on(job, log, lambda: signals.is_leaving)


def train(job: Job, log: EventLog, signals: Signals) -> None:
    """Make a version each `train_s`."""
    tensors, training = content.make_tensors(job.size_bytes), content.Training(job.size_bytes, job.seed)
    side, computer = trainer_side(job, tensors), Computer(job, log, signals)
    version, is_last = 0, False
    while not signals.is_leaving:
        sha256 = ""

        def change(version: int = version) -> None:
            nonlocal sha256
            training.step(tensors, version)
            sha256 = content.fingerprint(tensors)

        cost = side.commit(version, change)
        log.write(
            Published(
                time=now(),
                process=job.name,
                version=version,
                sha256=sha256,
                unpublish_s=cost.unpublish_s,
                publish_s=cost.publish_s,
            )
        )
        if version == 0:
            signals.wait_go()
        elif is_last or version == job.versions:
            break
        is_last = signals.is_finishing
        computer.compute(time.monotonic() + job.train_s)
        version += 1
    tell_ended(job, log, side.statistics())
    signals.wait_leave()
    side.close()


def roll_out(job: Job, log: EventLog, signals: Signals) -> None:
    """Generate and update, until the last version is there or the director says so."""
    is_fused = STRATEGIES[job.strategy].is_recut
    tensors, random_ = content.make_tensors(job.size_bytes, is_fused=is_fused), random.Random(job.seed)
    side, computer = rollout_side(job, tensors), Computer(job, log, signals)
    version, deadline = -1, time.monotonic() + JOIN_S
    began = time.monotonic()
    while version < 0 and not signals.is_leaving:
        try:
            version = side.join()
        except NotNow:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
    ended = time.monotonic()

    def tell(version: int, stall_s: float, ended: float, *, is_new: bool, is_first: bool = False) -> None:
        sha256 = content.fingerprint(tensors) if is_new else ""
        sources = side.bytes_by_source() if is_new else {}
        log.write(
            Updated(
                time=now(),
                process=job.name,
                version=version,
                stall_s=stall_s,
                sha256=sha256,
                is_first=is_first,
                bytes_by_source=sources,
                ended=ended,
            )
        )

    if not signals.is_leaving:
        tell(version, ended - began, ended, is_new=True, is_first=True)
    if not job.is_late:
        signals.wait_go()
    ended = time.monotonic()
    while not signals.is_leaving and (not job.versions or version < job.versions):
        spread = 1 + job.jitter * (2 * random_.random() - 1)
        computer.compute(ended + job.generate_s * spread)
        if signals.is_leaving:
            break
        began, found = time.monotonic(), None
        while found is None and not signals.is_leaving:
            try:
                found = side.sync()
            except NotNow as error:
                spent = time.monotonic() - began
                log.write(Kept(time=now(), process=job.name, version=version, stall_s=spent, error=str(error)))
                time.sleep(RETRY_S)
        if found is None:
            break
        ended = time.monotonic()
        tell(found, ended - began, ended, is_new=found != version)
        version = found
    tell_ended(job, log, side.statistics())
    signals.wait_leave()
    side.close()


def keep_store(job: Job, log: EventLog, signals: Signals) -> None:
    """Fetch and offer."""
    from .strategies.store import Store

    store = Store(job)
    while not signals.is_leaving:
        store.work()
    tell_ended(job, log, store.statistics())
    store.close()


def tell_ended(job: Job, log: EventLog, statistics: dict[str, int]) -> None:
    """Write down that all is done, and what is still open."""
    descriptors = len(os.listdir("/proc/self/fd"))
    log.write(Ended(time=now(), process=job.name, descriptors=descriptors, statistics=statistics))
