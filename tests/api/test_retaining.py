"""What a trainer may keep by default is what it has asked to be kept."""

import pytest

import tensorhub


@pytest.mark.parametrize("retain", [None, 1, 2, 3])
def test_a_trainer_far_ahead_keeps_as_many_versions_as_it_asked_for(server, join, retain):
    """And the newest one that was safe outside it, whose holder has gone: as when the only engine was stopped."""
    trainer, array = join("trainer", retain=retain)
    trainer.publish(0)
    rollout, _ = join("rollout", reliable=False)
    rollout.replicate(0)
    rollout.close()
    for version in range(1, 8):
        with trainer.mutating(version=version, timeout=20):
            array += 1
    kept = [each.version for each in tensorhub.connect(server.address).versions("m") if each.is_retained]
    assert sorted(kept) == [0, *range(8 - (retain or 1), 8)]


@pytest.mark.parametrize("reliable", [True, False])
def test_no_rollout_makes_a_trainer_keep_more_than_it_has_room_for(server, join, reliable):
    """What the trainer wishes itself is kept; what only the rollout wishes goes where there is no room."""
    trainer, array = join("trainer")
    rollout, _ = join("rollout", reliable=reliable, retain=256)
    trainer.publish(0)
    for version in range(1, 8):
        with trainer.mutating(version=version, timeout=20):
            array += 1
    assert trainer.version == 7
    assert rollout.replicate("latest") == 7


def test_what_another_replica_wishes_is_kept_where_there_is_room(server, join):
    trainer, array = join("trainer", host_bytes="64MiB", retain=3)
    join("evaluator", retain=4)
    for version in range(8):
        with trainer.mutating(version=version, timeout=20):
            array += 1
    kept = [each.version for each in tensorhub.connect(server.address).versions("m") if each.is_retained]
    assert sorted(kept) == [4, 5, 6, 7]


@pytest.mark.parametrize(("host_bytes", "said"), [(0, "is 0 B"), (100, "is 100 B")])
def test_who_has_no_room_for_a_copy_is_told_what_may_be_taken(join, host_bytes, said):
    trainer, _ = join("trainer", host_bytes=host_bytes)
    trainer.publish(0)
    with pytest.raises(tensorhub.HostMemoryFull, match=f"host_bytes {said}, and copies may take 0 B") as raised:
        trainer.unpublish(timeout=10)
    assert raised.value.hint.startswith("raise host_bytes")
    assert trainer.version == 0
