"""Checks and report of the demo: each check holds for a good run, and fails when what it looks for is missing."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from bench.demo.checks import judge
from bench.demo.events import (
    SERVER,
    TRAINER,
    AnyEvent,
    Fault,
    Generated,
    Made,
    Published,
    Refilled,
    Trained,
    Updated,
)
from bench.demo.report import Report, html, write_report
from bench.demo.summary import Likelihoods, Summary, summarise

from .story import (
    COMPUTED_S,
    LIKELY,
    POLICY_BYTES,
    REFILLED,
    STEPS,
    generated,
    good_engine_run,
    good_run,
    in_order,
    sha,
    without_updates,
)

replace = msgspec.structs.replace


def summary_of(
    events: Sequence[AnyEvent], *, updates: bool = True, engine: str = "", likelihoods: Likelihoods | None = None
) -> Summary:
    told = {"steps": STEPS, "seed": 3, "seconds": 12.0, "updates": updates}
    return summarise(in_order(events), **told, engine=engine, likelihoods=likelihoods)


def failing(events: Sequence[AnyEvent], *, engine: str = "", updates: bool = True) -> list[str]:
    likely = LIKELY if engine else None
    found = judge(summary_of(events, updates=updates, engine=engine, likelihoods=likely))
    assert len(found) == (9 if engine else 7)
    return [check.sentence for check in found if not check.holds]


def test_good_runs_pass_and_empty_ones_fail_every_check() -> None:
    for engine, run in (("", good_run()), ("vllm", good_engine_run())):
        assert failing(run, engine=engine) == []
        assert failing(without_updates(run), engine=engine, updates=False) == []
    assert len(failing([])) == 7
    assert len([check for check in judge(summary_of([], engine="vllm")) if not check.holds]) == 9


def test_the_facts_of_a_good_run() -> None:
    summary = summary_of(good_run())
    rollouts = {rollout.name: rollout for rollout in summary.rollouts}
    assert [rollouts[name].fate for name in sorted(rollouts)] == ["to the end", "was killed", "joined late"]
    assert rollouts["rollout-0"].versions_run == STEPS + 1
    assert rollouts["rollout-2"].first_bytes_by_source == {"rollout-0": POLICY_BYTES}
    assert (rollouts["rollout-2"].kept, rollouts["rollout-2"].stall.most_s) == (1, 5.0)
    assert rollouts["rollout-2"].stall.updates == 2, "the first fill is no stall: there was nothing to compute with"
    assert (summary.reward_start, summary.reward_end, summary.last_version) == (0.0, 1.0, STEPS)
    assert summary.trainer_copies == (STEPS + 5) / (STEPS + 1), "of 21 versions that were fetched at all"
    time = summary.training_time
    assert time is not None
    assert time.computed_s == pytest.approx(STEPS * COMPUTED_S)
    assert time.ratio == pytest.approx(STEPS * COMPUTED_S / 12.0)
    older = [replace(e, version=REFILLED - 2) if isinstance(e, Refilled) else e for e in good_engine_run()]
    time = summary_of(older).training_time
    assert time is not None
    assert time.lost_s == pytest.approx(2 * COMPUTED_S), "what died with a trainer was not effective"


def edit(kind: type, change: "Callable[[AnyEvent], AnyEvent] | None" = None, **where: object) -> object:
    """Change, or leave out, the events of that kind whose fields are so."""

    def one(event: AnyEvent) -> AnyEvent | None:
        if not isinstance(event, kind) or any(getattr(event, name) != value for name, value in where.items()):
            return event
        return change(event) if change is not None else None

    return one


def other(**fields: object) -> Callable[[AnyEvent], AnyEvent]:
    return lambda event: replace(event, **fields)


FIRST = {"process": "rollout-2", "is_first": True}
ONE = {"process": "rollout-0", "version": 3}
WRONG = "f" * 64


@pytest.mark.parametrize(
    ("engine", "change", "words"),
    [
        ("", edit(Trained, other(reward=0.0)), "reward rises"),
        ("", edit(Trained, other(reward=0.9)), "reward rises"),
        ("", edit(Updated, other(sha256=WRONG), **ONE), "bit for bit"),
        ("", edit(Generated, other(sha256=WRONG), **ONE), "bit for bit"),
        ("", edit(Generated, other(sha256=WRONG), **ONE), "before it was verified"),
        ("", edit(Published, version=3), "bit for bit"),
        ("", edit(Updated, **ONE), "before it was verified"),
        ("", edit(Fault, process="rollout-1"), "was killed"),
        ("", edit(Fault, what="started late"), "joined late"),
        ("", edit(Updated, other(bytes_by_source={"rollout-0": POLICY_BYTES, TRAINER: 1}), **FIRST), "joined late"),
        ("", edit(Updated, other(bytes_by_source={}), **FIRST), "joined late"),
        ("", edit(Fault, what="restarted"), "restarted"),
        ("", edit(Fault, other(time=21.0), process=SERVER), "restarted"),
        ("", lambda event: None if event.process == "rollout-2" and event.time > 20 else event, "last version"),
        ("vllm", edit(Generated, other(sha256=WRONG), version=7), "bit for bit"),
        ("vllm", edit(Published | Made, version=7), "bit for bit"),
        ("vllm", edit(Refilled), "refilled"),
        ("vllm", edit(Refilled, other(sha256=sha(REFILLED - 1))), "refilled"),
        ("vllm", edit(Refilled, other(version=9, sha256=sha(9))), "refilled"),
        ("vllm", edit(Refilled, other(bytes_by_source={TRAINER: POLICY_BYTES})), "refilled"),
        ("vllm", edit(Refilled, other(bytes_by_source={})), "refilled"),
        ("vllm", edit(Refilled, other(time=30.0)), "refilled"),
        ("vllm", edit(Generated, process="rollout-2"), "joined late"),
    ],
)
def test_what_is_missing_is_seen(engine: str, change: "Callable[[AnyEvent], AnyEvent | None]", words: str) -> None:
    run = good_engine_run() if engine else good_run()
    changed = [event for event in map(change, run) if event is not None]
    assert any(words in sentence for sentence in failing(changed, engine=engine))


def test_without_updates_the_policy_may_neither_learn_nor_change() -> None:
    kept = without_updates(good_run())
    rising = [replace(event, reward=0.5) if isinstance(event, Trained) else event for event in kept]
    assert any("stays below" in sentence for sentence in failing(rising, updates=False))
    assert any(
        "one version only" in sentence for sentence in failing([*kept, generated(20.55, "rollout-0", 3)], updates=False)
    )


@pytest.mark.parametrize("change", [{"batches": 0}, {"wrong": ["rollout-0: off by 0.2"]}, {"next_off": 1e-5}])
def test_likelihoods_that_prove_nothing_are_no_proof(change: dict[str, object]) -> None:
    found = judge(summary_of(good_engine_run(), engine="vllm", likelihoods=replace(LIKELY, **change)))
    assert [check.sentence for check in found if not check.holds] == [
        "vLLM's log-probabilities are those of transformers with the version that each sample names"
    ]


def test_the_report_is_one_page_and_json_that_says_the_same(tmp_path: Path) -> None:
    summary = summary_of(good_run())
    page = write_report(tmp_path, summary, judge(summary), good_run()).read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:)', page), "it needs nothing else"
    assert page.count('class="yes"') == 7
    assert 'class="no"' not in page
    for words in ("was killed", "joined late", "none from the trainer", "seed 3", "(ETTR): 25%. Of 12.0 s the trainer"):
        assert words in page
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert report.ok
    assert (report.summary, report.events) == (summary, good_run())
    assert write_report(tmp_path, summary_of([]), judge(summary_of([])), []).exists()
    with_engine = summary_of(good_engine_run(), engine="vllm", likelihoods=LIKELY)
    for words in ("engines of vLLM", "FSDP2", "2.0 MiB from rollout-0", "off by 2.0e-06 nats"):
        assert words in html(with_engine, judge(with_engine), {})
