"""Effective training time: the schedule of failures, the arithmetic over events made up, what may be asked."""

import pytest

from bench.lab.content import fingerprint
from bench.lab.ettr.content import Weights, expected
from bench.lab.ettr.events import AnyEvent, Began, Done, Ended, Held, Killed, Listening, Saved, Started
from bench.lab.ettr.plan import Plan, Role
from bench.lab.ettr.run import UNDISTURBED, judge
from bench.lab.ettr.summary import Outcome, summarise

STEP_S = 2.0
STEPS = 4
HASHES = [f"hash of {step}" for step in range(STEPS + 1)]
TRAINER, ROLLOUT, SERVER = "trainer", "rollout-0", "server"


def started(time: float, process: str, *, is_again: bool = True) -> Started:
    return Started(time=time, process=process, is_again=is_again)


def killed(time: float, process: str, step: int) -> Killed:
    roles: dict[str, Role] = {TRAINER: "trainer", ROLLOUT: "rollout", SERVER: "server"}
    return Killed(time=time, process=process, step=step, role=roles[process])


def step(time: float, number: int) -> list[AnyEvent]:
    """Computed by the trainer from that time on, and published a tenth of a second later."""
    ended = time + STEP_S + 0.1
    return [
        Began(time=time, process=TRAINER, step=number),
        Done(time=ended, process=TRAINER, step=number, version=number, publish_s=0.1),
    ]


def held(time: float, process: str, number: int, *, is_first: bool = False, sha256: str = "") -> Held:
    return Held(
        time=time,
        process=process,
        step=number,
        version=number,
        sha256=sha256 or HASHES[number],
        is_first=is_first,
        source="peers",
    )


def a_run() -> list[AnyEvent]:
    """Four steps in 30 s. The trainer dies in step 3, of which it had computed 1.5 s, and step 2 is lost with it."""
    return [
        *(started(10.0, name, is_again=False) for name in (SERVER, TRAINER, ROLLOUT)),
        held(11.0, TRAINER, 0, is_first=True),
        held(11.5, ROLLOUT, 0, is_first=True),
        *step(12.0, 1),
        *step(15.0, 2),
        Began(time=18.0, process=TRAINER, step=3),
        killed(19.5, TRAINER, 3),
        started(19.5, TRAINER),
        held(22.0, TRAINER, 1, is_first=True),
        *step(23.0, 2),
        *step(26.0, 3),
        killed(28.5, SERVER, 4),
        started(28.6, SERVER),
        Listening(time=29.5, process=SERVER),
        *step(37.9, 4),
        Saved(time=41.0, process=TRAINER, step=4, seconds=0.25),
        held(41.0, TRAINER, 4),
        held(41.5, ROLLOUT, 4),
        Ended(time=42.0, process=TRAINER),
        Ended(time=42.0, process=ROLLOUT),
    ]


def summary_of(events: list[AnyEvent]) -> Outcome:
    return summarise(events, title="a way", step_s=STEP_S, start_s=1.0, steps=STEPS, expected=HASHES)


def test_the_ratio_is_new_steps_over_all_the_time() -> None:
    outcome = summary_of(a_run())
    assert outcome.wall_s == pytest.approx(30.0), "from the first start to the last step"
    assert (outcome.steps, outcome.useful_s) == (4, 8.0)
    assert outcome.ratio == pytest.approx(8 / 30)
    assert (outcome.steps_repeated, outcome.repeated_s) == (1, 2.0), "step 2"
    assert outcome.cut_s == pytest.approx(1.5), "step 3, the first time"
    assert outcome.other_s == pytest.approx(30 - 8 - 2 - 1.5)
    assert outcome.restarts == {"trainer": 1, "rollout": 0, "server": 1}
    assert (outcome.publish_s, outcome.saved_s) == ([0.1] * 5, 0.25)


def test_going_on_is_a_step_that_nobody_had_done() -> None:
    of_trainer, of_server = summary_of(a_run()).recoveries
    assert of_trainer.next_step_s == pytest.approx(28.1 - 19.5), "step 3: step 2 was done before"
    assert of_trainer.back_s == pytest.approx(22.0 - 19.5)
    assert of_server.next_step_s == pytest.approx(40.0 - 28.5)
    assert of_server.back_s == pytest.approx(40.0 - 28.5), "the first publish after it listens"


PLAN = Plan(steps=STEPS, step_s=STEP_S, failure_share=0.5)


def failed(events: list[AnyEvent], name: str = "peers") -> list[str]:
    """The findings that do not hold, by their first word."""
    return [each.sentence.split()[0] for each in judge(PLAN, name, summary_of(events)) if not each.holds]


def test_a_run_that_went_well_fails_nothing() -> None:
    assert failed(a_run()) == []


@pytest.mark.parametrize("process", [TRAINER, ROLLOUT])
def test_one_wrong_hash_fails_the_run(process: str) -> None:
    assert failed([*a_run(), held(23.0, process, 1, sha256="hash of 2")]) == ["whoever"]
    assert failed([*a_run(), held(23.0, process, STEPS + 1, sha256="?")]) == ["whoever"], "there is no such step"


def test_who_is_behind_in_the_end_fails_the_run() -> None:
    assert failed([each for each in a_run() if each.time != 41.5]) == ["trainer"]
    assert failed([each for each in a_run() if not isinstance(each, Ended)]) == ["trainer"]


def test_a_failure_that_was_not_injected_fails_the_run() -> None:
    assert failed([each for each in a_run() if not (isinstance(each, Killed) and each.step == 4)]) == ["every"]
    assert failed(a_run(), UNDISTURBED) == ["every"], "somebody was killed where nobody should be"


def test_weights_are_those_of_their_step_and_of_no_other_way_there() -> None:
    hashes = list(expected(1000, 7, STEPS))
    assert len(set(hashes)) == STEPS + 1
    assert hashes != list(expected(1000, 8, STEPS))
    for path, is_right in (((1, 2, 3), True), ((1, 3), False), ((1, 2, 2, 3), False), ((2, 1, 3), False)):
        weights = Weights(1000, 7)
        for number in path:
            weights.step(number)
        assert (fingerprint(weights.tensors) == hashes[3]) == is_right
