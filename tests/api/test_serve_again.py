"""A reference server in this process that ends, and is started again where it was."""

import numpy as np

import tensorhub


def test_a_server_that_is_not_fresh_hears_the_workers_of_the_one_before():
    first = tensorhub.serve(lease_s=2, report_s=0.2)
    port = int(first.address.rpartition(":")[2])
    with tensorhub.open("m", replica="t", server=first.address) as trainer:
        trainer.register({"w": np.full(50_000, 3.0, np.float32)})
        trainer.publish(7)
        first.close()
        with tensorhub.serve(port=port, lease_s=2, report_s=0.2, fresh=False) as again:
            assert tensorhub.load("m@latest", server=again.address)["w"][0] == 3.0
            assert tensorhub.connect(again.address).next_version("m") == 8
            trainer.close()
