"""When two states of the small cluster are one: the same but for counters, for when it was, and for words.

The whole state of all machines is written down, field by field, in one order. Of numbers that the server hands out only
the order counts, among those of one worker that are compared with each other: tickets with tickets, sessions with
sessions, a worker's reports with its reports; a watermark becomes the number of tickets below it, and a report that is
waited for the number of reports before it. Times count from now. Words for people and statistics are left out, and so
is what only keeps the server's numbers rising: each of its lives begins above all that were given out. Who is on a
roster is written down instead of the sum that stands for it; one with a session that nobody can show any more matches
nothing, whichever it is. A test holds this to account: of two states that are taken for one, all successors are the
same too.
"""

import marshal
from bisect import bisect_right
from collections import deque
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from itertools import product
from math import inf
from typing import Any

import msgspec

from tensorhub.protocol.messages import Hello, LayoutInfo, Orders, Report, Roster
from tensorhub.protocol.names import Number, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server.members import MODULUS, Content, Member, OpenRead, OpenReads, Roll, Tally
from tensorhub.server.state import State
from tensorhub.server.versions import Notary
from tensorhub.worker.state import ReportBook, WorkerState

from .actor import Actor

RAW, SKIP, DEADLINE, RATE, TICKET, ORDER, SESSION, MARK, REPORT, REPORT_MARK, ROLL, SUM = range(12)
OLD_S = 6.0  # longer ago than every patience in SETTINGS that can come due: long ago
SUSPICIOUS = 500_000  # numbers of the server start above: one that is not known as such would keep states apart

# Fields by what they are; all others are written as they stand.
TICKETS = ("ticket", "_of_reader", "_from_source")
MARKS = ("seen", "closed", "last_failed")
REPORT_MARKS = ("withdrawn_in", "leaving_in", "released_in", "_sent_at", "_since")
RATES = ("rate", "best", "usual", "must_beat", "unsure")
DEADLINES = (  # times that are compared with now only
    *("recovered_at", "trust_until", "lease_end", "until", "wakes_at", "avoided_until", "may_move_at", "slow_until"),
    *("left", "usual_until", "silent_at", "rested_at"),
)
SKIPPED = (
    *("_story", "effects", "counters", "message", "hint", "reason", "stop_reason", "why", "path", "transport", "story"),
    *("received_bytes", "cross_site_bytes", "last_holder", "started", "settings", "layouts", "first_number", "numbers"),
    *("key", "notary", "ceiling", "ceiling_receipt"),
    *("endpoints", "teller", "budget", "shape", "lives"),
    *("capacity", "looked_at"),  # for who is slow or rebalanced: nobody here
    *("_by", "_heap", "_held", "idle", "read_from", "_changes", "_known", "_glance", "noted"),  # follows from the rest
    *("others", "bound"),  # the same models once more, and who is of their sets
    *("happened", "settled_at"),  # only spares deciding for who would hear the same
    *("began", "since"),  # of a call: how long it misses a shard, and who came to it when; there is one shard
)
BY_CLASS = {
    (Orders, "number"): ORDER,
    (Orders, "acknowledged"): REPORT,
    (ReportBook, "acknowledged"): REPORT,
    (Report, "number"): REPORT,
    (ReportBook, "number"): REPORT,
    (Report, "seen"): SKIP,
    (Member, "former_seen"): SKIP,  # compared with those of siblings
    (WorkerState, "now"): SKIP,  # of its last event: each event brings its own
    (Member, "queued_at"): SKIP,  # when it is looked at although nothing may be due then
    (State, "now"): SKIP,
    # what follows from the rest
    **dict.fromkeys([(State, "speakers"), (Content, "held"), (Content, "versions"), (OpenReads, "current")], SKIP),
    **dict.fromkeys([(Roll, "upto"), (Roll, "witnessed"), (Roll, "unwitnessed"), (Roster, "number")], ROLL),
    (Member, "asked"): ROLL,  # all these are compared with each other, whoever they are about
    (Roster, "receipt"): SKIP,
    (Roster, "digest"): SUM,
    (Tally, "total"): SUM,
}

RANKED = (TICKET, ORDER, SESSION, REPORT, ROLL)
NOTARY = Notary()
CONTAINERS = (dict, list, tuple)

_plans: dict[type, list[tuple[str, int]]] = {}


def digest(state: object, now: float) -> int:
    """A number for the state, the same for all that are the same."""
    return int.from_bytes(blake2b(written(state, now), digest_size=8).digest(), "little")


def written(state: object, now: float) -> bytes:
    """The whole state, written down."""
    writer = _Writer(now)
    writer.write(state, RAW, None)
    for numbers in writer.numbers.values():
        _rank(numbers, writer.out)
    _put_sums(writer)
    return marshal.dumps(writer.out, 2)


def _rank(numbers: list[tuple[int, int, int]], out: list[Any]) -> None:
    """Put ranks where one worker's numbers belong: (place, value, kind)."""
    known = {kind: sorted({value for _, value, its in numbers if its == kind}) for kind in RANKED}
    for place, value, kind in numbers:
        if kind in (TICKET, SESSION, REPORT, ROLL):
            out[place] = bisect_right(known[kind], value)
        elif kind == REPORT_MARK:
            out[place] = (bisect_right(known[REPORT], value), value in known[REPORT])
        else:
            out[place] = (bisect_right(known[TICKET], value), bisect_right(known[ORDER], value))


def _put_sums(writer: "_Writer") -> None:
    """Put who is on a roster where its sum belongs: of each worker, which of the sessions that somebody knows."""
    if not writer.sums:
        return
    sessions: list[list[tuple[WorkerId | None, int]]] = []
    for about, numbers in writer.numbers.items():
        if about is not None:
            sessions.append(
                [(None, 0), *((about, s) for s in sorted({n for _, n, kind in numbers if kind == SESSION}))]
            )
    found: dict[int, tuple[int, ...]] = {}
    for chosen in product(*(range(len(each)) for each in sessions)):
        total = sum(_key(*each[at]) for each, at in zip(sessions, chosen, strict=True)) % MODULUS
        found[total] = chosen
    for place, total in writer.sums:
        writer.out[place] = found.get(total, "nobody's")


def _key(worker: WorkerId | None, session: int) -> int:
    """What the session adds to a sum."""
    if worker is None:
        return 0
    key = _keys.get((worker, session))
    if key is None:
        key = _keys[worker, session] = NOTARY.session(worker, Number(session))
    return key


_keys: dict[tuple[WorkerId, int], int] = {}


class _Writer:
    """Writes values one after another into `out`; numbers of the server are filled in afterwards."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.out: list[Any] = []
        self.numbers: dict[WorkerId | None, list[tuple[int, int, int]]] = {}
        self.sums: list[tuple[int, int]] = []

    def write(self, value: Any, kind: int, about: WorkerId | None) -> None:
        """`about`: the worker that this is about."""
        kind_of = type(value)
        if kind == SUM:
            self.sums.append((len(self.out), int(value, 16) if kind_of is str else value))
            self.out.append(None)
        elif value is None or kind_of is str or kind_of is bool:
            self.out.append(value)
        elif kind_of is int:
            self._write_int(value, kind, about)
        elif kind_of is float:
            is_rate = kind == RATE or value in (inf, -inf)
            self.out.append(value if is_rate else max(round(value - self.now, 6), 0.0 if kind == DEADLINE else -OLD_S))
        elif kind_of is WorkerId:
            self.out.append(value.replica)
        elif isinstance(value, list | tuple | deque):
            self.out.append(len(value))
            for each in value:
                self.write(each, kind, about)
        elif isinstance(value, dict):
            self.out.append(len(value))
            for key, each in value.items():
                whose = key if type(key) is WorkerId else key[0] if type(key) is tuple else about
                self.write(key, kind, whose)
                self.write(each, kind, whose)
        elif kind_of is Hello:
            self.out.append(value.life)
        elif kind_of in (LayoutInfo, Settings):
            self.out.append("as ever")
        else:
            self._write_object(value, kind_of, about)

    def _write_int(self, value: int, kind: int, about: WorkerId | None) -> None:
        if kind >= TICKET and value:  # 0 is none
            self.numbers.setdefault(about if kind != ROLL else None, []).append((len(self.out), value, kind))
            self.out.append(None)
        else:
            assert value < SUSPICIOUS, f"{value} seems to be a number of the server, which canon.py does not know"
            self.out.append(value)

    def _write_object(self, value: Any, kind_of: type, about: WorkerId | None) -> None:
        plan = _plans.get(kind_of)
        if plan is None:
            plan = _plans[kind_of] = _plan(value)
        if kind_of is Actor:
            about = value.worker.me
        elif kind_of is Member:
            about = value.worker
        elif kind_of is OpenRead:
            about = value.reader
        out = self.out
        out.append(kind_of.__name__)
        for name, kind in plan:  # most fields are plain, and written without more ado
            found = getattr(value, name)
            is_plain = found is None or found is True or found is False or type(found) is str
            if (is_plain and kind != SUM) or (type(found) is int and kind == RAW and found < SUSPICIOUS):
                out.append(found)
            elif type(found) in CONTAINERS and not found:
                out.append(0)
            else:
                self.write(found, kind, about)


def _plan(value: Any) -> list[tuple[str, int]]:
    """The fields of such an object that count, and as what."""
    kind_of = type(value)
    if isinstance(value, msgspec.Struct):
        names = list(kind_of.__struct_fields__)
    elif hasattr(value, "__dict__"):
        names = list(vars(value))
    else:
        assert is_dataclass(value), f"how is a {kind_of.__name__} written down?"
        names = [field.name for field in fields(value)]
    found = []
    for name in names:
        kind = MARK if name in MARKS else TICKET if name in TICKETS else REPORT_MARK if name in REPORT_MARKS else RAW
        kind = RATE if name in RATES else kind
        kind = SESSION if name in ("session", "former_session") else DEADLINE if name in DEADLINES else kind
        kind = BY_CLASS.get((kind_of, name), SKIP if name in SKIPPED or name.endswith("_s") else kind)
        if kind != SKIP:
            found.append((name, kind))
    return found
