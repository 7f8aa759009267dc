"""G1 and G4: what is promised does not change, what may change is read by nobody, what is accepted is as published."""

from tensorhub.protocol.messages import Holding, Report, Withdrawing
from tensorhub.protocol.names import Digest, Version

from ..truth.life import Life, Read
from ..truth.made import contents
from ..truth.record import Truth
from ..world import World
from .bench import Judge

UNCOUNTED_S = 4.0  # memory that is shared counts somewhere after so long: a look each second, and what a step takes
TOLD_S = 3.0  # a holder with other content than the one that exists has been told so by then, beside a lease


class MemoryJudge(Judge):
    """Looks at every byte."""

    promise = "G1 immutable"

    def __init__(self, truth: Truth, world: World) -> None:
        super().__init__(truth, world)
        self._uncounted: dict[tuple[str, Version], float] = {}  # when somebody last counted it

    def written(self, life: Life, chunk: int, value: int) -> None:
        """A byte of the registered memory was written."""
        held = life.held
        if held is not None and held.is_served and value != self.truth.contents[held.root][chunk]:
            self.broken(f"{life.name} holds version {held.version}, and its chunk {chunk} was overwritten")

    def whole(self, life: Life, version: Version, root: Digest, memory: list[int], where: str) -> None:
        """From now on these bytes count as the version."""
        if tuple(memory) != self.truth.contents[root]:
            self.broken(f"{where} of {life.name} counts as version {version}, and is another content")
        made = self.truth.exists(life.me.model, version)
        if made is None or made.root_of(life.shard) in (None, root) or where == "the published buffer":
            return
        if where == "the copy" and self.is_left_over(life, version):
            return
        if root not in contents(self.truth.made_as(life.me.model, version), made, life.shard):
            self.broken(f"{life.name} accepted {root} as version {version}, which is {made.root_of(life.shard)}")

    def accepted(self, life: Life, read: Read, chunk: int, value: int) -> None:
        """A reader takes a chunk for good."""
        grant, name = read.grant, "G4 no torn read"
        what = f"{life.name} accepted chunk {chunk} of version {grant.version}"
        if value != self.truth.contents[read.root][chunk]:
            self.broken(f"{what}, which is not as published", name)
        if read.ticket in life.stopped:
            self.broken(f"{what} after ticket {read.ticket} was to end", name)
        if life.clock() >= life.trust_until:
            self.broken(f"{what} after its own lease", name)

    def serving_stops(self, life: Life, version: Version, *, from_host: bool) -> None:
        """From now on the source may change its memory, so nobody may still be able to accept a byte of it."""
        if not self.conditions.is_one_sided or life.closing <= self.now:
            return  # who leaves without the server's word takes the memory along
        everybody = [other for other in self.truth.lives.values() if other.me.model == life.me.model]
        for reader, read in [(o, part) for o in everybody if o.read is not None for part in o.read.read_now()]:
            if read.grant.source != life.me or read.grant.endpoints != life.hello.endpoints:
                continue
            if (read.grant.version, read.grant.from_host) != (version, from_host):
                continue
            if not read.is_stopped and not read.is_ended and reader.clock() < reader.trust_until:
                where = "its host copy of it" if from_host else "it"
                text = f"{life.name} stops serving {where} while {reader.name} reads version {version} from there"
                self.broken(text, "G1/G5 drained")

    def unpublished(self, life: Life, held_before: Version | None) -> None:
        """The caller may change its tensors now."""
        if life.held is not None and life.held.is_served:
            self.broken(f"unpublish of {life.name} returned while it serves version {life.held.version}")

    def said(self, life: Life, report: Report) -> None:
        """What a worker says of its memory is so."""
        buffer, held = report.buffer, life.held
        if isinstance(buffer, Holding | Withdrawing) or type(buffer).__name__ == "Vacated":
            told = (buffer.version, buffer.root)  # type: ignore[union-attr]
            if held is None or (held.version, held.root) != told:
                self.broken(f"{life.name} says {buffer}, and has {held}", "reports are true")
        for copy in report.copies:
            mine = life.copies.get(copy.version)
            is_there = mine is not None and mine.root == copy.root
            if copy.whole and not copy.leaving and not is_there:
                self.broken(f"{life.name} says {copy}, and has {mine}", "reports are true")
            if copy.whole and mine is not None and copy.shared == mine.is_counted:
                self.broken(f"{life.name} says {copy}, and it counts otherwise: {mine}", "reports are true")

    def shared(self, life: Life) -> None:
        """Asked for all who live, now and then: memory that several have mapped is as published, and counts once."""
        for version, copy in life.copies.items():
            sharers = [
                each
                for other in self.truth.same_shard(life.shard)
                for each in (other.copies.get(version), other.freeing.get(version))
                if each is not None and each.memory is copy.memory
            ]
            counted = sum(each.is_counted for each in sharers)
            if tuple(copy.memory) != self.truth.contents[copy.root]:
                self.broken(f"the host copy of version {version} that {life.name} has is another content by now")
            if counted > 1:
                self.broken(f"{counted} workers count the memory of version {version} that {life.name} has too")
            stood_still = self.truth.troubles.of(life, self.now - UNCOUNTED_S, ("pause",)) is not None
            key = (life.name, version)
            last = max(self._uncounted.get(key, copy.since), copy.since)  # it may have had another copy of it before
            self._uncounted[key] = self.now if counted or stood_still else last
            if self.now > self._uncounted[key] + UNCOUNTED_S:
                self.broken(f"nobody counts the memory of version {version} that {life.name} has")

    def other_content(self, life: Life) -> None:
        """Asked for all who live, now and then: who holds other content than what exists was told, and let it go."""
        held = life.held
        made = self.truth.exists(life.me.model, held.version) if held is not None else None
        if held is None or made is None or made.root_of(life.shard) in (None, held.root):
            return
        if self.is_left_over(life, held.version):
            return
        since = self.now - self.settings.lease_s * 1.2 - TOLD_S
        if max(made.exists, held.since) > since or not held.is_served:
            return
        if self.truth.troubles.hears(life, since) and self.truth.troubles.server(since):
            text = f"{life.name} holds {held.root} as version {held.version}, which exists as {made.roots}"
            self.broken(f"{text}; nobody told it")
