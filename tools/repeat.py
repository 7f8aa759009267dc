"""Run tests again and again, quietly or beside busy processes, and say how often each of them failed.

    tools/repeat.py 5                                     the whole suite, as `make test` runs it
    tools/repeat.py 2 --load 6                            the same beside six processes that never rest
    tools/repeat.py 20 tests/processes tests/transport    whatever pytest takes as arguments
    tools/repeat.py --closing                             what a release must have gone through (below)

A run that fails leaves its whole output in out/repeat. The exit status is 0 if no run failed.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIDE_BY_SIDE = ["-n", "auto", "--dist", "loadgroup", "--no-loadscope-reorder"]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # it never outlives this process
CLOSING: Sequence[tuple[int, int, Sequence[str]]] = (  # times, load, tests
    (3, 0, ("--long",)),
    (2, 6, ()),
    (20, 0, ("tests/processes", "tests/transport")),
)
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
LAST = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+ in [\d.]+s.*?) ?=*$", re.MULTILINE)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """That many processes that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def repeat(times: int, beside: int, tests: Sequence[str], out: Path) -> Counter[str]:
    """Run them so often; returns how often each test failed."""
    what = "the whole suite" if set(tests) <= {"--long"} else " ".join(tests)
    failed: Counter[str] = Counter()
    with load(beside):
        for number in range(1, times + 1):
            began = time.monotonic()
            command = [sys.executable, "-m", "pytest", *SIDE_BY_SIDE, *tests]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            found = Counter(FAILED.findall(done.stdout))
            if done.returncode and not found:
                found["pytest itself"] += 1
            failed += found
            if found:
                out.mkdir(parents=True, exist_ok=True)
                log = out / f"{time.strftime('%H%M%S')}-load{beside}-{number}.log"
                log.write_text(done.stdout + done.stderr, encoding="utf-8")
            said = LAST.findall(done.stdout)
            line = said[-1] if said else f"pytest ended with status {done.returncode}"
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{what}, load {beside}, run {number} of {times}: {line} ({took})", flush=True)
    return failed


def main() -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=int, nargs="?", default=1)
    parser.add_argument("tests", nargs="*", help="of pytest; none: all")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside")
    parser.add_argument("--closing", action="store_true", help="all that a release must have gone through")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "repeat")
    given, more = parser.parse_known_args()  # what is not ours is for pytest
    failed: Counter[str] = Counter()
    for times, beside, tests in CLOSING if given.closing else [(given.times, given.load, [*given.tests, *more])]:
        failed += repeat(times, beside, tests, given.out)
    for name, count in failed.most_common():
        print(f"failed {count} times: {name}")
    print("no run failed" if not failed else f"{sum(failed.values())} failures; their output is in {given.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
