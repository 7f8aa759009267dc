"""Events and outcomes, made up."""

from bench.lab.events import AnyEvent, Computed, Published, Seen, Updated
from bench.lab.interpreter import Slices
from bench.lab.summary import Outcome, summarise

SIZE_BYTES = 1000
BEGAN_AT = 10.0


def published(time: float, version: int, *, unpublish_s: float = 0.01, publish_s: float = 0.02) -> Published:
    """By the trainer."""
    return Published(
        time=time,
        process="trainer",
        version=version,
        sha256=f"hash of {version}",
        unpublish_s=unpublish_s,
        publish_s=publish_s,
    )


def updated(
    time: float,
    version: int,
    *,
    process: str = "rollout-0",
    stall_s: float = 0.5,
    sha256: str | None = None,
    is_first: bool = False,
    sources: dict[str, int] | None = None,
) -> Updated:
    """By a rollout, to the right content unless told otherwise."""
    return Updated(
        time=time,
        process=process,
        version=version,
        stall_s=stall_s,
        sha256=f"hash of {version}" if sha256 is None else sha256,
        is_first=is_first,
        bytes_by_source=sources or {},
        ended=time,
    )


def computed(
    time: float, process: str, *, moving: int = 0, moving_s: float = 0.0, still: int = 0, still_s: float = 0.0
) -> Computed:
    """Until that time."""
    return Computed(time=time, process=process, slices=Slices(moving, moving_s, still, still_s))


def seen(time: float, cross_site_bytes: dict[int, int]) -> Seen:
    """By who watches."""
    return Seen(
        time=time,
        process="watcher",
        latest=1,
        has_latest=["trainer"],
        copies={},
        cross_site_bytes=cross_site_bytes,
        reads=[],
    )


def condensed(events: list[AnyEvent], *, strategy: str = "hub", idle_share: float = 0.5) -> Outcome:
    """What the summary makes of them."""
    return summarise(
        events,
        strategy=strategy,
        title=f"the {strategy}",
        size_bytes=SIZE_BYTES,
        began_at=BEGAN_AT,
        seconds=20.0,
        idle_share=idle_share,
    )


def run_of(strategy: str, *, stall_s: float, idle_share: float = 0.5) -> Outcome:
    """One update of one rollout."""
    events: list[AnyEvent] = [
        published(9.0, 0),
        updated(9.5, 0, is_first=True),
        published(11.0, 1, unpublish_s=0.0, publish_s=0.0),
        updated(12.0, 1, stall_s=stall_s),
    ]
    return condensed(events, strategy=strategy, idle_share=idle_share)
