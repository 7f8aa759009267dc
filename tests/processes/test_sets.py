"""Two models under one number, while trainers and rollouts are killed: nobody ever has members of two versions."""

import json
import random
from functools import partial

import pytest

import tensorhub
from forked import Forked, program

from .process import eventually
from .script import BEFORE

pytestmark = pytest.mark.processes

BLOWS = 8
MODELS = """
import torch
members = torch.nn.ModuleDict({"target": torch.nn.Linear(1500, 700), "draft": torch.nn.Linear(40, 20)})
RETRYABLE = (tensorhub.Unavailable, tensorhub.TransferError, tensorhub.SessionLost)
weights = tensorhub.open("pair", replica=sys.argv[2], server=address, reliable=False, timeout=30)
weights.register(members)

def numbers():
    return {name: sorted({float(v) for each in part.parameters() for v in each.detach().unique()})
            for name, part in members.items()}
"""
ROLLOUT = """
while True:
    try:
        version = weights.update(timeout=10)
    except RETRYABLE:
        continue
    say(version=version, **numbers())
"""
TRAINER = """
view = tensorhub.connect(address)
try:
    begun = weights.replicate("latest", timeout=10)
except RETRYABLE:
    begun = None
say(version=begun, begins=view.next_version("pair"), **(numbers() if begun is not None else {}))
for version in range(view.next_version("pair"), 1 << 20):
    with weights.mutating(version=version, timeout=30), torch.no_grad():
        for each in members.parameters():
            each.fill_(float(version))
"""


class Life:
    """One process, until it is killed."""

    def __init__(self, kind, number, server, folder):
        self.kind, self.name = kind, f"{kind}-{number}"
        self.path, self.log = folder / f"{self.name}.out", folder / f"{self.name}.log"
        text = BEFORE + MODELS + (TRAINER if kind == "trainer" else ROLLOUT)
        with self.path.open("wb") as out, self.log.open("wb") as log:
            self.process = Forked(program(text), [server, self.name], stdout=out, stderr=log)

    def said(self):
        """Whole lines so far."""
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def has(self, version):
        """It has had that version, or a newer one."""
        return any((each["version"] or -1) >= version for each in self.said())


def has_gone_on(view, number):
    return view.next_version("pair") >= number


@pytest.mark.timeout(240)
def test_no_reader_has_two_numbers_and_a_refilled_trainer_goes_on(tmp_path, figures):
    chance = random.Random(11)
    lives, past = [], []
    with tensorhub.serve(lease_s=2, report_s=0.2) as server:
        view = tensorhub.connect(server.address)
        try:
            for kind in ("trainer", "rollout", "rollout", "rollout"):
                lives.append(Life(kind, len(lives), server.address, tmp_path))
            for blow in range(BLOWS):
                number = view.next_version("pair") + 2
                eventually(partial(has_gone_on, view, number), f"two more versions before blow {blow}")
                victim = lives[0] if blow % 2 else chance.choice(lives[1:])
                victim.process.kill()
                victim.process.wait(10)
                past.append(victim)
                lives[lives.index(victim)] = Life(victim.kind, len(lives) + blow, server.address, tmp_path)
            newest = view.next_version("pair")
            for life in lives[1:]:
                eventually(partial(life.has, newest), f"{life.name} goes on")
        finally:
            for life in lives:
                life.process.close()
    seen = 0
    for life in [*past, *lives]:
        for each in life.said():
            if each["version"] is not None:
                assert each["target"] == each["draft"] == [float(each["version"])], f"{life.name}: {each}"
                seen += 1
    trainers = [life.said()[0]["begins"] for life in [*past, *lives] if life.kind == "trainer" and life.said()]
    assert trainers == sorted(set(trainers))
    line = f"set of two models: {BLOWS} killed, {len(trainers) - 1} of them trainers; {seen} looks, none at two numbers"
    figures(line, looks=seen)
