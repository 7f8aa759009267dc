"""What is done to the processes while they work: spot replicas that join and are killed, storms, a seed that dies."""

import random
import time
from dataclasses import dataclass

from ..demo.processes import ProcessFailed
from .director import LOOK_S, Run, wait
from .events import Seen, Updated
from .network import Place
from .scenarios import MIB, Scenario
from .wan import COUNT_S

FROM_SHARE, TO_SHARE = 0.5, 0.9  # of a crossing, to kill in
# Between two looks pass LOOK_S and COUNT_S, on a busy machine twice that: within 0.4 of a crossing must be two looks.
MIN_CROSSING_S = 4 * (LOOK_S + COUNT_S) / (TO_SHARE - FROM_SHARE)


@dataclass
class Spot:
    """One place for replicas that come and go. `random` makes the same fates for every strategy."""

    place: Place
    random: random.Random
    due_at: float
    name: str = ""  # of who is there; empty: nobody
    is_joined: bool = False
    lives: int = 0


class ElasticRun(Run):
    """Spot replicas join and are killed until time is up; a replica dies some time after it has its first version."""

    def direct(self) -> None:
        """Until the duration is over."""
        scenario, began_at = self.scenario, time.monotonic()
        spots = []
        for index, place in enumerate(self.ground.rollouts[scenario.rollouts :]):
            fate = random.Random(1000 * scenario.seed + index)
            spots.append(Spot(place, fate, began_at + fate.uniform(0, scenario.gap_s[1])))
        while time.monotonic() < began_at + scenario.duration_s:
            time.sleep(LOOK_S)
            self.check()
            for spot in spots:
                self.act(spot)

    def act(self, spot: Spot) -> None:
        """What is due at that place."""
        moment = time.monotonic()
        if spot.name and not spot.is_joined:
            spot.is_joined = any(isinstance(e, Updated) and e.process == spot.name for e in self.events)
            spot.due_at = moment + spot.random.uniform(*self.scenario.life_s)
        elif moment < spot.due_at:
            return
        elif spot.name:
            self.kill(spot.name)
            spot.name, spot.is_joined = "", False
            spot.due_at = moment + spot.random.uniform(*self.scenario.gap_s)
        else:
            spot.lives += 1
            spot.name = f"spot-{spot.place.name}-{spot.lives}"
            self.add(spot.name, spot.place)

    def add(self, name: str, place: Place) -> None:
        """A spot replica, from now on."""
        self.note(name, "started")
        self.nursery.start(self.job(name, "rollout", place, is_late=True, is_reliable=False), place)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.note(name, "killed")
        self.nursery.kill(name)


class SeedKilledRun(Run):
    """The first worker that has read half of a version across the WAN, and not yet all, is killed.

    How far it is the WAN itself tells, by the bytes that it has carried: reports come once a second, and with few or
    large chunks all of them may arrive between two.
    """

    killed_version: int | None = None
    _crossing: tuple[int, int] = (-1, 0)  # version under way, and what the WAN had carried when it was first seen

    @staticmethod
    def why_not(scenario: Scenario) -> str | None:
        """Why the middle of a crossing cannot be hit, or None."""
        if scenario.wan_transfer_s >= MIN_CROSSING_S:
            return None
        return (
            f"{scenario.size_bytes / MIB:g} MiB cross the WAN within {scenario.wan_transfer_s:.2f} s: to hit the "
            f"middle takes {MIN_CROSSING_S:g} s, so {MIN_CROSSING_S * scenario.wan_mbit / 8:.0f} MiB or more"
        )

    def direct(self) -> None:
        """Kill, then wait until the others have the last version."""
        wait(self._has_killed, "a read across the WAN that is half done", self.check, self.scenario.most_s)
        awaited = self.scenario.rollouts  # the trainer, and all rollouts but one
        wait(lambda: self.ended() >= awaited, f"the end of {self.strategy}", self.check, self.scenario.most_s)

    def _has_killed(self) -> bool:
        seen = [event for event in self.events if isinstance(event, Seen) and event.time > self.began_at]
        for read in seen[-1].reads if seen else []:
            if read.is_cross_site:
                carried = self._carried_bytes()
                if self._crossing[0] != read.version:
                    self._crossing = (read.version, carried)
                share = (carried - self._crossing[1]) / self.scenario.size_bytes
                if FROM_SHARE <= share < TO_SHARE:
                    self.note(read.target, "killed")
                    self.nursery.kill(read.target)
                    self.killed_version = read.version
                    return True
        if self.ended() > self.scenario.rollouts:
            raise ProcessFailed("all is over, and no read across the WAN was seen half done")
        return False

    def _carried_bytes(self) -> int:
        """By the WAN, to the rollouts' site."""
        assert self.ground.wan_counts is not None, "a seed is killed where there is a WAN"
        return int(self.ground.wan_counts.read_text().split()[0])
