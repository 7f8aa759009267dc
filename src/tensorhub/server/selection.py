"""Rule: which source a reader gets, by the predicted finish of its read."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..protocol.names import WorkerId

# --- The choice of a source: facts in, (source, reason) out.
#
# The rule minimises the predicted finish of the read. A source's uplink is shared by its readers: the fewer the better;
# a source that is itself still filling is as good as a full one, because its reader follows one chunk behind. So
# readers that start together form a chain, and N of them take about the time of one (the paper's pipeline
# replication). Among equals a replica that only relays is preferred to the one that published: the trainer's uplink
# is the scarce one. Between sites the uplink that is shared is the whole site's, whichever of its workers serves:
# what counts there is how many reads leave the site already, so that sites form a chain too, and about one copy
# leaves each.


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the rule knows of one worker that could be the source."""

    worker: WorkerId
    load: int  # reads open on it
    is_full: bool  # has every chunk
    done: int  # chunks in place, of one that is filling
    published: bool  # by this worker itself
    is_withdrawing: bool
    is_doubtful: bool  # it seems to be dead or unreachable
    is_near: bool  # on the reader's own host
    is_same_site: bool
    avoided_until: float  # it failed this reader lately; -inf: it did not
    from_host: bool = False  # its host copy rather than its buffer
    is_slow: bool = False  # it is avoided: a reader has left it for that, lately
    leaving_site: int = 0  # reads by others that leave its site already, where the reader is in another

    @property
    def place(self) -> tuple[WorkerId, bool]:
        """What of it is read: its host copy if true."""
        return self.worker, self.from_host


def choose_source(candidates: Iterable[Candidate], *, now: float) -> tuple[Candidate, str] | None:
    """The best source and why, or None if there is none that may be tried now.

    One that seems to be dead comes after all others; one that is withdrawing is taken only where no other worker that
    seems to live has the version; one that failed this reader lately is not tried before its time.
    """
    usable = [candidate for candidate in candidates if candidate.avoided_until <= now]
    best = min(usable, key=_rank, default=None)
    return None if best is None else (best, _reason(best, len(usable)))


# Two other rules follow this order, and have to change with it. `sources.idle` takes of many holders the first idle one
# that is full, by name. `slow._better` moves a reader to an idle source before it looks at any other.
def _rank(candidate: Candidate) -> tuple[object, ...]:
    return (
        candidate.is_doubtful,
        candidate.is_withdrawing,
        not candidate.is_same_site,
        candidate.is_slow,
        candidate.leaving_site,
        candidate.load,
        candidate.published,
        not candidate.is_near,
        not candidate.is_full,
        -candidate.done,
        candidate.worker,
        candidate.from_host,
    )


def _reason(best: Candidate, usable: int) -> str:
    place = " from host memory" if best.from_host else ""
    what = f"full{place}" if best.is_full else f"filling{place}, {best.done} chunks in place"
    role = "publisher" if best.published else "relay"
    load = "idle" if best.load == 0 else f"serves {best.load} more"
    where = "same host" if best.is_near else ("same site" if best.is_same_site else "other site")
    where += f" that {best.leaving_site} more leave" if best.leaving_site else ""
    leaving = ", withdrawing, but no other worker has it" if best.is_withdrawing else ""
    doubtful = ", in doubt" if best.is_doubtful else (", slow" if best.is_slow else "")
    return f"{role}, {what}, {load}, {where}{leaving}{doubtful}; best of {usable}"
