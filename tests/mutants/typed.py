"""The types as a judge: a change that `mypy` does not let pass never gets as far as a test."""

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

from .substitute import CORE, PACKAGE, ROOT

BY = "mypy"
FOLDER = ROOT / "out" / "mutants" / "mypy"  # what it remembers of files that are as they were


def complaint(file: str, text: bytes) -> str:
    """What it says of the core with this text in place of that file; nothing, if the types agree."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(suffix=".py") as mutant, open(FOLDER / "lock", "w") as lock:
        Path(mutant.name).write_bytes(text)
        fcntl.flock(lock, fcntl.LOCK_EX)  # one asks at a time
        shadow = ["--shadow-file", str(PACKAGE / file), mutant.name]
        packages = [f"--package=tensorhub.{folder}" for folder in CORE]
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(FOLDER), *shadow, *packages]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # neither fine nor wrong
        raise SystemExit(f"mypy does not run: {done.stdout}{done.stderr}")
    return next((line for line in done.stdout.splitlines() if ": error: " in line), "")
