"""What one process of the laboratory is told when it starts."""

from typing import Literal

import msgspec

Role = Literal["trainer", "rollout", "store", "watcher"]
MODEL = "policy"


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """Who a process is, whom it talks to, how long it computes between updates. Sizes in bytes, times in seconds."""

    name: str  # also of its replica
    role: Role
    strategy: str
    site: str
    address: str  # its own
    events: str  # folder
    server: str = ""  # the reference server, host:port
    origin: str = ""  # host:port of whom a star's or a store's reader asks
    trainer: str = ""  # host:port of the trainer, for collectives and for the store
    seed: int
    size_bytes: int
    chunk_bytes: int
    versions: int  # that the trainer makes after the first one; 0: until told to leave
    train_s: float
    generate_s: float
    jitter: float  # a generation takes from (1 - jitter) to (1 + jitter) times `generate_s`
    held_share: float = 0.0  # of the time in which it computes it holds its interpreter
    prefetch: str = "never"
    only_near: str = ""  # update only to what is whole in its own host memory ("self"), or in its site ("site")
    host_bytes: int | None = None  # the most that host copies may take; None: as the product has it
    is_reliable: bool = True
    is_late: bool = False  # it joins while the others are at work, and begins at once
    rank: int = 0  # of a collective
    world: int = 1
