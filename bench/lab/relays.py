"""A relay whose link becomes slow in mid-transfer, and what it costs a replica to keep what is established."""

from .director import Run
from .events import Fault, Published, Seen, SeenRead, Updated
from .goals import Finding
from .network import Place
from .scenarios import Scenario
from .summary import mean

SLOWED = "slowed"
SLOWER = 4  # times
FROM_SHARE, TO_SHARE = 0.2, 0.6  # of a transfer, to slow it in
MAX_RATIO = 1.3


class SlowRelayRun(Run):
    """In the last version a rollout from which another one reads loses three quarters of its link, both ways.

    The version before it, which nobody disturbs, is what the others are measured by.
    """

    slowed = ""

    @staticmethod
    def why_not(scenario: Scenario) -> str | None:
        """Why nothing could be seen, or None."""
        if scenario.rollouts < 3 or scenario.versions < 2:
            return "it takes a relay, who reads behind it, and another one; and a version to compare with"
        return None

    def check(self) -> None:
        super().check()
        if not self.slowed and self.began_at:
            self._slow()

    def _slow(self) -> None:
        seen = [event for event in self.events if isinstance(event, Seen)]
        reads = {read.target: read for read in seen[-1].reads if read.version == self.scenario.versions} if seen else {}
        for target, read in sorted(reads.items()):
            is_relay = any(other.source == target for other in reads.values())
            if is_relay and read.source == "trainer" and FROM_SHARE <= share(read) < TO_SHARE:
                assert self.ground.network is not None, "links are made by somebody"
                self.slowed = target
                self.ground.network.reshape(self._place(target), self.scenario.rate_mbit // SLOWER)
                self.note(target, SLOWED)
                return

    def direct(self) -> None:
        """And give the link back its rate: the next strategy has the same places."""
        try:
            super().direct()
        finally:
            if self.slowed:
                assert self.ground.network is not None, "links are made by somebody"
                self.ground.network.reshape(self._place(self.slowed), self.scenario.rate_mbit)

    def _place(self, rollout: str) -> Place:
        return self.ground.rollouts[int(rollout.rpartition("-")[2])]

    def took_s(self, version: int) -> dict[str, float]:
        """From its publication until each rollout had it."""
        (published,) = [e.time for e in self.events if isinstance(e, Published) and e.version == version]
        return {
            e.process: e.ended - published
            for e in self.events
            if isinstance(e, Updated) and e.version == version and e.sha256
        }

    def judge(self) -> list[Finding]:
        """Whether the others had to wait."""
        text = f"the others, beside a relay at a quarter of its rate, over what they take without it, {self.strategy}"
        wanted = f"≤ {MAX_RATIO:g}"
        if not self.slowed:
            return [Finding(text, wanted, "no relay was seen in mid-transfer", holds=False)]
        before, after = self.took_s(self.scenario.versions - 1), self.took_s(self.scenario.versions)
        usual, found = max(before.values()), max(s for name, s in after.items() if name != self.slowed)
        itself = f"; {self.slowed} itself {after[self.slowed]:.1f} s" if self.slowed in after else ""
        fault = next(e.time for e in self.events if isinstance(e, Fault) and e.what == SLOWED)
        left = [e.time - fault for e in self._seen_since(fault) if not any(r.source == self.slowed for r in e.reads)]
        moved = f", left after {left[0]:.1f} s" if left else ", never left"
        line = f"{found:.1f} s / {usual:.1f} s = {found / usual:.2f}{moved}{itself}"
        return [Finding(text, wanted, line, found <= MAX_RATIO * usual)]

    def _seen_since(self, time: float) -> list[Seen]:
        return [event for event in self.events if isinstance(event, Seen) and event.time > time]


def share(read: SeenRead) -> float:
    """How much of it is done."""
    return read.done / read.chunks if read.chunks else 0.0


class EstablishedRun(Run):
    """Tells the updates of the replicas that kept a copy for the others from those of the rest."""

    def judge(self) -> list[Finding]:
        """No goal: what it costs."""
        kept = {name for e in self.events if isinstance(e, Seen) for name, versions in e.copies.items() if versions} - {
            "trainer"
        }
        stalls = [(e.process, e.stall_s) for e in self.events if isinstance(e, Updated) and e.sha256 and not e.is_first]
        paid, free = ([s for name, s in stalls if (name in kept) == is_payer] for is_payer in (True, False))
        parts = [
            f"{who}: mean {mean(found):.2f} s, longest {max(found):.2f} s over {len(found)}"
            for who, found in (("who kept a copy", paid), ("the others", free))
            if found
        ]
        text = f"stall of an update, {self.strategy}; {len(kept)} of {self.scenario.rollouts} kept a copy at some time"
        return [Finding(text, "no goal, shown", "; ".join(parts) or "no update", holds=bool(stalls))]
