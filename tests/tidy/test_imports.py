"""Importing costs nothing: no torch, no aiohttp, no thread, no socket."""

import subprocess
import sys

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

OWN = ("protocol", "server", "worker", "transport", "runtime", "cli")
NO_TORCH = ("tests/sim", *(f"src/tensorhub/{folder}" for folder in OWN))


def look(modules: list[str], heavy: tuple[str, ...]) -> str:
    """What importing these modules in a fresh process brought with it."""
    code = LOOK.format(modules=", ".join(modules), heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_tensorhub_is_free() -> None:
    heavy = ("torch", "aiohttp", "numpy", "asyncio", "matplotlib", "rich", "typer")
    assert look(["tensorhub"], heavy) == "[] [] []"


def test_torch_stays_away() -> None:
    """From the server and the simulator, transports and commands too: in one process, all that they are made of."""
    modules = [source.module.removesuffix(".__main__") for folder in NO_TORCH for source in sources(folder)]
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
