"""A trainer replica is healed by its peers: torchft's own tests, with the transport in place of theirs."""

import unittest
from datetime import timedelta

import pytest

import tensorhub

torch = pytest.importorskip("torch")
pytest.importorskip("torchft", reason="torchft is not installed here: make test-engines")

import torchft  # noqa: E402
from torchft.checkpointing import transport_test  # noqa: E402

from tensorhub.integrations.torchft import TensorHubTransport  # noqa: E402

SOON = timedelta(seconds=20)


@pytest.fixture
def transport(server):
    made = []

    def make(**options):
        made.append(TensorHubTransport(server=server, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def test_conformance(server):
    """Three replicas heal each other and time out, as `run_multi_recovery_test` of torchft wants it."""
    device = torch.device("cpu")
    transport_test.run_multi_recovery_test(
        unittest.TestCase(), lambda rank, world: TensorHubTransport(server=server), device
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


@pytest.mark.parametrize("quorum", ["0_async_quorum", "1_sync_quorum"])
def test_a_replica_that_failed_is_healed_by_torchfts_manager(server, monkeypatch, quorum):
    """torchft's `test_ddp_recovery`: two replicas with DDP and Adam, one fails at step 2; in the end they are equal."""
    pytest.importorskip("parameterized", reason="torchft's own integration test needs the package parameterized")
    from torchft import manager_integ_test

    healed = []

    class Counting(TensorHubTransport):
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
