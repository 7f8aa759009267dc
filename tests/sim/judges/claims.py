"""G3 of numbers that are claimed: nobody else gets one, and nothing is withdrawn for a claim that is not granted."""

from math import inf

from tensorhub.protocol.messages import Orders
from tensorhub.protocol.names import Version

from ..truth.life import Call, Life
from .bench import Judge


class ClaimJudge(Judge):
    """Looks at what the server answers to a claim or a publish, when it says so for the first time."""

    promise = "G3 one publisher of a number"

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._answered: dict[tuple[str, str, int], None] = {}

    def ordered(self, life: Life, orders: Orders) -> None:
        """Orders leave the server."""
        answer, call = orders.answer, life.call
        if answer is None or answer.version is None or call is None or call.number != answer.number:
            return
        key = (life.me.model, life.me.replica, answer.number)
        if key in self._answered or (call.verb != "publish" and call.claim is None):
            return
        self._answered[key] = None
        what = "publish" if call.verb == "publish" else "claim"
        for other in self.truth.lives.values():
            is_rival = other.me.model == life.me.model and other.me.replica != life.me.replica
            is_later = life.claim == answer.version and life.claimed > other.claimed  # judged when it was granted
            if is_later or not is_rival or other.claim != answer.version:
                continue
            if self._is_known(other) or self._outlived(other):
                self.broken(f"{life.name} may {what} version {answer.version}, which {other.name} has claimed")
        if call.claim is not None:
            self._is_free(life, call.claim)
            for each in self.truth.group(life):
                if each.is_torn and each.call is not None and each.call.number == call.number:
                    self.broken(
                        f"{life.name} may claim {call.claim}, though {each.name} is spoiled", "G8 loses nothing"
                    )

    def _is_free(self, life: Life, version: Version) -> None:
        """What is claimed was not published yet, as far as this server was told."""
        newest = self.truth.newest(life.me.model)
        if newest is not None and newest >= version and self.truth.is_known_whole(life.me.model, newest):
            self.broken(f"{life.name} may claim version {version}, though {newest} exists")

    def _is_known(self, other: Life) -> bool:
        """This life of the server has granted the claim, or has been told of it."""
        is_told = other.heard is not None and other.heard.claim == other.claim
        is_granted = other.claimed_by == self.truth.server_life and other.away_until < other.claimed
        return self.truth.is_in_session(other) and (is_told or is_granted) and other.closing == inf

    def _outlived(self, other: Life) -> bool:
        """It had claimed it when the last server died, and its own lease with that one is not over."""
        is_old = other.claimed < self.truth.troubles.server_died
        return is_old and other.clock() < other.trust_until and other.closing == inf

    def withdraws(self, life: Life, version: Version, call: Call | None) -> None:
        """It serves a version no longer, or what a failed fill has left of one."""
        if call is None or self.had_other_content(life, call):
            return
        if call.is_disowned and len(self.truth.made_as(life.me.model, version)) > 1:
            return  # it was told before that it is not the version; others have published it, too
        if call.claim is not None and call.resolved is None and call.had == version:
            self.broken(
                f"{life.name} withdraws before its claim of version {call.claim} is granted", "G8 loses nothing"
            )
