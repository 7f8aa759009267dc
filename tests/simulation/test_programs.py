"""Programs of a trainer's shards that try each call again until it succeeds, each shard for itself.

Lines are cut, the server goes and comes back with its journal or without, a shard is killed and the job started again.
So shards hear different ends of one call, and make different calls. When all is well again, every program goes on.
"""

import random
from dataclasses import dataclass

import pytest

from tensorhub.protocol.names import ModelName
from tensorhub.protocol.settings import Settings
from tensorhub.server.calls import next_version
from tensorhub.worker.events import Effect, Finished
from tests.scenarios.script import run_line
from tests.scenarios.stage import Stage

LEASE_S = 4.0
SETTLES_S = 6 * LEASE_S + 30.0  # calls with the longest timeout that began before have ended
WORKS_S = 40.0


@dataclass
class Program:
    """One shard's: claim (or unpublish), publish, and again with the next number."""

    version: int = 2
    is_publish: bool = False
    waits_until: float = 0.0
    ended: Finished | None = None

    def goes_on(self) -> None:
        self.version, self.is_publish = self.version + self.is_publish, not self.is_publish


class Job:
    """A trainer on the stage, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.stage = Stage(Settings(default_retain=0, slow_s=1000.0, keep_established=False, lease_s=LEASE_S))
        self.shards = self.chance.choice((1, 2, 2, 2, 3))
        self.train_s, self.claims = self.chance.choice((0.1, 1.0, 4.0)), self.chance.random() < 0.7
        self.barrier = self.chance.choice(("none", "each version", "each call"))
        self.is_calm = False
        self.does("server", f"worker trainer of {self.shards}")
        self.programs = {name: Program() for name in self.stage.players}
        say_effect = self.stage.words.effect

        def note_effect(name: str, effect: Effect) -> str | None:
            if isinstance(effect, Finished):
                self.programs[name].ended = effect
            return say_effect(name, effect)

        self.stage.words.effect = note_effect  # type: ignore[method-assign, assignment]
        self.does("call trainer publish 1 within 30s")
        for program in self.programs.values():
            assert program.ended is not None
            assert program.ended.error is None
            program.ended = None

    def does(self, *commands: str) -> None:
        for command in commands:
            self.stage.say(command)
            run_line(self.stage, command)

    def runs(self, seconds: float) -> None:
        until = self.stage.now + seconds
        while self.stage.now < until:
            for name in self.chance.sample(list(self.programs), self.shards):
                self._steps(name, self.programs[name])
            self.stage.advance(0.1)
            self.stage.pump()

    def _steps(self, name: str, program: Program) -> None:
        player = self.stage.players.get(name)
        if player is None or player.worker.call is not None or self.stage.now < program.waits_until:
            return
        ended, program.ended = program.ended, None
        if ended is not None and ended.error is None:
            program.goes_on()
            program.waits_until = self.stage.now + self.chance.uniform(0, self.train_s)
        elif ended is not None and ended.error is not None:
            if ended.error.code == "version-conflict":  # others have come to a higher number
                program.version, program.is_publish = program.version + 1, False
            program.waits_until = self.stage.now + self.chance.uniform(0.05, 1.0)
        elif not self._waits_for_others(program):
            verb = f"publish {program.version}" if program.is_publish else "unpublish"
            if self.claims and not program.is_publish:
                verb = f"mutate {program.version}"
            timeout_s = 30 if self.is_calm else self.chance.choice((1, 5, 30))
            self.does(f"call {name} {verb} within {timeout_s}s")

    def _waits_for_others(self, program: Program) -> bool:
        places = [(each.version, each.is_publish) for each in self.programs.values()]
        if self.barrier == "each version":
            return program.version > min(places)[0]
        return self.barrier == "each call" and (program.version, program.is_publish) > min(places)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def suffers(self) -> None:
        what = self.chance.choice((self._cut, self._cut, self._lose_server, self._lose_server, self._kill))
        what()
        self.runs(self.chance.uniform(0, 8))

    def _cut(self) -> None:
        names = self.chance.sample(list(self.programs), self.chance.randint(1, self.shards))
        self.does(*(f"cut {name}" for name in names))
        self.runs(self.chance.uniform(0.5, 25))
        for name in names:
            self.does(f"heal {name}")
            self.runs(self.chance.choice((0, 0.3, 3)))

    def _lose_server(self) -> None:
        self.does("crash server")
        self.runs(self.chance.uniform(0.5, 25))
        self.does(self.chance.choice(("server restarted", "server restarted forgetful")))

    def _kill(self) -> None:
        """One shard dies, and the job starts all of them again, as torchrun does."""
        self.does(f"crash {self.chance.choice(list(self.programs))}")
        self.runs(self.chance.uniform(0.2, 8))
        self.does(*(f"crash {name}" for name in self.programs if name in self.stage.players))
        assert self.stage.server is not None
        while (number := next_version(self.stage.server.state, ModelName("policy"))) is None:
            self.runs(0.5)
        for name in self.programs:
            self.programs[name] = Program(number)
            self.does(f"worker {name} of {self.shards}")


def versions_of(seed: int) -> tuple[Job, list[int], list[int]]:
    """Where each program is some time after all went well again, and where it is later."""
    job = Job(seed)
    job.runs(job.chance.uniform(0, 8))
    for _ in range(job.chance.randint(1, 4)):
        job.suffers()
    job.is_calm = True
    job.runs(SETTLES_S)
    before = [program.version for program in job.programs.values()]
    job.runs(WORKS_S)
    return job, before, [program.version for program in job.programs.values()]


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 200))])
def test_programs_that_try_again_go_on(seed: int) -> None:
    job, before, after = versions_of(seed)
    last = "\n".join(job.stage.lines[-60:])
    assert all(then < now for then, now in zip(before, after, strict=True)), f"{before}, then {after}\n{last}"
