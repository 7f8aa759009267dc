"""G10: into a site each shard of a version comes once, and again only where faults have made it so."""

from math import inf

from tensorhub.protocol.names import Version

from ..truth.life import Life, Read
from .bench import Judge

SETTLED_S = 1.0  # everybody has been heard by then, a withdrawal that failed is over, and stopped reads have ended


class CrossingJudge(Judge):
    """Looks at each chunk that leaves a site for another."""

    promise = "G10 once per site"

    def sent(self, source: Life, reader: Life, read: Read, chunk: int) -> None:
        """A chunk goes over the wire."""
        if source.site == reader.site:
            return
        since_s = SETTLED_S + self.spread_s
        settled = read.began - since_s
        for other in self.truth.same_shard(reader.shard):
            if other is reader or other.site != reader.site:
                continue
            begun = reader.crosses_since(read) - since_s
            if not (self._has(other, read, settled) or self._reads(other, read, settled, begun)):
                continue
            if self._is_between(other, reader, settled):
                continue
            text = f"chunk {chunk} of version {read.grant.version} goes from {source.name} to {reader.name}"
            self.broken(f"{text}, and {other.name} of {reader.site} has or reads it")

    def _has(self, other: Life, read: Read, settled: float) -> bool:
        """It has had the chunk for a while."""
        held, copy = other.held, other.copies.get(read.grant.version)
        is_held = held is not None and held.version == read.grant.version and held.since < settled and held.is_served
        if is_held and not self._makes_way(other, read, settled):
            return True
        return copy is not None and copy.since < settled and not self._goes(other, read.grant.version)

    def _goes(self, other: Life, version: Version) -> bool:
        """Its copy was told to go, as somebody has the version in its tensors: so copies end, whoever asks next."""
        mates = self.truth.same_shard(other.shard)
        return version in other.released and any(life.held and life.held.version == version for life in mates)

    def _reads(self, other: Life, read: Read, settled: float, before: float) -> bool:
        """It reads that from afar itself, and did before the reader began to."""
        theirs = other.read
        return (
            theirs is not None
            and not theirs.is_stopped
            and theirs.grant.version == read.grant.version
            and theirs.is_cross_site
            and theirs.began < before
            and not self._is_starved(other, settled, read.began)
            and not (other.call is None and not theirs.grant.to_host)
        )

    def _is_starved(self, other: Life, settled: float, began: float) -> bool:
        """Till lately nothing came by its read, for as long as a source is left for: nobody had to wait for that."""
        spans = (*other.starved, (other.fed_at, inf))
        return any(since + self.settings.stalled_s <= began and settled < until for since, until in spans)

    def _makes_way(self, other: Life, read: Read, settled: float) -> bool:
        """Its caller wanted another version, and knew which, when the read began, or did so till lately, in vain."""
        calls = [call for call in (*other.past, other.call) if call is not None and call.ended > settled]
        return any(call.resolved not in (None, read.grant.version) and call.resolved_at < read.began for call in calls)

    def _is_between(self, other: Life, reader: Life, settled: float) -> bool:
        """A fault stood between the two, or between one of them and the server."""
        troubles, since = self.truth.troubles, settled - self.settings.lease_s
        if other.closing < self.now or other.started > since or not troubles.server(since):
            return True
        if any(not troubles.hears(life, since) for life in (other, reader)):
            return True
        if not troubles.serves(other, since) or other.layout != reader.layout:
            return True
        stood_still = (life.stood_still.get(other.me, -inf) for life in self.truth.same_shard(reader.shard))
        if any(at > settled - self.settings.leave_s for at in stood_still):
            return True  # a source from which nothing came is everybody's last choice for a while
        if any(life.failed_since(settled, other.me) for life in self.truth.same_shard(reader.shard)):
            return True  # until it is heard again everybody has reason to doubt it
        has_failed = other.failed_since(since) or reader.failed_since(since, other.me)
        return has_failed or self._withdrew(other, since)

    def _withdrew(self, other: Life, since: float) -> bool:
        """It wanted its buffer back for another version, and readers had to go elsewhere."""
        calls = [*other.past, *([other.call] if other.call is not None else [])]
        return any(call.ended > since and call.verb == "unpublish" for call in calls)
