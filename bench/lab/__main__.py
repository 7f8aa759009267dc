"""`python -m bench.lab SCENARIO`: the paper's workloads on shaped links of this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tensorhub.cli.output import ErrorsAreLines, between

app = ErrorsAreLines(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def lab(
    scenario: Annotated[
        str,
        typer.Argument(help="standalone, elastic, cross-site, storm, sites, slow-relay, established, layouts or ettr."),
    ],
    strategies: Annotated[
        str,
        typer.Option(
            help="Only these, by name: hub-always,hub,ring,star,…; of ettr: peers,file,…",
            show_default="all of the scenario",
        ),
    ] = "",
    rollouts: Annotated[int | None, typer.Option(min=1, help="Rollout replicas.", show_default="4 to 12")] = None,
    sites: Annotated[int | None, typer.Option(min=1, help="Of rollouts, behind uplinks.", show_default="3")] = None,
    mib: Annotated[float | None, between(1, 1 << 20, help="MiB of weights.", show_default="8 to 64")] = None,
    mbit: Annotated[
        int | None, typer.Option(min=10, help="Rate of each worker's link.", show_default="400; 200; 50")
    ] = None,
    versions: Annotated[int | None, typer.Option(min=1, help="Versions published after the first.")] = None,
    seconds: Annotated[float | None, between(5, 86_400, help="Of an elastic run, and of the storm.")] = None,
    step: Annotated[
        float | None, between(0.05, 3_600, help="Seconds of a training step, of ettr.", show_default="0.5 and 2")
    ] = None,
    interpreter: Annotated[
        Literal["busy", "idle"], typer.Option(help="While a worker computes: held for half of the time, or idle.")
    ] = "busy",
    seed: Annotated[int | None, typer.Option(help="Of generation times and of faults.", show_default="1")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the report.", show_default="out/lab")] = None,
) -> None:
    """The paper's workloads on shaped links of this machine, beside what a user would otherwise take.

    Needs root, but for ettr.
    """
    from .run import Options, run_scenario

    given = {
        "strategies": tuple(strategies.split(",")) if strategies else None,
        "rollouts": rollouts,
        "sites": sites,
        "size_bytes": None if mib is None else int(mib * 2**20),
        "rate_mbit": mbit,
        "versions": versions,
        "seconds": seconds,
        "step_s": step,
        "is_idle": interpreter == "idle",
        "seed": seed,
        "out": out,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(run_scenario(scenario, replace(Options(), **chosen)))  # type: ignore[arg-type]


if __name__ == "__main__":
    app()
