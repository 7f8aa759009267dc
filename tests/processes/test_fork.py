"""Children of a worker: they hide nobody's death and keep nothing of ours open, and may not use what they inherit."""

import contextlib
import os
import signal

import pytest

import tensorhub

from .midway import held_midway, read_again, release
from .process import eventually
from .script import run

pytestmark = pytest.mark.processes

SILENCE_S = 5.0  # after which a transport takes a peer for lost


@pytest.mark.parametrize("transports", ["tcp", "local"])
def test_a_source_that_has_forked_is_killed_and_left_at_once(start, figures, transports):
    """Its children live on. Without them the readers know at once, as `test_source.py` has it."""
    cluster = start(lease_s=20)
    trainer, first, target = cluster.replicas("trainer", "rollout-1", "rollout-2", transports=transports)
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    calls, at = held_midway(cluster, target, percent=50)
    assert cluster.sources("rollout-2") == {0: "rollout-1", 1: "rollout-1"}
    children = [worker.ask("fork").result() for worker in first]
    try:
        killed = first.kill()
        release(target)
        assert [call.result() for call in calls] == [1, 1]
        took_s = max(call.ended for call in calls) - killed
        eventually(lambda: all(not worker.connected for worker in workers_of(cluster, "rollout-1")), "it is cut off")
        assert all(os.path.exists(f"/proc/{child}") for child in children)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    cluster.judge(target, 1)
    assert took_s < SILENCE_S - 1
    again = read_again(target)
    line = f"a source that has forked, killed at {at:.0f} % over {transports}: re-read {again} chunks"
    figures(f"{line}, finished from trainer in {took_s:.1f} s", took_s=took_s, chunks_read_again=again)


def workers_of(cluster, name):
    replicas = cluster.view().replicas("policy")
    return [worker for replica in replicas if replica.name == name for worker in replica.workers]


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


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


def test_a_child_has_no_descriptor_of_ours(server):
    """Not of the workers, their transports and transfers under way, nor of a server in this process."""
    story = """
import threading
from tensorhub.transport.tcp.server import TcpServer
child, wait, held = [], threading.Event(), threading.Event()
send = TcpServer.send
def send_slowly(self, *arguments):
    held.set()
    wait.wait(30)
    return send(self, *arguments)
TcpServer.send = send_slowly
late = tensorhub.open("m", replica="late", server=address, timeout=30, call_timeout=30, transports="tcp")
late.register({"w": np.zeros_like(array)})
reading = threading.Thread(target=late.replicate)
reading.start()
held.wait(30)
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


def test_a_program_that_is_started_has_no_descriptor_of_ours(server):
    story = """
import subprocess
code = "import os\\nfound = []\\nfor n in range(3, 99):\\n try: found.append(os.readlink(f'/proc/self/fd/{n}'))\\n" \\
    " except OSError: pass\\nprint([l for l in found if '/proc' not in l])"
said = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=True)
say(said=said.stdout.strip())
"""
    alone = ("env",)  # no process that was forked itself
    assert run(FILES + BUSY + story, server.address, prefix=alone).only()["said"] == "[]"


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
