"""`mutating` names its number first: a caller that would get a conflict after a step gets it before."""

import contextlib

import numpy as np
import pytest

import tensorhub
from runtime.kit import in_threads


def test_a_number_that_is_not_higher_is_refused_before_the_block(join):
    trainer, array = join("t", 1.0)
    rollout, _ = join("r")
    assert trainer.publish(6) == 6
    for version in (3, 6):
        refused = pytest.raises(tensorhub.VersionConflict, match="not higher than the newest, 6")
        with refused, trainer.mutating(version=version):
            array[:] = 9.0
    assert trainer.version == 6
    assert (array == 1.0).all()
    trainer.check()
    assert rollout.replicate("latest") == 6  # it is held and served as before


@pytest.mark.parametrize("first", [None, 6])
def test_one_publish_does_not_use_up_the_numbers_of_a_model(server, join, first):
    """Refused before anything is changed, and the error says how high a number may be."""
    trainer, array = join("t", 1.0)
    if first is not None:
        assert trainer.publish(first) == first
    most = 2**53 if first is None else first + 10**9
    for version in (most + 1, 2**62):
        with pytest.raises(tensorhub.VersionConflict) as found, trainer.mutating(version=version):
            array[:] = 9.0
        assert "nothing was changed" in str(found.value)
        assert f"publish at most {most}: count steps" in found.value.hint
    assert (array == 1.0).all()
    assert tensorhub.connect(server.address).next_version("m") == (0 if first is None else 7)
    trainer.unpublish()
    assert trainer.publish(most) == most
    assert tensorhub.connect(server.address).next_version("m") == most + 1


def test_a_model_has_one_writer_until_that_closes(join):
    first, array = join("first", 1.0)
    second, _ = join("second", 2.0)
    with first.mutating(version=0):  # it holds nothing yet, and is the writer all the same
        array += 1
        with pytest.raises(tensorhub.VersionConflict, match="first has been the writer of m"):
            second.publish(0)
        with pytest.raises(tensorhub.VersionConflict, match="first has been the writer"), second.mutating(version=0):
            pytest.fail("the block ran")
    assert first.version == 0
    with pytest.raises(tensorhub.VersionConflict, match="first has been the writer"):
        second.publish(1)
    first.close()
    with second.mutating(version=1):
        pass
    assert second.version == 1


def test_all_shards_claim_the_same(join):
    pair = [join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2)]

    def mutate(weights, version):
        with weights.mutating(version=version, timeout=10):
            pass

    found = in_threads(lambda: mutate(pair[0], 1), lambda: mutate(pair[1], 2))
    assert [type(each) for each in found] == [tensorhub.GroupMismatch] * 2
    assert in_threads(*(lambda w=w: mutate(w, 3) for w in pair)) == [None, None]
    assert [weights.version for weights in pair] == [3, 3]


def test_the_writer_outlives_the_server():
    """So do versions: one that is started at its port, and is not fresh, hears of both from the workers."""
    server = tensorhub.serve(lease_s=2, report_s=0.2)
    port = int(server.address.rpartition(":")[2])
    first, second = (tensorhub.open("m", replica=name, server=server.address) for name in ("first", "second"))
    for weights in (first, second):
        weights.register({"w": np.ones(1000)})
    with contextlib.ExitStack() as stack:
        with first.mutating(version=5, timeout=20):
            server.close()
            stack.enter_context(tensorhub.serve(port=port, lease_s=2, report_s=0.2, fresh=False))
            with pytest.raises(tensorhub.VersionConflict, match="first has been the writer"):
                second.publish(5, timeout=20)
        assert first.version == 5
        assert tensorhub.load("m@latest", server=server.address)["w"][0] == 1.0
        for weights in (first, second):
            weights.close(timeout=3)


INSIDE = {
    "publish": lambda weights: weights.publish(2),
    "mutating": lambda weights: weights.mutating(version=3).__enter__(),
    "unpublish": lambda weights: weights.unpublish(),
    "replicate": lambda weights: weights.replicate(),
    "update": lambda weights: weights.update(),
    "suspend": lambda weights: weights.suspend(),
}


def test_no_call_of_its_own_block_may_give_the_tensors_another_meaning(join):
    """What the block had done would be overwritten, or published in the middle of it."""
    trainer, array = join("t", 1.0)
    trainer.publish(1)
    with trainer.mutating(version=2):
        array += 1
        for verb, call in INSIDE.items():
            said = rf"^{verb} on .* inside the block of its mutating\(version=2\)"
            with pytest.raises(tensorhub.UsageError, match=said):
                call(trainer)
        array += 1
    assert trainer.version == 2
    reader, read = join("r")
    reader.replicate()
    assert (read == 3.0).all()


def test_what_is_refused_in_a_block_of_a_group_leaves_its_claim_alone(server):
    """A caller that catches the error of an inner `mutating` goes on with the number of the outer one."""
    groups = [tensorhub.open_group("m", replica=name, shards=2, server=server.address) for name in ("first", "second")]
    with groups[0] as first, groups[1] as second:
        for each in groups:
            each.register([{"w": np.zeros(100)} for _ in range(2)])
        with first.mutating(version=1):
            for verb, call in INSIDE.items():
                with pytest.raises(tensorhub.UsageError, match=rf"^{verb} on .* inside the block of its mutating"):
                    call(first)
            with pytest.raises(tensorhub.VersionConflict, match="first has been the writer"):
                second.publish(1)
        assert first.version == 1


def test_tensors_that_are_replaced_in_a_block_may_be_registered_there(join):
    """They are what its end publishes, under the number that nobody else could take meanwhile."""
    trainer, array = join("t", 1.0)
    other, _ = join("other")
    with trainer.mutating(version=1):
        trainer.register({"w": array + 1})
        with pytest.raises(tensorhub.VersionConflict, match="t has been the writer"):
            other.publish(1)
    reader, read = join("r")
    assert reader.replicate() == 1
    assert (read == 2.0).all()
