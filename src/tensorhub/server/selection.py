"""Rule: which source a reader gets, by the predicted finish of its read."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ..protocol.names import WorkerId
from . import state as facts
from .members import OpenRead, Tier
from .state import State

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
    is_slow: bool = False  # a reader has left it for that, lately
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


# --- How a read goes, compared with others: over what distance, and whether anything arrives.


MAX_HOPS = 64  # of a chain of readers
REPORTS = 1.75  # without anything: two, less the time by which the second may come early


def patience_s(state: State) -> float:
    """How long a read may stand still."""
    return max(state.settings.stalled_s, REPORTS * state.report_s)


def pace_window_s(state: State) -> float:
    """Over how long a rate is measured."""
    return max(state.settings.slow_s, 2 * state.report_s)


def own_pace(state: State, read: OpenRead) -> OpenRead | None:
    """The read by which its source, if it lives and is still filling, gets the version itself."""
    source = state.members.get(read.source)
    if source is None or not facts.is_here(state, source) or facts.is_full(source, read.version, read.from_host):
        return None
    own_pace = state.reads.current.get(read.source)
    if own_pace is None or (own_pace.version, own_pace.grant.to_host) != (read.version, read.from_host):
        return None
    return own_pace


def is_paused(state: State, read: OpenRead) -> bool:
    """Its source is here, has a part of the version, and does nothing for the rest: it has something else to do."""
    source = state.members.get(read.source)
    if source is None or not facts.is_here(state, source) or facts.is_full(source, read.version, read.from_host):
        return False
    return own_pace(state, read) is None


def is_held_up(state: State, read: OpenRead) -> bool:
    """Nothing comes by it, and its reader is there to say so."""
    reader = state.members.get(read.reader)
    return reader is not None and facts.is_here(state, reader) and read.pace.is_still(state.now, patience_s(state))


def brings_nothing(state: State, read: OpenRead) -> bool:
    """Nothing comes by it, and a source of it has no session: it may be that nothing will.

    Right after a restart it is not known yet which workers have none.
    """
    is_lost = any(each.worker not in state.members for each in read.sources) and not state.is_recovering
    return is_lost and read.pace.is_still(state.now, patience_s(state))


def is_cut_off(state: State, read: OpenRead) -> bool:
    """Nothing comes by it, nor will: a source further up gets nothing, or does not read the rest."""
    above: OpenRead | None = read
    for _ in range(MAX_HOPS):
        if above is None:
            return False
        if brings_nothing(state, above):
            return True
        if not is_held_up(state, above):
            return False
        if is_paused(state, above):
            return True
        above = own_pace(state, above)
    return False


def cannot_begin(state: State, read: OpenRead) -> bool:
    """Its reader has had permission for long, and a former read of the reader does not stop."""
    return begins_until(state, read) <= state.now


def begins_until(state: State, read: OpenRead) -> float:
    """Until then its reader may take to stop a former read; if there is none, for ever."""
    reader = state.members.get(read.reader)
    told = reader.report.reading if reader is not None and facts.is_here(state, reader) else None
    return read.began_at + patience_s(state) if told is not None and told.ticket < read.ticket else inf


def tier_of(state: State, read: OpenRead) -> Tier:
    """Over what distance it reads: (from another site, from another host)."""
    reader, source = state.members.get(read.reader), state.members.get(read.source)
    if reader is None or source is None:
        return read.grant.source.is_cross_site, True
    return source.hello.site != reader.hello.site, source.hello.host != reader.hello.host
