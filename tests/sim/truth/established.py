"""Which version of each model is established: whole outside its publishers, and since when a server must know that."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from tensorhub.protocol.messages import Holding, HostCopy, Vacated, Withdrawing
from tensorhub.protocol.names import ReplicaName, Version

from .life import Life

if TYPE_CHECKING:
    from .record import Truth


@dataclass
class Way:
    """A cut of which each shard is whole outside the publisher."""

    holders: list[list[Life]]  # of each shard, when it became so
    said: dict[int, Life] = field(default_factory=dict)  # who has been heard of those since, by shard

    @property
    def is_said(self) -> bool:
        """A server has been told by holders of all shards."""
        return len(self.said) == len(self.holders)


@dataclass
class Newest:
    """The newest established version of one model."""

    version: Version
    since: float
    ways: dict[int, Way] = field(default_factory=dict)  # in which it is so, by the number of the cut


class Established:
    """Asked by the judges what a server may not give up."""

    def __init__(self, truth: "Truth") -> None:
        self._truth = truth
        self._newest: dict[str, Newest] = {}
        self._ever: dict[tuple[str, Version], None] = {}  # all that have been the newest one
        self._known: dict[str, Newest] = {}  # the newest of which a server has been told, by holders of all shards
        self._known_by: dict[str, tuple[Version, int]] = {}  # which life of the server has heard of it from all shards
        self._perhaps: dict[str, Version] = {}  # the newest of which a server may have been told by any holders
        self._among_spot: dict[tuple[str, int], None] = {}  # shards that only spot workers have of it
        self._belated: dict[tuple[str, Version], dict[int, float]] = {}  # perhaps so: for which server, since when
        self._looked: dict[str, float] = {}  # when that was last asked
        self._shown: dict[tuple[str, Version, ReplicaName], int] = {}  # who last told which server that it published it

    def version(self, model: str) -> Version | None:
        """The newest one of the model."""
        newest = self._newest.get(model)
        return newest.version if newest is not None else None

    def is_among_spot(self, shard: tuple[str, int]) -> bool:
        """Only workers that nobody relies on had that shard of it, as there were no others."""
        return shard in self._among_spot

    def note_whole(self, life: Life, version: Version) -> None:
        """One more has all of its shard: perhaps the version is established by that, if it is outside the publisher."""
        truth, model = self._truth, life.me.model
        made, newest = truth.exists(model, version), self._newest.get(model)
        if made is None or (newest is not None and version < newest.version):
            return
        publishers = self._publishers(model, version)
        if life.me.replica in publishers:
            return
        is_new = newest is None or version > newest.version
        ways = newest.ways if newest is not None and not is_new else {}
        before = len(ways)
        dead = truth.dead.values()  # a server may believe for so long that they live, and longer if it stood still
        unburied_s = 1.2 * truth.plan.settings.lease_s
        unburied = [o for o in dead if truth.now - o.died < unburied_s or truth.may_be_believed(o)]
        living = [o for o in truth.lives.values() if truth.may_be_in_session(o) or o.heard_by != truth.server_life]
        outside = (o for o in [*living, *unburied] if o.me.model == model and o.me.replica not in publishers)
        stay = (other for other in outside if other.hello.reliable and not _said_to_leave(other))
        reliable = {other.shard: None for other in stay}  # a replica may live in part
        for number, cut in enumerate(truth.cuts(model)):
            found = [self._outside(shard, version, publishers, reliable) for shard in cut]
            if not all(found) or number in ways:
                continue
            ways[number] = Way(found)
            for shard in cut:
                self._among_spot.pop(shard, None)
                if shard not in reliable:
                    self._among_spot[shard] = None
        if newest is not None and not is_new and ways and not before:
            newest.since = truth.now
        if is_new and ways:
            self._newest[model] = Newest(version, truth.now, ways)
            self._ever[model, version] = None

    def _outside(
        self,
        shard: tuple[str, int],
        version: Version,
        publishers: Container[ReplicaName],
        reliable: dict[tuple[str, int], None],
    ) -> list[Life]:
        """Who has it beside those that publish it: the reliable ones, where any lives."""
        holders = [holder for holder in self._truth.holders(shard, version) if holder.me.replica not in publishers]
        return [holder for holder in holders if holder.hello.reliable or shard not in reliable]

    def heard(self, life: Life) -> None:
        """A server has taken in its report."""
        self.look(life.me.model)
        self._note_perhaps(life.me.model)
        for had in (life.heard.buffer, *life.heard.copies) if life.heard is not None else ():
            if isinstance(had, Holding | Withdrawing | Vacated | HostCopy) and had.published:
                self._shown[life.me.model, had.version, life.me.replica] = self._truth.server_life
        newest = self._newest.get(life.me.model)
        if newest is None:
            return
        self._doubt(newest, life)
        stays = self._truth.said_to_have(life, newest.version) and not _said_to_leave(life)
        is_counted = stays and _is_counted(life, newest.version)
        for way in newest.ways.values():
            if not way.is_said:  # the server forgets who has no session any more, and does not count who wants to go
                counted = {place: other for place, other in way.said.items() if self._is_remembered(other)}
                way.said = {place: other for place, other in counted.items() if is_counted or other is not life}
            for place, holders in enumerate(way.holders):
                if life in holders and is_counted:
                    way.said.setdefault(place, life)
        if any(way.is_said for way in newest.ways.values()):
            self._known[life.me.model] = newest
        known, has_called = self._known.get(life.me.model), self._truth.troubles.server(self._truth.now)  # the roll
        if has_called and known is not None and self._may_be_known(life.me.model, known, by=self._truth.server_life):
            self._known_by[life.me.model] = known.version, self._truth.server_life

    def _note_perhaps(self, model: str) -> None:
        """Others than the first, or such as are in doubt, may have told a server of the newest one: that stays so."""
        newest = self._newest.get(model)
        if newest is not None and self._perhaps.get(model) != newest.version and self._may_be_known(model, newest):
            self._perhaps[model] = newest.version

    def _doubt(self, newest: Newest, life: Life) -> None:
        """Who is relied on has come for a shard that only spot workers have, before a server knew of all of it."""
        is_publisher = life.me.replica in self._publishers(life.me.model, newest.version)
        if life.shard not in self._among_spot or not life.hello.reliable or is_publisher or _said_to_leave(life):
            return
        for number, way in list(newest.ways.items()):
            if not way.is_said and any(holders[0].shard == life.shard for holders in way.holders):
                del newest.ways[number]

    def released(self, life: Life, version: Version) -> None:
        """A server lets its copy go. If it had not heard of all shards yet, it does not count this one any more."""
        newest = self._newest.get(life.me.model)
        if newest is None or newest.version != version:
            return
        for way in newest.ways.values():
            if not way.is_said:
                way.said = {place: other for place, other in way.said.items() if other is not life}

    def is_known(self, model: str, version: Version, before: float) -> bool:
        """That is the newest one, before that time, of which a server has been told by holders of all shards.

        Not if a newer one has become it since: that may be known from others. Nor if a reliable worker of a shard that
        only spot workers have came before the server can have heard of them. The next server finds out anew what is
        established, from those that it hears: from one of each shard, or it does not. And whoever has published it, and
        has gone on, it takes for any other.
        """
        known, newest, truth = self._known.get(model), self._newest.get(model), self._truth
        if known is None or newest is None or known.version != version or known.since > before:
            return False
        if self._perhaps.get(model, version) > version or (newest is not known and self._may_be_known(model, newest)):
            return False
        between = (each for each in truth.existing(model) if version < each < newest.version)
        for each in between:  # no server knows of the newest one, as nobody has been able to say so
            if self._may_be_known(model, Newest(each, truth.now), is_relied_on=(model, each) not in self._ever):
                return False
        is_next = max(truth.troubles.server_died, truth.troubles.server_started) >= known.since
        if is_next and self._known_by.get(model) != (version, truth.server_life):
            return False
        until = known.since + truth.plan.settings.report_s + 8 * truth.plan.conditions.delay_s
        for life in [*truth.lives.values(), *truth.dead.values()]:
            is_other = life.hello.reliable and life.me.model == model and life.shard in self._among_spot
            if is_other and (is_next or known.since <= life.started < until or self._has_gone_on(life, version)):
                return False
        return True

    def _has_gone_on(self, life: Life, version: Version) -> bool:
        """It has a session, and its replica has published that version: this life of the server never heard so."""
        truth, model, replica = self._truth, life.me.model, life.me.replica
        if replica not in self._publishers(model, version) or not truth.may_be_in_session(life):
            return False
        return self._shown.get((model, version, replica)) != truth.server_life

    def _may_be_known(self, model: str, newest: Newest, by: int = 0, *, is_relied_on: bool = False) -> bool:
        """Each shard of a cut has somebody who has told a server of it, whether he was among the first or not.

        `by`: that life of it, which finds out anew what is established: a shard for which somebody is relied on needs
        one such. `is_relied_on`: and he is.

        He may be on his way to another version, as long as no server has told him that he may give this one up. He may
        have died, as long as the server may believe that he lives.
        """
        truth, publishers = self._truth, self._publishers(model, newest.version)

        def has_told(life: Life) -> bool:
            until = self._session_end(life) if by else truth.believed_until(life)  # for sure, or perhaps
            is_there = life.is_alive or (truth.may_be_believed(life) and truth.now < until)
            is_one = life.me.replica not in publishers and (life.hello.reliable or not is_relied_on)
            return is_there and is_one and self._said_to_keep(life, newest.version) and by in (0, life.heard_by)

        def is_told(shard: tuple[str, int]) -> bool:
            others = [each for each in self._ever_there(shard) if each.me.replica not in publishers]
            relied_on = [each for each in others if each.hello.reliable and not _said_to_leave(each)]
            needed = [each for each in relied_on if each.is_alive or truth.may_be_believed(each)] if by else []
            return any(has_told(each) for each in others if each.hello.reliable or not needed)

        return any(all(map(is_told, cut)) for cut in truth.cuts(model))

    def look(self, model: str) -> None:
        """What only spot workers have is established once no reliable worker of their shard has a session any more.

        When the last of it became whole, some had: so it is not the newest of which `version` tells. Noted is for which
        life of the server that may be so, and since when at the earliest. Asked before and after each report that a
        server takes in: between two of them sessions only end.
        """
        truth, newest, before = self._truth, self._newest.get(model), self._looked.get(model, -inf)
        self._looked[model] = truth.now
        for version in truth.existing(model):
            if newest is not None and version <= newest.version:
                return
            made = truth.exists(model, version)
            belated = self._belated.setdefault((model, version), {})
            if made is None or truth.server_life in belated:
                continue
            publishers = self._publishers(model, version)
            since = min(self._all_outside_since(cut, version, publishers) for cut in truth.cuts(model))
            if since <= truth.now:
                belated[truth.server_life] = max(before, since)

    def _all_outside_since(
        self, cut: list[tuple[str, int]], version: Version, publishers: Container[ReplicaName]
    ) -> float:
        """The same for all shards of a cut."""
        since = -inf
        for shard in cut:
            since = max(since, self._outside_since(shard, version, publishers))
            if since == inf:
                break
        return since

    def _outside_since(self, shard: tuple[str, int], version: Version, publishers: Container[ReplicaName]) -> float:
        """Since when at the earliest a server may hold that those who count have it outside its publisher; inf: not so.

        Reliable workers count; others once no reliable one has a session, nor is waited for before anything is decided.
        """
        truth = self._truth
        others = [other for other in self._ever_there(shard) if other.me.replica not in publishers]
        holders = [
            holder
            for holder in [*truth.holders(shard, version), *(other for other in others if not other.is_alive)]
            if holder in others and self._said_to_keep(holder, version) and _is_counted(holder, version)
        ]
        if not holders:
            return inf
        relied_on = [o for o in others if o.hello.reliable and not _said_to_leave(o) and _is_laid_out(o)]
        sessions = [self._session_end(o) for o in relied_on if o.heard_by == truth.server_life]
        over = inf if any(map(self._is_awaited, relied_on)) else max(sessions, default=truth.now)
        found = []
        for holder in holders:
            since = truth.now if holder.hello.reliable else over
            until = min(truth.believed_until(holder), holder.turned_away_at if holder.is_turned_away else inf)
            if holder.heard_by == truth.server_life and since < until:
                found.append(since)
        return min(found, default=inf)

    def _publishers(self, model: str, version: Version) -> dict[ReplicaName, None]:
        """The replicas that have published that content, or a part of it: they may change what is there next."""
        first, made = self._truth.exists(model, version), self._truth.made_as(model, version)
        return {} if first is None else {each.replica: None for each in made if each.is_part_of(first)}

    def _ever_there(self, shard: tuple[str, int]) -> list[Life]:
        """The living, and the dead, whom a server may believe to live."""
        dead = [other for other in self._truth.dead.values() if other.shard == shard]
        return [*self._truth.same_shard(shard), *dead]

    def _session_end(self, life: Life) -> float:
        """Until then it has its session with this life of the server for sure, dead or alive."""
        truth, plan = self._truth, self._truth.plan
        lease_s = plan.settings.lease_s / (1 + plan.conditions.drift)
        return life.heard_at + lease_s + truth.troubles.stood_still_s(life.heard_at, truth.now)

    def _said_to_keep(self, life: Life, version: Version) -> bool:
        """It has the version, by the latest report that a server took in, and keeps it until it is told otherwise."""
        return self._truth.said_to_have(life, version) or _said_to_wait(life, version)

    def _is_remembered(self, life: Life) -> bool:
        """Its session with this life of the server lasts, as far as is known; with another life, that is not asked."""
        return life.heard_by != self._truth.server_life or self._truth.now < self._session_end(life)

    def _is_awaited(self, life: Life) -> bool:
        """It is on the roll of a server before this one, and its own lease lasts: nothing is decided yet.

        Who had no session for a lease when that server died may not be on the roll.
        """
        since, died = max(life.heard_since, life.away_until), self._truth.troubles.server_died
        is_on_the_roll = since < died - self._truth.plan.settings.lease_s
        return life.heard_by != self._truth.server_life and is_on_the_roll and life.clock() < life.trust_until

    def may_be_newer(self, model: str, version: Version, decided: float, told: float) -> bool:
        """A server may have taken a newer one for established, as reliable workers were away, and not for lost then.

        It decided after `decided` that the worker may give this one up, and said so when it was `told` at the latest.
        What a server before this one took for established, those show to this one who were there then.
        """
        truth = self._truth

        def was_said(life: Life, newer: Version) -> bool:
            is_believed = life.heard_by == truth.server_life and decided < truth.believed_until(life)
            return is_believed and self._said_to_keep(life, newer)

        def may_show(life: Life, server_life: int) -> bool:
            return server_life == truth.server_life or life.started < truth.troubles.server_died

        def is_one(newer: Version, server_life: int, cut: Iterable[tuple[str, int]]) -> bool:
            said = [[life for life in self._ever_there(shard) if was_said(life, newer)] for shard in cut]
            return all(said) and any(may_show(life, server_life) for shard in said for life in shard)

        return any(
            is_one(newer, server_life, cut)
            for (name, newer), belated in self._belated.items()
            if name == model and newer > version
            for server_life, since in belated.items()
            if since <= told
            for cut in truth.cuts(model)
        )


def _is_counted(life: Life, version: Version) -> bool:
    """Its buffer has it, or a host copy that no server has told to go."""
    return (life.held is not None and life.held.version == version) or version not in life.released


def _said_to_wait(life: Life, version: Version) -> bool:
    """It wants to take the version back, and waits until it is told that it may."""
    buffer = life.heard.buffer if life.heard is not None else None
    return isinstance(buffer, Withdrawing) and buffer.version == version and life.let_go_at == inf


def _is_laid_out(life: Life) -> bool:
    """A server knows of which cut it is."""
    return not life.cut or (life.heard is not None and bool(life.heard.layout))


def _said_to_leave(life: Life) -> bool:
    """A server has heard that it closes: it is not waited for."""
    return life.heard is not None and life.heard.closing
