"""The director: starts the processes of the demo, and breaks some of them while they work.

What is broken, and when, goes by the progress of the training and not by the clock, so that it is the same on every
machine; the training in turn waits for the rollout that joins late, whose start takes as long as it takes. The director
never touches weights or samples; it knows what the processes have written down.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .events import SERVER, TRAINER, Fault
from .logs import EventLog, now
from .processes import Processes, free_address
from .progress import Progress

KILL_AT, JOIN_AT, RESTART_AT = 0.20, 0.35, 0.60  # of all steps
DOWN_S = 1.0  # how long the reference server is away
LEASE_S = 5.0  # half the default: a restarted server hears everybody for this long before it says that nobody reads


@dataclass(frozen=True)
class Act:
    """Something to do once it is due; acts are done in their order."""

    is_due: Callable[[], bool]
    do: Callable[[], None]


class Director:
    """Starts everybody, acts when the training has come far enough, and ends everybody in order."""

    def __init__(self, processes: Processes, progress: Progress, events: Path, log: EventLog) -> None:
        self.is_over = False
        self._processes = processes
        self._progress = progress
        self._events = events
        self._log = log
        self._server, self._samples = free_address(), free_address()
        self._server_killed = 0.0
        self._trainers = {TRAINER}  # its processes
        self._acts: list[Act] = []

    def start(self, *, seed: int, rollouts: int, updates: bool) -> None:
        """The reference server, the trainer and the first rollouts; they find each other in any order."""
        self._serve("--fresh")
        steps = self._progress.steps
        hold_at = int(RESTART_AT * steps) + 1
        self._run("trainer", TRAINER, "--seed", str(seed), "--steps", str(steps), "--hold-at", str(hold_at))
        switches = [] if updates else ["--no-updates"]

        def start_rollout(index: int, *more: str) -> None:
            replica, own_seed = f"rollout-{index}", 1000 * (seed + 1) + index
            self._run("rollout", replica, "--replica", replica, "--seed", str(own_seed), *switches, *more)

        for index in range(rollouts):
            start_rollout(index)

        late = f"rollout-{rollouts}"
        self._acts = [
            *self._kill_one_start_one(late, lambda: start_rollout(rollouts, "--from-rollouts"), join_at=JOIN_AT),
            *self._restart_server(RESTART_AT),
        ]

    def _kill_one_start_one(self, late: str, start_late: Callable[[], None], *, join_at: float) -> list[Act]:
        """A rollout is killed, another one joins late, and the trainer waits for it if need be."""
        killed = "rollout-1"

        def kill_rollout() -> None:
            self._processes.kill(killed)
            self._note(killed, "killed")

        def start() -> None:
            start_late()
            self._note(late, "started late")

        return [
            Act(lambda: self._progress.is_past(KILL_AT) and self._progress.has_sampled(killed), kill_rollout),
            Act(lambda: self._progress.is_past(join_at), start),
            Act(lambda: self._progress.has_joined(late), lambda: self._processes.let_go_on(TRAINER)),
        ]

    def _restart_server(self, at: float) -> list[Act]:
        def kill() -> None:
            self._processes.kill(SERVER)
            self._server_killed = now()
            self._note(SERVER, "killed")

        def start() -> None:
            self._serve()  # at the same address, with an empty memory
            self._note(SERVER, "restarted")

        return [
            Act(lambda: self._progress.is_past(at), kill),
            Act(lambda: now() > self._server_killed + DOWN_S, start),
        ]

    def direct(self) -> None:
        """Do what is due. Raises `ProcessFailed` if somebody has ended who should not have."""
        if self._acts and self._acts[0].is_due():
            self._acts.pop(0).do()
        self._processes.check()
        running = self._processes.running
        if self._progress.is_trained and running <= {SERVER, *self._trainers}:  # all rollouts have run it and left
            for name in running & self._trainers:
                self._processes.release(name)
        self.is_over = self._progress.is_trained and not self._trainers & self._processes.running

    def _serve(self, *more: str) -> None:
        host, _, port = self._server.rpartition(":")
        where = ["--host", host, "--port", port, "--lease", str(LEASE_S)]
        self._processes.start(SERVER, [sys.executable, "-m", "bench.demo.server", "serve", *where, *more])

    def _run(self, module: str, name: str, *arguments: str) -> None:
        addresses = ["--server", self._server, "--samples", self._samples, "--events", str(self._events)]
        self._processes.start(name, [sys.executable, "-m", f"bench.demo.{module}", *addresses, *arguments])

    def _note(self, process: str, what: Literal["killed", "started late", "restarted"]) -> None:
        version = self._progress.version
        self._log.write(Fault(time=now(), process=process, what=what, version=version))
