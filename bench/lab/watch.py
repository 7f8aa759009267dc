"""A process that looks at the reference server all the time, as any operator can, and writes down what it shows."""

import time
from collections.abc import Callable

import msgspec

import tensorhub
from tensorhub import Unavailable
from tensorhub.protocol.status import ModelView, Status

from ..demo.logs import EventLog, now
from .events import Seen, SeenRead
from .job import MODEL, Job

LOOK_S = 0.05


def look_on(job: Job, log: EventLog, is_over: Callable[[], bool]) -> None:
    """Look until it is over; what is as before is not written again."""
    view = tensorhub.connect(job.server)
    before: Seen | None = None
    while not is_over():
        try:
            seen = seen_in(view.status(model=MODEL), job.name)
        except Unavailable:
            seen = None
        if seen is not None and (told := msgspec.structs.replace(seen, time=0.0)) != before:
            before = told
            log.write(seen)
        time.sleep(LOOK_S)


def seen_in(status: Status, process: str) -> Seen | None:
    """What matters here of the whole picture."""
    if not status.models:
        return None
    model = status.models[0]
    reads = [
        SeenRead(each.target, each.source, each.version, each.done, each.chunks, each.is_cross_site)
        for each in status.transfers
        if not each.is_void
    ]
    return Seen(
        time=now(),
        process=process,
        latest=-1 if model.latest is None else model.latest,
        has_latest=[*_holders(model), *_keepers(model)],
        copies={r.name: list(w.copies) for r in model.replicas for w in r.workers if w.copies},
        cross_site_bytes={v.version: sum(v.cross_site_bytes.values()) for v in model.versions if v.cross_site_bytes},
        reads=reads,
    )


def _holders(model: ModelView) -> tuple[str, ...]:
    return next((each.holders for each in model.versions if each.is_latest), ())


def _keepers(model: ModelView) -> tuple[str, ...]:
    return next((each.host_copies for each in model.versions if each.is_latest), ())
