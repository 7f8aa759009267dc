"""The workloads, and the sizes and rates at which the links are the bottleneck and the processor is not."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One workload. Times in seconds."""

    name: str
    title: str
    strategies: tuple[str, ...]
    rollouts: int = 8
    size_bytes: int = 32 * MIB
    chunk_bytes: int = MIB // 2  # 64 in a shard: as 4 MiB in one of 256 MiB
    rate_mbit: int = 400
    versions: int = 8
    train_s: float = 3.0
    generate_s: float = 3.0
    jitter: float = 0.5
    wan_mbit: int = 0  # 0: everybody in one site
    wan_delay_ms: int = 0  # one way
    spots: int = 0  # places for replicas that join and are killed
    seed: int = 1
    most_s: float = 90.0  # for one strategy
    goal_ratio: float = 1.0  # what is to be reached, and what is aimed at
    aim_ratio: float = 1.0

    @property
    def transfer_s(self) -> float:
        """One copy over one link, at its rate."""
        return self.size_bytes * 8 / (self.rate_mbit * 1e6)

    @property
    def wan_transfer_s(self) -> float:
        """One copy over the WAN, at its rate."""
        return self.size_bytes * 8 / (self.wan_mbit * 1e6)


STANDALONE = Scenario(
    name="standalone",
    title="rollout replicas update at their own pace, the trainer does not wait",
    strategies=("hub-always", "hub", "ring", "broadcast", "star", "store"),
    goal_ratio=6.7,
    aim_ratio=10.0,
)

SCENARIOS = {each.name: each for each in (STANDALONE,)}
