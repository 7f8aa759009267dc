"""`tensorhub`: run a reference server, look at one, look at this machine.

Each command imports what it needs when it is called, so `tensorhub --help` is quick and the server never loads torch.
"""

from typing import Annotated

import typer

from . import store
from .options import (
    DEFAULT_SERVER,
    NO_TYPE,
    PATIENCE_S,
    FilterOption,
    JsonOption,
    ModelOption,
    ReplicaOption,
    ServerOption,
    TokenFileOption,
    token_in,
)
from .output import ErrorsAreLines, between

app = ErrorsAreLines(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves model weights from trainers to rollouts: versioned, verified, read from the workers that hold them.",
)

app.add_typer(store.commands)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", metavar=NO_TYPE, help="Show the version and exit.")] = False,
) -> None:
    """The options before every command."""
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"tensorhub {version_of('tensorhub')}")
        raise typer.Exit


StateOption = Annotated[
    str,
    typer.Option(help="File of its journal, by which it knows its workers after a restart.", show_default="by port"),
]
StandbyOption = Annotated[
    bool,
    typer.Option(
        "--standby", metavar=NO_TYPE, help="Wait until the server that uses the same --state is gone; then begin."
    ),
]


StandbyOfOption = Annotated[
    str,
    typer.Option(
        help="Copy the journal of the server at this address, and begin when it is gone for two leases.",
        show_default=False,
    ),
]


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 7450,
    token_file: TokenFileOption = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", metavar=NO_TYPE, help="Ask for no token: any client may join.")
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
    state: StateOption = "",
    standby: StandbyOption = False,
    standby_of: StandbyOfOption = "",
    lease: Annotated[
        float | None, typer.Option(help="Seconds for which a silent worker is believed.", show_default="10")
    ] = None,
    log: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str, typer.Option("--log-format", envvar="TENSORHUB_LOG_FORMAT", help="text, or json: an object a line.")
    ] = "text",
) -> None:
    """Run a reference server until Ctrl-C or SIGTERM."""
    import logging

    from ..runtime.config import access_of, server_settings
    from ..runtime.serving import run_server
    from .output import log_to_stderr, say

    levels = logging.getLevelNamesMapping()
    if log.upper() not in levels:
        raise typer.BadParameter(f"{log!r} is none of debug, info, warning, error", param_hint="--log")
    if log_format not in ("text", "json"):
        raise typer.BadParameter(f"{log_format!r} is neither text nor json", param_hint="--log-format")
    settings = server_settings(lease_s=lease)
    access = access_of(token_file=token_file, insecure=insecure or None, create=True)

    def tell(address: str) -> None:
        say(f"reference server at {address}; Ctrl-C ends it")
        if access.insecure:
            say("it asks for no token: any client that reaches it may join, publish and read")
        elif access.kept_in:
            say(f"its token is in {access.kept_in}: workers and commands of this user find it by themselves")
            say("on other hosts: copy that file to the same place (mode 600), or set TENSORHUB_TOKEN to what is in it")
        if not fresh:
            say(f"where workers may live, it hears them first, for {settings.lease_s:g} s at most (--fresh skips that)")

    with log_to_stderr(levels[log.upper()], as_json=log_format == "json"):
        run_server(
            *(host, port),
            settings=settings,
            token=access.token,
            insecure=access.insecure,
            names=name or None,
            fresh=fresh,
            state=state,
            standby=standby,
            standby_of=standby_of,
            on_ready=tell,
        )


@app.command()
def status(
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
    model: ModelOption = "",
    replica: ReplicaOption = "",
    word: FilterOption = "",
    all_: Annotated[bool, typer.Option("--all", metavar=NO_TYPE, help="All replicas, however many lines.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show who holds which version, who is behind, and what each waits for: one screen, the slowest first."""
    from rich.console import Console

    from .. import connect
    from ..protocol.errors import VersionUnavailable
    from .status import SCREEN_LINES, draw_status, only, print_lines, status_json

    view = connect(server, token=token_in(token_file), timeout=PATIENCE_S)
    found = only(view.status(model=model), replica=replica, word=word)
    if as_json:
        typer.echo(status_json(found))
        return
    if model and not found.models:
        hint = f"there are: {', '.join(view.models()) or 'none yet'}"
        raise VersionUnavailable(f"{server} knows no model {model!r}", hint=hint)
    console = Console()
    most = None if all_ else SCREEN_LINES
    print_lines(console, draw_status(found, server=server, width=console.width, most_lines=most))


@app.command()
def watch(
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
    model: ModelOption = "",
    replica: ReplicaOption = "",
    word: FilterOption = "",
    every: Annotated[float, between(0.1, 86_400, help="Seconds between two looks.")] = 0.5,
    times: Annotated[int | None, typer.Option(help="How many looks.", min=1, show_default="until q")] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar=NO_TYPE, help="A line of JSON for each look.")] = False,
) -> None:
    """Show the status live. Arrows, PgUp and PgDn scroll; q ends it."""
    from contextlib import suppress

    from rich.console import Console

    from .. import connect
    from .status import only
    from .watch import Watcher, watch_json
    from .watch import watch as watch_with

    with suppress(KeyboardInterrupt):
        view = connect(server, token=token_in(token_file), timeout=PATIENCE_S)
        watcher = Watcher(server, lambda: only(view.status(model=model), replica=replica, word=word), model=model)
        if as_json:
            watch_json(watcher, typer.echo, every_s=every, times=times)
        else:
            watch_with(watcher, Console(), every_s=every, times=times)


@app.command()
def events(
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
    model: ModelOption = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", metavar=NO_TYPE, help="Go on with those to come.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar=NO_TYPE, help="Each as a JSON object on a line.")] = False,
) -> None:
    """Show what has happened, oldest first: the newest 10,000 events that the server keeps."""
    from contextlib import suppress

    from .. import connect
    from .events import show_events

    with suppress(KeyboardInterrupt):
        view = connect(server, token=token_in(token_file), timeout=PATIENCE_S)
        show_events(view, model=model, follow=follow, as_json=as_json)


@app.command()
def doctor(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option("--server", envvar="TENSORHUB_SERVER", help="Also ask this reference server.", show_default=False),
    ] = None,
    token_file: TokenFileOption = "",
    as_json: JsonOption = False,
    all_: Annotated[
        bool, typer.Option("--all", metavar=NO_TYPE, help="Also a line for each thing that is well.")
    ] = False,
) -> None:
    """Show which transports work on this machine, at what rate, and what to do about those that do not."""
    from rich.console import Console

    from .doctor import draw_findings, examine
    from .output import shown

    source = context.get_parameter_source("server")
    named_by = "TENSORHUB_SERVER" if source is not None and source.name == "ENVIRONMENT" else ""
    console = Console(quiet=as_json)
    with shown(console.status("moving 256 MiB between two processes, once for each transport")):
        found = examine(server, token_in(token_file), named_by=named_by)
    if as_json:
        typer.echo(found.as_json())
    else:
        console.print(draw_findings(found, is_long=all_))
    raise typer.Exit(0 if found.is_well else 1)
