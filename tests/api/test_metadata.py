"""What a publisher says of a version reaches everybody who gets it, from whomever, and nothing else does."""

import numpy as np
import pytest

import tensorhub
from runtime.kit import in_threads

SAID = {"step": 7, "loss": 0.25, "base": "llama", "tags": ["a", None], "more": {"ok": True}}


def test_it_comes_with_the_version_from_whoever_has_it(join):
    trainer, _ = join("t", 1.0)
    first, _ = join("a")
    late, _ = join("b")
    assert trainer.metadata is None, "nothing is held"
    trainer.publish(7, metadata=SAID)
    assert trainer.metadata == SAID
    first.replicate("latest")
    trainer.close()
    late.replicate("latest")
    assert late.statistics()["bytes_by_source"].keys() == {"a"}
    assert (first.metadata, late.metadata) == (SAID, SAID)
    first.metadata["step"] = 8
    assert first.metadata == SAID, "each gets its own"
    late.close()
    assert late.metadata is None


def test_what_the_block_learns_goes_with_its_version(join):
    trainer, array = join("t", 1.0)
    said = {"step": 1}
    with trainer.mutating(version=1, metadata=said):
        array += 1
        said["loss"] = 0.5
    assert trainer.metadata == {"step": 1, "loss": 0.5}


def test_what_cannot_be_said_is_refused_before_the_step(join):
    trainer, _ = join("t", 1.0)
    trainer.publish(1)
    refused = pytest.raises(tensorhub.UsageError, match=r"metadata\['w'\] is of type ndarray")
    with refused, trainer.mutating(version=2, metadata={"w": np.zeros(2)}):
        pytest.fail("the block ran")
    with pytest.raises(tensorhub.UsageError, match="over 16384 B"):
        trainer.publish(2, metadata={"x": "y" * 20_000})
    assert trainer.version == 1


def test_what_is_held_keeps_what_was_said_of_it(join):
    trainer, _ = join("t", 1.0)
    other, _ = join("o")
    trainer.publish(1, metadata=SAID)
    other.replicate(1)
    for weights in (trainer, other):
        if weights is other:
            trainer.close()
        assert weights.publish(1) == 1
        assert weights.publish(1, metadata=SAID) == 1
        for said in ({}, {"step": 8}):
            with pytest.raises(tensorhub.VersionConflict, match="holds version 1 with other metadata"):
                weights.publish(1, metadata=said)
        assert weights.metadata == SAID


def test_a_copy_in_host_memory_has_it_too(join):
    trainer, array = join("t", 1.0)
    rollout, _ = join("r", prefetch="always")
    late, _ = join("b")
    trainer.publish(1, metadata=SAID)
    trainer.unpublish()  # the only one: it is offloaded
    assert trainer.metadata is None
    assert late.replicate(1) == 1
    assert late.metadata == SAID
    array += 1
    rollout.prefetch()
    assert (rollout.update("latest"), rollout.metadata) == (1, SAID)


def test_all_shards_say_the_same(join):
    shards = [join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2)]
    readers = [join("r", shard=shard, shards=2)[0] for shard in range(2)]
    assert in_threads(*(lambda s=s: s.publish(1, metadata=SAID) for s in shards)) == [1, 1]
    assert in_threads(*(lambda r=r: r.replicate(1) for r in readers)) == [1, 1]
    assert [each.metadata for each in (*shards, *readers)] == [SAID] * 4
    in_threads(*(lambda s=s: s.unpublish() for s in shards))
    errors = in_threads(*(lambda n=n, s=s: s.publish(2, metadata={"n": n}) for n, s in enumerate(shards)))
    assert [type(error) for error in errors] == [tensorhub.GroupMismatch] * 2
    assert all("with other metadata than shard" in str(error) for error in errors)
    assert in_threads(*(lambda s=s: s.publish(3, metadata={"n": 0}) for s in shards)) == [3, 3]
