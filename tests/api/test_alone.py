"""A training loop whose server goes away, as its users write it."""

import numpy as np

import tensorhub

LEASE_S = 1


def steps(trainer, array, first, last):
    for version in range(first, last + 1):
        with trainer.mutating(version=version):
            array += 1


def test_a_training_loop_goes_on_without_a_server(caplog) -> None:
    """In tiles, for which the server is asked as long as it is there."""
    server = tensorhub.serve(lease_s=LEASE_S, report_s=0.2)
    port = int(server.address.rpartition(":")[2])
    array, copy = np.zeros(100_000, np.float32), np.ones(100_000, np.float32)
    with tensorhub.open("m", replica="t", server=server.address) as trainer:
        trainer.register({"w": array}, boxes={})
        trainer.publish(1)
        server.close()
        steps(trainer, array, 2, 5)
        assert trainer.version == 5
        assert caplog.text.count("goes on without the reference server") == 1
        with tensorhub.serve(port=port, lease_s=LEASE_S, report_s=0.2):
            with tensorhub.open("m", replica="r", server=server.address) as rollout:
                rollout.register({"w": copy}, boxes={})
                assert rollout.wait_for(5) == 5
                assert rollout.replicate() == 5
                assert (copy == 4).all()
                steps(trainer, array, 6, 6)
                assert rollout.update() == 6
            trainer.close()
