"""Weather in which little happens but that the server dies and is soon back, again and again, with newcomers around it.

Where everybody lives a roll call can be answered, so a server goes on long before a lease is over. Whoever came right
before the last one died, was unheard of and is cut off now, or was heard only by a life that died at once, must not be
forgotten.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from .plan import Misfortune, Plan, Replica, Step

ABSENCE = 1.2, 4.0  # a server that stays away is gone for so many leases
LEASE_S = 4.0  # long enough for a few restarts within one
MAX_DEATHS = 6  # in one history
UNHEARD = 0.5  # share of the newcomers of whom the others hear nothing until the server dies


def with_restarts(plan: Plan, chance: Random) -> Plan:
    """The plan with such weather instead of its own. Messages fare as before."""
    newcomers = _newcomers(plan, chance)
    named = {(each.model, each.name): each for each in (*plan.replicas, *newcomers)}
    replicas = tuple(named.values())
    found = [each for newcomer in newcomers for each in _death(plan, chance, replicas, newcomer)]
    found += [each for _ in range(chance.randint(1, MAX_DEATHS - 2)) for each in _death(plan, chance, replicas, None)]
    most = max(plan.settings.max_workers, sum(plan.conditions.shards_in(each.cut) for each in replicas))
    settings = replace(plan.settings, lease_s=LEASE_S, report_s=LEASE_S / 5)
    plan = plan.with_conditions(
        calm_s=LEASE_S * 6 + 8,
        chunk_s=chance.uniform(0.1, 1.0) * LEASE_S / plan.conditions.chunks,  # many a read outlives a server
        is_one_sided=chance.random() < 0.8,  # and its source would not notice
    )
    settings = replace(settings, max_workers=most)
    return replace(plan, settings=settings, replicas=replicas, misfortunes=tuple(sorted(found)))


def with_absences(plan: Plan, chance: Random) -> Plan:
    """The plan with a server that stays away for longer than a lease. Shards may be cut off, or killed, around that."""
    lease_s = plan.settings.lease_s
    verifies = chance.random() < 0.9 or plan.conditions.corruption > 0
    plan = plan.with_conditions(storm_s=max(12.0, 8 * lease_s), calm_s=lease_s * 6 + 8, verifies=verifies)
    plan = plan.with_conditions(loss=0.0, long_delay=0.0)
    patient = [replace(each, steps=tuple(_patient(plan, each, chance))) for each in plan.replicas]
    found, at_s = [], chance.uniform(2.0, 4.0)
    while at_s < plan.conditions.storm_s:
        away_s = chance.uniform(*ABSENCE) * lease_s
        found.append(Misfortune(at_s, "restart-server", "", away_s))
        if chance.random() < 0.5:
            away = chance.choice(plan.replicas)
            worker = f"{away.model}/{away.name}[{chance.randrange(plan.conditions.shards_in(away.cut))}]"
            kind, begins_s = chance.choice(("cut", "cut", "crash", "pause")), at_s + chance.uniform(-0.5, 1.2) * away_s
            found.append(Misfortune(max(1.0, begins_s), kind, worker, chance.uniform(0.2, 2.0) * lease_s))
        at_s += away_s + chance.uniform(0.5, 3.0) * lease_s
    return replace(plan, replicas=tuple(patient), misfortunes=tuple(sorted(found)))


def _patient(plan: Plan, replica: Replica, chance: Random) -> Iterator[Step]:
    """Trainers have time to wait for a server; now and then not quite."""
    for step in replica.steps:
        is_hurried = not replica.is_trainer or chance.random() < 0.05
        yield step if is_hurried else replace(step, timeout_s=6 * plan.settings.lease_s)


def _newcomers(plan: Plan, chance: Random) -> list[Replica]:
    """Who comes late: one or two of the rollouts, or a second trainer."""
    trainer = next(each for each in plan.replicas if each.is_trainer)
    able = [each for each in plan.replicas if not each.is_trainer][1:]
    if all(each.name != "trainer-2" for each in plan.replicas) and chance.random() < 0.4:
        able.append(replace(trainer, name="trainer-2", host="host-trainer-2", steps=trainer.steps[::-1]))
    chance.shuffle(able)
    return [replace(each, starts_s=chance.uniform(2.0, plan.conditions.storm_s - 1.0)) for each in able[:2]]


def _death(plan: Plan, chance: Random, replicas: tuple[Replica, ...], newcomer: Replica | None) -> Iterator[Misfortune]:
    """The server dies, perhaps twice; right after the newcomer has come, if there is one. Somebody is away then."""
    down_s = chance.uniform(0.02, 0.2) * LEASE_S
    at_s, away = chance.uniform(2.0, plan.conditions.storm_s), chance.choice(replicas)
    if newcomer is not None:
        away, has_called = newcomer, chance.random() < 0.7
        at_s = newcomer.starts_s + (chance.uniform(0.7, 2.2) if has_called else chance.uniform(0.0, 0.7))
    yield Misfortune(at_s, "restart-server", "", down_s)
    if newcomer is not None and chance.random() < UNHEARD:
        for other in replicas:
            if other is not newcomer and other.host != newcomer.host:
                yield Misfortune(newcomer.starts_s, "deaf", other.host, at_s - newcomer.starts_s)
    if chance.random() < 0.6:
        worker = f"{away.model}/{away.name}[{chance.randrange(plan.conditions.shards_in(away.cut))}]"
        target = chance.choice((worker, away.host))
        yield Misfortune(at_s - chance.uniform(-0.05, 0.2), "cut", target, chance.uniform(0.2, 0.9) * LEASE_S)
    if chance.random() < 0.5:
        again_s = at_s + down_s + chance.uniform(0.02, 0.4 * LEASE_S)
        yield Misfortune(again_s, "restart-server", "", chance.uniform(0.02, 0.2) * LEASE_S)
