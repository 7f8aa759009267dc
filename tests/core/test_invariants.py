"""A machine that contradicts itself is found out, and one that does not is left alone."""

from collections.abc import Callable

import pytest

from tensorhub.protocol.errors import InvariantViolation
from tensorhub.protocol.messages import (
    Empty,
    Filling,
    Holding,
    HostCopy,
    LayoutInfo,
    Reading,
    Report,
    Source,
    Vacated,
)
from tensorhub.protocol.names import Digest, Shard, Ticket, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server
from tensorhub.server.members import LayoutKey, OpenRead
from tensorhub.worker import events
from tensorhub.worker.machine import Worker
from tensorhub.worker.state import Call

from .kit import LAYOUT, grant, hello, worker

ROOT = Digest("r")
ONE, TWO = Version(1), Version(2)
READING = Reading(Ticket(5), (Source(worker("trainer")),), TWO)
CALL = Call("update", "latest", Digest(""), 0.0, 60.0)


def somebody(**state: object) -> Worker:
    """A worker in that state; `buffer` and the like are its memory's, `reading` and the like its read slot's."""
    found = Worker(worker("rollout"))
    found.handle(events.Registered(LayoutInfo.of(LAYOUT), LAYOUT.digest(), 16, 1), now=0.0)
    for name, value in state.items():
        owners = (found.state.memory if name in ("buffer", "serving") else found.state.slot, found.state)
        setattr(owners[name == "call"], name, value)
    return found


BAD: list[tuple[dict[str, object], str]] = [
    ({"buffer": Empty(), "reading": READING}, "into a buffer that is"),
    ({"buffer": Vacated(ONE, ROOT), "serving": ONE}, "has vacated 1 and serves 1"),
    ({"buffer": Filling(TWO), "reading": READING, "closed": Ticket(5), "call": CALL}, "called closed up to 5"),
    ({"buffer": Filling(TWO), "serving": TWO}, "is in no call"),
    ({"buffer": Empty(), "serving": ONE}, "from an empty buffer"),
    ({"buffer": Holding(ONE, ROOT)}, "holds 1 and serves None"),
    ({"buffer": Holding(ONE, ROOT), "serving": ONE, "reading": READING, "is_stopping": True}, "still writes"),
]


@pytest.mark.parametrize(("state", "what"), BAD, ids=str)
def test_a_worker_that_contradicts_itself_is_found(state: dict[str, object], what: str) -> None:
    with pytest.raises(InvariantViolation, match=what):
        somebody(**state).check_invariants()


@pytest.mark.parametrize(("copies", "is_going", "is_wrong"), [(1, False, False), (2, False, True), (2, True, False)])
def test_no_worker_has_more_host_copies_than_fit(copies: int, is_going: bool, is_wrong: bool) -> None:
    it = somebody()
    mine = it.state.copies
    mine.by_version = {Version(n): HostCopy(n, Version(n), ROOT, layout=mine.layout) for n in range(1, copies + 1)}
    if is_going:
        mine.leave(ONE, next_report=1)
    if is_wrong:
        with pytest.raises(InvariantViolation, match="has 2 host copies where 1 are allowed"):
            it.check_invariants()
    else:
        it.check_invariants()


# --- the server -------------------------------------------------------------------------------------------------------


A, B = worker("a"), worker("b")


def cluster() -> Server:
    """A server with two members; the first holds version 1."""
    server = Server(Settings(), 0.0, 1, fresh=True)
    for who in (A, B):
        sender = str(who)
        server.handle(hello(who, life=sender), sender=sender, now=0.0)
        buffer = Holding(ONE, ROOT) if who == A else Empty()
        server.handle(Report(1, buffer=buffer, layout=LAYOUT.digest()), sender=sender, now=0.0)
    return server


def read(ticket: int, reader: WorkerId, source: WorkerId, *, is_void: bool = False, version: int = 1) -> OpenRead:
    return OpenRead(grant(ticket, source=source, version=version), reader, LayoutKey(1, Shard(0)), 0.0, is_void)


def _two_at_once(server: Server) -> None:
    server.state.open_read(read(100, B, A))
    server.state.open_read(read(101, B, A))


def _of_nobody(server: Server) -> None:
    server.state.open_read(read(100, worker("nobody"), A))


def _in_a_ring(server: Server) -> None:
    server.state.open_read(read(100, B, A))
    server.state.open_read(read(101, A, B))


def _held_by_nobody(server: Server) -> None:
    server.state.models[A.model].record(ONE).holders[LayoutKey(1, Shard(0))][worker("nobody")] = None


def _held_by_who_has_it_not(server: Server) -> None:
    server.state.models[A.model].record(ONE).holders[LayoutKey(1, Shard(0))][B] = None


def _gone(server: Server) -> None:
    server.state.models[A.model].replicas[A.replica].members[Shard(1)] = worker("a", 1)


def _read_from_unnoticed(server: Server) -> None:
    server.state.reads.add(read(100, B, A))


def _of_unknown_content(server: Server) -> None:
    server.state.models[A.model].record(ONE).roots.clear()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (_read_from_unnoticed, "serves 1 reads, and is kept as if it were otherwise"),
        (_of_unknown_content, "has 1 with the content r, and that is kept as None"),
        (_two_at_once, "may read 100 and 101 at once"),
        (_of_nobody, "who has no session"),
        (_in_a_ring, "reads from itself"),
        (_held_by_nobody, "counts as a holder of 1 and has no session"),
        (_held_by_who_has_it_not, "counts as a holder of 1 and says"),
        (_gone, "counts .* as its shard 1"),
    ],
)
def test_a_server_that_contradicts_itself_is_found(spoil: Callable[[Server], None], what: str) -> None:
    server = cluster()
    server.check_invariants()
    spoil(server)
    with pytest.raises(InvariantViolation, match=what):
        server.check_invariants()


def test_a_read_taken_back_contradicts_nothing() -> None:
    server = cluster()
    server.state.open_read(read(100, B, A, is_void=True))
    server.state.open_read(read(101, B, A))
    model = server.state.models[A.model]
    model.add_holder(model.record(ONE), B, LayoutKey(1, Shard(0)))  # it is about to have it
    server.check_invariants()
