"""What a worker says of itself: its whole state, as one report."""

from ..messages import Across, Report
from ..names import Digest
from .state import WorkerState


def report_of(worker: WorkerState) -> Report:
    """How things are here. It gets its number when it is sent."""
    layout, departure, proofs = worker.layout, worker.departure, worker.proofs
    return Report(
        number=0,
        session=worker.session,
        seen=worker.seen,
        buffer=worker.buffer,
        layout=layout.digest if layout is not None else Digest(""),
        size_bytes=layout.size_bytes if layout is not None else 0,
        call=worker.call.for_report() if worker.call is not None else None,
        ended=worker.ended,
        finished=worker.finished,
        missed=worker.missed,
        reading=worker.reading if not worker.slot.is_across else None,
        across=across_of(worker),
        over=tuple(worker.slot.parts.over),
        closed=worker.slot.closed,
        newest=proofs.newest,
        newest_receipt=proofs.newest_receipt,
        receipts=proofs.receipts_of(worker.versions_here),
        ceiling=proofs.ceiling,
        ceiling_receipt=proofs.ceiling_receipt,
        failures=tuple(worker.slot.failures),
        received_bytes=dict(worker.received_bytes),
        cross_site_bytes=dict(worker.cross_site_bytes),
        copies=worker.copies.for_report(),
        copies_left=worker.copies.room,
        copy_error=worker.copies.error,
        pins=worker.copies.pins,
        prefetch=worker.copies.prefetch,
        closing=departure is not None,
        leaving=departure is not None and departure.leaving_in > 0,
        claim=worker.claim if departure is None else None,
        claimed_in=worker.claimed_in,
        stops=worker.memory.is_stopping,
        # When its own lease is over, the server may have given it up, and gone on with others.
        roster=proofs.roster if worker.now < worker.slot.trust_until else None,
    )


def across_of(worker: WorkerState) -> Across | None:
    """The open read, if that is one across layouts."""
    slot, reading = worker.slot, worker.reading
    if reading is None or not slot.is_across:
        return None
    parts = slot.parts
    return Across(
        reading.version, reading.to_host, slot.root, reading.is_opened, parts.for_report(), tuple(parts.brought)
    )
