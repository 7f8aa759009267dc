"""Runs a few lines of a user's program as a process of its own, beside a reference server, and says how it ended."""

import json
import subprocess
import sys
from dataclasses import dataclass

import forked

BEFORE = """
import gc, json, os, sys, time
import tensorhub
address = sys.argv[1]

def say(**found):
    print(json.dumps(found), flush=True)

def error_of(call, *arguments, **named):
    try:
        return {"value": call(*arguments, **named)}
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), "hint": getattr(error, "hint", None) or ""}
"""


@dataclass(frozen=True)
class Ended:
    """What a program said, line by line, and how it ended: its exit code, or minus the signal that killed it."""

    code: int
    said: tuple[dict[str, object], ...]
    log: str

    def only(self) -> dict[str, object]:
        """All that it said, of a program that ended well."""
        assert self.code == 0, f"ended with {self.code}, having said {self.said}\n{self.log[-4000:]}"
        return {name: value for line in self.said for name, value in line.items()}


def run(text: str, address: str, *arguments: str, within_s: float = 90.0, prefix: tuple[str, ...] = ()) -> Ended:
    """Run it to its end. It may use `say(name=value)` and `error_of(call, …)`.

    `prefix`: words of a command that starts a Python of its own for it, as `env` does.
    """
    if prefix:
        command = [*prefix, sys.executable, "-c", BEFORE + text, address, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    else:
        ended = forked.run(BEFORE + text, [address, *arguments], within_s=within_s)
    lines = tuple(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    return Ended(ended.returncode, lines, ended.stderr)
