"""The same between processes, over each transport that reaches a device: who is killed, and whose memory goes."""

import os

import pytest
import torch

from processes.script import BEFORE, run
from tensorhub.transport.nixl import probe

pytestmark = pytest.mark.processes

WHY_NO_NIXL = probe.probe().why_not
no_nixl = pytest.mark.skipif(bool(WHY_NO_NIXL), reason=WHY_NO_NIXL or "it is here")
on_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
TRANSPORTS = ["tcp", "cuda", pytest.param("nixl", marks=no_nixl)]  # that reach a device
PLACES = [
    pytest.param("cpu", "tcp", id="cpu-tcp", marks=pytest.mark.long),  # as tests/processes tell
    pytest.param("cpu", "nixl", id="cpu-nixl", marks=no_nixl),
    pytest.param("cuda:0", "tcp", id="cuda-tcp", marks=[pytest.mark.gpu, on_a_device]),
    pytest.param("cuda:0", "cuda", id="cuda-cuda", marks=[pytest.mark.gpu, on_a_device]),
    pytest.param("cuda:0", "nixl", id="cuda-nixl", marks=[pytest.mark.gpu, on_a_device, no_nixl]),
]
everywhere = pytest.mark.parametrize(("device", "way"), PLACES[1:])  # of tcp on the host, tests/processes tell
ALONE = ("env",)  # a Python of its own: a device must not have been looked at before a fork
GROWING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}

WORDS = """
import signal, subprocess, threading
import torch
device, way = sys.argv[2], sys.argv[3]
SIZE = (24 if device == "cpu" else 128) << 20  # 96 MiB; on a device long enough to strike in the middle

def content(version):
    return torch.arange(SIZE, dtype=torch.float32, device=device) % 8191 + version

def join(replica, **options):
    options = {"timeout": 60, "call_timeout": 60, "transports": way or None, **options}
    weights = tensorhub.open("m", replica=replica, server=address, **options)
    tensors = empty()
    weights.register(tensors)
    return weights, tensors

def empty():
    sizes = {"a": SIZE // 3, "b": SIZE - SIZE // 3}
    return {name: torch.zeros(size, device=device) for name, size in sizes.items()}

def write(tensors, version):
    whole = content(version)
    tensors["a"].copy_(whole[: SIZE // 3])
    tensors["b"].copy_(whole[SIZE // 3 :])

def is_right(tensors, version):
    return bool(torch.equal(torch.cat([tensors["a"], tensors["b"]]), content(version)))

def free(tensors):
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(0)
    if device != "cpu":
        torch.cuda.empty_cache()

def midway(weights, act):
    \"\"\"Call it once, when a part of what `weights` reads is there. Over `cuda` the read waits for it.\"\"\"
    if way == "cuda":
        from tensorhub.memory.cuda import CudaStream
        whole, done = CudaStream.copy_from, []
        def copy_from(*arguments, **named):
            made = whole(*arguments, **named)
            if not done:
                done.append(True)
                act()
            return made
        CudaStream.copy_from = copy_from
        return
    def wait():
        while weights.progress[0] == 0 and weights.version is None:
            time.sleep(0.0005)
        act()
    threading.Thread(target=wait).start()

def strike(weights):
    \"\"\"End this process when a part of what it reads is there.\"\"\"
    midway(weights, lambda: os.kill(os.getpid(), signal.SIGKILL))
"""

PEER = """
class Peer:
    \"\"\"Another process: `weights` and `tensors` of a replica, and what it is told to do with them.\"\"\"

    def __init__(self, replica):
        begins = f"weights, tensors = join({replica!r})\\n"
        text = WORDS + begins + "for line in sys.stdin:\\n    exec(line)\\n    say(done=True)"
        command = [sys.executable, "-c", text, *sys.argv[1:]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, line):
        self.ask(line)
        if self.process.stdout.readline() == "":
            raise EOFError(f"it ended with {self.process.wait(60)}")

    def ask(self, line):
        self.process.stdin.write(line + "\\n")
        self.process.stdin.flush()

    def ends(self):
        self.process.stdin.close()
        return self.process.wait(60)
"""


def told(text: str, device: str, way: str, address: str, **options: object) -> dict[str, object]:
    """What a story says that knows these words."""
    whole = f"{WORDS}\nWORDS = {BEFORE + WORDS!r}\n{PEER}\n{text}"
    return run(whole, address, device, way, prefix=() if device == "cpu" else ALONE, **options).only()


GROWN = [
    pytest.param(
        "cuda:0", way, GROWING, id=f"expandable segments-{way or 'default'}", marks=[pytest.mark.gpu, on_a_device]
    )
    for way in ("tcp", "cuda", "")
]


@pytest.mark.parametrize(
    ("device", "way", "allocator"),
    [pytest.param(*place.values, {}, id=place.id, marks=place.marks) for place in PLACES] + GROWN,
)
def test_versions_one_after_another(device, way, allocator, server, monkeypatch):
    """The trainer's tensors move, too: as with an allocator they overlap what was registered before.

    CUDA IPC cannot hand out expandable segments in the old way; torch shares them by file descriptors.
    """
    for name, value in allocator.items():
        monkeypatch.setenv(name, value)
    story = """
trainer = Peer("trainer")
trainer.do("pool = torch.empty(SIZE + 4000, device=device)")
weights, tensors = join("rollout")
seen = []
for version, at in enumerate((None, None, 0, 1000, 0, 500), start=1):
    trainer.do("weights.unpublish()")
    if at is not None:
        trainer.do(f"part = pool[{at}:][:SIZE]; tensors = {{'a': part[: SIZE // 3], 'b': part[SIZE // 3 :]}}")
        trainer.do("weights.register(tensors)")
    trainer.do(f"write(tensors, {version}); weights.publish({version})")
    weights.update()
    seen.append((weights.version, is_right(tensors, version)))
say(seen=seen, ways=list(weights.statistics()["bytes_by_transport"]), code=trainer.ends())
"""
    found = told(story, device, way, server.address)
    assert found["seen"] == [[version, True] for version in range(1, 7)]
    assert found["ways"] == [way or "cuda"]
    assert found["code"] == 0


@everywhere
def test_a_source_that_is_killed_takes_nobody_with_it(device, way, server):
    """Its memory on the device goes with it, in mid-read: the reader lives, and takes the rest from another."""
    story = """
trainer, other = Peer("trainer"), Peer("other")
trainer.do("write(tensors, 1); weights.publish(1)")
other.do("weights.replicate(1)")
for attempt in range(3):
    weights, tensors = join(f"rollout-{attempt}")
    if attempt == 0:
        midway(weights, lambda: (trainer.process.kill(), trainer.process.wait(60)))
    say(**{f"replicate{attempt}": error_of(weights.replicate, 1), f"right{attempt}": is_right(tensors, 1)})
    weights.close()
say(killed=trainer.process.wait(60), code=other.ends())
"""
    found = told(story, device, way, server.address)
    for attempt in range(3):
        assert found[f"replicate{attempt}"] == {"value": 1}
        assert found[f"right{attempt}"] is True
    assert found["killed"] == -9
    assert found["code"] == 0


@everywhere
def test_a_reader_that_is_killed_takes_nobody_with_it(device, way, server):
    story = """
weights, tensors = join("trainer")
write(tensors, 1)
weights.publish(1)
codes = []
for attempt in range(3):
    reader = Peer(f"rollout-{attempt}")
    reader.ask("strike(weights); weights.replicate(1); time.sleep(60)")
    codes.append(reader.process.wait(60))
say(codes=codes, unpublish=error_of(weights.unpublish, timeout=20))
write(tensors, 2)
say(publish=error_of(weights.publish, 2))
late = Peer("late")
late.do("weights.replicate(2)")
late.do("assert is_right(tensors, 2)")
say(code=late.ends())
"""
    found = told(story, device, way, server.address)
    assert found["codes"] == [-9] * 3
    assert "kind" not in found["unpublish"]
    assert found["publish"] == {"value": 2}
    assert found["code"] == 0, "it has read what was published after that"


@pytest.mark.gpu
@on_a_device
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="tests beside it use the device: run `make gpu`")
@pytest.mark.parametrize("way", TRANSPORTS)
def test_memory_of_the_device_that_a_source_gave_back_is_free(way, server):
    """One reader was killed with it open, another has read it by CUDA IPC: neither keeps it."""
    story = """
trainer = Peer("trainer")
trainer.do("write(tensors, 1); torch.cuda.empty_cache(); weights.publish(1)")
reader = Peer("killed")
reader.ask("strike(weights); weights.replicate(1); time.sleep(60)")
say(killed=reader.process.wait(60))
weights, tensors = join("rollout")
weights.replicate(1)
say(right=is_right(tensors, 1))
torch.cuda.empty_cache()
torch.cuda.synchronize()
before = torch.cuda.mem_get_info()[0]
trainer.do("error_of(weights.unpublish); weights.close(); tensors.clear(); torch.cuda.empty_cache()")
closed = torch.cuda.mem_get_info()[0]
code = trainer.ends()
ended = torch.cuda.mem_get_info()[0]
weights.close()
say(code=code, closed=closed - before, ended=ended - before, left=torch.cuda.mem_get_info()[0] - before)
"""
    found = told(story, "cuda:0", way, server.address)
    assert (found["killed"], found["right"], found["code"]) == (-9, True, 0)
    assert found["closed"] > 256 << 20, found  # what others take beside it, such as streams, comes and goes
    assert found["ended"] > 256 << 20, found


@pytest.mark.gpu
@on_a_device
@pytest.mark.parametrize("grows", [False, True], ids=["default", "expandable"])
@pytest.mark.parametrize(
    "deed",
    [
        "tensors['b'][-1] += 1; torch.cuda.synchronize()",
        "free(tensors)",
        "free(tensors); other = torch.full((SIZE,), 9.0, device=device); torch.cuda.synchronize()",
    ],
    ids=["overwritten", "freed", "freed and taken again"],
)
def test_memory_that_changes_while_it_is_read(deed, grows, server, monkeypatch):
    """What came is right, or nothing came. The device goes on for both, and the next version comes."""
    for name, value in GROWING.items() if grows else ():
        monkeypatch.setenv(name, value)
    story = """
trainer = Peer("trainer")
trainer.do("write(tensors, 1); weights.publish(1)")
weights, tensors = join("rollout")
midway(weights, lambda: trainer.do(DEED))
found = error_of(weights.replicate, 1, timeout=8)
say(found=found, is_well="kind" in found or is_right(tensors, 1), is_none="value" in found or weights.version is None)
say(device=float(torch.ones(3, device=device).sum()))
trainer.do("error_of(weights.unpublish); tensors = empty(); weights.register(tensors)")
trainer.do("write(tensors, 2); weights.publish(2)")
say(update=error_of(weights.update, 2), right=is_right(tensors, 2), code=trainer.ends())
"""
    found = told(f"DEED = {deed!r}\n{story}", "cuda:0", "cuda", server.address)
    assert found["is_well"], found
    assert found["is_none"], found
    assert found["device"] == 3
    assert (found["update"], found["right"], found["code"]) == ({"value": 2}, True, 0)
