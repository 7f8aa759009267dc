"""What one worker alone may raise at the beginning of a `mutating`, before it calls together with its siblings.

Siblings that have called wait for who has raised here. So those who can ask each other do it first, and agree. Each
waits for the others as long as their calls may take, which is said here too.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .memory.modules import boxes_of_dtensor as boxes_of_dtensor
from .memory.modules import parts_of_module as parts_of_module
from .memory.modules import state_of_module as state_of_module
from .protocol.manifest import encode_metadata
from .runtime.config import options_without_token, parse_seconds
from .runtime.questions import parse_number

if TYPE_CHECKING:
    from .api import Weights


def is_mapped(tensor: Any) -> bool:
    """False where the tensor's device has no memory behind its address: an engine that sleeps took it back."""
    from .memory import cuda

    return cuda.is_mapped(tensor)


def check_step(
    weights: "Weights | None", version: int, metadata: Mapping[str, object] | None, timeout: float | None
) -> None:
    """Raises what `mutating` of these arguments raises of this worker alone. Claims nothing, and changes nothing."""
    check_metadata(metadata)
    if weights is None:
        return
    client = weights._client
    parse_number(version, f"mutating() of {client.me}")
    work = client.settled("mutating", weights._deadline(timeout))
    weights._wait(work, timeout, f"mutating(version={version!r})")


def check_metadata(metadata: Mapping[str, object] | None) -> None:
    """Raises `UsageError` if it cannot be published."""
    if metadata is not None:
        encode_metadata(metadata)


def longest_s(*, timeout: float | None = None, call_timeout: float | None = None) -> tuple[float, float]:
    """How long an `open` with these arguments may take, and each call of what it has opened.

    `timeout` is for `open`, `call_timeout` for the calls. Where one is None, the settings say it. A question to a view
    that was made with the same `timeout` takes no longer than `open`. Raises `UsageError`.
    """
    joining_s = None if timeout is None else parse_seconds(timeout, "timeout")
    call_s = None if call_timeout is None else parse_seconds(call_timeout, "call_timeout")
    options = options_without_token(connect_s=joining_s, timeout_s=call_s)
    return options.connect_s, options.timeout_s


def seconds_of(timeout: float) -> float:
    """How long one call with this `timeout` may take. Raises `UsageError`."""
    return parse_seconds(timeout, "timeout")
