"""The target's side of the nixl transport: one read, whose threads let NIXL fetch each chunk straight into the tensors.

It is the tcp transport's read with another way for the bytes: it learns from MEMORY where they are, and for each chunk
that is READY posts one-sided reads of bounded size and waits until they are over. Then it reads the source's seal, and
only if that still stands is the chunk shown to the sink.

Every thread begins by reading the seal, into memory of its own: that connects it to the source (which needs the source
to be alive), proves that the way works, and shows by what it goes. Only then are tensors written to; so a source that
stopped before it was connected can never write to them late. If the way is TCP, or nothing, the read ends with
`TransportMissing`: the same two workers can still use tcp.

A read under way cannot be called back. `stop` and failures wait until it is over, at most `silence_s`; if it is not
over then, the agent ends, which does fence (`nixl_agent`), and with it every read that uses it. It must never: let a
chunk be judged whose seal was not seen after its bytes, or return while a transfer into the sink's memory is open.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import msgspec

from ..core.decoding import Undecodable, decoded
from ..core.errors import SourceLost, TensorHubError, TransportMissing, Unavailable
from . import nixl_path, tcp_wire
from .announcing import COUNT, MAX_MEMORY_BYTES, MEMORY, AnnouncedStream
from .base import OnEnd, Sink, Taking
from .nixl_agent import Agent, Broken, Stuck
from .nixl_agents import Agents
from .nixl_meeting import Meeting, Plan
from .nixl_memory import SEAL_BYTES
from .nixl_path import HOST, Facts, Lane
from .nixl_server import SCHEME, Memory
from .parcels import Piecewise
from .shortages import FILES
from .tcp_addresses import Address
from .tcp_addresses import parse_endpoint as parse_tcp_endpoint
from .tcp_dial import dial
from .tcp_job import Job
from .tcp_reader import TcpRead, counted
from .tcp_settings import TcpSettings
from .tcp_stream import Stream, opened
from .tcp_wire import Garbled, Refusal, Silent, Wire, WireError

USE_TCP = "use tcp"
_TRIES = 4  # to connect, within the limit of silence
_PROOFS = 3  # after the first read, which connects; most of them must agree
_LAST_WORDS_S = 0.5  # for a source to say why its memory cannot be read any more

_memories = msgspec.msgpack.Decoder(Memory)


def parse_endpoint(endpoint: str) -> tuple[Address, ...]:
    """`nixl://host:port` as ((host, port),). Raises `ValueError` for anything else."""
    return parse_tcp_endpoint(endpoint, SCHEME)


class NixlJob(Job):
    """What the threads of one read share."""

    def __init__(
        self, settings: TcpSettings, endpoint: str, key: str, sink: Sink, agents: Agents, facts: Facts, allow_tcp: bool
    ) -> None:
        super().__init__(settings, endpoint, key, sink)
        self.agents = agents
        self.facts = facts
        self.allow_tcp = allow_tcp
        self.lane: Lane | None = None
        self.meeting: Meeting | None = None

    def refused(self, refusal: Refusal) -> TensorHubError:
        if refusal.code == "memory":
            return TransportMissing(f"{self.endpoint} cannot serve {self.key!r} this way: {refusal.message}")
        return super().refused(refusal)

    def register(self) -> None:
        """Make the sink's memory known to NIXL, once. Before anybody is spoken to: to pin much of it takes seconds."""
        if isinstance(self.sink, Piecewise):
            return  # parcels land in memory of the read's own
        agent: Agent | None = None
        try:
            agent = self.agents.current()
            region = agent.region(self.sink.stream)
        except Broken as error:
            if agent is None or agent.ended is not None:  # another read ended it just now: the next try gets a new one
                raise self.lost(f"here: {error}") from error
            raise TransportMissing(f"NIXL cannot register the tensors here: {error}", hint=USE_TCP) from error
        if region is None:
            raise TransportMissing("the tensors here have no addresses that NIXL could be told", hint=USE_TCP)

    def close(self) -> None:
        if self.meeting is not None:
            self.meeting.close()


class NixlRead(TcpRead):
    """One read from one source."""

    kind = "nixl"
    has_links = False  # its streams are threads that copy

    def __init__(
        self,
        settings: TcpSettings,
        endpoint: str,
        key: str,
        sink: Sink,
        ending: Callable[[TcpRead], OnEnd],
        make_job: Callable[[str, str, Sink], NixlJob],
        streams: "type[NixlStream]",
    ) -> None:
        self._make_job, self._streams = make_job, streams
        super().__init__(settings, endpoint, key, sink, ending)

    def make_job(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink) -> Job:
        return self._make_job(endpoint, key, sink)

    def opened(self, index: int) -> AbstractContextManager[Stream]:
        assert isinstance(self.job, NixlJob)
        self.job.register()
        return opened(self.job, index, partial(dial, parse=parse_endpoint), self._streams)

    def _end(self) -> None:
        assert isinstance(self.job, NixlJob)
        if self.job.meeting is not None and isinstance(self.error, SourceLost):
            self.job.meeting.is_lost = True  # whoever has noticed it: its socket, or NIXL
        super()._end()

    @property
    def path(self) -> str:
        assert isinstance(self.job, NixlJob)
        lane = self.job.lane
        return f"{lane.name if lane else 'NIXL/UCX'}, {counted(self.streams, 'thread')}"


class NixlStream(AnnouncedStream):
    """One connection, and the thread that fetches what is announced on it."""

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        assert isinstance(job, NixlJob)
        self._its = job

    @property
    def _meeting(self) -> Meeting:
        meeting = self._its.meeting
        assert meeting is not None, "bytes before addresses"
        return meeting

    def receive_manifest(self) -> bytes:
        """And where the bytes are; proves that they can be read before anybody counts on it."""
        manifest = super().receive_manifest()
        kind, length, _ = self.next_frame()
        if kind != MEMORY:
            raise Garbled(f"a frame of kind {kind} where the addresses were due")
        try:
            memory = decoded(_memories, self.wire.receive_body(length, MAX_MEMORY_BYTES))
        except Undecodable as error:
            raise Garbled(f"malformed addresses: {error}") from error
        if memory.size_bytes != self.size_bytes:
            raise Garbled(f"addresses of {memory.size_bytes} B for content of {self.size_bytes} B")
        if lacking := nixl_path.lacks_descriptors():
            raise Unavailable(f"NIXL cannot connect from here: {lacking}", hint=FILES)
        try:
            self._its.meeting = Meeting(self._its.agents.current(), memory, self._its.agents.scratch)
        except Broken as error:
            raise self._left(f"NIXL cannot reach it: {error}", TransportMissing) from error
        self._prove()
        return manifest

    def mover_for(self, wanted: Sequence[int], streams: int) -> None:
        """NIXL brings the bytes, in threads of its own."""

    def join_in(self) -> None:
        """And connect this thread, too: one that cannot be has not asked for anything."""
        super().join_in()
        self._prove()

    def _prove(self) -> None:
        """Connect this thread, see by what way, and that the export lasts."""
        job, memory = self._its, self._meeting.memory
        self._connect()
        looks = [self._look(job.settings.silence_s) for _ in range(_PROOFS)]
        if not all(is_sealed for is_sealed, _ in looks):
            raise self._left("it has taken its promise back")
        is_immediate = 2 * sum(immediate for _, immediate in looks) > _PROOFS  # 16 B over TCP may be quick once
        devices = {device for device, _, _ in memory.places} or {HOST}
        lane = nixl_path.lane(job.facts, memory.facts, is_immediate=is_immediate, devices=sorted(devices))
        if lane.is_tcp and not job.allow_tcp:
            why = nixl_path.why_tcp(job.facts, memory.facts)
            raise TransportMissing(f"{job.endpoint} could be read over TCP only: {why}", hint=nixl_path.USE_TCP)
        job.lane = lane

    def _connect(self) -> None:
        """The first read of a thread connects it. Now and then UCX loses such a read: then the next one is answered.

        One thread at a time, for UCX lost none that way; but nobody waits long for a source that does not answer.
        """
        job, agent = self._its, self._meeting.agent
        until, turn_s = time.monotonic() + job.settings.silence_s, job.settings.silence_s / _TRIES
        has_turn = agent.await_turn(turn_s, lambda: job.is_over)
        if job.is_over and not has_turn:
            raise job.lost("the read is over")
        for left in range(_TRIES, 0, -1):
            try:
                self._look((until - time.monotonic()) / left, is_last=left == 1)
                return
            except Stuck:
                continue
            finally:
                if has_turn:
                    agent.connecting.release()
                has_turn = False

    def _look(self, limit_s: float, *, is_last: bool = True) -> tuple[bool, bool]:
        """Whether the source's seal stands, and whether it was read at once. Raises what ended the read.

        That it is not over in time ends the read too, but if it is not the last try: then it is raised as `Stuck`.
        """
        job, meeting = self._its, self._meeting
        try:
            slot = meeting.lend()
            ctypes.memset(slot.address, 0, SEAL_BYTES)
            is_immediate = meeting.agent.read(slot.list, meeting.seal, range(1), limit_s, lambda: job.is_over)
        except Broken as error:
            raise self._broken(error) from error
        except Stuck as error:  # the slot is never lent again: this read may still arrive there
            if not is_last and not job.is_over:
                raise
            raise job.lost(str(error)) from error
        is_sealed = ctypes.string_at(slot.address, SEAL_BYTES) == meeting.memory.seal
        meeting.take_back(slot)
        return is_sealed, is_immediate

    def _receive_chunk(self, chunk: int) -> None:
        job, sink = self.job, self.job.sink
        start = chunk * sink.chunk_bytes
        stop = min(start + sink.chunk_bytes, sink.stream.size_bytes)
        self.await_chunk(chunk, stop - start)
        try:
            plan = self._meeting.plan(sink)
        except Broken as error:
            raise self._left(f"NIXL cannot read its memory: {error}", TransportMissing) from error
        sink.touch()
        if plan.is_on_host:
            with sink.stream.writing(start, stop) as views:
                self._fetch(plan, chunk, start, stop)
                self._judge(chunk, stop - start, views)
            sink.stored(chunk)
        else:  # the bytes are on a device already
            self._fetch(plan, chunk, start, stop)
            if isinstance(sink, Taking):
                job.count_received(stop - start)
                sink.take(range(chunk, chunk + 1), None)
            else:  # what the sink looks at is a copy
                with sink.stream.reading(start, stop) as views:
                    self._judge(chunk, stop - start, views)
                sink.stored(chunk)
        job.count_stored()

    def _fetch(self, plan: Plan, chunk: int, start: int, stop: int) -> None:
        """The bytes of a chunk, which were those of the export when they were read."""
        meeting = self._meeting
        try:
            plan.read(chunk, stop - start, self.job.settings.silence_s)
        except Broken as error:
            raise self._broken(error) from error
        except Stuck as error:
            meeting.agent.end(f"{self.job.endpoint} did not end a read: only so no byte of it can come late")
            raise self.job.lost(str(error)) from error
        if not self._look(self.job.settings.silence_s)[0]:
            raise self._left("it has taken its promise back")
        self.note_read(stop - start, is_last=not self.asked)

    def _judge(self, chunk: int, size_bytes: int, views: Sequence[memoryview]) -> None:
        self.job.count_received(size_bytes)
        if (look := self.job.sink.observe(chunk)) is not None:
            deque(map(look, views), 0)
        self.job.sink.accept(chunk, views)

    def _broken(self, error: Broken) -> Exception:
        """NIXL could not read. Where the source lives and says nothing, its memory cannot be read from here."""
        job, meeting = self._its, self._meeting
        meeting.is_lost = True
        if meeting.agent.ended is not None:  # by another read
            return self._left(str(error))
        why = nixl_path.why_tcp(job.facts, meeting.memory.facts)
        return self._left(f"UCX has no way to it but TCP ({why}): {error}", TransportMissing)

    def _left(self, why: str, otherwise: type[TensorHubError] | None = None) -> Exception:
        """What ended the export, as the source says it; or that it is gone; or else `why`, as `otherwise` if given."""
        try:
            self.wire.limit_waits(receive_s=_LAST_WORDS_S, send_s=_LAST_WORDS_S)
            while True:
                kind, length, _ = self.wire.receive_header()
                if kind == tcp_wire.GONE:
                    return self.job.refused(self.wire.receive_gone(length))
                self.wire.receive_body(length, COUNT.size)
        except Silent:
            return self.job.lost(why) if otherwise is None else otherwise(f"{self.job.endpoint}: {why}", hint=USE_TCP)
        except WireError as error:
            return self.job.lost(f"{error}; {why}")
