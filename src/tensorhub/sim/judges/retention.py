"""G6: no voluntary departure loses what is retained or established, and what was not written is not given up."""

from math import inf

from ...core.names import Digest, Version
from ..truth.life import Call, Life
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
        self.without_room: dict[tuple[str, Version], float] = {}  # when a reliable worker last gave it up so

    def gives_up(self, life: Life, version: Version, where: str) -> None:
        """`where` it was: in the buffer, or in host memory. The truth has already taken it away from the process."""
        truth, model = self.truth, life.me.model
        made = truth.exists(model, version)
        if made is None or not life.hello.reliable or life.closing < inf:
            return
        if made.root_of(life.shard) is None or self._was_lost(life, version):
            return
        if "host" in where and life.was_unfilled:
            return  # its last chunk came when it had been told to go
        had_room = self._had_room(life, where) and life.full_until <= self._decided(life, where)
        kept_on = self.without_room.get((model, version), -inf)  # so long somebody else had it who could not keep it
        if not had_room:
            self.without_room[model, version] = self.now
        if not had_room and self._were_all_away(life, version, self._decided(life, where)):
            return
        if any(other.hello.reliable for other in truth.holders(life.shard, version) if other is not life):
            return
        if life in truth.holders(life.shard, version):
            return  # in its other memory
        if life.cut and truth.is_had(model, version, lambda other: other.hello.reliable and other is not life):
            return  # in another cut
        if self._was_left_lately(life, version) or not truth.was_known(made):
            return
        if self._is_retained(life, version):
            self.broken(f"{life.name} gave up the last reliable reference of version {version}, {where}")
        heard_s = FLEETING_S + 8 * self.conditions.delay_s  # until then a server may not know what it let go
        is_established = truth.established.is_known(model, version, self.now - heard_s)
        decided = self._decided(life, where)  # when it was told that it may go
        told = life.let_go_at if life.let_go_at < inf and "host" not in where else self.now  # and when at the latest
        was_kept = kept_on >= decided or truth.established.may_be_newer(model, version, decided, told)
        if is_established and had_room and not was_kept and not self._is_with_spot(life, version):
            text = f"{life.name} gave up the last reliable reference of version {version}, {where}, and no newer one"
            self.broken(f"{text} is established", "G6 established")

    def leaves(self, life: Life) -> None:
        """After close(): it goes before its time is over. Somebody who could have it has all that must be kept."""
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
            if self._was_lost(life, version) or self._was_left_lately(life, version):
                continue
            since = life.closing - self.settings.lease_s
            layout = made.layouts[life.me.shard] if life.cut == made.cut else life.layout
            heirs = [o for o in truth.same_shard(life.shard) if o is not life and self._could_inherit(o, layout, since)]
            heirs = heirs or self._heirs_across(life, version, since)
            if heirs and truth.troubles.server(since) and truth.troubles.hears(life, since):
                self.broken(
                    f"{life.name} left with the last reference of version {version}, {heirs[0].name} could have it"
                )

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
        """Before it gave the version up, something else could have been kept beside it."""
        return self._has_room(life) and (self.conditions.host_copies > len(life.copies) + 1 or "host" not in where)

    def _decided(self, life: Life, where: str) -> float:
        """When it was decided that it may give a version up. The rest takes so long at most, unless it was away."""
        lately = self.now - FLEETING_S - 8 * self.conditions.delay_s
        return lately if "host" in where else min(lately, life.let_go_at)

    def _other_shards(self, life: Life) -> list[tuple[str, int]]:
        return [(life.shard[0], n) for n in range(self.conditions.shards_in(life.cut)) if n != life.me.shard]

    def _was_lost(self, life: Life, version: Version) -> bool:
        """Some other shard of it had been lost before, so there was nothing left to keep."""
        model, shards = life.me.model, self._other_shards(life)
        since = self.now - 4 * self.settings.lease_s
        return (
            any(not self.truth.holders(shard, version) for shard in shards)
            or self.truth.lost.get((model, version), -inf) >= since
        )

    def _were_all_away(self, life: Life, version: Version, decided: float) -> bool:
        """All who have some other shard of it were where the server could not hear them, or have only just got it."""
        return any(
            all(
                not self.truth.is_in_session(other) or max(other.away_until, other.whole_since(version)) > decided
                for other in self.truth.holders(shard, version)
            )
            for shard in self._other_shards(life)
        )

    def _was_left_lately(self, life: Life, version: Version) -> bool:
        """Another reliable holder died or went so shortly before that the server could not know."""
        since = self.now - 4 * self.settings.lease_s
        shards = [shard for cut in self.truth.cuts(life.me.model) for shard in cut] if life.cut else [life.shard]
        return any(self.truth.last_holder_gone.get((*shard, version), -inf) >= since for shard in shards)

    def _is_retained(self, life: Life, version: Version) -> bool:
        model = life.me.model
        if version in self.truth.existing(model)[: max(1, self.conditions.retain)]:
            return True
        since = self.now - self.spread_s - self.settings.lease_s
        return any(
            version in other.pins and other.pinned_at < since and self.truth.troubles.hears(other, since)
            for other in self.truth.lives.values()
            if other.me.model == model
        )

    def call_ended(self, life: Life, call: Call) -> None:
        """A fill that ended badly before a byte was written gives the old version back."""
        if call.verb not in FILLS or call.had is None or call.is_touched:
            return
        if call.outcome is not None and call.outcome.error is None:
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
