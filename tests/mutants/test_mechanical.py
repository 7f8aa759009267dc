"""Mechanical mutants: what is made of a line, what is left out, and that a mutant is judged as it deserves."""

import json
import os
import signal
import subprocess
import sys

import pytest

from mutants.forks import run_all
from mutants.mechanical import CLASSED, Plan, classes, drawn
from mutants.operators import mutants_of
from mutants.substitute import PACKAGE, ROOT, Ran, recording

SOURCE = '''
"""A file."""
MOST = 3

class Thing:
    done: int = 0

    def rule(self, a: int, b: bool) -> bool:
        """What it says."""
        assert a != 7
        self.note(f"{a + 1}", 5)
        text = "x" if b else "y"
        if a < 3 and not b:
            self.done = max(a, 2)
        return a is None

    def statistics(self) -> int:
        return 1 + 1
'''
WANTED = {
    "done: int = 1",
    "done: int = (-1)",
    "if (a <= 3) and not b:",
    "if (a >= 3) and not b:",
    "if a < 4 and not b:",
    "if a < 2 and not b:",
    "if (a < 3 or not b):",
    "if (a < 3):",
    "if (not b):",
    "if a < 3 and b:",
    "if (not (a < 3 and (not b))):",
    "pass",
    "self.done = min(a, 2)",
    "self.done = max(a, 3)",
    "self.done = max(a, 1)",
    "return (a is not None)",
    "return True",
    "return False",
}


def test_every_operator_makes_its_mutants_and_text_for_people_makes_none() -> None:
    assert {mutant.after for mutant in mutants_of("core/file.py", SOURCE.encode())} == WANTED


def test_mutants_of_the_core_can_be_compiled_and_differ() -> None:
    found = drawn(Plan(200, 5, 1))
    texts = {(mutant.file, mutant.apply((PACKAGE / mutant.file).read_bytes())) for mutant in found}
    assert len(texts) == 200
    for file, text in texts:
        compile(text, file, "exec")


def test_a_draw_is_decided_by_its_seed() -> None:
    first, same, other = (drawn(Plan(20, seed, 1)) for seed in (1, 1, 2))
    assert first == same != other
    assert len(first) == 20
    assert drawn(Plan(30, 1, 1))[:20] == first


ALONE = """
import json, sys
from dataclasses import asdict
from tests.mutants import judging, substitute
old, new, wrong = sys.argv[1:4]
names = ["test_steps_back", "test_prefetched_is_for_updates_alone"]
tests = [judging.Judge("tests/core/test_version_spec.py::" + name, 0.01, {}) for name in names]
others = [judging.Judge("walk 0"), judging.Judge("seed 0", 1.0)]
verdict = judging.judge(substitute.replaced(old, new), tests, others, 60.0, types=lambda: wrong)
print(json.dumps(asdict(verdict)))
"""


@pytest.mark.parametrize(
    ("old", "new", "wrong", "outcome", "by"),
    [
        (
            "return int(found.group(1) or 0)",
            "return int(found.group(1) or 1)",
            "",
            "killed",
            "tests/core/test_version_spec.py::test_steps_back",
        ),
        (
            "assert found is not None",
            "while True: pass",
            "",
            "timed out",
            "tests/core/test_version_spec.py::test_steps_back",
        ),
        ("assert found is not None", "assert found", "", "survived", ""),
        ("assert found is not None", "assert found", "int + str", "killed", "mypy"),
        (
            '= re.compile(r"latest',
            '= nothing_of_that_name(r"latest',
            "",
            "killed",
            "tests/core/test_version_spec.py",
        ),
        ('r"latest(?:', 'r"newest(?:', "", "killed", "tests/core/test_version_spec.py::test_steps_back"),
    ],
)
def test_a_mutant_gets_what_it_deserves(old: str, new: str, wrong: str, outcome: str, by: str) -> None:
    """`wrong` is what the types say of it."""
    command = [sys.executable, "-c", ALONE, old, new, wrong]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert (verdict["outcome"], verdict["by"]) == (outcome, by), verdict
    if outcome == "survived":
        assert verdict["seeds"] == 1


def test_the_recorder_notes_the_statements_that_run() -> None:
    source = b"def rule(a):\n    if a:\n        return 1\n    elif a is None:\n        return 2\n    return 3\n"
    ran: Ran = {}
    space: dict[str, object] = {}
    exec(recording(ran)("core/file.py", source), space)
    rule = space["rule"]
    assert callable(rule)
    assert rule(None) == 2
    assert ran == {"core/file.py": {2, 4, 5}}


def test_forked_work_is_answered_and_what_ends_its_process_is_told() -> None:
    answers: dict[int, object] = {}
    run_all([lambda: 1 + 1, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: {}["x"]], 2, answers.__setitem__)
    assert answers[0] == 2
    assert answers[1] is None
    assert "KeyError" in str(answers[2])


def test_who_survived_and_has_a_class_has_a_reason() -> None:
    text = CLASSED.read_text(encoding="utf-8")
    assert [key for key, (_, reason) in classes(text).items() if len(reason) < 20] == []


def test_a_class_that_is_none_is_a_mistake() -> None:
    assert classes("# said\nlimit: a::b | c => d\n    because\n    of that\n") == {
        "a::b | c => d": ("limit", "because of that")
    }
    with pytest.raises(ValueError, match="line 1"):
        classes("unknown: a::b | c => d\n")
