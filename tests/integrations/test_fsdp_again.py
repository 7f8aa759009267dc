"""A trainer that is started again: with what version it goes on.

Where the reference server is started again too, the trainer asks before the server has heard anybody.
"""

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
@pytest.mark.timeout(600)
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


@pytest.mark.processes
@pytest.mark.parametrize("has_older", [False, True])
def test_a_version_that_is_lost_but_for_a_part_of_it_is_passed_over(has_older: bool) -> None:
    """Who holds the part cannot fill a trainer, which was refused: nobody else could have published a newer version."""
    with tensorhub.serve(lease_s=2, report_s=0.2) as server:
        where = {"server": server.address, "call_timeout": 20, "reliable": False}
        with (
            tensorhub.open("policy", replica="engine", **where) as engine,
            tensorhub.open("policy", replica="rollout", **where) as rollout,
        ):
            engine.register({"bias": torch.zeros(64)}, boxes={}, partial=True)
            rollout.register(module(0.0), boxes={})
            with fsdp.attach(module(1.0), "policy", **where) as trainer:
                if has_older:
                    rollout.replicate(0)
                with trainer.step():
                    pass
                engine.replicate("latest")
            newest = tensorhub.connect(server.address).versions("policy")[0]
            assert (newest.version, newest.holders, newest.is_lost) == (1, ("engine",), True)
            again = module(2.0)
            with fsdp.attach(again, "policy", **where) as trainer:
                assert (trainer.version, trainer.next_version) == ((0, 2) if has_older else (2, 3))
                assert all((parameter == (1.0 if has_older else 2.0)).all() for parameter in again.parameters())
                with trainer.step() as version:
                    pass
                assert version == trainer.version == engine.update("latest")
