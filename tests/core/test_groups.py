"""What the shards of one replica do together."""

from tensorhub.protocol.messages import Answer, CallReport, Failure
from tensorhub.protocol.names import ReplicaName, Shard, Version
from tensorhub.server.groups import Replica

from .kit import called, worker

ZERO, ONE, TWO = Shard(0), Shard(1), Shard(2)


def replica(shards: int = 2) -> Replica:
    members = {Shard(shard): worker("rollout", shard) for shard in range(shards)}
    return Replica(ReplicaName("rollout"), shards, members)


def heard(group: Replica, shard: Shard, mine: CallReport) -> Answer:
    """What the shard hears of its call."""
    answer = group.answer(shard, mine)
    assert answer is not None
    return answer


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


def test_who_waits_for_a_shard_that_could_not_make_the_call_hears_why() -> None:
    group, why = replica(), Failure("layout-mismatch", "no shard has 'w'[299:300]")
    group.arrive(ZERO, called(1, "publish", 7), now=0.0)
    group.note_ended(ONE, 1, 0, missed=why)
    assert group.call is not None
    assert group.call.error is not None
    assert group.call.error.code == "group-incomplete"
    assert group.call.error.message.endswith("before all shards were done: no shard has 'w'[299:300]")
    told = heard(group, ZERO, called(1, "publish", 7))
    assert (told.error, told.instead) == (group.call.error, 0), "it is not left to wait in a call of its own"
    assert group.missed == (ONE, why)
    group.note_ended(ONE, 1, 0, missed=why)  # as it goes on to report
    assert group.missed == (ONE, why)
    group.note_ended(ZERO, 2, 0)
    assert group.missed is None


def test_who_differs_from_a_call_that_was_given_up_comes_to_the_next() -> None:
    for end in ("gives up", "goes on", "dies"):
        group = replica()
        group.arrive(ZERO, called(1), now=0.0)
        group.arrive(ONE, called(1, "replicate"), now=0.0)
        match end:
            case "gives up":
                group.note_ended(ZERO, 1, 0)
            case "goes on":
                group.arrive(ZERO, called(2, "replicate"), now=0.0)
            case "dies":
                group.lose(ZERO, "died")
        assert heard(group, ONE, called(1, "replicate")).instead == 2, end


# --- who comes to what is over ----------------------------------------------------------------------------------------


def given_up() -> Replica:
    """Shard 0 has given up position 1, to which shard 1 had not come."""
    group = replica()
    group.arrive(ZERO, called(1), now=0.0)
    group.note_ended(ZERO, 1, 0)
    return group


def test_where_ends_may_be_unknown_nobody_is_numbered_anew() -> None:
    group = given_up()
    assert group.answer(ONE, called(1), is_whole=False) is None
    assert group.answer(ZERO, called(1), is_whole=False) is not None  # who was there hears that it is over


def test_who_was_put_there_arrives_when_another_is_known_to_be_there_still() -> None:
    group = replica(3)
    group.arrive(ZERO, called(4), now=0.0, is_put=True)  # nobody is there whom it could have misunderstood
    group.arrive(ONE, called(4), now=0.0)
    group.arrive(Shard(2), called(4), now=0.0, is_put=True)
    assert group.call is not None
    assert (list(group.call.arrived), list(group.call.pending)) == ([ZERO, ONE], [Shard(2)])
    group.note_ended(ZERO, 4, 3)
    assert [heard(group, shard, called(4)).instead for shard in (ONE, Shard(2))] == [0, 5]


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_a_shard_that_saw_it_end_well_is_believed() -> None:
    group = replica()
    group.arrive(ONE, called(1), now=0.0, is_first=True)
    group.note_ended(ZERO, 1, 1)
    assert heard(group, ONE, called(1)).finished
