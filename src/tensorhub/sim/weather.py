"""What a seed decides: the shape of the cluster, and how hostile the world is to it until the storm is over."""

from dataclasses import dataclass, replace
from random import Random

from ..core.settings import Settings


@dataclass(frozen=True)
class Weather:
    """One cluster and its storm. Probabilities are for one message, one chunk, or one second, as named."""

    settings: Settings
    models: tuple[str, ...]
    shards: int
    rollouts: int
    chunks: int
    storm_s: float
    calm_s: float
    chunk_s: float  # time of one chunk on an idle source
    delay_s: float  # typical, of a control message
    loss: float  # per message
    duplication: float  # per message
    long_delay: float  # per message: it takes up to two leases
    partition: float  # per second: some worker is cut off from the server
    data_partition: float  # per second: some worker's data plane is cut off too
    crash: float  # per second: some worker is killed
    restart: float  # per second: the server is killed
    read_error: float  # per chunk
    corruption: float  # per chunk, on the wire
    is_one_sided: bool  # reads like RDMA: the source does not notice them, and cannot refuse
    verifies: bool  # readers compare digests; without, only tickets and leases protect
    drift: float  # clocks run faster or slower by up to this share
    clock_goes_back: bool  # a restarted server may begin with lower numbers than the one before it
    codec: bool  # messages go through the wire's encoding
    host_copies: int  # of one worker, at most
    retain: int  # newest versions
    spot: float  # share of rollouts that are not reliable
    sites: int  # workers are spread over as many; the trainer is in the first
    prefetch: str  # what rollouts were opened with
    pins: float  # per version: its trainer pins it until the storm is over
    ahead: float  # share of the updates that take only what was fetched ahead
    is_in_step: bool  # rollouts call at whole seconds, all at once
    is_fair: bool  # nothing bad happens at all


def draw_weather(chance: Random, aside: Random) -> Weather:
    """The weather of one seed."""

    def sometimes(probability: float, most: float) -> float:
        return chance.uniform(0.1, 1.0) * most if chance.random() < probability else 0.0

    lease_s = chance.choice((2.0, 3.0, 4.0))
    chunks = chance.choice((1, 3, 8, 20))
    verifies = chance.random() < 0.6
    weather = Weather(
        settings=Settings(
            lease_s=lease_s, report_s=lease_s / 5, avoid_s=chance.choice((0.3, 1.0)), rebalance_s=0.4 * lease_s
        ),
        models=("policy", "draft") if chance.random() < 0.15 else ("policy",),
        shards=chance.choice((1, 1, 2, 2, 3)),
        rollouts=chance.choice((1, 2, 3, 3, 4)),
        chunks=chunks,
        storm_s=chance.uniform(8, 22),
        calm_s=lease_s * 8 + 12,
        chunk_s=chance.choice((0.005, 0.03, 0.15, 1.5 * lease_s / max(chunks, 3))),
        delay_s=chance.choice((0.001, 0.01, 0.1)),
        loss=sometimes(0.5, 0.2),
        duplication=sometimes(0.5, 0.2),
        long_delay=sometimes(0.4, 0.25),
        partition=sometimes(0.5, 0.6),
        data_partition=sometimes(0.3, 0.2),
        crash=sometimes(0.6, 0.25),
        restart=sometimes(0.5, 0.15),
        read_error=sometimes(0.4, 0.02),
        corruption=sometimes(0.5, 0.03) if verifies else 0.0,
        is_one_sided=chance.random() < 0.6,
        verifies=verifies,
        drift=chance.choice((0.0, 0.02, 0.04)),
        clock_goes_back=chance.random() < 0.3,
        codec=chance.random() < 0.06,
        host_copies=chance.choice((1, 2, 2, 3)),
        retain=chance.choice((1, 1, 1, 2)),
        spot=chance.choice((0.0, 0.0, 0.5, 1.0)),
        sites=chance.choice((1, 1, 2, 3)),
        prefetch=chance.choice(("seed", "seed", "always", "never")),
        pins=sometimes(0.3, 0.5),
        ahead=aside.choice((0.0, 0.0, 0.5, 0.9)),
        is_in_step=aside.random() < 0.3,
        is_fair=False,
    )
    return fair(weather) if chance.random() < 0.08 else weather


def fair(weather: Weather) -> Weather:
    """The same cluster where nothing bad happens."""
    faults = ("loss", "duplication", "long_delay", "partition", "data_partition", "crash", "restart", "read_error")
    return replace(weather, **dict.fromkeys(faults, 0.0), corruption=0.0, delay_s=0.001, is_fair=True)  # type: ignore[arg-type]
