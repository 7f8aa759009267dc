"""Removes one protective line after another and lets the simulator, and then the scenarios, look for the damage.

    python -m tests.mutants [--seeds N] [--only TEXT]
    python -m tests.mutants --mechanical [--draw 500] [--seed 1]

The first runs the list in `mutants.py`, the second draws mutants made from the syntax tree (`mechanical.py`).

Each mutant is a copy of the package with one replacement, run by fresh processes over the seeds from 0 on until one
fails. What none of them notices is shown to the scenarios. The exit status is 1 if a mutant survives those too.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .mechanical import Plan, run
from .mutants import MUTANTS, Mutant

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "tensorhub"
RUN = """
import sys
from tensorhub.sim.runner import run_seed
first, stop, step = map(int, sys.argv[1:])
for seed in range(first, stop, step):
    result = run_seed(seed)
    if not result.ok:
        print(seed, result.error.splitlines()[0][:150], flush=True)
        break
"""


def mutate(mutant: Mutant, into: Path) -> None:
    """A copy of the package with the mutant's line removed."""
    shutil.copytree(PACKAGE, into / "tensorhub", ignore=shutil.ignore_patterns("__pycache__"))
    file = into / "tensorhub" / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant {mutant.name!r}: its line occurs {text.count(mutant.old)} times in {mutant.file}")
    file.write_text(text.replace(mutant.old, mutant.new))


def hunt(mutant: Mutant, seeds: int, jobs: int) -> tuple[int, str] | None:
    """The first seed that was found to fail, and how; None if the mutant survived."""
    with tempfile.TemporaryDirectory() as folder:
        mutate(mutant, Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        hunters = [
            subprocess.Popen(
                [sys.executable, "-c", RUN, str(job), str(seeds), str(jobs)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for job in range(jobs)
        ]
        found = None
        waiting = list(hunters)
        while waiting and found is None:
            for hunter in list(waiting):
                try:
                    line = hunter.communicate(timeout=0.2)[0].strip()
                except subprocess.TimeoutExpired:
                    continue
                waiting.remove(hunter)
                if hunter.returncode != 0:
                    raise SystemExit(f"mutant {mutant.name!r} does not run")
                if line:
                    seed, _, error = line.partition(" ")
                    found = (int(seed), error)
                    break
        for hunter in waiting:
            hunter.kill()
            hunter.communicate()
        return found


def overheard(mutant: Mutant) -> str | None:
    """The first scenario that goes otherwise with the mutant, or None."""
    with tempfile.TemporaryDirectory() as folder:
        mutate(mutant, Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/scenarios"]
        ran = subprocess.run(
            command, cwd=PACKAGE.parents[1], env=environment, capture_output=True, text=True, check=False
        )
        failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
        return failed[0].partition(" - ")[0] if failed else None


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="of the simulator: 2000 of the list, 150 of mechanical ones")
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mechanical", action="store_true")
    parser.add_argument("--draw", type=int, default=500, help="how many mechanical mutants")
    parser.add_argument("--seed", type=int, default=1, help="which mechanical mutants")
    options = parser.parse_args()
    if options.mechanical:
        seeds = 150 if options.seeds is None else options.seeds
        return run(Plan(options.draw, options.seed, options.jobs, options.only, seeds))
    return run_list(options.only, options.seeds or 2000, options.jobs)


def run_list(only: str, seeds: int, jobs: int) -> int:
    """Hunt those of the list whose name contains the text."""
    survivors = []
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    for mutant in chosen:
        started = time.monotonic()
        found = hunt(mutant, seeds, jobs)
        took_s = time.monotonic() - started
        scenario = overheard(mutant) if found is None else None
        if scenario is not None:
            print(f"found     {mutant.name}  (by no seed of {seeds}, {took_s:.0f} s): {scenario}", flush=True)
        elif found is None:
            survivors.append(mutant)
            print(f"SURVIVED  {mutant.name}  ({seeds} seeds, {took_s:.0f} s)", flush=True)
        else:
            print(f"found     {mutant.name}  (seed {found[0]}, {took_s:.0f} s): {found[1]}", flush=True)
    print(f"{len(chosen) - len(survivors)} passed, {len(survivors)} failed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
