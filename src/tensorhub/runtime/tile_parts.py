"""What a read of tiles consists of: its parts, how far it is, and what it asks of its worker's data plane."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from ..core.errors import HostMemoryFull, TensorHubError, UsageError
from ..core.messages import Failure, Grant
from ..core.names import Ticket, Version, WorkerId
from ..core.worker.events import Event
from ..memory.registration import Registration
from ..memory.tiles.legs import Leg
from ..memory.tiles.tiled import Offer, TiledVersion
from ..transport.base import Read, Transport
from ..transport.choose import Way
from ..transport.shortages import as_ours
from .content import Content
from .legs import Trusted
from .open_read import Received
from .routes import Meter, Routes
from .trust import Lease

OUR_OWN = (UsageError, HostMemoryFull)  # errors for which no source is to blame, and that no other one would mend


class Plane(Protocol):
    """What such a read asks of the worker's data plane."""

    chunk_bytes: int

    @property
    def me(self) -> WorkerId: ...

    @property
    def registration(self) -> Registration | None: ...

    @property
    def received(self) -> Received: ...

    @property
    def transports(self) -> Mapping[str, Transport]: ...

    @property
    def routes(self) -> Routes: ...

    @property
    def lease(self) -> Lease: ...

    def tell(self, event: Event) -> None: ...

    def wake(self, function: Callable[..., None], *arguments: object) -> None: ...

    async def derive(self, offers: Sequence[Offer], *, is_across: bool) -> TiledVersion: ...

    def adopt(self, grant: Grant, tiled: TiledVersion) -> Content: ...

    def failure(self, error: TensorHubError) -> Failure: ...

    def not_ahead(self, version: Version, error: TensorHubError) -> None: ...

    def export(self, content: Content, tiled: TiledVersion, then: Callable[[], None]) -> None: ...

    def touched(self, ticket: Ticket, grant: Grant, content: Content) -> None: ...

    def forget(self, ticket: Ticket) -> None: ...


class State(Enum):
    """How far a read is."""

    LOOKING = "its sources are asked what they are"
    OPENED = "it waits to be started"
    READING = "bytes may come"
    ENDING = "nothing of it counts any more; what still runs is waited for"
    OVER = "nothing of it runs"


class Part:
    """One source of a read."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.ways: list[Way] = []  # left to try
        self.way: Way | None = None
        self.read: Read | None = None
        self.sink: Trusted | None = None  # of the read that is under way
        self.meter: Meter | None = None
        self.counted_bytes = 0
        self.before_bytes = 0  # that came by earlier legs
        self.offer: Offer | None = None
        self.legs = deque[Leg]()
        self.told: Event | None = None
        self.is_stopped = False
        self.is_over = False
        self.has_brought = False  # all that was wanted of it

    @property
    def arrived_bytes(self) -> int:
        """In all."""
        return self.before_bytes + (self.read.arrived_bytes if self.read is not None else 0)


def known(error: Exception, version: Version) -> TensorHubError:
    """Whatever went wrong in a thread that works something out."""
    if isinstance(error, TensorHubError):
        return error.with_traceback(None)
    return as_ours(error, f"tiles of version {version} cannot be worked out")
