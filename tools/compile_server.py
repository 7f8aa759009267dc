"""Compiles what the reference server decides (`core/server`) with mypyc, which makes C of typed Python.

    python tools/compile_server.py FOLDER     leaves the libraries there, where the package's files would lie

Used by the build of the package (`tools/build_hook.py`) where `TENSORHUB_COMPILE=1`. It takes mypyc, a C compiler and
Python's headers, and one to two minutes. mypyc sees a copy of `core/` in a package that is empty otherwise, so it reads
nothing else. The sources stay as they are: without these libraries the same files run in the interpreter.

It must never: leave a library beside the sources, which Python would go on taking after they have changed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = Path("tensorhub/core")
COMPILED = CORE / "server"
GROUP = "tensorhub_server"  # of it mypyc makes the name of the library that holds all code, beside the package
NEEDS = ("mypy[mypyc]~=2.4.1", "msgspec>=0.19")  # the latter for its types
TIMEOUT_S = 1200.0
LINES, SAID = 12, 400  # of a compiler's complaint: the last lines, and characters of each
LAZY = "warning: Treating generator comprehension as list"  # each is gone through to its end: tests/tidy/eager.py
REMEDY = "It takes a C compiler and Python's headers (gcc, python3-dev); without TENSORHUB_COMPILE nothing is compiled."

BUILD = f"""
from pathlib import Path
from mypyc.build import mypycify
from setuptools import setup

files = sorted(str(path) for path in Path({str(COMPILED)!r}).rglob("*.py"))
extensions = mypycify(["--config-file=", "--strict", *files], group_name={GROUP!r}, opt_level="2")
setup(name={GROUP!r}, packages=[], ext_modules=extensions, script_args=["-q", "build_ext", "--inplace"])
"""


class CannotCompile(Exception):
    """The server could not be compiled; the message says why."""


def compile_into(folder: Path) -> list[Path]:
    """Compile the sources; returns the libraries, relative to `folder`. Raises `CannotCompile`."""
    with tempfile.TemporaryDirectory(prefix="tensorhub-compile-") as name:
        stage = Path(name)
        shutil.copytree(ROOT / "src" / CORE, stage / CORE, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        (stage / CORE.parent / "__init__.py").write_text('"""Empty: mypyc reads `core` alone."""\n')
        _run_mypyc(stage)
        made = sorted(
            path.relative_to(stage) for pattern in ("*.so", f"{CORE}/**/*.so") for path in stage.glob(pattern)
        )
        for library in made:
            (folder / library).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(stage / library, folder / library)
    return made


def _run_mypyc(stage: Path) -> None:
    command = [sys.executable, "-c", BUILD]
    try:
        done = subprocess.run(command, cwd=stage, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"mypyc did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line and not line.endswith(LAZY)]
        shown = "\n".join(line[:SAID] for line in lines[-LINES:])
        raise CannotCompile(f"mypyc, or the C compiler, ended with {done.returncode}:\n{shown}\n{REMEDY}")


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    try:
        made = compile_into(Path(sys.argv[1]).resolve())
    except CannotCompile as error:
        print(f"the server's decisions cannot be compiled: {error}", file=sys.stderr)
        return 1
    print(f"compiled: {len(made)} libraries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
