"""What a run must have shown: sentences that hold or do not. Together they are the exit status. Pure."""

from dataclasses import dataclass

from .events import SERVER, TRAINER
from .summary import RolloutSummary, Summary, bytes_from

START_BELOW, END_ABOVE = 0.2, 0.8  # reward
FLAT_BELOW = 0.3  # reward at the end without updates
USUAL_STEPS = 100  # of training: the reward has risen by then
POLICY_BYTES = 3 << 20  # the policy is a little larger: a fill moved at least this much
LLAMA_BYTES = 3 << 18  # the same of the policy of engines
APART = 10.0  # the next version is at least so many times further off than the version that was named


@dataclass(frozen=True)
class Check:
    """A sentence, whether it holds, and the figures that say so."""

    sentence: str
    holds: bool
    detail: str


def judge(summary: Summary) -> list[Check]:
    """Every check of a run."""
    own = [_hashes(summary), _proved(summary), _killed(summary), _joined(summary)]
    with_engine = [
        _engine_hashes(summary),
        _likelihoods(summary),
        _proved(summary),
        _killed(summary),
        _engine_joined(summary),
        _refilled(summary),
    ]
    return [
        _learned(summary) if summary.updates else _stayed(summary),
        *(with_engine if summary.engine else own),
        _restarted(summary),
        _finished(summary) if summary.updates else _kept_first(summary),
    ]


def _learned(summary: Summary) -> Check:
    start, end = summary.reward_start, summary.reward_end
    holds = start < START_BELOW and end > END_ABOVE
    detail = f"{start:.3f} → {end:.3f}"
    if not holds and summary.steps < USUAL_STEPS:
        detail += f": {summary.steps} steps are too few for that, {USUAL_STEPS} are enough"
    return Check(f"the reward rises from below {START_BELOW} to above {END_ABOVE}", holds, detail)


def _stayed(summary: Summary) -> Check:
    start, end = summary.reward_start, summary.reward_end
    holds = start < START_BELOW and end < FLAT_BELOW
    return Check(f"without updates the reward stays below {FLAT_BELOW}", holds, f"{start:.3f} → {end:.3f}")


def _hashes(summary: Summary) -> Check:
    return _compared("every version that a rollout ran is what the trainer published, bit for bit", summary)


def _engine_hashes(summary: Summary) -> Check:
    return _compared("the parameters that vLLM computed with are what the trainer published, bit for bit", summary)


def _compared(sentence: str, summary: Summary) -> Check:
    wrong = summary.hashes_wrong
    detail = f"{summary.hashes_compared} SHA-256 compared, {len(wrong)} differ" + "".join(f"; {w}" for w in wrong[:3])
    return Check(sentence, summary.hashes_compared > 0 and not wrong, detail)


def _likelihoods(summary: Summary) -> Check:
    found = summary.likelihoods
    sentence = "vLLM's log-probabilities are those of transformers with the version that each sample names"
    if found is None or not found.batches:
        return Check(sentence, False, "nothing was sampled")
    holds = not found.wrong and found.next_off > APART * found.most_off
    detail = (
        f"{found.batches} batches of {found.versions} versions: off by {found.most_off:.1e} nats at most; "
        f"with the version before or after it would be {found.next_off:.1e} (median)"
        + "".join(f"; {w}" for w in found.wrong[:3])
    )
    return Check(sentence, holds, detail)


def _proved(summary: Summary) -> Check:
    unproved = summary.ran_unproved
    runs = sum(rollout.versions_run for rollout in summary.rollouts)
    detail = "; ".join(unproved[:3]) or f"{runs} versions run on {len(summary.rollouts)} rollouts"
    return Check("no rollout ran a version before it was verified", runs > 0 and not unproved, detail)


def _killed(summary: Summary) -> Check:
    killed = [fault for fault in summary.faults if fault.what == "killed" and fault.process not in (SERVER, TRAINER)]
    holds = bool(killed) and all(fault.published_after > 0 for fault in killed)
    detail = "; ".join(f"{f.process} at version {f.version}, {f.published_after} versions followed" for f in killed)
    return Check("a rollout was killed and the training went on", holds, detail or "nobody was killed")


def _joined(summary: Summary) -> Check:
    late = [rollout for rollout in summary.rollouts if rollout.fate == "joined late"]
    holds = bool(late) and all(_came_from_rollouts(rollout) for rollout in late)
    detail = "; ".join(_late_detail(rollout) for rollout in late)
    return Check("a rollout joined late, and its bytes came from rollouts", holds, detail or "nobody joined late")


def _engine_joined(summary: Summary) -> Check:
    late = [rollout for rollout in summary.rollouts if rollout.fate == "joined late"]
    holds = bool(late) and all(
        rollout.samples > 0 and sum(rollout.first_bytes_by_source.values()) >= LLAMA_BYTES for rollout in late
    )
    detail = "; ".join(_late_detail(rollout) for rollout in late)
    return Check(
        "an engine joined late with no weights of its own, and generated", holds, detail or "nobody joined late"
    )


def _refilled(summary: Summary) -> Check:
    found = summary.refills
    detail = "; ".join(
        f"at version {each.version}, rank 0 with {_sources(each.bytes_by_source)}; "
        f"{each.seconds:.1f} s until the next version, {each.published_after} followed"
        + ("" if each.is_proved else "; not what had been published")
        for each in found
    )
    holds = bool(found) and all(
        each.is_proved
        and each.version >= each.newest >= 0
        and each.published_after > 0
        and sum(each.bytes_by_source.values()) > 0
        and bytes_from(each.bytes_by_source, trainer=True) == 0
        for each in found
    )
    sentence = "all ranks of the trainer were killed, refilled from the engines, and went on at the version those held"
    return Check(sentence, holds, detail or "nobody was refilled")


def _came_from_rollouts(rollout: RolloutSummary) -> bool:
    first = rollout.first_bytes_by_source
    return bytes_from(first, trainer=False) >= POLICY_BYTES and bytes_from(first, trainer=True) == 0


def _late_detail(rollout: RolloutSummary) -> str:
    first = rollout.first_bytes_by_source
    trainer = bytes_from(first, trainer=True)
    return f"{rollout.name} at version {rollout.first_version}: {_sources(first)}" + (
        "" if trainer else ", none from the trainer"
    )


def _sources(by_source: dict[str, int]) -> str:
    return ", ".join(f"{size / (1 << 20):.1f} MiB from {source}" for source, size in sorted(by_source.items()))


def _restarted(summary: Summary) -> Check:
    back = [fault for fault in summary.faults if fault.process == SERVER and fault.what == "restarted"]
    went_on = [fault for fault in back if fault.published_after and (fault.updates_after or not summary.updates)]
    detail = "; ".join(
        f"at version {f.version}; {f.published_after} versions and {f.updates_after} updates followed" for f in back
    )
    holds = bool(back) and went_on == back
    return Check("the reference server was killed, restarted, and everybody went on", holds, detail or "it was not")


def _finished(summary: Summary) -> Check:
    alive = [rollout for rollout in summary.rollouts if rollout.fate != "was killed"]
    behind = [f"{r.name} ran {r.last_version}" for r in alive if r.last_version != summary.last_version]
    holds = bool(alive) and not behind and summary.last_version == summary.steps
    detail = "; ".join(behind) or f"{len(alive)} rollouts ran version {summary.last_version}"
    return Check("every rollout that lived ran the last version at the end", holds, detail)


def _kept_first(summary: Summary) -> Check:
    others = [f"{r.name} ran {r.versions_run} versions" for r in summary.rollouts if r.versions_run != 1]
    holds = bool(summary.rollouts) and not others and summary.last_version == summary.steps
    versions = ", ".join(map(str, sorted({r.last_version or 0 for r in summary.rollouts})))
    return Check("every rollout ran one version only", holds, "; ".join(others) or f"version {versions}, to the end")
