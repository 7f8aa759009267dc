"""Processes of tests that need torch, forked from one that has loaded it: else each start takes seconds of a core.

A fork server of the standard library forks them: none of the test's threads, locks and descriptors are in them. They
are processes as any other: with pipes, killed and stopped by others, and they end as Python ends, modules and all.
"""

import ctypes
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import IO

PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "safetensors.torch",
    "tensorhub.integrations.fsdp",
    "tensorhub.runtime.opening",
    "tensorhub.memory.cuda",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, *PRELOADED])


class Forked:
    """As `subprocess.Popen`, as far as tests need it. `program()` runs with these arguments in `sys.argv`."""

    def __init__(
        self,
        program: Callable[[], object],
        arguments: Sequence[object] = (),
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        inside, self.stdin = _pipe("w")
        out, self.stdout = _pipe("r") if stdout is None else (_lent(stdout.fileno()), None)
        errors = _lent(2 if stderr is None else stderr.fileno())
        words = ["-c", *map(str, arguments)]
        given = (program, words, dict(os.environ if env is None else env), os.getcwd(), inside, out, errors)
        self._process = _context.Process(target=_live, args=given, daemon=True)
        self._process.start()
        for lent in (inside, out, errors):
            lent.close()
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        """None while it lives; minus the signal that killed it."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def close(self) -> None:
        """Kill it, if it lives, and close its pipes."""
        self.kill()
        self.wait(10)
        self.stdin.close()
        if self.stdout is not None:
            self.stdout.close()


def program(text: str) -> Callable[[], object]:
    """What `python -c` runs."""
    return partial(_run_text, text)


def module(name: str) -> Callable[[], object]:
    """What `python -m` runs."""
    return partial(runpy.run_module, name, run_name="__main__")


def run(text: str, arguments: Sequence[object] = (), *, within_s: float) -> "subprocess.CompletedProcess[str]":
    """The lines of a program, run to their end as `python -c` runs them."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = Forked(program(text), arguments, stdout=out, stderr=errors)
        try:
            code = process.wait(within_s)
        finally:
            process.close()
        said, log = (file.seek(0) or file.read().decode(errors="replace") for file in (out, errors))
    return subprocess.CompletedProcess([], code, said, log)


def _pipe(mode: str) -> tuple[Connection, IO[str]]:
    """The end that is lent to the child, and ours."""
    reader, writer = os.pipe()
    theirs, ours = (reader, writer) if mode == "w" else (writer, reader)
    return Connection(theirs, readable=mode == "w", writable=mode == "r"), open(ours, mode)


def _lent(descriptor: int) -> Connection:
    return Connection(os.dup(descriptor), readable=False)


def _live(
    program: Callable[[], object], words: list[str], env: dict[str, str], folder: str, *descriptors: Connection
) -> None:
    """In the child: become what `subprocess` would have started, run, and end as Python does."""
    gc.freeze()  # no collection looks at what was loaded before, nor those at the end: with torch, most of a second
    for number, lent in enumerate(descriptors):
        os.dup2(lent.fileno(), number)
        lent.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = words
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python ends whatever it was
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def _run_text(text: str) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, "<string>", "exec"), main.__dict__)
