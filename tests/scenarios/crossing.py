"""The data plane of a read across, for a worker in a scenario: its own chunk is brought by one of its sources.

Content that is cut is called `tiled-CONTENT/CUT/SHARD`. Chunk n of the worker comes out of shard n of the sources' cut,
counted round; so a source brings nothing more once its last chunk is there.
"""

from typing import TYPE_CHECKING

from tensorhub.protocol.messages import Failure, Grant
from tensorhub.protocol.names import TILED, Digest, Ticket
from tensorhub.worker.events import (
    AcrossOpened,
    AddPart,
    Event,
    OpenAcross,
    PartEnded,
    PartMeasured,
    ReadAdvanced,
    ReadEnded,
    ReadTouched,
    StartAcross,
    StopPart,
)

from .words import name_of

if TYPE_CHECKING:
    from .player import Player

ARRIVED_BYTES = 1 << 20  # of each chunk


def root_of(content: str, cut: str, shard: int) -> Digest:
    """The content of one shard that is cut so."""
    return Digest(f"{TILED}{content}/{cut}/{shard}")


def values_of(root: Digest, chunks: int) -> list[str]:
    """Its chunks."""
    return [f"{root[len(TILED) :]}.{chunk}" for chunk in range(chunks)]


class Crossing:
    """The open read across of one worker; between two of them nothing is kept."""

    def __init__(self, player: "Player", effect: OpenAcross, chunks: int) -> None:
        self.player, self.chunks = player, chunks
        self.ticket = effect.ticket
        self.parts: dict[Ticket, Grant] = {grant.ticket: grant for grant in effect.grants}
        self.one = effect.grants[0]
        self.root: Digest | None = None  # of what it will be here; None: not known yet
        self.is_started = False
        self.lacking = 0  # parts that ended without what was wanted of them, and were not replaced

    @property
    def done(self) -> int:
        """Chunks of its own that are in place."""
        copy = self.player.copies.get(self.one.version) if self.one.to_host else None
        return len(copy) if copy is not None else self.player.done

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def open(self) -> list[Event]:
        """Each source that is there answers at once; then it is known what the version is here."""
        events = [event for part in list(self.parts) for event in self._look(part)]
        shards = {self._shard(grant): grant for grant in self.parts.values()}
        count = max((self._shards(grant) for grant in self.parts.values()), default=1)
        if self.root is None and len(shards) == count:
            contents = {grant.root[len(TILED) :].split("/")[0] for grant in self.parts.values()}
            if len(contents) > 1 or self.player.is_misfit:
                found = Failure("version-conflict", f"'head' is {' here and '.join(sorted(contents))} there")
                if self.player.is_misfit:
                    found = Failure("layout-mismatch", "'head' has no box that covers [2:4]")
                return [*events, ReadEnded(self.ticket, failure=found)]
            self.root = root_of(contents.pop(), self.player.cut, self.player.me.shard)
            self.player.stage.contents[self.root] = values_of(self.root, self.chunks)
            events.append(AcrossOpened(self.ticket, self.root))
        elif self.root is None and shards and self.lacking == 0:
            text = f"no source has what is in shard {min(set(range(count)) - set(shards))} of {count}"
            events.append(ReadEnded(self.ticket, failure=Failure("layout-mismatch", text)))
        return events

    def start(self, effect: StartAcross) -> None:
        """It may be written."""
        self.parts = {grant.ticket: grant for grant in effect.grants}
        self.is_started = True

    def add(self, effect: AddPart) -> list[Event]:
        """One more source; it may not be needed."""
        self.parts[effect.grant.ticket] = effect.grant
        self.lacking = max(0, self.lacking - 1)
        if self.root is None:
            return self.open()
        return self._look(effect.grant.ticket) or self._brought()

    def stop(self, effect: StopPart) -> list[Event]:
        """Nothing more from that source."""
        if self.parts.pop(effect.part, None) is None:
            return []
        self.lacking += 1
        return [PartEnded(self.ticket, effect.part)]

    # --- bytes --------------------------------------------------------------------------------------------------------

    def read_chunk(self, *, corrupt: bool) -> bool:
        """The next chunk lands, or a part fails. False: nobody brings it now."""
        player, chunk = self.player, self.done
        part = next((t for t, g in self.parts.items() if chunk % self._shards(g) == self._shard(g)), None)
        if not self.is_started or part is None:
            player.stage.say(f"{player.name} waits for somebody who brings chunk {chunk}")
            return False
        failed = self._look(part)
        if failed:
            player.tell_all(failed)
            return False
        grant = self.parts[part]
        source = player.stage.players[name_of(grant.source)]
        is_good = source.source_of(grant) == player.stage.contents[grant.root] and not corrupt
        assert self.root is not None
        value = player.stage.contents[self.root][chunk] if is_good else "??"
        if player.stage.now >= player.trust_until:
            self.end(Failure("session-lost", "the lease ended during the read"))
            return False
        if not self.one.to_host:
            if not player.is_touched:
                player.is_touched = True
                player.tell(ReadTouched(self.ticket))
            player.memory[chunk] = value
        if not is_good:
            self.fail(part, "corrupt-transfer", f"a tile of chunk {chunk} is not as published")
            return False
        if self.one.to_host:
            player.copies[self.one.version].append(value)
        else:
            player.done = chunk + 1
        text = f"{player.name} has {self.done} of {self.chunks} chunks of version {self.one.version}"
        player.stage.say(f"{text}, that one from {name_of(grant.source)}")
        player.tell(PartMeasured(self.ticket, part, ARRIVED_BYTES * (chunk + 1)))
        player.tell(ReadAdvanced(self.ticket, self.done, self.chunks))
        if self.done == self.chunks:
            self.end(None)
        elif player.crossing is self:
            player.tell_all(self._brought())
        return player.crossing is self

    def fail(self, part: Ticket, code: str, message: str) -> None:
        """One part is over; the others go on."""
        grant = self.parts.pop(part)
        self.lacking += 1
        self.player.stage.say(f"{self.player.name} fails {self.player.stage.words.ticket(part)}: {code}: {message}")
        self.player.tell(PartEnded(self.ticket, part, failure=Failure(code, message)))
        assert grant.ticket not in self.parts

    def end(self, failure: Failure | None) -> None:
        """The whole is over: all is there, or nothing can help."""
        self.player.crossing = None
        self.player.tell(ReadEnded(self.ticket, complete=failure is None, failure=failure))

    def _look(self, part: Ticket) -> list[Event]:
        """What there is to say of a source that is not there."""
        grant = self.parts[part]
        source = self.player.stage.players.get(name_of(grant.source))
        served = source.source_of(grant) if source is not None else None
        if served is not None and grant.endpoints:
            return []
        del self.parts[part]
        self.lacking += 1
        failure = Failure("source-lost", f"{name_of(grant.source)} does not serve version {grant.version}")
        self.player.stage.say(f"{self.player.name} fails {self.player.stage.words.ticket(part)}: {failure.message}")
        return [PartEnded(self.ticket, part, failure=failure)]

    def _brought(self) -> list[Event]:
        """The parts that have nothing more to bring."""
        done, over = self.done, []
        for part, grant in self.parts.items():
            if not any(chunk % self._shards(grant) == self._shard(grant) for chunk in range(done, self.chunks)):
                over.append(part)
        for part in over:
            del self.parts[part]
        return [PartEnded(self.ticket, part, brought=True) for part in over]

    def _shard(self, grant: Grant) -> int:
        return int(grant.source.shard)

    def _shards(self, grant: Grant) -> int:
        return int(grant.reason.split(" of ")[1].split(":")[0])  # "across, shard 0 of 2: ..."
