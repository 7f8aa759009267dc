"""`make gpu`: stories and figures of weights on a CUDA device, within eight minutes, where torch is and little else.

Rules:
1. Stories come first, then the table. Each part runs in processes of its own, for its own time at most.
2. `gpu.json` is written anew after each result, so a run that is cut off keeps what it had.
3. Packages that are missing come from `.gpu-packages` (`make gpu-packages`). Nothing is downloaded.
4. The exit status is 1 where a story failed or a part broke, never for a figure.

This module needs nothing but Python. `gpu_rows` measures, `gpu_child` is a process with tensors on a device.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / ".gpu-packages"
BUDGET_S = 470.0
FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
GLIBC = (17, 24, 27, 28)  # 2.x: wheels name the oldest that they run with
STORIES = ("-m", "gpu", "--long", "-v", "--color=no", "-p", "no:cacheprovider", "--no-header")
SIDE_BY_SIDE = str(max(2, min(8, len(os.sched_getaffinity(0)) // 2)))  # each story has three processes
TOLD = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED)\s+(tests/\S+)|(tests/\S+)\s+(PASSED|FAILED|ERROR|SKIPPED)\b")


@dataclass(frozen=True)
class Part:
    """Something to run: tests, where `tests` names them, else rows of `gpu_rows`."""

    name: str
    seconds: float
    tests: tuple[str, ...] = ()


PARTS = (
    Part("device", 60),
    Part("kernels", 60, ("tests/memory/test_cuda.py",)),
    Part("stories", 150, ("tests/device", "-n", SIDE_BY_SIDE, "--dist", "load")),
    Part("memory", 50, ("tests/device", "-k", "gave_back or nothing_stays")),  # alone: they count the device's memory
    Part("digests", 25),
    Part("publish", 25),
    Part("same_device", 60),
    Part("small", 30),
    Part("training", 30),
    Part("layouts", 40),
    Part("tcp", 50),
    Part("host_copy", 70),
    Part("rings", 50),
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {names}; default: all")
    parser.add_argument("--device", default="cuda:0", help="cpu: a rehearsal with small tensors on the host")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "out" / "gpu"))
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help=f"for all of it ({BUDGET_S:.0f})")
    parser.add_argument("--fetch", metavar="PYTHON", help="only fetch packages for that version of Python")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.parts if name not in {part.name for part in PARTS}]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {names}")
    return given


# --- packages ---------------------------------------------------------------------------------------------------------


def fetch(python: str) -> int:
    """Wheels of all that the package and its tests need besides torch. Needs pip, and the network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cuda"], "cuda-bindings", *FOR_TESTS]
    shutil.rmtree(PACKAGES, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{number}_x86_64" for number in GLIBC] + ["--platform=manylinux2014_x86_64"]
    where = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    command = [_python_with("pip"), "-m", "pip", "download", "-qq", "-d", str(PACKAGES), *where, *wanted]
    return subprocess.run(command, check=False).returncode


def _python_with(module: str) -> str:
    """This Python if it has that module, else the one in .venv."""
    other = ROOT / ".venv" / "bin" / "python"
    if importlib.util.find_spec(module) is None and other.exists():
        return str(other)
    return sys.executable


def unpacked(wheels: Path, to: Path) -> list[str]:
    """Unpack the wheels of packages that this Python lacks. Returns what was unpacked."""
    shutil.rmtree(to, ignore_errors=True)
    mine = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    made = []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version, *_, python, abi, _ = wheel.stem.split("-")
        if not (abi == "none" or mine in python.split(".") or abi == "abi3"):
            continue
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as content:
                content.extractall(to)
            made.append(f"{name} {version}")
    return made


# --- running ----------------------------------------------------------------------------------------------------------


def environment(packages: Path) -> dict[str, str]:
    """Of the parts: what is to be imported, and none of the caller's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", ROOT, packages)))
    return {**kept, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Run:
    """Runs parts one after another, and keeps what they say."""

    def __init__(self, device: str, out: Path, seconds: float) -> None:
        self.device = device
        self.ends_at = time.monotonic() + seconds
        self.out = out
        self.found: dict[str, object] = {"device": device, "parts": {}}
        out.mkdir(parents=True, exist_ok=True)
        self.packages = ROOT / "out" / "gpu-packages"
        self.environment = environment(self.packages) | {"BENCH_STACKS": str(out / "stacks.log")}
        self.log = (out / "gpu.log").open("w", encoding="utf-8")

    def write(self) -> None:
        """So that no reader ever sees half a file."""
        new = self.out / "gpu.json.new"
        new.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(new, self.out / "gpu.json")

    def prepare(self) -> None:
        """The packages, and the native mover if a compiler is here."""
        made = unpacked(PACKAGES, self.packages)
        build = [sys.executable, str(ROOT / "src/tensorhub/transport/native/build.py")]
        done = subprocess.run(
            build, env={**self.environment, "TENSORHUB_BUILD": "cc"}, capture_output=True, text=True, check=False
        )
        mover = (done.stdout.strip() or done.stderr.strip())[-300:]
        self.found |= {"python": sys.version, "unpacked": made, "mover": mover}
        print(f"gpu: {sys.executable}; unpacked {len(made)} packages; {mover}", flush=True)

    def part(self, part: Part) -> None:
        limit_s = min(part.seconds, self.ends_at - time.monotonic())
        kept: dict[str, object] = {"rows": [], "tests": {}}
        self.found["parts"][part.name] = kept  # type: ignore[index]
        if limit_s < 5:
            kept["ended"] = "not begun: no time was left"
            return self.write()
        if part.tests:
            command = ["-m", "pytest", *STORIES, *part.tests]
        else:
            command = ["-m", f"{__package__}.gpu_rows", part.name, self.device]
        began = time.monotonic()
        self.log.write(f"=== {part.name}\n")
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for line in lines_of(process, began + limit_s):
                self.log.write(line + "\n")
                self.log.flush()
                if self._note(kept, line):
                    self.write()
        finally:
            kept["ended"] = _end(process, part)
            kept["seconds"] = round(time.monotonic() - began, 1)
            self.write()
        print(f"gpu: {part.name}: {_summary(kept)}, {kept['seconds']} s", flush=True)

    def _note(self, kept: dict[str, object], line: str) -> bool:
        """Whether the line says a result."""
        if line.startswith('{"what"'):
            kept["rows"].append(json.loads(line))  # type: ignore[attr-defined]
            return True
        if line.startswith('{"machine"'):
            self.found |= json.loads(line)
            return True
        told = TOLD.search(line)
        if told:
            word, name = (told[1], told[2]) if told[1] else (told[4], told[3])
            kept["tests"][name.partition("::")[2]] = word.lower()  # type: ignore[index]
        return bool(told)


def lines_of(process: "subprocess.Popen[bytes]", ends_at: float) -> Iterator[str]:
    """What it writes, line by line, until its end or that moment."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := ends_at - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def _end(process: "subprocess.Popen[bytes]", part: Part) -> str:
    """End it and all that it started; how it ended."""
    try:
        code = process.wait(2)
        ended = "" if code == 0 or (part.tests and code == 5) else f"exit status {code}"  # 5: no test was chosen
    except subprocess.TimeoutExpired:
        ended = f"cut off after {part.seconds:.0f} s, or with the time for all"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    return ended


def _summary(kept: dict[str, object]) -> str:
    tests, rows = kept["tests"], kept["rows"]
    assert isinstance(tests, dict)
    assert isinstance(rows, list)
    words = [f"{list(tests.values()).count(word)} {word}" for word in dict.fromkeys(tests.values())]
    words += [f"{len(rows)} rows"] if rows else []
    words += [str(kept["ended"])] if kept["ended"] else []
    return ", ".join(words) or "nothing"


# --- telling ----------------------------------------------------------------------------------------------------------


def table(found: dict[str, object]) -> list[str]:
    """The stories that failed, then the figures: a short table for the end of the output."""
    parts = found["parts"]
    assert isinstance(parts, dict)
    title = "on " + str(dict(found.get("gpu", {})).get("name", "the host: a rehearsal, whose figures mean nothing"))  # type: ignore[call-overload]
    lines = ["", title, f"{'what':62} {'wanted':>14} {'got':>14}   beside"]
    for name, kept in parts.items():
        for test, word in kept["tests"].items():
            if word in ("failed", "error"):
                lines.append(f"{word.upper()} {test}")
        lines += [_line(row) for row in kept["rows"]]
        if kept.get("ended"):
            lines.append(f"{name}: {kept['ended']}; see gpu.log")
    words = [word for kept in parts.values() for word in kept["tests"].values()]
    lines.append("stories: " + (", ".join(f"{words.count(word)} {word}" for word in sorted(set(words))) or "none"))
    return lines


def _line(row: dict[str, object]) -> str:
    beside = "; ".join(f"{name} {_number(value)}" for name, value in dict(row["beside"]).items())  # type: ignore[call-overload]
    if row["error"]:
        return f"{row['what']:62} {row['wanted']:>14} {'not there':>14}   {row['error']}"
    mark = {True: " ", False: "!", None: " "}[row["is_met"]]  # type: ignore[index]
    got = f"{_number(row['value'])} {row['unit']}"
    return f"{row['what']:62} {row['wanted']:>14} {got:>14} {mark} {beside}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def why_no_device() -> str:
    """Why nothing can be run on a device here; empty where it can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch: make gpu PYTHON=/path/to/python"
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.is_available(), torch.__version__)"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    words = done.stdout.split()
    if done.returncode or len(words) != 2:
        return f"torch cannot be imported: {done.stderr.strip()[-300:]}"
    return "" if words[0] == "True" else f"torch {words[1]} sees no CUDA device (ARGS='--device cpu': a rehearsal)"


def main(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    if given.fetch:
        return fetch(given.fetch)
    python = _python_with("torch")
    if python != sys.executable:
        os.execv(python, [python, "-m", f"{__package__}.gpu", *arguments])
    reason = "" if given.device == "cpu" else why_no_device()
    if reason:
        print(f"gpu: nothing was run: {reason}")
        return 0
    run = Run(given.device, given.out.resolve(), given.seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run.prepare()
    for part in PARTS:
        if not given.parts or part.name in given.parts or part.name == "device":
            run.part(part)
    print("\n".join(table(run.found)))
    print(f"written: {run.out / 'gpu.json'} and gpu.log")
    parts = run.found["parts"]
    assert isinstance(parts, dict)
    has_failed = any(word in ("failed", "error") for kept in parts.values() for word in kept["tests"].values())
    return 1 if has_failed or any(kept.get("ended") for kept in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
