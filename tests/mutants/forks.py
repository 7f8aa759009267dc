"""Work done by processes that are forked for it, some at a time: each leaves its answer as JSON."""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(work: Callable[[], object], answer: Path) -> int:
    """Do the work in a process of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        answer.write_text(json.dumps(work()))
    except SystemExit as refusal:
        answer.write_text(json.dumps({"refused": str(refusal)}))
    except BaseException:  # noqa: BLE001 (the top of a process: it is said, and ends it)
        answer.write_text(json.dumps({"broken": traceback.format_exc()}))
        code = 1
    finally:
        os._exit(code)


def run_all(
    works: list[Callable[[], object]], jobs: int, said: Callable[[int, object], None], until: float = float("inf")
) -> None:
    """Run them, `jobs` at a time; `said(index, answer)` as each ends. None: its process was killed.

    Nothing new begins after `until`, of the monotonic clock.
    """
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, int] = {}
        for index in range(len(works) + jobs):
            if index < len(works) and time.monotonic() < until:
                running[fork(works[index], Path(folder) / str(index))] = index
            while running and (len(running) >= jobs or index >= len(works)):
                pid, _ = os.wait()
                over = running.pop(pid)
                file = Path(folder) / str(over)
                said(over, json.loads(file.read_text()) if file.exists() else None)
