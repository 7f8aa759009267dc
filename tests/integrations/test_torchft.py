"""A trainer replica is healed by its peers: torchft's own tests, and what its transport does in each step.

Without torchft, something stands for its one base class. torchft calls `disallow_checkpoint` before it applies any
step, whether or not a replica was healed.
"""

import importlib
import importlib.util
import sys
import types
import unittest
from datetime import timedelta
from unittest import mock

import pytest
import torch

import tensorhub

SOON = timedelta(seconds=20)
IS_HERE = importlib.util.find_spec("torchft") is not None
with_torchft = pytest.mark.skipif(not IS_HERE, reason="torchft is not installed here: make test-engines")


class Base:
    """In place of torchft's `CheckpointTransport`, which has no code."""

    def __class_getitem__(cls, _):
        return cls


@pytest.fixture(scope="module", autouse=True)
def torchft():
    if IS_HERE:
        yield
        return
    names = ("torchft", "torchft.checkpointing", "torchft.checkpointing.transport")
    made = {name: types.ModuleType(name) for name in names}
    made[names[-1]].CheckpointTransport = Base
    sys.modules.update(made)
    yield
    for name in (*names, "tensorhub.integrations.torchft"):  # as if they had never been imported
        sys.modules.pop(name, None)


def adapter():
    return importlib.import_module("tensorhub.integrations.torchft")


@pytest.fixture
def transport(server):
    made = []

    def make(**options):
        made.append(adapter().TensorHubTransport(server=server, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown(wait=False)


@with_torchft
def test_conformance(server):
    """Three replicas heal each other and time out, as `run_multi_recovery_test` of torchft wants it."""
    from torchft.checkpointing import transport_test

    device = torch.device("cpu")
    transport_test.run_multi_recovery_test(
        unittest.TestCase(), lambda rank, world: adapter().TensorHubTransport(server=server), device
    )


def test_an_optimizer_with_all_its_numbers_is_healed(transport):
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "torchft": {"step": 7, "nothing": None}}
    source, behind = transport(), transport()
    source.send_checkpoint([1], 7, state, SOON)
    healed = behind.recv_checkpoint(0, source.metadata(), 7, SOON)
    assert healed["torchft"] == state["torchft"]
    assert healed["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert type(healed["optim"]["param_groups"][0]["betas"]) is tuple
    assert type(healed["model"]) is type(state["model"])
    other = torch.nn.Linear(300, 200)
    other_optimizer = torch.optim.AdamW(other.parameters())
    other.load_state_dict(healed["model"])
    other_optimizer.load_state_dict(healed["optim"])
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other_optimizer.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_a_step_that_is_sent_again_may_be_another_state(transport):
    """A commit failed: torchft sends the same step once more."""
    source, behind = transport(), transport()
    for value in (1.0, 2.0):
        source.send_checkpoint([1], 3, {"w": torch.full((1000,), value)}, SOON)
        assert behind.recv_checkpoint(0, source.metadata(), 3, SOON)["w"][0] == value
        source.disallow_checkpoint()
    source.send_checkpoint([1], 4, {"w": torch.zeros(10)}, SOON)
    with pytest.raises(tensorhub.UsageError, match="step 3 was asked for"):
        behind.recv_checkpoint(0, source.metadata(), 3, SOON)


def test_what_cannot_be_written_down_is_refused_by_name(transport):
    with pytest.raises(tensorhub.UsageError, match=r"state_dict/user/scheduler is a builtins.object"):
        transport().send_checkpoint([1], 1, {"user": {"scheduler": object()}}, SOON)


@with_torchft
@pytest.mark.parametrize("quorum", ["0_async_quorum", "1_sync_quorum"])
def test_a_replica_that_failed_is_healed_by_torchfts_manager(server, monkeypatch, quorum):
    """torchft's `test_ddp_recovery`: two replicas with DDP and Adam, one fails at step 2; in the end they are equal."""
    pytest.importorskip("parameterized", reason="torchft's own integration test needs the package parameterized")
    import torchft
    from torchft import manager_integ_test

    healed = []

    class Counting(adapter().TensorHubTransport):
        def recv_checkpoint(self, *arguments, **options):
            healed.append(super().recv_checkpoint(*arguments, **options))
            return healed[-1]

    def manager(**options):
        return torchft.Manager(**options, checkpoint_transport=Counting(server=server))

    monkeypatch.setattr(manager_integ_test, "Manager", manager)
    result = unittest.TestResult()
    manager_integ_test.ManagerIntegTest(f"test_ddp_recovery_{quorum}").run(result)
    assert result.testsRun == 1
    assert result.errors + result.failures == []
    assert healed, "nobody was healed: the transport was not used"


@pytest.fixture
def source(transport):
    return transport(call_timeout=2)


def test_a_step_asks_nobody_once_what_was_sent_is_withdrawn(source, running):
    source.disallow_checkpoint()
    source.send_checkpoint([1], 1, {"w": torch.ones(3)}, SOON)
    source.disallow_checkpoint()
    with mock.patch.object(tensorhub.Weights, "unpublish") as asked:
        source.disallow_checkpoint()
    assert not asked.called
    running.close()
    source.disallow_checkpoint()  # the training goes on without a reference server


@pytest.mark.parametrize("late", ["publish", "unpublish"])
def test_what_may_be_out_is_withdrawn_although_the_call_before_has_raised(source, server, late):
    """It had its effect, and then its answer was lost, or only the former."""
    state, view = {"w": torch.ones(3)}, tensorhub.connect(server)
    call = getattr(tensorhub.Weights, late)

    def send_and_withdraw():
        source.send_checkpoint([1], 1, state, SOON)
        source.disallow_checkpoint()

    def raises_late(self, *arguments, **options):
        if late == "publish":
            call(self, *arguments, **options)
        raise tensorhub.DeadlineExceeded("the answer was lost")

    with mock.patch.object(tensorhub.Weights, late, raises_late), pytest.raises(tensorhub.DeadlineExceeded):
        send_and_withdraw()
    assert [each.holders for each in view.versions(source.metadata())] == [("source",)]
    source.disallow_checkpoint()
    assert [each.holders for each in view.versions(source.metadata())] == [()]
    source.send_checkpoint([1], 1, {"w": torch.zeros(3)}, SOON)  # the same step again, another state
    assert view.versions(source.metadata())[0].holders == ("source",)
