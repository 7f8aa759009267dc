"""Several models under one number: registered together, or each published by a trainer of its own (`open_set`)."""

import asyncio
import threading
from functools import partial

import numpy as np
import pytest
import torch

import tensorhub
from runtime.kit import ServerProcess, eventually, in_threads
from tensorhub.runtime.questions import available_versions

MODELS = ("target", "draft")
SIZES = {"target": 60_000, "draft": 7_000}


def arrays(value=0.0):
    return {name: {f"{name}.w": np.full(SIZES[name], value, np.float32)} for name in MODELS}


def numbers(tensors):
    """Which numbers the weights of all models are."""
    return {float(number) for each in tensors.values() for array in each.values() for number in np.unique(array)}


@pytest.fixture
def trainer(server):
    """`trainer(model)` joins as that model's own trainer; returns a function that publishes a version of it."""
    opened = []

    def joined(model, replica="trainer", **options):
        weights = tensorhub.open(model, replica=replica, server=server.address, call_timeout=20, **options)
        opened.append(weights)
        array = np.zeros(SIZES[model], np.float32)
        weights.register({f"{model}.w": array})

        def publish(version):
            with weights.mutating(version=version):
                array[:] = float(version)
            return weights

        return publish

    yield joined
    for weights in reversed(opened):
        weights.close(timeout=3)


@pytest.fixture
def reader(server):
    """`reader(replica)` joins as a reader of the set; returns it and its arrays."""
    opened = []

    def joined(replica="r", models=MODELS, **options):
        options = {"reliable": False, "call_timeout": 20, "server": server.address, **options}
        found = tensorhub.open_set(models, replica=replica, **options)
        opened.append(found)
        mine = arrays()
        found.register(mine)
        return found, mine

    yield joined
    for each in reversed(opened):
        each.close(timeout=3)


def pair(value):
    found = {"target": torch.nn.Linear(20, 10), "draft": torch.nn.ModuleDict({"head": torch.nn.Linear(4, 2)})}
    for module in found.values():
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, value)
    return found


def test_modules_are_registered_together_and_have_one_version(server):
    with (
        tensorhub.open("pair", replica="t", server=server.address) as trainer,
        tensorhub.open("pair", replica="r", server=server.address) as rollout,
    ):
        mine, theirs = pair(1.0), pair(0.0)
        trainer.register(mine, dtype="bfloat16")
        rollout.register(theirs, dtype="bfloat16")
        trainer.publish(1)
        names = [tensor.name for tensor in tensorhub.connect(server.address).layout("pair").shards[0]]
        assert sorted(names) == ["draft.head.bias", "draft.head.weight", "target.bias", "target.weight"]
        assert rollout.update() == 1
        assert all((p == 1).all() for module in theirs.values() for p in module.parameters())
        rollout.suspend()
        rollout.resume()  # the modules are asked again
        theirs["draft"]["head"].weight = torch.nn.Parameter(torch.zeros(2, 4))
        with pytest.raises(tensorhub.UsageError, match=r"draft\.head\.weight"):
            rollout.update()


def test_mappings_of_tensors_are_registered_together(join):
    trainer, _ = join("t")
    mine = {"a": {"w": np.ones(9, np.float32), "x.y": {"z": np.ones(3, np.float32)}}, "b": np.ones(4, np.float32)}
    trainer.register(mine, leave_out="a.w")
    trainer.publish(1)
    reader, _ = join("r")
    theirs = {"a.x.y.z": np.zeros(3, np.float32), "b": np.zeros(4, np.float32)}
    reader.register(theirs)
    assert reader.update() == 1
    assert all((array == 1).all() for array in theirs.values())
    mine["a"]["x.y"]["z"] = np.zeros(3, np.float32)
    trainer.unpublish()
    with pytest.raises(tensorhub.UsageError, match=r"a\.x\.y\.z"):
        trainer.publish(2)


def test_modules_and_tensors_are_not_mixed(join):
    weights, _ = join("t")
    with pytest.raises(tensorhub.UsageError, match=r"'target' is a module, and 'draft\.w' is a ndarray"):
        weights.register({"target": torch.nn.Linear(2, 2), "draft": {"w": np.ones(3)}})


def test_all_models_move_to_the_newest_number_that_each_of_them_has(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader()
    assert rollout.version is None
    assert rollout.metadata is None
    target(1)
    draft(1)
    assert rollout.replicate() == rollout.version == 1
    assert numbers(mine) == {1.0}
    target(2)
    assert rollout.update() == 1, "the draft of version 2 is not there yet"
    target(3)
    draft(2)
    draft(3)
    assert rollout.update() == rollout.update() == rollout.version == 3
    assert rollout.update(2) == 3, "an update never goes back"
    assert numbers(mine) == {3.0}
    assert rollout.metadata == {"target": {}, "draft": {}}
    assert sorted(rollout.statistics()) == sorted(MODELS)
    rollout.check()


def test_a_number_that_one_model_lacks_is_refused_by_name_or_waited_for(trainer, reader):
    target, draft = trainer("target", retain=2), trainer("draft", retain=2)
    rollout, mine = reader()
    target(1)
    with pytest.raises(tensorhub.VersionUnavailable, match="draft has no version 1; it has no version yet"):
        rollout.replicate(1)
    with pytest.raises(tensorhub.DeadlineExceeded, match="draft"):
        rollout.update(timeout=0.5)
    later = threading.Thread(target=lambda: draft(1))
    eventually(lambda: not later.is_alive() and (later.start() or True), "the draft follows")
    assert rollout.replicate(1, wait=True) == rollout.wait_for() == rollout.wait_for(1) == 1
    later.join()
    target(2)
    draft(3)
    with pytest.raises(tensorhub.VersionUnavailable, match="draft has no version 2; its newest version is 3"):
        rollout.replicate(2, wait=True)
    assert rollout.update() == 1
    assert numbers(mine) == {1.0}
    with pytest.raises(tensorhub.UsageError, match="prefetched"):
        rollout.update("prefetched")


def test_shards_agree_though_they_ask_before_and_after_a_publish(trainer, reader, server):
    """Of two shards one has seen the version that the other has not: both choose again."""
    sets = [reader(shard=shard, shards=2) for shard in range(2)]
    both = [
        [
            tensorhub.open(model, replica="t", shard=shard, shards=2, server=server.address, call_timeout=20, retain=2)
            for shard in range(2)
        ]
        for model in MODELS
    ]
    try:
        content = arrays()
        for name, shards in zip(MODELS, both, strict=True):
            for weights in shards:
                weights.register(content[name])

        def publish(version):
            for shards in both:
                in_threads(*(weights.unpublish for weights in shards))
            for each in content.values():
                for array in each.values():
                    array[:] = version
            for shards in both:
                assert in_threads(*(partial(weights.publish, version) for weights in shards)) == [version] * 2

        publish(1)
        chosen = threading.Event()
        first = sets[0][0]
        choose = first._choose

        async def chooses(*arguments, **options):
            found = await choose(*arguments, **options)
            chosen.set()
            return found

        first._choose = chooses

        def later():
            assert chosen.wait(20)
            publish(2)
            return sets[1][0].update()

        assert in_threads(first.update, later) == [2, 2]
        assert all(numbers(mine) == {2.0} for _, mine in sets)
    finally:
        for weights in (weights for shards in both for weights in shards):
            weights.close(timeout=3)


def test_a_model_that_fails_leaves_no_version_until_the_next_call(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader()
    target(1)
    draft(1)
    assert rollout.replicate() == 1
    target(2)
    source = draft(2)._aio._client.driver.data.registration
    with source.stream.views_to_write(0, 4) as views:
        views[0][:4] = b"\xff\xff\xff\x7f"  # changed in place, while it is published
    with pytest.raises(tensorhub.CorruptTransfer):
        rollout.update(timeout=10)
    assert rollout.version is None
    with source.stream.views_to_write(0, 4) as views:
        views[0][:4] = np.float32(2.0).tobytes()
    target(3)
    draft(3)
    assert rollout.update() == rollout.version == 3
    assert numbers(mine) == {3.0}


def test_one_that_publishes_all_models_and_what_it_may_not_do(server, reader, trainer):
    with tensorhub.open_set(MODELS, replica="t", server=server.address, call_timeout=20) as both:
        trained = arrays()
        both.register(trained)
        rollout, mine = reader()
        for version in (1, 2):
            with both.mutating(version=version, metadata={"step": version}):
                for each in trained.values():
                    for array in each.values():
                        array[:] = float(version)
            assert rollout.update() == version
        assert numbers(mine) == {2.0}
        assert rollout.metadata == {"target": {"step": 2}, "draft": {"step": 2}}
        with pytest.raises(tensorhub.VersionConflict, match="target"):
            trainer("target", replica="other")(5)
        with both.mutating(version=6), pytest.raises(tensorhub.UsageError, match="inside the block of its mutating"):
            both.publish(6)
        assert rollout.update() == both.version == 6


def test_what_is_no_set_is_refused(server, reader):
    for models in ("target", [], ["target", "target"], ["target", "no name!"], 7):
        with pytest.raises(tensorhub.UsageError):
            tensorhub.open_set(models, replica="r", server=server.address)
    rollout, _ = reader("other")
    for wrong in ({"target": {}}, {**arrays(), "critic": {}}, [arrays()]):
        with pytest.raises(tensorhub.UsageError, match="mapping of target, draft"):
            rollout.register(wrong)
    with pytest.raises(tensorhub.UsageError, match="critic"):
        rollout.register(arrays(), boxes={"critic": {}})
    with (
        tensorhub.open("draft", replica="r", server=server.address),
        pytest.raises(tensorhub.ShardTaken, match="draft/r"),
    ):
        tensorhub.open_set(MODELS, replica="r", server=server.address, timeout=2)
    eventually(lambda: [r.name for r in tensorhub.connect(server.address).replicas("target")] == ["other"], "none left")


def test_a_restarted_server_is_waited_for():
    """Right after its start it knows of no version, and none of them is taken for lost."""
    with ServerProcess(lease_s=2.0) as server:
        options = {"server": server.address, "call_timeout": 20}
        with tensorhub.open_set(MODELS, replica="t", **options) as both:
            both.register(arrays(1.0))
            both.publish(1)
            server.kill()
            server.restart()
            found = available_versions(both._members[0]._client.options, "draft", both._members[0]._deadline(20))
            assert asyncio.run(found) == [1]
