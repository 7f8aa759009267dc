"""G6: no voluntary departure loses what is retained or established, and what was not written is not given up."""

from collections.abc import Callable
from math import inf

from tensorhub.protocol.names import Digest, ReplicaName, Shard, Version, WorkerId

from ..truth.life import MAX_OF_A_LEASE, Call, Life
from ..truth.made import Made
from ..truth.record import Truth
from ..world import World
from .bench import Judge

FILLS = ("replicate", "update")
LAST_SHARE = 0.1 + 0.05  # of the time of close(): then who still reads is cut off; and clocks differ
FLEETING_S = 0.5  # how long the last step of a withdrawal may take beside the copying of a chunk


class RetentionJudge(Judge):
    """Asked whenever somebody gives up a version by its own will."""

    promise = "G6 retention"

    def __init__(self, truth: Truth, world: World) -> None:
        super().__init__(truth, world)
        # when a worker, reliable or not, last gave it up so
        self.without_room: dict[tuple[str, Version, bool], float] = {}

    def gives_up(self, life: Life, version: Version, where: str) -> None:
        """`where` it was: in the buffer, or in host memory. The truth has already taken it away from the process."""
        truth, model = self.truth, life.me.model
        made = truth.exists(model, version)
        if made is None or life.closing < inf:
            return
        if made.root_of(life.shard) is None or self._was_lost(life, version):
            return
        if "host" in where and life.was_unfilled:
            return  # its last chunk came when it had been told to go
        decided, told = self._decided(life, version, where)
        had_room = self._had_room(life, where) and life.full_until <= decided
        kept_on = self._last_without_room(life, version)  # so long somebody else had it who could not keep it
        if not had_room:
            self.without_room[model, version, life.hello.reliable] = self.now
        if life in truth.holders(life.shard, version) or self._is_kept_outside(life, version, made.replica):
            return  # in its other memory, or by others
        if not had_room and self._leaves_with_others(life, version):
            return
        is_published = self._is_relied_on(life, version, lambda _other: True)  # by its publisher
        is_proved = self._is_proved(made, decided)
        is_full = not had_room or self.conditions.host_copies <= life.hosted + self._begun(life)  # that goes on
        if (is_published or is_full or not is_proved) and self._were_all_away(life, version, decided):
            return
        if self._was_left_lately(life, version, told) or not truth.was_known(made):
            return
        if not life.hello.reliable and (not had_room or kept_on >= decided):
            return  # it need not fail for want of room, as a reliable one has to
        what = f"the last {'reliable ' if life.hello.reliable else ''}reference of version {version}, {where}"
        if self._is_retained(life, version) and not is_published:
            self.broken(f"{life.name} gave up {what}")
        heard_s = FLEETING_S + 8 * self.conditions.delay_s  # until then a server may not know what it let go
        is_established = truth.established.is_known(model, version, self.now - heard_s)
        was_kept = kept_on >= decided or truth.established.may_be_newer(model, version, decided, told)
        is_with_spot = life.hello.reliable and self._is_with_spot(life, version)
        if is_established and had_room and not was_kept and not is_with_spot:
            self.broken(f"{life.name} gave up {what}, and no newer one is established", "G6 established")

    def leaves(self, life: Life) -> None:
        """After close(): it goes before its time is over. Somebody who could have it has all that must be kept.

        It need not wait for a server that has been away for a lease.
        """
        truth, model = self.truth, life.me.model
        length_s = life.close_deadline - life.closing
        if life.closing == inf or self.now >= life.close_deadline - 0.1 - LAST_SHARE * length_s:
            return
        for version in truth.existing(model)[:1]:
            made = truth.exists(model, version)
            others = [other for other in truth.holders(life.shard, version) if other is not life]
            others += [other] if (other := self._had_elsewhere(life, version)) is not None else []
            if not life.has(version) or others or made is None or not truth.was_known(made):
                continue
            if self._was_lost(life, version) or self._was_left_lately(life, version, self.now, by_spot=True):
                continue
            if not self._has_room(life) and self._leaves_with_others(life, version):
                continue
            since = life.closing - self.settings.lease_s
            heirs = self._heirs(life, version, made, since)
            if heirs and truth.troubles.away_since(life, self.now) > self.now - MAX_OF_A_LEASE * self.settings.lease_s:
                self.broken(
                    f"{life.name} left with the last reference of version {version}, {heirs[0].name} could have it"
                )

    def _heirs(self, life: Life, version: Version, made: Made, since: float) -> list[Life]:
        """Who could have had from it what it leaves with: another of its shard, or all of another cut."""
        layout = made.layouts[life.me.shard] if life.cut == made.cut else life.layout
        others = [other for other in self.truth.same_shard(life.shard) if other is not life]
        heirs = [other for other in others if self._could_inherit(other, layout, since)]
        return heirs or self._heirs_across(life, version, since)

    def _heirs_across(self, life: Life, version: Version, since: float) -> list[Life]:
        """One for each shard of another cut, if there are such who could have read it out of this one's."""
        truth, troubles = self.truth, self.truth.troubles
        cuts = truth.cuts(life.me.model) if life.cut else []
        sources = [truth.holders(shard, version) for cut in cuts if life.shard in cut for shard in cut]
        if not all(any(o is life or troubles.serves(o, since) for o in there) for there in sources):
            return []
        for cut in cuts:
            able = [[o for o in truth.same_shard(shard) if self._could_inherit(o, o.layout, since)] for shard in cut]
            if life.shard not in cut and all(able):
                return [each[0] for each in able]
        return []

    def _had_elsewhere(self, life: Life, version: Version) -> Life | None:
        """Somebody who has some of it in a cut of which others have the rest."""
        is_had = life.cut and self.truth.is_had(life.me.model, version, lambda other: other is not life)
        return next((other for other in self.truth.lives.values() if other.has(version)), None) if is_had else None

    def _could_inherit(self, heir: Life, layout: Digest, since: float) -> bool:
        is_able = heir.closing == inf and self._has_room(heir) and heir.layout == layout
        troubles = self.truth.troubles
        return is_able and troubles.hears(heir, since) and troubles.serves(heir, since) and not heir.failed_since(since)

    def _has_room(self, life: Life) -> bool:
        return self.conditions.host_copies > life.hosted

    def _is_with_spot(self, life: Life, version: Version) -> bool:
        """Spot workers have it, and it was established among such: no reliable one lived outside its publisher.

        Those may be of another cut, which have all of it then.
        """
        truth = self.truth
        cuts = [cut for cut in truth.cuts(life.me.model) if life.shard not in cut] if life.cut else []
        for shards in ([life.shard], *cuts):
            is_had = all(any(other is not life for other in truth.holders(shard, version)) for shard in shards)
            if is_had and any(truth.established.is_among_spot(shard) for shard in shards):
                return True
        return False

    def _had_room(self, life: Life, where: str) -> bool:
        """Before it gave the version up, something else could have been kept beside it.

        Beside a host copy that is one less for each copy that has begun.
        """
        if "host" not in where or not self._has_room(life):
            return self._has_room(life)
        return self.conditions.host_copies > len(life.copies) + 1 + self._begun(life)

    def _begun(self, life: Life) -> int:
        """Host copies that have begun, and are not whole: they fill room too."""
        return sum(not copy.whole for copy in life.said.copies) if life.said is not None else 0

    def _decided(self, life: Life, version: Version, where: str) -> tuple[float, float]:
        """(when it was decided at the earliest that it may give a version up, when it was told so at the latest).

        The rest takes so long at most, unless it was away. Its buffer may have been let go as it had a host copy too.
        """
        lately = self.now - FLEETING_S - 8 * self.conditions.delay_s
        if "host" in where or life.let_go_at == inf:
            return lately, self.now
        told = max(life.let_go_at, life.released_at.get(version, -inf))
        return min(lately, told), told

    def _other_shards(self, life: Life) -> list[tuple[str, int]]:
        return [(life.shard[0], n) for n in range(self.conditions.shards_in(life.cut)) if n != life.me.shard]

    def _is_kept_outside(self, life: Life, version: Version, publisher: ReplicaName) -> bool:
        """Somebody else relied on has it, who is not of its publisher; where it has published it too, anybody."""
        is_inside = any(life.me.replica == each.replica for each in self.truth.made_as(life.me.model, version))
        return self._is_relied_on(life, version, lambda other: is_inside or other.me.replica != publisher)

    def _is_relied_on(self, life: Life, version: Version, counts: Callable[[Life], bool]) -> bool:
        """Somebody else who counts has it, in this cut or in another one, whose reference is as good as its own."""

        def is_as_good(other: Life) -> bool:
            return other is not life and (other.hello.reliable or not life.hello.reliable) and counts(other)

        truth = self.truth
        if any(map(is_as_good, truth.holders(life.shard, version))):
            return True
        return bool(life.cut) and truth.is_had(life.me.model, version, is_as_good)

    def _last_without_room(self, life: Life, version: Version) -> float:
        """When one whom it may have relied on last gave the version up as it had no room."""
        kinds = (True,) if life.hello.reliable else (True, False)
        return max(self.without_room.get((life.me.model, version, kind), -inf) for kind in kinds)

    def _was_lost(self, life: Life, version: Version) -> bool:
        """Some other shard of it had been lost before, so there was nothing left to keep."""
        since, lost = self._sessions_since(self.now), self.truth.lost.get((life.me.model, version), -inf)
        found = [self.truth.holders(shard, version) for shard in self._other_shards(life)]
        if lost >= since or not all(found):
            return True
        return lost > -inf and any(all(o.whole_since(version) > since for o in holders) for holders in found)

    def _leaves_with_others(self, life: Life, version: Version) -> bool:
        """Some other shard of it is had only by such as leave with it for good, and have told the server so.

        They will let it go, as nobody else is there who could inherit it. Or they may do so already: whether that was
        right is judged when they leave, and so that is no excuse for one that leaves with them.
        """
        truth, stays = self.truth, life.closing == inf

        def takes_along(other: Life) -> bool:
            copies = other.heard.copies if other.heard is not None else ()
            return any(copy.version == version and copy.leaving for copy in copies)

        def goes(other: Life) -> bool:
            is_heard = other.is_heard_by(truth.server_life) and other.heard is not None and other.heard.closing
            is_kept = other.held is not None and other.held.version == version and other.let_go_at == inf
            is_told = not is_kept and (version not in other.copies or version in other.released or takes_along(other))
            others = (each for each in truth.same_shard(other.shard) if each is not other and each.closing == inf)
            return is_heard and ((stays and is_told) or not (other.cut or any(map(self._has_room, others))))

        return any(all(map(goes, truth.holders(shard, version))) for shard in self._other_shards(life))

    def _sessions_since(self, at: float) -> float:
        """Who was gone by then had no session any more at that time, and what follows from that was said."""
        session_s = 1.2 * self.settings.lease_s + self.spread_s
        return self.truth.troubles.before_sessions(at - session_s, session_s)

    def _is_proved(self, made: Made, decided: float) -> bool:
        """The present server has said that it exists, or hears those to whom one before it has: they have the proof."""
        truth = self.truth
        if any(server == truth.server_life and at <= decided for server, at in made.known_to.values()):
            return True
        every = [*truth.lives.values(), *truth.dead.values()]
        heard = [life for life in every if life.heard_by == truth.server_life and life.heard_since <= decided]
        return any(life.name in made.known_to for life in heard)

    def _were_all_away(self, life: Life, version: Version, decided: float) -> bool:
        """All who have some other shard of it were where the server could not hear them, or have only just got it."""
        return any(
            all(
                not self.truth.is_in_session(other) or max(other.away_until, other.whole_since(version)) > decided
                for other in self.truth.holders(shard, version)
            )
            for shard in self._other_shards(life)
        )

    def _was_left_lately(self, life: Life, version: Version, told: float, *, by_spot: bool = False) -> bool:
        """Another whom it relied on died or went so shortly before it was told that the server could not know."""
        since = self._sessions_since(told)
        shards = [shard for cut in self.truth.cuts(life.me.model) for shard in cut] if life.cut else [life.shard]
        kinds = (True, False) if by_spot or not life.hello.reliable else (True,)
        gone = self.truth.last_holder_gone
        return any(gone.get((*shard, version, kind), -inf) >= since for shard in shards for kind in kinds)

    def _is_retained(self, life: Life, version: Version) -> bool:
        model = life.me.model
        newer = sum(self._may_count(model, other) for other in self.truth.numbers(model) if other > version)
        if newer < max(1, self.conditions.retain):
            return True
        since = self.now - self.spread_s - self.settings.lease_s
        return any(
            version in other.pins and other.pinned_at < since and self.truth.troubles.hears(other, since)
            for other in self.truth.lives.values()
            if other.me.model == model
        )

    def _may_count(self, model: str, version: Version) -> bool:
        """It exists; or each shard was published and is held yet, or was by one who died and may be thought to live."""
        if self.truth.exists(model, version) is not None:
            return True
        since = self._sessions_since(self.now)
        for made in self.truth.made_as(model, version):
            if len(made.roots) == self.conditions.shards_in(made.cut):
                workers = [WorkerId(made.model, made.replica, Shard(shard)) for shard in made.roots]
                if all(self._may_hold(me, version, since) for me in workers):
                    return True
        return False

    def _may_hold(self, me: WorkerId, version: Version, since: float) -> bool:
        life, dead = self.truth.lives.get(me), self.truth.dead.get(me)
        is_held = life is not None and life.held is not None and life.held.version == version
        return is_held or (dead is not None and dead.died >= since)

    def call_ended(self, life: Life, call: Call) -> None:
        """A fill that ended badly before a byte was written gives the old version back."""
        if call.verb not in FILLS or call.had is None or call.is_touched:
            return
        outcome = call.outcome
        if outcome is not None and (outcome.error is None or outcome.error.code == "version-conflict"):
            return  # what is not the version is not given back as the version; whether it is not is judged there
        if self.had_other_content(life, call):
            return
        delay_s = FLEETING_S + 4 * self.conditions.chunk_s
        self.world.after(delay_s, lambda: self._has_it_back(life, call))

    def _has_it_back(self, life: Life, call: Call) -> None:
        if (
            not life.is_alive
            or life.closing < inf
            or not life.past
            or life.past[-1] is not call
            or life.call is not None
        ):
            return
        if call.is_touched or self.truth.troubles.of(life, call.ended, ("pause",)) is not None:
            return
        if life.registered > call.ended:
            return
        if life.held is None or not life.held.is_served:
            text = f"{life.name} held {call.had} when {call.verb}({call.spec!r}) began; it failed before a byte came"
            self.broken(f"{text}, and now it has {life.held}", "G6 vacated")
