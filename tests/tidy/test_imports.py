"""Importing costs nothing: no torch, no aiohttp, no thread, no socket."""

import subprocess
import sys

import pytest

import tensorhub
from tensorhub.protocol import errors

from .sources import sources

LOOK = """
import socket, sys, threading
made = []
sys.addaudithook(lambda event, args: made.append(event) if event in ("socket.__new__", "subprocess.Popen") else None)
import {modules}
heavy = [name for name in {heavy} if name in sys.modules]
threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
print(heavy, threads, made)
"""

NO_TORCH = (
    "src/tensorhub/protocol",
    "src/tensorhub/server",
    "src/tensorhub/worker",
    "tests/sim",
    "src/tensorhub/transport",
    "src/tensorhub/runtime",
    "src/tensorhub/cli",
)  # the server and the simulator never load it


def look(modules: list[str], heavy: tuple[str, ...]) -> str:
    """What importing these modules in a fresh process brought with it."""
    code = LOOK.format(modules=", ".join(modules), heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_tensorhub_is_free() -> None:
    heavy = ("torch", "aiohttp", "numpy", "asyncio", "matplotlib", "rich", "typer")
    assert look(["tensorhub"], heavy) == "[] [] []"


@pytest.mark.parametrize("folder", NO_TORCH)
def test_torch_stays_away(folder: str) -> None:
    modules = [source.module.removesuffix(".__main__") for source in sources(folder)]
    assert look(modules, ("torch",)) == "[] [] []"


def test_help_is_quick() -> None:
    """The command line loads nothing of a command before it is called."""
    assert look(["tensorhub.cli.main"], ("torch", "aiohttp", "numpy", "matplotlib", "tests.sim")) == "[] [] []"


def test_every_name_is_there_and_documented() -> None:
    for name in tensorhub.__all__:
        assert getattr(tensorhub, name).__doc__, name
    assert set(tensorhub.__all__) <= set(dir(tensorhub))
    assert all(getattr(tensorhub, kind.__name__) is kind for kind in errors.BY_CODE.values())
    assert not hasattr(tensorhub, "opem")
