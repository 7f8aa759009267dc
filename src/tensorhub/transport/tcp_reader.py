"""The target's side of the tcp transport: one read, in as many threads as it has streams.

The first stream fetches the manifest, asks the sink what it wants, and starts the others; from then on all are alike.
The first error ends the read: every stream is cut, and the last thread to leave calls `on_end`, when none is inside the
sink's memory any more. What keeps a further stream from joining in is no such error: it has asked for nothing yet, so
the others do its work, and a source that is gone is noticed by the first stream.

It must never: call `on_end` twice, or before the last thread has left.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..core.errors import TensorHubError, Unavailable
from . import shortages
from .base import OnEnd, Read, Scarce, Sink, Trusting
from .brisk import Brisk
from .native import shapes
from .native_read import Mover
from .signals import block_sigpipe
from .tcp_dial import dial
from .tcp_job import Job
from .tcp_settings import TcpSettings
from .tcp_stream import Stream, opened
from .tcp_width import Width
from .threads import Thread, start

_log = logging.getLogger(__name__)

SCARCE_TIMES = 2  # as many streams to a device: while the chunk of one is copied and judged there, another receives
LEAST_CHUNKS = 8  # for each stream that is there, left to ask for: else another one is not worth its connection


class TcpRead(Read):
    """One read from one source."""

    def __init__(
        self, settings: TcpSettings, endpoint: str, key: str, sink: Sink, ending: Callable[["TcpRead"], OnEnd]
    ) -> None:
        self.job = self.make_job(settings, endpoint, key, sink)
        self.error: TensorHubError | None = None
        self._threads: list[Thread] = []
        self._on_end: OnEnd | None = ending(self)
        self._lock = threading.Lock()
        self._running = 0
        self._is_stopped = False
        self._wide = 1  # as many streams as it opens once the first one is fast
        self._width: Width | None = None
        self.streams = 1

    # -- what another transport that speaks over a socket does in its own way -----------------------------------------

    kind = "tcp"
    has_links = True  # what its streams get depends on a network: their number is tried out

    def make_job(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink) -> Job:
        return Job(settings, endpoint, key, sink)

    def opened(self, index: int) -> AbstractContextManager[Stream]:
        """One more connection to the source."""
        return opened(self.job, index, dial, Stream)

    @property
    def path(self) -> str:
        reached = f" to {len(self.job.reached)} of {self.job.addresses} addresses" if self.job.addresses > 1 else ""
        lent = ", zero copy" if self.job.is_lent_to else ""
        return counted(self.streams, "stream") + reached + lent + self.mover_text

    @property
    def mover_text(self) -> str:
        """Who moves the bytes, for a path."""
        return ", native" if self.job.mover is not None else ""

    # ------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        with Brisk():
            self._start(self._lead, 0)

    def forget(self) -> None:
        """It was never started: nobody will be told."""
        self._on_end = None

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
        self.job.finish()

    def join(self, timeout_s: float) -> None:
        """Wait for its threads, except the one that asks."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def received_bytes(self) -> int:
        return self.job.received_bytes

    @property
    def arrived_bytes(self) -> int:
        return self.job.arrived_bytes

    def _start(self, body: Callable[[int, Brisk], None], index: int) -> None:
        thread = Thread(self._run, args=(body, index), name=f"tensorhub-{self.kind}-read-{index}")
        with self._lock:
            self._running += 1
            self._threads.append(thread)
        try:
            start(thread)
        except Unavailable:
            with self._lock:
                self._running -= 1
                self._threads.remove(thread)
            if index == 0:
                raise  # nothing runs yet: the caller is told. A read under way goes on with fewer streams.

    def _run(self, body: Callable[[int, Brisk], None], index: int) -> None:
        """The whole life of one stream's thread; the last one out ends the read."""
        block_sigpipe()
        with Brisk() as brisk:
            try:
                body(index, brisk)
            except TensorHubError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 the top of a thread: whatever it is, it ends this read and is reported
                self._fail(self._unforeseen(error))
            brisk.again()
            if index == 0 and self.job.mover is not None:
                self._attend(self.job.mover, lambda: self._running == 1, told=brisk.over)
                brisk.again()
                self._tell(self.job.mover)
            with self._lock:
                self._running -= 1
                is_last = self._running == 0
            if index and self.job.mover is not None:
                self.job.mover.poke()  # the first thread waits for the others
            if is_last:
                self._end()

    def _end(self) -> None:
        """Tell it, and let go of whoever is told and of the error: both know this read.

        Held from both sides, they would all wait for the garbage collector, which may not look for a thousand reads.
        """
        self.job.close()
        if self.error is None and not self._is_stopped and self.job.missing:
            self.error = self.job.lost("its streams ended, and each left to the others what is missing")
        on_end, error = self._on_end, self.error
        self._on_end = self.error = None
        assert on_end is not None, "a read ended twice"
        on_end(error)

    def _fail(self, error: TensorHubError) -> None:
        """The first error is the read's. What follows from a stop, or comes when nothing is missing, is none."""
        with self._lock:
            if self.error is None and not self._is_stopped and self.job.missing != 0:
                self.error = error
        self.job.finish()

    def _unforeseen(self, error: Exception) -> TensorHubError:
        """Made here, so that it is no variable of a frame that its cause's traceback knows."""
        return shortages.as_ours(error, f"reading {self.job.key!r} from {self.job.endpoint} failed")

    def _lead(self, index: int, brisk: Brisk) -> None:
        """The first stream: learn what there is, decide what is wanted, start the others."""
        job, sink = self.job, self.job.sink
        with self.opened(index) as stream:
            welcome = stream.greet(wants_manifest=True)
            wanted = tuple(sink.begin(stream.receive_manifest()))
            full = job.note_wanted(wanted, size_bytes=welcome.size_bytes, chunk_bytes=welcome.chunk_bytes)
            settings = job.settings
            most = max(settings.streams, job.addresses) if self.has_links else settings.streams
            if self.has_links and isinstance(sink.stream, Scarce):
                most *= SCARCE_TIMES
            streams = max(1, min(most, full * sink.chunk_bytes // settings.stream_bytes, len(wanted)))
            stream.send_parcels()
            if streams > 1:
                stream.await_room()  # before the others: what there is of it is this one's
            job.generation = welcome.generation
            job.begin(wanted, streams, stream.mover_for(wanted, streams))
            if self.has_links and settings.most_streams > 1:
                self._width = Width(settings, 1, cores=os.cpu_count() or 1, least=min(streams, job.addresses))
            if job.mover is not None:
                self._move(job.mover, stream, streams, brisk)
                return
            brisk.over()
            stream.after_each_chunk(self._look)
            if streams > 1 and self._is_patient:
                stream.when_fast(lambda: self._widen(streams))
            else:
                self._widen(streams)
            stream.pump()

    def _move(self, mover: Mover, stream: Stream, streams: int, brisk: Brisk) -> None:
        """Let the mover bring the chunks over this connection, and attend to what it asks."""
        state, self._wide = stream.state_for(mover), streams
        state.is_judging_speed = streams > 1 and self._is_patient
        mover.start(state)
        try:
            if not self._is_patient:
                self._widen(streams)
            self._attend(mover, lambda: state.status >= 0, told=brisk.over)
        finally:
            brisk.again()
            if state.status < 0:
                self.job.finish()
            mover.join(state)
            stream.left(state)
            self._width = None
        stream.conclude(state)

    def _attend(self, mover: Mover, is_over: Callable[[], bool], told: Callable[[], None] = lambda: None) -> None:
        """Do what the mover's streams ask for, and tell the sink of news, until that is so. `told`: after any news."""
        while not is_over():
            events = mover.events()
            if events & shapes.ASKS_LEAVE:
                mover.answer(may_write=self._may_write())
            if events & shapes.IS_FAST:
                self._widen(self._wide)
            if events & shapes.HAS_NEWS:
                self._tell(mover)
                told()
            self._look()
            if events & shapes.IS_WHOLE:
                self.job.finish()  # a stream that is still connecting is not waited for

    def _may_write(self) -> bool:
        try:
            self.job.sink.touch()
        except TensorHubError as error:
            self._fail(error)
            return False
        except Exception as error:  # noqa: BLE001 the sink's own bug: it ends this read and is reported
            self._fail(self._unforeseen(error))
            return False
        return True

    def _tell(self, mover: Mover) -> None:
        sink, news = self.job.sink, mover.news_bytes()
        if not news or not isinstance(sink, Trusting):
            return
        try:
            sink.told(news)
        except TensorHubError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 the sink's own bug: it ends this read and is reported
            self._fail(self._unforeseen(error))

    @property
    def _is_patient(self) -> bool:
        """Whether the first stream shows first that its link has more to give. Each address has a link of its own."""
        return self.job.settings.stream_rate_bytes_per_s > 0 and self.job.addresses == 1

    def _widen(self, streams: int) -> None:
        """One stream is not enough: start the others."""
        if streams > self.streams:
            self._have(streams)
            if self._width is not None:
                self._width.set(streams)

    def _look(self) -> None:
        """Have more streams, or fewer, if that is what the rate says."""
        width, missing = self._width, self.job.missing
        if width is None or missing is None or missing < LEAST_CHUNKS * self.streams:
            return
        streams = width.look(time.monotonic(), self.job.arrived_bytes)
        if streams != self.streams:
            self._have(streams)

    def _have(self, streams: int) -> None:
        """So many from now on. Those that are too many end with what they have asked for."""
        before, self.streams = self.streams, streams
        self.job.have(streams)
        for further in range(before, streams):
            self._start(self._follow, further)

    def _follow(self, index: int, brisk: Brisk) -> None:
        """A further stream, if there can be one: else the others do its work.

        The source may have no connection to spare, or no thread; this process no descriptor; or nobody answers.
        """
        mover, has_joined = self.job.mover, False
        try:
            with self.opened(index) as stream:
                stream.join_in()
                state = stream.state_for(mover) if mover is not None else None
                has_joined = True
                brisk.over()
                if mover is None or state is None:
                    stream.pump()
                    return
                mover.run(state)
                brisk.again()
                stream.left(state)
                stream.conclude(state)
        except (TensorHubError, OSError, MemoryError) as error:
            if has_joined:
                raise
            if isinstance(error, OSError | MemoryError):
                shortages.note(error, did="it opened a further connection to a source")
            _log.debug("%s is read without stream %d: %s", self.job.key, index, error)


def counted(number: int, noun: str) -> str:
    """1 stream, 2 streams."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
