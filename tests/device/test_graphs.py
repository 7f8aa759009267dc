"""CUDA graphs beside TensorHub: replayed over tensors that are filled anew, and captured while others read."""

import pytest
import torch

from processes.script import BEFORE, run

from .test_processes import ALONE, PEER, WHY_NO_NIXL, WORDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SIZE = 3_000_000
CAPTURE = """
def captured(meanwhile):
    \"\"\"Capture a graph in the strictest mode, `meanwhile()` in its middle. Whether it computes what it should.\"\"\"
    inputs, graph = torch.zeros(1000, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = inputs + 1
        meanwhile()
        outputs *= 2
    inputs.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    return bool((outputs == 8).all())

def until(is_so, within_s=20):
    ends_at = time.monotonic() + within_s
    while not is_so() and time.monotonic() < ends_at:
        time.sleep(0.001)
    return is_so()
"""


def told(text, server, way="tcp"):
    """What a program says that knows the words of the stories between processes, and `captured`."""
    words = WORDS + CAPTURE
    whole = f"{words}\nWORDS = {BEFORE + words!r}\n{PEER}\n{text}"
    return run(whole, server.address, "cuda:0", way, prefix=ALONE).only()


def test_a_graph_computes_with_each_new_version(join):
    weight, target = torch.zeros(SIZE, device="cuda:0"), torch.full((SIZE,), 7.0, device="cuda:0")
    trainer, rollout = join("trainer", {"w": weight}), join("rollout", {"w": target})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = target * 2
    for version in range(3):
        with trainer.mutating(version=version):
            weight.fill_(version)
        assert rollout.update() == version
        graph.replay()
        assert bool((doubled == 2 * version).all())


@pytest.mark.processes
@pytest.mark.parametrize("way", ["tcp", "cuda"])
def test_a_graph_is_captured_while_another_process_reads(way, server):
    """An engine captures its graphs when it has just loaded its weights, which is when others load them from it."""
    story = """
weights, tensors = join("trainer")
write(tensors, 1)
weights.publish(1)
reader = Peer("rollout")
is_captured = captured(lambda: reader.do("weights.replicate(1); assert is_right(tensors, 1)"))
say(captured=is_captured, code=reader.ends())
"""
    assert told(story, server, way) == {"captured": True, "code": 0}


@pytest.mark.processes
@pytest.mark.skipif(bool(WHY_NO_NIXL), reason=WHY_NO_NIXL or "it is here")
def test_who_reads_over_nixl_while_its_source_captures_has_all_and_leaves_it_a_source(server):
    """Whether the capture lasts is not promised: NIXL has a thread of its own (docs/status.md)."""
    story = """
weights, tensors = join("trainer")
write(tensors, 1)
weights.publish(1)
reader, late = Peer("rollout"), Peer("late")
try:
    say(captured=captured(lambda: reader.do("weights.replicate(1); assert is_right(tensors, 1)")))
except RuntimeError as error:
    say(captured=str(error).splitlines()[0])
code = reader.ends()
late.do("weights.replicate(1); assert is_right(tensors, 1)")
say(codes=[code, late.ends()], right=is_right(tensors, 1))
"""
    found = told(story, server, "nixl")
    assert (found["codes"], found["right"]) == ([0, 0], True)
    assert found["captured"] is True or "captur" in found["captured"]


@pytest.mark.processes
def test_a_graph_is_captured_while_this_process_copies_ahead(server):
    """A trainer beside which no other reliable worker is copies what it has published while it rests."""
    story = """
weights, tensors = join("trainer")
write(tensors, 1)
weights.publish(1)
copied = lambda: weights.statistics()["offloaded_bytes"]
before, saw = copied(), []
is_captured = captured(lambda: saw.append(until(lambda: copied() >= 4 * SIZE)))
say(before=before, captured=is_captured, saw=saw)
weights.unpublish()
late = Peer("late")
late.do("weights.replicate(1)")
late.do("assert is_right(tensors, 1)")
say(code=late.ends())
"""
    assert told(story, server) == {"before": 0, "captured": True, "saw": [True], "code": 0}


@pytest.mark.processes
@pytest.mark.parametrize("whose", ["its own", "another thread's"])
def test_a_call_is_refused_by_name_only_where_its_own_stream_captures(whose, server):
    """A call waits for its caller's stream and the default one: neither it nor the capture minds other streams."""
    story = """
trainer = Peer("trainer")
trainer.do("write(tensors, 1); weights.publish(1)")
weights, tensors = join("rollout")
found = []
def update():
    found.append(error_of(weights.replicate, 1, timeout=20))
def elsewhere():
    thread = threading.Thread(target=update)
    thread.start()
    thread.join()
is_captured = captured(update if WHOSE == "its own" else elsewhere)
say(captured=is_captured, during=found.pop(), after=error_of(weights.replicate, 1), right=is_right(tensors, 1),
    code=trainer.ends())
"""
    found = told(f"WHOSE = {whose!r}\n{story}", server)
    if whose == "its own":
        assert found["during"]["kind"] == "UsageError", found
        assert "graph is being captured" in found["during"]["text"]
    else:
        assert found["during"] == {"value": 1}
    assert (found["captured"], found["after"], found["right"], found["code"]) == (True, {"value": 1}, True, 0)
