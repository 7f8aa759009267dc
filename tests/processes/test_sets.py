"""Two models under one number, while trainers and rollouts are killed: nobody ever has members of two versions.

Once as one model that has both in it, and once as a set of two, each with a trainer of its own.
"""

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
WITHIN_S = 60.0  # where nobody has a version any more, a trainer waits 10 s for one before it begins anew
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
    weights.unpublish()  # the version may have come whole a moment too late
    weights.register(members)  # it begins anew, and stands by what is in them
say(version=begun, begins=view.next_version("pair"), **(numbers() if begun is not None else {}))
for version in range(view.next_version("pair"), 1 << 20):
    with weights.mutating(version=version, timeout=30), torch.no_grad():
        for each in members.parameters():
            each.fill_(float(version))
"""
SET_ROLLOUT = """
import torch
members = {"target": torch.nn.Linear(1500, 700), "draft": torch.nn.Linear(40, 20)}
RETRYABLE = (tensorhub.Unavailable, tensorhub.TransferError, tensorhub.SessionLost)
weights = tensorhub.open_set(list(members), replica=sys.argv[2], server=address, reliable=False, timeout=30)
weights.register(members)

def numbers():
    return {name: sorted({float(v) for each in part.parameters() for v in each.detach().unique()})
            for name, part in members.items()}

while True:
    try:
        weights.update(timeout=10)
    except RETRYABLE:
        pass
    say(version=weights.version, **(numbers() if weights.version is not None else {}))
"""
SET_TRAINER = """
import torch
mine, other = (name := sys.argv[2].split("-")[0]), {"target": "draft", "draft": "target"}[name]
part = {"target": torch.nn.Linear(1500, 700), "draft": torch.nn.Linear(40, 20)}[mine]
RETRYABLE = (tensorhub.Unavailable, tensorhub.TransferError, tensorhub.SessionLost)
weights = tensorhub.open(mine, replica=sys.argv[2], server=address, timeout=30)
weights.register(part)
view = tensorhub.connect(address)
try:
    begun = weights.replicate("latest", timeout=10)
except RETRYABLE:
    begun = None
    weights.unpublish()  # the version may have come whole a moment too late
    weights.register(part)  # it begins anew, and stands by what is in it
say(begins=view.next_version(mine))
for version in range(view.next_version(mine), 1 << 20):
    while view.next_version(other) < version:  # so that neither runs ahead of the other
        time.sleep(0.02)
    with weights.mutating(version=version, timeout=30), torch.no_grad():
        for each in part.parameters():
            each.fill_(float(version))
"""
PROGRAMS = {
    "trainer": MODELS + TRAINER,
    "rollout": MODELS + ROLLOUT,
    "target": SET_TRAINER,
    "draft": SET_TRAINER,
    "reader": SET_ROLLOUT,
}


class Life:
    """One process, until it is killed."""

    def __init__(self, kind, number, server, folder):
        self.kind, self.name = kind, f"{kind}-{number}"
        self.path, self.log = folder / f"{self.name}.out", folder / f"{self.name}.log"
        text = BEFORE + PROGRAMS[kind]
        with self.path.open("wb") as out, self.log.open("wb") as log:
            self.process = Forked(program(text), [server, self.name], stdout=out, stderr=log)

    def said(self):
        """Whole lines so far."""
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last_words(self):
        """What it said and logged last, and whether it has ended by itself."""
        code = self.process.poll()
        end = "lives" if code is None else f"ended with {code}"
        return f"{self.name} {end}: {self.said()[-2:]}\n{self.log.read_text()[-2000:]}"

    def has(self, version):
        """It has had that version, or a newer one."""
        return any((each["version"] or -1) >= version for each in self.said())


class Cast:
    """The processes that live, of which one after another is killed and started anew."""

    def __init__(self, kinds, server, folder, *, seed):
        self.server, self.folder = server, folder
        self.chance, self.begun = random.Random(seed), 0
        self.past = []
        self.lives = [self.start(kind) for kind in kinds]

    def start(self, kind):
        self.begun += 1
        return Life(kind, self.begun, self.server, self.folder)

    def strike(self, kinds):
        """SIGKILL for one of these kinds."""
        victim = self.chance.choice([life for life in self.lives if life.kind in kinds])
        victim.process.kill()
        victim.process.wait(10)
        self.past.append(victim)
        self.lives[self.lives.index(victim)] = self.start(victim.kind)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for life in self.lives:
            if error is not None:
                error.add_note(life.last_words())
            life.process.close()

    def of(self, *kinds):
        return [life for life in [*self.past, *self.lives] if life.kind in kinds]


def has_gone_on(view, model, number):
    return view.next_version(model) >= number


def looks_of(lives):
    """How often somebody who held a version looked: all members are of that one."""
    seen = 0
    for life in lives:
        for each in life.said():
            if each.get("version") is not None:
                assert each["target"] == each["draft"] == [float(each["version"])], f"{life.name}: {each}"
                seen += 1
    return seen


@pytest.mark.timeout(600)
def test_no_reader_has_two_numbers_and_a_refilled_trainer_goes_on(tmp_path, figures):
    with tensorhub.serve(lease_s=2, report_s=0.2) as server:
        view = tensorhub.connect(server.address)
        with Cast(("trainer", "rollout", "rollout", "rollout"), server.address, tmp_path, seed=11) as cast:
            for blow in range(BLOWS):
                number = view.next_version("pair") + 2
                eventually(
                    partial(has_gone_on, view, "pair", number),
                    f"two more versions before blow {blow}",
                    within_s=WITHIN_S,
                )
                cast.strike(("trainer",) if blow % 2 else ("rollout",))
            newest = view.next_version("pair")
            for life in cast.of("rollout")[-3:]:
                if life in cast.lives:
                    eventually(partial(life.has, newest), f"{life.name} goes on")
    seen = looks_of(cast.of("trainer", "rollout"))
    trainers = [life.said()[0]["begins"] for life in cast.of("trainer") if life.said()]
    assert trainers == sorted(set(trainers))
    line = f"set of two models: {BLOWS} killed, {len(trainers) - 1} of them trainers; {seen} looks, none at two numbers"
    figures(line, looks=seen)


@pytest.mark.timeout(600)
def test_no_reader_of_a_set_with_two_trainers_has_two_numbers(tmp_path, figures):
    with tensorhub.serve(lease_s=2, report_s=0.2) as server:
        view = tensorhub.connect(server.address)
        with Cast(("target", "draft", "reader", "reader", "reader"), server.address, tmp_path, seed=12) as cast:
            for blow in range(BLOWS):
                for model in ("target", "draft"):
                    number = view.next_version(model) + 2
                    eventually(partial(has_gone_on, view, model, number), f"two more of {model} before blow {blow}")
                cast.strike((("reader",), ("target",), ("reader",), ("draft",))[blow % 4])
            newest = max(view.next_version(model) for model in ("target", "draft"))
            for life in cast.lives:
                if life.kind == "reader":
                    eventually(partial(life.has, newest), f"{life.name} goes on")
    seen = looks_of(cast.of("reader"))
    assert seen > BLOWS
    begun = {
        model: [life.said()[0]["begins"] for life in cast.of(model) if life.said()] for model in ("target", "draft")
    }
    for numbers in begun.values():
        assert numbers == sorted(set(numbers))
    line = f"set of two models with trainers of their own: {BLOWS} killed; {seen} looks, none at two numbers"
    figures(line, looks=seen)
