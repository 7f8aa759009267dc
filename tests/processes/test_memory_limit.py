"""A container with too little memory for a copy of the weights: an error that says so, and a worker that lives.

The container is a cgroup of the test's own, which needs root and a memory controller.
"""

import contextlib
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


@contextlib.contextmanager
def _cgroup(parent: Path, name: str):
    folder = parent / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup in {parent}: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.fixture(params=["its own limit", "a limit above it"])
def container(request):
    """A prefix of commands that run under a limit of 1 GiB."""
    found = _memory_controller()
    if os.geteuid() != 0 or found is None:
        pytest.skip("needs root and a memory controller")
    mount, limit = found
    with _cgroup(mount, f"tensorhub-test-{os.getpid()}") as outer:
        (outer / limit).write_text(str(GIB))
        if request.param == "its own limit":
            yield _inside(outer)
            return
        if limit == "memory.max":
            (outer / "cgroup.subtree_control").write_text("+memory")
        with _cgroup(outer, "inner") as inner:
            yield _inside(inner)


def _inside(folder: Path) -> tuple[str, ...]:
    return ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


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


def test_a_limit_that_a_user_has_set_is_no_promise_of_memory(server, container):
    """`host_bytes` says what may be taken, and the container what there is."""
    story = """
weights, array = join("trainer", 600, host_bytes="2GiB")
weights.publish(1)
say(refused=error_of(weights.unpublish, timeout=20), version=weights.version)
say(limit=weights.statistics()["host_bytes_limit"])
"""
    ended = run(BEGIN + story, server.address, prefix=container)
    found = ended.only()
    assert found["refused"]["kind"] == "HostMemoryFull"
    assert "600 MiB more" in found["refused"]["text"]
    assert (found["version"], found["limit"]) == (1, 1800 * MIB)


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


AHEAD = """
import resource
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
weights, array = join("trainer", 256)
weights.publish(1)
deadline = time.monotonic() + float(sys.argv[2])
while weights.statistics()["offloaded_bytes"] == 0 and time.monotonic() < deadline:
    time.sleep(0.01)
ready, before = weights.statistics()["offloaded_bytes"], faults()
weights.unpublish()
say(ready=ready, faults=faults() - before, kept=weights.statistics()["offloaded_bytes"])
"""
PAGES = 256 * MIB // 4096


def test_who_is_alone_copies_while_the_version_rests(server):
    """So the first `unpublish` touches no new page, and is as fast as every other."""
    found = run(BEGIN + AHEAD, server.address, "30").only()
    assert found["ready"] == found["kept"] == 256 * MIB
    assert found["faults"] < PAGES / 10


def test_so_does_who_is_beside_a_reliable_worker_that_does_not_come_to_have_it(server):
    with tensorhub.open("m", replica="heir", server=server.address):
        found = run(BEGIN + AHEAD, server.address, "30").only()
    assert found["ready"] == found["kept"] == 256 * MIB
    assert found["faults"] < PAGES / 10


def test_no_memory_is_taken_ahead_that_may_be_wanted(server, container):
    """A copy of 400 MiB would fit into what 1 GiB leaves. It is made once it is needed, and not ahead of that."""
    story = """
said = []
class Ear(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("tensorhub.runtime.copies").addHandler(Ear())
weights, array = join("trainer", 400)
weights.publish(1)
deadline = time.monotonic() + 20
while not any("a host copy needs" in text for text in said) and time.monotonic() < deadline:
    time.sleep(0.02)
say(ahead=weights.statistics()["offloaded_bytes"], error=error_of(weights.unpublish))
say(then=weights.statistics()["offloaded_bytes"])
"""
    found = run(BEGIN + story, server.address, prefix=container).only()
    assert found == {"ahead": 0, "error": {"value": None}, "then": 400 * MIB}
