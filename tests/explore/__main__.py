"""Explores every history of a small cluster: the real server, a trainer, two rollouts (docs/simulator.md).

    python -m tests.explore --minutes 30

Searches follow one another: one rollout first and then two, each chapter in fair weather, with a crash, with a lost
message, with a repeated one and a failed read; each until it is whole or its share of the time is over. In the last
tenth of the time single histories are drawn at random and followed to their end. A history that breaks a promise is
printed, of a search the shortest that there is, and the exit status is 1.
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
from .walks import follow

WEATHERS = {
    "fair": Faults(),
    "a crash": Faults(crashes=1),
    "a loss": Faults(losses=1),
    "a cancelled call": Faults(cancels=1),
    "a repeat, a failed read": Faults(repeats=1, failures=1),
}
ANYTHING = Faults(losses=1, repeats=1, failures=1, cancels=1, crashes=1)


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--chapter", choices=CHAPTERS, help="begin there only")
    for kind in ("losses", "repeats", "failures", "cancels", "crashes"):
        parser.add_argument(f"--{kind}", type=int, help=f"{kind} in one history, at most")
    parser.add_argument("--rollouts", type=int, choices=(1, 2), help="that many only")
    parser.add_argument("--copies", type=int, default=1, help="host copies that a worker has room for")
    parser.add_argument("--closes", action="store_true", help="the trainer leaves in the end")
    parser.add_argument("--revocable", action="store_true", help="the server believes that sources can cut readers off")
    parser.add_argument(
        "--except", action="append", default=[], help="a promise not to be asked about, as it is printed"
    )
    options = parser.parse_args()
    asked = {kind: getattr(options, kind) for kind in ("losses", "repeats", "failures", "cancels", "crashes")}
    given = {kind: number for kind, number in asked.items() if number is not None}
    weathers = {"as asked": Faults(**given)} if given else WEATHERS
    shape = Shape(2, options.copies, options.revocable, options.closes, tuple(vars(options)["except"]))
    searches = [
        (f"{rollouts} rollouts, {chapter}, {name}", replace(shape, rollouts=rollouts, chapter=chapter), weather)
        for rollouts in ([options.rollouts] if options.rollouts else (1, 2))
        for name, weather in weathers.items()
        for chapter in ([options.chapter] if options.chapter else CHAPTERS)
    ]
    seconds = 60 * options.minutes
    return explore(searches, 0.9 * seconds, options.jobs) or walk(searches, 0.1 * seconds)


def explore(searches: list[tuple[str, Shape, Faults]], seconds: float, jobs: int) -> int:
    """Run them one after another; each may take its share of what is left."""
    end = time.monotonic() + seconds
    found = []
    for number, (name, shape, budget) in enumerate(searches):
        stop = time.monotonic() + (end - time.monotonic()) / (len(searches) - number)
        one = Search(shape, budget).run(until=lambda at=stop: time.monotonic() > at, jobs=jobs)  # type: ignore[misc]
        found.append(one)
        whole = "whole" if one.is_whole else f"up to {one.depth} steps"
        print(f"{name:48s} {one.states:9d} states {one.steps:10d} steps  {whole}, {one.took_s:.0f} s", flush=True)
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


def walk(searches: list[tuple[str, Shape, Faults]], seconds: float) -> int:
    """Follow single histories to their end, each in the shape of one of these searches, with all misfortunes."""
    end, number, steps = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        _, shape, _ = searches[number % len(searches)]
        broken, history = follow(shape, ANYTHING, number)
        number, steps = number + 1, steps + len(history)
        if broken:
            print("\n".join(told(shape, ANYTHING, history)))
            print(broken)
            return 1
    print(f"{number} histories drawn at random, {steps} steps: every promise kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
