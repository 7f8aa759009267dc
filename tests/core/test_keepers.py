"""Who makes a host copy ahead of need: the best of those who can, whoever was offered first."""

from tensorhub.protocol.names import WorkerId, worker_id
from tensorhub.server.members import Keepers

A, B, C = (worker_id("policy", name, 0) for name in "abc")


def everybody(worker: WorkerId) -> bool:
    return True


def test_the_smallest_rank_is_the_best() -> None:
    keepers = Keepers()
    for rank in [(False, True, C), (False, True, A), (True, False, B)]:
        keepers.offer(rank)
    assert keepers.best(everybody) == A
    keepers.offer((False, False, C))  # it has made a copy since
    assert keepers.best(everybody) == C


def test_who_is_not_able_is_forgotten_until_offered_again() -> None:
    keepers = Keepers()
    keepers.offer((False, True, A))
    keepers.offer((False, True, B))
    assert keepers.best(lambda worker: worker != A) == B
    assert keepers.best(everybody) == B
    keepers.offer((False, True, A))
    assert keepers.best(everybody) == A


def test_nobody_is_nobody() -> None:
    keepers = Keepers()
    assert keepers.best(everybody) is None
    keepers.offer((False, True, A))
    assert keepers.best(lambda worker: False) is None


def test_a_rank_that_was_replaced_counts_no_more() -> None:
    keepers = Keepers()
    keepers.offer((False, False, B))
    keepers.offer((True, True, B))
    keepers.offer((False, True, A))
    assert keepers.best(everybody) == A


def test_of_those_who_come_and_go_nothing_is_left() -> None:
    keepers = Keepers()
    keepers.offer((False, False, A))
    keepers.chosen = keepers.best(everybody)
    for number in range(1000):
        gone = worker_id("policy", f"b{number}", 0)
        keepers.offer((False, True, gone))
        assert not keepers.withdraw(gone)
    assert len(keepers._heap) < 40
    assert list(keepers._ranks) == [A]
    assert keepers.withdraw(A)
    assert keepers.best(everybody) is None
