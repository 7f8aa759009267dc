"""Many readers that begin together, each on a link of its own: the last is done little later than one alone would be.

The one alone is measured on the same links, in the same run of the laboratory, with the same layouts.
"""

from pathlib import Path
from statistics import median

from .director import Ground, Run
from .events import Published, Updated
from .goals import Finding
from .scenarios import Scenario

MAX_RATIO = 1.15


class FanOutRun(Run):
    """Measures from each publication until the last rollout has the version."""

    def __init__(
        self, scenario: Scenario, strategy: str, ground: Ground, folder: Path, alone: dict[str, float] | None = None
    ) -> None:
        """`alone` is what one rollout took, by strategy: a run of one writes it, a run of more is held to it."""
        super().__init__(scenario, strategy, ground, folder)
        self.alone = {} if alone is None else alone

    def took_s(self) -> list[float]:
        """Of each version, the first one not counted, until all rollouts had it."""
        published = {e.version: e.time for e in self.events if isinstance(e, Published)}
        updates = [e for e in self.events if isinstance(e, Updated) and e.sha256 and not e.is_first]
        ended = {version: [e.ended for e in updates if e.version == version] for version in published}
        return [
            max(times) - published[version] for version, times in ended.items() if len(times) == self.scenario.rollouts
        ]

    def judge(self) -> list[Finding]:
        """At most so much more than one alone."""
        took_s = self.took_s()
        if self.scenario.rollouts == 1:
            if took_s:
                self.alone[self.strategy] = median(took_s)
            return []
        text = f"the last of {self.scenario.rollouts} rollouts, over one alone on the same links, {self.strategy}"
        alone_s, wanted = self.alone.get(self.strategy), f"≤ {MAX_RATIO:g}"
        if not took_s or alone_s is None:
            return [Finding(text, wanted, "no version that all had got was seen", holds=False)]
        found = f"{median(took_s):.2f} s / {alone_s:.2f} s = {median(took_s) / alone_s:.2f}"
        link = f"one copy over a link at its rate: {self.scenario.transfer_s:.2f} s"
        return [
            Finding(text, wanted, f"{found} ({link}; median of {len(took_s)})", median(took_s) <= MAX_RATIO * alone_s)
        ]
