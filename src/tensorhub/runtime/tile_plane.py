"""The reads of tiles of one worker: what they need of its data plane, and what becomes of what they bring.

The content that a read of tiles fills is known once its manifest is derived: then it is the worker's `incoming`
content, or a host copy, as that of any other read, and peers may read behind it. It must never: have two reads at once.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..core.errors import TensorHubError
from ..core.messages import Failure, Grant
from ..core.names import Ticket, Version, WorkerId
from ..core.worker.events import Event, NotShared
from ..core.worker.events_across import AddPart, OpenAcross, StartAcross, StopPart
from ..memory.registration import Registration
from ..memory.tiles.across import Across
from ..memory.tiles.tiled import Offer, TiledVersion, version_from
from ..transport.base import Transport
from .content import Content
from .covering import Covering
from .loops import in_thread
from .open_read import Received
from .routes import Routes
from .tiled import TileReading
from .trust import Lease

if TYPE_CHECKING:
    from .dataplane import DataPlane


class TilePlane:
    """Between a data plane and the one read of tiles that may be under way."""

    def __init__(self, data: "DataPlane", chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.reading: TileReading | None = None
        self.covering: Covering | None = None  # else whoever reads here reads what it has boxes for
        self._taken: Version | None = None  # a host copy that the machine does not count before the read is started
        self._data = data

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def carry_out(self, effect: OpenAcross | StartAcross | AddPart | StopPart) -> None:
        """A read across."""
        reading = self.reading if self.reading is not None and self.reading.ticket == effect.ticket else None
        match effect:
            case OpenAcross(ticket=ticket, grants=grants):
                self._begin(TileReading(self, ticket, grants, is_across=True, starts=False))
            case StartAcross(ticket=ticket, grants=grants):
                self._taken = None
                if reading is not None:
                    reading.start()
                else:
                    self._begin(TileReading(self, ticket, grants, is_across=True, starts=True))
            case AddPart(grant=grant) if reading is not None:
                reading.add(grant)
            case StopPart(part=part) if reading is not None:
                reading.stop_part(part)

    def read(self, grant: Grant, *, is_only_opened: bool) -> None:
        """Out of one source that has the same layout."""
        if grant.shares:  # the machine takes it for an ordinary one from now on
            self._data.call_soon(self.tell, NotShared(grant.ticket))
        reading = self.reading
        if reading is not None and reading.ticket == grant.ticket:
            if not is_only_opened:
                reading.start()
            return
        self._begin(TileReading(self, grant.ticket, (grant,), is_across=False, starts=not is_only_opened))

    def stop(self, ticket: Ticket) -> bool:
        """Returns whether it may have written anything; if not, it never will."""
        reading = self.reading
        return reading.stop() if reading is not None and reading.ticket == ticket else False

    def _begin(self, reading: TileReading) -> None:
        self.reading = reading
        reading.begin()

    # --- what a read asks ---------------------------------------------------------------------------------------------

    @property
    def me(self) -> WorkerId:
        return self._data.me

    @property
    def registration(self) -> Registration | None:
        return self._data.registration

    @property
    def received(self) -> Received:
        return self._data.received

    @property
    def transports(self) -> Mapping[str, Transport]:
        return self._data.transports

    @property
    def routes(self) -> Routes:
        return self._data.routes

    @property
    def lease(self) -> Lease:
        return self._data.lease

    def tell(self, event: Event) -> None:
        self._data.tell(event)

    def wake(self, function: Callable[..., None], *arguments: object) -> None:
        self._data.wake(function, *arguments)

    def key(self, version: Version, *, on_host: bool = False) -> str:
        return self._data.key(version, on_host=on_host)

    async def derive(self, offers: Sequence[Offer], *, is_across: bool) -> TiledVersion:
        """What the registered tensors will be once they are filled from these. Raises as `version_from`, `Covering`."""
        registration, chunk_bytes = self.registration, self.chunk_bytes
        assert registration is not None, "reading without registered memory"
        found = await in_thread(lambda: version_from(registration, offers, chunk_bytes), name="tiles")
        if is_across and self.covering is not None and not registration.is_partial:
            await self.covering.check(registration, offers)
        return found

    def adopt(self, grant: Grant, tiled: TiledVersion) -> Content:
        """What is already there of that content, or a new fill.

        Raises `HostMemoryFull`, `UsageError`, `VersionConflict`.
        """
        data, root = self._data, tiled.root()
        assert data.registration is not None, "reading without registered memory"
        if grant.to_host:
            is_taken, reading = data.copies.has(grant.version), self.reading
            content = data.copies.content(grant.version, root)
            if isinstance(content.fill, Across):
                return content
            if not is_taken and reading is not None and reading.is_across and not reading.starts:
                self._taken = grant.version
        else:
            for known in (data.content, data.incoming):
                if known is not None and known.is_of(grant.version, root) and isinstance(known.fill, Across):
                    return known
            data.forget_incoming()
            content = Content(grant.version, root, self.key(grant.version), data.registration)
        held = weakref.ref(content)
        content.fill = Across(
            content.registration,
            tiled.tiles,
            tiled.cut.manifest,
            verify=data.verify,
            on_stored=lambda _: self._stored(held()),
            chunk_bytes=tiled.chunk_bytes,
        )
        if not grant.to_host:
            data.incoming = content
        return content

    def failure(self, error: TensorHubError) -> Failure:
        """As the machine and the server hear of it."""
        return self._data.failure(error)

    def not_ahead(self, version: Version, error: TensorHubError) -> None:
        """There is no room for that copy."""
        self._data.copies.not_ahead(version, error)

    def export(self, content: Content, tiled: TiledVersion, then: Callable[[], None]) -> None:
        """Let peers read behind us, once nothing else has that key; `then` follows."""
        if content.manifest is not None:
            self._data.call_soon(then)
            return
        self._data.once_free(content.key, partial(self._exported, content, tiled, then))

    def _exported(self, content: Content, tiled: TiledVersion, then: Callable[[], None]) -> None:
        assert isinstance(content.fill, Across), "tiles of what has none"
        self._data.unserved = content.export(self._data.transports, tiled, content.fill.progress)
        self._data.call_soon(then)

    def touched(self, ticket: Ticket, grant: Grant, content: Content) -> None:
        """The read may be writing: what the memory held before is gone."""
        self._data.touched(ticket, grant, content)

    def forget(self, ticket: Ticket) -> None:
        """That read is over."""
        if self.reading is not None and self.reading.ticket == ticket:
            self.reading = None
            taken, self._taken, copies = self._taken, None, self._data.copies
            if taken is not None:
                gone = copies.let_go_of(taken)
                self._data.begin_for(copies.key(taken), lambda: gone)

    def let_go(self) -> None:
        """All is closed: what was not told to stop has ended too."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.let_go()

    def _stored(self, content: Content | None) -> None:
        """In a transport's thread."""
        reading = self.reading
        if reading is not None and reading.content is content:
            reading.stored()
