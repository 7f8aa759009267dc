"""`tensorhub events`: what has happened, a line for each event."""

import time

import msgspec
import typer

from ..api import View
from ..protocol.errors import ServerUnreachable
from ..protocol.events import Event, is_alarming
from .output import error_text, plain_text

AGAIN_S = 1.0  # after a server was not reached


def show_events(view: View, *, model: str, follow: bool, as_json: bool) -> None:
    """Prints the events. With `follow` it waits for a server that is away, and ends by an interrupt only."""
    last = 0
    if follow:
        view.status()  # a server that was never there is not waited for
    while True:
        try:
            for event in view.events(after=last, follow=follow, model=model):
                last = max(last, event.number)
                show(event, as_json=as_json)
            return
        except ServerUnreachable as error:
            if not follow:
                raise
            typer.echo(error_text(error), err=True)
            time.sleep(AGAIN_S)


def show(event: Event, *, as_json: bool) -> None:
    """Prints one event: local time and text, or the fields as JSON."""
    if as_json:
        typer.echo(msgspec.json.encode(event).decode())
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    text = plain_text(event.text).replace("\n", " ")
    typer.secho(f"{at}  {text}", fg="yellow" if is_alarming(event) else None)
