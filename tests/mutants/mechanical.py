"""Draws mechanical mutants by a seed, judges each in a process of its own, and lists those that nothing notices.

    python -m tests.mutants --mechanical --draw 500 --seed 1 --jobs 2 [--minutes 20]

The seed gives each mutant its place in one order of all, and the first of them are drawn: a mutant that is new or gone
changes nothing for the others. A run that ends early is continued by the next. Of the survivors some change nothing
that matters (a tie, a text, a speed); each of the others wants a test.
"""

import hashlib
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import inf

from . import judging, recorded, typed
from .forks import run_all
from .judging import Judge, Verdict
from .operators import STRANGERS, Mechanical, mutants_of
from .substitute import PACKAGE, compile_all, file_of, files, mutated


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    draw: int
    seed: int
    jobs: int
    only: str = ""
    seeds: int = 150  # of the simulator, recorded and then shown
    budget_s: float = 60.0  # processor seconds of histories for one mutant
    minutes: float = inf  # no mutant is begun later


def all_mutants() -> list[Mechanical]:
    """Every mechanical mutant of the core."""
    found, alike = [], Counter[str]()
    for path in files():
        if path.name not in STRANGERS:
            for mutant in mutants_of(file_of(path), path.read_bytes()):
                alike[mutant.key] += 1
                found.append(replace(mutant, nth=alike[mutant.key]))
    return found


def drawn(plan: Plan) -> list[Mechanical]:
    """Those that the seed chooses, in its order."""

    def place(mutant: Mechanical) -> bytes:
        return hashlib.blake2b(f"{plan.seed} {mutant.key}".encode(), digest_size=16).digest()

    return sorted((mutant for mutant in all_mutants() if plan.only in f"{mutant.file}::{mutant.key}"), key=place)[
        : plan.draw
    ]


# --- the run ----------------------------------------------------------------------------------------------------------


def run(plan: Plan) -> int:
    """Draw, judge, print. The exit status is 1 if one survived."""
    began = time.monotonic()
    mutants = drawn(plan)
    tests, histories = recorded.tests(plan.jobs), recorded.all_histories(plan.seeds, plan.jobs)
    kept = recorded.Verdicts(f"{plan.seeds} {plan.budget_s}")
    verdicts = {mutant.key: verdict for mutant in mutants if (verdict := kept.of(mutant.key)) is not None}
    waiting = [mutant for mutant in mutants if mutant.key not in verdicts]
    print(
        f"{len(mutants)} of {len(all_mutants())} mutants, drawn by seed {plan.seed}: {len(waiting)} to judge",
        flush=True,
    )

    def said(index: int, answer: object) -> None:
        mutant = waiting[index]
        if not isinstance(answer, dict):
            verdict = Verdict("killed", "its process", "was ended by the system: out of memory or time")
        elif "outcome" not in answer:
            raise SystemExit(f"{mutant.key}\n{answer}")
        else:
            verdict = Verdict(**answer)
        verdicts[mutant.key] = verdict
        kept.note(mutant.key, verdict)
        print(f"{len(verdicts):4d} {verdict.outcome:9s} {_line(mutant, verdict)}", flush=True)

    compile_all()
    works = [lambda m=mutant: _judge(m, tests, histories, plan, kept.suspect(m.key)) for mutant in waiting]
    run_all(works, plan.jobs, said, until=began + 60 * plan.minutes)  # type: ignore[arg-type]
    return _tell(plan, [mutant for mutant in mutants if mutant.key in verdicts], verdicts, time.monotonic() - began)


def _judge(mutant: Mechanical, tests: list[Judge], histories: list[Judge], plan: Plan, suspect: str) -> object:
    text = mutant.apply((PACKAGE / mutant.file).read_bytes())

    def seeing(judges: list[Judge]) -> list[Judge]:
        return sorted((j for j in judges if j.sees(mutant.file, mutant.line)), key=lambda j: j.cost_s)

    def types() -> str:
        return typed.complaint(mutant.file, text)

    change = mutated(mutant.file, text)
    return asdict(judging.judge(change, seeing(tests), seeing(histories), plan.budget_s, suspect, types))


def _kind(by: str) -> str:
    """Of judge: a folder of tests, `mypy`, or a kind of history."""
    return "/".join(by.split("/")[:2]) if "::" in by else by.partition(" ")[0]


def _line(mutant: Mechanical, verdict: Verdict) -> str:
    return f"{verdict.took_s:5.1f} s  {mutant.file}::{mutant.function} {mutant.operator}: {verdict.by} {verdict.why}"


def _tell(plan: Plan, mutants: list[Mechanical], verdicts: dict[str, Verdict], took_s: float) -> int:
    by_file: dict[str, Counter[str]] = {}
    for mutant in mutants:
        verdict = verdicts[mutant.key]
        by_file.setdefault(mutant.file, Counter())[verdict.outcome] += 1
        if verdict.outcome == "survived":
            seen = f"{verdict.other_histories} of {verdict.seeds} seeds went otherwise"
            print(f"\n{mutant.file}:{mutant.line} {mutant.operator}, {seen}\n{mutant.key}")
    print(f"\n{'file':28s} {'killed':>7s} {'timed out':>10s} {'survived':>9s}")
    for file, counts in sorted(by_file.items()):
        print(f"{file:28s} {counts['killed']:7d} {counts['timed out']:10d} {counts['survived']:9d}")
    total = sum(by_file.values(), Counter())
    noticed = Counter(_kind(verdicts[mutant.key].by) for mutant in mutants if verdicts[mutant.key].by)
    caught = total["killed"] + total["timed out"]
    print(f"{'all':28s} {total['killed']:7d} {total['timed out']:10d} {total['survived']:9d}")
    print("noticed by " + ", ".join(f"{kind}: {count}" for kind, count in noticed.most_common()))
    print(f"{100 * caught / max(1, len(mutants)):.1f} % of {len(mutants)} noticed, {took_s / 60:.1f} min")
    rows = [{**asdict(mutant), **asdict(verdicts[mutant.key]), "key": mutant.key} for mutant in mutants]
    whole = {"plan": asdict(plan), "took_s": took_s, "counts": dict(total), "mutants": rows}
    recorded.OUT.mkdir(parents=True, exist_ok=True)
    (recorded.OUT / "mechanical.json").write_text(json.dumps(whole, indent=1))
    return 1 if total["survived"] else 0
