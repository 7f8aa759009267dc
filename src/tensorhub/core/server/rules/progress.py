"""How a read goes, compared with others: over what distance, and whether anything arrives."""

from math import inf

from .. import facts
from ..open_reads import OpenRead
from ..pace import Tier
from ..state import State

MAX_HOPS = 64  # of a chain of readers
REPORTS = 1.75  # without anything: two, less the time by which the second may come early


def patience_s(state: State) -> float:
    """How long a read may stand still."""
    return max(state.settings.stalled_s, REPORTS * state.report_s)


def window_s(state: State) -> float:
    """Over how long a rate is measured."""
    return max(state.settings.slow_s, 2 * state.report_s)


def its_own(state: State, read: OpenRead) -> OpenRead | None:
    """The read by which its source, if it lives and is still filling, gets the version itself."""
    source = state.members.get(read.source)
    if source is None or not facts.is_here(state, source) or facts.is_full(source, read.version, read.grant.from_host):
        return None
    its_own = state.reads.current.get(read.source)
    if its_own is None or (its_own.version, its_own.grant.to_host) != (read.version, read.grant.from_host):
        return None
    return its_own


def is_paused(state: State, read: OpenRead) -> bool:
    """Its source is here, has a part of the version, and does nothing for the rest: it has something else to do."""
    source = state.members.get(read.source)
    if source is None or not facts.is_here(state, source) or facts.is_full(source, read.version, read.grant.from_host):
        return False
    return its_own(state, read) is None


def is_held_up(state: State, read: OpenRead) -> bool:
    """Nothing comes by it, and its reader is there to say so."""
    reader = state.members.get(read.reader)
    return reader is not None and facts.is_here(state, reader) and read.pace.is_still(state.now, patience_s(state))


def is_in_vain(state: State, read: OpenRead) -> bool:
    """Nothing comes by it, and its source has no session: it may be that nothing will.

    Right after a restart it is not known yet who has none.
    """
    is_lost = read.source not in state.members and not state.is_recovering
    return is_lost and read.pace.is_still(state.now, patience_s(state))


def is_cut_off(state: State, read: OpenRead) -> bool:
    """Nothing comes by it, nor will: somebody further up reads in vain, or does not read the rest."""
    above: OpenRead | None = read
    for _ in range(MAX_HOPS):
        if above is None:
            return False
        if is_in_vain(state, above):
            return True
        if not is_held_up(state, above):
            return False
        if is_paused(state, above):
            return True
        above = its_own(state, above)
    return False


def cannot_begin(state: State, read: OpenRead) -> bool:
    """Its reader has had permission for long, and a former read of the reader does not stop."""
    return begins_until(state, read) <= state.now


def begins_until(state: State, read: OpenRead) -> float:
    """Until then its reader may take to stop a former read; if there is none, for ever."""
    reader = state.members.get(read.reader)
    told = reader.report.reading if reader is not None and facts.is_here(state, reader) else None
    return read.began_at + patience_s(state) if told is not None and told.ticket < read.ticket else inf


def tier(state: State, read: OpenRead) -> Tier:
    """Over what distance it reads: (from another site, from another host)."""
    reader, source = state.members.get(read.reader), state.members.get(read.source)
    if reader is None or source is None:
        return read.grant.is_cross_site, True
    return source.hello.site != reader.hello.site, source.hello.host != reader.hello.host
