"""The kill storm: every second a random rollout is killed or one is added, while versions are published. Then calm.

What must hold afterwards: every rollout that lives has the latest version within two transfers, no byte was ever wrong,
nothing is left behind (processes, descriptors, host copies), and the newest version was never lost meanwhile, because
the trainer, which is the only reliable one, lived.
"""

import contextlib
import os
import random
import re
import time
from collections import Counter

from ..demo.processes import ProcessFailed
from .director import LOOK_S, wait
from .events import Ended, Fault, Published, Seen, Updated
from .faults import ElasticRun
from .goals import Finding
from .network import run as ip

EVERY_S = 1.0
CALM_S = 30.0
MIN_ALIVE = 2
MAX_TRANSFERS = 2.0
SETTLE_S = 5.0  # until who has left is gone from everybody's tables: a lease
TRAINER, SERVER = "trainer", "server"

Kinds = Counter[str]
MEMORY = "/memfd:tensorhub (deleted)"  # of a host copy


def kinds_open(pid: int) -> Kinds:
    """How many descriptors of each kind a process has open, as /proc names them without numbers."""
    found: Kinds = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found[re.sub(r":\[\d+\]$", "", os.readlink(entry.path))] += 1
    return found


def judge_open(before: dict[str, Kinds], after: dict[str, Kinds], copies: dict[str, list[int]]) -> Finding:
    """Whether each process has open what it had before, beside memory: a file for each host copy it now has.

    Who has copies keeps the memory of one that was dropped, for the next.
    """
    texts, fits = [], True
    for name, kinds in after.items():
        more = kinds - before[name]
        kept = len(copies.get(name, ()))
        most = kept + 1 if kept else 0
        told = ", ".join(f"{count} {kind} of {kinds[kind]}" for kind, count in more.items())
        text = f"{name} {before[name].total()} → {kinds.total()}"
        texts.append(text + (f" ({told} more; copies: {kept})" if more else ""))
        others = kinds.total() - kinds[MEMORY]
        fits &= others <= before[name].total() - before[name][MEMORY] and kinds[MEMORY] <= most
    what = "open descriptors, before the first rollout and after the last"
    return Finding(what, "no more, but for copies", ", ".join(texts), fits)


class StormRun(ElasticRun):
    """One storm."""

    def start_trainer(self) -> None:
        """Alone first: what the two that live throughout have open then is what they may have open at the end."""
        super().start_trainer()
        is_published = lambda: any(isinstance(event, Published) for event in self.events)  # noqa: E731 - used once
        wait(is_published, "the first version", self.check)
        self.open_before = self.settle_open(None)

    def direct(self) -> None:
        """Storm, calm, and the end of all rollouts."""
        self.fate = random.Random(self.scenario.seed)
        self.failure = ""
        self.strikes = 0
        self.free = list(self.ground.rollouts[self.scenario.rollouts :])
        self.places = {f"rollout-{i}": self.ground.rollouts[i] for i in range(self.scenario.rollouts)}
        began_at = time.monotonic()
        while time.monotonic() < began_at + self.scenario.duration_s:
            self.strikes += 1
            self.strike()
            while time.monotonic() < began_at + self.strikes * EVERY_S:
                time.sleep(LOOK_S)
                self.check()
        try:
            self.calm()
        except ProcessFailed as error:
            self.failure = str(error)

    def strike(self) -> None:
        """Kill one or add one, as chance has it and places allow."""
        names = sorted(self.places)
        if self.free and (len(names) <= MIN_ALIVE or self.fate.random() < 0.5):
            place, name = self.free.pop(self.fate.randrange(len(self.free))), f"storm-{self.strikes}"
            self.places[name] = place
            self.add(name, place)
        else:
            name = self.fate.choice(names)
            self.free.append(self.places.pop(name))
            self.kill(name)

    def calm(self) -> None:
        """The trainer makes one version more, and all that live must get it; then they leave."""
        self.nursery.finish(TRAINER)
        wait(self._is_last_published, "the trainer's last version", self.check, CALM_S)
        self.last = max(event.version for event in self.events if isinstance(event, Published))
        wait(self._is_converged, f"version {self.last} at every rollout that lives", self.check, CALM_S)
        self.copies_after = self.settle_copies()
        for name in self.places:
            self.nursery.leave(name)
        wait(lambda: not set(self.places) & set(self.nursery.living), "the end of the rollouts", self.check, CALM_S)
        self.open_after = self.settle_open(self.open_before)
        self.copies_at_end = self._copies()
        self.left_over = self.strangers()

    def settle_copies(self) -> dict[str, list[int]]:
        """Host copies by replica, once nobody has one of an older version any more, or a few seconds have passed.

        What the server has shown so far may be older than the last update, and a copy goes in two steps after that.
        """
        seen_by_now = sum(isinstance(event, Seen) for event in self.events)
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            is_new = sum(isinstance(event, Seen) for event in self.events) > seen_by_now
            if is_new and not any(self._older(self._copies()).values()):
                break
            time.sleep(LOOK_S)
            self.check()
        return self._copies()

    def _older(self, copies: dict[str, list[int]]) -> dict[str, list[int]]:
        return {name: [version for version in found if version != self.last] for name, found in copies.items()}

    def _copies(self) -> dict[str, list[int]]:
        """Versions that each replica has host copies of, as the server last showed them."""
        return next((event.copies for event in reversed(self.events) if isinstance(event, Seen)), {})

    def _is_last_published(self) -> bool:
        return any(isinstance(event, Ended) and event.process == TRAINER for event in self.events)

    def _is_converged(self) -> bool:
        have = {e.process for e in self.events if isinstance(e, Updated) and e.version == self.last}
        return set(self.places) <= have

    def settle_open(self, goal: dict[str, Kinds] | None) -> dict[str, Kinds]:
        """Open descriptors of the two that live throughout: the fewest seen of each within a few seconds."""
        pids = {TRAINER: self.nursery.pid(TRAINER), SERVER: self.processes.pid(SERVER)}
        fewest: dict[str, Kinds] = {}
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and (goal is None or fewest != goal):
            for name, pid in pids.items():
                assert pid is not None, f"{name} has ended"
                kinds = kinds_open(pid)
                fewest[name] = min(kinds, fewest.get(name, kinds), key=Counter.total)
            time.sleep(LOOK_S)
            self.check()
        return fewest

    def strangers(self) -> list[int]:
        """Processes in the places that nobody knows of."""
        known = {self.nursery.pid(name) for name in self.nursery.living} | {self.processes.pid(SERVER)}
        everywhere = (self.ground.trainer, self.ground.server, *self.ground.rollouts)
        found = {int(word) for place in everywhere for word in ip("ip", "netns", "pids", place.namespace).split()}
        return sorted(found - {pid for pid in known if pid is not None})

    # --- the verdict --------------------------------------------------------------------------------------------------

    def judge(self) -> list[Finding]:
        """What held and what did not."""
        found = [Finding("everybody ended as told", "no failure", self.failure or "no failure", not self.failure)]
        if self.failure:
            return found
        faults = Counter(event.what for event in self.events if isinstance(event, Fault))
        text = (
            f"{self.strikes} in {self.scenario.duration_s:.0f} s: {faults['killed']} killed, {faults['started']} added"
        )
        found.append(
            Finding("a kill or an addition a second", "1/s", text, self.strikes >= self.scenario.duration_s - 1)
        )
        return [*found, self._converged(), self._retained(), *self._nothing_left()]

    def _converged(self) -> Finding:
        last = [
            e for e in self.events if isinstance(e, Updated) and e.version == self.last and e.process in self.places
        ]
        most_s = max(event.stall_s for event in last if event.sha256)
        transfers = most_s / self.scenario.transfer_s
        return Finding(
            f"all {len(self.places)} rollouts that live have the latest version ({self.last}), longest update",
            f"≤ {MAX_TRANSFERS:g} transfers",
            f"{most_s:.2f} s = {transfers:.2f} transfers",
            transfers <= MAX_TRANSFERS,
        )

    def _retained(self) -> Finding:
        seen = [event for event in self.events if isinstance(event, Seen) and event.latest >= 0]
        lost = [event.latest for event in seen if not event.has_latest]
        text = f"{len(seen)} looks, {len(lost)} without a holder" + (f" (version {lost[0]})" if lost else "")
        return Finding("the newest version was held somewhere all the time", "always", text, bool(seen) and not lost)

    def _nothing_left(self) -> list[Finding]:
        kept = ", ".join(f"{name}: {found}" for name, found in self._older(self.copies_after).items() if found)
        return [
            judge_open(self.open_before, self.open_after, self.copies_at_end),
            Finding("host copies of older versions once all have the latest", "none", kept or "none", not kept),
            Finding("processes that nobody knows of", "none", str(self.left_over or "none"), not self.left_over),
        ]
