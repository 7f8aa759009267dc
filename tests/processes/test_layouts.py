"""Replicas that cut a tensor differently, in processes of their own: a source is killed while another layout reads."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tensorhub
from forked import Forked, program
from tensorhub import Box

from .process import eventually
from .script import BEFORE

pytestmark = pytest.mark.processes

SHAPE = (8192, 2048)  # 64 MiB
CUT = """
import numpy as np
from tensorhub import Box
name, dim, shards, verb = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
whole = np.arange(8192 * 2048, dtype=np.float32).reshape(8192, 2048)
arrays, boxes = [], []
for shard, part in enumerate(np.split(whole, shards, axis=dim)):
    at = tuple(shard * part.shape[dim] if each == dim else 0 for each in (0, 1))
    boxes.append({"w": [Box("w", whole.shape, at, part.shape)]})
    arrays.append({"w": np.array(part) if verb == "publish" else np.zeros_like(part)})
group = tensorhub.open_group("m", replica=name, shards=shards, server=address, timeout=60, call_timeout=60)
group.register(arrays, boxes=boxes)
say(ready=True)
sys.stdin.readline()
say(version=getattr(group, verb)(1))
sys.stdin.read()
"""


@pytest.mark.parametrize("transports", ["tcp", pytest.param("local", marks=pytest.mark.long)])
def test_a_trainer_is_killed_while_a_replica_of_another_layout_reads(transports):
    """Whatever it had sent by then, the engine that has the version brings the rest, and no element is wrong."""
    target, started = np.zeros(SHAPE, np.float32), []
    with (
        tensorhub.serve(lease_s=8, report_s=0.2) as server,
        tensorhub.open("m", replica="reader", server=server.address, transports=transports) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        reader.register({"w": target}, boxes={"w": [Box("w", SHAPE, (0, 0), SHAPE)]})
        try:
            for cut in (("trainer", 0, 2, "publish"), ("engine", 1, 2, "replicate")):
                started.append(Forked(program(BEFORE + CUT), [server.address, *cut]))
                assert json.loads(started[-1].stdout.readline()) == {"ready": True}
            for each in started:  # all layouts are known by now: tiles are cut for each of them
                each.stdin.write("go\n")
                each.stdin.flush()
                assert json.loads(each.stdout.readline()) == {"version": 1}
            view = tensorhub.connect(server.address)
            filling = pool.submit(reader.replicate, 1, timeout=60)
            eventually(lambda: view.transfers() or filling.done(), "it reads")
            started[0].kill()
            assert filling.result() == 1
            assert (target.ravel() == np.arange(target.size, dtype=np.float32)).all()
        finally:
            for process in started:
                process.close()
