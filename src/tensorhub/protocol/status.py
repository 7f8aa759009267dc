"""What the reference server shows of itself: the answer of `/v1/status`, and what `status` and `watch` draw.

A snapshot of plain values. Ages and leases are in seconds before or after the moment it was taken.
"""

import msgspec

from .messages import Failure


class Transfer(msgspec.Struct, frozen=True):
    """One read that is granted now: target, source, progress, and the reason for the source."""

    model: str
    version: int
    shard: int
    target: str  # replica
    source: str  # replica
    ticket: int
    done: int  # chunks
    chunks: int  # 0: not known yet
    size_bytes: int
    reason: str
    from_host: bool = False  # out of the source's host memory rather than its tensors
    to_host: bool = False
    is_cross_site: bool = False  # from another site
    is_void: bool = False  # taken back; the target has not yet confirmed that it stopped
    transport: str = ""  # as the target last said: which it uses, how, and why no better one
    path: str = ""
    why: str = ""
    rate_bytes_per_s: int = 0  # over the target's last second or so
    since_s: float = 0.0  # since it was granted
    still_s: float = 0.0  # since the last bytes came, or since it was granted
    waiting_for: str = ""  # why nothing comes; empty while bytes come


class WorkerView(msgspec.Struct, frozen=True):
    """One worker: what its buffer is, and for how long it is still believed."""

    shard: int
    state: str  # "empty", "filling", "holding", "withdrawing", "poisoned"
    version: int | None
    done: int
    chunks: int
    size_bytes: int
    session: int
    lease_left_s: float
    connected: bool
    readers: int  # reads granted from here
    endpoints: tuple[str, ...]
    host: str
    site: str
    reliable: bool
    received_bytes: dict[str, int]  # by source replica
    copies: tuple[int, ...] = ()  # versions whole in its host memory
    copies_filling: tuple[int, ...] = ()
    copies_left: int = 0  # that its limit on host memory still allows
    pins: tuple[int, ...] = ()
    is_writer: bool = False  # its replica is the one that may publish
    heard_s: float = 0.0  # since its last report
    is_silent: bool = False  # two reports are overdue: its process or its host may be stopped
    waiting_for: str = ""  # why its part of the replica's call, or its close(), is not done
    waits_s: float = 0.0  # since that call, or close(), began; 0: it is in none


class CallView(msgspec.Struct, frozen=True):
    """What a replica is doing as a group."""

    number: int
    verb: str
    spec: int | str
    version: int | None
    state: str  # "waiting", "running", "finished", "failed"
    waiting_for: str = ""
    since_s: float = 0.0  # since its first shard called


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica: a worker for each shard, some of which may be missing."""

    name: str
    shards: int
    workers: tuple[WorkerView, ...]
    call: CallView | None


class VersionView(msgspec.Struct, frozen=True):
    """One version and its holders, whole or in part."""

    version: int
    is_latest: bool
    is_complete: bool  # it exists: every shard of one replica published it
    holders: tuple[str, ...]  # replicas that hold all their shards of it
    filling: tuple[str, ...]
    last_holder: str = ""  # if no worker holds it any more
    host_copies: tuple[str, ...] = ()  # replicas that have a whole copy of some shard in host memory
    is_lost: bool = False  # some shard has no holder left that could come back
    is_established: bool = False  # each shard has been whole outside the replica that published it
    is_retained: bool = False  # among the newest to be kept, or pinned
    cross_site_bytes: dict[str, int] = {}  # by site: what came into it from other sites, as this server has heard
    age_s: float | None = None  # since its publish ended; None: that was before this server started


class ModelView(msgspec.Struct, frozen=True):
    """One model by name. `latest` is its newest version that is not lost, `newest` the highest number ever taken."""

    name: str
    shards: int
    latest: int | None
    size_bytes: int  # of all shards
    versions: tuple[VersionView, ...]  # newest first
    replicas: tuple[ReplicaView, ...]
    newest: int | None = None


class Status(msgspec.Struct, frozen=True):
    """The status of all models, replicas and workers."""

    protocol: str
    uptime_s: float
    recovering_s: float  # 0 once the server has heard all workers that it could have forgotten
    models: tuple[ModelView, ...]
    transfers: tuple[Transfer, ...]
    counters: dict[str, int]
    report_s: float = 1.0  # each worker says how it is at least this often, and how far its read is


class HeldView(msgspec.Struct, frozen=True):
    """The answer to `wait_held`: whether enough replicas hold a version or a newer one, and which are missing."""

    is_enough: bool = False
    holders: tuple[str, ...] = ()  # by name
    counted: int = 0  # replicas that could hold it
    waits_for: str = ""


class SourceView(msgspec.Struct, frozen=True):
    """A worker that has a shard of a version whole, in its tensors or in host memory."""

    worker: str
    endpoints: tuple[str, ...]
    from_host: bool = False


class DescribedView(msgspec.Struct, frozen=True):
    """One shard of a version: its encoded layout, its root, and a few holders; or why nothing can be said of it."""

    version: int = 0
    shards: int = 0
    root: str = ""
    layout: bytes = b""
    sources: tuple[SourceView, ...] = ()
    failure: Failure | None = None

    @property
    def is_final(self) -> bool:
        """It will not be otherwise in a moment."""
        return self.failure is None or self.failure.code != "unavailable"


class TensorView(msgspec.Struct, frozen=True):
    """One tensor of one shard, or a whole one. `dtype` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class LayoutView(msgspec.Struct, frozen=True):
    """What a version is made of, shard by shard, and with boxes as a whole.

    Tensors that share memory count once in `size_bytes`.
    """

    model: str
    version: int
    size_bytes: int
    shards: tuple[tuple[TensorView, ...], ...]
    is_whole: bool = False  # published with boxes: `shards` is one, of the whole tensors
    tied: tuple[tuple[str, ...], ...] = ()  # of those, names for the same memory


class ShardView(msgspec.Struct, frozen=True):
    """The layout of one living worker."""

    replica: str
    shard: int
    shards: int
    boxes: int  # its place in `LayoutsView.boxes`


class ForgetView(msgspec.Struct, frozen=True):
    """What became of a model that is to be begun anew: why it cannot be, or what is waited for before it can."""

    is_begun: bool = False  # its numbers are forgotten
    awaited: str = ""
    failure: Failure | None = None


class LayoutsView(msgspec.Struct, frozen=True):
    """The layouts of all living workers of a model, where known."""

    shards: tuple[ShardView, ...] = ()
    boxes: tuple[bytes, ...] = ()  # as `LayoutInfo` has them
    here: tuple[int, ...] = ()  # of the replica that asks: its shards that live and do not leave
    missed: str = ""  # a shard of it that could not make its last call and has left, and why
    patience_s: float | None = None  # for how long a shard of it may not be there; None: the server has to listen first
