"""The native mover built with the address and undefined-behaviour sanitizers, under the tests that use it most.

They run in a Python of their own, which loads the sanitizers' library before anything else: whatever the mover touches
that is not its own ends that process with a report. Malloc is plain, so that every piece of memory has its red zone.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorhub.transport.native import build, load

OPTIONS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
HERE = Path(__file__).parent
RUN = """
import pathlib, sys
from tensorhub.transport.native import build, load
build.LIBRARY = pathlib.Path(sys.argv[1])
assert load.library() is not None, load.why_not()
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library, and what must be loaded before it."""
    command = build.system_compiler()
    if command is None:
        pytest.skip("no C compiler here")
    made = tmp_path_factory.mktemp("sanitized") / "mover.so"
    try:
        build.compile_to(made, command, *OPTIONS)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{command[0]} has no sanitizers: {error.stderr.splitlines()[0]}")
    asked = [*command, "-print-file-name=libasan.so"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{command[0]} has no libasan.so to load beforehand")
    return made, runtime


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tests",
    [
        ["test_native_fuzz.py"],
        ["test_native.py", "-k", "not build"],
        ["test_tiles_bounds.py"],
        ["test_tiles.py", "-k", "tcp-lending-2 or local-3 or local-mapped-3"],
        ["test_contract.py", "-k", "tcp-lending-2 or local-3 or local-mapped-3"],
    ],
    ids=lambda tests: tests[0],
)
def test_nothing_is_touched_that_is_not_its_own(sanitized: tuple[Path, str], tests: list[str]) -> None:
    library, runtime = sanitized
    environ = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        "FUZZ_ROUNDS": os.environ.get("FUZZ_ROUNDS", "900"),
    }
    environ.pop(load.VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library), str(HERE / tests[0]), *tests[1:]],
        env=environ,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
