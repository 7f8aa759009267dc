"""Which reads may be going on."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.names import Shard, Ticket, Version
from tensorhub.server.members import LayoutKey, OpenRead, OpenReads

from .kit import grant, worker


def read(ticket: int, reader: str, source: str) -> OpenRead:
    return OpenRead(grant(ticket, source=worker(source)), worker(reader), LayoutKey(1, Shard(0)))


def test_a_read_is_found_from_both_ends() -> None:
    reads = OpenReads()
    one = read(1, "b", "a")
    reads.add(one)
    assert reads.of(worker("b")) == reads.from_source(worker("a")) == reads.all() == [one]
    assert (reads.load(worker("a")), reads.load(worker("b"))) == (1, 0)
    assert reads.current.get(worker("b")) is one


def test_what_was_taken_back_stays_open_and_is_not_gone_on_with() -> None:
    reads = OpenReads()
    old, new = read(1, "b", "a"), read(2, "b", "c")
    reads.add(old)
    reads.take_back(old)
    reads.add(new)
    assert reads.current.get(worker("b")) is new
    assert reads.load(worker("a")) == 1
    assert reads.close(worker("b"), Ticket(1)) == [old]
    assert reads.load(worker("a")) == 0


def test_closing_everything_leaves_nothing() -> None:
    reads = OpenReads()
    for ticket in (1, 2, 3):
        reads.add(read(ticket, "b", "a"))
    reads.close(worker("b"), None)
    assert reads.all() == []
    assert reads.from_source(worker("a")) == []


def test_two_readers_that_claim_one_ticket_do_not_share_it() -> None:
    reads = OpenReads()
    reads.add(read(1, "b", "a"))
    reads.add(read(1, "c", "a"))
    reads.close(worker("b"), None)
    assert reads.load(worker("a")) == 1


def test_who_reads_behind_whom() -> None:
    reads = OpenReads()
    for ticket, (reader, source) in enumerate(["ba", "cb", "db", "fe"], start=1):
        reads.add(read(ticket, reader, source))
    version = reads.all()[0].version
    assert list(reads.readers_behind(worker("a"), Version(version + 1))) == [worker("a")]
    names = [who.replica for who in reads.readers_behind(worker("a"), version)]
    assert sorted(names) == ["a", "b", "c", "d"]
    assert [who.replica for who in reads.chain(worker("d"))] == ["b", "a"]
    assert reads.chain(worker("a")) == []


names = st.sampled_from("abcd")
steps = st.lists(
    st.tuples(st.just("add"), names, names, st.integers(1, 9))
    | st.tuples(st.just("close"), names, names, st.none() | st.integers(0, 9)),
    max_size=30,
)


@given(steps)
def test_both_ends_agree_after_anything(history: list[tuple[str, str, str, int | None]]) -> None:
    reads = OpenReads()
    for what, reader, source, ticket in history:
        known = [one.ticket for one in reads.of(worker(reader))]
        if what == "close":
            over = reads.close(worker(reader), None if ticket is None else Ticket(ticket))
            assert all(ticket is None or one.ticket <= ticket for one in over)
        elif ticket is not None and ticket not in known:
            reads.add(read(ticket, reader, source))
        mine = sorted((one.reader, one.ticket) for one in reads.all())
        theirs = sorted((one.reader, one.ticket) for name in "abcd" for one in reads.from_source(worker(name)))
        assert mine == theirs
