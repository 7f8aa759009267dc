"""Runs a plan one way: starts everybody, kills who is to be killed, and starts again who is to be started again."""

import time
from pathlib import Path

from ...demo.logs import EventLog, now
from ...demo.processes import ProcessFailed, free_address
from ..processes import Nursery
from .events import AnyEvent, Began, Done, Ended, Killed, Started, read_events
from .plan import SERVER, TRAINER, Failure, Plan, Role, Task, Way, draw_failures

LOOK_S = 0.01
DIRECTOR = "director"


class Run:
    """A plan under way, or over. In `folder` are the events, what processes say, and the checkpoint file."""

    def __init__(self, plan: Plan, way: Way, folder: Path) -> None:
        self.plan, self.way = plan, way
        self.events: list[AnyEvent] = []
        self.failures = draw_failures(plan)
        self._folder = folder
        self._checkpoint = folder / "checkpoint"
        self._server, self._samples = free_address(), free_address()
        self._names = [SERVER, TRAINER, *(f"rollout-{index}" for index in range(plan.rollouts))]
        self._lives = dict.fromkeys(self._names, 0)
        self._reader = read_events(folder)
        self._trained_since = 0.0

    def run(self) -> "Run":
        """All of it. Raises `ProcessFailed`."""
        self._folder.mkdir(parents=True)
        deadline = time.monotonic() + self.plan.most_s
        with EventLog(self._folder, DIRECTOR) as self._log, Nursery(self._folder) as self._nursery:
            for name in self._names:
                self._start(name, is_again=False)
            for failure in self.failures:
                self._wait_for(failure, deadline)
                self._strike(failure)
            while self._ended() != set(self._names) - {SERVER}:
                self._look(deadline, "the end")
        self.events += self._reader.new()
        self._checkpoint.unlink(missing_ok=True)
        return self

    def _wait_for(self, failure: Failure, deadline: float) -> None:
        """Until its moment: the step is being computed, and that much of it is done.

        What a trainer had begun that was killed too late does not count: the next one would be killed at its start.
        """
        while (began := self._began(failure.step)) is None:
            self._look(deadline, f"step {failure.step}")
        time.sleep(max(0.0, began + failure.share * self.plan.step_s - now()))

    def _began(self, step: int) -> float | None:
        """When the trainer that lives began that step, or one after it."""
        begun = (each for each in self.events if isinstance(each, Began) and each.time > self._trained_since)
        return next((each.time for each in begun if each.step >= step), None)

    def _strike(self, failure: Failure) -> None:
        """Kill, and start again: at once, as somebody would who need not find out what has happened."""
        self._log.write(Killed(time=now(), process=failure.victim, step=failure.step, role=failure.role))
        struck = self._names if self.way == "file" else [failure.victim]
        for name in struck:
            self._nursery.kill(name)
        self._nursery.wait_gone(*struck)
        if TRAINER in struck:
            self._trained_since = now()
        for name in struck:
            self._start(name, is_again=True)

    def _start(self, name: str, *, is_again: bool) -> None:
        plan = self.plan
        role: Role = "trainer" if name == TRAINER else "server" if name == SERVER else "rollout"
        self._lives[name] += 1
        self._log.write(Started(time=now(), process=name, is_again=is_again))
        self._nursery.start(
            Task(
                name=name,
                replica=f"{name}-{self._lives[name]}" if self.way == "peers" else name,
                role=role,
                way=self.way,
                is_again=is_again,
                server=self._server,
                samples=self._samples,
                events=str(self._folder),
                checkpoint=str(self._checkpoint),
                checkpoint_every=plan.checkpoint_every,
                steps=plan.steps,
                step_s=plan.step_s,
                start_s=plan.server_start_s if role == "server" else plan.start_s,
                batches=plan.batches,
                size_bytes=plan.size_bytes,
                held_share=plan.held_share,
                lease_s=plan.lease_s,
                seed=plan.seed,
            )
        )

    def _look(self, deadline: float, awaited: str) -> None:
        """Read what was written down. Raises `ProcessFailed` if somebody has ended who should not, or it takes long."""
        time.sleep(LOOK_S)
        self.events += self._reader.new()
        self._nursery.check()
        if now() > deadline:
            last = max((event.step for event in self.events if isinstance(event, Done)), default=0)
            raise ProcessFailed(f"after {self.plan.most_s:.0f} s still waiting for {awaited}; step {last} was the last")

    def _ended(self) -> set[str]:
        """Who has done all there is to do, and was not killed since."""
        found: set[str] = set()
        for event in self.events:
            if isinstance(event, Ended):
                found.add(event.process)
            elif isinstance(event, Started):
                found.discard(event.process)
        return found
