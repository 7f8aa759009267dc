"""`import tensorhub` is cheap, starts nothing, and knows all its names."""

import subprocess
import sys

import tensorhub
from tensorhub.protocol import errors

LOOK = """
import sys, threading
import tensorhub
heavy = [name for name in ("torch", "aiohttp", "numpy", "asyncio", "msgspec", "xxhash") if name in sys.modules]
assert not heavy, heavy
assert threading.active_count() == 1
assert tensorhub.__version__
dir(tensorhub)
"""

SERVER = """
import sys
import tensorhub.runtime.serving
assert "torch" not in sys.modules and "numpy" not in sys.modules and "xxhash" not in sys.modules
import tensorhub
with tensorhub.serve() as server:
    tensorhub.connect(server.address).status()
assert "torch" not in sys.modules
"""


def run(code):
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_import_loads_nothing_heavy_and_starts_nothing():
    run(LOOK)


def test_a_server_loads_no_torch():
    run(SERVER)


def test_every_name_is_there_and_documented():
    for name in tensorhub.__all__:
        assert getattr(tensorhub, name).__doc__, name
    assert set(tensorhub.__all__) <= set(dir(tensorhub))


def test_every_error_is_a_name_of_the_package():
    for kind in errors.BY_CODE.values():
        assert getattr(tensorhub, kind.__name__) is kind
    assert tensorhub.errors is errors


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(tensorhub, "opem")
