"""Starts the laboratory's workers fast: one process has loaded everything, and each worker is forked from it.

    python -m bench.lab.nursery [torch]

Loading Python's libraries costs a second of processor for each worker, which is what is being measured around; a fork
costs milliseconds. Commands come as lines of JSON on standard input, news leave on standard output. It has one thread,
so that a fork is safe, and it and all that it has started end with its standard input.
"""

import os
import select
import signal
import sys
from typing import NoReturn

import msgspec

from .ettr.plan import Task
from .job import Job
from .namespaces import die_with_parent, enter


class Start(msgspec.Struct, frozen=True):
    """Start a worker in a network namespace, or where the nursery is; its output goes to a file."""

    job: Job | Task
    namespace: str  # "": none
    log: str


class News(msgspec.Struct, frozen=True):
    """A worker has started, or ended with that status (negative: by that signal)."""

    name: str
    pid: int
    status: int | None = None


def main() -> None:
    """Until standard input ends."""
    die_with_parent(signal.SIGKILL)
    from . import worker  # everything that a worker needs
    from .ettr import worker as ettr_worker

    if "torch" in sys.argv[1:]:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    names: dict[int, str] = {}
    decoder, rest = msgspec.json.Decoder(Start), b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(names)
        if 0 in ready:
            text = os.read(0, 65536)
            if not text:
                return
            *lines, rest = (rest + text).split(b"\n")
            for line in lines:
                start = decoder.decode(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    _live(start, ettr_worker.main if isinstance(start.job, Task) else worker.main)
                names[pid] = start.job.name
                _tell(News(start.job.name, pid))


def _reap(names: dict[int, str]) -> None:
    while names:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _tell(News(names.pop(pid), pid, os.waitstatus_to_exitcode(status)))


def _tell(news: News) -> None:
    os.write(1, msgspec.json.encode(news) + b"\n")


def _live(start: Start, work: "object") -> NoReturn:
    """In the child."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for here, standard in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(here, standard)
        if start.namespace:
            enter(start.namespace)
        assert callable(work)
        work(start.job)
        status = 0
    except BaseException:  # noqa: BLE001 - the top of a process: told to its log
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
