"""Short tracebacks: an error of TensorHub shows the caller's frame and one of ours.

Its cause is printed in one line. The debug log has all frames, and TENSORHUB_TRACEBACK=full leaves them in the error.
"""

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from .protocol.errors import TensorHubError
from .runtime.loops import is_worker_loop

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")

_log = logging.getLogger(__name__)

DUNDERS = ("__enter__", "__exit__", "__aenter__", "__aexit__")  # of the methods with such names those that call


def without_frames(error: TensorHubError) -> TensorHubError:
    """The error without the frames below its caller's, and with its cause in one line."""
    if os.environ.get("TENSORHUB_TRACEBACK") == "full":
        return error
    _log.debug("%s", error, exc_info=error)
    cause = error.__cause__
    if cause is not None:
        cause.__traceback__ = None
        if cause.__cause__ is not None:  # it can still be had, and is not printed
            cause.__context__, cause.__cause__ = cause.__cause__, None
        cause.__suppress_context__ = True
    error.__suppress_context__ = True
    return error.with_traceback(None)


def brief(call: Callable[P, T]) -> Callable[P, T]:
    """The same function, or coroutine function, whose errors are shown without our frames."""
    if inspect.iscoroutinefunction(call):
        return _brief_coroutine(call)  # type: ignore[return-value]

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except TensorHubError as error:
            raise without_frames(error)  # noqa: B904 - it is the same error

    return called


def _brief_coroutine(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    @wraps(call)
    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_worker_loop(asyncio.get_running_loop()):  # a thread waits for it, whose call cuts the frames
            return await call(*args, **kwargs)
        try:
            return await call(*args, **kwargs)
        except TensorHubError as error:
            raise without_frames(error)  # noqa: B904 - it is the same error

    return called


def brief_methods(cls: type[C]) -> type[C]:
    """The same class: errors of its public methods are shown without our frames."""
    for name, found in list(vars(cls).items()):
        if inspect.isfunction(found) and (name in DUNDERS or not name.startswith("_")):
            setattr(cls, name, brief(found))
    return cls


class Block(AbstractContextManager[T], Generic[T]):
    """A `with` block whose own errors are shown without our frames."""

    def __init__(self, inner: AbstractContextManager[T]) -> None:
        self._inner = inner

    @brief
    def __enter__(self) -> T:
        return self._inner.__enter__()

    @brief
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._inner.__exit__(kind, error, trace)


class AsyncBlock(AbstractAsyncContextManager[T], Generic[T]):
    """The same of an `async with` block."""

    def __init__(self, inner: AbstractAsyncContextManager[T]) -> None:
        self._inner = inner

    @brief
    async def __aenter__(self) -> T:
        return await self._inner.__aenter__()

    @brief
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)
