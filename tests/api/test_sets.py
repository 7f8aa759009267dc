"""Several models under one number: a `ModuleDict` of them is one model, so a version is that of all or of none."""

from functools import partial

import pytest
import torch

import tensorhub
from runtime.kit import in_threads

MEMBERS = ("target", "draft")
VERSIONS = 12


def models(value: float) -> torch.nn.ModuleDict:
    """A large one and a small one; all their weights are that number."""
    target, draft = torch.nn.Linear(700, 300), torch.nn.Linear(40, 20)
    made = torch.nn.ModuleDict({"target": target, "draft": draft})
    for each in made.parameters():
        each.data.fill_(value)
    return made


def numbers(found: torch.nn.ModuleDict) -> dict[str, set[float]]:
    """Which numbers each member's weights are."""
    return {name: {float(v) for each in found[name].parameters() for v in each.detach().unique()} for name in MEMBERS}


@pytest.fixture
def register(join):
    """`register(replica, value)` opens a worker over both models; returns it and them."""

    def opened(replica, value=0.0, **options):
        found = models(value)
        weights, _ = join(replica, tensors={"only": torch.zeros(1)}, **options)
        weights.register(found)
        return weights, found

    return opened


def test_all_members_move_together(register):
    trainer, trained = register("t")
    rollout, engine = register("r", reliable=False)
    for version in (1, 2, 3):
        with trainer.mutating(version=version):
            for each in trained.parameters():
                each.data.fill_(float(version))
        assert rollout.update() == version
        assert numbers(engine) == {name: {float(version)} for name in MEMBERS}


def test_no_reader_ever_has_members_of_two_versions(register):
    """Readers update while the next versions are made, as fast as they come."""
    trainer, trained = register("t", prefetch="never")
    readers = [register(f"r{i}", reliable=False, prefetch="never") for i in range(2)]

    def train() -> None:
        for version in range(1, VERSIONS + 1):
            with trainer.mutating(version=version):
                for each in trained.parameters():
                    each.data.fill_(float(version))

    def read(weights, engine) -> list[int]:
        seen = [0]
        while seen[-1] < VERSIONS:
            seen.append(weights.update(timeout=20))
            assert numbers(engine) == {name: {float(seen[-1])} for name in MEMBERS}
        return seen

    trained_well, *seen = in_threads(train, *(partial(read, *each) for each in readers))
    assert trained_well is None
    assert seen == [sorted(each) for each in seen]


def test_a_parameter_of_one_member_that_was_replaced_is_named(register):
    trainer, trained = register("t")
    trained["draft"].weight = torch.nn.Parameter(torch.ones(20, 40))
    with pytest.raises(tensorhub.UsageError, match=r"draft\.weight"):
        trainer.publish(1)


def test_a_member_that_differs_is_named_before_a_byte_moves(register, join):
    trainer, _ = register("t", 1.0)
    trainer.publish(1)
    other = torch.nn.ModuleDict({"target": torch.nn.Linear(700, 300), "draft": torch.nn.Linear(41, 20)})
    before = {name: each.clone() for name, each in other.state_dict().items()}
    weights, _ = join("r", tensors={"only": torch.zeros(1)})
    weights.register(other)
    with pytest.raises(tensorhub.LayoutMismatch, match=r"draft\.weight"):
        weights.replicate()
    assert all(torch.equal(each, before[name]) for name, each in other.state_dict().items())
