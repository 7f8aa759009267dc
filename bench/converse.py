"""How a child process of the benchmarks is told what to do: a command in JSON a line, over stdin; answers over stdout.

Every command runs in a thread of its own, so that what one does can be watched with another. Where `BENCH_STACKS`
names a file, a command that takes long writes there where each thread stands.
"""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable

from .serve import die_with_parent

LONG_S = 8.0  # since the last command


def _carry_out(actor: object, command: dict[str, object], say: Callable[[dict[str, object]], None]) -> None:
    answer: dict[str, object] = {"id": command.pop("id")}
    try:
        answer["value"] = getattr(actor, str(command.pop("do")))(**command)
    except BaseException as error:  # noqa: BLE001 - the top of a thread: told to the parent
        answer["error"] = f"{type(error).__name__}: {error}"
    say(answer)


def converse(actor: object) -> None:
    """Carry out what stdin says, by the actor's methods, until it ends."""
    die_with_parent()
    stacks = os.environ.get("BENCH_STACKS")
    saying = threading.Lock()

    def say(answer: dict[str, object]) -> None:
        with saying:
            print(json.dumps(answer), flush=True)

    say({"id": 0, "value": os.getpid()})
    for line in sys.stdin:
        if stacks:
            faulthandler.dump_traceback_later(LONG_S, file=open(stacks, "a"))  # noqa: SIM115 - it writes there later
        threading.Thread(target=_carry_out, args=(actor, json.loads(line), say), daemon=True).start()
    os._exit(0)
