"""Options that several commands have."""

from typing import Annotated

import typer

DEFAULT_SERVER = "127.0.0.1:7450"
NO_TYPE = ""  # of a switch: "<bool>" behind it in the help looks as if it took a value
PATIENCE_S = 5.0  # people wait; the status of 20,000 workers takes about one second

ServerOption = Annotated[
    str,
    typer.Option(
        "--server", envvar="TENSORHUB_SERVER", help="The reference server, host:port; several: a:7450,b:7450."
    ),
]
TokenFileOption = Annotated[
    str,
    typer.Option(
        "--token-file",
        help="The file that has the shared secret.",
        show_default="TENSORHUB_TOKEN, TENSORHUB_TOKEN_FILE, or this user's own",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar=NO_TYPE, help="As JSON, for programs.")]
ModelOption = Annotated[str, typer.Option("--model", help="Only this model.", show_default=False)]
ReplicaOption = Annotated[
    str,
    typer.Option("--replica", help="Only replicas of that name; * and ? stand for any letters.", show_default=False),
]
FilterOption = Annotated[
    str,
    typer.Option(
        "--filter",
        help="Only replicas with that word in their name, state, host, site, call, source or reasons.",
        show_default=False,
    ),
]


def token_in(path: str) -> str:
    """The token in that file; empty: where the settings say."""
    from ..runtime.config import access_of

    return access_of(token_file=path).token if path else ""
