"""Context managers made of generators that may raise another error than the one that passes through.

As `contextlib.contextmanager`, whose `__exit__` keeps the error that came in as a variable of its frame. Where the
generator raises another one, that frame is never left in order; from Python 3.12 on the first error's traceback leads
to it, and so back to itself. What the frames of such a circle know, as a read and its tensors, then waits for the
garbage collector.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

Given = TypeVar("Given")
Arguments = ParamSpec("Arguments")


class _Scope(AbstractContextManager[Given, bool | None]):
    """One block. The generator yields once."""

    def __init__(self, steps: Iterator[Given]) -> None:
        self._steps = steps

    def __enter__(self) -> Given:
        return next(self._steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """True if the generator has taken the error for its own."""
        if error is None:
            next(self._steps, None)
            return False
        try:
            self._steps.throw(error)  # type: ignore[attr-defined]
        except StopIteration:
            return True
        except BaseException as raised:
            is_wrapped = isinstance(error, StopIteration) and raised.__cause__ is error  # so generators raise those
            if raised is not error and not is_wrapped:
                raise
            error.__traceback__ = trace
            return False
        finally:
            del kind, error, trace
        return True


def scope(
    steps: Callable[Arguments, Iterator[Given]],
) -> Callable[Arguments, AbstractContextManager[Given, bool | None]]:
    """Make a function that returns a context manager out of a generator that yields once."""

    @wraps(steps)
    def made(*arguments: Arguments.args, **named: Arguments.kwargs) -> AbstractContextManager[Given, bool | None]:
        return _Scope(steps(*arguments, **named))

    return made
