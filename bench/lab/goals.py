"""What each scenario is to show, and whether it did. Pure."""

from collections.abc import Sequence

import msgspec

from .interpreter import SLICE_S
from .scenarios import Scenario
from .summary import Outcome, mean, quantile

UNPUBLISH_SLACK_S = 0.05
MAX_WAN_COPIES = 1.005  # 1.00 to two decimals
MAX_WAN_COPIES_KILLED = 1.05
STAGES = ("ring", "broadcast")
MAX_SLICE_RATIO = 1.05
MIN_SLICES = 100  # of a worker, to be named as the worst
BUSY = ", not valid: the processor was busy"
BESIDE = "no goal, shown beside the best"


class Finding(msgspec.Struct, frozen=True):
    """One line of the verdict."""

    sentence: str
    wanted: str
    found: str
    holds: bool


def judge(scenario: Scenario, outcomes: Sequence[Outcome], *, round_trip_s: float) -> list[Finding]:
    """Every goal of the scenario, the comparison first."""
    found = [*_ratios(scenario, outcomes), *_unpublish(scenario, outcomes, round_trip_s)]
    found += [_wan(outcome) for outcome in outcomes if outcome.wan_copies]
    found += [_slices(each) for each in outcomes if each.strategy.startswith("hub") and each.moving_ratio]
    compared = sum(outcome.hashes_compared for outcome in outcomes)
    wrong = [text for outcome in outcomes for text in outcome.hashes_wrong]
    text = f"{compared} compared, {len(wrong)} differ" + (f": {wrong[0]}" if wrong else "")
    found.append(
        Finding("every version held has the hash that the trainer took", "no other", text, compared > 0 and not wrong)
    )
    busy = [f"{each.title}: {each.idle_share:.0%}" for each in outcomes if not each.is_valid and not each.is_faulty]
    text = "; ".join(busy) or f"at least {min(outcome.idle_share for outcome in outcomes):.0%}"
    found.append(Finding("links and not the processor were the bottleneck", "15 % idle", text, not busy))
    return found


def _ratios(scenario: Scenario, outcomes: Sequence[Outcome]) -> list[Finding]:
    """Our strategies against the rival: the best of them is held to the goal."""
    ours = [outcome for outcome in outcomes if outcome.strategy.startswith("hub") and not outcome.is_faulty]
    theirs = _rival(scenario, outcomes)
    if theirs is None or not ours:
        return []
    found = []
    for outcome in ours:
        ratio = _measure(scenario, theirs) / max(1e-9, _measure(scenario, outcome))
        is_valid = outcome.is_valid and theirs.is_valid
        busy = "" if is_valid else BUSY
        found.append(
            Finding(
                f"{_what(scenario)}, {theirs.title} over {outcome.title}",
                f"≥ {scenario.goal_ratio:g}x, aim {scenario.aim_ratio:g}x",
                f"{_measure(scenario, theirs):.2f} s / {_measure(scenario, outcome):.2f} s = {ratio:.1f}x{busy}",
                is_valid and ratio >= scenario.goal_ratio,
            )
        )
    best = max(found, key=lambda each: float(each.found.split("= ")[1].split("x")[0]))
    others = (msgspec.structs.replace(each, wanted=BESIDE, holds=True) for each in found if each is not best)
    return [best, *others]


def _what(scenario: Scenario) -> str:
    match scenario.name:
        case "elastic":
            return "mean time of a joining worker's first version"
        case "cross-site":
            return "total stall of the rollouts"
    return "total stall"


def _measure(scenario: Scenario, outcome: Outcome) -> float:
    match scenario.name:
        case "elastic":
            return mean(outcome.join_s)
        case "cross-site":
            return outcome.rollout_stall_s
    return outcome.total_stall_s


def _rival(scenario: Scenario, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The better of the global stages; elsewhere the star."""
    names = STAGES if scenario.name == "standalone" else ("star",)
    found = [outcome for outcome in outcomes if outcome.strategy in names]
    return min(found, key=lambda outcome: _measure(scenario, outcome), default=None)


def _unpublish(scenario: Scenario, outcomes: Sequence[Outcome], round_trip_s: float) -> list[Finding]:
    values = sorted(value for o in outcomes if o.strategy.startswith("hub") for value in o.unpublish_s)
    if not values:
        return []
    chunk_s = scenario.chunk_bytes * 8 / (scenario.rate_mbit * 1e6)
    limit_s, p99 = chunk_s + 2 * round_trip_s + UNPUBLISH_SLACK_S, quantile(values, 0.99)
    text = f"{1000 * p99:.1f} ms over {len(values)} (longest {1000 * values[-1]:.1f} ms)"
    return [Finding("the trainer's unpublish, p99", f"≤ {1000 * limit_s:.0f} ms", text, p99 <= limit_s)]


def _wan(outcome: Outcome) -> Finding:
    limit = MAX_WAN_COPIES_KILLED if outcome.is_faulty else MAX_WAN_COPIES
    most = max(outcome.wan_copies.values())
    text = ", ".join(f"v{version}: {copies:.3f}" for version, copies in outcome.wan_copies.items())
    return Finding(
        f"copies of each version across the WAN, {outcome.title}",
        f"≤ {limit:.2f}" if outcome.is_faulty else "1.00",
        text,
        most <= limit,
    )


def _slices(outcome: Outcome) -> Finding:
    """Whether transfers keep a worker from its interpreter."""
    ratio, slices = outcome.moving_ratio, outcome.slices
    text = f"{ratio:.3f} over {sum(each.moving for each in slices.values())} slices"
    enough = {name: each for name, each in slices.items() if min(each.moving, each.still) >= MIN_SLICES}
    if enough:
        worst, name = max((each.ratio, name) for name, each in enough.items())
        text += f" ({name} {worst:.3f})"
    text += f"; all: {1000 * SLICE_S * outcome.slice_ratio:.2f} ms each"
    return Finding(
        f"a slice of the interpreter while weights move, over one while none do, {outcome.title}",
        f"≤ {MAX_SLICE_RATIO:g}",
        text + ("" if outcome.is_valid else BUSY),
        outcome.is_valid and ratio <= MAX_SLICE_RATIO,
    )
