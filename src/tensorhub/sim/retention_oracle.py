"""Retention, sites and staging: nothing that must be kept is given up, nothing crosses twice, nothing is left over."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.messages import Holding, Withdrawing
from ..core.names import ModelName, Version
from ..core.retention import is_whole
from .dataplane import SimRead

if TYPE_CHECKING:
    from .cluster import Cluster
    from .process import Process

SETTLED_S = 1.0  # everybody has been heard by then, a withdrawal that failed is over, and stopped reads have ended


class RetentionOracle:
    """Watches who has what, all over the cluster."""

    def __init__(self, cluster: "Cluster", broken: Callable[[str, str], None]) -> None:
        self.cluster = cluster
        self.broken = broken
        self.deaths: dict[ModelName, float] = {}  # when a reliable worker of the model died last
        self.seemed_lost: dict[tuple[str, Version], float] = {}  # to whom without room, and when last
        self.holding: dict[str, tuple[Version, float]] = {}  # by process: what it holds, and since when

    def after_event(self, process: "Process") -> None:
        """Note since when it has held what it holds."""
        buffer, known = process.worker.buffer, self.holding.get(process.name)
        if not isinstance(buffer, Holding):
            self.holding.pop(process.name, None)
        elif known is None or known[0] != buffer.version:
            self.holding[process.name] = (buffer.version, self.cluster.world.now)

    def note_what_seems_lost(self) -> None:
        """After every event: what a worker without room wants to leave has lost a shard, as far as the server knows."""
        server = self.cluster.control.server
        for process in self.cluster.workers.values():
            buffer, shelf = process.worker.buffer, process.worker.shelf
            model = server.models.get(process.me.model) if server is not None else None
            if server is None or model is None or shelf.left or not isinstance(buffer, Withdrawing):
                continue
            record = model.versions.get(buffer.version)
            if record is not None and not is_whole(server, model, record):
                self.seemed_lost[process.name, buffer.version] = self.cluster.world.now

    def died(self, process: "Process") -> None:
        if process.hello.reliable:
            self.deaths[process.me.model] = self.cluster.world.now

    def leaves(self, process: "Process", version: Version, *, from_host: bool) -> None:
        """G6: the worker gives up a reference by its own will; a retained version must not be lost by it."""
        server = self.cluster.control.server
        if server is None or not process.hello.reliable or process.worker.is_closing:
            return  # who closes may run out of time; who lost the server was let go by it before
        model = server.models.get(process.me.model)
        if model is None or server.is_recovering or version not in model.retained():
            return
        lease_s = self.cluster.weather.settings.lease_s
        if self.cluster.world.now - self.deaths.get(process.me.model, -1e9) < 4 * lease_s:
            return  # the other reference was there when the server decided
        if self.cluster.world.now - self.seemed_lost.get((process.name, version), -1e9) < lease_s:
            return  # as far as the server knew when it let it go it was lost, and there was no room for it
        if not from_host and not isinstance(process.worker.buffer, Withdrawing):
            return  # a fill that failed
        if from_host and version not in process.host.given_up:
            return  # was not whole
        leaving = (process, from_host)
        peers = [other for other in self.cluster.workers.values() if other.me.model == process.me.model]
        for shard in range(self.cluster.weather.shards):
            if not any(other.me.shard == shard and self._has(other, version, leaving=None) for other in peers):
                return  # it had lost a shard before
        if any(
            other.me.shard == process.me.shard and other.hello.reliable and self._has(other, version, leaving=leaving)
            for other in peers
        ):
            return
        self.broken("G6 retention", f"{process.name} gave up the last reliable reference of version {version}")

    def _has(self, other: "Process", version: Version, *, leaving: "tuple[Process, bool] | None") -> bool:
        if leaving != (other, True) and other.worker.shelf.whole(version) is not None:
            return True
        buffer = other.worker.buffer
        is_held = isinstance(buffer, Holding | Withdrawing) and buffer.version == version
        return is_held and leaving != (other, False) and not other.worker.is_stopping_serving

    def crosses(self, source: "Process", read: SimRead, chunk: int) -> None:
        """G10: in fair weather no read into a site begins when that has had the version for a while, or reads it."""
        reader, version, settled_at = read.reader, read.grant.version, read.began - SETTLED_S
        for other in self.cluster.workers.values():
            same = (other.me.model, other.me.shard) == (reader.me.model, reader.me.shard)
            if not same or other is reader or other.hello.site != reader.hello.site or other.worker.is_closing:
                continue
            held, since = self.holding.get(other.name, (None, 0.0))
            theirs = other.read
            crosses_too = (
                theirs is not None
                and not theirs.is_stopped
                and theirs.grant.version == version
                and theirs.source is not None
                and theirs.source.hello.site != reader.hello.site
                and theirs.began < settled_at
            )
            if crosses_too or (held == version and since < settled_at):
                text = f"chunk {chunk} of version {version} goes from {source.name} to {reader.name}"
                self.broken("G10 once per site", f"{text}, and {other.name} of {reader.hello.site} has or reads it too")

    def at_the_end(self) -> None:
        """Everybody holds the newest version: no host copy is needed any more but of what is pinned or retained."""
        for process in self.cluster.workers.values():
            pinned = [v for other in self.cluster.workers.values() for v in other.worker.shelf.pins]
            newest, retain = process.worker.newest, self.cluster.weather.retain
            for version in process.worker.shelf.copies:
                is_old = newest is None or version == newest or version < newest - 2 * retain
                if version not in pinned and is_old:
                    self.broken("leak", f"{process.name} still has a host copy of version {version}")
