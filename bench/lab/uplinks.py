"""Sites behind a slow uplink each: how many copies of a version leave the trainer's site, by the uplink's own count.

Everything else that leaves is counted too: headers, acknowledgements, the reference server's orders.
"""

from .director import Run
from .events import Published, Updated
from .goals import Finding
from .network import UPLINK, Place, sent_bytes

MAX_COPIES = 1.1


class UplinkRun(Run):
    """Counts what goes out of the trainer's site from the first version on that everybody has."""

    sent_bytes = 0

    def direct(self) -> None:
        """Until all are done; the uplink is read before and after."""
        before = sent_bytes(self.uplink, UPLINK)
        super().direct()
        self.sent_bytes = sent_bytes(self.uplink, UPLINK) - before

    @property
    def uplink(self) -> Place:
        """The router of the trainer's site."""
        assert self.ground.uplink is not None, "there are no uplinks here"
        return self.ground.uplink

    @property
    def copies(self) -> float:
        """That left, of each version that anybody has run."""
        versions = {e.version for e in self.events if isinstance(e, Updated) and e.sha256 and not e.is_first}
        return self.sent_bytes / self.scenario.size_bytes / max(1, len(versions))

    def judge(self) -> list[Finding]:
        """At most a tenth more than what one site needs."""
        sites, rollouts = self.scenario.far_sites, self.scenario.rollouts
        last = {e.version: e.ended for e in sorted(self._updates(), key=lambda event: event.ended)}
        first = {e.version: e.time for e in self.events if isinstance(e, Published)}
        took_s = [last[version] - first[version] for version in last if version in first]
        longest = f"; everybody had it within {max(took_s):.1f} s" if took_s else ""
        return [
            Finding(
                f"copies of each version that leave the trainer's site for {sites} sites with {rollouts} rollouts, "
                f"{self.strategy}",
                f"≤ {MAX_COPIES:g}",
                f"{self.copies:.2f}{longest} (one copy over an uplink: {self.scenario.uplink_transfer_s:.1f} s)",
                0 < self.copies <= MAX_COPIES,
            )
        ]

    def _updates(self) -> list[Updated]:
        return [e for e in self.events if isinstance(e, Updated) and e.sha256 and not e.is_first]
