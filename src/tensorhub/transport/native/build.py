"""Makes the mover out of its C files: with the system's compiler, or with one that pip has brought.

    python src/tensorhub/transport/native/build.py          makes it where it is missing or made of other sources

Used by the build of the package (`tools/build_hook.py`) and by `tools/setup`. It needs nothing but Python, so it must
not import the rest of the package. `TENSORHUB_BUILD` chooses: `auto` (also when unset) takes the system's compiler, or
else ziglang where it is installed; `cc` takes only the system's; `zig` only ziglang; `zig-aarch64` and `zig-x86_64`
make it for that architecture; `no` makes nothing.

It must never: fail the build of the package. Without the library everything works, more slowly.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "_mover.so"
REASON = ".reason"  # beside the library that could not be made: why
MACHINES = ("x86_64", "aarch64")  # that ziglang can make it for, wherever it runs
CHOICES = ("auto", "cc", "zig", *(f"zig-{machine}" for machine in MACHINES), "no")
COMPILERS = ("cc", "gcc", "clang")
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-pthread")
FAST = ("-O3",)
TIMEOUT_S = 300.0  # 2 s with gcc; ziglang takes half a minute the first time, when it makes its own C library
OLD_GLIBC = "2.17"  # the oldest that wheels are made for


def sources() -> list[Path]:
    """The C files, in order."""
    return sorted(HERE.glob("*.c"))


def fingerprint() -> str:
    """Of all that the library is made of. It is in the library too, so that a stale one is found out."""
    files = [*sources(), *sorted(HERE.glob("*.h"))]
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def _chosen() -> str:
    found = os.environ.get("TENSORHUB_BUILD", "").strip().lower() or "auto"
    return found if found in CHOICES else "auto"


def choice() -> str:
    """The value of `TENSORHUB_BUILD`, without an architecture."""
    return _chosen().partition("-")[0]


def machine() -> str:
    """The architecture that the library is made for."""
    return _chosen().partition("-")[2] or platform.machine()


def system_compiler() -> list[str] | None:
    """The one that `CC` names, or else the usual ones."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named if shutil.which(named[0]) else None
    return next(([found] for name in COMPILERS if (found := shutil.which(name))), None)


def compiler() -> list[str] | None:
    """The command that compiles here, as chosen; None: there is none."""
    if sys.platform != "linux" or choice() == "no":
        return None
    if choice() != "zig" and (found := system_compiler()) is not None:
        return found
    if choice() != "cc" and importlib.util.find_spec("ziglang") is not None:
        target = f"{machine()}-linux-gnu.{OLD_GLIBC}"
        return [sys.executable, "-m", "ziglang", "cc", "-target", target]
    return None


def compile_to(target: Path, command: Sequence[str], *options: str) -> None:
    """Make the library. Raises `OSError` or `subprocess.SubprocessError` if that does not work."""
    made = target.with_suffix(f".{os.getpid()}.new")
    define = f'-DSOURCES="{fingerprint()}"'
    try:
        subprocess.run(
            [*command, *STRICT, *(options or FAST), define, "-shared", "-o", str(made), *map(str, sources())],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        made.replace(target)  # at once: a process that has the old one open keeps it
    finally:
        made.unlink(missing_ok=True)


def stamp() -> str:
    """Of what the library that is there was made; empty if there is none."""
    try:
        found = LIBRARY.read_bytes()
    except OSError:
        return ""
    mark = b"tensorhub-mover:"
    at = found.find(mark)
    return found[at + len(mark) : at + len(mark) + 16].decode("ascii", "replace") if at >= 0 else ""


def reason_file() -> Path:
    """Where it lies why there is no library, if one was to be made here and could not."""
    return LIBRARY.with_suffix(REASON)


def why_not_made() -> str:
    """Why there is no library; empty where that is unknown."""
    try:
        return reason_file().read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def make() -> str:
    """Make the library unless it is there. Returns what was done, in words for people."""
    if stamp() == fingerprint():
        return "the native mover is there"
    command = compiler()
    problem = _problem_with(command)
    if command is not None and not problem:
        reason_file().unlink(missing_ok=True)
        return f"the native mover was built with {' '.join(command)}"
    with contextlib.suppress(OSError):
        reason_file().write_text(problem, encoding="utf-8")
    return f"no native mover, Python moves the bytes, far slower beside busy Python threads: {problem}"


def _problem_with(command: list[str] | None) -> str:
    """What kept that compiler from making the library; empty if nothing did."""
    if choice() == "no":
        return "TENSORHUB_BUILD=no when it was installed"
    if command is None:
        return "no C compiler was there when it was installed"
    try:
        compile_to(LIBRARY, command)
    except subprocess.CalledProcessError as error:
        words = (error.stderr or error.stdout or "").strip().splitlines()
        return f"{' '.join(command)} cannot build it: {words[0] if words else error}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"{' '.join(command)} cannot build it: {error}"
    return ""


if __name__ == "__main__":
    print(make())  # noqa: T201 a command that people run
