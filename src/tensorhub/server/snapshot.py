"""The server's status as plain values, and the invariants that are checked after every message."""

from collections import Counter
from collections.abc import Generator

from ..protocol.messages import MAX_PINS, PROTOCOL, Filling, HostCopy
from ..protocol.names import Shard, WorkerId
from ..protocol.status import CallView, ModelView, ReplicaView, Status, Transfer, VersionView, WorkerView
from . import stalls
from . import state as facts
from .groups import Replica
from .members import WHOLE, Member, OpenRead, version_in
from .state import State
from .versions import Model, VersionRecord

# --- What must be true of the server after every message, whatever came in. A contradiction is a bug of ours.


def server_contradiction(state: State) -> str | None:
    """How the server machine contradicts itself, or None. Looks at every table: for tests and the simulator."""
    granted: dict[WorkerId, OpenRead] = {}
    for read in state.reads.all():
        if state.members.get(read.reader) is None:
            return f"ticket {read.ticket} is open for {read.reader}, who has no session"
        other = granted.get(read.reader) if not read.is_void else None
        if other is not None:
            return f"{read.reader} may read {other.ticket} and {read.ticket} at once"
        if not read.is_void:
            granted[read.reader] = read
            if read.reader in state.reads.chain(read.reader):
                return f"{read.reader} reads from itself in the end, ticket {read.ticket}"
    for model in state.models.values():
        for record in model.versions.values():
            for key, holders in record.holders.items():
                for worker in holders:
                    member = state.members.get(worker)
                    if member is None:
                        return f"{worker} counts as a holder of {record.version} and has no session"
                    place = record.version, key
                    is_reading = any((read.version, read.layout_key) == place for read in state.reads.of(worker))
                    if not is_reading and place not in member.content.places:
                        return f"{worker} counts as a holder of {record.version} and says {member.report}"
        wrong = _index_contradiction(state, model) or _content_contradiction(state, model)
        if wrong is not None:
            return wrong
        for replica in model.replicas.values():
            for shard, worker in replica.members.items():
                if state.members.get(worker) is None or worker.shard != shard:
                    return f"{replica.name} counts {worker} as its shard {shard}"
    return None


def _index_contradiction(state: State, model: Model) -> str | None:
    """How what is kept to be found quickly differs from what it was found from."""
    members = [member for member in state.members.all() if member.hello.model == model.name]
    for member in members:
        if (member.worker in model.read_from) != bool(state.reads.load(member.worker)):
            return (
                f"{member.worker} serves {state.reads.load(member.worker)} reads, and is kept as if it were otherwise"
            )
        if member.worker not in model.hosts.get(member.hello.host, {}):
            return f"{member.worker} is not kept among those of its host {member.hello.host!r}"
    if model.sites != Counter(member.hello.site for member in members):
        return f"the sites of {model.name} are kept as {dict(model.sites)}"
    reliable = sorted((member.layout_key, member.worker) for member in members if member.hello.reliable)
    if reliable != sorted((key, worker) for key, those in model.reliable.items() for worker in those):
        return f"those who count for retention are {reliable}, and kept are {model.reliable}"
    found = sorted((place, m.worker) for m in members if (place := m.content.held_place) is not None)
    kept = model.buffer_holders.by_place
    if found != sorted((place, worker) for place, those in kept.items() for worker in those):
        return f"buffer holders are {found}, and kept are {model.buffer_holders.by_place}"
    for record in model.versions.values():
        for key, holders in record.holders.items():
            idle = sorted(worker for worker in holders if worker not in model.read_from)
            if record.idle.get(key, []) != idle:
                return f"{idle} are idle holders of {record.version}, {record.idle.get(key)} are recorded"
    return None


def _content_contradiction(state: State, model: Model) -> str | None:
    """A worker counts as a whole holder of a version whose content is not known."""
    for member in state.members.all():
        if member.hello.model != model.name:
            continue
        buffer, copies = member.content.buffer, member.content.copies
        whole = [
            (copy.version, copy.root, member.content.layout_key_of(copy.version, is_copy=True))
            for copy in copies
            if copy.whole and not copy.dropping
        ]
        if isinstance(buffer, WHOLE):
            whole.append((buffer.version, buffer.root, member.layout_key))
        for version, root, key in whole:
            known = model.look_up(version).roots.get(key)
            if known != root:
                return f"{member.worker} has {version} with the content {root}, and that is kept as {known}"
    return None


# --- The server's picture of itself as plain values, for people and dashboards.


Steps = Generator[None, None, Status]
STEP = 64  # transfers: about as much work as one replica of 8 shards


def status_of(state: State) -> Status:
    """The whole picture, as of the last message or tick."""
    steps = status_steps(state)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Status = end.value
            return found


def status_steps(state: State) -> Steps:
    """Builds the status in small steps. The server may handle messages between them.

    Each replica is shown as it was at its step.
    """
    models = []
    for _, model in sorted(state.models.items()):
        models.append((yield from _model(state, model)))
    transfers = yield from _transfers(state)
    recovering_s = max(0.0, state.recovered_at - state.now) if state.is_recovering else 0.0
    return Status(
        protocol=PROTOCOL,
        uptime_s=state.now + state.clock.paused_s - state.clock.started,
        recovering_s=recovering_s,
        models=tuple(models),
        transfers=transfers,
        counters=statistics(state),
        report_s=state.report_s,
    )


def _transfers(state: State) -> Generator[None, None, tuple[Transfer, ...]]:
    found = []
    for count, read in enumerate(state.reads.all()):
        if count % STEP == STEP - 1:
            yield
        reader = state.members.get(read.reader)
        place = _filled(reader, read)
        done, chunks = (place.done, place.chunks) if place is not None else (0, 0)
        reading = reader.report.reading if reader is not None else None
        told = reading if reading is not None and reading.ticket == read.ticket else None
        found.append(
            Transfer(
                model=read.reader.model,
                version=read.version,
                shard=read.reader.shard,
                target=read.reader.replica,
                source=", ".join(dict.fromkeys(each.worker.replica for each in read.sources)),
                ticket=read.ticket,
                done=done,
                chunks=chunks,
                size_bytes=reader.report.size_bytes if reader is not None else 0,
                reason=read.grant.reason,
                from_host=read.from_host,
                to_host=read.grant.to_host,
                is_cross_site=any(each.is_cross_site for each in read.sources),
                is_void=read.is_void,
                transport=told.transport if told is not None else "",
                path=told.path if told is not None else "",
                why=told.why if told is not None else "",
                rate_bytes_per_s=told.rate_bytes_per_s if told is not None else 0,
                since_s=max(0.0, state.now - read.given_at),
                still_s=stalls.still_s(state, read),
                waiting_for=stalls.why_nothing_comes(state, read, reader) if reader is not None else "",
            )
        )
    return tuple(sorted(found, key=lambda t: (t.model, t.version, t.target, t.shard, t.ticket)))


def _filled(reader: Member | None, read: OpenRead) -> Filling | HostCopy | None:
    """What the read fills, as the reader last said."""
    if reader is None:
        return None
    if read.grant.to_host:
        return reader.copy(read.version)
    return reader.content.buffer if isinstance(reader.content.buffer, Filling) else None


class _Holders:
    """Which replicas have what of which version, collected as they are looked at."""

    def __init__(self) -> None:
        self.whole: dict[int | None, list[str]] = {}
        self.filling: dict[int | None, list[str]] = {}
        self.copies: dict[int, list[str]] = {}

    def note(self, replica: ReplicaView) -> None:
        shards_of: dict[int | None, int] = {}
        filling: dict[int | None, None] = {}
        copies: dict[int, None] = {}
        for worker in replica.workers:
            if worker.state in ("holding", "withdrawing"):
                shards_of[worker.version] = shards_of.get(worker.version, 0) + 1
            elif worker.state == "filling":
                filling[worker.version] = None
            copies.update(dict.fromkeys(worker.copies))
        for version, shards in shards_of.items():
            if shards == replica.shards:
                self.whole.setdefault(version, []).append(replica.name)
        for version in filling:
            self.filling.setdefault(version, []).append(replica.name)
        for copied in copies:
            self.copies.setdefault(copied, []).append(replica.name)


def _model(state: State, model: Model) -> Generator[None, None, ModelView]:
    replicas, holders, sizes = [], _Holders(), dict[int, dict[int, int]]()
    for _, replica in sorted(model.replicas.items()):
        view = _replica(state, model, replica)
        replicas.append(view)
        holders.note(view)
        each = sizes.setdefault(view.shards, {})
        for worker in view.workers:
            each[worker.shard] = max(each.get(worker.shard, 0), worker.size_bytes)
        yield
    known = [record for _, record in sorted(model.versions.items(), reverse=True) if record.exists or record.holders]
    retained = model.retained()
    return ModelView(
        name=model.name,
        shards=model.shards,
        latest=model.latest,
        size_bytes=max((sum(each.values()) for each in sizes.values()), default=0),
        versions=tuple(
            _version(model, record, holders, state.now, is_retained=record.version in retained) for record in known
        ),
        replicas=tuple(replicas),
        newest=model.newest,
    )


def _version(model: Model, record: VersionRecord, found: _Holders, now: float, *, is_retained: bool) -> VersionView:
    holders = tuple(found.whole.get(record.version, ()))
    return VersionView(
        version=record.version,
        is_latest=record.version == model.latest,
        is_lost=model.is_lost(record),
        is_established=record.is_established,
        is_complete=record.exists,
        holders=holders,
        filling=tuple(found.filling.get(record.version, ())),
        last_holder="" if holders else record.last_holder,
        host_copies=tuple(found.copies.get(record.version, ())),
        is_retained=is_retained,
        cross_site_bytes=dict(record.cross_site_bytes),
        age_s=None if record.exists_since is None else max(0.0, now - record.exists_since),
    )


def _replica(state: State, model: Model, replica: Replica) -> ReplicaView:
    call, view = replica.call, None
    reasons = stalls.reasons_of(state, model, replica)
    if call is not None:
        stage = "failed" if call.error is not None else "finished" if call.is_over else "running"
        if stage == "running" and call.waiting is not None:
            stage = "waiting"
        over = call.error or call.waiting
        text = over.message if over is not None else ""
        if stage == "running":
            text = stalls.why_waits(replica, call, reasons)
        since_s = max(0.0, state.now - call.began)
        view = CallView(call.number, call.verb, call.spec, call.version, stage, text, since_s)
    workers = tuple(_worker(state, model, replica, member, why) for member, why in reasons)
    return ReplicaView(replica.name, replica.shards, workers, view)


def _worker(state: State, model: Model, replica: Replica, member: Member, waiting_for: str) -> WorkerView:
    report, content = member.report, member.content
    done, chunks = (content.buffer.done, content.buffer.chunks) if isinstance(content.buffer, Filling) else (0, 0)
    call = stalls.call_of(replica, member)
    since = model.closing.get(member.worker, call.began if call is not None else state.now)
    return WorkerView(
        shard=Shard(member.shard),
        state=type(content.buffer).__name__.lower(),
        version=version_in(content.buffer),
        done=done,
        chunks=chunks,
        size_bytes=report.size_bytes,
        session=member.session,
        lease_left_s=max(0.0, member.lease_end - state.now),
        connected=member.is_connected,
        readers=state.reads.load(member.worker),
        endpoints=member.hello.endpoints,
        host=member.hello.host,
        site=member.hello.site,
        reliable=member.hello.reliable,
        received_bytes=report.received_bytes,
        copies=tuple(copy.version for copy in content.copies if copy.whole and not copy.dropping),
        copies_filling=tuple(copy.version for copy in content.copies if not copy.whole),
        copies_left=report.copies_left,
        pins=report.pins[:MAX_PINS],
        is_writer=report.writes > 0 and model.writer is not None and model.writer.replica == member.hello.replica,
        heard_s=stalls.heard_s(state, member),
        is_silent=facts.is_silent(state, member),
        waiting_for=waiting_for,
        waits_s=max(0.0, state.now - since),
    )


def statistics(state: State) -> dict[str, int]:
    """Counters, and how much of everything there is."""
    return {
        "workers": len(state.members),
        "models": len(state.models),
        "connections": len(state.hellos),
        "open_reads": len(state.reads.all()),
        **state.counters,
    }
