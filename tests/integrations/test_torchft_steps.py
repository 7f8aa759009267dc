"""What torchft's transport does in each step of a training. Without torchft, something stands for its one base class.

torchft calls `disallow_checkpoint` before it applies any step, whether or not somebody was healed.
"""

import importlib.util
import sys
import types
from datetime import timedelta
from unittest import mock

import pytest
import torch

import tensorhub

SOON = timedelta(seconds=20)


class Base:
    """In place of torchft's `CheckpointTransport`, which has no code."""

    def __class_getitem__(cls, _):
        return cls


@pytest.fixture(scope="module", autouse=True)
def torchft():
    if importlib.util.find_spec("torchft") is not None:
        yield
        return
    names = ("torchft", "torchft.checkpointing", "torchft.checkpointing.transport")
    made = {name: types.ModuleType(name) for name in names}
    made[names[-1]].CheckpointTransport = Base
    sys.modules.update(made)
    yield
    for name in (*names, "tensorhub.integrations.torchft"):  # as if they had never been imported
        sys.modules.pop(name, None)


@pytest.fixture
def source(server):
    from tensorhub.integrations.torchft import TensorHubTransport

    made = TensorHubTransport(server=server, call_timeout=2)
    yield made
    made.shutdown(wait=False)


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
