"""A `__del__` that closes runs where the collector does, and keeps nobody waiting, nor the end of the process."""

import asyncio
import gc
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import tensorhub
from runtime.kit import eventually, within
from tensorhub.runtime.loops import loop_thread

SOON_S = 2.0  # with call_timeout=20: nobody has waited for that
END_S = 30.0


class Engine:
    """In a cycle, as engines are: only the collector ends it."""

    def __init__(self, opened):
        self.opened = opened
        self.me = self

    def __del__(self):
        self.opened.close()


@pytest.fixture
def collect_in_worker_thread():
    """Collect there and nowhere else, once it is called."""
    gc.collect()
    gc.disable()
    yield lambda: loop_thread().loop.call_soon_threadsafe(gc.collect)
    gc.enable()


@pytest.mark.parametrize("how", ["one", "group"])
def test_a_finaliser_in_the_worker_thread_keeps_no_worker_waiting(join, server, collect_in_worker_thread, how):
    other, _ = join("other", 1.0)
    options = {"server": server.address, "call_timeout": 20}
    match how:
        case "one":
            opened = tensorhub.open("m", replica="gone", **options)
        case "group":
            opened = tensorhub.open_group("m", replica="gone", shards=2, **options)
    Engine(opened)
    del opened
    collect_in_worker_thread()
    with within(SOON_S):
        other.publish(1)
        eventually(lambda: all(r.name != "gone" for m in server.status().models for r in m.replicas), "it has left")


def test_what_cannot_be_waited_for_in_the_worker_thread_is_a_mistake(join):
    weights, _ = join("t", 1.0)
    found = []

    def call():
        with pytest.raises(tensorhub.UsageError) as caught:
            weights.publish(1)
        found.append(caught.value)

    loop_thread().loop.call_soon_threadsafe(call)
    eventually(lambda: bool(found), "it has been called")
    assert "publish(1) of m/t[0] cannot be waited for here: this is the thread of TensorHub" in str(found[0])
    assert "close()" in found[0].hint
    assert weights.publish(1) == 1


PROGRAM = """
import numpy as np, tensorhub

class Engine:
    def __init__(self):
        self.weights = tensorhub.open("m", replica="t", server=server.address)
        self.weights.register({"w": np.ones(10)})
        self.weights.publish(1)
    def __del__(self):
        self.weights.%s

server = tensorhub.serve()
engine = Engine()
print("ends", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("does", ["close()", "unpublish()"])
def test_a_finaliser_does_not_keep_its_process(does):
    """That of a module's own object runs when the worker thread stands still for good."""
    done = subprocess.run([sys.executable, "-c", PROGRAM % does], capture_output=True, text=True, timeout=END_S)
    assert done.stdout == "ends\n"
    assert done.returncode == 0
    assert ("the interpreter ends" in done.stderr) == (does == "unpublish()")


class Trainer(torch.nn.Module):
    """A module that knows its own `Weights`, which has registered it."""

    def __init__(self, server):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.weights = tensorhub.open("m", replica="gone", server=server.address)
        self.weights.register(self)
        self.weights.publish(1)
        self.callback = self.weights.publish


def forget_one(server):
    weights = tensorhub.open("m", replica="gone", server=server.address)
    weights.register({"w": np.ones(10)})
    weights.publish(1)


def forget_one_of_a_loop_of_its_own(server):
    async def main():
        weights = await tensorhub.aio.open("m", replica="gone", server=server.address)
        await weights.register({"w": np.ones(10)})
        await weights.publish(1)

    asyncio.run(main())


FORGET = {
    "one": forget_one,
    "one that its module knows": lambda server: Trainer(server) and None,
    "one of aio": forget_one_of_a_loop_of_its_own,
    "a group": lambda server: tensorhub.open_group("m", replica="gone", shards=2, server=server.address) and None,
}


def forget(how, server):
    how(server)
    gc.collect()


@pytest.mark.parametrize("what", FORGET)
def test_what_nobody_references_says_so_and_leaves(server, what):
    with tensorhub.open("m", replica="stays", server=server.address):
        before = threading.active_count()
        with pytest.warns(ResourceWarning, match=r"gone\[0\]> at .* was not closed, .* call close\(\), or use `with`"):
            forget(FORGET[what], server)
        eventually(lambda: all(r.name != "gone" for m in server.status().models for r in m.replicas), "it has left")
        eventually(lambda: threading.active_count() <= before, "its threads have ended")


def test_a_server_that_nobody_references_says_so_and_ends():
    with pytest.warns(ResourceWarning, match=r"<reference server at .*> was not closed"):
        address = tensorhub.serve().address

    def is_free():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0

    eventually(is_free, "its port is free")
