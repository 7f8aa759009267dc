"""Each check holds for a good run, and fails when the one thing it looks for is missing."""

from collections.abc import Callable

import msgspec
import pytest

from bench.demo.checks import USUAL_STEPS, Check, judge
from bench.demo.events import SERVER, TRAINER, AnyEvent, Fault, Generated, Published, Trained, Updated
from bench.demo.orchestrate import usual
from bench.demo.summary import Summary, summarise

from .story import POLICY_BYTES, STEPS, generated, good_run, in_order

Change = Callable[[AnyEvent], AnyEvent | None]


def summary_of(events: list[AnyEvent], *, updates: bool = True) -> Summary:
    return summarise(in_order(events), steps=STEPS, seed=0, updates=updates, seconds=12.0)


def changed(change: Change) -> list[AnyEvent]:
    return [event for event in map(change, good_run()) if event is not None]


def failing(checks: list[Check]) -> list[str]:
    return [check.sentence for check in checks if not check.holds]


def test_a_good_run_passes() -> None:
    assert failing(judge(summary_of(good_run()))) == []


def test_the_facts_of_a_good_run() -> None:
    summary = summary_of(good_run())
    rollouts = {rollout.name: rollout for rollout in summary.rollouts}
    assert [rollouts[name].fate for name in sorted(rollouts)] == ["to the end", "was killed", "joined late"]
    assert rollouts["rollout-0"].versions_run == STEPS + 1
    assert rollouts["rollout-2"].first_bytes_by_source == {"rollout-0": POLICY_BYTES}
    assert (rollouts["rollout-2"].kept, rollouts["rollout-2"].stall.most_s) == (1, 5.0)
    assert rollouts["rollout-2"].stall.updates == 2, "the first fill is no stall: there was nothing to compute with"
    assert (summary.reward_start, summary.reward_end) == (0.0, 1.0)
    assert summary.last_version == STEPS
    copies = {"rollout-0": STEPS + 1, "rollout-1": 3, "rollout-2": 1}
    assert summary.trainer_copies == sum(copies.values()) / (STEPS + 1), "of 21 versions that were fetched at all"


def no_learning(event: AnyEvent) -> AnyEvent:
    return msgspec.structs.replace(event, reward=0.0) if isinstance(event, Trained) else event


def learned_before(event: AnyEvent) -> AnyEvent:
    return msgspec.structs.replace(event, reward=0.9) if isinstance(event, Trained) else event


def test_too_few_steps_are_said_to_be_why_it_has_not_learned() -> None:
    summary = summary_of(changed(no_learning))
    assert STEPS < USUAL_STEPS == usual("").steps
    assert judge(summary)[0].detail.endswith(f": {STEPS} steps are too few for that, {USUAL_STEPS} are enough")
    assert "too few" not in judge(msgspec.structs.replace(summary, steps=USUAL_STEPS))[0].detail


def other_weights(event: AnyEvent) -> AnyEvent:
    is_one = isinstance(event, Updated) and event.process == "rollout-0" and event.version == 3
    return msgspec.structs.replace(event, sha256="f" * 64) if is_one else event


def changed_while_running(event: AnyEvent) -> AnyEvent:
    is_one = isinstance(event, Generated) and event.process == "rollout-0" and event.version == 3
    return msgspec.structs.replace(event, sha256="f" * 64) if is_one else event


def never_published(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Published) and event.version == 3 else event


def not_hashed_first(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Updated) and event.process == "rollout-0" and event.version == 3 else event


def nobody_killed(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Fault) and event.process == "rollout-1" else event


def nobody_late(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Fault) and event.what == "started late" else event


def late_from_trainer(event: AnyEvent) -> AnyEvent:
    is_one = isinstance(event, Updated) and event.process == "rollout-2" and event.is_first
    return msgspec.structs.replace(event, bytes_by_source={"rollout-0": POLICY_BYTES, TRAINER: 1}) if is_one else event


def late_from_nowhere(event: AnyEvent) -> AnyEvent:
    is_one = isinstance(event, Updated) and event.process == "rollout-2" and event.is_first
    return msgspec.structs.replace(event, bytes_by_source={}) if is_one else event


def server_stayed_away(event: AnyEvent) -> AnyEvent | None:
    return None if isinstance(event, Fault) and event.what == "restarted" else event


def nothing_after_restart(event: AnyEvent) -> AnyEvent:
    return msgspec.structs.replace(event, time=21.0) if isinstance(event, Fault) and event.process == SERVER else event


def one_left_behind(event: AnyEvent) -> AnyEvent | None:
    return None if event.process == "rollout-2" and event.time > 20 else event


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_learning, "reward rises"),
        (learned_before, "reward rises"),
        (other_weights, "bit for bit"),
        (changed_while_running, "bit for bit"),
        (changed_while_running, "before it was verified"),
        (never_published, "bit for bit"),
        (not_hashed_first, "before it was verified"),
        (nobody_killed, "was killed"),
        (nobody_late, "joined late"),
        (late_from_trainer, "joined late"),
        (late_from_nowhere, "joined late"),
        (server_stayed_away, "restarted"),
        (nothing_after_restart, "restarted"),
        (one_left_behind, "last version"),
    ],
)
def test_what_is_missing_is_seen(change: Change, words: str) -> None:
    assert any(words in sentence for sentence in failing(judge(summary_of(changed(change)))))


def without_updates() -> list[AnyEvent]:
    def keep_first(event: AnyEvent) -> AnyEvent | None:
        match event:
            case Updated(is_first=False):
                return None
            case Generated() | Updated():
                return msgspec.structs.replace(event, version=0, sha256="0" * 64)
            case Trained():
                return msgspec.structs.replace(event, reward=0.01)
            case _:
                return event

    return changed(keep_first)


def test_a_good_run_without_updates_passes() -> None:
    assert failing(judge(summary_of(without_updates(), updates=False))) == []


def test_without_updates_nobody_may_learn_or_change() -> None:
    rising = [msgspec.structs.replace(e, reward=0.5) if isinstance(e, Trained) else e for e in without_updates()]
    assert any("stays below" in sentence for sentence in failing(judge(summary_of(rising, updates=False))))
    moved = [*without_updates(), generated(20.55, "rollout-0", 3)]
    assert any("one version only" in sentence for sentence in failing(judge(summary_of(moved, updates=False))))


def test_an_empty_run_fails_every_check_without_breaking() -> None:
    assert len(failing(judge(summary_of([])))) == 7
