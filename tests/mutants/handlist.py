"""Shows each mutant of `mutants.py` to the scenarios, then to the tests of the core, and what none notices to seeds."""

from dataclasses import asdict

from . import judging, recorded
from .forks import run_all
from .judging import Judge, Verdict
from .mutants import MUTANTS, Mutant
from .substitute import compile_all, replaced

SCENARIOS = "tests/scenarios"
ENDLESS_S = 1e9  # seeds are told until one fails, or there are no more


def run_list(only: str, seeds: range, jobs: int, *, scenarios: bool) -> int:
    """Those whose name contains the text. The exit status is 1 if nobody notices one of them."""
    tests = sorted(recorded.tests(jobs), key=lambda each: not each.name.startswith(SCENARIOS)) if scenarios else []
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    compile_all()
    survivors = []

    def said(index: int, answer: object) -> None:
        if not isinstance(answer, dict) or "outcome" not in answer:
            raise SystemExit(f"mutant {chosen[index].name!r} does not run: {answer}")
        verdict = Verdict(**answer)
        if verdict.outcome == "survived":
            survivors.append(chosen[index])
            print(f"SURVIVED  {chosen[index].name}  ({verdict.seeds} seeds, {verdict.took_s:.0f} s)", flush=True)
        else:
            print(f"found     {chosen[index].name}  ({verdict.by}, {verdict.took_s:.0f} s): {verdict.why}", flush=True)

    run_all([lambda m=mutant: _judge(m, tests, seeds) for mutant in chosen], jobs, said)  # type: ignore[misc]
    print(f"{len(chosen) - len(survivors)} passed, {len(survivors)} failed")
    return 1 if survivors else 0


def _judge(mutant: Mutant, tests: list[Judge], seeds: range) -> object:
    others = [Judge(f"seed {seed}") for seed in seeds]
    return asdict(judging.judge(replaced(mutant.old, mutant.new), tests, others, ENDLESS_S))
