"""What a seed decides: a plan. Each part has a stream of chance of its own: a draw more in one leaves the others."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from random import Random

from tensorhub.protocol.messages import PREFETCHED
from tensorhub.protocol.settings import Settings

from .plan import Conditions, Misfortune, Plan, Replica, Step
from .restarts import with_absences, with_restarts
from .rivals import with_rivals

STEPS = 40  # of one program, drawn ahead: more than a storm has time for
FAIR = 0.08  # share of the seeds in which nothing bad happens
WIDE, LONG, GREAT = 0.02, 0.02, 0.003  # shares of the seeds with eight shards, with sixteen rollouts, with both
RESTARTS = 0.12  # share of the others in which the server is restarted, and little else happens
RIVALS, RIVALS_FROM = 0.1, 4_000_000  # share of those from that seed on: the ones before keep their histories
ABSENCES, ABSENCES_FROM = 0.1, 5_000_000  # the same of a server that stays away
CLAIMING = (0.0, 0.5, 1.0)  # shares of a trainer's steps that go by `mutating`
BREAKING = 0.1  # share of these that raise
MISSING = 0.04  # share of a trainer's calls that one shard fails to make
RESUMING = 0.5  # share of the trainers that go on with what the fleet has after a death
HASTY = 0.4  # share of the programs that call again at once after a failure
MIXED = 0.12  # share of the seeds with two ways to cut the tensors
UNEVEN = 0.5  # share of these in which the one way is of another number of shards
STAYING = 0.2  # share of the others in which something bad stays to the end


def draw_plan(seed: int) -> Plan:
    """The plan of one seed."""
    shape, climate = Random(f"{seed} shape"), Random(f"{seed} climate")
    is_fair, kind = shape.random() < FAIR, shape.random()
    is_wide, is_long = kind < WIDE + GREAT, WIDE < kind < WIDE + GREAT + LONG
    settings = _settings(shape)
    conditions = _sharing(_conditions(shape, climate, settings, is_wide), Random(f"{seed} sharing"))
    replicas = _replicas(shape, seed, most=16 if is_long else 2 if is_wide else 4, is_fair=is_fair)
    if conditions.maps:
        replicas = _together(replicas, Random(f"{seed} together"))
    replicas = tuple(_with_haste(seed, each) for each in replicas)
    replicas = _mixed(replicas, Random(f"{seed} cuts"))
    counts = Random(f"{seed} counts")
    if len({each.cut for each in replicas}) > 1 and counts.random() < UNEVEN:
        conditions = replace(conditions, shards_b=counts.randint(1, 4))
    most = sum(conditions.shards_in(each.cut) for each in replicas)
    if shape.random() < 0.1:
        settings = replace(settings, max_workers=most)
    plan = Plan(f"{seed}", settings, conditions, replicas)
    if is_fair:
        return _fair(plan)
    rivals = Random(f"{seed} rivals")
    if seed >= RIVALS_FROM and rivals.random() < RIVALS and not any(each.cut for each in plan.replicas):
        return with_rivals(plan, rivals)
    absences = Random(f"{seed} absences")
    if seed >= ABSENCES_FROM and (seed < 2 * ABSENCES_FROM or absences.random() < ABSENCES):
        return with_absences(plan, absences)
    restarts = Random(f"{seed} restarts")
    if restarts.random() < RESTARTS:
        return with_restarts(plan, restarts)
    return replace(plan, misfortunes=tuple(sorted(_misfortunes(plan, Random(f"{seed} faults")))))


def is_mixed(seed: int) -> bool:
    """Whether its replicas cut the tensors in two ways."""
    if Random(f"{seed} cuts").random() >= MIXED:  # as `_mixed` begins: most need not be drawn whole
        return False
    return len({replica.cut for replica in draw_plan(seed).replicas}) > 1


def _settings(shape: Random) -> Settings:
    lease_s = shape.choice((1.0, 2.0, 2.0, 3.0, 3.0, 4.0))
    return Settings(
        lease_s=lease_s,
        report_s=lease_s / 5,
        avoid_s=shape.choice((0.3, 1.0)),
        keep_held_s=lease_s / 5,
        max_failures=shape.choice((1, 3, 8, 8)),
        max_versions=shape.choice((3, 256, 256, 256)),
    )


def _conditions(shape: Random, climate: Random, settings: Settings, is_wide: bool) -> Conditions:
    def sometimes(probability: float, most: float) -> float:
        return climate.uniform(0.1, 1.0) * most if climate.random() < probability else 0.0

    lease_s = settings.lease_s
    chunks = shape.choice((1, 3)) if is_wide else shape.choice((1, 3, 8, 20))
    verifies = shape.random() < 0.6
    return Conditions(
        shards=8 if is_wide else shape.choice((1, 1, 2, 2, 3)),
        chunks=chunks,
        storm_s=shape.uniform(5, 8) if is_wide else shape.uniform(8, 22),
        calm_s=lease_s * 6 + 8,
        chunk_s=shape.choice((0.005, 0.03, 0.15, 1.5 * lease_s / max(chunks, 3))),
        delay_s=shape.choice((0.001, 0.01, 0.1)),
        loss=sometimes(0.4, 0.2),
        duplication=sometimes(0.4, 0.2),
        long_delay=sometimes(0.3, 0.25),
        read_error=sometimes(0.4, 0.02),
        corruption=sometimes(0.4, 0.03) if verifies else 0.0,
        copy_error=sometimes(0.2, 0.3),
        stuck_stop=sometimes(0.2, 0.5),
        is_one_sided=shape.random() < 0.6,
        verifies=verifies,
        is_shared=shape.random() < 0.5,
        uplink=shape.choice((0.0, 0.0, 0.5, 1.0)),
        drift=shape.choice((0.0, 0.02, 0.04)),
        clock_goes_back=shape.random() < 0.3,
        codec=shape.random() < 0.06,
        host_copies=shape.choice((0, 1, 2, 2, 3)),
        retain=shape.choice((1, 1, 1, 2)),
        prefetch=shape.choice(("seed", "seed", "always", "never")),
    )


def _sharing(conditions: Conditions, sharing: Random) -> Conditions:
    maps, unmappable = sharing.random() < 0.5, sharing.choice((0.0, 0.0, 0.3))
    if not maps:
        return conditions
    prefetch = sharing.choice(("always", conditions.prefetch))
    return replace(conditions, maps=True, unmappable=unmappable, prefetch=prefetch)


def _together(replicas: tuple[Replica, ...], sharing: Random) -> tuple[Replica, ...]:
    """Now and then all rollouts of a site are on one host."""
    if sharing.random() < 0.5:
        return replicas
    return tuple(each if each.is_trainer else replace(each, host=f"host-{each.site[5:]}") for each in replicas)


def _replicas(shape: Random, seed: int, *, most: int, is_fair: bool) -> tuple[Replica, ...]:
    models = ("policy", "draft") if shape.random() < 0.12 and most == 4 else ("policy",)
    rollouts = most if most == 16 else min(most, shape.choice((1, 2, 3, 3, 4)))
    sites, spot = shape.choice((1, 1, 2, 3)), shape.choice((0.0, 0.0, 0.5, 1.0))
    trainers = ("trainer", "trainer-2") if shape.random() < 0.12 else ("trainer",)
    racks, is_in_step, ahead = shape.choice((2, 8)), shape.random() < 0.3, shape.choice((0.0, 0.0, 0.5, 0.9))
    pins = shape.uniform(0.05, 0.5) if shape.random() < 0.3 else 0.0
    found = []
    for model in models:
        for name in trainers:
            steps = _trainer_steps(Random(f"{seed} app {model}/{name}"), pins, is_fair)
            steps = _with_claims(Random(f"{seed} claims {model}/{name}"), steps, is_fair)
            resumes = Random(f"{seed} resumes {model}/{name}").random() < RESUMING
            found.append(Replica(model, name, True, "site-0", f"host-{name}", steps=steps, resumes=resumes))
        for index in range(rollouts):
            site, host = f"site-{shape.randrange(sites)}", shape.randrange(racks)
            steps = _rollout_steps(Random(f"{seed} app {model}/rollout-{index}"), ahead, is_fair)
            steps = _with_waits(Random(f"{seed} waits {model}/rollout-{index}"), steps, is_fair)
            place = (site, f"host-{site[5:]}-{host}", shape.random() >= spot)
            found.append(Replica(model, f"rollout-{index}", False, *place, is_in_step, steps=steps))
    return tuple(found)


def _with_haste(seed: int, replica: Replica) -> Replica:
    haste = Random(f"{seed} haste {replica.model}/{replica.name}")
    return replace(replica, is_hasty=haste.random() < HASTY)


def _mixed(replicas: tuple[Replica, ...], cuts: Random) -> tuple[Replica, ...]:
    """Now and then trainers and rollouts are cut in different ways. Then all have the tensors that they should."""
    if cuts.random() >= MIXED:
        return replicas
    found = []
    for each in replicas:
        steps = tuple(replace(step, registers="same" if step.registers else "") for step in each.steps)
        cut = "a" if each.is_trainer and cuts.random() < 0.8 else cuts.choice("ab")
        found.append(replace(each, cut=cut, steps=steps))
    return tuple(found)


def _timeout_s(app: Random, is_fair: bool) -> float:
    return 0.0 if is_fair else app.choice((0.5, 2.0, 5.0, 12.0))


def _mischief(app: Random, step: Step, is_fair: bool) -> Step:
    """Now and then the program does what programs do."""
    kind = app.random()
    shard, seconds = app.randrange(0, 8), app.uniform(0.05, 3.0)
    if is_fair or kind > 0.1:
        return step
    if kind < 0.025:
        return replace(step, closer=shard, close_s=app.choice((0.5, 3.0)))
    if kind < 0.05:
        return replace(step, stray=shard)
    if kind < 0.08:
        return replace(step, cancel_s=seconds, canceller=app.choice((shard, -1)))
    return replace(step, registers=app.choice(("same", "same", "other")))


def _trainer_steps(app: Random, pins: float, is_fair: bool) -> tuple[Step, ...]:
    found = []
    for _ in range(STEPS):
        step = Step(
            verb="publish",
            timeout_s=_timeout_s(app, is_fair),
            rest_s=app.uniform(0, 1.0),
            skew_s=app.choice((0.0, 0.01, 0.3)),
            back=app.randrange(1, 3) if app.random() < 0.07 else 0,
            wishes=app.random() < pins,
        )
        found.append(_mischief(app, step, is_fair))
    return tuple(found)


def _with_claims(claims: Random, steps: tuple[Step, ...], is_fair: bool) -> tuple[Step, ...]:
    share, found = claims.choice(CLAIMING), []
    for step in steps:
        is_claimed, is_broken = claims.random() < share, claims.random() < BREAKING
        misses = claims.randrange(8) if claims.random() < MISSING and not is_fair else -1
        found.append(replace(step, claims=is_claimed, breaks=is_claimed and is_broken and not is_fair, misses=misses))
    return tuple(found)


def _rollout_steps(app: Random, ahead: float, is_fair: bool) -> tuple[Step, ...]:
    found = []
    for _ in range(STEPS):
        verb: str = app.choice(("update", "update", "update", "replicate"))
        spec: int | str = app.choice(("latest", "latest", "latest", "latest", "latest-1", -1))
        if spec == -1:
            spec = app.randrange(0, 6)
        if app.random() < ahead and (verb, spec) == ("update", "latest"):
            spec = PREFETCHED
        step = Step(
            verb=verb,
            spec=spec,
            timeout_s=_timeout_s(app, is_fair),
            rest_s=app.uniform(0, 1.5),
            skew_s=app.choice((0.0, 0.01, 0.3)),
            wishes=app.random() < 0.3,
        )
        found.append(_mischief(app, step, is_fair))
    return tuple(found)


def _with_waits(waits: Random, steps: tuple[Step, ...], is_fair: bool) -> tuple[Step, ...]:
    """Some of those that want a number wait for it. Who has all the time of the world would wait too long."""
    may_wait = [not is_fair and step.verb == "replicate" and isinstance(step.spec, int) for step in steps]
    return tuple(replace(step, waits=may and waits.random() < 0.5) for step, may in zip(steps, may_wait, strict=True))


def _fair(plan: Plan) -> Plan:
    faults = ("loss", "duplication", "long_delay", "read_error", "corruption", "copy_error", "stuck_stop")
    return plan.with_conditions(**dict.fromkeys(faults, 0.0), delay_s=0.001)


# --- misfortunes ------------------------------------------------------------------------------------------------------

# kind: share of the seeds that have it, most of them per second
CLIMATE = {
    "mute": (0.25, 0.3),
    "deaf": (0.25, 0.3),
    "cut": (0.35, 0.3),
    "unplug": (0.3, 0.3),
    "disconnect": (0.35, 0.5),
    "pause": (0.3, 0.3),
    "crash": (0.5, 0.25),
    "slow": (0.2, 0.3),
    "stutter": (0.15, 0.2),
    "restart-server": (0.4, 0.15),
    "pause-server": (0.25, 0.15),
}
STAY = ("gone", "pause", "cut", "mute", "slow", "stutter", "unplug")


def _misfortunes(plan: Plan, faults: Random) -> Iterator[Misfortune]:
    storm_s, lease_s = plan.conditions.storm_s, plan.settings.lease_s
    for kind, (share, most) in CLIMATE.items():
        rate = faults.uniform(0.1, 1.0) * most if faults.random() < share else 0.0
        at_s = faults.expovariate(rate) if rate else inf
        while at_s < storm_s:
            length_s = faults.uniform(0.1, 2.5 * lease_s)
            if kind == "restart-server":
                length_s = faults.uniform(0.01, 1.5 * lease_s)
            yield _misfortune(plan, faults, at_s, kind, length_s)
            at_s += faults.expovariate(rate)
    if faults.random() < STAYING:
        rollouts = [replica for replica in plan.replicas if not replica.is_trainer]
        victim = faults.choice(rollouts)
        at_s = faults.uniform(0.5, storm_s)
        target = faults.choice((_worker(plan, faults, victim), victim.host))
        kind = faults.choice(STAY)
        yield Misfortune(at_s, kind, target, inf, value=_value(kind, faults))


def _misfortune(plan: Plan, faults: Random, at_s: float, kind: str, length_s: float) -> Misfortune:
    replica = faults.choice(plan.replicas)
    worker, other = _worker(plan, faults, replica), faults.choice(plan.replicas)
    target = faults.choice((worker, worker, worker, replica.host, replica.host, replica.site))
    peer = faults.choice(("", _worker(plan, faults, other), other.host, other.site))
    value = _value(kind, faults)
    if kind.endswith("server"):
        return Misfortune(at_s, kind, "", length_s)
    if kind in ("crash", "slow", "stutter") and target == replica.site:
        target = replica.host
    return Misfortune(at_s, kind, target, length_s, peer if kind == "unplug" else "", value)


def _value(kind: str, faults: Random) -> float:
    slower, share = faults.choice((3.0, 10.0, 50.0)), faults.choice((0.5, 0.9, 0.99))
    return {"slow": slower, "stutter": share}.get(kind, 0.0)


def _worker(plan: Plan, faults: Random, replica: Replica) -> str:
    return f"{replica.model}/{replica.name}[{faults.randrange(plan.conditions.shards_in(replica.cut))}]"
