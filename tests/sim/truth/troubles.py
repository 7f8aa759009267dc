"""What stood in whose way, and until when. An excuse has to be found here."""

from dataclasses import dataclass
from math import inf

from ..plan import Misfortune, Plan
from .life import Life

CONTROL = ("mute", "deaf", "cut", "disconnect", "pause")
DATA = ("pause", "unplug", "slow", "stutter")
RECONNECT_S = 2.5  # a new connection stands by then, and something was said on it


@dataclass(eq=False)
class Trouble:
    """One misfortune, from when it struck until nothing of it is left."""

    misfortune: Misfortune
    since: float
    until: float = inf


class Troubles:
    """All misfortunes so far. Times are those of everybody's clock."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.all: list[Trouble] = []
        self._open: dict[int, Trouble] = {}
        self.server_until = 0.0  # it was gone, or stood still, or listened after a restart
        self.server_back = 0.0  # when it was last started, or went on after standing still
        self.server_died = -inf  # when it was last killed
        self.server_started = -inf  # when it was last started again

    def struck(self, number: int, misfortune: Misfortune, now: float) -> None:
        """It begins."""
        trouble = self._open[number] = Trouble(misfortune, now)
        self.all.append(trouble)
        if misfortune.kind.endswith("server"):
            self.server_until = self.server_back = inf
        if misfortune.kind == "restart-server":
            self.server_died = now

    def passed(self, number: int, now: float) -> None:
        """It is over, and what follows from it will soon be."""
        trouble = self._open.pop(number)
        trouble.until = now + self._aftermath(trouble.misfortune.kind)
        if trouble.misfortune.kind == "restart-server":
            self.server_started = now
        if trouble.misfortune.kind.endswith("server"):
            others = [t for t in self._open.values() if t.misfortune.kind.endswith("server")]
            self.server_back = inf if others else now
            self.server_until = (
                inf if others else max(t.until for t in self.all if t.misfortune.kind.endswith("server"))
            )

    def _aftermath(self, kind: str) -> float:
        settings = self.plan.settings
        said = 2 * settings.report_s + 4 * self.plan.conditions.delay_s
        if kind == "restart-server":
            return settings.lease_s * 1.15 + RECONNECT_S + said
        return said + (RECONNECT_S if kind in ("disconnect", "pause-server", "cut", "deaf", "mute", "pause") else 0.0)

    def message(self, life: Life, delays: tuple[float, ...], now: float) -> None:
        """What became of one message to or from the process."""
        usual = 2 * self.plan.conditions.delay_s
        if not delays or max(delays) > usual:
            late_s = max(delays, default=0.0)
            life.bad_until = max(life.bad_until, now + late_s + 2 * self.plan.settings.report_s + usual)

    # --- excuses ------------------------------------------------------------------------------------------------------

    def of(self, life: Life, since: float, kinds: tuple[str, ...]) -> Trouble | None:
        """A misfortune of that kind that hit the process at that time or later."""
        for trouble in self.all:
            if trouble.until > since and trouble.misfortune.kind in kinds and is_hit(life, trouble.misfortune):
                return trouble
        return None

    def hears(self, life: Life, since: float) -> bool:
        """The process could talk to the server all the time since then."""
        is_new = life.started + RECONNECT_S > since
        return not is_new and life.bad_until <= since and self.of(life, since, CONTROL) is None

    def away_since(self, life: Life, now: float) -> float:
        """Since when the process may have been without the server, one misfortune after another; `now`: it is not."""
        since = now
        for trouble in sorted(self.all, key=lambda each: each.since, reverse=True):
            kind = trouble.misfortune.kind
            is_hers = kind in CONTROL and is_hit(life, trouble.misfortune)
            if trouble.until >= since and (is_hers or kind.endswith("server")):
                since = min(since, trouble.since)
        return since

    def serves(self, life: Life, since: float) -> bool:
        """Nothing kept anybody from reading from it."""
        return self.of(life, since, DATA) is None and self.unplugged(since) is None

    def unplugged(self, since: float) -> Trouble | None:
        """Somebody could not read from somebody."""
        for trouble in self.all:
            if trouble.until > since and trouble.misfortune.kind == "unplug":
                return trouble
        return None

    def before_pauses(self, since: float) -> float:
        """That time, or a lease before the server stood still, if it did so then: it heard of all that only later."""
        for trouble in reversed(self.all):
            if trouble.misfortune.kind == "pause-server" and trouble.since < since < trouble.until:
                since = trouble.since - self.plan.settings.lease_s
        return since

    def before_sessions(self, since: float, session_s: float) -> float:
        """That time, or earlier: who was gone by then has no session now. While no server listens none ends."""
        for trouble in reversed(self.all):
            if trouble.misfortune.kind.endswith("server") and trouble.until > since:
                since = min(since, trouble.since - session_s)
        return since

    def stood_still_s(self, since: float, now: float) -> float:
        """For how long at once the server stood still since then, and must have noticed: that ends no session."""
        kind, unnoticed_s = "pause-server", 2 * self.plan.settings.report_s
        pauses = (trouble for trouble in self.all if trouble.misfortune.kind == kind)
        spans = (min(t.until - self._aftermath(kind), now) - max(t.since, since) for t in pauses)
        return max(0.0, max(spans, default=0.0) - unnoticed_s)

    def prolonged(self, since: float, length_s: float, now: float) -> float:
        """The end of what began then and lasts so long: a pause of the server adds its own length."""
        until, over = since + length_s, since
        for trouble in self.all:
            if trouble.misfortune.kind == "pause-server" and trouble.since < until:
                began, ended = max(trouble.since, over), min(trouble.until - self._aftermath("pause-server"), now)
                until += max(0.0, ended - began)
                over = max(over, ended)
        return until

    def remembers(self, since: float) -> bool:
        """The server was not restarted; a pause is no reason to forget anybody."""
        restarts = (t for t in self.all if t.misfortune.kind == "restart-server")
        return all(trouble.until <= since for trouble in restarts)

    def server(self, since: float) -> bool:
        """The server was there and knew what it can know."""
        return self.server_until <= since


def is_hit(life: Life, misfortune: Misfortune) -> bool:
    """By name, by host, by site; as the one end or the other."""
    names = (str(life.me), life.hello.host, life.hello.site)
    return misfortune.target in names or (bool(misfortune.other) and misfortune.other in names)
