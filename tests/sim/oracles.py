"""The promises of the library as invariants of a simulated cluster. Each is asked of the truth, never of the core.

Some hold at every moment, in any weather: bytes are right, what may change is read by no worker, calls end in time and
give all shards one version, versions do not go back. The others hold while the weather is quiet: nothing has gone wrong
for some leases, anywhere in the cluster. At the end every replica in good health has the newest version, and nothing
is left over.
"""

from dataclasses import dataclass
from math import inf

from tensorhub.protocol.messages import Failure, Holding, Orders, Report, Vacated, Withdrawing
from tensorhub.protocol.names import Digest, Version
from tensorhub.worker.events import Finished

from .contents import what_is
from .truth import FILLS, Call, Life, Memory, Read, Truth
from .world import OracleViolation

LATE_S = 0.05  # a call may end this much after its deadline: one tick of a clock that drifts
SURE_OF_A_LEASE = 0.75  # a worker that was heard within this share has a session, however clocks drift
CODES = (
    *("deadline-exceeded", "server-unreachable", "version-unavailable", "group-incomplete", "group-mismatch"),
    *("version-conflict", "host-memory-full", "source-lost", "corrupt-transfer", "layout-mismatch", "not-drained"),
    *("usage", "closed", "shard-taken", "unavailable", "error"),
)
IN_TIME = ("deadline-exceeded", "server-unreachable")  # these end a call at its deadline only


@dataclass
class GroupCall:
    """One step of a program: the same call on all shards of its replica."""

    replica: str
    verb: str
    spec: int | str
    began: float
    lives: dict[int, Life]
    is_plain: bool  # no shard does anything else, gives up, or has little time

    def call_of(self, life: Life) -> Call | None:
        """What that shard made of it."""
        return next((call for call in reversed(life.calls()) if call.began >= self.began), None)


class Oracles:
    """Asked whenever something happens that could break a promise."""

    def __init__(self, truth: Truth) -> None:
        self.truth, self.world = truth, truth.world
        self.plan, self.settings, self.conditions = truth.plan, truth.settings, truth.conditions
        self._answered: dict[tuple[str, str, int], None] = {}
        self._sent: dict[tuple[str, Version, str, int, int], str] = {}  # what crossed into a site, and to which reader

    @property
    def now(self) -> float:
        return self.world.now

    def is_quiet(self, since: float, *kinds: str) -> bool:
        return self.truth.weather.is_quiet(since, *kinds)

    def broken(self, promise: str, what: str) -> None:
        """The history ends here."""
        self.world.note("oracle", f"{promise} broken: {what}")
        raise OracleViolation(f"{promise} broken at {self.now:.4f}: {what}")

    # --- bytes, in any weather ----------------------------------------------------------------------------------------

    def written(self, life: Life, chunk: int, value: int) -> None:
        """A byte of the registered memory was written."""
        held = life.held
        if held is not None and held.is_served and value != self.truth.contents[held.root][chunk]:
            self.broken("G1 immutable", f"{life.name} holds version {held.version}, and chunk {chunk} was overwritten")

    def whole(self, life: Life, version: Version, root: Digest, memory: Memory, where: str) -> None:
        """From now on these bytes count as the version."""
        if tuple(memory) != self.truth.contents[root]:
            self.broken("G1 immutable", f"{where} of {life.name} counts as version {version}, and has other bytes")
        published = [made.root_of(life.place) for made in self.truth.made_as(life.me.model, version)]
        if where != "the published buffer" and root not in published and None not in published:
            self.broken("G1 immutable", f"{life.name} accepted {root} as version {version}, published as {published}")

    def accepted(self, life: Life, read: Read, chunk: int, value: int) -> None:
        """A reader takes a chunk for good."""
        what = f"{life.name} accepted chunk {chunk} of version {read.grant.version}"
        if value != self.truth.contents[read.root][chunk]:
            self.broken("G4 no torn read", f"{what}, which is not as published")
        if read.ticket in life.stopped:
            self.broken("G4 no torn read", f"{what} after ticket {read.ticket} was to end")
        if life.clock() >= life.trust_until:
            self.broken("G4 no torn read", f"{what} after its own lease")

    def serving_stops(self, life: Life, version: Version, *, from_host: bool) -> None:
        """From now on the source may change its memory. No reader may still be able to accept a byte of it."""
        if not self.conditions.is_one_sided or life.closing <= self.now or self.truth.was_alone(life):
            return  # a worker that leaves without the server's word takes its memory along
        for reader in self.truth.of_model(life.me.model):
            read, is_trusted = reader.read, reader.clock() < reader.trust_until
            if read is None or read.grant.version != version or not is_trusted or read.is_stopped or read.is_ended:
                continue
            for source in read.grant.sources:
                is_here = source.worker == life.me and source.endpoints == life.hello.endpoints
                if is_here and source.from_host == from_host:
                    where = "its host copy of" if from_host else "the buffer with"
                    self.broken(
                        "G5 drained", f"{life.name} stops serving {where} version {version}: {reader.name} reads it"
                    )

    def said(self, life: Life, report: Report) -> None:
        """What a worker says of its memory is so."""
        buffer, held = report.buffer, life.held
        has = (held.version, held.root) if held is not None else None
        if isinstance(buffer, Holding | Withdrawing | Vacated) and has != (buffer.version, buffer.root):
            self.broken("reports are true", f"{life.name} says {buffer}, and has {held}")
        for copy in report.copies:
            mine = life.copies.get(copy.version)
            if copy.whole and not copy.dropping and (mine is None or mine.root != copy.root):
                self.broken("reports are true", f"{life.name} says {copy}, and has {mine}")
            if copy.whole and mine is not None and copy.shared == mine.is_counted:
                self.broken("reports are true", f"{life.name} says {copy}, and it counts otherwise: {mine}")

    def look(self, life: Life) -> None:
        """Now and then, for each that lives: its host copies are as published, and each counts at one worker."""
        for version, copy in life.copies.items():
            if tuple(copy.memory) != self.truth.contents[copy.root]:
                self.broken("G1 immutable", f"the host copy of version {version} of {life.name} has other bytes by now")
            mates = [each for mate in self.truth.at(life.place) for each in (mate.copies, mate.freeing)]
            sharers = [each[version] for each in mates if version in each and each[version].memory is copy.memory]
            if sum(each.is_counted for each in sharers) > 1:
                self.broken(
                    "memory counts once", f"several workers count the memory of version {version} of {life.name}"
                )
        self._waits(life)
        self._keeps(life)
        self._works_alone(life)

    # --- calls, in any weather ----------------------------------------------------------------------------------------

    def called(self, life: Life, call: Call) -> None:
        """It must have ended by its deadline."""
        length_s = call.deadline - self.now
        self.world.after(length_s * (1 + 2 * self.conditions.drift) + LATE_S, lambda: self._must_be_over(life, call))

    def _must_be_over(self, life: Life, call: Call) -> None:
        if call.ended < inf or not life.is_alive:
            return
        if self.truth.weather.is_paused(life):
            self.world.after(1.0, lambda: self._must_be_over(life, call))
            return
        self.broken("G7 nothing waits forever", f"{call.verb}({call.spec!r}) of {life.name} goes on after its deadline")

    def call_ended(self, life: Life, call: Call, finished: Finished) -> None:
        """One shard's call has returned."""
        self._drained(life, call)
        if finished.error is not None:
            self._failed(life, call, finished.error)
        elif call.verb == "unpublish":
            if life.held is not None and life.held.is_served:
                self.broken("G1 immutable", f"unpublish of {life.name} returned while it serves {life.held.version}")
        elif finished.version is not None:
            self._succeeded(life, call, finished.version, is_of_group=bool(finished.number))

    def _failed(self, life: Life, call: Call, error: Failure) -> None:
        what = f"{call.verb}({call.spec!r}) of {life.name} failed with {error.code}: {error.message}"
        if error.code not in CODES:
            self.broken("G7 named errors", what)
        min_s = call.deadline - LATE_S - 2 * self.conditions.drift * (call.deadline - call.began)
        if error.code in IN_TIME and self.now < min_s:
            self.broken("G7 deadlines", f"{what}, with {call.deadline - self.now:.2f} s left")

    def _succeeded(self, life: Life, call: Call, version: Version, *, is_of_group: bool) -> None:
        """The registered memory has the version, and that of each sibling in the same call."""
        held = life.held
        if held is None or held.version != version or tuple(life.memory) != self.truth.contents[held.root]:
            self.broken("G8 never run early", f"{life.name} returned {version}, and holds {held}")
        for other in self.truth.group(life) if is_of_group else ():
            theirs = other.call
            is_same = theirs is not None and (theirs.number, theirs.verb) == (call.number, call.verb)
            is_same = is_same and not self.truth.was_alone(life)
            if is_same and (other.held is None or other.held.version != version):
                self.broken("G8 never run early", f"{life.name} returned {version}, {other.name} has {other.held}")

    def group_ended(self, group: GroupCall, outcomes: dict[int, Finished]) -> None:
        """All shards of a replica have returned, or died."""
        made = {shard: group.call_of(life) for shard, life in group.lives.items()}
        is_alone = any(call is not None and call.is_alone for call in made.values())  # none is told of the other
        others = [s for s, call in made.items() if is_alone and call is not None and call.verb != group.verb]
        good = {s: o.version for s, o in outcomes.items() if o.error is None and s not in others}
        bad = {shard: o.error.code for shard, o in outcomes.items() if o.error is not None}
        name = f"{group.verb}({group.spec!r}) of {group.replica}"
        given = dict.fromkeys(good.values())
        is_named = isinstance(group.spec, int) and group.verb in ("publish", "replicate")
        if len(given) > 1 or (given and is_named and group.spec not in given):
            self.broken("G2 one version", f"{name} gave {good}")
        if group.verb in FILLS and good:
            held = [group.lives[shard].held for shard in good]
            read = [each.root for each in held if each is not None and each.version in good.values()]
            if len(dict.fromkeys(map(what_is, read))) > 1 and not any(each and each.published for each in held):
                self.broken("G2 one version", f"{name} gave {good}, of two publishes: {read}")
        if group.verb == "update" and good:
            self._goes_forward(group, name, next(iter(good.values())))
        if bad and group.is_plain and self.is_quiet(group.began):
            self._fails_in_quiet(group, name, good, bad)

    def _goes_forward(self, group: GroupCall, name: str, version: Version | None) -> None:
        """An update gives no older version than the one that all shards of the replica held before."""
        calls = [group.call_of(life) for life in group.lives.values()]
        had = [call.had for call in calls if call is not None]
        shards = max(map(self.truth.shards_of, group.lives.values()))
        is_one = len(had) == shards and had.count(had[0]) == shards
        if version is not None and is_one and had[0] is not None and version < had[0]:
            self.broken("G3 monotonic", f"{name} went back from {had[0]} to {version}")

    # --- the server's answers -----------------------------------------------------------------------------------------

    def ordered(self, life: Life, orders: Orders) -> None:
        """Orders leave the server. An answer is looked at when it is given for the first time."""
        answer, call = orders.answer, life.call
        if answer is None or answer.version is None or call is None or call.number != answer.number:
            return
        key = (life.me.model, life.me.replica, answer.number)
        if key in self._answered:
            return
        self._answered[key] = None
        if call.verb == "publish" or call.claim is not None:
            self._may_publish(life, call, answer.version)
        elif call.verb in FILLS and call.spec == "latest":
            self._is_latest(life, call, answer.version)

    def _may_publish(self, life: Life, call: Call, version: Version) -> None:
        """A number is used once in the life of a server, and by the one replica that is the writer."""
        what, truth = f"{life.name} may {call.verb} {version}", self.truth
        now = life, truth.server_life
        (former, granted_by), truth.writers[life.me.model] = truth.writers.get(life.me.model, now), now
        is_known = former.is_writer or granted_by == truth.server_life  # else only a server that is dead may know it
        is_known = is_known and former.is_alive and former.heard_by == truth.server_life and former.closing == inf
        is_sure = self.now - former.heard_at < SURE_OF_A_LEASE * self.settings.lease_s
        if former.me.replica != life.me.replica and is_known and is_sure:
            self.broken("one writer", f"{what}, though {former.name} is the writer")
        if not self.is_quiet(self.now, "lives"):
            return
        for number in truth.existing(life.me.model):
            made = truth.exists(life.me.model, number)
            assert made is not None
            is_other = number > version or made.root_of(life.place) not in (None, call.root) or call.claim is not None
            is_known = made.server_life == truth.server_life and made.exists < self.now - truth.spread_s
            if number >= version and is_other and is_known and truth.is_whole(life.me.model, number):
                self.broken("G3 numbers are used once", f"{what}, though {number} of {made.replica} exists")

    def _is_latest(self, life: Life, call: Call, version: Version) -> None:
        """In quiet weather the latest is the newest that all its shards could be read of."""
        if not self.is_quiet(self.now) or (call.had == version and call.verb == "update"):
            return
        since = self.now - self.truth.spread_s
        for newer in self.truth.existing(life.me.model):
            made = self.truth.exists(life.me.model, newer)
            is_known = newer > version and made is not None and made.exists < since
            if is_known and self.truth.is_whole(life.me.model, newer, lambda o, v=newer: self._is_steady(o, v, since)):  # type: ignore[misc]
                self.broken("G3 monotonic", f"latest is {version} for {life.name}, though {newer} exists")

    def _is_steady(self, life: Life, version: Version, since: float) -> bool:
        """It has had the version since then, in its buffer, and its caller wants nothing else."""
        held, calls = life.held, life.calls()
        is_held = held is not None and held.version == version and held.is_served and held.since < since
        is_idle = not calls or calls[-1].ended < since or calls[-1].resolved in (None, version)
        is_kept = is_idle and not any(each.verb == "unpublish" and each.ended > since for each in calls)
        return is_held and is_kept and life.closing == inf

    def turned_away(self, life: Life) -> None:
        """The server refuses a worker: it must have lost its session, or left."""
        is_heard = life.heard is not None and life.heard_by == self.truth.server_life and not life.heard.left
        if is_heard and self.now < life.heard_at + SURE_OF_A_LEASE * self.settings.lease_s:
            self.broken("G7 sessions last", f"{life.name} was refused, and was heard at {life.heard_at:.4f}")

    # --- what is kept -------------------------------------------------------------------------------------------------

    def gives_up(self, life: Life, version: Version, where: str) -> None:
        """By its own will a worker has a version no longer, in the buffer or in host memory."""
        truth, model = self.truth, life.me.model
        if truth.was_alone(life):
            return
        made, is_full = truth.exists(model, version), self.conditions.host_copies <= life.hosted
        if not is_full and life.closing == inf:
            self._gives_up_established(life, version, where)
        if made is None or truth.newest(model) != version or life.closing < inf or is_full:
            return
        is_last = not truth.holders(life.place, version) and not (life.cut and truth.is_whole(model, version))
        is_wanted = made.is_known and truth.is_sole_publisher(model)
        if is_wanted and is_last and self.is_quiet(self.now, "lives"):
            self.broken("G6 retention", f"{life.name} gave up the last reference of version {version}, {where}")

    def _gives_up_established(self, life: Life, version: Version, where: str) -> None:
        """What was whole outside its publisher stays so until a newer version is."""
        truth, model, made = self.truth, life.me.model, self.truth.exists(life.me.model, version)
        if made is None or life.cut or life.me.replica == made.replica or not truth.is_sole_publisher(model):
            return

        def is_outside(other: Life) -> bool:
            return other.me.replica != made.replica and other.closing == inf

        def keeps(other: Life) -> bool:
            said = other.heard.buffer if other.heard is not None else None
            is_going = isinstance(said, Withdrawing) and said.version == version and version not in other.copies
            return is_outside(other) and not (is_going and self.conditions.host_copies <= other.hosted)  # no room

        newer = [each for each in truth.existing(model) if each > version]
        places = [(model, shard) for shard in range(truth.shards_of(life))]
        there = [any(map(keeps, truth.holders(place, version))) for place in places if place != life.place]
        is_last = not any(map(is_outside, truth.holders(life.place, version)))
        is_replaced = any(truth.is_whole(model, each, is_outside) for each in newer)
        copy = {**life.copies, **life.freeing}.get(version) if where != "in the buffer" else None
        is_new = copy is not None and self.now - copy.since < truth.spread_s  # the server has not heard of it
        if all(there) and is_last and not is_replaced and not is_new and self.is_quiet(self.now):
            self.broken("G6 established", f"{life.name} gave up version {version}, {where}; newer ones are {newer}")

    def leaves(self, life: Life) -> None:
        """A worker that closes leaves before its time is over: what only it had is at others, if those have room."""
        truth, model = self.truth, life.me.model
        left_s, length_s = life.close_deadline - self.now, life.close_deadline - life.closing
        version = truth.newest(model)
        if version is None or life.root_of(version) is None or left_s < 0.1 + 0.2 * length_s or life.cut:
            return
        others = [each for each in truth.at(life.place) if each is not life]
        able = [
            o for o in others if o.closing == inf and o.hosted < self.conditions.host_copies and o.layout == life.layout
        ]
        is_kept = any(other.root_of(version) is not None for other in others)
        if able and not is_kept and truth.is_whole(model, version) and self.is_quiet(life.closing):
            self.broken("G6 retention", f"{life.name} left with the last reference of version {version}")

    def may_have_it_back(self, life: Life, call: Call) -> None:
        """A fill that ended badly before a byte was written gives the old version back, soon."""
        is_unwritten = call.verb in FILLS and call.had is not None and not call.is_touched
        is_failed = call.error is None or call.error.code != "version-conflict"
        is_failed = is_failed and (call.is_cancelled or call.error is not None)
        if is_unwritten and is_failed and self.truth.is_sole_publisher(life.me.model):
            self.world.after(0.5 + 4 * self.conditions.chunk_s, lambda: self._has_it_back(life, call))

    def _has_it_back(self, life: Life, call: Call) -> None:
        is_last = bool(life.past) and life.past[-1] is call and life.call is None and life.registered < call.ended
        if (
            not life.is_alive
            or life.closing < inf
            or not is_last
            or call.is_touched
            or self.truth.weather.is_paused(life)
        ):
            return
        if (life.held is None or not life.held.is_served) and self.is_quiet(call.ended, "lives"):
            self.broken(
                "G6 vacated", f"{life.name} held {call.had}, a call failed unwritten, and now it has {life.held}"
            )

    # --- in quiet weather ---------------------------------------------------------------------------------------------

    def _fails_in_quiet(
        self, group: GroupCall, name: str, good: dict[int, Version | None], bad: dict[int, str]
    ) -> None:
        """A plain call fails only if a version or room is missing, or because of another publisher."""
        model = group.replica.partition("/")[0]
        is_there = any(self.truth.is_whole(model, version) for version in self.truth.existing(model))
        if group.verb in FILLS and (group.spec != "latest" or not is_there):
            return
        expected = ["host-memory-full", "cancelled"]
        if not self.truth.is_sole_publisher(model):
            expected += ["version-conflict", "group-incomplete", "version-unavailable"]
        if model in self.truth.recut:
            expected.append("layout-mismatch")
        if any(code not in expected for code in bad.values()):
            self.broken("G7 calls succeed", f"{name} failed with {bad} ({good}), though nothing was wrong")

    def _drained(self, life: Life, call: Call) -> None:
        """An unpublish has returned, well or not: it does not wait for slow readers where others have the version."""
        if call.verb != "unpublish" or call.had is None or call.is_cancelled or not self.is_quiet(call.began):
            return
        calls = [other.calls()[-1:] for other in self.truth.group(life)]
        same = [one for each in calls for one in each if one.number == call.number and one.verb == call.verb]
        if len(same) < self.truth.shards_of(life):
            return
        c, began = self.conditions, max(one.began for one in same)
        readers = len(self.truth.of_model(life.me.model))
        chunk_s = 1.5 * c.chunk_s * (1 + readers) * (1 + c.uplink * readers)
        bound_s = 3 * self.truth.spread_s + 2 * chunk_s + 2 * c.chunks * c.chunk_s + self.settings.avoid_s + 0.5
        bound_s += 5 * self.settings.lease_s * bool(c.stuck_stop)
        others = [o for o in self.truth.of_model(life.me.model) if o.me.replica != life.me.replica and o.hello.reliable]
        is_there = all(
            any(o.place == member.place and self._is_steady(o, call.had, began) for o in others)
            for member in self.truth.group(life)
        )
        if is_there and self.now - began > bound_s:
            self.broken(
                "G5 bounded drain", f"unpublish of {life.name} took {self.now - began:.2f} s, not {bound_s:.2f} s"
            )

    def sent(self, source: Life, reader: Life, read: Read, chunk: int) -> None:
        """A chunk leaves a site for another one, for the first time."""
        truth, version, since = self.truth, read.grant.version, read.began - 1.0 - self.truth.spread_s
        key = (reader.place[0], version, reader.hello.site, reader.me.shard, chunk)
        first = self._sent.setdefault(key, reader.name)
        if first == reader.name or not self.is_quiet(since) or reader.layout != source.layout:
            return
        for other in truth.at(reader.place):
            if other.hello.site == reader.hello.site and self._is_steady(other, version, since):
                self.broken(
                    "G10 once per site",
                    f"chunk {chunk} of version {version} goes to {reader.name}, {other.name} has it",
                )

    def _waits(self, life: Life) -> None:
        """In quiet weather a worker that is ready to read is granted a read of what others of its site have."""
        call = life.call
        is_ready = call is not None and call.verb in FILLS and call.resolved is not None and life.read is None
        is_ready = is_ready and life.held is None and life.copying is None and life.closing == inf
        if not is_ready or call is None or call.resolved is None or life.root_of(call.resolved) is not None:
            life.waits_since = inf
            return
        life.waits_since = min(life.waits_since, self.now)
        if self.now < life.waits_since + self.settings.lease_s + 1.0 or not self.is_quiet(life.waits_since):
            return
        version, since = call.resolved, life.waits_since
        for other in self.truth.at(life.place):
            if other.hello.site == life.hello.site and self._is_steady(other, version, since):
                self.broken(
                    "G7 nothing waits", f"{life.name} is granted no read of version {version}, {other.name} has it"
                )

    def _keeps(self, life: Life) -> None:
        """An update ends soon with what all shards hold where the workers that had the newer version are dead."""
        call, group, model = life.call, list(self.truth.group(life)), life.me.model
        is_update = call is not None and (call.verb, call.spec) == ("update", "latest")
        version = call.resolved if call is not None and is_update else None
        is_kept = call is not None and version is not None and call.had is not None and version > call.had
        is_kept = is_kept and len(group) == self.truth.shards_of(life)
        if call is None or version is None or not is_kept or not all(self._still_has(each, call) for each in group):
            life.unanswered_since = inf
            return
        life.unanswered_since = min(life.unanswered_since, self.now)
        if self.truth.is_whole(model, version):
            life.unanswered_since = inf
            return
        silence_s = max(self.settings.keep_held_s, 2 * self.settings.report_s)
        bound_s = silence_s * (1 + 2 * self.conditions.drift) + self.truth.spread_s
        is_late = self.now > life.unanswered_since + bound_s
        if is_late and self.truth.weather.is_quiet_but_for_deaths(life.unanswered_since):
            what = f"update of {life.name} waits for version {version}, which no worker has, and holds {call.had}"
            self.broken("G7 keeps what is held", what)

    def _works_alone(self, life: Life) -> None:
        """A trainer does not wait for a server that has been gone for a lease."""
        call, gone_since = life.call, self.truth.no_server_since
        if call is None or call.verb in FILLS or not life.is_writer or not self.conditions.verifies:
            return
        began = max(call.began, gone_since)
        bound_s = (self.settings.lease_s + self.settings.report_s) * (1 + 2 * self.conditions.drift)
        bound_s += 0.5 + 4 * self.conditions.chunk_s  # it stops to serve, and may copy to host memory
        if self.now > began + bound_s and self.is_quiet(gone_since, "lives"):
            what = f"{call.verb} of {life.name} waits since {call.began:.2f}, and no server is there since"
            self.broken("G7 a trainer works alone", f"{what} {gone_since:.2f}")

    def _still_has(self, life: Life, call: Call) -> bool:
        """It is in the same call, and no byte of what that call found there may change yet."""
        mine, held = life.call, life.held
        if mine is None or held is None or (mine.number, mine.verb) != (call.number, call.verb) or not mine.number:
            return False
        is_held = held.version == call.had and held.is_served and not mine.is_touched
        return is_held and not mine.is_cancelled and life.closing == inf

    # --- the end ------------------------------------------------------------------------------------------------------

    def unsettled(self, replica: str, is_trainer: bool, has: Version | None, is_refused: bool) -> str:
        """What a replica in good health still lacks, if anything."""
        model = replica.partition("/")[0]
        members = [life for life in self.truth.lives.values() if f"{life.me.model}/{life.me.replica}" == replica]
        is_well = bool(members) and len(members) == self.truth.shards_of(members[0])
        is_refused |= model in self.truth.recut
        if not is_well or is_refused or any(map(self.truth.weather.is_down, members)):
            return ""
        if is_trainer:
            return "" if has is not None or self.truth.existing(model) else f"{replica} never published anything"
        is_there = (v for v in self.truth.existing(model) if self.truth.is_whole(model, v, self._is_well))
        newest = next(is_there, None)
        return f"{replica} has version {has}, the latest is {newest}" if newest is not None and has != newest else ""

    def _is_well(self, life: Life) -> bool:
        return life.closing == inf and not self.truth.weather.is_down(life)

    def leftovers(self, reads: dict[int, str], holders: dict[str, list[str]]) -> str:
        """What the server shows and nothing stands for: reads by ticket and reader, versions and their holders."""
        living = {f"{life.me.model}/{life.me.replica}": None for life in self.truth.lives.values()}
        open_tickets = {life.read.ticket: None for life in self.truth.lives.values() if life.read}
        for ticket, reader in reads.items():
            if ticket not in open_tickets:
                return f"ticket {ticket} of {reader} is open for ever"
        for what, replicas in holders.items():
            gone = [replica for replica in replicas if replica not in living]
            if gone:
                return f"{gone[0]} is dead and still counts as a holder of {what}"
        return self._useless_copies()

    def _useless_copies(self) -> str:
        """No host copies but of versions that are kept, and a newer one. Of lost ones older ones take the place."""
        if not self.is_quiet(self.now):
            return ""
        pinned = [version for life in self.truth.lives.values() for version in life.pins]
        for life in self.truth.lives.values():
            existing = self.truth.existing(life.me.model)
            whole = [version for version in existing if self.truth.is_whole(life.me.model, version)]
            kept = *existing[: self.conditions.retain + 1], *whole[: self.conditions.retain + 1], *pinned
            old = [version for version in life.copies if version not in kept]
            if old and self.truth.is_sole_publisher(life.me.model):
                return f"{life.name} still has host copies of {old}"
        return ""
