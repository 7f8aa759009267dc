"""Commands for versions, files and object stores: `push`, `pull`, `ls`, `rm`, `hold`, `archive`."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DEFAULT_SERVER, NO_TYPE, PATIENCE_S, JsonOption, ServerOption, TokenFileOption, token_in
from .output import between, count_text, say, shown, size_text, time_text

if TYPE_CHECKING:
    from ..runtime.config import LoadArguments

commands = typer.Typer()

MAX_S = 30 * 86_400.0
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

ModelArgument = Annotated[str, typer.Argument(help="The model's name.", show_default=False)]


def parse_size(text: str) -> int | None:
    """Bytes of `5GB`, `512MiB`, `1000`; None of an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,15})\s*([KMG]I?B)?", text.strip().upper())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size: for example 5GB, 512MiB")
    return int(found[1]) * UNITS[found[2] or ""]


def _where(server: str, token_file: str) -> "LoadArguments":
    return {"server": server, "token": token_in(token_file) or None}


def _bar(what: str) -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[note]}"),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )


@commands.command()
def push(
    model: ModelArgument,
    path: Annotated[Path, typer.Argument(help="A safetensors file, or a directory of a checkpoint.", exists=True)],
    version: Annotated[
        int | None, typer.Option(help="The number to publish under.", min=0, show_default="the next one")
    ] = None,
    replica: Annotated[str, typer.Option(help="The name by which other workers see it.")] = "push",
    until_held: Annotated[int, typer.Option(help="Serve until so many other replicas hold it.", min=0)] = 1,
    stay: Annotated[bool, typer.Option("--stay", metavar=NO_TYPE, help="Serve until Ctrl-C or SIGTERM.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
) -> None:
    """Publish a checkpoint as a version, from where its files lie."""
    from .. import files

    with shown(_bar("push")) as bar:
        task = bar.add_task(f"{model} from {path}", total=None, note="")

        def change(found: files.Pushed) -> None:
            note = f"version {found.version}, held by {count_text(len(found.holders), 'other replica')}"
            part = round(found.best_part * found.size_bytes)
            bar.update(task, total=found.size_bytes, completed=part, note=note)

        held = None if stay else until_held
        work = files.push(
            model,
            path,
            version=version,
            replica=replica,
            until_held=held,
            on_change=change,
            **_where(server, token_file),
        )
        found = asyncio.run(work)
    by = f"is held by {', '.join(found.holders)}" if found.holders else "was read by a worker that has left"
    by = by if found.holders or until_held else "was published, and is held by no other replica"
    say(f"{model} version {found.version}, {size_text(found.size_bytes)}, {by}")
    if not found.keeps_files:
        say("its names and headers have no room in metadata: a pull makes other files with the same tensors")


@commands.command()
def pull(
    model: ModelArgument,
    path: Annotated[Path, typer.Argument(help="A file (*.safetensors), or a directory.", show_default=False)],
    version: Annotated[str, typer.Option(help="A number, latest or latest-N.")] = "latest",
    max_shard_size: Annotated[
        str, typer.Option(help="Cut new files of this size, such as 5GB.", show_default="the files that were pushed")
    ] = "",
    timeout: Annotated[float, between(1.0, MAX_S, help="Seconds for all of it.")] = 3600.0,
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
) -> None:
    """Write a version to safetensors files. Goes on where an earlier pull to the same path was ended."""
    from .. import files
    from ..runtime.questions import spec_of_text

    began, spec, most = time.monotonic(), spec_of_text(version), parse_size(max_shard_size)
    with shown(_bar("pull")) as bar:
        task = bar.add_task(f"{model} to {path}", total=None, note="")

        def advance(number: int, part: float, size_bytes: int) -> None:
            bar.update(task, total=size_bytes, completed=round(part * size_bytes), note=f"version {number}")

        work = files.pull(
            model, path, spec, max_shard_bytes=most, timeout=timeout, on_progress=advance, **_where(server, token_file)
        )
        found = asyncio.run(work)
    size, came = size_text(found.size_bytes), size_text(found.received_bytes)
    took = time_text(time.monotonic() - began)
    say(f"{model} version {found.version}, {size}, is in {path}: {came} came in {took}, every chunk is verified")


@commands.command("ls")
def list_versions(
    model: Annotated[str, typer.Argument(help="Its versions.", show_default="all models")] = "",
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
) -> None:
    """List models, or the versions of one, with sizes, holders and ages."""
    from rich.console import Console
    from rich.table import Table

    from .. import connect
    from ..protocol.errors import VersionUnavailable

    view = connect(server, token=token_in(token_file) or None, timeout=PATIENCE_S)
    found = view.status(model=model)
    if model and not found.models:
        hint = f"there are: {', '.join(view.models()) or 'none yet'}"
        raise VersionUnavailable(f"{server} knows no model {model!r}", hint=hint)
    ages = _ages(view, model)
    rows = [
        {
            "model": each.name,
            "version": one.version,
            "size_bytes": each.size_bytes,
            "holders": sorted({*one.holders, *one.host_copies}),
            "is_latest": one.is_latest,
            "is_lost": one.is_lost,
            "age_s": ages.get((each.name, one.version)),
        }
        for each in found.models
        for one in each.versions
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("MODEL", "VERSION", "SIZE", "AGE", "HELD BY"):
        table.add_column(name, justify="right" if name in ("VERSION", "SIZE", "AGE") else "left", overflow="fold")
    for row in rows if model else [_newest(rows, each.name) for each in found.models if each.versions]:
        _add(table, row)
    Console().print(table)


def _newest(rows: list[dict[str, Any]], model: str) -> dict[str, Any]:
    mine = [row for row in rows if row["model"] == model]
    return next((row for row in mine if row["is_latest"]), mine[0])


def _add(table: Any, row: dict[str, Any]) -> None:
    age = "" if row["age_s"] is None else time_text(row["age_s"])
    holders = ", ".join(row["holders"]) or ("lost" if row["is_lost"] else "none")
    latest = " (latest)" if row["is_latest"] else ""
    table.add_row(row["model"], f"{row['version']}{latest}", size_text(row["size_bytes"]), age, holders)


def _ages(view: Any, model: str) -> dict[tuple[str, int], float]:
    """Seconds since each version was published, of those whose event the server still has."""
    from ..protocol.events import Published

    now, ages = time.time(), dict[tuple[str, int], float]()
    for event in view.events(model=model):
        if isinstance(event, Published):
            ages[event.model, event.version] = max(0.0, now - event.at)
    return ages


@commands.command()
def rm(
    model: ModelArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar=NO_TYPE, help="Do not ask.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
    timeout: Annotated[float, between(0.1, 86_400, help="Seconds until all its workers have heard so.")] = 30.0,
) -> None:
    """Forget the version numbers of a model, so that training may begin anew at any number. It removes no version.

    It refuses while a worker holds a version of the model.
    """
    from .. import connect

    if not yes:
        typer.confirm(f"Forget the version numbers of {model} at {server}?", abort=True)
    connect(server, token=token_in(token_file) or None, timeout=PATIENCE_S).begin_anew(model, timeout=timeout)
    say(f"{model} is begun anew: its next version may have any number")


@commands.command()
def hold(
    model: ModelArgument,
    keep: Annotated[int, typer.Option(help="How many of the newest versions.", min=1, max=64)] = 1,
    host_bytes: Annotated[
        str, typer.Option(help="The most memory, such as 200GiB.", show_default="(keep + 1) times the model")
    ] = "",
    replica: Annotated[str, typer.Option(help="The name by which other workers see it; -0, -1, … follow.")] = "hold",
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
) -> None:
    """Hold the newest versions of a model in host memory, and serve them, until Ctrl-C or SIGTERM."""
    from .. import archive as keeping

    def change(versions: tuple[int, ...], size_bytes: int) -> None:
        say(f"{model}: holds {', '.join(map(str, versions)) or 'none'}, {size_text(size_bytes)} of memory")

    most, where = parse_size(host_bytes), _where(server, token_file)
    work = keeping.hold(model, keep=keep, host_bytes=most, replica=replica, on_change=change, **where)
    _until_told(work)


@commands.command()
def archive(
    model: ModelArgument,
    to: Annotated[str, typer.Option(help="Where: file://, s3://, gs:// or az://.", show_default=False)],
    every: Annotated[int, typer.Option(help="Archive a version so many above the last one; 0: none.", min=0)] = 10,
    keep: Annotated[int, typer.Option(help="How many archived versions are kept.", min=1)] = 5,
    serves: Annotated[
        bool, typer.Option("--serve", metavar=NO_TYPE, help="Give versions back where they are lacking.")
    ] = False,
    alone: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Without any holder of a version: until lost higher numbers are forgotten.", min=0
        ),
    ] = 300.0,
    replica: Annotated[str, typer.Option(help="The name by which other workers see it.")] = "archive",
    server: ServerOption = DEFAULT_SERVER,
    token_file: TokenFileOption = "",
) -> None:
    """Write versions to an object store, until Ctrl-C or SIGTERM; with --serve also give them back."""
    from .. import archive as keeping

    options = {"every": every, "keep": keep, "serves": serves, "alone_s": alone, "replica": replica}
    _until_told(keeping.archive(model, to, on_change=say, **options, **_where(server, token_file)))  # type: ignore[arg-type]


def _until_told(work: Coroutine[object, object, None]) -> None:
    """Run it until a signal ends it: then it leaves as workers do, and that is a good end."""

    async def run() -> None:
        task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
