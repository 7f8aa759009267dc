"""TensorHub: versioned model weights, read straight from the workers that hold them.

    with tensorhub.serve() as server:
        weights = tensorhub.open("policy", replica="trainer", server=server.address)
        weights.register(model)
        weights.publish(1)

Importing this starts nothing and loads neither torch nor the network libraries; that happens with the first `open`,
`serve` or `connect`. The same methods as coroutines are in `tensorhub.aio`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .protocol import errors
from .protocol.errors import (
    Closed,
    CorruptTransfer,
    DeadlineExceeded,
    GroupIncomplete,
    GroupMismatch,
    HostMemoryFull,
    InvariantViolation,
    LayoutMismatch,
    NotDrained,
    Refused,
    ServerUnreachable,
    SessionLost,
    ShardTaken,
    SourceLost,
    TensorHubError,
    TransferError,
    TransportMissing,
    Unavailable,
    UsageError,
    VersionConflict,
    VersionUnavailable,
)
from .transport import threads

if TYPE_CHECKING:
    from . import aio
    from .api import View, Weights, connect, leave_on_sigterm, open, serve
    from .calls import Call
    from .group import Group, open_group
    from .loading import Loaded, load, load_shards
    from .memory.host_memory import empty, empty_like
    from .protocol.layout import Box
    from .runtime.statistics import Progress, Statistics
    from .sets import WeightsSet, open_set

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(("View", "Weights", "connect", "leave_on_sigterm", "open", "serve"), ".api"),
    "Box": ".protocol.layout",
    "Call": ".calls",
    **dict.fromkeys(("Progress", "Statistics"), ".runtime.statistics"),
    **dict.fromkeys(("Group", "open_group"), ".group"),
    **dict.fromkeys(("Loaded", "load", "load_shards"), ".loading"),
    **dict.fromkeys(("empty", "empty_like"), ".memory.host_memory"),
    **dict.fromkeys(("WeightsSet", "open_set"), ".sets"),
}

__all__ = [
    "Box",
    "Call",
    "Closed",
    "CorruptTransfer",
    "DeadlineExceeded",
    "Group",
    "GroupIncomplete",
    "GroupMismatch",
    "HostMemoryFull",
    "InvariantViolation",
    "LayoutMismatch",
    "Loaded",
    "NotDrained",
    "Progress",
    "Refused",
    "ServerUnreachable",
    "SessionLost",
    "ShardTaken",
    "SourceLost",
    "Statistics",
    "TensorHubError",
    "TransferError",
    "TransportMissing",
    "Unavailable",
    "UsageError",
    "VersionConflict",
    "VersionUnavailable",
    "View",
    "Weights",
    "WeightsSet",
    "aio",
    "connect",
    "empty",
    "empty_like",
    "errors",
    "leave_on_sigterm",
    "load",
    "load_shards",
    "open",
    "open_group",
    "open_set",
    "serve",
]


def __getattr__(name: str) -> object:
    with threads.named(f"it loaded tensorhub.{name}"):
        if name == "aio":
            return import_module(".aio", __name__)
        if name in _LAZY:
            return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
