"""The truth of a cluster: who has which bytes, what was published, what each caller asked for, what was said."""

from collections.abc import Callable, Iterator
from math import inf

from tensorhub.protocol.messages import Holding, Orders, Poisoned, Report
from tensorhub.protocol.names import Digest, ReplicaName, Shard, Version, WorkerId
from tensorhub.worker import events
from tensorhub.worker.events import PartEnded

from ..plan import Plan
from ..world import World
from .established import Established
from .life import BAR, MAX_OF_A_LEASE, Call, Copied, Held, Life, Read
from .made import Made
from .troubles import Troubles

MAX_PAST = 20  # calls of one process that are remembered


class Truth:
    """Changed by what happens, asked by the judges."""

    def __init__(self, world: World, plan: Plan, contents: dict[Digest, tuple[int, ...]]) -> None:
        self.world, self.plan, self.contents = world, plan, contents
        self.troubles = Troubles(plan)
        self.lives: dict[WorkerId, Life] = {}  # the living
        self.by_name: dict[str, Life] = {}
        self.dead: dict[WorkerId, Life] = {}  # the latest of each
        self.by_shard: dict[tuple[str, int], dict[WorkerId, None]] = {}
        self.made: dict[tuple[str, Version], dict[ReplicaName, Made]] = {}
        self.lost: dict[tuple[str, Version], float] = {}  # when a shard had no holder, the last time that was so
        self.established = Established(self)
        self.last_holder_gone: dict[tuple[str, int, Version, bool], float] = {}  # reliable or not: died or told to go
        self.layouts: dict[tuple[str, int], dict[Digest, None]] = {}  # that somebody ever registered
        self.server_life = 0

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def spread_s(self) -> float:
        """By then news have got about among those who can be heard."""
        return 2 * self.plan.settings.report_s + 6 * self.plan.conditions.delay_s + 0.1

    # --- who lives ----------------------------------------------------------------------------------------------------

    def born(self, life: Life) -> None:
        self.lives[life.me] = life
        self.by_name[life.name] = life
        self.by_shard.setdefault(life.shard, {})[life.me] = None

    def died(self, life: Life) -> None:
        life.is_alive, life.died = False, self.now
        had = [life.held.version] if life.held is not None else []
        self.dead[life.me] = life
        if self.lives.get(life.me) is life:
            del self.lives[life.me]
        if life.call is not None:
            life.call.ended = self.now
        for version in [*had, *life.copies]:
            self.last_holder_gone[*life.shard, version, life.hello.reliable] = self.now
            self.note_loss(life, version)

    def group(self, life: Life) -> Iterator[Life]:
        """The living of its replica, itself too."""
        for shard in range(self.plan.conditions.shards_in(life.cut)):
            found = self.lives.get(WorkerId(life.me.model, life.me.replica, Shard(shard)))
            if found is not None:
                yield found

    def same_shard(self, shard: tuple[str, int]) -> Iterator[Life]:
        """The living that have this shard of this model, whatever version."""
        for me in self.by_shard.get(shard, {}):
            if me in self.lives:
                yield self.lives[me]

    # --- versions -----------------------------------------------------------------------------------------------------

    def published(self, life: Life, version: Version, root: Digest) -> Made:
        """A shard serves what its caller publishes. Returns it; it exists if all have it."""
        made = self.made.setdefault((life.me.model, version), {})
        mine, group = made.get(life.me.replica), list(self.group(life))
        if mine is None or mine.roots.get(life.me.shard, root) != root:
            mine = made[life.me.replica] = Made(life.me.model, version, life.me.replica, cut=life.cut)
            since = life.call.began if life.call is not None else self.now
            for each in group:  # who was before it in this call is of the same; of a former one nothing counts
                if (held := each.held) and held.published and held.version == version and held.since >= since:
                    mine.roots[each.me.shard], mine.layouts[each.me.shard] = held.root, each.layout
        mine.roots[life.me.shard], mine.layouts[life.me.shard] = root, life.layout
        if len(group) == self.plan.conditions.shards_in(life.cut) and mine.exists == inf:
            helds = [each.held for each in group]
            if all(h is not None and h.version == version and h.root == mine.roots.get(i) for i, h in enumerate(helds)):
                mine.exists = self.now
        return mine

    def made_as(self, model: str, version: Version) -> list[Made]:
        """What replicas have published under that number. Where each shard has had it, though never all at once, the
        server may have heard from all of them."""
        return list(self.made.get((model, version), {}).values())

    def existing(self, model: str) -> list[Version]:
        """The versions that came to be, newest first."""
        found = [v for name, v in self.made if name == model and self.exists(model, v) is not None]
        return sorted(found, reverse=True)

    def numbers(self, model: str) -> list[Version]:
        """Under which somebody has published something, whatever came of it."""
        return [version for name, version in self.made if name == model]

    def exists(self, model: str, version: Version) -> Made | None:
        """The first that came to be under that number: order is the server's, where it has said anything of it."""
        made = [m for m in self.made.get((model, version), {}).values() if m.exists < inf]
        return made[0] if len(made) == 1 else min(made, key=lambda m: (m.known, m.exists), default=None)

    def newest(self, model: str) -> Version | None:
        found = self.existing(model)
        return found[0] if found else None

    def holders(self, shard: tuple[str, int], version: Version) -> list[Life]:
        """The living that have all of that shard of the version."""
        made = self.exists(shard[0].partition(BAR)[0], version)
        root = made.root_of(shard) if made is not None else None
        return [life for life in self.same_shard(shard) if life.has(version) and root in (None, life.root_of(version))]

    def is_whole(self, model: str, version: Version) -> bool:
        """Each shard of some cut has a living holder."""
        return any(all(self.holders(shard, version) for shard in cut) for cut in self.cuts(model))

    def cuts(self, model: str) -> list[list[tuple[str, int]]]:
        """The ways in which a model's replicas are cut: the shards of each."""
        cuts = dict.fromkeys(each.cut for each in self.plan.replicas)
        names = {f"{model}{BAR}{cut}" if cut else model: self.plan.conditions.shards_in(cut) for cut in cuts}
        return [[(name, shard) for shard in range(shards)] for name, shards in names.items()]

    def is_had(self, model: str, version: Version, counts: Callable[[Life], bool]) -> bool:
        """Each shard of some cut has a holder that counts."""
        return any(all(any(map(counts, self.holders(shard, version))) for shard in cut) for cut in self.cuts(model))

    def was_known(self, made: Made) -> bool:
        """Some server had said that it exists."""
        return made.known < self.now

    def note_known(self, life: Life, version: Version, root: Digest | None) -> None:
        """A server has said of that version that it exists: a call for it ended well, or it may be read."""
        for made in self.made.get((life.me.model, version), {}).values():
            if made.exists < inf and made.roots.get(life.me.shard) == root:
                made.note_known(life.name, self.server_life, self.now)

    def note_loss(self, life: Life, version: Version) -> None:
        """The process has it no longer: perhaps nobody has."""
        is_gone = not self.is_whole(life.me.model, version) if life.cut else not self.holders(life.shard, version)
        if is_gone:
            self.lost[life.me.model, version] = self.now

    def lost_since(self, model: str, version: Version, since: float) -> bool:
        """At some time since then a shard of it had no living holder."""
        return not self.is_whole(model, version) or self.lost.get((model, version), -inf) >= since

    # --- what the server must know ------------------------------------------------------------------------------------

    def is_in_session(self, life: Life) -> bool:
        """This life of the server has heard it, and its lease cannot be over."""
        lease_s = self.plan.settings.lease_s * MAX_OF_A_LEASE
        return life.is_alive and life.is_heard_by(self.server_life) and self.now < life.heard_at + lease_s

    def may_be_in_session(self, life: Life) -> bool:
        """This life of the server has heard it, and its lease may last: while a server stands still none ends."""
        return life.is_alive and self.may_be_believed(life)

    def may_be_believed(self, life: Life) -> bool:
        """The same, dead or alive."""
        return life.is_heard_by(self.server_life) and self.now < self.believed_until(life)

    def believed_until(self, life: Life) -> float:
        """Until then the server that has heard it last may take it for alive: a pause adds its own length."""
        lease_s = self.plan.settings.lease_s / (1 - self.plan.conditions.drift)  # by a server whose clock is slow
        return self.troubles.prolonged(life.heard_at, lease_s + self.plan.settings.report_s, self.now)

    def said_to_have(self, life: Life, version: Version) -> bool:
        """The latest report that a server took in says that it has the version, whole and to stay."""
        report = life.heard
        if report is None:
            return False
        if isinstance(report.buffer, Holding) and report.buffer.version == version:
            return True
        return any(copy.version == version and copy.whole and not copy.leaving for copy in report.copies)

    def is_known_whole(self, model: str, version: Version) -> bool:
        """The server has been told of a holder for each shard, and none of these has changed or can be given up."""
        return self.is_had(model, version, lambda h: self.is_in_session(h) and self.said_to_have(h, version))

    # --- what happens -------------------------------------------------------------------------------------------------

    def told(self, life: Life, event: events.Event) -> None:
        """The shell tells the machine."""
        match event:
            case events.Called(verb, spec, deadline, root, claim, waits=waits, missed=missed):
                left_s = deadline - life.clock()
                held = life.held
                had, root_had = (held.version, held.root) if held is not None else (None, Digest(""))
                if life.call is None:
                    left = self.now, self.now + left_s
                    life.call = Call(verb, spec, root, *left, had, root_had, waits=waits)
                    life.call.claim, life.call.claimed, life.call.is_missed = claim, life.claim, missed is not None
                    life.call.is_disowned = life.is_disowned
            case events.Cancelled():
                if life.call is not None:
                    life.call.is_cancelled = True
                    self._ended(life)
            case events.Closing():
                life.closing = min(life.closing, self.now)
                life.close_deadline = self.now + event.deadline - life.clock()
            case events.Registered(digest=digest):
                life.layout, life.registered = digest, self.now
                life.has_in_place(None)
                self.layouts.setdefault(life.shard, {})[digest] = None
            case events.ClaimDropped():
                life.claims(None, self.now, self.server_life)
            case events.Wished(prefetch, pins):
                life.pinned_at = life.pinned_at if pins == life.pins else self.now
                life.pins, life.prefetch = pins, prefetch
            case events.ReadEnded(complete=complete, failure=failure):
                self._read_ended(life, complete, failure.code if failure is not None else "")
            case PartEnded(part=part, failure=failure):
                if failure is not None and life.read is not None:
                    life.failures.append((self.now, life.read.tickets[part], failure.code))
            case events.CopyCounted(version):
                if version in life.copies:
                    life.copies[version].is_counted = True
            case events.CopiedIn():
                life.is_copying_in = False
            case events.CopiedOut(version, failure):
                if failure is None and life.copying is not None:
                    life.copies[version] = Copied(version, life.copying[1], self.now, life.host_memory(version))
                    self.established.note_whole(life, version)
                life.copying = None
            case events.CopyDropped(version):
                life.freeing.pop(version, None)

    def _read_ended(self, life: Life, complete: bool, code: str) -> None:
        read, life.read = life.read, None
        if read is None:
            return
        self._note_stood_still(life, read, read.done, is_left=read.is_stopped)
        version, root = read.grant.version, read.root
        life.crossed = (version, life.crosses_since(read)) if read.is_cross_site else None
        if complete and read.grant.to_host:
            life.copies[version] = Copied(version, root, self.now, read.into, not read.shares, life.landed)
            self.established.note_whole(life, version)
        elif complete and life.call is not None and life.call is life.read_for:
            life.has_in_place(Held(version, root, self.now, landed=life.landed, is_of_stopped=read.is_stopped))
            self.established.note_whole(life, version)
        elif code and not read.is_stopped:
            life.failures.append((self.now, read.grant.source, code))

    def wants(self, life: Life, effect: events.Effect) -> None:
        """The machine wants something done."""
        match effect:
            case events.StartServing(version, root):
                is_published = life.call is not None and life.call.verb == "publish"
                life.has_in_place(Held(version, root, self.now, is_published))
                self.established.note_whole(life, version)
            case events.StopServing(version):
                if life.held is not None and life.held.version == version:
                    life.held.is_served, life.held.stopped_at = False, self.now
            case events.CopyIn():
                life.is_copying_in = True
            case events.CopyOut(version):
                life.copying = (version, life.held.root if life.held is not None else Digest(""))
            case events.DropCopy(version):
                if life.hosted >= self.plan.conditions.host_copies:
                    life.full_until = self.now
                if version in life.copies:
                    life.freeing[version] = life.copies.pop(version)
                    if life.closing < inf:  # it goes, and this with it
                        self.last_holder_gone[*life.shard, version, life.hello.reliable] = self.now
                life.was_unfilled = version in life.unfilled
                life.unfilled.pop(version, None)
                life.released.pop(version, None)
            case events.Trust(until):
                life.trust_until = until
            case events.StopRead(ticket):
                life.stopped[ticket] = None
                if life.read is not None and ticket in life.read.tickets:
                    self._note_stood_still(life, life.read, life.read.done, is_left=True)
            case events.Finished() as finished:
                if life.call is not None:
                    life.call.outcome = finished
                    self._ended(life)

    def _ended(self, life: Life) -> None:
        call = life.call
        assert call is not None
        call.ended = self.now
        is_good = call.outcome is not None and call.outcome.error is None
        call.number = call.number or (call.outcome.number if call.outcome is not None else 0)
        if is_good and call.verb == "unpublish":
            life.held = None
        if is_good and call.outcome is not None and call.outcome.number:  # and not without a server
            life.claims(call.claim, self.now, self.server_life)
        is_fill = call.verb in ("replicate", "update")
        if not is_good and is_fill and life.held is None and (call.is_touched or call.resolved is not None):
            life.poisoned, life.is_torn = True, life.is_torn or call.is_touched
        life.past = [*life.past, call][-MAX_PAST:]
        life.call = None

    def begins(self, life: Life, read: Read) -> None:
        life.begins(read, self.now)
        self.note_known(life, read.grant.version, read.grant.root)

    def accepted(self, life: Life, read: Read, chunk: int) -> None:
        """A chunk is in place."""
        self._note_stood_still(life, read, chunk)
        for other in self.same_shard(life.shard):  # who reads from it has had as little, till now
            if other.read is not None and other.read.grant.source == life.me:
                self._note_stood_still(other, other.read, other.read.done)
        life.landed = {**life.landed, chunk: self.now}
        if self.now - life.fed_at >= self.plan.settings.stalled_s:
            life.starved.append((life.fed_at, self.now))
        life.fed_at = life.unfed_since = self.now

    def _note_stood_still(self, life: Life, read: Read, missing: int, *, is_left: bool = False) -> None:
        """Nothing came by its read for as long as a source is left for.

        That source had the chunk that was missing; or it was to get it itself, and nothing had come there either. Of
        one that has not all of the version itself that counts only if it was left for it: by a server that may not have
        heard yet of what came last.
        """
        source = self.lives.get(read.grant.source)
        if source is None or len(read.tickets) > 1 or source.cut != life.cut:
            return
        since, fed_at = source.has_had(read.grant.version, missing, on_host=read.grant.from_host), life.fed_at
        if is_left:
            said = [at for at in life.landed.values() if at <= life.heard_at - 8 * self.plan.conditions.delay_s]
            fed_at = min(fed_at, max([read.began, *said]))
        is_still = self.now - max(fed_at, since) >= self.plan.settings.stalled_s
        if is_still and not (is_left or source.has(read.grant.version)):
            life.starved_at = self.now
        elif is_still or (is_left and self.now - life.starved_at < self.spread_s):
            life.stood_still[source.me] = self.now

    def said(self, life: Life, report: Report) -> None:
        """A report goes out, wherever it gets."""
        life.said, life.said_at = report, self.now
        if isinstance(report.buffer, Poisoned) and life.held is not None and life.held.is_of_stopped:
            life.held, life.poisoned = None, True
        reported, call = report.call, life.call
        if reported is not None and call is not None:  # it may have been numbered anew
            call.number = reported.number

    def heard(self, life: Life, report: Report) -> None:
        """A server takes in a report."""
        self.established.look(life.me.model)
        before = life.heard if life.is_heard_by(self.server_life) else None
        if before is not None and report.number <= before.number:
            return
        if life.heard_by != self.server_life:
            life.heard_since = self.now
        if self.now > life.heard_at + MAX_OF_A_LEASE * self.plan.settings.lease_s:
            life.away_until = self.now
        life.heard, life.heard_at, life.heard_by, life.is_connected = report, self.now, self.server_life, True
        life.is_turned_away = False
        self.established.heard(life)
        if life.call is not None and report.call is not None and report.call.number == life.call.number:
            life.call.heard = min(life.call.heard, self.now)
        for call in reversed(life.past):
            if call.end_heard < inf:
                break
            if 0 < call.number <= report.ended:
                call.end_heard = self.now

    def turned_away(self, life: Life) -> None:
        """The server says to it that it has no session, and closes the connection; it may never get there."""
        life.is_turned_away, life.turned_away_at, life.is_connected = True, self.now, False

    def ordered(self, life: Life, orders: Orders) -> None:
        """The server says something to it; it may never get there."""
        call, answer = life.call, orders.answer
        if call is not None and answer is not None and answer.number == call.number and answer.version is not None:
            call.resolved, call.resolved_at = answer.version, min(call.resolved_at, self.now)
            call.resolved_as = answer.number
        if call is not None and answer is not None and answer.number == call.number and answer.error is not None:
            call.refused_at = min(call.refused_at, self.now)
        if orders.drained is not None:
            self.established.look(life.me.model)
            life.let_go_at = min(life.let_go_at, self.now)
        elif life.held is None or life.held.is_served:
            life.let_go_at = inf
        heard = {copy.number: copy for copy in life.heard.copies} if life.heard is not None else {}
        for copy in life.said.copies if life.said is not None else ():
            if copy.number in orders.release:
                if copy.version not in life.released and copy.number in heard and not heard[copy.number].whole:
                    life.unfilled[copy.version] = None
                life.released[copy.version] = None
                life.released_at[copy.version] = self.now
                self.established.released(life, copy.version)
