"""What goes wrong on this machine is an error of the call that met it: the worker lives, and the next call succeeds."""

import numpy as np
import pytest

import tensorhub

from .script import run

pytestmark = pytest.mark.processes

BEGIN = """
import threading
import numpy as np
BY = "_start_new_thread" if hasattr(threading, "_start_new_thread") else "_start_joinable_thread"  # from 3.13 on
start = getattr(threading, BY)
mine = threading.main_thread()
def no_threads():
    def refuse(*arguments, **named):
        raise RuntimeError("can't start new thread")
    setattr(threading, BY, refuse)
def threads_again():
    setattr(threading, BY, start)
def files():
    return len(os.listdir("/proc/self/fd"))
def left(before):
    deadline = time.monotonic() + 20
    while (threading.active_count(), files()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return (threading.active_count() - before[0], files() - before[1])
def join(replica, value, size=10_000_000, **options):
    options = dict(dict(timeout=30, call_timeout=30), **options)
    weights = tensorhub.open("m", replica=replica, server=address, **options)
    array = np.full(size, value, dtype=np.uint8)
    weights.register({"w": array})
    return weights, array
"""


@pytest.mark.long
def test_a_process_that_may_start_no_more_threads(server):
    """Each call says so, or does without; afterwards each succeeds."""
    story = """
trainer, array = join("trainer", 1)
reader, target = join("reader", 0)
no_threads()
say(publish=error_of(trainer.publish, 1, timeout=5))
threads_again()
say(published=error_of(trainer.publish, 1))
no_threads()
say(replicate=error_of(reader.replicate, 1, timeout=5), version=reader.version)
threads_again()
say(replicated=error_of(reader.replicate, 1), right=int(target.min()))
no_threads()
say(check=error_of(trainer.check, timeout=5), unpublish=error_of(trainer.unpublish, timeout=3))
threads_again()
say(checked=error_of(reader.check), unpublished=error_of(trainer.unpublish))
with trainer.mutating(version=2):
    array += 1
say(update=error_of(reader.update))
trainer.close()
reader.close()
"""
    ended = run(BEGIN + story, server.address)
    found = ended.only()
    for call in ("publish", "check"):
        assert found[call]["kind"] == "Unavailable", found[call]
        assert "thread" in found[call]["text"]
        assert "ulimit -u" in found[call]["hint"]
    assert found["replicate"]["kind"] in ("Unavailable", "DeadlineExceeded")
    assert found["unpublish"].get("kind") in (None, "DeadlineExceeded", "Unavailable")
    assert found["published"] == {"value": 1}
    assert (found["replicated"], found["right"]) == ({"value": 1}, 1)
    assert found["checked"] == found["unpublished"] == {"value": None}
    assert found["update"] == {"value": 2}
    assert "CRITICAL" not in ended.log


def test_a_process_that_has_no_memory_for_a_moment():
    """A new thread dies before it begins. The call is an error, and with memory the next one succeeds.

    The lease is long: for such a thread the loop waits some seconds before it gives it up.
    """
    story = """
import resource
trainer, array = join("trainer", 1, transports="tcp")
trainer.publish(1)
reader, target = join("reader", 0, transports="tcp")
reader.replicate(1)
with trainer.mutating(version=2):
    array += 1
here = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (here + 20_000, -1))
try:
    update = error_of(reader.update, timeout=8)
finally:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
say(update=update)
say(updated=error_of(reader.update, timeout=20), right=int(target.min()))
"""
    with tensorhub.serve(lease_s=15, report_s=0.2) as patient:
        found = run(BEGIN + story, patient.address).only()
    assert found["update"].get("kind") in (None, "Unavailable", "DeadlineExceeded"), found["update"]
    if found["update"].get("kind") == "DeadlineExceeded":
        assert "this process met a limit" in found["update"]["text"]
    assert (found["updated"], found["right"]) == ({"value": 2}, 2)


SPARE = """
import gc, resource, warnings
warnings.simplefilter("always")
before_all = resource.getrlimit(resource.RLIMIT_NOFILE)
def leave(spare):
    gc.collect()
    taken = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    last = [number for number in range(1 << 10) if number not in taken][spare]
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, before_all[1]))
def free():
    resource.setrlimit(resource.RLIMIT_NOFILE, before_all)
def settled():
    found, same = None, 0
    while same < 5:
        found, before = (threading.active_count(), files()), found
        same = same + 1 if found == before else 0
        time.sleep(0.01)
    return found
def tried(call, spare):
    leave(spare)
    try:
        value = call()
        return value, {"is_retryable": True, "text": ""}
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        return None, {"is_retryable": isinstance(error, tensorhub.Unavailable), "text": text}
    finally:
        free()
"""


def assert_passing(ended, found):
    """Each was done, or is to be tried again, and then it was done; nothing is left of it."""
    assert all(each["first"]["is_retryable"] for each in found), found
    assert all(each["then"] == {"is_retryable": True, "text": ""} for each in found), found
    assert all(each["left"] == [0, 0] for each in found), found
    for word in ("never awaited", "Traceback", "unclosed event loop", "CRITICAL", "Exception ignored"):
        assert word not in ended.log


@pytest.mark.parametrize("what", ["open", "serve", pytest.param("load", marks=pytest.mark.long)])
def test_a_process_with_few_descriptors_to_spare_is_told_to_try_again(server, what):
    """Each number of them in a process that has done nothing yet."""
    call = {
        "open": 'tensorhub.open("m", replica=f"r{spare}", server=address, timeout=3)',
        "serve": "tensorhub.serve()",
        "load": 'tensorhub.load("m@1", server=address, timeout=3)',
    }
    story = f"""
for spare in range(0, 21):
    if spare == 1:
        import tensorhub.api  # with 0 it is not even loaded
    if (child := os.fork()) == 0:
        def call():
            found = {call[what]}
            if hasattr(found, "close"):
                found.close()
        try:
            _, first = tried(call, spare)
            _, then = tried(call, 400)
            baseline = settled()
            _, again = tried(call, spare)
            say(first=first, then=then, again=again, left=left(baseline))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""
    with tensorhub.open("m", replica="trainer", server=server.address) as trainer:
        trainer.register({"w": np.ones(1000, np.float32)})
        trainer.publish(1)
        ended = run(BEGIN + SPARE + story, server.address)
    assert len(ended.said) == 21, ended.log
    assert_passing(ended, ended.said)
    assert ended.said[-1]["again"]["text"] == "", "20 are enough"
