"""Every single fault in a small history, one history for each, and then pairs of them for as long as there is time.

The history is short: a trainer publishes, two rollouts follow, one of them leaves and comes back. A fault is a message
that is lost, late or doubled, a chunk or a copy that goes wrong, or a process that is killed, cut off or stands still
at the moment of some event. The server may be killed or stand still at each such moment too.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from tensorhub.protocol.settings import Settings

from .cluster import Cluster
from .plan import Conditions, Fate, Misfortune, Plan, Replica, Step
from .plantext import render
from .runner import SeedResult, run_cluster, run_plan

LEASE_S = 2.0
STORM_S = 4.0  # in which the faults come
LATE_S = (0.3, 1.4 * LEASE_S)  # a message is behind the next ones, and behind the end of a lease
MISFORTUNES = {"crash": (0.1, 0.6), "cut": (0.4, 1.5), "pause": (0.4, 1.5)}  # for so many leases
OF_SERVER = {"restart-server": (0.05, 1.2), "pause-server": (0.4, 1.5)}
CHUNK = 20  # histories that one process gets at a time

Fault = Fate | Misfortune


def base(*, one_sided: bool, copies: int) -> Plan:
    """The history without a fault."""
    settings = Settings(lease_s=LEASE_S, report_s=LEASE_S / 5, keep_held_s=LEASE_S / 5)
    conditions = Conditions(chunks=2, storm_s=STORM_S, calm_s=16.0, is_one_sided=one_sided, host_copies=copies)
    publish, update = Step("publish", rest_s=0.2), Step(rest_s=0.1)
    leaving = replace(update, closer=0, close_s=1.0)
    replicas = (
        Replica("policy", "trainer", is_trainer=True, host="host-t", steps=(publish,) * 6, resumes=True),
        Replica("policy", "rollout-0", steps=(update,) * 9),
        Replica("policy", "rollout-1", host="host-1", steps=(update, update, leaving, *(update,) * 6)),
    )
    return Plan("sweep", settings, conditions, replicas, fates=())


def faults_of(plan: Plan) -> list[Fault]:
    """All single faults that can strike the history, in one order."""
    cluster = Cluster(plan, trace=True)
    run_cluster(cluster)
    found: list[Fault] = []
    for (process, what), count in cluster.fates.counts.items():
        for number in range(1, count + 1):
            if what in ("up", "down"):
                late = [(late_s,) for late_s in LATE_S]
                found += [Fate(process, what, number, delays) for delays in ((), *late, (0.01, 0.1))]
            elif what in ("error", "copy") or (what == "corrupt" and plan.conditions.verifies):
                found.append(Fate(process, what, number, ()))
    moments = sorted({float(line[:10]) for line in cluster.world.lines if float(line[:10]) < STORM_S})
    workers = [f"{each.model}/{each.name}[0]" for each in plan.replicas]
    for at_s in moments:
        after_s = at_s + 0.001
        for kind, lengths in MISFORTUNES.items():
            found += [Misfortune(after_s, kind, each, length * LEASE_S) for each in workers for length in lengths]
        for kind, lengths in OF_SERVER.items():
            found += [Misfortune(after_s, kind, "", length * LEASE_S) for length in lengths]
    return found


def struck(plan: Plan, *faults: Fault) -> Plan:
    """The history with these faults."""
    misfortunes = tuple(sorted(each for each in faults if isinstance(each, Misfortune)))
    return replace(plan, misfortunes=misfortunes, fates=tuple(each for each in faults if isinstance(each, Fate)))


def plans(seed: int = 1) -> Iterator[Plan]:
    """One fault each, those of both kinds of source in a random order; then pairs, without an end."""
    chance = random.Random(seed)
    bases = [base(one_sided=one_sided, copies=copies) for one_sided in (True, False) for copies in (1, 0)]
    single = [(plan, fault) for plan in bases for fault in faults_of(plan)]
    chance.shuffle(single)
    yield from (struck(plan, fault) for plan, fault in single)
    while True:
        plan, fault = chance.choice(single)
        _, other = chance.choice(single)
        yield struck(plan, fault, other)


def sweep(minutes: float, jobs: int) -> tuple[int, str]:
    """Run them until time is up. Returns how many, and the first failure with its plan as text, if there is one."""
    until, done, all_plans = time.monotonic() + 60 * minutes, 0, plans()
    with ProcessPoolExecutor(jobs) as pool:
        while time.monotonic() < until:
            some = [next(all_plans) for _ in range(jobs * CHUNK)]
            for plan, result in zip(some, pool.map(_run, some, chunksize=CHUNK), strict=True):
                done += 1
                if not result.ok:
                    return done, render(plan, str(result.error).splitlines()[0])
    return done, ""


def _run(plan: Plan) -> SeedResult:
    return run_plan(plan)
