"""Replicas with different layouts, or with a part of the model, read versions of each other."""

import contextlib
import itertools
import threading
from functools import partial

import numpy as np
import pytest
import torch

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub import Box
from tensorhub.runtime import questions, tile_reads
from tensorhub.transport.nixl import probe

# --- `register(..., boxes=...)`: replicas that are cut in different ways read versions of each other.


ROWS, COLUMNS = 300, 128
SHAPE = (ROWS, COLUMNS)
NAME = "layer/0.w"


def content(version):
    return np.random.default_rng(version).standard_normal(SHAPE).astype(np.float32)


@pytest.fixture
def opened(server):
    """`opened(replica, tensors, boxes={}, shard=, shards=, …)`: a worker that has registered these."""
    found = []

    def made(replica, tensors, boxes=None, *, dtype=None, partial=False, **options):
        options = {"server": server.address, "call_timeout": 20, **options}
        found.append(tensorhub.open("m", replica=replica, **options))
        found[-1].register(tensors, boxes=boxes, dtype=dtype, partial=partial)
        return found[-1]

    yield made
    for weights in reversed(found):
        weights.close(timeout=3)


@pytest.fixture
def replica(opened):
    """`replica(name, cuts, dim)` opens a replica of a matrix cut at these places: (weights, array, part) of each."""

    def made(name, cuts, dim, *, kind=np.float32, **options):
        members = []
        for shard, (start, stop) in enumerate(itertools.pairwise(cuts)):
            at, size = [0, 0], list(SHAPE)
            at[dim], size[dim] = start, stop - start
            array, boxes = np.zeros(size, kind), {"w": [Box(NAME, SHAPE, tuple(at), tuple(size))]}
            weights = opened(name, {"w": array}, boxes, shard=shard, shards=len(cuts) - 1, **options)
            part = tuple(slice(begin, begin + count) for begin, count in zip(at, size, strict=True))
            members.append((weights, array, part))
        return members

    return made


def publish(members, version, **options):
    def one(weights, array, part):
        with weights.mutating(version=version, **options):
            array[...] = content(version)[part]

    found = in_threads(*(lambda member=member: one(*member) for member in members))
    assert found == [None] * len(members), found


def fill(members, verb="replicate", spec="latest"):
    found = in_threads(*(lambda weights=weights: getattr(weights, verb)(spec) for weights, _, _ in members))
    version = found[0]
    assert found == [version] * len(members), found
    for _, array, part in members:
        assert (array == content(version)[part]).all()
    return version


def test_rows_to_columns_to_rows(replica):
    trainer, engine = replica("trainer", (0, 100, 170, ROWS), 0), replica("engine", (0, 64, COLUMNS), 1)
    other = replica("other", (0, 150, ROWS), 0)
    for version in (1, 2, 3):
        publish(trainer, version, metadata={"step": version})
        verb = "replicate" if version == 1 else "update"
        assert fill(engine, verb) == fill(other, verb) == version
        assert engine[0][0].metadata == {"step": version}
    in_threads(*(weights.check for weights, _, _ in (*trainer, *engine, *other)))
    for weights, _, _ in trainer:
        weights.close()
    again = replica("trainer-2", (0, 90, ROWS), 0)
    assert fill(again) == 3
    publish(again, 4)
    assert fill(engine, "update") == 4


@pytest.mark.skipif(bool(probe.probe().why_not), reason=probe.probe().why_not or "it is here")
def test_rows_to_columns_by_nixl_only(replica):
    trainer = replica("trainer", (0, 100, 170, ROWS), 0, transports="nixl")
    engine = replica("engine", (0, 64, COLUMNS), 1, transports="nixl")
    for version in (1, 2):
        publish(trainer, version)
        assert fill(engine, "update") == version


@pytest.mark.parametrize("reliable", [True, False])
def test_what_only_the_trainer_has_is_fetched_by_another_layout_before_it_closes(replica, reliable):
    trainer, engine = (
        replica("trainer", (0, 100, 170, ROWS), 0),
        replica("engine", (0, 64, COLUMNS), 1, reliable=reliable),
    )
    publish(trainer, 1)
    assert fill(engine) == 1
    publish(trainer, 2)
    assert in_threads(*(lambda weights=weights: weights.close(timeout=20) for weights, _, _ in trainer)) == [None] * 3
    assert fill(engine, "update") == 2


def test_masters_with_boxes_are_read_by_an_engine_of_the_published_dtype(opened, replica):
    trainer = replica("trainer", (0, 100, 170, ROWS), 0, dtype="bfloat16")
    target = torch.zeros(SHAPE, dtype=torch.bfloat16)
    engine = opened("engine", {NAME: target}, {})
    publish(trainer, 1)
    assert engine.replicate() == 1
    assert torch.equal(target, torch.from_numpy(content(1)).bfloat16())
    restarted = replica("restarted", (0, 200, ROWS), 0, dtype="bfloat16")
    assert in_threads(*(weights.replicate for weights, _, _ in restarted)) == [1, 1]
    for _, master, part in restarted:
        assert torch.equal(torch.from_numpy(master), target.float()[part])


@pytest.mark.parametrize("has_a_good_source", [False, True])
def test_tensors_changed_while_published_are_refused_whatever_the_layout(server, replica, has_a_good_source):
    """Each call ends by name, long before its timeout: no source is left, though others wait for the version too."""
    trainer, engine = replica("trainer", (0, 100, 170, ROWS), 0), replica("engine", (0, 64, COLUMNS), 1)
    good = replica("good", (0, 80, COLUMNS), 1) if has_a_good_source else []
    publish(trainer, 1)
    fill(engine)
    publish(trainer, 2)
    fill(good) if good else None
    others = [replica(name, cuts, dim) for name, cuts, dim in (("a", (0, ROWS), 0), ("b", (0, 64, COLUMNS), 1))]
    trainer[1][1][-1, -1] += 1
    calls = [lambda weights=weights: weights.update("latest", timeout=60) for weights, _, _ in engine]
    calls += [
        lambda weights=weights: weights.replicate("latest", timeout=60) for each in others for weights, _, _ in each
    ]
    calls.append(lambda: tensorhub.load("m@latest", server=server.address, timeout=60).version)
    found = in_threads(*calls)
    if has_a_good_source:
        assert found == [2] * len(calls), found
    else:
        assert [type(error) for error in found] == [tensorhub.CorruptTransfer] * len(calls), found
        assert engine[1][0].version is None  # a part of the new one had come, as in one layout


def test_an_error_of_the_reader_itself_comes_with_its_hint_and_its_cause(replica, monkeypatch):
    """The shard that has met it raises the error itself; the other shards hear what to do about it."""

    def fails(*_):
        raise tensorhub.UsageError("no such thing", hint="do something else") from OSError("as it was")

    publish(replica("trainer", (0, ROWS), 0), 1)
    engine = replica("engine", (0, 64, COLUMNS), 1)
    derived = tile_reads.version_from
    monkeypatch.setattr(
        tile_reads, "version_from", lambda mine, *more: (fails if mine is its_own else derived)(mine, *more)
    )
    its_own = engine[1][0]._aio._client.driver.data.registration
    found = in_threads(*(lambda weights=weights: weights.replicate("latest", timeout=20) for weights, _, _ in engine))
    assert [type(error) for error in found] == [tensorhub.UsageError] * 2, found
    assert [error.hint for error in found] == ["do something else"] * 2
    assert isinstance(found[1].__cause__, OSError)


def test_a_reader_that_shares_no_transport_with_its_source_hears_what_to_do(replica):
    publish(replica("trainer", (0, 100, ROWS), 0, transports="tcp"), 1)
    engine = replica("engine", (0, 100, COLUMNS), 1, transports="local")
    found = in_threads(*(lambda weights=weights: weights.replicate("latest", timeout=20) for weights, _, _ in engine))
    assert [type(error) for error in found] == [tensorhub.TransportMissing] * 2, found
    assert all("tensorhub doctor" in error.hint for error in found)


def test_a_part_that_no_shard_has_is_named_before_anything_is_published(replica):
    trainer = replica("trainer", (0, 100, 170, 299), 0)  # a row is missing
    found = in_threads(*(lambda weights=weights: weights.publish(1) for weights, _, _ in trainer))
    assert all(isinstance(error, tensorhub.LayoutMismatch) for error in found), found
    assert "no shard of the replica that publishes has 'layer/0.w'[299:300, 0:128]" in str(found[0])


def test_a_shard_whose_sibling_has_failed_and_left_hears_so_at_once(replica):
    (first, _, _), (second, _, _) = replica("trainer", (0, 100, 299), 0)  # a row is missing
    with pytest.raises(tensorhub.LayoutMismatch):
        first.publish(1)
    first.close()
    text = r"shard 0 of trainer could not make its last call, and has left: no shard of .* has 'layer/0.w'\[299:300"
    with pytest.raises(tensorhub.GroupIncomplete, match=text):
        second.publish(1, timeout=60)


@pytest.mark.long
def test_a_shard_that_is_not_there_is_waited_for_as_long_as_a_lease(opened):
    weights = opened("t", {"w": np.zeros(4, np.float32)}, {}, shard=1, shards=3)
    with pytest.raises(tensorhub.GroupIncomplete, match=r"shards \[0, 2\] of t were not there within 2 s"):
        weights.publish(1, timeout=60)


def test_boxes_that_share_memory_are_published_and_refused_to_be_filled_at_once(opened):
    """Nobody needs to be asked for that: neither is there a version, nor is it waited for."""
    boxes = {"w": [Box("one", (8,), (0,), (5,)), Box("other", (8,), (0,), (5,), offset=3)]}
    weights = opened("r", {"w": np.zeros(8, np.float32)}, boxes, prefetch="always")
    for call in (weights.replicate, weights.update):
        with pytest.raises(tensorhub.LayoutMismatch, match=r"boxes 'one'\[0:5\] and 'other'\[0:5\] share a part"):
            call("latest", timeout=20)


def test_a_tensor_stored_in_too_different_an_order_of_dimensions_is_named_at_once(opened):
    """Element by element, and from six dimensions to six: more rows than one read may ask for."""
    shape, order = (32, 32, 16, 16, 2, 4), (5, 3, 1, 4, 2, 0)
    there = np.zeros([shape[dim] for dim in order], np.uint16)
    strides = [there.strides[order.index(dim)] // 2 for dim in range(6)]
    opened("t", {"w": np.zeros(shape, np.uint16)}, {}).publish(1)
    reader = opened("r", {"w": there}, {"w": [Box("w", shape, (0,) * 6, shape, 0, tuple(strides))]})
    with pytest.raises(tensorhub.UsageError, match=r"'w'\[0:32, .* are the limit: its dimensions are stored"):
        reader.replicate(timeout=60)


def test_a_mismatch_of_order_strides_or_ties_names_boxes_and_those_cure_it(server):
    forms = {
        "tied": lambda v: dict.fromkeys(("a", "b"), np.full((2, 3), v, np.float32)),
        "apart": lambda v: {name: np.full((2, 3), v, np.float32) for name in ("a", "b")},
        "other order": lambda v: {name: np.full((2, 3), v, np.float32) for name in ("b", "a")},
        "transposed": lambda v: {name: np.full((3, 2), v, np.float32).T for name in ("a", "b")},
    }
    pairs = [("tied", "apart"), ("apart", "other order"), ("transposed", "tied"), ("other order", "transposed")]
    for model, (there, here) in enumerate(pairs):
        published, filled = forms[there](1), forms[here](0)
        with (
            tensorhub.open(f"m{model}", replica="t", server=server.address) as trainer,
            tensorhub.open(f"m{model}", replica="r", server=server.address, call_timeout=20) as reader,
        ):
            trainer.register(published)
            reader.register(filled)
            trainer.publish(1)
            with pytest.raises(tensorhub.LayoutMismatch) as caught:
                reader.replicate()
            assert any("boxes={} on both sides" in note for note in caught.value.__notes__), (there, here)
            trainer.unpublish()
            trainer.register(published, boxes={})
            reader.register(filled, boxes={})
            trainer.publish(2)
            assert reader.replicate() == 2
            assert all((filled[name] == 1).all() for name in "ab")


@pytest.mark.parametrize("kind", ["data parallel", "data parallel, with boxes", "one layer compiled"])
def test_names_that_a_wrapper_has_changed_are_said_and_what_the_hint_says_cures_it(server, kind):
    boxes = {} if "boxes" in kind else None
    plain, model = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(2))
    if kind == "one layer compiled":
        model[1] = torch.compile(model[1])
        word, hint = "_orig_mod.", "name.replace('_orig_mod.', '')"
        cured = {name.replace(word, ""): tensor for name, tensor in model.state_dict().items()}
    else:
        model = torch.nn.DataParallel(model)  # as DistributedDataParallel, which needs a process group
        word, hint, cured = "module.", "register what is inside, model.module", model.module
    with (
        tensorhub.open("m", replica="t", server=server.address) as trainer,
        tensorhub.open("m", replica="r", server=server.address, call_timeout=20) as rollout,
    ):
        wrapped, other = (rollout, trainer) if kind == "one layer compiled" else (trainer, rollout)
        wrapped.register(model, boxes=boxes)
        other.register(plain, boxes=boxes)
        trainer.publish(1)
        with pytest.raises(tensorhub.LayoutMismatch, match=f"have '{word}' in addition") as caught:
            rollout.replicate()
        if boxes is None:
            assert hint in caught.value.__notes__[0]
        trainer.unpublish()
        wrapped.register(cured, boxes=boxes)
        trainer.publish(2)
        assert rollout.replicate() == 2


def test_boxes_that_cannot_be(join):
    weights, _ = join()
    for boxes, text in (
        ({"v": []}, "boxes are given for tensor 'v', which is not registered"),
        ({"w": [Box("g", (4,), (0,), (5,))]}, "is not inside of the global shape"),
        ({"w": [Box("g", (9,), (0,), (9,), offset=-1)]}, "offset and strides are counted in elements"),
        ({"w": Box("w", (4,), (0,), (4,))}, "boxes of tensor 'w' are one Box, not a list"),
    ):
        with pytest.raises(tensorhub.UsageError, match=text):
            weights.register({"w": np.zeros(4, np.float32)}, boxes=boxes)


def test_a_sibling_that_has_no_boxes_is_waited_for_and_named(opened):
    first, _ = (opened("t", {"w": np.zeros(4)}, boxes, shard=n, shards=2) for n, boxes in enumerate(({}, None)))
    with pytest.raises(tensorhub.GroupIncomplete, match=r"shards \[1\] of it have registered no tensors with boxes"):
        first.publish(1, timeout=1)


def test_verify_none_is_refused_with_boxes(server):
    """Of a reader as of a publisher."""
    with contextlib.closing(tensorhub.open("m", replica="t", server=server.address, verify="none")) as weights:
        with pytest.raises(tensorhub.UsageError, match="verified tile by tile"):
            weights.register({"w": np.zeros(4, np.float32)}, boxes={})
        weights.register({"w": np.zeros(4, np.float32)})
        assert weights.publish(1) == 1


def test_shards_that_heard_of_different_readers_cut_anew(replica, monkeypatch):
    """A reader has registered between the questions of two shards."""
    trainer, engine = replica("trainer", (0, 100, ROWS), 0), replica("engine", (0, 64, COLUMNS), 1)
    real, asked = questions.fetch_layouts, []

    async def fetch(options, model, deadline, *, replica):
        found = await real(options, model, deadline, replica=replica)
        asked.append(found)
        if len(asked) == 1:
            only = tuple(view for view in found.shards if view.replica == "trainer")
            return type(found)(only, tuple(found.boxes[view.boxes] for view in only))._renumbered()
        return found

    def renumbered(view):
        shards = tuple(type(one)(one.replica, one.shard, one.shards, number) for number, one in enumerate(view.shards))
        return type(view)(shards, view.boxes)

    monkeypatch.setattr(questions.LayoutsView, "_renumbered", renumbered, raising=False)
    monkeypatch.setattr(questions, "fetch_layouts", fetch)
    publish(trainer, 1)
    assert len(asked) >= 4
    assert fill(engine) == 1


def test_load_puts_together_what_was_cut(server, replica):
    """However many shards there are, and whoever of them is left, the whole tensors come."""
    trainer, engine = replica("trainer", (0, 100, ROWS), 0), replica("engine", (0, 64, COLUMNS), 1)
    publish(trainer, 1, metadata={"loss": 0.5})
    view = tensorhub.connect(server.address)
    laid = view.layout("m")
    assert [[(tensor.name, tensor.shape) for tensor in shard] for shard in laid.shards] == [[("layer/0.w", SHAPE)]]
    assert (laid.size_bytes, laid.is_whole, view.metadata("m")) == (4 * ROWS * COLUMNS, True, {"loss": 0.5})
    found = tensorhub.load("m@latest", server=server.address, timeout=20)
    assert list(found) == ["layer/0.w"]
    assert (np.asarray(found["layer/0.w"]) == content(1)).all()
    assert (found.version, found.metadata) == (1, {"loss": 0.5})
    fill(engine)
    for weights, _, _ in trainer:
        weights.close(timeout=5)
    (again,) = tensorhub.load_shards("m@1", server=server.address, timeout=20)
    assert (np.asarray(again["layer/0.w"]) == content(1)).all()


@pytest.mark.parametrize(("published", "registered"), [({}, None), (None, {})])
def test_other_tensors_are_named_also_with_boxes_on_one_side_only(opened, published, registered):
    opened("t", {"w": np.zeros(4, np.float32)}, published).publish(1)
    reader = opened("r", {"w": np.zeros(5, np.float32)}, registered)
    with pytest.raises(tensorhub.LayoutMismatch, match=r"tensor 'w' has global shape \[5\] .* and \[4\] "):
        reader.replicate("latest", timeout=10)


def test_tied_tensors_are_tied_in_what_is_loaded_and_whoever_holds_one_name_may_hold_both(server, opened):
    """Also where a shard has no part of them; not where another shard has two memories."""
    shape, memory = (4, 3), np.arange(12, dtype=np.float32).reshape(4, 3)
    rows = memory[:2].copy(), memory[2:].copy()
    view = tensorhub.connect(server.address)
    boxes = [{name: [Box(name, shape, (at, 0), (2, 3))] for name in ("embed", "head")} for at in (0, 2)]
    both = [
        opened("t", {"embed": mine, "head": mine, "other": np.zeros(1)}, said, shard=n, shards=2)
        for n, (mine, said) in enumerate(zip(rows, boxes, strict=True))
    ]
    in_threads(*(lambda weights=weights: weights.publish(1) for weights in both))
    assert view.layout("m").tied == (("embed", "head"),)
    found = tensorhub.load("m@1", server=server.address, timeout=20)
    assert (np.asarray(found["head"]) == memory).all()
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    in_threads(*(lambda weights=weights: weights.unpublish() for weights in both))
    both[1].register({"embed": rows[1], "head": rows[1].copy(), "other": np.zeros(1)}, boxes=boxes[1])
    in_threads(*(lambda weights=weights: weights.publish(2) for weights in both))
    assert view.layout("m").tied == ()
    assert (np.asarray(tensorhub.load("m@2", server=server.address, timeout=20)["head"]) == memory).all()


def test_what_can_be_hashed_of_a_version_that_is_cut_otherwise_is_looked_at_when_it_is_published_again(opened):
    """Who came after it was published has one tensor whole, and only parts of the tiles of the other."""
    trainer = opened("t", {"w": np.zeros(SHAPE), "v": np.zeros(9)}, {})
    trainer.publish(1)
    half = SHAPE[0] // 2
    arrays = [{"w": np.zeros((half, COLUMNS)), "v": np.zeros(9)} for _ in range(2)]
    cuts = [{"w": [Box("w", SHAPE, (shard * half, 0), (half, COLUMNS))]} for shard in range(2)]
    late = [opened("r", arrays[shard], cuts[shard], shard=shard, shards=2) for shard in range(2)]
    assert in_threads(*(weights.replicate for weights in late)) == [1, 1]
    trainer.close()
    assert in_threads(*(partial(weights.publish, 1) for weights in late)) == [1, 1]
    for name in ("v", "w"):  # whole in a tile, and part of one
        for tensors in arrays:
            tensors[name][-1] += 1
        for weights, found in zip(late, in_threads(*(partial(each.publish, 1) for each in late)), strict=True):
            assert isinstance(found, tensorhub.VersionConflict)
            assert f"holds that version, but these tensors were changed since: {name!r}" in str(found)
            with pytest.raises(tensorhub.NotDrained, match=f"these tensors were changed since: {name!r}"):
                weights.check()
        for tensors in arrays:
            tensors[name][-1] -= 1
    assert [weights.version for weights in late] == [1, 1]


def test_other_tensors_that_are_registered_while_a_read_ahead_is_worked_out_get_their_own_bytes(opened, monkeypatch):
    """Of one size and in another order: what was worked out for those before would be the other's, and verified."""
    inside, go, real = threading.Event(), threading.Event(), tile_reads.version_from

    def held_up(*arguments):
        found = real(*arguments)
        inside.set()
        assert go.wait(20)
        return found

    first, second = content(1), content(2)
    publishers = []
    for shard, rows in enumerate((slice(0, 100), slice(100, ROWS))):
        at, size = (rows.start, 0), (rows.stop - rows.start, COLUMNS)
        tensors = {"a": first[rows].copy(), "b": second[rows].copy()}
        boxes = {name: [Box(name, SHAPE, at, size)] for name in tensors}
        publishers.append(opened("t", tensors, boxes, shard=shard, shards=2, prefetch="never"))
    assert in_threads(*(partial(weights.publish, 1) for weights in publishers)) == [1, 1]
    monkeypatch.setattr(tile_reads, "version_from", held_up)
    try:
        reader = opened("r", {name: np.zeros(SHAPE, np.float32) for name in ("a", "b")}, {}, prefetch="always")
        assert inside.wait(20)
        tensors = {name: np.zeros(SHAPE, np.float32) for name in ("b", "a")}
        reader.register(tensors, boxes={})
    finally:
        go.set()
    eventually(lambda: reader.statistics()["host_bytes"] > 0, "it is fetched ahead")
    assert reader.replicate(1) == 1
    assert (tensors["a"] == first).all()
    assert (tensors["b"] == second).all()


# --- A replica that leaves some of the model out: refused by name, before a byte is written, unless it says so.


LAYER = (60, 64)


def layers(value=0.0):
    return {"a": np.full(LAYER, value, np.float32), "b": np.full(LAYER, value, np.float32)}


def rows(start, stop, value=0.0):
    """Those of layer b."""
    return np.full((stop - start, LAYER[1]), value, np.float32), [Box("b", LAYER, (start, 0), (stop - start, LAYER[1]))]


def test_a_layer_that_was_left_out_is_named(opened):
    opened("t", layers(1.0), {}).publish(1)
    mine = {"a": np.zeros(LAYER, np.float32)}
    reader = opened("r", mine, {})
    with pytest.raises(
        tensorhub.LayoutMismatch, match=r"tensor 'b': float32\[60, 64\] of the version is in no box of m/r"
    ):
        reader.replicate()
    assert not mine["a"].any()
    assert reader.version is None


@pytest.mark.parametrize(("second", "missing"), [((30, 50), "'b'[50:60, 0:64]"), ((40, 60), "'b'[30:40, 0:64]")])
def test_a_part_that_no_shard_of_the_reader_has_is_named_on_all_of_them(opened, second, missing):
    """Each shard has boxes for all that it wants: only together they lack something."""
    opened("t", layers(1.0), {}).publish(1)
    members = []
    for shard, (start, stop) in enumerate([(0, 30), second]):
        array, boxes = rows(start, stop)
        tensors = {"b": array, **({"a": np.zeros(LAYER, np.float32)} if shard else {})}
        members.append((opened("r", tensors, {"b": boxes}, shard=shard, shards=2), tensors))
    found = in_threads(*(lambda weights=weights: weights.replicate() for weights, _ in members))
    assert all(isinstance(error, tensorhub.LayoutMismatch) for error in found), found
    assert any(missing in str(error) for error in found), found
    assert not any(array.any() for _, tensors in members for array in tensors.values())


def test_who_says_so_reads_a_part_and_nobody_takes_that_for_the_model(opened):
    """The part is idle, and would else be chosen before the trainer. Nor does the trainer leave the model to it."""
    trainer = opened("t", layers(1.0), {})
    trainer.publish(1)
    draft = {"b": np.zeros(LAYER, np.float32)}
    part = opened("draft", draft, {}, partial=True)
    assert part.replicate() == 1
    assert (draft["b"] == 1.0).all()
    trainer.unpublish()  # the last who has all of it: it is kept in host memory
    array, boxes = rows(0, LAYER[0])
    whole = {"b": array, "a": np.zeros(LAYER, np.float32)}
    reader = opened("r", whole, {"b": boxes})
    assert reader.replicate() == 1
    assert all((each == 1.0).all() for each in whole.values())
    other = {"b": np.zeros(LAYER, np.float32)}
    assert opened("draft-2", other, {}, partial=True).replicate() == 1
    assert (other["b"] == 1.0).all()


def test_a_part_is_not_published(opened):
    part = opened("r", {"b": np.zeros(LAYER, np.float32)}, {}, partial=True)
    with pytest.raises(tensorhub.UsageError, match=r"publish of m/r.* some of the model only"):
        part.publish(1)


# --- One shard of whole tensors without boxes reads what has boxes, and is read by what has boxes.


@pytest.fixture
def plain(opened):
    """`plain(name)` opens a replica of the whole matrix, registered without boxes, as `replica` does."""

    def made(name, *, tensor=NAME, **options):
        array = np.zeros(SHAPE, np.float32)
        return [(opened(name, {tensor: array}, **options), array, (slice(None), slice(None)))]

    return made


def is_boxed(members):
    return members[0][0]._client.driver.data.registration.table is not None


def test_whole_tensors_without_boxes_read_what_was_published_with_boxes(replica, plain):
    trainer, reader = replica("trainer", (0, 100, 170, ROWS), 0), plain("reader")
    for version in (1, 2):
        publish(trainer, version, metadata={"step": version})
        assert fill(reader, "update") == version
        assert reader[0][0].metadata == {"step": version}
        reader[0][0].check()
    other = plain("other")
    for weights, _, _ in trainer:
        weights.close()
    assert fill(other) == 2


def test_a_replica_with_boxes_reads_what_was_published_without(plain, replica):
    """Whether it comes before the publish or after it, beside readers without boxes; all stay together."""
    trainer, rollout = plain("trainer"), plain("rollout")
    publish(trainer, 1, metadata={"step": 1})
    assert fill(rollout) == 1
    assert [is_boxed(each) for each in (trainer, rollout)] == [False, False]
    engine = replica("engine", (0, 64, COLUMNS), 1)
    assert fill(engine) == 1
    assert engine[0][0].metadata == {"step": 1}
    late, later = plain("late"), replica("later", (0, 150, ROWS), 0)
    assert fill(late) == fill(later) == 1
    for version in (2, 3):
        publish(trainer, version)
        for each in (rollout, engine, late, later):
            assert fill(each, "update") == version
    in_threads(*(weights.check for weights, _, _ in (*trainer, *rollout, *engine, *late, *later)))


@pytest.mark.parametrize("has_room", [True, False])
def test_what_only_the_trainer_holds_without_boxes_is_read_by_a_replica_with_boxes(plain, replica, has_room):
    """The trainer need not publish another version for that, where it has room for a copy."""
    trainer = plain("trainer", host_bytes=None if has_room else 0)
    publish(trainer, 1)
    engine = replica("engine", (0, 64, COLUMNS), 1)
    if has_room:
        assert fill(engine) == 1
    else:
        with pytest.raises(tensorhub.DeadlineExceeded, match="version 1 of m was published without boxes") as raised:
            engine[0][0].replicate(timeout=5)
        assert "host memory" in raised.value.hint
        assert fill(plain("rollout")) == 1
    assert trainer[0][0].version == 1
    for version in (2, 3):
        publish(trainer, version)
        assert fill(engine, "update") == version
    trainer[0][0].check()


def test_masters_without_boxes_are_read_with_boxes(opened):
    """What was published stays what it was, though masters went on: nothing is cast anew."""
    masters, target = torch.from_numpy(content(1).copy()), torch.zeros(SHAPE, dtype=torch.bfloat16)
    trainer = opened("trainer", {NAME: masters}, dtype="bfloat16")
    trainer.publish(1)
    masters += 1
    engine = opened("engine", {"mine": target}, {"mine": [Box(NAME, SHAPE, (0, 0), SHAPE)]})
    assert engine.replicate() == 1
    assert torch.equal(target, torch.from_numpy(content(1)).bfloat16())
    with trainer.mutating(version=2):
        masters.copy_(torch.from_numpy(content(2)))
    assert engine.update() == 2
    assert torch.equal(target, torch.from_numpy(content(2)).bfloat16())


def test_tensors_in_another_order_and_tied_ones_are_read_once_others_have_boxes(opened):
    tied, other, plain = content(1).copy(), np.arange(9, dtype=np.float32), np.zeros(SHAPE, np.float32)
    opened("trainer", {"head": tied, "norm": other, "embed": tied}, {}).publish(1)
    same, norm = np.zeros_like(tied), np.zeros_like(other)
    assert opened("reader", {"norm": norm, "embed": same, "head": same}).replicate() == 1
    assert (same == tied).all()
    assert (norm == other).all()
    transposed = np.zeros(SHAPE[::-1], np.float32).T
    assert opened("views", {"embed": plain, "head": transposed, "norm": np.zeros_like(other)}).replicate() == 1
    assert (plain == tied).all()
    assert (transposed == tied).all()


def test_a_reader_that_has_other_tensors_keeps_what_it_holds(plain, replica):
    trainer, reader = plain("trainer", tensor="v"), plain("reader", tensor="v")
    publish(trainer, 1)
    assert fill(reader) == 1
    trainer[0][0].close()
    publish(replica("other", (0, 100, ROWS), 0), 2)
    with pytest.raises(tensorhub.LayoutMismatch, match=f"{NAME}.*reader"):
        reader[0][0].update("latest")
    assert (reader[0][0].version, is_boxed(reader)) == (1, False)


@pytest.mark.parametrize("has_published", [True, False])
def test_tensors_that_share_a_part_of_their_memory_are_never_taken_with_boxes(opened, has_published):
    array = np.zeros(SHAPE, np.float32)
    sides = [({NAME: array, "rows": array[:7]}, None), ({NAME: array.copy(), "rows": array[:7].copy()}, {})]
    (published, its), (registered, mine) = sides if has_published else reversed(sides)
    opened("t", published, its).publish(1)
    reader = opened("r", registered, mine)
    words = ("without", "with") if has_published else ("with", "without")
    text = rf"version 1 of m was published {words[0]} boxes, and m/r\[0\] has registered {words[1]} them"
    with pytest.raises(tensorhub.LayoutMismatch, match=text) as found:
        reader.replicate("latest", timeout=10)
    assert "boxes={}" in found.value.hint
