"""A container with too little memory for a copy of the weights: an error that says so, and a worker that lives.

The container is a cgroup of the test's own, which needs root and a memory controller.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tensorhub

from .process import eventually
from .script import run

pytestmark = pytest.mark.processes

MIB, GIB = 1 << 20, 1 << 30


def _memory_controller() -> tuple[Path, str] | None:
    """Where a cgroup can be made, and the file of its limit."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, (kind, _, options) = Path(line.split()[4]), line.partition(" - ")[2].split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(","):
            return mount, "memory.limit_in_bytes"
        if kind == "cgroup2" and "memory" in (mount / "cgroup.subtree_control").read_text().split():
            return mount, "memory.max"
    return None


@pytest.fixture
def container():
    """A prefix of commands that run in a cgroup below one with a limit of 1 GiB."""
    found = _memory_controller()
    if os.geteuid() != 0 or found is None:
        pytest.skip("needs root and a memory controller")
    mount, limit = found
    outer = mount / f"tensorhub-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup in {mount}: {error}")
    try:
        (outer / limit).write_text(str(GIB))
        if limit == "memory.max":
            (outer / "cgroup.subtree_control").write_text("+memory")
        inner.mkdir()
        yield ("sh", "-c", f'echo $$ > {inner}/cgroup.procs && exec "$@"', "sh")
    finally:
        if inner.exists():
            inner.rmdir()
        outer.rmdir()


def _models(server):
    return tensorhub.connect(server.address).models()


BEGIN = """
import logging
import numpy as np
logging.basicConfig(level=logging.INFO)
def join(replica, size_mib, **options):
    weights = tensorhub.open("m", replica=replica, server=address, timeout=30, call_timeout=60, **options)
    tensors = {"w": np.full(size_mib << 20, 1, dtype=np.uint8)}
    weights.register(tensors)
    return weights, tensors["w"]
"""


@pytest.mark.long
def test_600_mib_of_weights_in_a_container_of_1_gib(server, container):
    """`unpublish` of the only copy is refused; once another reliable replica has it, it succeeds."""
    story = """
weights, array = join("trainer", 600)
weights.publish(1)
say(refused=error_of(weights.unpublish, timeout=20), version=weights.version, check=error_of(weights.check))
tensorhub.open("refused", replica="trainer", server=address)
while len(tensorhub.connect(address).versions("m")[0].holders) < 2:
    time.sleep(0.05)
say(limit=weights.statistics()["host_bytes_limit"], again=error_of(weights.unpublish), then=weights.version)
"""
    with ThreadPoolExecutor(1) as pool, tensorhub.open("m", replica="heir", server=server.address) as heir:
        heir.register({"w": np.zeros(600 * MIB, dtype=np.uint8)})
        running = pool.submit(run, BEGIN + story, server.address, prefix=container)
        eventually(lambda: running.done() or "refused" in _models(server), "it was refused", within_s=60)
        if not running.done():
            heir.replicate(1)
        ended = running.result()
        found = ended.only()
    assert found["refused"]["kind"] == "HostMemoryFull"
    assert "600 MiB" in found["refused"]["text"]
    assert "1.0 GiB of cgroup" in found["refused"]["text"]
    assert "another reliable replica" in found["refused"]["hint"]
    assert (found["version"], found["check"]) == (1, {"value": None})
    assert found["again"] == {"value": None}
    assert found["then"] is None
    assert found["limit"] == 0
    assert "may take 0 B of host memory (0 of 600 MiB)" in ended.log
    assert "WARNING:tensorhub.runtime.copies" in ended.log


@pytest.mark.long
def test_what_is_fetched_ahead_is_not_fetched_where_there_is_no_room(server, container):
    """And an update, which needs none, goes on."""
    story = """
weights, array = join("rollout", 500, prefetch="always", reliable=False)
weights.replicate(1)
say(first=int(array[-1]))
tensorhub.open("ready", replica="rollout", server=address)
weights.wait_for(2)
say(update=error_of(weights.update), second=int(array[-1]), ahead=weights.statistics()["host_bytes"])
"""
    array = np.full(500 * MIB, 1, dtype=np.uint8)
    with ThreadPoolExecutor(1) as pool, tensorhub.open("m", replica="trainer", server=server.address) as trainer:
        trainer.register({"w": array})
        trainer.publish(1)
        running = pool.submit(run, BEGIN + story, server.address, prefix=container)
        eventually(lambda: running.done() or "ready" in _models(server), "it is ready", within_s=60)
        if not running.done():
            with trainer.mutating(version=2):
                array[:] = 2
        ended = running.result()
    found = ended.only()
    assert found == {"first": 1, "update": {"value": 2}, "second": 2, "ahead": 0}
