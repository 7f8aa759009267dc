"""Workers on hosts with several networks."""

import logging
import sys

import pytest

import tensorhub

TWO, OTHER_TWO = "127.0.0.1,127.0.0.2", "lo,127.0.0.3"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")


def test_all_addresses_of_a_source_are_used(join, caplog) -> None:
    caplog.set_level(logging.INFO)
    trainer, _ = join("t", 3.0, size=5_000_000, transports="tcp", host=TWO)
    rollout, array = join("r", size=5_000_000, transports="tcp", host=OTHER_TWO)
    trainer.publish(1)
    assert rollout.replicate(1) == 1
    assert (array == 3.0).all()
    assert "of 2 addresses" in caplog.text
    trainer.unpublish()
    late, array = join("late", size=5_000_000, transports="tcp")
    assert late.replicate() == 1, "from a rollout, at one of its addresses or both"
    assert (array == 3.0).all()


@pytest.mark.parametrize("host", ["127.0.0.1,192.0.2.1", "no-such-interface0"])
def test_an_address_that_is_not_of_this_machine_is_named(server, host: str) -> None:
    with pytest.raises(tensorhub.UsageError, match=f"cannot listen for peers on host='{host}'"):
        tensorhub.open("m", replica="t", server=server.address, transports="tcp", host=host)
