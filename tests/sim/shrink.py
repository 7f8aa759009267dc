"""A failing seed made small: whatever of its plan can go while the same promise is still broken, goes.

What was drawn is first written down: each message that was lost or late, each chunk that failed. Then misfortunes,
replicas, fates, steps, shards and chunks are taken away, times are rounded, and what is left is put to its default, as
long as the history still breaks the promise that it broke. The result is a text for `tests/simulation/plans`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from tensorhub.protocol.settings import Settings

from .cluster import Cluster
from .plan import Conditions, Fate, Plan, Replica, Step
from .plantext import render
from .runner import run_cluster

MAX_RUNS = 1500
ROUND_TO = (0, 1, 2, 3)  # digits after the point

T = TypeVar("T")


@dataclass(frozen=True)
class Shrunk:
    """The small plan, what it breaks, and how many histories it took."""

    plan: Plan
    error: str
    runs: int

    @property
    def text(self) -> str:
        return render(self.plan, self.error.splitlines()[0])


def what_broke(error: str) -> str:
    """Which promise, without the particulars: the same for two histories that break it in the same way."""
    found = re.match(r"OracleViolation: (.*?) broken at", error)
    if found is None:
        return error.split(":")[0] + error.strip().splitlines()[-1]
    code = re.search(r"failed with (\S+), though", error)
    return found[1] + (f" {code[1]}" if code else "")


def shrink(plan: Plan, tell: Callable[[str], None] = lambda line: None) -> Shrunk | None:
    """The smallest plan found that breaks the same promise; None if the plan breaks none."""
    return _Shrinker(plan, tell).run()


class _Shrinker:
    """Tries smaller plans, one after the other."""

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self.plan, self.tell = plan, tell
        self.error, self.goal, self.ended_s = "", "", 0.0
        self.runs = 0

    def run(self) -> Shrunk | None:
        cluster = Cluster(self.plan)
        first = run_cluster(cluster)
        if first.error is None:
            return None
        self.goal, self.error, self.ended_s = what_broke(first.error), first.error, first.virtual_s
        self._try(replace(self.plan, fates=tuple(cluster.fates.noted)))
        before = ""
        while before != render(self.plan) and self.runs < MAX_RUNS:
            before = render(self.plan)
            for step in (
                self._shorten,
                self._lose_misfortunes,
                self._lose_replicas,
                self._lose_fates,
                self._lose_steps,
            ):
                step()
                self.tell(f"{self.runs} runs, {len(render(self.plan).splitlines())} lines")
            self._make_small()
            self._make_plain()
        return Shrunk(self.plan, self.error, self.runs)

    def _try(self, plan: Plan) -> bool:
        """Keep the plan if it breaks the same promise."""
        if plan == self.plan or self.runs >= MAX_RUNS or not plan.replicas:
            return False
        self.runs += 1
        result = run_cluster(Cluster(plan))
        if result.error is None or what_broke(result.error) != self.goal:
            return False
        self.plan, self.error, self.ended_s = plan, result.error, result.virtual_s
        return True

    # --- taking away --------------------------------------------------------------------------------------------------

    def _without(self, items: Sequence[T], keep: Callable[[tuple[T, ...]], bool]) -> None:
        """Leave out halves, then quarters, down to single items; `keep` tries and says whether that was kept."""
        left = tuple(items)
        size = max(1, len(left))
        while size >= 1:
            start = 0
            while start < len(left):
                fewer = left[:start] + left[start + size :]
                if keep(fewer):
                    left = fewer
                else:
                    start += size
            size //= 2

    def _shorten(self) -> None:
        """Nothing after the end counts, and the storm may be over earlier; the calm stays long enough for everybody."""
        early = tuple(each for each in self.plan.misfortunes if each.at_s < self.ended_s)
        self._try(replace(self.plan, misfortunes=early))
        for share in (0.25, 0.5, 0.75, 0.9):
            self._try(self.plan.with_conditions(storm_s=round(share * self.plan.conditions.storm_s, 2)))

    def _lose_misfortunes(self) -> None:
        self._without(self.plan.misfortunes, lambda fewer: self._try(replace(self.plan, misfortunes=fewer)))

    def _lose_replicas(self) -> None:
        self._without(self.plan.replicas, lambda fewer: self._try(replace(self.plan, replicas=fewer)))

    def _lose_fates(self) -> None:
        if self.plan.fates is not None:
            self._without(self.plan.fates, lambda fewer: self._try(replace(self.plan, fates=fewer)))

    def _lose_steps(self) -> None:
        for index in range(len(self.plan.replicas)):
            self._without(self.plan.replicas[index].steps, lambda fewer, i=index: self._try_steps(i, fewer))  # type: ignore[misc]

    def _try_steps(self, index: int, steps: tuple[Step, ...]) -> bool:
        replicas = list(self.plan.replicas)
        replicas[index] = replace(replicas[index], steps=steps)
        return self._try(replace(self.plan, replicas=tuple(replicas)))

    # --- making small and plain ---------------------------------------------------------------------------------------

    def _make_small(self) -> None:
        conditions = self.plan.conditions
        for name, sizes in (("shards", (1, 2)), ("chunks", (1, 3))):
            for size in sizes:
                if size < getattr(conditions, name) and self._try(self.plan.with_conditions(**{name: size})):
                    break

    def _make_plain(self) -> None:
        """Defaults wherever they do, round numbers elsewhere."""
        for name in _other_than(self.plan.conditions, Conditions(), but=("storm_s", "calm_s", "shards", "chunks")):
            self._try(self.plan.with_conditions(**{name: getattr(Conditions(), name)}))
        for name in _other_than(self.plan.settings, Settings(), but=("lease_s", "report_s")):
            self._try(replace(self.plan, settings=replace(self.plan.settings, **{name: getattr(Settings(), name)})))
        for index, replica in enumerate(self.plan.replicas):
            for name in _other_than(replica, Replica("", ""), but=("model", "name", "is_trainer", "steps")):
                self._change_replica(index, name, getattr(Replica("", ""), name))
            for at in range(len(self.plan.replicas[index].steps)):
                self._make_step_plain(index, at)
        self._round()

    def _change_replica(self, index: int, name: str, value: object) -> None:
        replicas = list(self.plan.replicas)
        replicas[index] = replace(replicas[index], **{name: value})  # type: ignore[arg-type]
        self._try(replace(self.plan, replicas=tuple(replicas)))

    def _make_step_plain(self, index: int, at: int) -> None:
        for name in _other_than(self.plan.replicas[index].steps[at], Step(), but=("verb",)):
            steps = list(self.plan.replicas[index].steps)
            steps[at] = replace(steps[at], **{name: getattr(Step(), name)})
            self._try_steps(index, tuple(steps))

    def _round(self) -> None:
        for digits in ROUND_TO:
            if self._try(_rounded(self.plan, digits)):
                return
        for index, each in enumerate(self.plan.misfortunes):
            for digits in ROUND_TO[1:]:
                rounded = replace(each, at_s=round(each.at_s, digits), length_s=round(each.length_s, digits))
                others = self.plan.misfortunes
                if self._try(replace(self.plan, misfortunes=(*others[:index], rounded, *others[index + 1 :]))):
                    break


def _other_than(value: object, plain: object, *, but: tuple[str, ...]) -> Iterator[str]:
    for field in fields(value):  # type: ignore[arg-type]
        if field.name not in but and getattr(value, field.name) != getattr(plain, field.name):
            yield field.name


def _rounded(plan: Plan, digits: int) -> Plan:
    """All its times with so many digits after the point."""

    def near(value: float) -> float:
        return round(value, digits)

    def fate(each: Fate) -> Fate:
        return replace(each, delays=tuple(map(near, each.delays)))

    def step(each: Step) -> Step:
        return replace(each, rest_s=near(each.rest_s), cancel_s=near(each.cancel_s), skew_s=round(each.skew_s, 2))

    return replace(
        plan,
        misfortunes=tuple(replace(m, at_s=near(m.at_s), length_s=near(m.length_s)) for m in plan.misfortunes),
        fates=None if plan.fates is None else tuple(map(fate, plan.fates)),
        replicas=tuple(replace(r, steps=tuple(map(step, r.steps))) for r in plan.replicas),
        conditions=replace(plan.conditions, storm_s=near(plan.conditions.storm_s)),
    )
