"""Explores every history of a small cluster: the real server, a trainer, two rollouts (docs/simulator.md).

    python -m tests.explore --minutes 30

Searches follow one another: each chapter in fair weather first, then with one crash, then with other misfortunes; each
until it is whole or its share of the time is over. A history that breaks a promise is printed, the shortest that there
is, and the exit status is 1. With --chapter or a number of misfortunes there is one search only.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest has it

from .programs import CHAPTERS
from .search import Found, Search
from .small import Faults, Shape
from .telling import told

WEATHERS = {
    "fair": Faults(),
    "a crash": Faults(crashes=1),
    "a loss": Faults(losses=1),
    "a repeat, a failed read": Faults(repeats=1, failures=1),
    "a crash, a loss": Faults(crashes=1, losses=1),
}


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--chapter", choices=CHAPTERS, help="begin there only")
    for kind in ("losses", "repeats", "failures", "crashes"):
        parser.add_argument(f"--{kind}", type=int, help=f"{kind} in one history, at most")
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--copies", type=int, default=1, help="host copies that a worker has room for")
    parser.add_argument("--closes", action="store_true", help="the trainer leaves in the end")
    parser.add_argument("--revocable", action="store_true", help="the server believes that sources can cut readers off")
    parser.add_argument(
        "--except", action="append", default=[], help="a promise not to be asked about, as it is printed"
    )
    options = parser.parse_args()
    asked = {kind: getattr(options, kind) for kind in ("losses", "repeats", "failures", "crashes")}
    given = {kind: number for kind, number in asked.items() if number is not None}
    weathers = {"as asked": Faults(**given)} if given else WEATHERS
    shape = Shape(options.rollouts, options.copies, options.revocable, options.closes, tuple(vars(options)["except"]))
    searches = [
        (f"{chapter}, {name}", replace(shape, chapter=chapter), weather)
        for name, weather in weathers.items()
        for chapter in ([options.chapter] if options.chapter else CHAPTERS)
    ]
    return explore(searches, 60 * options.minutes, options.jobs)


def explore(searches: list[tuple[str, Shape, Faults]], seconds: float, jobs: int) -> int:
    """Run them one after another; each may take its share of what is left."""
    end = time.monotonic() + seconds
    found = []
    for number, (name, shape, budget) in enumerate(searches):
        stop = time.monotonic() + (end - time.monotonic()) / (len(searches) - number)
        one = Search(shape, budget).run(until=lambda at=stop: time.monotonic() > at, jobs=jobs)  # type: ignore[misc]
        found.append(one)
        whole = "whole" if one.is_whole else f"up to {one.depth} steps"
        print(f"{name:36s} {one.states:9d} states {one.steps:10d} steps  {whole}, {one.took_s:.0f} s", flush=True)
        if one.broken:
            print("\n".join(told(shape, budget, one.history)))
            print(one.broken)
            return 1
    total = Found(states=sum(each.states for each in found), steps=sum(each.steps for each in found))
    rest = sum(each.at_rest for each in found)
    print(f"{total.states} states, {total.steps} steps, {rest} states at rest: every promise kept")
    for kind, count in sorted(sum((each.kinds for each in found), total.kinds).items()):
        print(f"  {kind:16s} {count:10d}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
