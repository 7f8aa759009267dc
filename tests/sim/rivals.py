"""Weather for two who publish the same numbers, while the server dies and single shards are cut off from it.

Half of a publish that never finished, one that has finished but whose shard has not heard so, and one of the same
content by another: a server that is started again hears of them in any order, each shard at a time of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from .plan import Misfortune, Plan, Replica

LEASE_S = 3.0  # short, so that a shard can be away for longer than that
MAX_DEATHS = 5  # of the server, in one history
TWINS = 0.3  # share of the histories in which both publish the same content under a number
KILLED = 0.15  # share of those that are away who are killed instead


def with_rivals(plan: Plan, chance: Random) -> Plan:
    """The plan with such weather instead of its own. Messages fare as before."""
    shards = max(2, plan.conditions.shards)
    is_twin = chance.random() < TWINS
    trainers = [each for each in plan.replicas if each.is_trainer and each.model == "policy"]
    others = [each for each in plan.replicas if each not in trainers]
    first = trainers[0]
    second = trainers[1] if len(trainers) > 1 else replace(first, name="trainer-2", host="host-trainer-2")
    rivals = tuple(replace(_rival(each, chance), is_twin=is_twin) for each in (first, second))
    plan = plan.with_conditions(shards=shards, storm_s=max(12.0, plan.conditions.storm_s), calm_s=LEASE_S * 6 + 8)
    replicas = (*rivals, *others)
    most = max(plan.settings.max_workers, sum(plan.conditions.shards_in(each.cut) for each in replicas))
    settings = replace(plan.settings, lease_s=LEASE_S, report_s=LEASE_S / 5)
    plan = replace(plan, settings=replace(settings, max_workers=most), replicas=replicas)
    deaths = [bad for _ in range(chance.randint(1, MAX_DEATHS)) for bad in _death(plan, chance)]
    return replace(plan, misfortunes=tuple(sorted(deaths)))


def _rival(trainer: Replica, chance: Random) -> Replica:
    """It calls with less patience, and now and then one of its shards gives up."""
    steps = []
    for step in trainer.steps:
        is_cancelled = chance.random() < 0.3
        steps.append(
            replace(
                step,
                timeout_s=chance.choice((1.0, 3.0, 6.0)),
                skew_s=chance.choice((0.0, 0.1, 0.3)),
                cancel_s=chance.uniform(0.02, 0.6) if is_cancelled else 0.0,
                canceller=chance.randrange(4) if is_cancelled else -1,
            )
        )
    return replace(trainer, steps=tuple(steps), cut="")


def _death(plan: Plan, chance: Random) -> Iterator[Misfortune]:
    """The server dies. A shard of a rival has been cut off for long by then; others are away around that.

    Each is back at a time of its own, most of them before the new server stops listening. Now and then all others of
    that shard are away at first: then nobody can show what it really is.
    """
    at_s, down_s = chance.uniform(2.0, plan.conditions.storm_s), chance.uniform(0.02, 0.3) * LEASE_S
    yield Misfortune(at_s, "restart-server", "", down_s)
    half = chance.choice([each for each in plan.replicas if each.is_trainer])
    cut_off, share, is_first = (
        chance.randrange(plan.conditions.shards),
        chance.choice((0.1, 0.4)),
        chance.random() < 0.6,
    )
    for replica in plan.replicas:
        for shard in range(plan.conditions.shards_in(replica.cut)):
            back_s = at_s + down_s + chance.uniform(0.1, 1.1) * LEASE_S
            begins_s, is_away = at_s - chance.expovariate(4.0), chance.random() < share
            kind = "crash" if chance.random() < KILLED else chance.choice(("cut", "cut", "deaf", "pause"))
            if (replica, shard) == (half, cut_off):
                begins_s, is_away, kind = at_s - chance.uniform(0.3, 2.5) * LEASE_S, True, "cut"
                back_s = at_s if is_first else back_s
            elif shard == cut_off and is_first:
                is_away = True
            if is_away and begins_s > 0.0:
                yield Misfortune(begins_s, kind, f"{replica.model}/{replica.name}[{shard}]", back_s - begins_s)
