"""What a worker tells of itself: how far a fill is, and figures of its life."""

from collections.abc import Sequence
from typing import TypedDict

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """How far a fill is: what `update(progress=…)` and `replicate(progress=…)` give to their callback."""

    version: int  # that it fills
    done_bytes: int  # that have come
    total_bytes: int  # of this worker's tensors
    source: str  # the replica that it reads from; empty between two sources
    rate_bytes_per_s: int  # over about the last second


class Statistics(TypedDict):
    """Figures of one worker's life. Sizes are bytes, and names that end in `_s` are seconds."""

    reports: int  # sent to the server
    unacknowledged: int  # of these, that the server has not answered
    received_bytes: int
    bytes_by_source: dict[str, int]  # by replica; "(others)" is the sum of what came from those before the latest 16
    bytes_by_transport: dict[str, int]
    sent_bytes: int
    host_bytes: int  # that host copies take
    host_bytes_limit: int | None  # None before `register`
    pinned_bytes: int  # of this process
    why_pageable: str  # why host copies are not pinned
    offloaded_bytes: int  # copied from tensors to host copies
    connects: int  # connections made to the server
    is_connected: bool
    transport: dict[str, int]  # counters of the transports, added up
    update_s: float  # how long the last `update` or `replicate` held up its caller
    update_transfer_s: float  # of that, reads of sources; they verify as they go
    update_verify_s: float  # of that, checks of a mapped host copy
    publish_s: float  # how long the last `publish` held up its caller
    publish_hash_s: float  # of that, casts and hashing
    total_update_s: float
    total_transfer_s: float  # of all reads, into host copies too
    total_verify_s: float  # of `check` too
    total_publish_s: float
    total_hash_s: float
    total_drain_s: float  # from withdrawing versions until no worker read them


def added(every: Sequence[Progress]) -> Progress | None:
    """The progress of several workers together; None if there is none."""
    if not every:
        return None
    sources = dict.fromkeys(each.source for each in every if each.source)
    return Progress(
        version=max(each.version for each in every),
        done_bytes=sum(each.done_bytes for each in every),
        total_bytes=sum(each.total_bytes for each in every),
        source=", ".join(sources),
        rate_bytes_per_s=sum(each.rate_bytes_per_s for each in every),
    )
