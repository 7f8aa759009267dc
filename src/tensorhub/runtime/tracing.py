"""OpenTelemetry spans of calls, where the program has imported opentelemetry-api.

Each call of `Weights` is a span named for it, such as `tensorhub.update`, a child of its caller's span. It has the
attributes `tensorhub.model`, `.replica`, `.shard` and `.spec`, and `.version` once the call has ended well.
"""

import sys
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from ..protocol.names import WorkerId

if TYPE_CHECKING:
    from opentelemetry import trace

    from .client import Client

P = ParamSpec("P")
T = TypeVar("T")


class Caller(Protocol):
    """What a call is made on."""

    _client: "Client"


W = TypeVar("W", bound=Caller)

Call = Callable[Concatenate[W, P], Coroutine[object, object, T]]


def traced(name: str) -> Callable[[Call[W, P, T]], Call[W, P, T]]:
    """Makes a span `tensorhub.NAME` of each call."""

    def decorate(call: Call[W, P, T]) -> Call[W, P, T]:
        @wraps(call)
        async def begun(self: W, /, *args: P.args, **kwargs: P.kwargs) -> T:
            api = sys.modules.get("opentelemetry.trace")  # a program without it has no tracer either
            if api is None:
                return await call(self, *args, **kwargs)
            spec = kwargs.get("version", kwargs.get("spec", args[0] if args else ""))
            span = _span(api.get_tracer("tensorhub"), name, self._client.me, spec)
            return await _ended(span, partial(call, self, *args, **kwargs))

        return begun

    return decorate


def _span(tracer: "trace.Tracer", name: str, me: WorkerId, spec: object) -> "trace.Span":
    """A child of the span that is current in the calling thread or task."""
    known: dict[str, str | int] = {"model": str(me.model), "replica": str(me.replica), "shard": int(me.shard)}
    if spec != "":
        known["spec"] = str(spec)
    return tracer.start_span(f"tensorhub.{name}", attributes={f"tensorhub.{key}": known[key] for key in known})


async def _ended(span: "trace.Span", call: Callable[[], Coroutine[object, object, T]]) -> T:
    """Ends the span with the call. An exception is recorded in it, and goes on."""
    from opentelemetry.trace import Status, StatusCode

    try:
        found = await call()
        if isinstance(found, int):
            span.set_attribute("tensorhub.version", found)
        return found
    except BaseException as error:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        span.end()
