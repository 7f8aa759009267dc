"""One life of one worker in a scenario: its memory, a data plane that moves a chunk when the script says so, and the
shell that carries out what the real worker machine wants."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from msgspec import structs

from tensorhub.protocol.manifest import Layout
from tensorhub.protocol.messages import Failure, Grant, Hello, LayoutInfo, Orders, Refusal
from tensorhub.protocol.names import TILED, Digest, Version
from tensorhub.worker.events import (
    Called,
    Cancelled,
    Closing,
    Connected,
    CopiedIn,
    CopiedOut,
    CopyCounted,
    CopyDropped,
    CopyIn,
    CopyOut,
    Disconnected,
    DropCopy,
    Effect,
    Event,
    Left,
    NotShared,
    OpenRead,
    ReadAdvanced,
    ReadBarred,
    ReadEnded,
    ReadOpened,
    ReadTouched,
    Received,
    Registered,
    Send,
    ServingStopped,
    StartRead,
    StartServing,
    StopRead,
    StopServing,
    Tick,
    Trust,
    Wished,
)
from tensorhub.worker.machine import Worker

from .words import name_of

if TYPE_CHECKING:
    from .stage import Stage

CHUNKS = 4
NOTHING_SAID = Digest("")


def root_of(content: str, cut: str, shard: int) -> Digest:
    """The content of one shard that is cut so."""
    return Digest(f"{TILED}{content}/{cut}/{shard}")


def values_of(root: Digest, chunks: int) -> list[str]:
    """Its chunks."""
    return [f"{root[len(TILED) :]}.{chunk}" for chunk in range(chunks)]


class Player:
    """A worker on the stage."""

    def __init__(
        self, stage: "Stage", hello: Hello, layout: Layout, copies: int = 0, cut: str = "", is_verified: bool = True
    ) -> None:
        self.stage = stage
        self.hello = hello
        self.me = hello.worker
        self.name = name_of(hello.worker)
        self.cut = cut  # what its boxes say; empty: it has none
        self.root = Digest("")  # of what the open read brings
        self.is_misfit = False  # its boxes want what no source has
        self.line = 0  # how many connections it has made
        self.ended = -1  # the last of them that the server has closed
        self.memory = ["-"] * CHUNKS
        self.copies: dict[Version, list[str]] = {}  # host copies, as far as they are filled
        self.is_copying_slow = False  # offloads and fills from host copies wait
        self.waiting: list[CopiedIn | CopiedOut] = []
        self.serving: Version | None = None
        self.opened: Version | None = None  # others may open it here too, and get nothing of it yet
        self.filling: Version | None = None  # what `done` counts
        self.done = 0
        self.grant: Grant | None = None  # of the open read
        self.is_stuck = False  # a read that is asked to stop does not stop yet
        self.is_asked_to_stop = False
        self.is_lingering = False  # it goes on serving for a while when it should stop
        self.lingers_on: Version | None = None
        self.is_touched = False  # the open read has written, or may have
        self.trust_until = -inf
        self.retry_at = inf
        self.worker = Worker(self.me, shards=hello.shards, may_work_alone=is_verified)
        self.register(layout, copies)

    def register(self, layout: Layout, copies: int) -> None:
        """Tensors, for the first time or others; nothing of what they have is known to anybody."""
        assert self.worker.may_register, f"{self.name} may not register: {self.worker.buffer}"
        self.memory = ["-"] * CHUNKS
        boxes = f"{self.cut}/{self.me.shard}".encode() if self.cut else b""
        info = LayoutInfo.of(layout, boxes, partial=self.cut.startswith("part-"))
        self.tell(Registered(info, info.digest(), CHUNKS * len(layout.tensors), copies))  # a chunk of each is a byte

    # --- events in, effects out ---------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        later: list[Event] = []
        for effect in self.worker.handle(event, now=self.stage.now):
            self.stage.say(self.stage.words.effect(self.name, effect))
            later += self._carry_out(effect)
        self.worker.check_invariants()
        for follow in later:
            self.tell(follow)

    def _carry_out(self, effect: Effect) -> Sequence[Event]:
        from .stage import Letter

        match effect:
            case Send(message=message):
                self.stage.send(Letter(self, message, is_up=True))
            case OpenRead(grant=grant):
                self.grant, self.is_asked_to_stop, self.is_touched = grant, False, False
                return self._open(grant)
            case StartRead(grant=grant):
                self.grant, self.is_asked_to_stop, self.is_touched = grant, False, False
                if not grant.is_across:
                    self.root = grant.root
                if not all(source.endpoints for source in grant.sources):
                    return self._no_way(grant)
                if grant.to_host:
                    if not grant.shares:
                        self.copies.setdefault(grant.version, [])
                    return []
                if self.filling != grant.version:
                    self.filling, self.done = grant.version, 0
                self.serving = grant.version
            case Trust(until=until):
                self.trust_until = until
            case StopRead(ticket=ticket):
                self.is_asked_to_stop = True
                barred = ReadBarred(ticket, self.is_touched)
                if not self.is_stuck:
                    self.grant = None
                    return [barred, ReadEnded(ticket)]
                return [barred]
            case StartServing(version=version):
                self.serving, self.filling, self.opened = version, None, None
            case StopServing(version=version):
                if self.is_lingering:
                    self.lingers_on = version
                    return []
                self.serving, self.filling, self.done = None, None, 0
                return [ServingStopped(version)]
            case CopyOut(version=version):
                self.copies[version] = list(self.memory)
                return self._copied(CopiedOut(version))
            case CopyIn(version=version):
                self.memory = list(self.copies[version])
                return self._copied(CopiedIn(version))
            case DropCopy(version=version):
                del self.copies[version]
                return [CopyDropped(version)]
            case Left():
                self.stage.crash_worker(self)
        return []

    def _open(self, grant: Grant) -> Sequence[Event]:
        """Sources that are there answer at once; of one that is not, `read` and `fail` tell."""
        if not all(source.endpoints for source in grant.sources):
            return self._no_way(grant)
        for source in grant.sources:
            player = self.stage.players.get(name_of(source.worker))
            if player is None or player.served(grant.version, from_host=source.from_host) is None:
                return []
        self.root = Digest("")
        if grant.is_across:
            contents = {source.root[len(TILED) :].split("/")[0] for source in grant.sources}
            if len(contents) > 1 or self.is_misfit:
                found = Failure("version-conflict", f"'head' is {' here and '.join(sorted(contents))} there")
                if self.is_misfit:
                    found = Failure("layout-mismatch", "'head' has no box that covers [2:4]")
                self.grant = None
                return [ReadEnded(grant.ticket, failure=found)]
            self.root = root_of(contents.pop(), self.cut, self.me.shard)
            self.stage.contents[self.root] = values_of(self.root, CHUNKS)
        self.opened = grant.version
        return [ReadOpened(grant.ticket, self.root)]

    def _no_way(self, grant: Grant) -> Sequence[Event]:
        """It is told of no endpoint at which the source could be read."""
        self.grant = None
        self.stage.say(f"{self.name} cannot read {self.stage.words.ticket(grant.ticket)}: no endpoint is named")
        return [ReadEnded(grant.ticket, failure=Failure("transport-missing", "no endpoint is named"))]

    def _copied(self, event: CopiedIn | CopiedOut) -> Sequence[Event]:
        if not self.is_copying_slow:
            return [event]
        self.waiting.append(event)
        return []

    def copies_end(self, failure: Failure | None = None, *, next_is_slow: bool = False) -> None:
        """What was being copied is there now, or was found to be bad."""
        self.is_copying_slow = next_is_slow
        waiting, self.waiting = self.waiting, []
        for event in waiting:
            self.tell(replace(event, failure=failure))

    def counts(self, version: Version) -> None:
        """Who counted the memory that is shared here has let it go."""
        self.tell(CopyCounted(version))

    def wish(self, prefetch: int | str | None, pins: tuple[Version, ...]) -> None:
        self.tell(Wished(prefetch, pins))

    # --- the connection -----------------------------------------------------------------------------------------------

    @property
    def sender(self) -> str:
        """Its connection, as the server knows it."""
        return f"{self.hello.life} {self.line}"

    def connected(self) -> None:
        self.tell(Connected())

    def disconnected(self) -> None:
        self.tell(Disconnected())

    def received(self, message: Orders | Refusal) -> None:
        self.tell(Received(message))
        if isinstance(message, Refusal):
            self.tell(Disconnected())
            if message.retry_s > 0:
                self.retry_at = self.stage.now + message.retry_s

    def tick(self) -> None:
        self.tell(Tick())

    # --- the caller ---------------------------------------------------------------------------------------------------

    def call(
        self,
        verb: str,
        spec: int | str,
        timeout_s: float,
        content: str = "",
        *,
        waits: bool = False,
        metadata: Digest = NOTHING_SAID,
        grid: Digest = NOTHING_SAID,
        untiled: bool = False,
    ) -> None:
        """As user code would; before a publish it writes the content into its tensors, if it may."""
        root = Digest("")
        if verb == "publish":
            root = Digest(f"{content}/{self.me.shard}" if self.hello.shards > 1 else content)
            values = [f"{content}.{chunk}" for chunk in range(CHUNKS)]
            if self.cut and not untiled:
                root = root_of(content, self.cut, self.me.shard)
                values = values_of(root, CHUNKS)
            if self.worker.held is None:
                self.memory = values
            self.stage.contents[root] = list(self.memory)
        claim = None
        if verb == "mutate":
            verb, spec, claim = "unpublish", "", Version(int(spec))
        self.tell(Called(verb, spec, self.stage.now + timeout_s, root, claim, waits, metadata, grid))

    def miss(self, verb: str, spec: int | str, why: str) -> None:
        """User code wanted to make that call, and could not."""
        self.tell(Called(verb, spec, self.stage.now, missed=Failure("usage", why)))

    def cancel(self) -> None:
        self.tell(Cancelled())

    def close(self, timeout_s: float) -> None:
        self.tell(Closing(self.stage.now + timeout_s))

    # --- the data plane -----------------------------------------------------------------------------------------------

    def served(self, version: Version, *, from_host: bool = False) -> list[str] | None:
        """What others may read here now of that version; None: it is not served."""
        if from_host:
            return self.copies.get(version)
        if self.serving != version:
            return [] if self.opened == version else None
        return self.memory[: self.done] if self.filling == version else self.memory

    def read_chunk(self, *, corrupt: bool = False) -> bool:
        """The next chunk lands, or the read fails. False: there is nothing to be had now.

        Across layouts chunk n comes out of source n, counted round.
        """
        grant = self.grant
        assert grant is not None, f"{self.name} has no read open"
        copy = self.copies[grant.version] if grant.to_host and not grant.shares else None
        done = len(copy) if copy is not None else self.done
        where = grant.sources[done % len(grant.sources)]
        name, from_host = name_of(where.worker), where.from_host
        source = self.stage.players.get(name)
        if source is None:
            return self.read_fails("source-lost", f"{name} is gone", name)
        served = source.served(grant.version, from_host=from_host)
        if served is None:
            return self.read_fails("source-lost", f"{name} does not serve version {grant.version}", name)
        if grant.shares:
            return self._map(grant, ["??", *served[1:]] if corrupt else served)
        if len(served) <= done:
            self.stage.say(f"{self.name} waits for {source.name}, which has no more than it")
            return False
        value = "??" if corrupt else served[done]
        if grant.is_across and value != "??":
            value = self.stage.contents[self.root][done] if served == self.stage.contents[where.root] else "??"
        if copy is None:
            if not self.is_touched:
                self.is_touched = True
                self.tell(ReadTouched(grant.ticket))
            self.memory[done] = value
        if self.stage.now >= self.trust_until:
            return self.read_fails("session-lost", "the lease ended during the read")
        if value != self.stage.contents[self.root][done]:
            return self.read_fails("corrupt-transfer", f"chunk {done} is {value}, which is not as published", name)
        done += 1
        said = " in host memory" if copy is not None else f": {self.content}"
        if copy is not None:
            copy.append(value)
        else:
            self.done = done
        self.stage.say(f"{self.name} has {done} of {CHUNKS} chunks of version {grant.version}{said}")
        self.tell(ReadAdvanced(grant.ticket, done, CHUNKS))
        if done == CHUNKS:
            self.grant = None
            self.tell(ReadEnded(grant.ticket, complete=True))
        return self.grant is grant

    def _map(self, grant: Grant, served: list[str]) -> bool:
        """The source's host copy, which is looked at as a whole."""
        if self.stage.now >= self.trust_until:
            return self.read_fails("session-lost", "the lease ended during the read")
        if served != self.stage.contents[grant.root]:
            return self.read_fails("corrupt-transfer", "what was mapped is not as published")
        self.grant, self.copies[grant.version] = None, served  # one memory for both
        self.stage.say(f"{self.name} has mapped version {grant.version} of {name_of(grant.source.worker)}")
        self.tell(ReadEnded(grant.ticket, complete=True))
        return False

    def cannot_map(self) -> None:
        """What it was to share it reads instead."""
        assert self.grant is not None, f"{self.name} has no read open"
        assert self.grant.shares, f"{self.name} is to share nothing"
        self.grant = structs.replace(self.grant, shares=False)
        self.copies.setdefault(self.grant.version, [])
        self.stage.say(f"{self.name} cannot map what {name_of(self.grant.source.worker)} has, and reads it")
        self.tell(NotShared(self.grant.ticket))

    def read_fails(self, code: str, message: str, source: str = "") -> bool:
        """`source`: the one that is to blame, of several."""
        grant, self.grant = self.grant, None
        assert grant is not None, f"{self.name} has no read open"
        self.stage.say(f"{self.name} fails {self.stage.words.ticket(grant.ticket)}: {code}: {message}")
        worker = next((each.worker for each in grant.sources if name_of(each.worker) == source), None)
        self.tell(ReadEnded(grant.ticket, failure=Failure(code, message), source=worker))
        return False

    def unstick(self) -> None:
        """The read that was asked to stop has stopped."""
        self.is_stuck = False
        if self.is_asked_to_stop and self.grant is not None:
            grant, self.grant = self.grant, None
            self.tell(ReadEnded(grant.ticket))

    def lets_go(self) -> None:
        """Nobody reads here any more, and nobody can."""
        self.is_lingering, version = False, self.lingers_on
        assert version is not None, f"{self.name} was not asked to stop serving"
        self.serving, self.filling, self.done = None, None, 0
        self.tell(ServingStopped(version))

    @property
    def content(self) -> str:
        return " ".join(self.memory)
