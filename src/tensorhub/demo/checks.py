"""What a run must have shown: sentences that hold or do not. Together they are the exit status. Pure."""

from dataclasses import dataclass

from .events import SERVER
from .summary import RolloutSummary, Summary, bytes_from

START_BELOW, END_ABOVE = 0.2, 0.8  # reward
FLAT_BELOW = 0.3  # reward at the end without updates
POLICY_BYTES = 3 << 20  # the policy is a little larger: a fill moved at least this much


@dataclass(frozen=True)
class Check:
    """A sentence, whether it holds, and the figures that say so."""

    sentence: str
    holds: bool
    detail: str


def judge(summary: Summary) -> list[Check]:
    """Every check of a run."""
    return [
        _learned(summary) if summary.updates else _stayed(summary),
        _hashes(summary),
        _proved(summary),
        _killed(summary),
        _joined(summary),
        _restarted(summary),
        _finished(summary) if summary.updates else _kept_first(summary),
    ]


def _learned(summary: Summary) -> Check:
    start, end = summary.reward_start, summary.reward_end
    holds = start < START_BELOW and end > END_ABOVE
    return Check(f"the reward rises from below {START_BELOW} to above {END_ABOVE}", holds, f"{start:.3f} → {end:.3f}")


def _stayed(summary: Summary) -> Check:
    start, end = summary.reward_start, summary.reward_end
    holds = start < START_BELOW and end < FLAT_BELOW
    return Check(f"without updates the reward stays below {FLAT_BELOW}", holds, f"{start:.3f} → {end:.3f}")


def _hashes(summary: Summary) -> Check:
    wrong = summary.hashes_wrong
    detail = f"{summary.hashes_compared} SHA-256 compared, {len(wrong)} differ" + "".join(f"; {w}" for w in wrong[:3])
    holds = summary.hashes_compared > 0 and not wrong
    return Check("every version that a rollout ran is what the trainer published, bit for bit", holds, detail)


def _proved(summary: Summary) -> Check:
    unproved = summary.ran_unproved
    runs = sum(rollout.versions_run for rollout in summary.rollouts)
    detail = "; ".join(unproved[:3]) or f"{runs} versions run on {len(summary.rollouts)} rollouts"
    return Check("no rollout ran a version before it was verified", runs > 0 and not unproved, detail)


def _killed(summary: Summary) -> Check:
    killed = [fault for fault in summary.faults if fault.what == "killed" and fault.process != SERVER]
    holds = bool(killed) and all(fault.published_after > 0 for fault in killed)
    detail = "; ".join(f"{f.process} at version {f.version}, {f.published_after} versions followed" for f in killed)
    return Check("a rollout was killed and the training went on", holds, detail or "nobody was killed")


def _joined(summary: Summary) -> Check:
    late = [rollout for rollout in summary.rollouts if rollout.fate == "joined late"]
    holds = bool(late) and all(_came_from_rollouts(rollout) for rollout in late)
    detail = "; ".join(_late_detail(rollout) for rollout in late)
    return Check("a rollout joined late, and its bytes came from rollouts", holds, detail or "nobody joined late")


def _came_from_rollouts(rollout: RolloutSummary) -> bool:
    first = rollout.first_bytes_by_source
    return bytes_from(first, trainer=False) >= POLICY_BYTES and bytes_from(first, trainer=True) == 0


def _late_detail(rollout: RolloutSummary) -> str:
    first = rollout.first_bytes_by_source
    sources = ", ".join(f"{size / (1 << 20):.1f} MiB from {source}" for source, size in sorted(first.items()))
    trainer = bytes_from(first, trainer=True)
    return f"{rollout.name} at version {rollout.first_version}: {sources}" + (
        "" if trainer else ", none from the trainer"
    )


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
    return Check("every rollout ran one version only", holds, "; ".join(others) or "version 0, to the end")
