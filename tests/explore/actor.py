"""One worker of the small cluster: the real worker machine, two chunks of memory, and the shell between them.

Its data plane is one-sided, like RDMA: a source does not notice that it is read and refuses nobody, and no digest is
compared. So a reader is kept off changing memory by the protocol alone.
"""

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from tensorhub.protocol.messages import Failure, Grant, Hello, LayoutInfo, Orders, Refusal, Report
from tensorhub.protocol.names import Digest, Version
from tensorhub.worker import events
from tensorhub.worker.machine import Worker

if TYPE_CHECKING:
    from .small import Small

CHUNKS = 2
UNWRITTEN, TRAINED = 0, -1  # what memory has that is no version's


def content(version: int) -> list[int]:
    """The bytes of a version, which everybody may know and nobody asks the core for."""
    return [10 * version + chunk for chunk in range(CHUNKS)]


def root_of(version: int) -> Digest:
    return Digest(f"r{version}")


@dataclass
class Read:
    """The open read. `limit`: chunks that the source has told of."""

    grant: Grant
    is_only_opened: bool
    is_touched: bool = False
    is_stopped: bool = False
    limit: int = 0


@dataclass
class Actor:
    """A worker, its links to the server, and how far its program is."""

    name: str
    hello: Hello
    worker: Worker
    memory: list[int] = field(default_factory=lambda: [UNWRITTEN] * CHUNKS)
    copies: dict[Version, list[int]] = field(default_factory=dict)
    serving: Version | None = None
    filling: Version | None = None  # what `done` counts
    done: int = 0
    opened: Version | None = None  # others may open it here too
    read: Read | None = None
    local: list[events.Event] = field(default_factory=list)  # what its shell has yet to answer, in order
    trust_until: float = -inf
    up: list[Hello | LayoutInfo | Report | None] = field(default_factory=list)  # None: the connection has ended
    down: list[Orders | Refusal] = field(default_factory=list)
    is_alive: bool = True
    is_linked: bool = False
    step: int = 0  # of its program
    verb: str = ""  # of the call that it is in
    tries: int = 0
    has: int | None = None  # the version that its last call gave it
    floor: int = 0  # the newest version that was published when its call began

    # --- events in, effects out ---------------------------------------------------------------------------------------

    def tell(self, small: "Small", event: events.Event) -> None:
        """As every shell does it: carry out what the machine wants, then tell it what follows at once."""
        at_once: list[events.Event] = []
        for effect in self.worker.handle(event, now=small.now):
            small.wants(self, effect)
            self._carry_out(small, effect, at_once)
        small.check(self)
        for follow in at_once:
            self.tell(small, follow)

    def _carry_out(self, small: "Small", effect: events.Effect, at_once: list[events.Event]) -> None:
        match effect:
            case events.Send(message=message):
                if self.is_linked:
                    self.up.append(message)
            case events.OpenRead(grant=grant):
                self.read = Read(grant, is_only_opened=True)
            case events.StartRead(grant=grant):
                self.read = Read(grant, is_only_opened=False)
                if grant.to_host:
                    self.copies.setdefault(grant.version, [])
                else:
                    self.opened = grant.version
            case events.Trust(until=until):
                self.trust_until = until
            case events.StopRead(ticket=ticket):
                assert self.read is not None
                self.read.is_stopped = True
                at_once.append(events.ReadBarred(ticket, self.read.is_touched))
            case events.StartServing(version=version):
                self.serving, self.filling, self.opened = version, None, None
            case events.StopServing(version=version):
                self.serving, self.filling = None, None
                self.opened = self.opened if self.opened != version else None
                self.local.append(events.ServingStopped(version))
            case events.CopyOut(version=version):
                self.copies[version] = self.memory[:1]
                self.local.append(events.CopiedOut(version))
            case events.CopyIn(version=version):
                self.memory[0] = self.copies[version][0]
                self.local.append(events.CopiedIn(version))
            case events.DropCopy(version=version):
                del self.copies[version]
                self.local.append(events.CopyDropped(version))
            case events.Finished():
                small.finished(self, effect)
            case events.Left():
                small.has_left(self)
            case events.Warn(text=text):
                small.warned(self, text)

    def go_on(self, small: "Small") -> None:
        """The oldest thing that its shell was asked for is done."""
        event = self.local.pop(0)
        match event:
            case events.CopiedOut(version=version):
                self.copies[version] = [*self.copies[version][:1], self.memory[1]]
            case events.CopiedIn(version=version):
                self.memory[1] = self.copies[version][1]
            case _:
                pass
        self.tell(small, event)

    # --- its memory, as others see it ---------------------------------------------------------------------------------

    def available(self, grant: Grant) -> int | None:
        """Chunks that can be read here under the grant; None where it is not served."""
        if not self.is_alive:
            return None
        if grant.from_host:
            copy = self.copies.get(grant.version)
            return len(copy) if copy is not None else None
        if self.serving == grant.version:
            return self.done if self.filling == grant.version else CHUNKS
        return 0 if self.opened == grant.version else None

    def chunk(self, grant: Grant, number: int) -> int:
        """What stands there at this moment, whatever it is."""
        place = self.copies.get(grant.version, []) if grant.from_host else self.memory
        return place[number] if number < len(place) else TRAINED

    # --- its read -----------------------------------------------------------------------------------------------------

    def read_done(self) -> int:
        """Chunks in place of what is being read."""
        assert self.read is not None
        grant = self.read.grant
        if grant.to_host:
            return len(self.copies.get(grant.version, []))
        return self.done if self.filling == grant.version else 0

    def can_read(self, source: "Actor | None") -> bool:
        """The next chunk, or the manifest, can be had."""
        read = self.read
        assert read is not None
        if source is None or not source.is_alive or read.is_stopped:
            return False
        limit = source.available(read.grant)
        if read.is_only_opened:
            return limit is not None and not self.worker.state.slot.is_opened
        return max(limit or 0, read.limit) > self.read_done()

    def read_on(self, small: "Small", source: "Actor") -> None:
        """The manifest, or the next chunk, arrives."""
        read = self.read
        assert read is not None
        ticket = read.grant.ticket
        if read.is_only_opened:
            self.opened = read.grant.version
            self.tell(small, events.ReadOpened(ticket))
            return
        read.limit = source.available(read.grant) or read.limit
        if not read.grant.to_host and not read.is_touched:
            self._touch(small, read)
            if self.read is not read or read.is_stopped:
                return
        value = source.chunk(read.grant, self.read_done())
        done = self._write(read, value)
        if small.now >= self.trust_until:
            self.read_fails(small, "session-lost")
            return
        small.accepted(self, read.grant, done - 1, value)
        if not read.grant.to_host:
            self.done = done
        self.tell(small, events.ReadAdvanced(ticket, done, CHUNKS))
        if done == CHUNKS and self.read is read:
            self.read = None
            self.tell(small, events.ReadEnded(ticket, complete=True))

    def _touch(self, small: "Small", read: Read) -> None:
        read.is_touched = True
        if self.filling != read.grant.version:
            self.filling, self.done = read.grant.version, 0
        self.serving = read.grant.version
        self.tell(small, events.ReadTouched(read.grant.ticket))

    def _write(self, read: Read, value: int) -> int:
        done = self.read_done()
        if read.grant.to_host:
            self.copies[read.grant.version].append(value)
        else:
            self.memory[done] = value
        return done + 1

    def read_stops(self, small: "Small", *, source: "Actor | None") -> None:
        """A read that was told to stop has ended; a chunk that was under way from that source has landed before."""
        read, self.read = self.read, None
        assert read is not None
        if source is not None:
            self.memory[self.done] = source.chunk(read.grant, self.done)
        self.tell(small, events.ReadEnded(read.grant.ticket))

    def read_fails(self, small: "Small", code: str) -> None:
        read, self.read = self.read, None
        assert read is not None
        self.tell(small, events.ReadEnded(read.grant.ticket, failure=Failure(code, "as the history has it")))
