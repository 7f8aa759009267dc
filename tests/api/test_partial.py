"""A replica that leaves some of the model out: refused by name, before a byte is written, unless it says so."""

import numpy as np
import pytest

import tensorhub
from runtime.kit import in_threads
from tensorhub import Box

LAYER = (60, 64)


@pytest.fixture
def opened(server):
    """`opened(replica, tensors, boxes, shard=, shards=, …)`: a worker that has registered these."""
    found = []

    def made(replica, tensors, boxes=None, *, shard=0, shards=1, partial=False, **options):
        weights = tensorhub.open(
            "m", replica=replica, shard=shard, shards=shards, server=server.address, call_timeout=20, **options
        )
        found.append(weights)
        weights.register(tensors, boxes=boxes or {}, partial=partial)
        return weights

    yield made
    for weights in reversed(found):
        weights.close(timeout=3)


def layers(value=0.0):
    return {"a": np.full(LAYER, value, np.float32), "b": np.full(LAYER, value, np.float32)}


def rows(start, stop, value=0.0):
    """Those of layer b."""
    return np.full((stop - start, LAYER[1]), value, np.float32), [Box("b", LAYER, (start, 0), (stop - start, LAYER[1]))]


def test_a_layer_that_was_left_out_is_named(opened):
    opened("t", layers(1.0)).publish(1)
    mine = {"a": np.zeros(LAYER, np.float32)}
    reader = opened("r", mine)
    with pytest.raises(
        tensorhub.LayoutMismatch, match=r"tensor 'b': float32\[60, 64\] of the version is in no box of m/r"
    ):
        reader.replicate()
    assert not mine["a"].any()
    assert reader.version is None


@pytest.mark.parametrize(("second", "missing"), [((30, 50), "'b'[50:60, 0:64]"), ((40, 60), "'b'[30:40, 0:64]")])
def test_a_part_that_no_shard_of_the_reader_has_is_named_on_all_of_them(opened, second, missing):
    """Each shard has boxes for all that it wants: only together they lack something."""
    opened("t", layers(1.0)).publish(1)
    members = []
    for shard, (start, stop) in enumerate([(0, 30), second]):
        array, boxes = rows(start, stop)
        tensors = {"b": array, **({"a": np.zeros(LAYER, np.float32)} if shard else {})}
        members.append((opened("r", tensors, {"b": boxes}, shard=shard, shards=2), tensors))
    found = in_threads(*(lambda weights=weights: weights.replicate() for weights, _ in members))
    assert all(isinstance(error, tensorhub.LayoutMismatch) for error in found), found
    assert any(missing in str(error) for error in found), found
    assert not any(array.any() for _, tensors in members for array in tensors.values())


def test_what_shards_have_only_together_is_enough(opened):
    """Stages of a pipeline: no shard has both layers."""
    opened("t", layers(1.0)).publish(1)
    stages = [{name: np.zeros(LAYER, np.float32)} for name in ("a", "b")]
    members = [opened("r", stage, shard=shard, shards=2) for shard, stage in enumerate(stages)]
    assert in_threads(*(weights.replicate for weights in members)) == [1, 1]
    assert all((array == 1.0).all() for stage in stages for array in stage.values())


def test_who_says_so_reads_a_part_and_nobody_takes_that_for_the_model(opened):
    """The part is idle, and would else be chosen before the trainer. Nor does the trainer leave the model to it."""
    trainer = opened("t", layers(1.0))
    trainer.publish(1)
    draft = {"b": np.zeros(LAYER, np.float32)}
    part = opened("draft", draft, partial=True)
    assert part.replicate() == 1
    assert (draft["b"] == 1.0).all()
    trainer.unpublish()  # the last who has all of it: it is kept in host memory
    array, boxes = rows(0, LAYER[0])
    whole = {"b": array, "a": np.zeros(LAYER, np.float32)}
    reader = opened("r", whole, {"b": boxes})
    assert reader.replicate() == 1
    assert all((each == 1.0).all() for each in whole.values())
    other = {"b": np.zeros(LAYER, np.float32)}
    assert opened("draft-2", other, partial=True).replicate() == 1
    assert (other["b"] == 1.0).all()


def test_a_part_is_not_published(opened):
    part = opened("r", {"b": np.zeros(LAYER, np.float32)}, partial=True)
    with pytest.raises(tensorhub.UsageError, match=r"publish of m/r.* some of the model only"):
        part.publish(1)


def test_a_part_that_was_suspended_is_a_part_again(opened):
    opened("t", layers(1.0)).publish(1)
    part = opened("r", {"b": np.zeros(LAYER, np.float32)}, partial=True)
    part.suspend()
    part.resume()
    assert part.replicate() == 1


def test_a_part_without_boxes_is_refused(join):
    weights, array = join("r")
    with pytest.raises(tensorhub.UsageError, match="partial=True without boxes"):
        weights.register({"w": array}, partial=True)
