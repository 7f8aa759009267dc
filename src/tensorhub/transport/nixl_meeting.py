"""What a reader prepares once for a source: who it is, which descriptors make each chunk, and where seals are read to.

A `Meeting` is shared by the threads of one read and closed when the last has left; the connection that NIXL keeps with
the source outlives it, so that the next version is read over a warm one. It must never: be closed while a thread reads.
"""

import threading
from typing import NamedTuple

from ..core.errors import TransportMissing
from .base import Sink
from .nixl_agent import Agent, Broken
from .nixl_memory import SEAL_BYTES, Page, Place, cut
from .nixl_path import HOST
from .nixl_server import Memory
from .tcp_settings import MIB

POST_BYTES = 16 * MIB  # of one post: with cma it copies inside the call, 1-2 ms
_POST_DESCRIPTORS = 1024


class Plan:
    """The descriptors of a read, prepared once: for each kind of memory at the two ends a list on either side."""

    def __init__(self, agent: Agent, peer: str, ours: list[Place], theirs: list[Place], chunk_bytes: int) -> None:
        """Raises `Broken` if NIXL does not take them."""
        self._agent = agent
        self._parts: dict[int, dict[tuple[bool, bool], range]] = {}
        self._lists: dict[tuple[bool, bool], tuple[int, int]] = {}
        self.is_on_host = all(place.device == HOST for place in ours)
        sides: dict[tuple[bool, bool], tuple[list[Place], list[Place]]] = {}
        for chunk, our, their in cut(ours, theirs, chunk_bytes):
            kind = (our.device == HOST, their.device == HOST)
            our_side, their_side = sides.setdefault(kind, ([], []))
            of_chunk = self._parts.setdefault(chunk, {})
            first = of_chunk[kind].start if kind in of_chunk else len(our_side)
            our_side.append(our)
            their_side.append(their)
            of_chunk[kind] = range(first, len(our_side))
        for kind, (our_side, their_side) in sides.items():
            self._lists[kind] = agent.prepare(None, our_side), agent.prepare(peer, their_side)

    def read(self, chunk: int, size_bytes: int, limit_s: float) -> None:
        """Fetch a chunk. Raises `Broken`, `Stuck`."""
        for kind, indices in self._parts.get(chunk, {}).items():
            posts = max(1, -(-size_bytes // POST_BYTES), -(-len(indices) // _POST_DESCRIPTORS))
            step = max(1, -(-len(indices) // posts))
            for first in range(0, len(indices), step):
                self._agent.read(*self._lists[kind], indices[first : first + step], limit_s)

    def close(self) -> None:
        for prepared in self._lists.values():
            for one in prepared:
                self._agent.drop(one)


class Slot(NamedTuple):
    """Where a seal is read to."""

    address: int
    list: int  # prepared: NIXL's descriptor list of it


class Meeting:
    """The source as its reader knows it. Shared by the threads of a read; `close` when the last has left."""

    def __init__(self, agent: Agent, memory: Memory, scratch: Page) -> None:
        """Raises `Broken`."""
        self.agent = agent
        self._scratch = scratch
        self._slots: list[Slot] = []
        self.memory = memory
        self.is_lost = False
        self.peer = memory.agent
        agent.meet(self.peer, memory.metadata)
        self._plan: Plan | None = None
        self._lock = threading.Lock()
        try:
            self.seal = agent.prepare(self.peer, [Place(HOST, memory.seal_address, SEAL_BYTES)])
        except Broken:
            agent.part(self.peer, is_lost=True)
            raise

    def lend(self) -> Slot:
        """A slot for one read of the seal. One that is not taken back is never used again. Raises `Broken`."""
        with self._lock:
            if self._slots:
                return self._slots.pop()
        address = self._scratch.take()
        try:
            return Slot(address, self.agent.prepare(None, [Place(HOST, address, SEAL_BYTES)]))
        except BaseException:
            self._scratch.give(address)  # nobody was told of it
            raise

    def take_back(self, slot: Slot) -> None:
        with self._lock:
            self._slots.append(slot)

    def plan(self, sink: Sink) -> Plan:
        """Made when the sink's chunks are known. Raises `Broken`, `TransportMissing`."""
        with self._lock:
            if self._plan is None:
                region = self.agent.region(sink.stream)
                if region is None:
                    raise TransportMissing("the tensors here have no addresses that NIXL could be told", hint="use tcp")
                places = self.memory.as_places()
                self._plan = Plan(self.agent, self.peer, region.places, places, sink.chunk_bytes)
            return self._plan

    def plan_of(self, ours: Place, theirs: list[Place]) -> Plan:
        """Of bytes that are fetched once, all into one place that is known. Raises `Broken`. To be closed."""
        return Plan(self.agent, self.peer, [ours], theirs, ours.size_bytes)

    def close(self) -> None:
        if self._plan is not None:
            self._plan.close()
        for slot in self._slots:
            self.agent.drop(slot.list)
            self._scratch.give(slot.address)
        self.agent.drop(self.seal)
        self.agent.part(self.peer, is_lost=self.is_lost)
