"""`tensorhub`: run a reference server, look at one or at this machine, simulate a cluster, see the main job.

Each command imports what it needs when it is called, so `tensorhub --help` is quick and the server never loads torch.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .bounds import between
from .errors import ErrorsAreLines, error_text

if TYPE_CHECKING:
    from ..sim.runner import SeedResult

app = ErrorsAreLines(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reference-Oriented Storage: versioned weights, read straight from the peers that hold them.",
)

DEFAULT_SERVER = "127.0.0.1:7450"
NO_TYPE = ""  # of a switch: "<bool>" behind it in the help looks as if it took a value
MOST_JOBS = 1_024  # each is a Python of its own, and all are started at once
PATIENCE_S = 5.0  # people wait; the status of 20,000 workers takes about one second

ServerOption = Annotated[
    str, typer.Option("--server", envvar="TENSORHUB_SERVER", help="The reference server, host:port.")
]
TokenFileOption = Annotated[
    str,
    typer.Option(
        "--token-file",
        help="The file that has the shared secret.",
        show_default="TENSORHUB_TOKEN, TENSORHUB_TOKEN_FILE, or this user's own",
    ),
]
ModelOption = Annotated[str, typer.Option("--model", help="Only this model.", show_default=False)]


def _token_in(path: str) -> str:
    """The token in that file; empty: where the settings say."""
    from ..runtime.config import access_of

    return access_of(token_file=path).token if path else ""


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", metavar=NO_TYPE, help="Show the version and exit.")] = False,
) -> None:
    """What stands before every command."""
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"tensorhub {version_of('tensorhub')}")
        raise typer.Exit


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 7450,
    token_file: TokenFileOption = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", metavar=NO_TYPE, help="Ask for no token: everybody may join.")
    ] = False,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which clients reach it, where that is not this machine's; may be given several times.",
            show_default="TENSORHUB_NAMES",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", metavar=NO_TYPE, help="No server lived at this address before: skip the recovery wait."
        ),
    ] = False,
    lease: Annotated[
        float | None, typer.Option(help="Seconds for which a silent worker is believed.", show_default="10")
    ] = None,
    log: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run a reference server until Ctrl-C or SIGTERM."""
    import logging

    from ..runtime.config import access_of, server_settings
    from ..runtime.serving import run_server
    from .log import log_to_stderr, say

    levels = logging.getLevelNamesMapping()
    if log.upper() not in levels:
        raise typer.BadParameter(f"{log!r} is none of debug, info, warning, error", param_hint="--log")
    settings = server_settings(lease_s=lease)
    access = access_of(token_file=token_file, insecure=insecure or None, create=True)

    def tell(address: str) -> None:
        say(f"reference server at {address}; Ctrl-C ends it")
        if access.insecure:
            say("it asks for no token: everybody who reaches it may join, publish and read")
        elif access.kept_in:
            say(f"its token is in {access.kept_in}: workers and commands of this user find it by themselves")
            say("on other hosts: copy that file to the same place (mode 600), or set TENSORHUB_TOKEN to what is in it")
        if not fresh:
            say(f"for {settings.lease_s:g} s it hears who is there before it decides (--fresh skips that)")

    with log_to_stderr(levels[log.upper()]):
        run_server(
            *(host, port),
            settings=settings,
            token=access.token,
            insecure=access.insecure,
            names=name or None,
            fresh=fresh,
            on_ready=tell,
        )


@app.command()
def status(
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
    model: ModelOption = "",
    as_json: Annotated[bool, typer.Option("--json", metavar=NO_TYPE, help="As JSON, for programs.")] = False,
) -> None:
    """Show models, versions, replicas and shards, and who reads from whom and why."""
    from rich.console import Console

    from .. import connect
    from ..core.errors import VersionUnavailable
    from .draw import draw_status, status_json

    view = connect(server, token=_token_in(token_file), timeout=PATIENCE_S)
    found = view.status(model=model)
    if as_json:
        typer.echo(status_json(found))
        return
    if model and not found.models:
        hint = f"there are: {', '.join(view.models()) or 'none yet'}"
        raise VersionUnavailable(f"{server} knows no model {model!r}", hint=hint)
    console = Console()
    console.print(draw_status(found, server=server, width=console.width))


@app.command()
def watch(
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
    model: ModelOption = "",
    every: Annotated[float, between(0.1, 86_400, help="Seconds between two looks.")] = 0.5,
    times: Annotated[int | None, typer.Option(help="How many looks.", min=1, show_default="until Ctrl-C")] = None,
) -> None:
    """Show the status live, with progress bars and rates."""
    from contextlib import suppress

    from rich.console import Console

    from .. import connect
    from .live import Watcher
    from .live import watch as watch_with

    with suppress(KeyboardInterrupt):
        view = connect(server, token=_token_in(token_file), timeout=PATIENCE_S)
        watcher = Watcher(server, lambda: view.status(model=model), model=model)
        watch_with(watcher, Console(), every_s=every, times=times)


@app.command()
def doctor(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", envvar="TENSORHUB_SERVER", help="Also ask this reference server, host:port.", show_default=False
        ),
    ] = None,
    token_file: TokenFileOption = "",
    as_json: Annotated[bool, typer.Option("--json", metavar=NO_TYPE, help="As JSON, for programs.")] = False,
    all_: Annotated[
        bool, typer.Option("--all", metavar=NO_TYPE, help="Also a line for each thing that is well.")
    ] = False,
) -> None:
    """Show which transports work on this machine, at what rate, and what to do about those that do not."""
    from rich.console import Console

    from .doctor import examine
    from .doctor_draw import draw_findings
    from .leaving import shown

    source = context.get_parameter_source("server")
    named_by = "TENSORHUB_SERVER" if source is not None and source.name == "ENVIRONMENT" else ""
    console = Console(quiet=as_json)
    with shown(console.status("moving 256 MiB between two processes, once for each transport")):
        found = examine(server, _token_in(token_file), named_by=named_by)
    if as_json:
        typer.echo(found.as_json())
    else:
        console.print(draw_findings(found, is_long=all_))
    raise typer.Exit(0 if found.is_well else 1)


@app.command()
def demo(
    updates: Annotated[
        bool,
        typer.Option(
            "--updates/--no-updates",
            metavar=NO_TYPE,
            help="Without: rollouts keep their first version, and learn nothing.",
        ),
    ] = True,
    steps: Annotated[
        int | None, typer.Option(help="Training steps; with much fewer it does not learn enough.", show_default="100")
    ] = None,
    rollouts: Annotated[
        int | None, typer.Option(help="Rollout replicas at the start.", show_default="3; engines: 2")
    ] = None,
    engine: Annotated[
        str, typer.Option(help='"vllm": vLLM generates and FSDP2 trains, on the CPU (make demo-vllm).')
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Of the policy and of what it is asked.", show_default="0")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report.", show_default="out/demo, out/demo-vllm")
    ] = None,
) -> None:
    """The main job: a real RL run on this machine, with faults; ends in a report as HTML and JSON."""
    from importlib.util import find_spec

    from ..core.errors import TensorHubError

    needs: tuple[str, ...] = ("torch", "matplotlib")
    hint = "pip install 'tensorhub[demo]'"
    if engine == "vllm":
        needs, hint = (*needs, "transformers", "vllm"), "make demo-vllm, which installs vLLM for the CPU in .envs/vllm"
    elif engine:
        raise TensorHubError(f"there is no demo with the engine {engine!r}", hint="--engine vllm, or none")
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        raise TensorHubError(f"the demo needs {' and '.join(missing)}", hint=hint)
    from ..demo.orchestrate import run_demo, usual

    given = {"steps": steps, "rollouts": rollouts, "seed": seed, "out": out}
    chosen = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(run_demo(replace(usual(engine), updates=updates, **chosen)))  # type: ignore[arg-type]


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
    from ..lab.run import Options, run_scenario

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


@app.command()
def simulate(
    seed: Annotated[int | None, typer.Option(help="Print one history as readable lines.", min=0)] = None,
    seeds: Annotated[str, typer.Option(help="Run many: A..B, both included.", show_default=False)] = "",
    storm: Annotated[
        bool, typer.Option("--storm", metavar=NO_TYPE, help="Run new seeds until Ctrl-C or --minutes.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(help="How long a storm lasts.", min=0.0, show_default=False)] = None,
    mixed: Annotated[
        bool, typer.Option("--mixed", metavar=NO_TYPE, help="Of many, only those with two ways to cut tensors.")
    ] = False,
    jobs: Annotated[int, between(1, MOST_JOBS, help="Processes at a time.", show_default="cores")] = min(
        os.cpu_count() or 1, MOST_JOBS
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
    if (seed is not None) + bool(seeds) + storm + (shrink is not None) + (plan is not None) != 1:
        raise typer.BadParameter("give exactly one of --seed, --seeds, --storm, --shrink and --plan")
    if shrink is not None:
        _shrink(shrink)
    elif plan is not None:
        _simulate_plan(plan, quiet=quiet)
    elif seed is not None:
        _simulate_one(seed, quiet=quiet)
    else:
        _simulate_many(seeds, seconds=minutes * 60 if minutes is not None else None, jobs=jobs, mixed=mixed)


def _shrink(seed: int) -> None:
    from ..sim.draw import draw_plan
    from ..sim.shrink import shrink

    found = shrink(draw_plan(seed), lambda line: typer.echo(line, err=True))
    if found is None:
        typer.echo(f"seed {seed} keeps every promise: nothing to shrink", err=True)
        raise typer.Exit(1)
    typer.echo(found.text, nl=False)


def _simulate_plan(path: Path, *, quiet: bool) -> None:
    from ..core.errors import UsageError
    from ..sim.plantext import parse
    from ..sim.runner import run_plan

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
    from ..sim.runner import run_seed

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

    from ..sim.draw import is_mixed
    from .seeds import parse_seeds, show_seeds
    from .words import count_text, time_text

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
        typer.echo(f"failed: {' '.join(map(str, numbers))}\nreplay: tensorhub simulate --seed {numbers[0]}", err=True)
        raise typer.Exit(1)
