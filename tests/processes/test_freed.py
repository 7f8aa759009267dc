"""Storage that is freed while it is published, as FSDP does between steps: nobody crashes, and nobody takes it for it.

`untyped_storage().resize_(0)` gives the memory back to the kernel although tensors still name it, and a file that was
mapped can be cut short: whoever reads there dies of it, unless the kernel does the reading.
"""

import pytest

from .script import run

pytestmark = pytest.mark.processes

BEGIN = """
import torch
MIB = 1 << 20
company = tensorhub.open("m", replica="company", server=address)  # reliable: beside it nothing is copied ahead
def free(tensor):
    tensor.untyped_storage().resize_(0)

def join(replica, value, **options):
    weights = tensorhub.open("m", replica=replica, server=address, timeout=30, call_timeout=30, **options)
    tensors = {name: torch.full((8 * MIB,), value) for name in ("kept", "freed")}  # 32 MiB each
    weights.register(tensors)
    return weights, tensors
"""


def test_unpublish_of_the_last_copy_says_what_was_lost_and_the_trainer_goes_on(server):
    story = """
weights, tensors = join("trainer", 1.0)
weights.publish(1)
free(tensors["freed"])
say(unpublish=error_of(weights.unpublish))
tensors = {name: torch.full((8 * MIB,), 2.0) for name in tensors}
weights.register(tensors)
with weights.mutating(version=2):
    tensors["kept"] += 1
say(version=weights.version, check=error_of(weights.check))
"""
    found = run(BEGIN + story, server.address).only()
    assert found["unpublish"]["kind"] == "NotDrained"
    assert "'freed'" in found["unpublish"]["text"]
    assert "version 1" in found["unpublish"]["text"]
    assert found["version"] == 2
    assert found["check"] == {"value": None}


@pytest.mark.long
def test_what_was_copied_ahead_is_kept_though_it_is_freed_then(server):
    story = """
company.close()
weights, tensors = join("trainer", 1.0)
weights.publish(1)
deadline = time.monotonic() + 20
while not weights.statistics()["offloaded_bytes"] and time.monotonic() < deadline:
    time.sleep(0.02)
free(tensors["freed"])
say(unpublish=error_of(weights.unpublish))
reader, target = join("reader", 0.0)
say(replicate=error_of(reader.replicate, 1), is_right=bool((target["freed"] == 1.0).all()))
"""
    found = run(BEGIN + story, server.address).only()
    assert found == {"unpublish": {"value": None}, "replicate": {"value": 1}, "is_right": True}


@pytest.mark.parametrize("transports", ["tcp", "local"])
def test_a_reader_takes_nothing_from_there(server, transports):
    story = f"""
trainer, tensors = join("trainer", 1.0, transports="{transports}")
trainer.publish(1)
reader, target = join("reader", 0.0, transports="{transports}")  # before: it must not get the memory that is freed
free(tensors["freed"])
say(replicate=error_of(reader.replicate, 1, timeout=5), version=reader.version)
reader.close(timeout=1)
say(unpublish=error_of(trainer.unpublish))
trainer.register(target)
say(again=error_of(trainer.publish, 2))
"""
    ended = run(BEGIN + story, server.address)
    found = ended.only()
    kinds = ("SourceLost", "TransportMissing", "DeadlineExceeded", "VersionUnavailable", "CorruptTransfer")
    assert found["replicate"]["kind"] in kinds
    is_reused = found["replicate"]["kind"] == "CorruptTransfer"  # the trainer has put something else there since
    if transports == "tcp" and not is_reused:  # the source has read; over `local` it hears nothing of what readers see
        assert "can no longer be read or written: it was freed, of m/1/0" in ended.log
    assert found["version"] is None
    assert found["unpublish"]["kind"] == "NotDrained"
    assert found["again"] == {"value": 2}


def test_memory_is_freed_while_the_native_mover_reads_it(server):
    """Whenever that is: what arrived whole by then counts, and nothing else does."""
    story = """
import threading
trainer, tensors = join("trainer", 1.0, transports="tcp")
trainer.publish(1)
reader, target = join("reader", 0.0, transports="tcp")
begun, found = threading.Event(), {}
def read():
    begun.set()
    found.update(error_of(reader.replicate, 1, timeout=5))
thread = threading.Thread(target=read)
thread.start()
begun.wait()
while not target["kept"].any() and thread.is_alive():
    pass
for tensor in tensors.values():
    free(tensor)
thread.join()
say(replicate=found, version=reader.version, is_right=all(bool((t == 1.0).all()) for t in target.values()))
"""
    found = run(BEGIN + story, server.address).only()
    if found["version"] is None:
        assert found["replicate"].get("kind") in ("SourceLost", "DeadlineExceeded", "VersionUnavailable")
    else:
        assert found["replicate"] == {"value": 1}
        assert found["is_right"]


def test_a_mapped_file_that_is_cut_short(server, tmp_path):
    """Its pages are there and are not: SIGBUS, for who reads them himself."""
    story = """
import numpy as np
path = sys.argv[2]
with open(path, "wb") as file:
    file.truncate(16 << 20)
company = tensorhub.open("m", replica="company", server=address)  # reliable: beside it nothing is copied ahead
weights = tensorhub.open("m", replica="trainer", server=address, timeout=30, call_timeout=30)
weights.register({"mapped": np.memmap(path, dtype=np.uint8, mode="r+"), "kept": np.ones(1 << 20)})
weights.publish(1)
os.truncate(path, 0)
say(check=error_of(weights.check), unpublish=error_of(weights.unpublish))
say(publish=error_of(weights.publish, 2))
"""
    found = run(story, server.address, str(tmp_path / "weights")).only()
    assert found["check"]["kind"] == "NotDrained"
    assert "'mapped'" in found["check"]["text"]
    assert found["unpublish"]["kind"] == "NotDrained"
    assert found["publish"]["kind"] == "UsageError"
    assert "'mapped'" in found["publish"]["text"]


@pytest.mark.parametrize(
    ("last_look", "told"), [("settle", "before they could be"), ("settle_to_fill", "while they were")]
)
def test_a_host_copy_is_not_written_where_the_tensors_were(server, last_look, told):
    """What was fetched ahead lies beside them; the call fails at once, and the process lives.

    Nothing else is tried: by then anything may be where the tensors were, even the stack of a thread.
    """
    story = f"""
from tensorhub.memory.registration import Registration
trainer, tensors = join("trainer", 1.0)
trainer.publish(1)
reader, target = join("reader", 0.0, prefetch="always")
reader.replicate(1)
with trainer.mutating(version=2):
    tensors["kept"] += 1
def ahead():
    replicas = tensorhub.connect(address).replicas("m")
    return [v for replica in replicas if replica.name == "reader" for worker in replica.workers for v in worker.copies]
while 2 not in ahead():
    time.sleep(0.05)
look, begun = Registration.{last_look}, []
def free_then(self):
    look(self)
    begun.append(self)
    free(target["freed"])
Registration.{last_look} = free_then
say(update=error_of(reader.update, 2, timeout=10), version=reader.version, times=len(begun))
"""
    found = run(BEGIN + story, server.address).only()
    assert found["update"]["kind"] == "UsageError"
    assert told in found["update"]["text"]
    assert "'freed'" in found["update"]["text"]
    assert found["version"] is None
    assert found["times"] == 1


@pytest.mark.parametrize("transports", ["tcp", "local"])
def test_a_read_is_not_begun_into_tensors_that_were_freed(server, transports):
    """Between the look at the beginning of the call and the first byte there is time to free them."""
    story = f"""
from tensorhub.memory.registration import Registration
trainer, tensors = join("trainer", 1.0, transports="{transports}")
trainer.publish(1)
reader, target = join("reader", 0.0, transports="{transports}")
settle = Registration.settle
def free_first(self):
    settle(self)
    free(target["freed"])
Registration.settle = free_first
say(replicate=error_of(reader.replicate, 1, timeout=10), version=reader.version)
"""
    found = run(BEGIN + story, server.address).only()
    assert found["replicate"]["kind"] == "UsageError"
    assert "before they could be filled: 'freed'" in found["replicate"]["text"]
    assert found["version"] is None
