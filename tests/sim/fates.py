"""What becomes of each message, chunk and copy: drawn from streams of their own, or as the plan says.

The streams are those of one process and one direction: a message more of one leaves the fates of the others. What was
drawn other than well is noted: a history that is to be made smaller takes that list, and tries how much of it it needs.
"""

from random import Random

from .plan import Fate, Plan
from .world import World


class Fates:
    """Asked once for each message, chunk and copy."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.conditions = plan.conditions
        self.lease_s = plan.settings.lease_s
        self.is_stormy = True
        self.noted: list[Fate] = []
        self._planned = None if plan.fates is None else {(f.process, f.direction, f.number): f for f in plan.fates}
        self.counts: dict[tuple[str, str], int] = {}

    def delays(self, process: str, direction: str) -> tuple[float, ...]:
        """How late each copy of one message to ("down") or from ("up") the process is; no copy: it is lost."""
        conditions, number = self.conditions, self._next(process, direction)
        usual_s = conditions.delay_s if self.is_stormy else min(conditions.delay_s, 0.02)
        well = (self.world.stream(f"{direction} {process}").uniform(0.5, 1.5) * usual_s,)
        if self._planned is not None:
            found = self._planned.get((process, direction, number))
            return found.delays if found is not None else well
        if not self.is_stormy:
            return well
        delays = self._drawn(well[0], self.world.stream(f"fate {direction} {process}"))
        if delays != well:
            self.noted.append(Fate(process, direction, number, delays))
        return delays

    def _drawn(self, well_s: float, chance: Random) -> tuple[float, ...]:
        """As the conditions have it: lost, doubled, late."""
        conditions, late = self.conditions, []
        for _ in range(2):
            kind, leases = chance.random(), 2 * chance.random()
            late.append(leases * self.lease_s if kind < conditions.long_delay else 0.0)
        kind, is_lost = chance.random(), chance.random() < conditions.loss
        if is_lost:
            return ()
        first, second = well_s + late[0], 2 * well_s + late[1]
        return (first, second) if kind < conditions.duplication else (first,)

    def fails(self, process: str, what: str, probability: float) -> bool:
        """Whether this chunk or copy of that process goes wrong in that way."""
        drawn, number = self.world.stream(f"{what} {process}").random(), self._next(process, what)
        if self._planned is not None:
            return (process, what, number) in self._planned
        is_bad = self.is_stormy and drawn < probability
        if is_bad:
            self.noted.append(Fate(process, what, number, ()))
        return is_bad

    def _next(self, process: str, what: str) -> int:
        self.counts[process, what] = number = self.counts.get((process, what), 0) + 1
        return number
