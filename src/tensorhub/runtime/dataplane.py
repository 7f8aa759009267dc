"""What a worker's machine wants of memory and transport, done; and what happened there, told to it as events.

Runs in the worker's loop. Transports call back from threads of their own: those calls only note what happened and wake
the loop, for progress at most every 50 ms. Hashing and withdrawing happen in threads and never delay the loop.

It must never: choose a source, start a read that was not granted, or keep a version readable once told to stop.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import structs

from ..memory.fill import FillSink
from ..memory.registration import Registration
from ..protocol.errors import SessionLost, SourceLost, TensorHubError, TransportMissing, Unavailable
from ..protocol.messages import Failure, Grant, Source
from ..protocol.names import Digest, Ticket, Version, WorkerId, is_tiled
from ..reshard.grid import BAND_BYTES
from ..transport.base import Progress, Transport, Way
from ..transport.threads import as_ours
from ..worker import events
from ..worker.events import Event, ReadAdvanced, ReadEnded, ReadMeasured, ReadOpened, ReadTouched, ServingStopped
from .config import Verify
from .content import (
    MEASURE_EVERY_S,
    Content,
    Known,
    Lease,
    Measured,
    Meter,
    OpenRead,
    Received,
    Routes,
    TrustedSink,
    key_of,
    withdraw_everywhere,
    withdraw_unread,
)
from .copies import HostCopies
from .loops import Background, hand_over, in_thread
from .metrics import GIVEN_UP, VERIFY, Record
from .tile_reads import TilePlane

_log = logging.getLogger(__name__)

TELL_EVERY_S = 0.05  # progress: more than 20 times a second shows a user nothing new
NO_ROOM_S = 1.0  # a fetch ahead that finds none is soon ordered again: let others make room meanwhile


class DataPlane:
    """Moves the bytes of one worker: serves, reads and copies."""

    def __init__(
        self,
        me: WorkerId,
        transports: Mapping[str, Transport],
        *,
        verify: Verify,
        tell: Callable[[Event], None],
        host_bytes: int | None = None,
        chunk_bytes: int = BAND_BYTES,
        record: Record | None = None,
    ) -> None:
        """`transports` by scheme, best first. `tell` hands an event to the machine. `chunk_bytes`: of tiled content."""
        self.me = me
        self.registration: Registration | None = None
        self.content: Content | None = None  # what the registered memory holds, or is being filled with
        self.incoming: Content | None = None  # opened: what it is to be filled with next, nothing of it is written
        self.vacated: Known | None = None  # of what was withdrawn, and is not yet written over
        self.record = record or Record()
        self.received = Received(self.record)
        self.unserved: TensorHubError | None = None  # why no peer can read what is held
        self.is_closed = False
        self.transports, self.routes = transports, Routes(me, transports)
        self.verify, self.tell, self.lease = verify, tell, Lease()
        self._loop = asyncio.get_running_loop()
        self._reading: OpenRead | None = None
        self._prepared: Known | None = None
        self.copies = HostCopies(
            me, transports, verify=verify, limit_bytes=host_bytes, tell=tell, withdraw=self._withdraw_all
        )
        self.copies.record = self.record
        self.errors = self.copies.errors
        self.tiles = TilePlane(self, chunk_bytes)
        self._background = Background(self._loop)
        self.call_soon, self.once_free = self._loop.call_soon, self._background.once_free
        self.begin_for = self._background.begin_for

    def failure(self, error: TensorHubError) -> Failure:
        """The failure for the machine and the server. If it ends the call, the caller gets the error itself."""
        return self.copies.failure(error)

    def give_up(self, way: Way, source: Source, version: Version, error: TensorHubError) -> None:
        """This way does not work towards that source: others are tried from now on."""
        self.routes.failed(way, source, version, error)
        self.record.add(GIVEN_UP, 1, way.scheme)

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def trust(self, until: float) -> None:
        self.lease.until = until

    def prepare(self, manifest: Known) -> None:
        """Note the manifest that is served if the publish succeeds."""
        self._prepared = manifest

    def start_serving(self, version: Version, root: Digest) -> None:
        registration, vacated, self.vacated = self.registration, self.vacated, None
        manifest = vacated if vacated is not None and vacated.root() == root else self._prepared
        self.forget_incoming()
        assert registration is not None, "serving without registered memory"
        assert manifest is not None, "serving what was not prepared"
        assert manifest.root() == root, "serving what was not prepared"
        content = self.content = Content(version, root, self.key(version), registration)
        content.manifest, content.progress = manifest, Progress(manifest.chunk_count, complete=True)
        self._background.once_free(content.key, partial(self._serve, content, manifest, content.progress))

    def _serve(self, content: Content, manifest: Known, progress: Progress) -> None:
        if self.content is content:
            self.unserved = content.export(self.transports, manifest, progress)

    def stop_serving(self, version: Version) -> None:
        why = TensorHubError(f"{self.me} withdrew version {version}")
        content, incoming = self.content, self.incoming
        if incoming is not None and incoming.version == version:
            self.incoming = None
            incoming.stop(why)
        if content is not None and content.version == version:
            is_whole = content.progress is not None and content.progress.is_complete
            self.content, self.vacated = None, content.manifest if is_whole else None
            content.stop(why)
        self._background.begin(self._withdraw(version))

    def register(self, registration: Registration) -> int:
        """Other tensors. Returns how many host copies of them the limit allows."""
        self.replace(registration)
        return self.copies.register(registration)

    def replace(self, registration: Registration) -> None:
        """Replace the registration: the same tensors at other addresses, or without memory."""
        self.forget_incoming()
        self.vacated, self.registration = None, registration

    def copy_to_host(self, version: Version, *, is_ahead: bool) -> None:
        assert self.content is not None, "offload of nothing"
        assert self.content.version == version, "offload of another version"
        self.copies.copy_to_host(self.content, is_ahead=is_ahead)

    def copy_in(self, version: Version) -> None:
        assert self.registration is not None, "filling without registered memory"
        self.replace(self.registration)
        self.copies.copy_in(version, self.registration, self.prepare)

    def open_read(self, grant: Grant) -> None:
        """Fetch the manifest and write nothing."""
        self.start_read(grant, is_only_opened=True)

    def start_read(self, grant: Grant, *, is_only_opened: bool = False) -> None:
        """Start to read the missing chunks."""
        if grant.is_across or is_tiled(grant.root):
            self.tiles.read(grant, is_only_opened=is_only_opened)
            return
        if self._reading is not None:  # it was opened, or could not be mapped, and is now read
            if self._reading.grant.ticket == grant.ticket and self._reading.sink.go_on():
                self._reading.has_gone_on = True
                if self._reading.meter is not None:
                    self._reading.meter.goes_on()
                return
            self._reading.end()
            self._reading = None  # there may be no room to read it
        try:
            content = self._content_for(grant)
        except TensorHubError as error:  # no host memory
            self.copies.not_ahead(grant.version, error)
            ended = ReadEnded(grant.ticket, failure=self.failure(error))
            self._loop.call_later(NO_ROOM_S, self.tell, ended)
            return
        assert isinstance(content.fill, FillSink), "chunks of what has none"
        sink = TrustedSink(
            content.fill,
            self.lease,
            is_cross_site=grant.source.is_cross_site,
            is_only_opened=is_only_opened,
            shares=grant.shares,
            on_touch=lambda: self.wake(self.touched, grant.ticket, grant, content),
            on_opened=lambda: self.wake(self.tell, ReadOpened(grant.ticket)),
        )
        reading = self._reading = OpenRead(grant, content, sink)
        self._background.once_free(content.key, lambda: self._begin(reading))

    def _begin(self, reading: OpenRead) -> None:
        if self._reading is not reading or reading.sink.is_stopped:
            return
        if (error := self._read_by_any(reading)) is not None:
            self._loop.call_soon(self._ended, reading, error)

    def stop_read(self, ticket: Ticket) -> bool:
        """Returns whether it has written anything, or may have; if not, it never will."""
        reading = self._reading
        if reading is None or reading.grant.ticket != ticket:
            return self.tiles.stop(ticket)
        is_touched = reading.sink.bar()
        if reading.is_opened or reading.read is None:
            self._loop.call_soon(self._ended, reading, None)
        elif reading.read is not None:
            reading.read.stop()
        return is_touched

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        return self._reading is not None or self.tiles.reading is not None

    def statistics(self) -> dict[str, int]:
        """The transports' counters, added up."""
        every = [transport.statistics() for transport in self.transports.values()]
        return {name: sum(one.get(name, 0) for one in every) for one in every for name in one}

    def close(self) -> None:
        """Cut everything; blocks until no thread touches the registered memory any more. Any thread may call it."""
        self.is_closed = True
        self.copies.close()
        if self.registration is not None:
            self.registration.close()
        for transport in self.transports.values():
            transport.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _content_for(self, grant: Grant) -> Content:
        """Returns the content that already has part of the granted version, or a new fill."""
        assert self.registration is not None, "reading without registered memory"
        if grant.shares:  # no memory yet: these are not written
            content = Content(grant.version, grant.root, self.copies.key(grant.version), self.registration)
            content.fill = FillSink(self.registration, grant.root, verify=self.verify)
            return content
        if grant.to_host:
            content = self.copies.content(grant.version, grant.root)
            if content.fill is not None:
                return content
        else:
            for known_content in (self.content, self.incoming):
                if known_content is not None and known_content.is_of(grant.version, grant.root) and known_content.fill:
                    return known_content
            self.forget_incoming()
            content = self.incoming = Content(grant.version, grant.root, self.key(grant.version), self.registration)
        known = weakref.ref(content)  # it has the fill: held from both sides, both would wait to be collected
        content.fill = FillSink(
            content.registration,
            grant.root,
            verify=self.verify,
            on_begin=lambda fill: self._begun(known(), fill),
            on_stored=lambda prefix: self._stored(known()),
        )
        return content

    def forget_incoming(self) -> None:
        """No reader may open it here any more. Nothing of it was ever served, so there is nothing to wait for."""
        incoming, self.incoming = self.incoming, None
        if incoming is not None:
            incoming.stop(TensorHubError(f"{self.me} does not fill version {incoming.version} any more"))
            self.begin_for(incoming.key, partial(self._withdrawn, incoming.key))

    def touched(self, ticket: Ticket, grant: Grant, content: Content) -> None:
        """Called in the loop, once: the read may be writing. What the memory held before is gone."""
        if not grant.to_host:
            if self.incoming is content:
                if self.content is not None:
                    self.content.stop(TensorHubError(f"{self.me} fills version {grant.version} with other content"))
                self.content, self.incoming = content, None
            self.vacated = None
            self.tell(ReadTouched(ticket))
        self.lease.is_touched = False

    def _read(self, reading: OpenRead) -> None:
        """Begin to read on the next way."""
        way = reading.way = reading.ways.pop(0)
        reading.counted_bytes = 0
        reading.read = self.transports[way.scheme].read(
            way.endpoint,
            self.key(reading.grant.version, on_host=reading.source.from_host),
            reading.sink,
            lambda error: self.wake(self._ended, reading, error),
        )
        is_first, reading.meter = reading.meter is None, Meter(reading.read)
        if is_first:
            reading.measuring = self._loop.call_soon(self._measure, reading)

    def _measure(self, reading: OpenRead) -> None:
        """Called in the loop at intervals: report the progress."""
        if self._reading is reading and reading.way is not None and reading.meter is not None:
            self._tell_measured(reading, reading.way, reading.meter.look())
            reading.measuring = self._loop.call_later(MEASURE_EVERY_S, self._measure, reading)

    def _tell_measured(self, reading: OpenRead, way: Way, found: Measured) -> None:
        rate, arrived, is_verified = found.rate_bytes_per_s, found.arrived_bytes, self.verify == "full"
        told = ReadMeasured(reading.grant.ticket, way.scheme, found.path, way.why, rate, arrived, is_verified)
        if told != reading.measured:
            reading.measured = told
            self.tell(told)

    def _begun(self, content: Content | None, fill: FillSink) -> None:
        """Called in a transport's thread. The manifest is known, so peers may read the chunks that are here."""
        assert content is not None, "the read under way has its content"
        self.unserved = content.export(self.transports, fill.manifest, fill.progress)
        self._stored(content)

    def _stored(self, content: Content | None) -> None:
        """Called in a transport's thread: wake the loop, unless it is about to look."""
        reading = self._reading
        if reading is not None and reading.content is content and not reading.is_waking:
            reading.is_waking = True
            self.wake(self._advanced, reading)

    def _advanced(self, reading: OpenRead) -> None:
        """Called in the loop: report the progress, and schedule the next report."""
        if self._reading is reading:
            self._tell_progress(reading)
            reading.looking = self._loop.call_later(TELL_EVERY_S, self._look_again, reading)

    def _look_again(self, reading: OpenRead) -> None:
        reading.is_waking = False  # before looking: a chunk stored from now on wakes us
        progress = reading.content.progress
        if self._reading is reading and progress is not None and progress.prefix != reading.told:
            reading.is_waking = True
            self._advanced(reading)

    def _tell_progress(self, reading: OpenRead) -> None:
        self.received.count(reading)
        progress = reading.content.progress
        if progress is not None and progress.prefix != reading.told:
            reading.told = progress.prefix
            self.tell(ReadAdvanced(reading.grant.ticket, reading.told, progress.chunk_count))

    def _ended(self, reading: OpenRead, error: TensorHubError | None) -> None:
        """Called in the loop, after the last byte of this read."""
        if self._reading is not reading:
            return
        if reading.sink.shares and error is None and not reading.sink.is_stopped:
            self._share(reading)
            return
        if reading.sink.is_only_opened and error is None and not reading.sink.is_stopped:
            reading.is_opened = True  # nothing runs until the read is started, or is told to stop
            return
        self._tell_progress(reading)
        if isinstance(error, SourceLost) and reading.has_gone_on and not reading.counted_bytes:
            reading.has_gone_on = False  # its source has let go of the connection meanwhile
            error = self._read_by_any(reading) if not reading.sink.is_stopped else error
            if error is None:
                return
        if isinstance(error, TransportMissing) and reading.way is not None and not reading.sink.is_stopped:
            self.give_up(reading.way, reading.source, reading.version, error)
            error = self._read_by_any(reading)
            if error is None:
                return
        elif type(error) is Unavailable and reading.ways and not reading.sink.is_stopped:
            _log.info("%s: not by %s now: %s", self.me, reading.way.scheme if reading.way is not None else "", error)
            error = self._read_by_any(reading, reading.ways)
            if error is None:
                return
        self._reading = None
        reading.end()
        reading.log_end(self.me, self.record)
        progress, failure = reading.content.progress, None
        is_complete = progress is not None and progress.is_complete and not reading.sink.is_only_opened
        if error is None and not is_complete and not reading.sink.is_stopped:
            error = SourceLost(f"{reading.source.worker} ended the read before its last chunk")
        if error is not None and not is_complete and not isinstance(error, SessionLost):
            failure = self.failure(error)
            _log.info("%s: reading version %d from %s: %s", self.me, reading.version, reading.source.worker, error)
        if is_complete and self.incoming is reading.content:  # there was no byte to write: it is there all the same
            self.touched(reading.grant.ticket, reading.grant, reading.content)
        if is_complete and reading.way is not None and reading.meter is not None:
            self._tell_measured(reading, reading.way, reading.meter.look())
        self.tell(ReadEnded(reading.grant.ticket, is_complete, failure))

    def _share(self, reading: OpenRead) -> None:
        """The source's host copy was mapped. Or it could not be: then it is read, as any other."""
        grant, registration = reading.grant, self.registration
        if reading.sink.shared is None:
            self.tell(events.NotShared(grant.ticket))
            if reading.sink.is_stopped:  # by what was just told: a lease or a deadline was over
                self._ended(reading, None)
            elif self._reading is reading:
                self.start_read(structs.replace(grant, shares=False))
            return
        assert registration is not None, "reading without registered memory"
        self._background.begin(self._look_through(reading, registration))

    async def _look_through(self, reading: OpenRead, registration: Registration) -> None:
        """Check the whole mapped copy before any chunk of it counts."""
        sink, version = reading.sink, reading.grant.version
        try:
            with self.record.timed(VERIFY):
                content = await in_thread(lambda: self.copies.map_shared(version, sink, registration), name="share")
        except TensorHubError as error:
            self._ended(reading, error.with_traceback(None))
            return
        except Exception as error:  # noqa: BLE001 - no memory, or our bug: the read ends all the same, and says so
            self._ended(reading, as_ours(error, f"the copy from {reading.source.worker} cannot be seen"))
            return
        if self._reading is reading:
            self._reading = None
            reading.end()
            self.copies.keep_shared(content, sink)
            self.tell(ReadEnded(reading.grant.ticket, complete=True))

    def _read_by_any(self, reading: OpenRead, ways: list[Way] | None = None) -> TensorHubError | None:
        """Begin, or begin again, by these ways or all that are known; returns why there is none."""
        try:
            reading.ways = ways or self.routes.to(reading.source, reading.version)
            self._read(reading)
        except TensorHubError as nothing_left:
            return nothing_left.with_traceback(None)  # it knows this frame, and so the one that is given it
        return None

    # --- serving ------------------------------------------------------------------------------------------------------

    async def _withdraw(self, version: Version) -> None:
        await self._withdrawn(self.key(version))
        self.tell(ServingStopped(version))

    async def _withdrawn(self, key: str) -> None:
        if not withdraw_unread(self.transports.values(), key):
            await in_thread(lambda: self._withdraw_all(key), name="withdraw", otherwise="wait")

    def _withdraw_all(self, key: str) -> None:
        withdraw_everywhere(self.transports.values(), key, who=self.me, is_closed=lambda: self.is_closed)

    def key(self, version: Version, *, on_host: bool = False) -> str:
        return key_of(self.me.model, version, self.me.shard, on_host=on_host)

    def wake(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            hand_over(self._loop, function, *arguments)
        except RuntimeError:
            _log.debug("%s: the worker's loop has ended", self.me)
