"""Breaks the core on purpose, in one place after another, and lets tests and histories look for the damage.

    python -m tests.mutants [--only TEXT] [--seeds N] [--first-seed N] [--no-scenarios]
    python -m tests.mutants --mechanical [--draw 500] [--seed 1] [--minutes 20]

The first runs the list in `mutants.py`: protective lines, shown to scenarios, tests of the core and seeds, from 0 on,
until one fails. The second draws mutants made from the syntax tree (`mechanical.py`). The exit status is 1 if one
survives.
"""

import argparse
import os
import sys
from dataclasses import replace
from math import inf

from .handlist import run_list
from .mechanical import Plan, run


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="of the simulator: 2000 for the list, 150 for mechanical ones")
    parser.add_argument("--first-seed", type=int, default=0, help="the list is shown to seeds from this one on")
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-scenarios", action="store_true", help="the list is shown to seeds alone")
    parser.add_argument("--mechanical", action="store_true")
    parser.add_argument("--draw", type=int, default=500, help="how many mechanical mutants")
    parser.add_argument("--seed", type=int, default=1, help="which mechanical mutants")
    parser.add_argument("--budget-s", type=float, default=60.0, help="processor seconds of histories for each of them")
    parser.add_argument("--minutes", type=float, default=inf, help="no mechanical mutant is begun later; run it again")
    options = parser.parse_args()
    if options.mechanical:
        seeds = 150 if options.seeds is None else options.seeds
        plan = Plan(options.draw, options.seed, options.jobs, options.only, seeds)
        plan = replace(plan, budget_s=options.budget_s, minutes=options.minutes)
        return run(plan)
    first, count = options.first_seed, 2000 if options.seeds is None else options.seeds
    return run_list(options.only, range(first, first + count), options.jobs, scenarios=not options.no_scenarios)


if __name__ == "__main__":
    sys.exit(main())
