"""Two processes, a source and a reader, with a pipe between them; the frame of every peer's program.

The bytes are the same in each: noise in the source, zeros in the reader, both touched before, and compared by SHA-256
after the last transfer. A first transfer is not counted.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

PATIENCE_S = 90.0


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def content(size_bytes: int) -> np.ndarray:
    noise = np.random.default_rng(7).integers(0, 256, size=min(size_bytes, 8 << 20), dtype=np.uint8)
    return np.resize(noise, size_bytes)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(memoryview(array)).hexdigest()


def told(pipe: Connection) -> object:
    """The next word of the other side, within a limit."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("the other process says nothing")
    return pipe.recv()


class Timing:
    """Around each transfer, on both sides: `with timing: ...`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def __enter__(self) -> None:
        self._cpu = cpu_s()
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.monotonic() - self._began)
        self.cpu.append(cpu_s() - self._cpu)


Side = Callable[[Connection, int, int], dict[str, object]]


def _run(side: Side, pipe: Connection, size_bytes: int, transfers: int, out: Connection) -> None:
    try:
        out.send(side(pipe, size_bytes, transfers))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        out.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    out.close()
    os._exit(0)  # whatever threads a library has left


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64 << 20)
    parser.add_argument("--repeat", type=int, default=2)
    return parser.parse_args()


def finish(answer: dict[str, object]) -> None:
    """Say it and go, past whatever a library would still do."""
    print(json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)


def main(source: Side, reader: Side, note: str = "") -> None:
    """Run both sides and print what they found."""
    given = arguments()
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    outs = [context.Pipe(duplex=False) for _ in range(2)]
    sides = [
        context.Process(target=_run, args=(side, ends[i], given.size, given.repeat + 1, outs[i][1]), daemon=True)
        for i, side in enumerate((source, reader))
    ]
    for process in sides:
        process.start()
    found: list[dict[str, object]] = []
    for i in (1, 0):
        if not outs[i][0].poll(PATIENCE_S):
            found.append({"error": f"no end within {PATIENCE_S:.0f} s"})
        else:
            found.append(outs[i][0].recv())
        if "error" in found[-1]:
            break
    for process in sides:
        process.kill()
        process.join(5)
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        finish({"error": errors[0]})
    reads, serves = found
    if reads.get("digest") != serves.get("digest"):
        finish({"error": "the bytes that came are not those that were sent"})
    finish(
        {
            "seconds": reads["seconds"][1:],
            "reader_cpu_s": reads["cpu"][1:],
            "source_cpu_s": serves["cpu"][1:],
            "note": note,
        }
    )
