"""A `__del__` that closes runs where the collector does, and keeps nobody waiting, nor the end of the process."""

import gc
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("how", ["one", "group", "set"])
def test_a_finaliser_in_the_worker_thread_keeps_no_worker_waiting(join, server, collect_in_worker_thread, how):
    other, _ = join("other", 1.0)
    options = {"server": server.address, "call_timeout": 20}
    match how:
        case "one":
            opened = tensorhub.open("m", replica="gone", **options)
        case "group":
            opened = tensorhub.open_group("m", replica="gone", shards=2, **options)
        case "set":
            opened = tensorhub.open_set(["m", "m2"], replica="gone", **options)
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
