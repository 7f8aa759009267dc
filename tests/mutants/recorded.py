"""What the judges execute, recorded once for each state of the tree, and what each mutant's verdict was.

A verdict counts for as long as nothing has changed that it rests on: the core, and the judges. Who noticed a mutant
before is the first who is asked again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from . import histories, judging, typed
from .forks import run_all
from .judging import Judge, Verdict
from .substitute import ROOT, Ran, recording

OUT = ROOT / "out" / "mutants"
VERDICTS = OUT / "verdicts.json"
CORE = ("src/tensorhub/protocol", "src/tensorhub/server", "src/tensorhub/worker")
HISTORIES = (*CORE, "tests/sim", histories.PLANS)


def _digest(paths: Iterator[Path], more: str = "") -> str:
    found = hashlib.blake2b(more.encode(), digest_size=12)
    for path in sorted(paths):
        found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _below(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".txt"))


def _recorded(kind: str, state: str, works: list[Callable[[], object]], jobs: int) -> list[Judge]:
    """What these works record, or what they recorded the last time in this state."""
    file = OUT / f"{kind}-{state}.json"
    if not file.exists():
        print(f"recording what {kind} execute …", flush=True)
        answers: dict[int, object] = {}
        run_all(works, jobs, answers.__setitem__)
        found: list[object] = []
        for answer in answers.values():
            if not isinstance(answer, list):
                raise SystemExit(str(answer))
            found += answer
        OUT.mkdir(parents=True, exist_ok=True)
        for old in OUT.glob(f"{kind}-*.json"):
            old.unlink()
        file.write_text(json.dumps(found))
    return [Judge(**each) for each in json.loads(file.read_text())]


def tests(jobs: int) -> list[Judge]:
    """Every test that judges."""
    state = _digest(_below(*CORE, *judging.TESTS))
    return _recorded("tests", state, [_record_tests], jobs)


def all_histories(seeds: int, jobs: int) -> list[Judge]:
    """Every history that judges."""
    state = _digest(_below(*HISTORIES), f"{seeds}")
    names = histories.named(seeds)
    works: list[Callable[[], object]] = [lambda s=share: _record_histories(names[s::jobs]) for share in range(jobs)]  # type: ignore[misc]
    return _recorded("histories", state, works, jobs)


def _record_tests() -> object:
    ran: Ran = {}
    return judging.as_dict(judging.record_tests(recording(ran), ran))


def _record_histories(names: list[str]) -> object:
    ran: Ran = {}
    return judging.as_dict(judging.record_histories(recording(ran), ran, names))


# --- verdicts ---------------------------------------------------------------------------------------------------------


class Verdicts:
    """By the key of a mutant: its last verdict, and the state of the tree in which it was given."""

    def __init__(self, shown_to: str) -> None:
        """`shown_to` says how many histories a survivor has survived."""
        self.known = json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}
        self._states: dict[str, str] = {}
        self._everything = _digest(_below(*HISTORIES, *judging.TESTS), shown_to)

    def of(self, key: str) -> Verdict | None:
        """The verdict, if it still counts."""
        state, found = self.known.get(key, ("", None))
        return Verdict(**found) if found and state == self._state(found["by"]) else None

    def suspect(self, key: str) -> str:
        """Who noticed it the last time."""
        return str(self.known[key][1]["by"]) if key in self.known else ""

    def note(self, key: str, verdict: Verdict) -> None:
        """Keep it for the next run."""
        self.known[key] = (self._state(verdict.by), asdict(verdict))
        OUT.mkdir(parents=True, exist_ok=True)
        new = VERDICTS.with_suffix(".new")
        new.write_text(json.dumps(self.known, indent=0))
        new.replace(VERDICTS)  # whole, whenever the run is ended

    def _state(self, by: str) -> str:
        """The state of all that the verdict of this judge rests on; where nobody has noticed, that is everything."""
        if by not in self._states:
            self._states[by] = self._digest_for(by)
        return self._states[by]

    def _digest_for(self, by: str) -> str:
        file, _, test = by.partition("::")
        if test:
            near = (path for path in (ROOT / file).parent.glob("*.py") if not path.name.startswith("test_"))
            transcripts = _below("tests/scenarios") if file.startswith("tests/scenarios") else iter(())
            return _digest(iter({*_below(*CORE), *near, *transcripts, ROOT / file}))
        if by == typed.BY:
            return _digest(_below(*CORE))
        return _digest(_below(*HISTORIES)) if by.startswith(("seed ", "plan ")) else self._everything
