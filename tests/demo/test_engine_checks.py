"""The checks of the demo with vLLM, without an engine: each holds for a good run, and fails for what it looks for."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bench.demo.checks import judge
from bench.demo.events import TRAINER, AnyEvent, Generated, Made, Published, Refilled, Updated
from bench.demo.progress import Progress
from bench.demo.report import html, write_report

from .engine_story import LIKELY, REFILLED, good_engine_run, summary_of, without_updates
from .story import POLICY_BYTES, sha
from .test_checks import failing

Change = Callable[[AnyEvent], AnyEvent | None]
replace = msgspec.structs.replace


def changed(change: Change) -> list[AnyEvent]:
    return [event for event in map(change, good_engine_run()) if event is not None]


def test_a_good_run_passes() -> None:
    found = judge(summary_of(good_engine_run()))
    assert failing(found) == []
    assert len(found) == 9


def test_a_good_run_without_updates_passes() -> None:
    found = judge(summary_of(without_updates(), updates=False))
    assert failing(found) == []
    assert found[-1].detail == "version 0, 4, to the end"


def test_a_version_that_was_made_and_never_published_may_have_been_read() -> None:
    def died_before_it_said_so(event: AnyEvent) -> AnyEvent | None:
        return None if isinstance(event, Published) and event.version == REFILLED else event

    assert failing(judge(summary_of(changed(died_before_it_said_so)))) == []


def other_parameters(event: AnyEvent) -> AnyEvent:
    return replace(event, sha256="f" * 64) if isinstance(event, Generated) and event.version == 7 else event


def never_made(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Published | Made) and event.version == 7 else event


def nobody_refilled(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Refilled) else event


def refilled_with_something_else(event: AnyEvent) -> AnyEvent:
    return replace(event, sha256=sha(REFILLED - 1)) if isinstance(event, Refilled) else event


def refilled_with_an_old_version(event: AnyEvent) -> AnyEvent:
    return replace(event, version=9, sha256=sha(9)) if isinstance(event, Refilled) else event


def refilled_by_itself(event: AnyEvent) -> AnyEvent:
    return replace(event, bytes_by_source={TRAINER: POLICY_BYTES}) if isinstance(event, Refilled) else event


def refilled_by_nobody(event: AnyEvent) -> AnyEvent:
    return replace(event, bytes_by_source={}) if isinstance(event, Refilled) else event


def refilled_and_stopped(event: AnyEvent) -> AnyEvent:
    return replace(event, time=30.0) if isinstance(event, Refilled) else event


def late_from_nowhere(event: AnyEvent) -> AnyEvent:
    is_one = isinstance(event, Updated) and event.process == "rollout-2" and event.is_first
    return replace(event, bytes_by_source={}) if is_one else event


def late_was_silent(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Generated) and event.process == "rollout-2" else event


def only_the_trainer_was_killed(event: AnyEvent) -> AnyEvent | None:
    return None if event.process == "rollout-1" and not isinstance(event, Generated | Updated) else event


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_parameters, "bit for bit"),
        (never_made, "bit for bit"),
        (nobody_refilled, "refilled"),
        (refilled_with_something_else, "refilled"),
        (refilled_with_an_old_version, "refilled"),
        (refilled_by_itself, "refilled"),
        (refilled_by_nobody, "refilled"),
        (refilled_and_stopped, "refilled"),
        (late_from_nowhere, "joined late"),
        (late_was_silent, "joined late"),
        (only_the_trainer_was_killed, "a rollout was killed"),
    ],
)
def test_what_is_missing_is_seen(change: Change, words: str) -> None:
    assert any(words in sentence for sentence in failing(judge(summary_of(changed(change)))))


@pytest.mark.parametrize(
    "found",
    [
        None,
        replace(LIKELY, batches=0),
        replace(LIKELY, wrong=["rollout-0, version 7: off by 0.2"]),
        replace(LIKELY, next_off=1e-5),
    ],
    ids=["not asked", "nothing sampled", "one is wrong", "versions cannot be told apart"],
)
def test_likelihoods_that_prove_nothing_are_no_proof(found: object) -> None:
    assert failing(judge(summary_of(good_engine_run(), likelihoods=found))) == [  # type: ignore[arg-type]
        "vLLM's log-probabilities are those of transformers with the version that each sample names"
    ]


def test_an_empty_run_fails_every_check_without_breaking() -> None:
    assert len(failing(judge(summary_of([], likelihoods=None)))) == 9


def test_the_page_says_who_computed_and_who_was_refilled(tmp_path: Path) -> None:
    summary = summary_of(good_engine_run())
    checks = judge(summary)
    page = html(summary, checks, {})
    for words in ("engines of vLLM", "FSDP2", "2.0 MiB from rollout-0", "off by 2.0e-06 nats"):
        assert words in page
    drawn = write_report(tmp_path, summary, checks, good_engine_run()).read_text()
    assert len(re.findall("<img", drawn)) == 5
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes())["ok"]


def test_the_news_say_where_the_trainer_goes_on() -> None:
    progress = Progress(20)
    progress.take(good_engine_run())
    assert "trainer goes on from version 12, which its rollouts hold" in progress.news
    assert progress.version == 20


NOTHING_HEAVY = """
import sys
import bench.demo.orchestrate, bench.demo.vllm, bench.demo.vllm.director
print([name for name in ("torch", "transformers", "vllm", "tokenizers") if name in sys.modules])
"""

WITHOUT_VLLM = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find("json")
from bench.demo.__main__ import app
sys.argv = ["demo", "--engine", sys.argv[1]]
app()
"""


def test_nothing_heavy_is_imported_before_an_engine_is_wanted() -> None:
    done = subprocess.run([sys.executable, "-c", NOTHING_HEAVY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("engine", "words"),
    [("vllm", ["the demo needs vllm", "make demo-vllm"]), ("sglang", ["no demo with the engine 'sglang'"])],
)
def test_an_engine_that_is_not_there_is_named_with_the_remedy(engine: str, words: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_VLLM, engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    said = (done.stdout + done.stderr).strip()
    assert "Traceback" not in said
    for each in words:
        assert each in said, said
