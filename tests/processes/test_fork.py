"""Children of a worker keep nothing of it open, and may not use what they inherit."""

import pytest

import tensorhub

from .script import run

pytestmark = pytest.mark.processes

FILES = """
import numpy as np
def files():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            pass  # the folder's own
    return found
before = files()
def news():
    return sorted(link for number, link in files().items() if link != before.get(number) and link != "/dev/null")
"""

BUSY = """
served = tensorhub.serve()
ways = "local,tcp"  # what NIXL, UCX and CUDA open is theirs
trainer = tensorhub.open("m", replica="trainer", server=address, timeout=30, call_timeout=30, transports=ways)
array = np.ones(50_000_000, dtype=np.uint8)
trainer.register({"w": array})
trainer.publish(1)
reader = tensorhub.open("m", replica="reader", server=served.address, timeout=30, call_timeout=30, transports=ways)
"""


def test_a_child_has_no_descriptor_of_ours(server):
    """Not of the workers, their transports and transfers under way, nor of a server in this process."""
    story = """
import threading
from tensorhub.transport.tcp.server import TcpServer
child, wait, held = [], threading.Event(), threading.Event()
conversation = TcpServer.conversation
def begin_slowly(self, *arguments):
    held.set()
    wait.wait(30)
    return conversation(self, *arguments)
TcpServer.conversation = begin_slowly
late = tensorhub.open("m", replica="late", server=address, timeout=30, call_timeout=30, transports="tcp")
late.register({"w": np.zeros_like(array)})
reading = threading.Thread(target=late.replicate)
reading.start()
assert held.wait(30)
ours = news()
if os.fork() == 0:
    say(child=news())
    os._exit(0)
os.wait()
wait.set()
reading.join()
say(ours=ours, version=late.version, status=len(served.status().models), replica=error_of(late.update))
with trainer.mutating(version=2):
    array += 1
say(update=error_of(late.update))
"""
    found = run(FILES + BUSY + story, server.address).only()
    assert found["child"] == []
    assert sum(link.startswith("socket:") for link in found["ours"]) > 10
    assert found["version"] == 1
    assert found["update"] == {"value": 2}


def test_what_a_child_does_with_an_inherited_object_is_a_usage_error(server):
    story = """
view = tensorhub.connect(address)
uses = dict(
    publish=lambda: trainer.publish(2), unpublish=trainer.unpublish, register=lambda: trainer.register({"w": array}),
    close=trainer.close, check=trainer.check, version=lambda: trainer.version,
    leave=lambda: trainer.__exit__(None, None, None), models=view.models, status=served.status,
)
if os.fork() == 0:
    began = time.monotonic()
    say(uses={name: error_of(use) for name, use in uses.items()}, took_s=time.monotonic() - began)
    with tensorhub.open("m", replica="child", server=address, timeout=30, call_timeout=30) as own:
        own.register({"w": array})
        say(own=error_of(own.replicate, 1))
    served.close()
    os._exit(0)
os.wait()
say(check=error_of(trainer.check), models=len(served.status().models))
"""
    found = run(FILES + BUSY + story, server.address).only()
    for name, error in found["uses"].items():
        assert error["kind"] == "Closed", name
        assert "forked" in error["text"]
        assert "spawn" in error["hint"]
    assert issubclass(tensorhub.Closed, tensorhub.UsageError)
    assert found["took_s"] < 5
    assert found["own"] == {"value": 1}
    assert found["check"] == {"value": None}
