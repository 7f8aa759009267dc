"""Who is started and killed in the demo with vLLM. The trainer's ranks are killed together, as with their machine."""

from pathlib import Path

from ..director import Act, Director
from ..events import TRAINER
from ..logs import EventLog
from ..processes import Processes, free_address
from ..progress import Progress

RANKS = 2
JOIN_AT, HOLD_AT, REFILL_AT, RESTART_AT = 0.22, 0.55, 0.65, 0.85  # of all steps; an engine takes long to start


class EngineDirector(Director):
    """Starts engines, and a trainer of several ranks."""

    def __init__(
        self, processes: Processes, progress: Progress, events: Path, log: EventLog, *, policy: Path, versions: Path
    ) -> None:
        super().__init__(processes, progress, events, log)
        self._policy = policy
        self._versions = versions
        self._ranks = [TRAINER, *(f"{TRAINER}-rank-{rank}" for rank in range(1, RANKS))]
        self._trainers = set(self._ranks)

    def start(self, *, seed: int, rollouts: int, updates: bool) -> None:
        """The reference server, the trainer's ranks and the first engines; they find each other in any order."""
        self._serve("--fresh")
        hold_at = int(HOLD_AT * self._progress.steps) + 1
        self._start_trainer("--seed", str(seed), "--hold-at", str(hold_at))
        switches = [] if updates else ["--no-updates"]

        def start_engine(index: int) -> None:
            replica, own_seed = f"rollout-{index}", 1000 * (seed + 1) + index
            chosen = ["--replica", replica, "--seed", str(own_seed), "--policy", str(self._policy)]
            self._run("vllm.engine", replica, *chosen, *switches)

        def kill_trainer() -> None:
            self._processes.kill(*self._ranks)
            self._note(TRAINER, "killed")
            self._start_trainer("--seed", str(seed), "--again")
            self._note(TRAINER, "restarted")

        for index in range(rollouts):
            start_engine(index)
        self._acts = [
            *self._kill_one_start_one(f"rollout-{rollouts}", lambda: start_engine(rollouts), join_at=JOIN_AT),
            Act(lambda: self._progress.is_past(REFILL_AT), kill_trainer),
            *self._restart_server(RESTART_AT),
        ]

    def _start_trainer(self, *more: str) -> None:
        meet, steps = free_address(), str(self._progress.steps)
        folders = ["--policy", str(self._policy), "--versions", str(self._versions)]
        for rank, name in enumerate(self._ranks):
            place = ["--rank", str(rank), "--ranks", str(RANKS), "--meet", meet]
            self._run("vllm.trainer", name, *place, *folders, "--steps", steps, *more)
