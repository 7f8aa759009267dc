"""What a user sees when a command fails: one line that says what, one that says what to do, and exit status 1.

Errors of the tree are shown so, and that standard output takes no more. Anything else is a defect, and keeps its
traceback.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO, cast

import typer

from ..core.errors import TensorHubError
from ..transport.scopes import scope
from .streams import descriptor_of, lead_nowhere
from .words import plain_text


class ErrorsAreLines(typer.Typer):
    """A command line whose `TensorHubError`s end the program with a clear line on stderr."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the command that the program's arguments name."""
        stdout, ours = sys.stdout, cast(TextIO, _Output(sys.stdout)) if sys.stdout is not None else None
        sys.stdout = ours or stdout
        try:
            return super().__call__(*args, **kwargs)
        except TensorHubError as error:
            text = error_text(error)
        except OutputFailed as error:
            text = f"error: {error}"
            lead_nowhere(descriptor_of(stdout))  # at its end Python would fail to write there once more
        finally:
            if sys.stdout is ours:  # and not what typer puts there once nobody reads any more
                sys.stdout = stdout
        with suppress(OSError):  # stderr may lie where stdout does
            typer.echo(text, err=True)
        sys.exit(1)


def error_text(error: TensorHubError) -> str:
    """`error (version-unavailable): …` and, where there is one, `hint: …` below it."""
    text = f"error ({error.code}): {' '.join(str(error).split())}"
    return plain_text(f"{text}\nhint: {' '.join(error.hint.split())}" if error.hint else text)


class OutputFailed(Exception):
    """Standard output takes no more. It is no `OSError`, which a command may take for one of its own."""


class _Output:
    """Standard output, whose failures have a name of their own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named():
            self._stream.flush()


@scope
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # who reads has enough: typer and rich end the command without a word
        raise
    except OSError as error:
        raise OutputFailed(f"cannot write to standard output: {error.strerror or error}") from error
