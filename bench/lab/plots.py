"""The figure of a scenario: one bar for each strategy, as in the paper."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from .scenarios import Scenario
from .summary import Outcome, mean

SIZE_INCHES = (7.5, 3.2)
OURS, THEIRS, TRAINER = "#1f77b4", "#999999", "#333333"


def draw(folder: Path, scenario: Scenario, outcomes: Sequence[Outcome]) -> list[Path]:
    """Write it as SVG and PNG, and return where."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    names = [outcome.title for outcome in outcomes][::-1]
    colours = [OURS if outcome.strategy.startswith("hub") else THEIRS for outcome in outcomes][::-1]
    values = [value_of(scenario, outcome) for outcome in outcomes][::-1]
    bars = axes.barh(names, values, color=colours)
    labels = [f"{value:.2f} s" if value < 10 else f"{value:.0f} s" for value in values]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_xlabel(label_of(scenario))
    axes.set_xlim(0, max(values) * 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", labelsize=8)
    paths = [folder / f"{scenario.name}.{kind}" for kind in ("svg", "png")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def value_of(scenario: Scenario, outcome: Outcome) -> float:
    """What the bar shows, in seconds."""
    if scenario.name == "elastic":
        return mean(outcome.join_s)
    return outcome.rollout_stall_s if scenario.name == "cross-site" else outcome.total_stall_s


def label_of(scenario: Scenario) -> str:
    """What the bars are."""
    if scenario.name == "elastic":
        return "seconds until a joining worker has its first version, mean"
    if scenario.name == "cross-site":
        return f"total stall of the rollouts over {scenario.versions} versions, in seconds"
    return f"total stall of all workers over {scenario.versions} versions, in seconds"
