"""What the shards of one replica do together."""

from tensorhub.core.messages import Failure
from tensorhub.core.names import Digest, ReplicaName, Shard, Version
from tensorhub.core.server.groups import Replica, some_shards

from .kit import called, worker

ZERO, ONE = Shard(0), Shard(1)


def replica(shards: int = 2) -> Replica:
    members = {Shard(shard): worker("rollout", shard) for shard in range(shards)}
    return Replica(ReplicaName("rollout"), shards, members)


def code(failure: Failure | None) -> str:
    return failure.code if failure is not None else ""


def test_the_first_to_arrive_begins_it_and_the_others_join() -> None:
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    assert group.call is not None
    assert group.missing() == [1]
    group.arrive(ONE, called(1), now=0.0)
    assert group.missing() == []


def test_who_wants_to_publish_is_a_trainer_though_nothing_came_of_it_yet() -> None:
    for call, is_trainer in (
        (called(1, "publish", 7), True),
        (called(1, "unpublish", "", claim=Version(7)), True),
        (called(1, "unpublish", ""), False),
        (called(1, "replicate"), False),
    ):
        group = replica()
        group.arrive(ZERO, call, now=0.0)
        assert group.publishes is is_trainer


def test_the_stored_answer_is_everybodys() -> None:
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    assert group.call is not None
    group.call.version = Version(7)
    group.arrive(ONE, called(1), now=0.0)
    assert group.answer(ZERO, called(1)).version == group.answer(ONE, called(1)).version == 7


def test_another_verb_or_spec_is_a_mismatch_for_all() -> None:
    for other in (called(1, "replicate"), called(1, spec="latest-1"), called(1, spec=7)):
        group = replica()
        group.arrive(ZERO, called(1), now=0.0)
        group.arrive(ONE, other, now=0.0)
        assert code(group.answer(ZERO, called(1)).error) == "group-mismatch"
        assert code(group.answer(ONE, other).error) == "group-mismatch"


def test_a_shard_that_gives_up_fails_it_for_the_others() -> None:
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    group.arrive(ONE, called(1), now=0.0)
    group.note_ended(ZERO, 1, 0)
    assert code(group.answer(ONE, called(1)).error) == "group-incomplete"


def test_a_shard_that_saw_it_end_well_is_believed() -> None:
    group = replica()
    group.arrive(ONE, called(1), now=0.0)
    group.note_ended(ZERO, 1, 1)
    assert group.answer(ONE, called(1)).finished


def test_after_a_restart_a_late_shard_hears_that_it_had_finished() -> None:
    group = replica()
    group.note_ended(ZERO, 5, 5)
    group.arrive(ONE, called(5, resolved=Version(7)), now=0.0)
    answer = group.answer(ONE, called(5, resolved=Version(7)))
    assert (answer.finished, answer.version) == (True, 7)


def test_after_a_restart_a_late_shard_hears_that_it_had_failed() -> None:
    group = replica()
    group.note_ended(ZERO, 5, 4)
    group.arrive(ONE, called(5), now=0.0)
    assert code(group.answer(ONE, called(5)).error) == "group-incomplete"


def test_one_that_goes_on_fails_the_call_it_left() -> None:
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    group.arrive(ONE, called(1), now=0.0)
    group.arrive(ZERO, called(2), now=0.0)
    assert code(group.answer(ONE, called(1)).error) == "group-incomplete"
    assert group.answer(ZERO, called(2)).error is None


def test_a_position_long_past_is_over() -> None:
    group = replica()
    for number in (1, 2, 3):
        group.arrive(ZERO, called(number), now=0.0)
    answer = group.answer(ONE, called(1))
    assert code(answer.error) == "group-incomplete"


def test_a_death_fails_what_the_dead_had_arrived_at() -> None:
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    group.arrive(ONE, called(1), now=0.0)
    group.lose(ONE, "died")
    assert code(group.answer(ZERO, called(1)).error) == "group-incomplete"
    assert ONE not in group.members


def test_a_death_before_it_arrived_fails_it_too_and_its_next_life_comes_to_the_next() -> None:
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    group.lose(ONE, "died")
    assert code(group.answer(ZERO, called(1)).error) == "group-incomplete"
    group.note_ended(ZERO, 1, 0)
    group.arrive(ONE, called(2), now=0.0)
    assert group.answer(ONE, called(2)).error is None


def test_what_is_over_does_not_change() -> None:
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    assert group.call is not None
    group.call.finish()
    group.lose(ZERO, "died")
    group.note_ended(ONE, 1, 0)
    assert group.call.error is None


def test_what_was_resolved_before_a_restart_is_believed() -> None:
    group = replica()
    group.arrive(ZERO, called(3, resolved=Version(7)), now=0.0)
    group.arrive(ONE, called(3), now=0.0)
    assert group.answer(ONE, called(3)).version == 7


def test_roots_of_a_publish_are_kept_by_shard() -> None:
    group = replica()
    group.arrive(ZERO, called(1, "publish", 7, root=Digest("a")), now=0.0)
    group.arrive(ONE, called(1, "publish", 7, root=Digest("b")), now=0.0)
    assert group.call is not None
    assert group.call.arrived == {0: "a", 1: "b"}


def test_of_many_shards_a_few_are_named() -> None:
    assert some_shards([]) == ""
    assert some_shards(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some_shards(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7, …"
