"""What is known of a read: whether it brings anything, how fast, and what is usual. The rule: tests/scenarios."""

from tensorhub.protocol.names import Version
from tensorhub.server.members import Avoided, Pace, upper_quartile
from tensorhub.server.versions import VersionRecord

from .kit import worker

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


def test_where_only_whole_chunks_are_seen_the_rate_may_be_one_chunk_higher() -> None:
    pace = Pace()
    for at in range(4):
        pace.note(float(at), arrived_bytes=0, done=at // 3, chunk_bytes=CHUNK, over_s=3.0)
    assert pace.rate == 2 * CHUNK / 3


def test_a_quarter_of_the_readers_reach_the_usual_rate() -> None:
    assert upper_quartile([]) is None
    assert upper_quartile([1.0]) == 1.0
    assert upper_quartile([9.0, 1.0, 1.0]) == 9.0
    assert upper_quartile([9.0, *[1.0] * 7]) == 1.0, "one of eight says nothing"


def test_the_best_rates_of_the_last_readers_are_remembered() -> None:
    record, tier = VersionRecord(Version(1)), (False, True)
    for name, rate in (("a", 1.0), ("b", 2.0), ("a", 0.5), ("c", 3.0)):
        record.note_rate(tier, worker(name), rate, 2)
    assert record.rates[tier] == {worker("a"): 1.0, worker("c"): 3.0}


def test_a_source_is_avoided_twice_as_long_each_time_up_to_a_limit() -> None:
    avoided, lengths = Avoided(), []
    for _ in range(5):
        avoided = avoided.again(100.0, 12.0, 3)
        lengths.append(avoided.until - 100.0)
    assert lengths == [12.0, 24.0, 48.0, 96.0, 96.0]
