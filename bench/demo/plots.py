"""The report's figures, drawn from the events: each a self-contained SVG."""

import io
from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .events import TRAINER, AnyEvent, Fault, Generated, Kept, Published, Trained, Updated
from .summary import Summary

SIZE_INCHES = (8.0, 3.4)
TRAINER_COLOUR = "#333333"
ROLLOUT_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
FAULT_COLOUR = "#cc0000"
MEAN_OVER = 5  # steps, the middle one at its place
MIB = 1 << 20

E = TypeVar("E")


def figures(events: Sequence[AnyEvent], summary: Summary) -> dict[str, str]:
    """All figures as SVG text, by title."""
    plots = _Plots(events, summary)
    found = {
        "Reward": plots.reward(),
        "Version held by each rollout": plots.versions(),
        "Stall per update": plots.stall(),
        "Bytes by source": plots.bytes_by_source(),
    }
    return {**found, "Samples by version": plots.samples()} if summary.engine else found


class _Plots:
    def __init__(self, events: Sequence[AnyEvent], summary: Summary) -> None:
        self._events = events
        self._summary = summary
        self._began = events[0].time if events else 0.0
        self._colours = colours_of([rollout.name for rollout in summary.rollouts])

    def reward(self) -> str:
        """Each batch of each rollout as a point, the trainer's steps as a line."""
        figure, axes = blank_axes("share of right answers")
        for name in self._names():
            mine = self._of(Generated, name)
            axes.plot(
                self._times(mine), [e.reward for e in mine], ".", ms=4, alpha=0.6, c=self._colours[name], label=name
            )
        trained = self._all(Trained)
        rewards = [event.reward for event in trained]
        means = centred_means(rewards, MEAN_OVER // 2)
        axes.plot(self._times(trained), means, c=TRAINER_COLOUR, lw=1.6, label=f"mean of {MEAN_OVER} steps")
        axes.set_ylim(-0.03, 1.03)
        self._mark_faults(axes)
        return as_svg(figure, axes)

    def versions(self) -> str:
        """What the trainer has published and what each rollout holds, over time."""
        figure, axes = blank_axes("version")
        published = self._all(Published)
        axes.step(
            self._times(published),
            [e.version for e in published],
            where="post",
            c=TRAINER_COLOUR,
            lw=2.2,
            label=TRAINER,
        )
        for name in self._names():
            mine = [e for e in self._events if isinstance(e, Updated | Generated) and e.process == name]
            colour = self._colours[name]
            axes.step(self._times(mine), [e.version for e in mine], where="post", c=colour, lw=1.2, label=name)
            if any(isinstance(e, Fault) and e.process == name and e.what == "killed" for e in self._events) and mine:
                axes.plot(self._times(mine[-1:]), [mine[-1].version], "X", c=colour, ms=8)
        self._mark_faults(axes)
        return as_svg(figure, axes)

    def stall(self) -> str:
        """Milliseconds of each update; a cross is an update that failed for now."""
        figure, axes = blank_axes("stall, ms")
        for name in self._names():
            mine = [event for event in self._of(Updated, name) if not event.is_first]
            axes.plot(self._times(mine), [1000 * e.stall_s for e in mine], ".", ms=4, c=self._colours[name], label=name)
            kept = self._of(Kept, name)
            axes.plot(self._times(kept), [1000 * e.stall_s for e in kept], "x", ms=5, c=self._colours[name])
        published = [event for event in self._all(Published) if event.version > 0]
        axes.plot(
            self._times(published), [1000 * e.stall_s for e in published], ".", ms=3, c=TRAINER_COLOUR, label=TRAINER
        )
        axes.set_yscale("log")
        self._mark_faults(axes)
        return as_svg(figure, axes)

    def bytes_by_source(self) -> str:
        """What each rollout received over its life, from whom; the late joiner's first fill has a bar of its own."""
        figure, axes = blank_axes("", xlabel="MiB received")
        bars = [(rollout.name, rollout.bytes_by_source) for rollout in self._summary.rollouts]
        bars += [
            (f"{rollout.name}, to join", rollout.first_bytes_by_source)
            for rollout in self._summary.rollouts
            if rollout.fate == "joined late"
        ]
        draw_sources(axes, bars, self._colours)
        return as_svg(figure, axes)

    def samples(self) -> str:
        """How many samples each version has given, and on whom it ran."""
        figure, axes = blank_axes("samples", xlabel="version")
        below: dict[int, int] = {}
        for name in self._names():
            mine: dict[int, int] = {}
            for event in self._of(Generated, name):
                mine[event.version] = mine.get(event.version, 0) + event.samples
            bottom = [below.get(version, 0) for version in mine]
            axes.bar(list(mine), list(mine.values()), bottom=bottom, width=1.0, color=self._colours[name], label=name)
            for version, count in mine.items():
                below[version] = below.get(version, 0) + count
        return as_svg(figure, axes)

    # ------------------------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return [rollout.name for rollout in self._summary.rollouts]

    def _all(self, kind: type[E]) -> list[E]:
        return [event for event in self._events if isinstance(event, kind)]

    def _of(self, kind: type[E], process: str) -> list[E]:
        return [event for event in self._events if isinstance(event, kind) and event.process == process]

    def _times(self, events: Sequence[AnyEvent]) -> list[float]:
        return [event.time - self._began for event in events]

    def _mark_faults(self, axes: Axes) -> None:
        for fault in self._summary.faults:
            side = "left" if fault.what == "restarted" else "right"  # it follows its "killed" closely
            mark(axes, fault.seconds, f"{fault.process} {fault.what}", side)


def mark(axes: Axes, seconds: float, words: str, side: str = "right") -> None:
    """A fault, as a line with its name."""
    inside = axes.get_xaxis_transform()  # seconds across, share of the height upwards
    axes.axvline(seconds, color=FAULT_COLOUR, lw=0.8, ls="--", zorder=0)
    text = axes.text(seconds, 1.0, f" {words} ", transform=inside, rotation=90, va="top", ha=side)
    text.set(fontsize=7, color=FAULT_COLOUR)


def centred_means(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and of as many on both sides of it: `reach`, and fewer towards the ends."""
    reaches = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [fmean(values[i - each : i + each + 1]) for i, each in enumerate(reaches)]


def draw_sources(axes: Axes, bars: Sequence[tuple[str, dict[str, int]]], colours: dict[str, str]) -> None:
    """A bar for each reader, cut into what it received from each source."""
    left = [0.0] * len(bars)
    for source in sorted(colours, key=lambda name: name != TRAINER):
        widths = [by_source.get(source, 0) / MIB for _, by_source in bars]
        if any(widths):
            axes.barh([name for name, _ in bars], widths, left=left, color=colours[source], label=f"from {source}")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Of rollouts and of the trainer."""
    found = {name: ROLLOUT_COLOURS[i % len(ROLLOUT_COLOURS)] for i, name in enumerate(names)}
    return {**found, TRAINER: TRAINER_COLOUR}


def blank_axes(ylabel: str, *, xlabel: str = "seconds") -> tuple[Figure, Axes]:
    """An empty figure."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def as_svg(figure: Figure, axes: Axes) -> str:
    """The figure with its legend beside it."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
