"""Who is alive, and when to look at whom."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.names import Number
from tensorhub.server.members import Member, Members

from .kit import hello, worker


def member(name: str, lease_end: float) -> Member:
    return Member(hello(worker(name)), name, Number(1), lease_end)


def test_a_lease_that_is_renewed_does_not_end() -> None:
    members, one = Members(), member("a", 10.0)
    members.add(one)
    one.lease_end = 15.0
    assert members.due(10.0) == ([], [])
    assert members.next_time() == 15.0
    assert members.due(15.0) == ([one], [])


def test_a_member_can_be_looked_at_before_its_lease_ends() -> None:
    members, one = Members(), member("a", 10.0)
    members.add(one)
    members.wake(one, 3.0)
    members.wake(one, 7.0)  # later than what is asked for already
    assert members.next_time() == 3.0
    assert members.due(3.0) == ([], [one])
    assert members.due(9.9) == ([], [])
    assert members.due(10.0) == ([one], [])


def test_a_former_session_is_forgotten() -> None:
    members, old, new = Members(), member("a", 10.0), member("a", 30.0)
    members.add(old)
    del members[old.worker]
    members.add(new)
    assert members.due(20.0) == ([], [])
    assert members.due(30.0) == ([new], [])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 5.0), st.booleans()), max_size=40))
def test_nobody_is_missed_and_the_queue_does_not_grow(history: list[tuple[str, float, bool]]) -> None:
    members, now, alive = Members(), 0.0, {}
    for name, step_s, renews in history:
        now += step_s
        ended, _ = members.due(now)
        for one in ended:
            del members[one.worker]
            del alive[one.worker.replica]
        assert all(one.lease_end > now for one in alive.values())
        if name not in alive:
            alive[name] = member(name, now + 3.0)
            members.add(alive[name])
        elif renews:
            alive[name].lease_end = now + 3.0
        else:
            members.wake(alive[name], now + 1.0)
        assert members.next_time() <= min(one.lease_end for one in alive.values())
        assert len(members._times) <= 3 * len(alive) + 3
