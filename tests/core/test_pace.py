"""Whether anything comes by a read, and how fast."""

from tensorhub.server.members import Capacity, Pace, is_too_slow, usual

MIB = 1 << 20
CHUNK = 4 * MIB


def told(pace: Pace, *, at: int, arrived: float, done: int | None = None, chunk: int = CHUNK) -> Pace:
    chunks = int(arrived) // chunk if done is None and chunk else done or 0
    pace.note(float(at), arrived_bytes=int(arrived), done=chunks, chunk_bytes=chunk, over_s=3.0)
    return pace


def after(seconds: int, rate: float, chunk: int = CHUNK) -> Pace:
    """A read that was told of once a second."""
    pace = Pace()
    for at in range(seconds + 1):
        told(pace, at=at, arrived=at * rate, chunk=chunk)
    return pace


def test_nothing_is_known_of_a_read_that_was_told_of_once() -> None:
    pace = told(Pace(), at=100, arrived=0)
    assert pace.rate is None
    assert not pace.is_still(1000.0, 2.0), "its reader has said nothing since"


def test_a_read_by_which_nothing_comes_stands_still() -> None:
    assert after(2, 0.0).is_still(2.0, 2.0)
    assert not after(1, 0.0).is_still(1.0, 2.0)


def test_a_slow_link_with_large_chunks_does_not() -> None:
    pace = after(3, 1.0 * MIB)
    assert pace.done == 0
    assert not pace.is_still(3.0, 2.0)
    assert pace.rate == 1.0 * MIB


def test_a_byte_now_and_then_is_nothing() -> None:
    pace = Pace()
    for at in range(20):
        told(pace, at=at, arrived=at // 4, done=0)
    assert pace.is_still(19.0, 2.0)


def test_waiting_for_a_source_that_waits_itself_is_no_standing_still() -> None:
    pace = after(2, 0.0)
    pace.wait(2.0)
    assert not told(pace, at=3, arrived=0).is_still(3.0, 2.0)
    assert told(pace, at=4, arrived=0).is_still(4.0, 2.0)


def test_a_reader_that_said_nothing_for_long_is_measured_anew() -> None:
    pace = after(5, 1.0 * MIB)
    told(pace, at=60, arrived=5 * MIB)
    assert pace.rate is None
    assert not pace.is_still(60.0, 2.0)


def test_another_transport_begins_to_count_anew() -> None:
    pace = after(5, 10.0 * MIB)
    told(pace, at=6, arrived=100, done=12)
    assert pace.rate is None
    for at in range(7, 11):
        told(pace, at=at, arrived=(at - 6) * MIB, done=12)
    assert pace.rate == 1.0 * MIB


def test_where_only_whole_chunks_are_seen_one_may_be_on_its_way() -> None:
    pace = Pace()
    for at in range(4):
        pace.note(float(at), arrived_bytes=0, done=at // 3, chunk_bytes=CHUNK, over_s=3.0)
    assert pace.rate == CHUNK / 3
    assert pace.unsure == CHUNK / 3
    assert not is_too_slow(pace, 1.9 * CHUNK, 3.0)
    assert is_too_slow(pace, 2.1 * CHUNK, 3.0)


def test_less_than_a_third_is_too_slow() -> None:
    pace = after(3, 1.0 * MIB)
    assert not is_too_slow(pace, 3.0 * MIB, 3.0)
    assert is_too_slow(pace, 3.1 * MIB, 3.0)
    assert not is_too_slow(after(2, 0.0), 1e12, 3.0), "it is not known yet"


def test_the_usual_rate_is_the_middle_one() -> None:
    assert usual([]) is None
    assert usual([5.0, 1.0]) == 5.0
    assert usual([1.0, 9.0, 2.0]) == 2.0


def test_what_a_source_can_bring_is_remembered_for_a_while() -> None:
    capacity = Capacity()
    capacity.note(0.0, 100.0, 12.0)
    capacity.note(12.0, 10.0, 12.0)
    assert capacity.best == 100.0
    capacity.note(12.1, 10.0, 12.0)
    assert capacity.best == 10.0
    capacity.note(13.0, 50.0, 12.0)
    assert capacity.best == 50.0
    capacity.forget(13.0)
    assert capacity.best == 0.0
