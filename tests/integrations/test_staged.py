"""A copy in host memory that is published: it says what the trainer's tensors say, in the dtype that was asked for."""

import pytest
import torch

import tensorhub
from tensorhub.integrations.state_dicts import StagedPublisher


@pytest.fixture
def publisher(server):
    made = []

    def make(**options):
        made.append(StagedPublisher("policy", replica="trainer", server=server, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def model(step):
    return {
        "weight": torch.full((3,), step + 0.5),
        "half": torch.full((3,), step + 0.5, dtype=torch.float16),
        "ids": torch.arange(1001, 1004) + step,
        "most": torch.tensor([2**31 - 1], dtype=torch.int32),
        "flags": torch.tensor([True, False]),
        "turn": torch.tensor([1 + 2j]),
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_only_floating_point_numbers_are_cast(publisher, server, dtype):
    trainer = publisher(dtype=dtype)
    for step in (0, 1):  # the first makes the copies, all others fill them
        wanted = model(step)
        trainer.publish(iter(wanted.items()))
        found = tensorhub.load(f"policy@{step}", server=server)
        assert sorted(found) == sorted(wanted)
        for name, tensor in wanted.items():
            floats = dtype is not None and name in ("weight", "half")
            assert found[name].dtype == (dtype if floats else tensor.dtype), name
            assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tensor_of_another_dtype_than_the_first_time_is_refused_by_name(publisher, server, dtype):
    trainer = publisher(dtype=dtype)
    trainer.publish(iter(model(0).items()))
    changed = {**model(1), "ids": torch.full((3,), 1.75)}
    with pytest.raises(tensorhub.UsageError, match=r"tensor 'ids' is torch.float32 now, and was torch.int64"):
        trainer.publish(iter(changed.items()))
    assert trainer.version is None, "half of another version is in its tensors"
    assert trainer.publish(iter(model(1).items())) == 1
    assert tensorhub.load("policy@1", server=server)["ids"].tolist() == [1002, 1003, 1004]
