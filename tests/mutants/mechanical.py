"""Draws mechanical mutants by a seed, judges each in a process of its own, and says who survived.

    python -m tests.mutants --mechanical --draw 500 --seed 1 --jobs 2

mutmut and cosmic-ray were looked at first: both judge by a test command alone, and neither draws, removes statements or
knows what a seed of the simulator executes. `survivors.txt` holds the mutants that were looked at and protect nothing.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import judging
from .judging import Judge, Verdict
from .operators import STRANGERS, Mechanical, mutants_of
from .substitute import CORE, ROOT, Ran, mutated, recording

OUT = ROOT / "out" / "mutants"
CLASSED = Path(__file__).with_name("survivors.txt")
CLASSES = {
    "equivalent": "no behaviour differs",
    "people": "only what people read differs",
    "performance": "slower, or more messages; nothing is lost by it",
    "defended": "a second line of defence: what it keeps out is kept out elsewhere, which the reason names",
    "limit": "the exact value of a bound, or of a tie, is a choice",
}


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    draw: int
    seed: int
    jobs: int
    only: str = ""
    seeds: int = 150  # of the simulator, recorded and then shown
    budget_s: float = 60.0  # processor seconds of seeds for one mutant


def all_mutants() -> list[Mechanical]:
    """Every mechanical mutant of the core."""
    files = [path for path in sorted(CORE.glob("*.py")) if path.name not in STRANGERS]
    return [mutant for path in files for mutant in mutants_of(f"core/{path.name}", path.read_bytes())]


def drawn(plan: Plan) -> list[Mechanical]:
    """Those that the seed chooses, in the order of their places."""
    found = [mutant for mutant in all_mutants() if plan.only in mutant.key]
    if plan.draw >= len(found):
        return found
    chosen = random.Random(plan.seed).sample(range(len(found)), plan.draw)
    return [found[index] for index in sorted(chosen)]


# --- processes --------------------------------------------------------------------------------------------------------


def fork(work: Callable[[], object], answer: Path) -> int:
    """Do the work in a process of its own, which leaves its answer as JSON."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        answer.write_text(json.dumps(work()))
    except SystemExit as refusal:
        answer.write_text(json.dumps({"refused": str(refusal)}))
    except BaseException:  # noqa: BLE001 (the top of a process: it is said, and ends it)
        answer.write_text(json.dumps({"broken": traceback.format_exc()}))
        code = 1
    finally:
        os._exit(code)


def run_all(works: list[Callable[[], object]], jobs: int, said: Callable[[int, object], None]) -> None:
    """Run all of them, `jobs` at a time; `said(index, answer)` as each ends. None: its process was killed."""
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, int] = {}
        for index in range(len(works) + jobs):
            if index < len(works):
                running[fork(works[index], Path(folder) / str(index))] = index
            while running and (len(running) >= jobs or index >= len(works)):
                pid, _ = os.wait()
                over = running.pop(pid)
                file = Path(folder) / str(over)
                said(over, json.loads(file.read_text()) if file.exists() else None)


# --- the judges, recorded once for each state of the tree -------------------------------------------------------------


def _state_of_the_tree(seeds: int) -> str:
    found = hashlib.blake2b(str(seeds).encode(), digest_size=12)
    for folder in ("src/tensorhub/core", "src/tensorhub/sim", *judging.TESTS):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".txt"):
                found.update(path.read_bytes())
    return found.hexdigest()


def judges(plan: Plan) -> tuple[list[Judge], list[Judge]]:
    """Tests and seeds, and what they execute; from the last time if nothing has changed."""
    file = OUT / f"judges-{_state_of_the_tree(plan.seeds)}.json"
    if not file.exists():
        print(f"recording what tests and {plan.seeds} seeds execute …", flush=True)
        works: list[Callable[[], object]] = [_record_tests]
        shares = max(1, plan.jobs)
        works += [lambda s=share: _record_seeds(list(range(s, plan.seeds, shares))) for share in range(shares)]  # type: ignore[misc]
        answers: dict[int, object] = {}
        run_all(works, plan.jobs, answers.__setitem__)
        for answer in answers.values():
            if not isinstance(answer, list):
                raise SystemExit(str(answer))
        OUT.mkdir(parents=True, exist_ok=True)
        seeds = [each for index in range(1, len(works)) for each in answers[index]]  # type: ignore[attr-defined]
        file.write_text(json.dumps({"tests": answers[0], "seeds": seeds}))
    found = json.loads(file.read_text())
    return [Judge(**each) for each in found["tests"]], [Judge(**each) for each in found["seeds"]]


def _record_tests() -> object:
    ran: Ran = {}
    return judging.as_dict(judging.record_tests(recording(ran), ran))


def _record_seeds(seeds: list[int]) -> object:
    ran: Ran = {}
    return judging.as_dict(judging.record_seeds(recording(ran), ran, seeds))


# --- classes ----------------------------------------------------------------------------------------------------------


def classes(text: str) -> dict[str, tuple[str, str]]:
    """By key: class and reason, as reviewed. A line `class: key`, then its reason, indented."""
    found: dict[str, tuple[str, str]] = {}
    key = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("    ") and key:
            kind, reason = found[key]
            found[key] = (kind, f"{reason} {line.strip()}".strip())
        elif line.strip() and not line.startswith("#"):
            kind, _, key = line.partition(": ")
            if kind not in CLASSES or not key:
                raise ValueError(f"line {number}: {line!r}; classes are {', '.join(CLASSES)}")
            found[key] = (kind, "")
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


def run(plan: Plan) -> int:
    """Draw, judge, print. The exit status is 1 if somebody survived who has no class."""
    began = time.monotonic()
    mutants = drawn(plan)
    tests, seeds = judges(plan)
    print(
        f"{len(mutants)} of {len(all_mutants())} mutants, drawn by seed {plan.seed}; {plan.jobs} at a time", flush=True
    )
    verdicts: dict[int, Verdict] = {}

    def said(index: int, answer: object) -> None:
        if not isinstance(answer, dict):
            verdict = Verdict("killed", "its process", "was ended by the system: out of memory or time")
        elif "outcome" not in answer:
            raise SystemExit(f"{mutants[index].key}\n{answer}")
        else:
            verdict = Verdict(**answer)
        verdicts[index] = verdict
        print(f"{len(verdicts):4d} {verdict.outcome:9s} {_line(mutants[index], verdict)}", flush=True)

    run_all([lambda m=mutant: _judge(m, tests, seeds, plan) for mutant in mutants], plan.jobs, said)  # type: ignore[misc]
    return _tell(plan, mutants, verdicts, time.monotonic() - began)


def _judge(mutant: Mechanical, tests: list[Judge], seeds: list[Judge], plan: Plan) -> object:
    source = (CORE.parent / mutant.file).read_bytes()
    change = mutated(mutant.file, mutant.apply(source))

    def seeing(judges: list[Judge]) -> list[Judge]:
        return sorted((j for j in judges if j.sees(mutant.file, mutant.line)), key=lambda j: j.cost_s)

    return asdict(judging.judge(change, seeing(tests), seeing(seeds), plan.budget_s))


def _line(mutant: Mechanical, verdict: Verdict) -> str:
    return f"{verdict.took_s:5.1f} s  {mutant.file}::{mutant.function} {mutant.operator}: {verdict.by} {verdict.why}"


def _tell(plan: Plan, mutants: list[Mechanical], verdicts: dict[int, Verdict], took_s: float) -> int:
    known = classes(CLASSED.read_text(encoding="utf-8")) if CLASSED.exists() else {}
    by_file: dict[str, Counter[str]] = {}
    survivors = []
    for index, mutant in enumerate(mutants):
        by_file.setdefault(mutant.file, Counter())[verdicts[index].outcome] += 1
        if verdicts[index].outcome == "survived":
            survivors.append((mutant, verdicts[index]))
    for mutant, verdict in survivors:
        kind = known.get(mutant.key, ("NO CLASS", ""))[0]
        seen = f"{verdict.other_histories} of {verdict.seeds} seeds went otherwise"
        print(f"\n{mutant.file}:{mutant.line} {mutant.function}: {mutant.operator} [{kind}] {seen}")
        print(f"- {mutant.before}\n+ {mutant.after}")
    print(f"\n{'file':28s} {'killed':>7s} {'timed out':>10s} {'survived':>9s}")
    for file, counts in sorted(by_file.items()):
        print(f"{file:28s} {counts['killed']:7d} {counts['timed out']:10d} {counts['survived']:9d}")
    total = sum(by_file.values(), Counter())
    stale = [key for key in known if key not in {mutant.key for mutant in all_mutants()}]
    print("".join(f"\n{CLASSED.name}: no such mutant any more: {key}" for key in stale))
    caught = total["killed"] + total["timed out"]
    unclassed = [mutant.key for mutant, _ in survivors if mutant.key not in known]
    print(f"{'all':28s} {total['killed']:7d} {total['timed out']:10d} {total['survived']:9d}")
    share = f"{100 * caught / max(1, len(mutants)):.1f} %"
    print(f"{share} noticed in {took_s / 60:.1f} min; {len(unclassed)} without a class")
    OUT.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(m), **asdict(verdicts[i]), "key": m.key} for i, m in enumerate(mutants)]
    whole = {"plan": asdict(plan), "took_s": took_s, "counts": dict(total), "mutants": rows}
    (OUT / "mechanical.json").write_text(json.dumps(whole, indent=1))
    return 1 if unclassed else 0
