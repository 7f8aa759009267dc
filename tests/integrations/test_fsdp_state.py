"""What `fsdp.attach` does not publish is refused by name, on all ranks: state beside tensors, FSDP1, ZeRO-3."""

import io

import pytest
import torch

import tensorhub
from tensorhub.integrations import fsdp

from .rank import GATHERING


def kind_of(extra):
    return type(extra).__name__


class Extra(torch.nn.Linear):
    """A layer with state of another kind."""

    def __init__(self, extra):
        super().__init__(3, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [None, b"", io.BytesIO()], ids=kind_of)
def test_extra_state_that_says_nothing_is_no_hindrance(server, extra):
    module = torch.nn.Sequential(Extra(extra))
    with fsdp.attach(module, "policy", server=server) as trainer:
        with trainer.step():
            pass
        found = tensorhub.load("policy@1", server=server)
        assert {"0.weight", "0.bias"} <= set(found)
        assert torch.equal(found["0.weight"], module[0].weight)


@pytest.mark.parametrize("extra", [{"scale": 2.0}, io.BytesIO(b"1")], ids=kind_of)
def test_extra_state_that_says_something_is_refused_by_name(server, extra):
    with pytest.raises(
        tensorhub.UsageError, match=r"state of the module.*: '0._extra_state' \(\w+ of '0', class Extra\)"
    ):
        fsdp.attach(torch.nn.Sequential(Extra(extra)), "policy", server=server)
    assert tensorhub.connect(server).versions("policy") == ()


class Packed(torch.nn.Module):
    """Saves its weights in a form that is no tensor, as torch's quantised layers do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = (torch.zeros(4, dtype=torch.int8), None)
        destination[prefix + "dtype"] = torch.qint8


def test_packed_weights_are_refused_rather_than_left_out(server):
    match = r"'0.packed' \(tuple of '0', class Packed\); '0.dtype' \(dtype of '0', class Packed\)"
    with pytest.raises(tensorhub.UsageError, match=match):
        fsdp.attach(torch.nn.Sequential(Packed()), "policy", server=server)
    assert tensorhub.connect(server).versions("policy") == ()


def test_what_is_meant_to_be_left_out_is(server):
    module = torch.nn.Sequential(Packed(), torch.nn.Linear(2, 2))
    with fsdp.attach(module, "policy", server=server, leave_out=["0.packed", "0.dtype", "1.bias"]) as trainer:
        with trainer.step():
            pass
        assert set(tensorhub.load("policy@1", server=server)) == {"0.scale", "1.weight"}


SAID = {
    "fsdp1-part": "'down' is of class FullyShardedDataParallel",
    "fsdp1-inside": "is flattened by FSDP1",
    "zero3": "parameter 'weight' of 'down', class Linear, is cut by DeepSpeed's ZeRO-3",
}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_what_gathers_with_other_ranks_is_refused_on_all_of_them(start, server):
    """Before any rank waits in a collective that others do not call."""
    job = start(2)
    for kind in GATHERING:
        job.call("build", kind=kind)
        found = job.answers("attach", model="policy")
        assert [each["code"] for each in found] == ["usage", "usage"], (kind, found)
        for each in found:
            assert SAID.get(kind, "the module is of class FullyShardedDataParallel") in each["message"], (kind, found)
            assert "fully_shard" in each["hint"]
    assert tensorhub.connect(server).versions("policy") == ()
    job.call("build", kind="fsdp")
    assert job.call("attach", model="policy") == 0
