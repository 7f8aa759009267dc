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
    versions: int = 5
    train_s: float = 3.0
    generate_s: float = 3.0
    jitter: float = 0.5
    wan_mbit: int = 0  # 0: everybody in one site
    wan_delay_ms: int = 0  # one way
    far_sites: int = 0  # besides the trainer's: sites that have the rollouts, each behind one uplink
    uplink_mbit: int = 0  # of each site, the trainer's too
    spots: int = 0  # places for replicas that join and are killed
    life_s: tuple[float, float] = (4.0, 8.0)  # from its first version to its death
    gap_s: tuple[float, float] = (0.5, 1.5)  # until its place is taken by another
    duration_s: float = 0.0  # 0: until every rollout has the last version
    are_reliable: bool = True  # those that are not killed
    is_watched: bool = False  # by a process that asks the reference server 20 times a second
    held_share: float = 0.5  # of its computing a worker holds its interpreter; 0: it holds nothing
    seed: int = 1
    most_s: float = 90.0  # for one strategy
    goal_ratio: float = 1.0  # what is to be reached, and what is aimed at
    aim_ratio: float = 1.0

    @property
    def transfer_s(self) -> float:
        """One copy over one link, at its rate."""
        return self.size_bytes * 8 / (self.rate_mbit * 1e6)

    @property
    def uplink_transfer_s(self) -> float:
        """One copy over a site's uplink, at its rate."""
        return self.size_bytes * 8 / (self.uplink_mbit * 1e6)

    @property
    def wan_transfer_s(self) -> float:
        """One copy over the WAN, at its rate."""
        return self.size_bytes * 8 / (self.wan_mbit * 1e6)


STANDALONE = Scenario(
    name="standalone",
    title="rollout replicas update at their own pace, the trainer does not wait",
    strategies=("hub-ready", "hub-always", "hub", "ring", "broadcast", "star"),
    goal_ratio=6.7,
    aim_ratio=10.0,
)

ELASTIC = Scenario(
    name="elastic",
    title="spot replicas join and are killed throughout",
    strategies=("hub", "hub-always", "star"),
    rollouts=12,
    spots=4,
    duration_s=40.0,
    goal_ratio=4.8,
    aim_ratio=6.0,
)

CROSS_SITE = Scenario(
    name="cross-site",
    title="one site has the trainer, the other only rollouts, behind the WAN",
    strategies=("hub-near", "hub-ready", "hub-seed", "star"),
    rollouts=4,
    size_bytes=16 * MIB,
    chunk_bytes=MIB // 4,
    wan_mbit=50,
    wan_delay_ms=30,
    train_s=8.0,
    generate_s=8.0,
    versions=3,
    is_watched=True,
    goal_ratio=19.0,
    aim_ratio=30.0,
)

STORM = Scenario(
    name="storm",
    title="every second a random rollout is killed or one is added, while versions are published",
    strategies=("hub",),
    rollouts=6,
    spots=8,
    size_bytes=8 * MIB,
    chunk_bytes=MIB // 8,
    rate_mbit=200,
    train_s=1.5,
    generate_s=0.5,
    duration_s=120.0,
    are_reliable=False,
    is_watched=True,
)

SITES = Scenario(
    name="sites",
    title="three sites have the rollouts, and each site, the trainer's too, one slow uplink",
    strategies=("hub", "hub-always"),
    rollouts=6,
    size_bytes=8 * MIB,
    chunk_bytes=MIB // 8,
    far_sites=3,
    uplink_mbit=40,
    train_s=8.0,
    generate_s=1.0,
    versions=4,
)

# A copy takes eleven seconds, so that it shows whether the three seconds of slack are enough to notice and to move.
SLOW_RELAY = Scenario(
    name="slow-relay",
    title="a relay's link falls to a quarter of its rate in mid-transfer, and stays there",
    strategies=("hub",),
    rollouts=4,
    size_bytes=64 * MIB,
    chunk_bytes=MIB // 2,
    rate_mbit=50,
    train_s=24.0,
    generate_s=0.25,
    jitter=0.0,
    versions=2,
    is_watched=True,
)

ESTABLISHED = Scenario(
    name="established",
    title="what it costs that one replica keeps what is established until its successor is",
    strategies=("hub", "hub-roomless", "hub-free"),
    rollouts=4,
    train_s=4.0,
    generate_s=2.0,
    versions=6,
    is_watched=True,
)

# Tiles have up to 4 MiB whatever the size of chunks, so this has as many of them as 64 chunks of the other workloads.
LAYOUTS = Scenario(
    name="layouts",
    title="rollouts of another layout than the trainer's update at once: one reads across, the others behind it",
    strategies=("hub", "hub-recut"),
    rollouts=6,
    size_bytes=256 * MIB,
    chunk_bytes=4 * MIB,
    train_s=16.0,
    generate_s=0.25,
    jitter=0.0,
    versions=3,
    most_s=150.0,
)

ALL = (STANDALONE, ELASTIC, CROSS_SITE, STORM, SITES, SLOW_RELAY, ESTABLISHED, LAYOUTS)
SCENARIOS = {each.name: each for each in ALL}
