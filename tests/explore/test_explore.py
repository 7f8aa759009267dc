"""The explorer: what it calls one state is one, it finds what is put in, and a small search is whole in seconds."""

import random
import subprocess
import sys
import zlib

import pytest

from explore.canon import written
from explore.programs import CHAPTERS
from explore.search import Expansion, Search, expand
from explore.small import MISFORTUNES, TIME, Faults, Shape, Small, unpack
from explore.telling import told
from explore.walks import follow
from mutants.substitute import ROOT

ENOUGH = 8  # pairs of states, in each chapter
ANYTHING = Faults(losses=1, repeats=1, failures=1, crashes=1)


def for_ever() -> bool:
    return False


def what_follows(packed: bytes) -> list[object]:
    found: Expansion = expand(packed, {})
    return [[(each.number, each.digest) for each in found.following], found.broken.partition(":")[0]]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_is_taken_for_one_state_has_one_future(chapter: str) -> None:
    """Bisimulation, tried on walks: the next states of both are the same, action for action."""
    chance, compared = random.Random(1), 0
    start = zlib.compress(Small.begin(Shape(chapter=chapter), ANYTHING).packed(), 1)
    first = {unpack(zlib.decompress(start)).digest(): start}
    while compared < ENOUGH:
        packed = start
        for _ in range(30):
            actions = unpack(zlib.decompress(packed)).actions()
            following = expand(packed, {}).following
            for each in following:
                assert each.packed is not None
                former = first.setdefault(each.digest, each.packed)
                if former != each.packed and compared < ENOUGH:
                    assert what_follows(each.packed) == what_follows(former)
                    compared += 1
            likely = [0.03 if actions[each.number][0] in (*MISFORTUNES, *TIME) else 1.0 for each in following]
            packed = chance.choices(following, likely)[0].packed or start


def test_counters_and_time_do_not_make_another_state() -> None:
    small = Small.begin(Shape(), Faults())
    for _ in range(3):
        small.apply(TIME)  # everybody has reported in one moment, heard the roster, and shown it
    before = written(small, small.now)
    for _ in range(5):
        small.apply(TIME)
    assert written(small, small.now) == before
    small.apply(("calls", "trainer"))
    assert written(small, small.now) != before


def test_a_small_search_is_whole_and_somebody_is_at_rest() -> None:
    shape = Shape(rollouts=1, chapter="update")
    found = Search(shape, Faults()).run(until=for_ever)
    assert not found.broken, "\n".join(told(shape, Faults(), found.history))
    assert found.is_whole, found
    assert found.at_rest > 0
    assert found.states > 40


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_first_steps_of_every_chapter_keep_every_promise(chapter: str) -> None:
    found = Search(Shape(chapter=chapter), ANYTHING).run(until=for_ever, deepest=3)
    assert found.depth == 3
    assert not found.broken, "\n".join(told(Shape(chapter=chapter), ANYTHING, found.history))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_histories_drawn_at_random_keep_every_promise(chapter: str) -> None:
    for seed in range(4):
        shape = Shape(rollouts=1 + seed % 2, chapter=chapter)
        broken, history = follow(shape, ANYTHING, seed)
        assert not broken, "\n".join([*told(shape, ANYTHING, history), broken])
        assert len(history) > 20


def test_two_processes_find_what_one_finds() -> None:
    one, two = (Search(Shape(), ANYTHING).run(until=for_ever, jobs=jobs, deepest=3) for jobs in (1, 2))
    assert (one.states, one.steps, one.kinds) == (two.states, two.steps, two.kinds)


def test_a_history_is_told_again_from_its_choices() -> None:
    lines = told(Shape(chapter="update"), Faults(), [0, 1, 1, 0])
    assert lines[0].endswith("rollout-0 calls")
    assert any("update(latest)" in line for line in lines)


INJECTED = """
import sys; sys.path.insert(0, "tests")
from mutants.substitute import install, replaced
old, new, chapter = sys.argv[1:4]
install(replaced(old, new))
from explore.search import Search
from explore.small import Faults, Shape
from explore.telling import told
from explore.walks import follow
shape = Shape(rollouts=int(sys.argv[4]), chapter=chapter)
found = Search(shape, Faults()).run(until=lambda: False, deepest=40)
print(found.states, found.depth, found.broken)
print("\\n".join(told(shape, Faults(), found.history)))
"""


def found_in(old: str, new: str, chapter: str, rollouts: int) -> str:
    """What the explorer finds, in fair weather, in a core with that replacement."""
    command = [sys.executable, "-c", INJECTED, old, new, chapter, str(rollouts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_source_that_waits_for_no_reader_is_found() -> None:
    said = found_in("        return bool(reads)\n", "        return False\n", "reading", 1)
    assert "Broken: G4 no torn read: rollout-0 accepted -1" in said, said


def test_a_call_that_returns_too_early_is_found() -> None:
    old = "not isinstance(buffer, Holding) or buffer.version != call.version:"
    assert "Broken: G8 never run early" in found_in(old, "False:", "opening", 1)


def test_a_core_without_a_bug_is_not_found_guilty() -> None:
    said = found_in("        return bool(reads)\n", "        return len(reads) > 0\n", "update", 1)
    assert "Broken" not in said, said
