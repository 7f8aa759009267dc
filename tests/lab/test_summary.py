"""Figures from events: what counts as stall, which hashes are compared, what crossed between sites."""

import pytest

from bench.lab.events import Kept
from bench.lab.interpreter import SLICE_S, Slices
from bench.lab.summary import quantile

from .story import computed, condensed, published, seen, updated


def test_stall_counts_from_the_beginning() -> None:
    found = condensed(
        [
            published(9.0, 0, unpublish_s=5.0),
            updated(9.5, 0, stall_s=7.0, is_first=True),
            published(11.0, 1, unpublish_s=0.1, publish_s=0.2),
            updated(12.0, 1, stall_s=0.5),
            updated(13.0, 1, stall_s=0.25, sha256=""),  # looked, found nothing newer
        ]
    )
    assert found.rollout_stall_s == pytest.approx(0.75)
    assert found.trainer_stall_s == pytest.approx(0.3)
    assert found.total_stall_s == pytest.approx(1.05)
    assert (found.updates, found.versions, found.update_s, found.join_s) == (1, 1, [0.5], [])


def test_who_joins_later_is_counted_as_joining() -> None:
    found = condensed([published(9.0, 0), updated(15.0, 0, process="spot", stall_s=3.0, is_first=True)])
    assert (found.join_s, found.rollout_stall_s, found.rollouts) == ([3.0], 0.0, 1)


def test_a_wrong_hash_is_found() -> None:
    events = [published(9.0, 0), published(11.0, 1), updated(12.0, 1), updated(13.0, 1, sha256="another")]
    found = condensed([*events, updated(14.0, 7, sha256="hash of 7")])  # nobody published 7
    assert found.hashes_compared == 3
    assert [text.split(":")[0] for text in found.hashes_wrong] == ["rollout-0, version 1", "rollout-0, version 7"]


def test_lag_is_counted_when_a_rollout_begins_to_compute() -> None:
    events = [published(9.0, 0), published(11.0, 1), published(12.0, 2)]
    found = condensed([*events, updated(11.5, 1), updated(12.5, 1, sha256=""), updated(12.6, 2)])
    assert found.lag == pytest.approx(1 / 3)


def test_copies_are_counted_as_last_told() -> None:
    events = [published(9.0, 0), published(11.0, 1)]
    one = updated(11.5, 1, sources={"trainer": 500}), updated(12.5, 1, sources={"trainer": 1500})
    other = updated(12.0, 1, process="rollout-1", sources={"rollout-0": 1000})
    found = condensed([*events, *one, other, seen(12.0, {1: 400}), seen(13.0, {1: 1000})])
    assert found.from_trainer == pytest.approx(1.5)
    assert found.wan_copies == {1: 1.0}


def test_failures_are_told() -> None:
    kept = Kept(time=12.0, process="rollout-0", version=1, stall_s=1.0, error="no source")
    assert condensed([published(9.0, 0), kept]).failures == ["rollout-0: no source"]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.76, 4.0), (1.0, 4.0)])
def test_quantile(share: float, value: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == value


def test_quantile_of_nothing() -> None:
    assert quantile([], 0.5) == 0.0


def test_slices_while_weights_move_are_compared_with_those_of_the_same_worker() -> None:
    found = condensed(
        [
            published(9.0, 0),
            computed(11.0, "trainer", still=100, still_s=0.5),
            computed(12.0, "trainer", moving=100, moving_s=0.55, still=100, still_s=0.5),
            computed(12.0, "rollout-0", moving=300, moving_s=3.0, still=10, still_s=0.1),
            computed(12.0, "rollout-1", still=100, still_s=5.0),  # slow, but nothing ever moved here
        ]
    )
    assert found.slices["trainer"] == Slices(100, 0.55, 200, 1.0)
    assert found.slices["trainer"].ratio == pytest.approx(1.1)
    assert found.moving_ratio == pytest.approx((0.55 + 3.0) / (0.5 + 3.0))
    assert found.slice_ratio == pytest.approx((0.55 + 1.0 + 3.1 + 5.0) / (710 * SLICE_S))


def test_an_idle_interpreter_has_no_slices() -> None:
    found = condensed([published(9.0, 0)])
    assert (found.slices, found.slice_ratio, found.moving_ratio) == ({}, 0.0, 0.0)
