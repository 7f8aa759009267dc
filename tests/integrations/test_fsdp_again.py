"""A trainer that is started again together with the reference server: it asks before the server has heard anybody."""

import pytest
import torch

import tensorhub
from tensorhub.integrations import fsdp


def module(value: float) -> torch.nn.Module:
    found = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.fill_(value)
    return found


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_it_goes_on_where_the_rollouts_are_and_publishes_no_untrained_weights() -> None:
    first = tensorhub.serve(lease_s=5, report_s=0.2)
    port = int(first.address.rpartition(":")[2])
    held = module(0.0)
    with tensorhub.open("policy", replica="rollout-0", server=first.address) as rollout:
        rollout.register(held, boxes={})
        with fsdp.attach(module(1.0), "policy", server=first.address, version=5):
            rollout.replicate("latest")
        first.close()
        with tensorhub.serve(port=port, lease_s=5, report_s=0.2, fresh=False) as again:
            untrained = module(0.0)
            with fsdp.attach(untrained, "policy", replica="trainer-again", server=again.address) as trainer:
                assert (trainer.version, trainer.next_version) == (5, 6)
                assert all((parameter == 1.0).all() for parameter in untrained.parameters())
                assert rollout.update("latest") == 5
            rollout.close()
