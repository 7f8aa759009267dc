"""`python -m tests.sim`: whole clusters on virtual time, under faults drawn from a seed."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tensorhub.cli.output import ErrorsAreLines, between, error_text

if TYPE_CHECKING:
    from .runner import SeedResult

app = ErrorsAreLines(add_completion=False, pretty_exceptions_enable=False)
NO_TYPE = ""  # of a switch: "<bool>" behind it in the help looks as if it took a value
MAX_JOBS = 1_024  # each is a Python of its own, and all are started at once


@app.command()
def simulate(
    seed: Annotated[int | None, typer.Option(help="Print one history as readable lines.", min=0)] = None,
    seeds: Annotated[str, typer.Option(help="Run many: A..B, both included.", show_default=False)] = "",
    storm: Annotated[
        bool, typer.Option("--storm", metavar=NO_TYPE, help="Run new seeds until Ctrl-C or --minutes.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="How long a storm or a sweep lasts.", min=0.0, show_default=False)
    ] = None,
    mixed: Annotated[
        bool, typer.Option("--mixed", metavar=NO_TYPE, help="Of many, only those with two ways to cut tensors.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", metavar=NO_TYPE, help="Each single fault in a small history, for --minutes.")
    ] = False,
    jobs: Annotated[int, between(1, MAX_JOBS, help="Processes at a time.", show_default="cores")] = min(
        os.cpu_count() or 1, MAX_JOBS
    ),
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", metavar=NO_TYPE, help="Of one history, only the closing line.")
    ] = False,
    shrink: Annotated[
        int | None, typer.Option(help="Make the plan of a seed that fails as small as it can be.", min=0)
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Run the plan in a file, as --shrink writes it.", exists=True, dir_okay=False, readable=True),
    ] = None,
) -> None:
    """Run whole clusters on virtual time, under faults drawn from a seed. Exit status 1 if a promise was broken."""
    if (seed is not None) + bool(seeds) + storm + sweep + (shrink is not None) + (plan is not None) != 1:
        raise typer.BadParameter("give exactly one of --seed, --seeds, --storm, --sweep, --shrink and --plan")
    if shrink is not None:
        _shrink(shrink)
    elif sweep:
        _sweep(minutes if minutes is not None else 10.0, jobs)
    elif plan is not None:
        _simulate_plan(plan, quiet=quiet)
    elif seed is not None:
        _simulate_one(seed, quiet=quiet)
    else:
        _simulate_many(seeds, seconds=minutes * 60 if minutes is not None else None, jobs=jobs, mixed=mixed)


def _shrink(seed: int) -> None:
    from .draw import draw_plan
    from .shrink import shrink

    found = shrink(draw_plan(seed), lambda line: typer.echo(line, err=True))
    if found is None:
        typer.echo(f"seed {seed} keeps every promise: nothing to shrink", err=True)
        raise typer.Exit(1)
    typer.echo(found.text, nl=False)


def _sweep(minutes: float, jobs: int) -> None:
    from .sweep import sweep

    done, failure = sweep(minutes, jobs)
    typer.echo(f"{done} histories of single faults: " + ("one failed" if failure else "every promise kept"))
    if failure:
        typer.echo(failure, nl=False)
        raise typer.Exit(1)


def _simulate_plan(path: Path, *, quiet: bool) -> None:
    from tensorhub.protocol.errors import UsageError

    from .plantext import parse
    from .runner import run_plan

    try:
        plan = parse(path.read_text(encoding="utf-8"))
        if not plan.replicas:
            raise UsageError(f"the plan in {path.name} has no trainer and no rollout")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path.name} is no text", param_hint="--plan") from error
    except UsageError as error:  # 1 is for promises that were broken
        typer.echo(error_text(error), err=True)
        raise typer.Exit(2) from error
    _say(path.name, run_plan(plan, trace=not quiet), quiet=quiet)


def _simulate_one(seed: int, *, quiet: bool) -> None:
    from .runner import run_seed

    _say(f"seed {seed}", run_seed(seed, trace=not quiet), quiet=quiet)


def _say(name: str, result: "SeedResult", *, quiet: bool) -> None:
    if result.lines and not quiet:
        typer.echo("\n".join(result.lines))
    facts = f"{result.events} events in {result.virtual_s:.1f} s of virtual time, history {result.digest}"
    if not result.ok:
        typer.echo(f"{name} failed after {facts}\n{result.error}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{name}: every promise kept; {facts}")


def _simulate_many(text: str, *, seconds: float | None, jobs: int, mixed: bool) -> None:
    import itertools
    from random import SystemRandom

    from rich.console import Console

    from tensorhub.cli.output import count_text, time_text

    from .draw import is_mixed
    from .seeds import parse_seeds, show_seeds

    console = Console(stderr=True)
    if text:
        try:
            seeds = parse_seeds(text)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; use A..B, for example 0..2000", param_hint="--seeds") from error
        total = None if mixed else len(seeds)
        tally = show_seeds(filter(is_mixed, seeds) if mixed else seeds, console, total=total, jobs=jobs)
    else:
        first = SystemRandom().randrange(10**6, 10**9)
        console.print(f"storm: new seeds from {first} on", highlight=False)
        new = itertools.count(first)
        tally = show_seeds(filter(is_mixed, new) if mixed else new, console, total=None, jobs=jobs, seconds=seconds)
    if not tally.done:
        which = f" of {text}, of which none has two ways to cut tensors" if mixed and text else ""
        typer.echo(f"no seed was run{which}: nothing is shown by that", err=True)
        raise typer.Exit(2)
    typer.echo(
        f"{count_text(tally.done, 'seed')}, {tally.events:,} events, {time_text(tally.virtual_s)} of virtual time: "
        + (f"{len(tally.failed)} failed" if tally.failed else "every promise kept")
    )
    if tally.failed:
        numbers = sorted(result.seed for result in tally.failed)
        typer.echo(f"failed: {' '.join(map(str, numbers))}\nreplay: python -m tests.sim --seed {numbers[0]}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
