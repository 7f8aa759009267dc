"""What is run, and what fails in it: a schedule by the number of the step, the same for every way to go on."""

import random
from dataclasses import dataclass
from typing import Literal

import msgspec

MIB = 1 << 20
Role = Literal["trainer", "rollout", "server"]
Way = Literal["peers", "same-name", "file"]
TRAINER, SERVER = "trainer", "server"

# Trainer and rollouts often have equally many machines. A server is one small process, and would fail less often.
WEIGHTS: dict[Role, float] = {"trainer": 0.4, "rollout": 0.4, "server": 0.2}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. Times in seconds."""

    steps: int = 100
    step_s: float = 0.5  # of computing
    start_s: float = 1.0  # of a trainer or a rollout, until it can do anything: what Python and torch take here
    server_start_s: float = 0.7  # of a reference server: what `tensorhub serve` takes here
    failure_share: float = 0.1  # of the steps: RobustRL, arXiv 2512.22492, injects as many
    checkpoint_every: int = 10  # steps
    rollouts: int = 3
    batches: int = 2  # of samples, that a step needs; each rollout makes one in `step_s`
    size_bytes: int = 16 * MIB
    held_share: float = 0.5  # of its computing a process holds its interpreter
    lease_s: float = 5.0
    seed: int = 1

    @property
    def most_s(self) -> float:
        """What a run may take at most: many times what any has taken."""
        return 60.0 + 4 * self.steps * self.step_s + 30.0 * self.failure_share * self.steps


class Failure(msgspec.Struct, frozen=True):
    """Who is killed, in which step, and how much of its computing is done then."""

    step: int
    share: float
    role: Role
    victim: str


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="ettr"):
    """What one process is told when it starts. Sizes in bytes, times in seconds."""

    name: str
    replica: str
    role: Role
    way: Way
    is_again: bool  # it was killed before
    server: str  # host:port
    samples: str  # host:port of the trainer's inbox
    events: str  # folder
    checkpoint: str  # file
    checkpoint_every: int
    steps: int
    step_s: float
    start_s: float
    batches: int
    size_bytes: int
    held_share: float
    lease_s: float
    seed: int


def draw_failures(plan: Plan) -> list[Failure]:
    """The schedule: distinct steps, each role as often as its weight says, all else by chance.

    Nobody is killed in the last step, whose version everybody is to have in the end.
    """
    chance = random.Random(plan.seed)
    count = min(round(plan.failure_share * plan.steps), plan.steps - 1)
    steps = sorted(chance.sample(range(1, plan.steps), count))
    roles = _roles(count)
    chance.shuffle(roles)
    return [
        Failure(
            step, chance.random(), role, f"rollout-{chance.randrange(plan.rollouts)}" if role == "rollout" else role
        )
        for step, role in zip(steps, roles, strict=True)
    ]


def _roles(count: int) -> list[Role]:
    """By largest remainder: so that a short run has the mixture that a long one would have."""
    counts = {role: int(count * weight) for role, weight in WEIGHTS.items()}
    missing = count - sum(counts.values())
    for role in sorted(WEIGHTS, key=lambda role: counts[role] - count * WEIGHTS[role])[:missing]:
        counts[role] += 1
    return [role for role, times in counts.items() for _ in range(times)]
