"""Workers on hosts with several networks."""

import ast
import logging
import subprocess
import sys
from functools import partial

import numpy as np
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


def test_the_next_address_is_tried_when_a_server_does_not_answer() -> None:
    with tensorhub.serve(lease_s=1, report_s=0.2) as first:
        second = tensorhub.serve(lease_s=1, report_s=0.2)
        second.close()
        port = int(second.address.rpartition(":")[2])
        named = f"127.0.0.1:9,{first.address},{second.address}"
        trainer = tensorhub.open("m", replica="t", server=named)
        trainer.register({"w": np.zeros(4)})
        trainer.publish(1)
        assert tensorhub.connect(named).next_version("m") == 2
    with tensorhub.serve(port=port, lease_s=1, report_s=0.2):
        trainer.unpublish()
        trainer.publish(2)
        with tensorhub.open("m", replica="r", server=named) as rollout:
            rollout.register({"w": np.ones(4)})
            assert rollout.wait_for(2) == 2
            assert rollout.replicate() == 2
        trainer.close()
    for ask in (
        tensorhub.connect(named, timeout=1).models,
        partial(tensorhub.open, "m", replica="r", server=named, timeout=1),
    ):
        with pytest.raises(tensorhub.ServerUnreachable, match=f"no reference server at {named}"):
            ask()


LINK_LOCAL = """
import numpy as np, tensorhub
ends = []
with tensorhub.serve("fe80::1%one") as server:
    assert server.address.startswith("[fe80::1%one]:"), server.address
    for host in (None, "fe80::2%two", "two", "fe80::1%one,[fe80::2%two]"):
        model = f"m{len(ends)}"
        with tensorhub.open(model, replica="t", server=server.address, transports="tcp", host=host) as t:
            with tensorhub.open(model, replica="r", server=server.address, transports="tcp", host=host) as r:
                t.register({"w": np.ones(4)})
                r.register({"w": (array := np.zeros(4))})
                t.publish(1)
                assert r.replicate(1, timeout=20) == 1 and array.all()
                found = [each for each in tensorhub.connect(server.address).status().models if each.name == model]
                ends.append(found[0].replicas[0].workers[0].endpoints[0])
print([":".join(part.rpartition(":")[0] for part in end.removeprefix("tcp://").split(",")) for end in ends])
"""


def test_an_address_of_one_link_keeps_its_zone_all_the_way() -> None:
    """Server, workers and what peers are told, in a network that has no other addresses."""
    links = ["ip link add one type veth peer name two"] + [
        f"ip link set {name} addrgenmode none && ip addr add fe80::{at}/64 dev {name} nodad && ip link set {name} up"
        for at, name in ((1, "one"), (2, "two"))
    ]
    script = " && ".join(["ip link set lo up", *links, f"exec {sys.executable} -c '{LINK_LOCAL}'"])
    made = subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("network namespaces need root")
    done = subprocess.run(["unshare", "-n", "sh", "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = "[fe80::1%one]", "[fe80::2%two]"
    assert ast.literal_eval(done.stdout) == [one, two, two, f"{one}:{two}"]


@pytest.mark.parametrize("host", ["127.0.0.1,192.0.2.1", "no-such-interface0"])
def test_an_address_that_is_not_of_this_machine_is_named(server, host: str) -> None:
    with pytest.raises(tensorhub.UsageError, match=f"cannot listen for peers on host='{host}'"):
        tensorhub.open("m", replica="t", server=server.address, transports="tcp", host=host)
