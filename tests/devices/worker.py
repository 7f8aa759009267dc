"""A worker whose tensors lie on the stand-in device, in a process of its own: does what its standard input says.

A line is `{"id": 1, "text": "publish(1)"}`, an expression or a statement over the names below; it runs in a thread of
its own, and is answered by a line with its value, or with the kind and the text of its error. The process ends when its
input does; until then it lives through one story after another.
"""

import gc
import hashlib
import json
import os
import sys
import threading
from functools import partial

import numpy as np

import tensorhub
from tensorhub.runtime import transports
from tensorhub.transport import cuda
from transport import stand_in

from . import device

SIZES = {"a": 5 * (1 << 18) + 4096, "b": 11 * (1 << 18) + 1000}  # of the tensors: a chunk lies on both
CHUNK_BYTES = 1 << 18
SIZE_BYTES = sum(SIZES.values())
SILENCE_S = 1.5
PATIENCE_S = 30.0  # for what must happen; no promise is measured by it

tensors = {}
weights = None
held, released, spoiled = threading.Event(), threading.Event(), threading.Event()


def content(version):
    """The bytes of a version, by tensor."""
    numbers = np.random.default_rng(version)
    return {name: numbers.bytes(size_bytes) for name, size_bytes in SIZES.items()}


def digest_of(parts):
    """By no means of the product's."""
    found = hashlib.blake2b()
    for name in SIZES:
        found.update(parts[name])
    return found.hexdigest()


def join(replica, server, transports, cannot):
    """Open, and register tensors on the device."""
    global weights
    stand_in.cannot.update(cannot)
    options = {"timeout": PATIENCE_S, "call_timeout": PATIENCE_S, "chunk_bytes": CHUNK_BYTES}
    weights = tensorhub.open("m", replica=replica, server=server, transports=transports, **options)
    register()


def register():
    """Other tensors than those before."""
    global tensors
    tensors = {name: device.empty(size_bytes) for name, size_bytes in SIZES.items()}
    weights.register(tensors)


def write(version):
    for name, data in content(version).items():
        device.bytes_of(tensors[name])[:] = data


def publish(version):
    write(version)
    return weights.publish(version)


def free():
    """What an engine does that gives up its weights while they are published."""
    for tensor in tensors.values():
        device.free(tensor)


def found():
    """The version, and the digest of what is there."""
    digest = digest_of({name: device.bytes_of(tensor) for name, tensor in tensors.items()})
    return {"version": weights.version, "digest": digest}


def used():
    gc.collect()
    return list(device.used().items())


def hold(kind=device.ARRIVE, start=SIZE_BYTES // 2, after=0):
    """Copies of that kind from this byte on, all but so many of them, wait until `release()`."""
    left = list(range(after))

    def wait(which, first, copied):
        if which == kind and first >= start:
            if left:
                return left.pop()
            held.set()
            assert released.wait(PATIENCE_S), "nobody has released the copies that a test holds"

    device.hooks.append(wait)


def wait_held():
    assert held.wait(PATIENCE_S), "no copy has come to where the test holds it"


def release():
    released.set()


def flip(kind, start=SIZE_BYTES // 2):
    """A byte of the first copy from there on is another one than was copied."""

    def spoil(which, first, copied):
        if which == kind and first >= start and not spoiled.is_set():
            spoiled.set()
            copied[len(copied) // 3] ^= 1

    device.hooks.append(spoil)


def leave():
    """Close, give up the tensors, and be as before the first story."""
    if weights is not None:
        weights.close(timeout=5)
    forget()
    device.hooks.clear()
    device.opened.clear()
    stand_in.cannot.clear()
    for event in (held, released, spoiled):
        event.clear()


def forget():
    global weights
    weights = None
    tensors.clear()


def main():
    """Until the input ends."""
    device.install()
    transports.TcpSettings = partial(
        transports.TcpSettings, silence_s=SILENCE_S, send_buffer_bytes=1 << 16, receive_buffer_bytes=1 << 16
    )
    cuda.CudaSettings = partial(cuda.CudaSettings, silence_s=SILENCE_S, window_bytes=2 * CHUNK_BYTES)
    writing = threading.Lock()

    def say(**answer):
        with writing:
            print(json.dumps(answer), flush=True)

    def carry_out(number, text):
        try:
            try:
                code, run = compile(text, "<told>", "eval"), eval
            except SyntaxError:
                code, run = compile(text, "<told>", "exec"), exec
            say(id=number, value=run(code, globals()))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            say(id=number, kind=type(error).__name__, text=str(error))

    say(id=0, value=os.getpid())
    for line in sys.stdin:
        told = json.loads(line)
        threading.Thread(target=carry_out, args=(told["id"], told["text"]), daemon=True).start()


if __name__ == "__main__":
    main()
