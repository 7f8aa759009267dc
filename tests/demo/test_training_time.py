"""How much of the demo's time its trainer trained: from events, and in the report."""

import pytest
from msgspec.structs import replace

from bench.demo.events import AnyEvent, Refilled, Trained
from bench.demo.report import html
from bench.demo.summary import TrainingTime, summarise

from .engine_story import REFILLED, good_engine_run
from .story import COMPUTED_S, STEPS, good_run, in_order

SECONDS = 12.0


def time_of(events: list[AnyEvent]) -> TrainingTime:
    found = summarise(in_order(events), steps=STEPS, seed=0, updates=True, seconds=SECONDS).training_time
    assert found is not None
    return found


def test_the_ratio_is_what_it_computed_over_all_the_time() -> None:
    time = time_of(good_run())
    assert time.computed_s == pytest.approx(STEPS * COMPUTED_S)
    assert time.published_s == pytest.approx(STEPS * 0.01), "not the first version, which nobody waited for"
    assert time.other_s == pytest.approx(SECONDS - STEPS * (COMPUTED_S + 0.01))
    assert time.lost_s == 0
    assert time.ratio == pytest.approx(STEPS * COMPUTED_S / SECONDS)


def test_slower_steps_raise_it_and_what_is_missing_lowers_it() -> None:
    slower = [replace(e, computed_s=0.5) if isinstance(e, Trained) and e.version == 5 else e for e in good_run()]
    assert time_of(slower).ratio > time_of(good_run()).ratio
    fewer = [event for event in good_run() if not (isinstance(event, Trained) and event.version > 10)]
    assert time_of(fewer).ratio == pytest.approx(time_of(good_run()).ratio / 2)


def test_what_died_with_a_trainer_was_not_effective() -> None:
    assert time_of(good_engine_run()).lost_s == 0, "it went on with the last version that it had made"
    older = [replace(e, version=REFILLED - 2) if isinstance(e, Refilled) else e for e in good_engine_run()]
    time = time_of(older)
    assert time.lost_s == pytest.approx(2 * COMPUTED_S)
    assert time.computed_s == pytest.approx((STEPS - 2) * COMPUTED_S)


def test_the_report_says_it() -> None:
    summary = summarise(good_run(), steps=STEPS, seed=0, updates=True, seconds=SECONDS)
    assert "Effective training time (ETTR): 25%. Of 12.0 s the trainer computed for 3.0 s, published" in html(
        summary, [], {}
    )
    older = [replace(e, version=REFILLED - 2) if isinstance(e, Refilled) else e for e in good_engine_run()]
    page = html(summarise(older, steps=STEPS, seed=0, updates=True, seconds=SECONDS), [], {})
    assert "0.3 s of computing were lost with a trainer" in page


def test_a_run_in_which_nothing_happened_has_none() -> None:
    assert time_of([]).ratio == 0
    assert TrainingTime(0.0, 0.0, 0.0, 0.0).ratio == 0
