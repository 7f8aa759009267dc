"""The source's side of the nixl transport: says where the bytes lie and which chunks are there; sends none.

It is the tcp transport's server: the same greetings, requests, keepalives and farewells (`tcp_wire`) over the same kind
of socket, the same threads and the same ways for an export to end. In place of chunks a reader gets, once

    source  MEMORY  how to reach this worker's NIXL agent, where every byte of the stream is, and the seal
    source  READY   chunks [`number`, number + n) are there; n is the body

and its requests carry as their `number` how many bytes it has read so far on this connection: that is what is counted.
It must never: let an export's seal stand when the export has ended.
"""

import socket
import threading
from collections.abc import Sequence
from typing import Annotated

import msgspec

from ..core.errors import UsageError
from . import tcp_wire
from .announcing import MAX_MEMORY_BYTES, MEMORY, AnnouncingServer
from .base import ByteStream, Export
from .located import Located
from .nixl_agent import Agent, Region
from .nixl_agents import Agents
from .nixl_memory import SEAL_BYTES, Page, Place, Placed, Seal
from .nixl_path import Facts, lacks_descriptors
from .tcp_addresses import SCHEME as TCP
from .tcp_served import Served
from .tcp_settings import TcpSettings
from .tcp_wire import Hello, Refusal, Wire
from .threads import Thread, start

SCHEME = "nixl"
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Positive = Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs to know of an export's memory."""

    facts: Facts
    agent: str  # its name
    metadata: list[bytes]  # NIXL's own: read by NIXL only
    places: list[tuple[_Natural, _Natural, _Positive]]  # device, address, length; all of the stream, in order
    seal_address: _Natural
    seal: Annotated[bytes, msgspec.Meta(min_length=SEAL_BYTES, max_length=SEAL_BYTES)]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, _, size in self.places)

    def as_places(self) -> list[Place]:
        return [Place(*place) for place in self.places]


class NixlServed(Served):
    """An export with a seal."""

    def __init__(self, export: Export, page: Page) -> None:
        super().__init__(export)
        self.seal = Seal(page)

    def end(self, reason: str) -> None:
        self.seal.break_()
        super().end(reason)


class NixlServer(AnnouncingServer):
    """Tells whoever is welcome where the exports are."""

    kind = "nixl"

    def __init__(self, settings: TcpSettings, agents: Agents, facts: Facts) -> None:
        self._agents = agents
        self._facts = facts
        super().__init__(settings)

    def advertised(self, listening: Sequence[socket.socket]) -> str:
        return SCHEME + super().advertised(listening).removeprefix(TCP)

    def make_served(self, export: Export) -> Served:
        return NixlServed(export, self._agents.seals)

    def why_not(self, served: Served) -> Refusal | None:
        if not isinstance(served.export.stream, Located | Placed):
            return Refusal("memory", "its tensors have no addresses that NIXL could be told")
        lacking = lacks_descriptors()
        return Refusal("short", lacking) if lacking else None

    def introduce(self, wire: Wire, served: Served, hello: Hello) -> None:
        assert isinstance(served, NixlServed)
        super().introduce(wire, served, hello)
        agent = self._agents.introducing(served.export.stream)
        region = self._registered(wire, agent, served.export.stream)
        places = [(place.device, place.address, place.size_bytes) for place in region.places]
        memory = Memory(
            self._facts, agent.name, agent.introduction(region), places, served.seal.address, served.seal.value
        )
        body = msgspec.msgpack.encode(memory)
        if len(body) > MAX_MEMORY_BYTES:
            raise UsageError(f"{served.export.key!r} lies in too many pieces: {len(places)}")
        wire.send_frame(MEMORY, payload=[body])

    def _registered(self, wire: Wire, agent: Agent, stream: ByteStream) -> Region:
        """The stream's memory as NIXL knows it. To pin a large model takes seconds: keepalives go out meanwhile."""
        found = list[Region | Exception | None]()
        is_over = threading.Event()

        def register() -> None:
            found.append(_region_or_error(agent, stream))
            is_over.set()

        thread = Thread(register, name="tensorhub-nixl-register")
        start(thread)
        while not is_over.wait(self._settings.silence_s / 4):
            wire.send_frame(tcp_wire.WAITING)
        thread.join()
        region = found.pop()
        if isinstance(region, Exception):
            try:
                raise region
            finally:
                del region  # its traceback knows this frame
        assert region is not None, "a stream without addresses was let in"
        return region


def _region_or_error(agent: Agent, stream: ByteStream) -> Region | Exception | None:
    try:
        return agent.region(stream)
    except Exception as error:  # noqa: BLE001 the top of a thread: whatever it is, whoever waits raises it
        return error
