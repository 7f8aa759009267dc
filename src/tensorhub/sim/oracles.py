"""The promises, asked after every event. Each check names the promise that it watches.

The oracles look at everybody's true memory and true clock, which no worker can do.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.errors import InvariantViolation
from ..core.messages import Filling, Holding, Withdrawing
from ..core.names import ModelName, Shard, Version
from .apps import App, Outcomes, RolloutApp, TrainerApp
from .dataplane import SimRead
from .retention_oracle import RetentionOracle
from .world import OracleViolation

if TYPE_CHECKING:
    from .cluster import Cluster
    from .process import Process

LATE_S = 0.05  # a call may end this much after its deadline: one tick of a clock that drifts
HONEST_SPLITS = (
    "deadline-exceeded",
    "died",
    "closed",
    "version-unavailable",
    "group-incomplete",
    "host-memory-full",
    "unavailable",
)


class Oracles:
    """Watches one cluster."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster = cluster
        self.existed: dict[tuple[ModelName, Version, Shard], str] = {}
        self.newest_of_server: tuple[int, dict[ModelName, Version]] = (0, {})
        self.calls: dict[str, tuple[str, int | str, Version | None, Version | None]] = {}
        self.resolved: dict[
            tuple[str, str, int, Version], Version | None
        ] = {}  # calls: what the server had been told by then
        self.retention = RetentionOracle(cluster, self.broken)

    def broken(self, promise: str, what: str) -> None:
        self.cluster.world.note("oracle", f"{promise} broken: {what}")
        raise OracleViolation(f"{promise} broken at {self.cluster.world.now:.4f}: {what}")

    # --- after every event --------------------------------------------------------------------------------------------

    def after_event(self, touched: "Process | None" = None) -> None:
        if touched is not None:
            self.retention.after_event(touched)
            self._ask(touched.worker.check_invariants)
        self.retention.note_what_seems_lost()
        server = self.cluster.control.server
        if server is not None and server.counters["unsettled"]:
            self.broken("livelock", "the rules contradict each other: one worker was decided for again and again")
        if server is not None and self.cluster.world.events % 16 == 0:
            self._ask(server.check_invariants)
        for process in self.cluster.workers.values():
            if process.called_until is not None and process.now > process.called_until + LATE_S:
                self.broken(
                    "G7 nothing waits forever",
                    f"{process.name} still waits {process.now - process.called_until} s late",
                )
        self._latest_rises()

    def _ask(self, check: Callable[[], None]) -> None:
        try:
            check()
        except InvariantViolation as error:
            self.broken("invariant", str(error))

    def _latest_rises(self) -> None:
        control = self.cluster.control
        if control.server is None:
            return
        life, seen = self.newest_of_server
        if life != control.lives:
            seen = {}
        for model in control.server.models.values():
            if model.newest is not None:
                if model.newest < seen.get(model.name, model.newest):
                    self.broken(
                        "G3 monotonic", f"latest of {model.name} fell from {seen[model.name]} to {model.newest}"
                    )
                seen[model.name] = model.newest
            for name, replica in model.replicas.items():
                operation = replica.operation
                if operation is not None and operation.version is not None:
                    key = (model.name, name, operation.number, operation.version)
                    if key not in self.resolved:
                        self.resolved[key] = self._told_the_server(model.name)
        self.newest_of_server = (control.lives, seen)

    # --- memory -------------------------------------------------------------------------------------------------------

    def memory_written(self, process: "Process", chunk: int) -> None:
        buffer = process.worker.buffer
        if isinstance(buffer, Holding | Withdrawing):
            expected = self.cluster.data.contents[buffer.root][chunk]
            if process.memory[chunk] != expected:
                self.broken(
                    "G1 immutable", f"{process.name} holds {buffer.version}, and its chunk {chunk} was overwritten"
                )

    def accepted(self, process: "Process", read: SimRead, chunk: int) -> None:
        expected = self.cluster.data.contents[read.grant.root][chunk]
        if read.target.memory[chunk] != expected:
            self.broken(
                "G4 no torn read",
                f"{process.name} accepted chunk {chunk} of {read.grant.version}, which is not as published",
            )

    def serving_stops(self, source: "Process", version: Version, *, from_host: bool = False) -> None:
        """From now on the source may change its memory, so nobody may still be able to accept a byte of it."""
        if not source.worker.is_closing:  # who leaves without the server's word takes the memory along
            what = f"released {version}" if from_host else f"was told drained({version})"
            self._nobody_reads(source, version, what, from_host=from_host)
        self.retention.leaves(source, version, from_host=from_host)

    def begins_to_change(self, source: "Process", version: Version) -> None:
        """The source is about to be filled with this version; those behind it already wait for that."""
        for old in range(version):
            self._nobody_reads(source, Version(old), f"begins to fill with {version}")

    def _nobody_reads(self, source: "Process", version: Version, what: str, *, from_host: bool = False) -> None:
        if not self.cluster.weather.is_one_sided:
            return  # the source cuts them off itself; `accepted` watches what they take
        for reader in self.cluster.workers.values():
            read = reader.read
            if read is None or read.source is not source or read.grant.version != version:
                continue
            if read.grant.from_host != from_host:
                continue
            if not read.is_stopped and not read.is_ended and reader.now < reader.trust_until:
                self.broken("G1/G5 drained", f"{source.name} {what} while {reader.name} reads {version} from it")

    def _check_holder(self, process: "Process") -> None:
        buffer = process.worker.buffer
        if not isinstance(buffer, Holding):
            return
        expected = self.cluster.data.contents[buffer.root]
        if tuple(process.memory) != expected:
            self.broken(
                "G8 never run early", f"{process.name} holds {buffer.version}, but its memory is another content"
            )
        for other in self.cluster.workers.values():
            theirs, same = other.worker.buffer, (other.me.model, other.me.shard) == (process.me.model, process.me.shard)
            if same and isinstance(theirs, Holding) and theirs.version == buffer.version and theirs.root != buffer.root:
                contents = f"{buffer.root} and as {theirs.root}"
                self.broken("G1 immutable", f"{process.name} and {other.name} hold {buffer.version}, as {contents}")

    def copy_is_whole(self, process: "Process", version: Version) -> None:
        """It counts as a reference from now on."""
        copy = process.worker.shelf.copies[version]
        if tuple(process.host.places[version].memory) != self.cluster.data.contents[copy.root]:
            self.broken("G1 immutable", f"the host copy of {version} at {process.name} is another content")

    def sent(self, source: "Process", read: SimRead, chunk: int) -> None:
        """A chunk goes over the wire."""
        if source.hello.site != read.reader.hello.site and self.cluster.weather.is_fair:
            self.retention.crosses(source, read, chunk)

    # --- calls --------------------------------------------------------------------------------------------------------

    def called(self, app: App, verb: str, spec: int | str) -> None:
        newest = [p.worker.newest for p in app.shards.values() if p.worker.newest is not None]
        known = max(newest) if newest and len(app.shards) == self.cluster.weather.shards else None
        self.calls[f"{app.model}/{app.replica}"] = (verb, spec, known, self._told_the_server(ModelName(app.model)))

    def _told_the_server(self, model: ModelName) -> Version | None:
        """The newest version that somebody knows who has been heard all along: this life of the server must know it."""
        weather, life = self.cluster.weather, self.cluster.control.lives
        if weather.loss or weather.long_delay:
            return None
        known = [
            p.worker.newest
            for p in self.cluster.workers.values()
            if p.me.model == model and not p.is_mute and p.muted_in_life != life and p.worker.newest is not None
        ]
        return max(known, default=None)

    def group_ended(self, app: App, outcomes: Outcomes) -> None:
        verb, spec, known, told_before = self.calls[f"{app.model}/{app.replica}"]
        told = self._told_the_server(ModelName(app.model))
        if told is not None and told_before is not None:  # and who told it lives to this day
            known = max(v for v in (known, min(told, told_before)) if v is not None)
        good = {shard: o.version for shard, o in outcomes.items() if o.error is None}
        codes = {o.error.code: None for o in outcomes.values() if o.error is not None}
        name = f"{verb}({spec!r}) of {app.model}/{app.replica}"
        if good and codes:
            dishonest = [code for code in codes if code not in HONEST_SPLITS]
            if dishonest:
                self.broken("G2 all or none", f"{name} succeeded on {list(good)} and failed elsewhere with {dishonest}")
        if good and len(dict.fromkeys(good.values())) > 1:
            self.broken("G2 one version", f"{name} gave {good}")
        if not good or verb == "unpublish":
            return
        for shard in good:
            process = app.shards.get(shard)
            if process is not None and process.worker.held == good[shard]:
                self._check_holder(process)
        version = next(iter(good.values()))
        # a shard that was started again joins the call that another one made before it died (docs/status.md)
        number = next(outcomes[shard].number for shard in good)
        then = self.resolved.get((app.model, app.replica, number, version)) if version is not None else None
        known = min(known, then) if known is not None and then is not None else known
        if isinstance(spec, str) and spec == "latest" and known is not None and version is not None and version < known:
            self.broken("G3 monotonic", f"{name} gave {version} after {known} had been seen")
        if isinstance(spec, int) and verb in ("publish", "replicate") and version != spec:
            self.broken("G2 one version", f"{name} gave {version}")
        if verb == "publish":
            self._published(app, Version(int(spec)), len(good) == self.cluster.weather.shards, told_before)

    def _published(self, app: App, version: Version, whole: bool, known: Version | None) -> None:
        """`known`: the newest that the server was sure to know when the call began."""
        for process in app.shards.values():
            buffer = process.worker.buffer
            key = (process.me.model, version, process.me.shard)
            if whole and isinstance(buffer, Holding) and buffer.version == version:
                former, self.existed[key] = self.existed.get(key, buffer.root), buffer.root
                if former != buffer.root and known is not None and known >= version:
                    self.broken("G3 version conflict", f"{key} was published as {former} and as {buffer.root}")

    def first_success(self, process: "Process", number: int, version: Version) -> None:
        """G8: when the first shard's call returns, every shard that lives holds the version."""
        for other in self.cluster.workers.values():
            same = other.me.model == process.me.model and other.me.replica == process.me.replica
            call = other.worker.call
            if same and call is not None and call.number == number and other.worker.held != version:
                self.broken(
                    "G8 never run early", f"{process.name} returned {version}, {other.name} holds {other.worker.held}"
                )

    # --- at the end ---------------------------------------------------------------------------------------------------

    def at_the_end(self) -> None:
        """The storm is long over: everybody has what he wanted, and nothing is left over."""
        server = self.cluster.control.server
        assert server is not None
        for app in self.cluster.apps:
            if isinstance(app, TrainerApp) and app.published is None:
                self.broken("progress", f"{app.model}/{app.replica} never published anything")
        for app in self.cluster.apps:
            trainer = next(a for a in self.cluster.apps if isinstance(a, TrainerApp) and a.model == app.model)
            newest = trainer.published
            if trainer.is_refused:  # for ever, perhaps: then a publish that had ended badly for it may be the newest
                newest = server.models[ModelName(app.model)].newest
            if isinstance(app, RolloutApp) and app.has != newest:
                self.broken("progress", f"{app.model}/{app.replica} has version {app.has}, the latest is {newest}")
            for process in app.shards.values():
                self._check_holder(process)
        self.retention.at_the_end()
        for read in server.reads.all():
            reader = self.cluster.living(read.reader)
            if reader is None or not isinstance(reader.worker.buffer, Filling):
                self.broken("leak", f"ticket {read.ticket} of {read.reader} is open for ever")
        for model in server.models.values():
            for record in model.versions.values():
                for holders in record.holders.values():
                    for worker in holders:
                        if self.cluster.living(worker) is None:
                            self.broken("leak", f"{worker} is dead and still counts as a holder of {record.version}")
