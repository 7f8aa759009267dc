"""Settings of the reference server, each with its reason. The server sends them to the workers."""

from dataclasses import dataclass
from math import ceil

REPORTS_PER_LEASE = 5  # however large the fleet: 2 may be missed, and there is time for a GC
STEPS = 4  # of a `report_s`: a worker that comes or goes does not change all orders


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the reference server's decisions. Times in seconds."""

    lease_s: float = 10.0  # 3 missed reports at 1/s, 5 s for a GC or GPU hiccup, 2 s spare
    report_s: float = 1.0  # ten in a lease; also the age of progress in `status`
    max_reports_per_s: int = 4_000  # from all workers that do nothing: at 60 µs each a quarter of a core
    drift: float = 0.1  # clocks that run up to 10 % apart are safe
    avoid_s: float = 2.0  # a source that failed a reader is that reader's last choice for 2 reports
    keep_held_s: float = 2.0  # a source silent for so long has missed 2 reports; no rollout stands still for longer
    slow_s: float = 3.0  # a read is measured over so long: 6 measurements, 3 reports; a gap of 1 s is a third of it
    leave_s: float = 30.0  # a source of wrong bytes, or a copy that cannot be mapped, is not tried again for so long
    max_failures: int = 8  # of one call on one shard, before it is given up rather than tried again
    keep_established: bool = True  # for one host copy, nothing that has left its publisher is lost with it
    spot_handover_s: float = 30.0  # a closing worker waits so long for a spot worker: 50 GiB at 2 GB/s
    default_retain: int = 1  # the newest is what rollouts ask for next; 0: none is kept
    max_retain: int = 8  # a worker that keeps 8 may take host memory for 9 copies of its shard
    max_versions: int = 256  # remembered of one model, held or not: years of "latest-N", 1.6 KiB each
    max_workers: int = 20_000  # sessions at a time; twice the largest fleet planned for
    max_models: int = 1_000  # any client may name one, and each costs memory; one without workers makes room

    def report_s_of(self, workers: int) -> float:
        """How often each of so many is to say how things are: more seldom where they are too many, in steps."""
        if workers <= self.max_reports_per_s * self.report_s:
            return self.report_s
        steps = ceil(STEPS * workers / self.max_reports_per_s / self.report_s)
        return min(max(1.0, steps / STEPS) * self.report_s, max(self.report_s, self.lease_s / REPORTS_PER_LEASE))

    def retain_of(self, wish: int, *, is_reliable: bool) -> int:
        """How many of the newest versions a worker with that wish keeps. The wish of a spot worker does not count."""
        return max(self.default_retain, min(wish, self.max_retain) if is_reliable else 0)

    @property
    def trust_s(self) -> float:
        """How long after sending a report that was acknowledged a worker may trust what it reads."""
        return self.lease_s * (1.0 - self.drift)
