"""What a user sees when a command fails: one line that says what, one that says what to do, and exit status 1.

Only errors of the tree are shown so. Anything else is a defect, and keeps its traceback.
"""

import sys

import typer

from ..core.errors import TensorHubError


class ErrorsAreLines(typer.Typer):
    """A command line whose `TensorHubError`s end the program with a clear line on stderr."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the command that the program's arguments name."""
        try:
            return super().__call__(*args, **kwargs)
        except TensorHubError as error:
            typer.echo(error_text(error), err=True)
            sys.exit(1)


def error_text(error: TensorHubError) -> str:
    """`error (version-unavailable): …` and, where there is one, `hint: …` below it."""
    text = f"error ({error.code}): {' '.join(str(error).split())}"
    return f"{text}\nhint: {' '.join(error.hint.split())}" if error.hint else text
