"""One picture of the run: rates of one reader, rates over sizes, fan-out beside the star."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .section import GIB, MIB, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "ours": "#0b6e4f",
    "limit": "#999999",
    "plain local": "#bbbbbb",
    "plain checked": "#bbbbbb",
    "plain tcp": "#bbbbbb",
    "peer": "#d98e04",
}


def draw(folder: Path, sections: Sequence[Section], title: str) -> list[Path]:
    """Write `bench.svg` and `bench.png`; nothing where there is nothing to draw or no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a tenth of the size
    from matplotlib import pyplot

    drawers: dict[str, Callable[[Axes, dict[str, object]], None]] = {
        "one_reader": _one_reader,
        "sizes": _sizes,
        "fan_out": _fan_out,
    }
    chosen = [section for section in sections if section.key in drawers and section.figures and not section.skipped]
    if not chosen:
        return []
    figure, axes = pyplot.subplots(1, len(chosen), figsize=(7.5 * len(chosen), 6.5), squeeze=False)
    for axis, section in zip(axes[0], chosen, strict=True):
        drawers[section.key](axis, section.figures)
        axis.set_title(section.title, fontsize=9, wrap=True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    paths = [folder / "bench.svg", folder / "bench.png"]
    for path in paths:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return paths


def _one_reader(axis: "Axes", figures: dict[str, object]) -> None:
    samples = [each for each in figures["samples"] if "error" not in each]  # type: ignore[attr-defined]
    samples.sort(key=lambda each: each["gib_per_s"])
    names = [each["name"] for each in samples]
    size = float(figures["size_bytes"]) / GIB  # type: ignore[arg-type]
    rates = [each["gib_per_s"] for each in samples]
    low = [rate - size / max(each["seconds"]) for rate, each in zip(rates, samples, strict=True)]
    high = [size / min(each["seconds"]) - rate for rate, each in zip(rates, samples, strict=True)]
    colours = [COLOURS.get(each["kind"], "#555555") for each in samples]
    error = [[max(0.0, value) for value in low], [max(0.0, value) for value in high]]
    axis.barh(names, rates, color=colours, xerr=error, error_kw={"lw": 0.8, "ecolor": "#333333"})
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel("GiB/s (median, min … max); green: TensorHub, orange: peers, grey: plain")


def _sizes(axis: "Axes", figures: dict[str, object]) -> None:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for each in figures["samples"]:  # type: ignore[attr-defined]
        if "error" not in each and each["gib_per_s"] > 0:
            by_name.setdefault(each["name"], []).append((each["size_bytes"] / MIB, each["gib_per_s"]))
    for name, points in by_name.items():
        style = "-o" if name.startswith("TensorHub") else "--."
        axis.plot(*zip(*sorted(points), strict=True), style, label=name, markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("MiB")
    axis.set_ylabel("GiB/s")
    axis.grid(visible=True, which="both", lw=0.3)
    axis.legend(fontsize=7)


def _fan_out(axis: "Axes", figures: dict[str, object]) -> None:
    for way, text, style in (("replicate", "TensorHub replicate()", "-o"), ("star", "star", "--s")):
        points = []
        for each in figures["runs"]:  # type: ignore[attr-defined]
            if each["way"] == way:
                seconds = sorted(run["seconds"] for run in each["runs"])
                points.append((each["readers"], seconds[len(seconds) // 2]))
        if not points:
            continue
        points.sort()
        axis.plot(
            *zip(*points, strict=True), style, label=text, color=COLOURS["ours" if way == "replicate" else "peer"]
        )
    axis.axhline(float(figures["wire_seconds"]), lw=0.8, color="#999999", label="the wire alone, once")  # type: ignore[arg-type]
    axis.set_ylim(bottom=0)
    axis.set_xlabel("readers")
    axis.set_ylabel("seconds until the last reader is done")
    axis.legend(fontsize=8)
