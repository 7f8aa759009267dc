"""Format, lint and types, by the tools that everybody has. `make check` shows their own output."""

import subprocess
import sys
from pathlib import Path

import pytest

from .sources import ROOT

BIN = Path(sys.executable).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", ["ruff format --check .", "ruff check --output-format concise .", "mypy"])
def test_tool_finds_nothing(command: str) -> None:
    name, *arguments = command.split()
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed beside this Python: make setup")
    done = subprocess.run([BIN / name, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{command}\n{done.stdout}{done.stderr}", pytrace=False)
