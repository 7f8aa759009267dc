"""What the lines of the status table are: shards of a replica that say the same become one line.

A replica of 64 shards that all hold version 7 is one line; the one shard that lags behind is a line of its own.
"""

from dataclasses import dataclass, replace

from ..core.snapshot import ModelView, ReplicaView, Status, Transfer, WorkerView


@dataclass(frozen=True)
class Row:
    """Shards of one replica that are in the same state. `worker` is None for shards that nobody is."""

    shards: tuple[int, ...]
    worker: WorkerView | None
    transfers: tuple[Transfer, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing about it needs a line of its own."""
        return not self.transfers and (self.worker is None or self.worker.state != "filling")


def rows_of(replica: ReplicaView, transfers: dict[tuple[str, int], list[Transfer]]) -> tuple[Row, ...]:
    """The lines of one replica, in order of their first shard. `transfers`: by (target, shard), of its model."""
    workers = {worker.shard: worker for worker in replica.workers}
    rows: list[Row] = []
    for shard in range(max(replica.shards, max(workers, default=-1) + 1)):
        reads = tuple(transfers.get((replica.name, shard), ()))
        row = Row((shard,), workers.get(shard), reads)
        alike = next((n for n, other in enumerate(rows) if _are_alike(row, other)), None)
        if alike is None:
            rows.append(row)
        else:
            rows[alike] = _together(rows[alike], row)
    return tuple(rows)


def transfers_of(status: Status, model: ModelView) -> dict[tuple[str, int], list[Transfer]]:
    """The reads of one model, by (target, shard)."""
    found: dict[tuple[str, int], list[Transfer]] = {}
    for transfer in status.transfers:
        if transfer.model == model.name:
            found.setdefault((transfer.target, transfer.shard), []).append(transfer)
    return found


def _are_alike(row: Row, other: Row) -> bool:
    if not row.is_plain or not other.is_plain:
        return False
    a, b = row.worker, other.worker
    if a is None or b is None:
        return a is b
    return (a.state, a.version, a.connected, a.reliable, a.site) == (
        b.state,
        b.version,
        b.connected,
        b.reliable,
        b.site,
    )


def _together(row: Row, more: Row) -> Row:
    worker = row.worker
    if worker is not None and more.worker is not None:
        received = dict(worker.received_bytes)
        for source, size_bytes in more.worker.received_bytes.items():
            received[source] = received.get(source, 0) + size_bytes
        worker = _merged(worker, more.worker, received)
    return replace(row, shards=row.shards + more.shards, worker=worker)


def _merged(a: WorkerView, b: WorkerView, received: dict[str, int]) -> WorkerView:
    """Two workers as one line: what adds up is added, and of a lease the shorter one matters."""
    fields = {name: getattr(a, name) for name in a.__struct_fields__}
    fields |= {
        "size_bytes": a.size_bytes + b.size_bytes,
        "readers": a.readers + b.readers,
        "lease_left_s": min(a.lease_left_s, b.lease_left_s),
        "received_bytes": received,
        "endpoints": a.endpoints + b.endpoints,
        "host": a.host if a.host == b.host else "",
    }
    return WorkerView(**fields)


@dataclass(frozen=True)
class Progress:
    """Where one read stood when it was last seen to move, and how fast it had come there."""

    done_bytes: float
    at_s: float
    rate_bytes_per_s: float | None = None  # None: it has not been seen to move


def progress_after(before: dict[int, Progress], status: Status, now_s: float) -> dict[int, Progress]:
    """How far every read is, by ticket, once this picture has been seen too."""
    return {read.ticket: _moved(before.get(read.ticket), bytes_done(read), now_s) for read in status.transfers}


def _moved(then: Progress | None, done_bytes: float, now_s: float) -> Progress:
    if then is None:
        return Progress(done_bytes, now_s)
    if done_bytes == then.done_bytes or now_s <= then.at_s:
        return then
    return Progress(done_bytes, now_s, max(0.0, (done_bytes - then.done_bytes) / (now_s - then.at_s)))


def rates_of(progress: dict[int, Progress], now_s: float, *, fresh_s: float) -> dict[int, float]:
    """Bytes per second of each read that has moved within the last `fresh_s`, by ticket."""
    return {
        ticket: read.rate_bytes_per_s
        for ticket, read in progress.items()
        if read.rate_bytes_per_s is not None and now_s - read.at_s <= fresh_s
    }


def bytes_done(transfer: Transfer) -> float:
    """What the target has of the version, as far as chunks tell."""
    return transfer.size_bytes * transfer.done / transfer.chunks if transfer.chunks else 0.0
