"""`open_set`: models with trainers of their own, of which a reader has all under one number or none."""

import asyncio
import inspect
import threading
import time
from functools import partial

import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually, in_threads
from tensorhub import aio
from tensorhub.runtime.loops import GRACE_S
from tensorhub.transport.local.transport import LocalTransport

MODELS = ("target", "draft")
SIZES = {"target": 60_000, "draft": 7_000}


def arrays(value: float = 0.0) -> dict[str, dict[str, np.ndarray]]:
    return {name: {f"{name}.w": np.full(SIZES[name], value, np.float32)} for name in MODELS}


def numbers(tensors: dict[str, dict[str, np.ndarray]]) -> set[float]:
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

        def publish(version: int) -> tensorhub.Weights:
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
        options = {"reliable": False, "call_timeout": 20, **options}
        found = tensorhub.open_set(models, replica=replica, server=server.address, **options)
        opened.append(found)
        mine = arrays()
        found.register(mine)
        return found, mine

    yield joined
    for each in reversed(opened):
        each.close(timeout=3)


def test_all_models_move_to_the_newest_number_that_each_of_them_has(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader()
    assert rollout.version is None
    target(1)
    draft(1)
    assert rollout.replicate() == rollout.version == 1
    assert numbers(mine) == {1.0}
    target(2)
    assert rollout.update() == 1, "the draft of version 2 is not there yet"
    assert numbers(mine) == {1.0}
    target(3)
    draft(2)
    draft(3)
    assert rollout.update() == 3
    assert numbers(mine) == {3.0}
    assert rollout.update() == rollout.version == 3
    assert rollout.metadata == {"target": {}, "draft": {}}
    rollout.check()


def test_the_version_of_the_set_is_kept_where_one_model_is_ahead(trainer, reader, server):
    """The newest of the target is 4, of the draft 2: version 2 of the target is what a reader can have."""
    target, draft = trainer("target"), trainer("draft")
    first, mine = reader("first", reliable=True)
    for version in (1, 2):
        target(version)
        draft(version)
    assert first.replicate() == 2
    for version in (3, 4):
        target(version)
    late, found = reader("late")
    assert late.replicate() == 2
    assert numbers(found) == numbers(mine) == {2.0}
    first.close()
    late.close()
    assert [each.version for each in tensorhub.connect(server.address).versions("target")][:1] == [4]


def test_a_trainer_keeps_the_version_of_the_set_alone(trainer, reader, server):
    """All readers were killed, or never came so far: the trainers still have it, in host memory."""
    target, draft = trainer("target"), trainer("draft")
    watcher, _ = reader("watcher")
    for version in (1, 2, 3):
        target(version)
    draft(2)
    with pytest.raises(tensorhub.DeadlineExceeded, match="draft and target"):
        watcher.replicate(timeout=0.5)
    draft(3)
    target(4)
    target(5)
    assert watcher.replicate() == 3, "it was published last by both, and the target is two further"
    assert watcher.version == 3


def test_a_number_that_one_model_lacks(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader()
    target(1)
    with pytest.raises(tensorhub.VersionUnavailable, match="draft"):
        rollout.replicate(1)
    target(2)
    draft(2)
    assert rollout.replicate(2) == 2
    with pytest.raises(tensorhub.VersionUnavailable, match="version 7"):
        rollout.update(7)
    assert rollout.update(1) == rollout.version == 2, "an update never goes back"
    assert numbers(mine) == {2.0}


def test_it_can_be_waited_for(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader()
    target(1)

    def waits() -> tuple[int, int]:
        return rollout.wait_for("latest"), rollout.replicate(1, wait=True)

    def publishes() -> None:
        eventually(lambda: threading.active_count() > 1, "the other one waits")
        draft(1)

    found, _ = in_threads(waits, publishes)
    assert found == (1, 1)
    assert numbers(mine) == {1.0}


def test_one_call_at_a_time(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader()

    def second() -> int:
        eventually(lambda: rollout._calls._calling == "replicate", "the first one waits")
        with pytest.raises(tensorhub.UsageError, match="one call at a time") as raised:
            rollout.update()
        assert rollout._name in str(raised.value)
        target(1)
        return draft(1).version

    assert in_threads(rollout.replicate, second) == [1, 1]
    assert numbers(mine) == {1.0}


def test_what_is_held_is_not_given_up_before_each_model_has_a_source(trainer, reader, monkeypatch):
    """The draft cannot be read: so the target goes on being what it was, and is served, and both can compute."""
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader(transports="local")
    target(1)
    draft(1)
    assert rollout.replicate() == 1
    target(2)
    draft(2)
    read, refused = LocalTransport.read, []

    def unreadable(self, endpoint, key, sink, on_end):
        if sink.stream.size_bytes == 4 * SIZES["draft"]:
            refused.append(key)
            endpoint = endpoint.replace("local://", "local://nobody-")
        return read(self, endpoint, key, sink, on_end)

    monkeypatch.setattr(LocalTransport, "read", unreadable)
    with pytest.raises(tensorhub.TensorHubError):
        rollout.update(timeout=3)
    assert refused
    assert rollout.version == 1
    assert numbers(mine) == {1.0}
    monkeypatch.undo()
    assert rollout.update() == 2
    assert numbers(mine) == {2.0}


def test_a_model_that_fails_half_way_leaves_no_version_until_the_next_call(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader()
    target(1)
    draft(1)
    assert rollout.replicate() == 1
    target(2)
    weights = draft(2)
    weights._aio._client.driver.data.content.manifest  # noqa: B018 - what is published is hashed by now
    mine_of_trainer = weights._aio._client.driver.data.registration
    assert mine_of_trainer is not None
    with mine_of_trainer.stream.writing(0, 4) as views:
        views[0][:4] = b"\xff\xff\xff\x7f"  # changed in place, behind everybody's back
    with pytest.raises(tensorhub.CorruptTransfer):
        rollout.update(timeout=10)
    assert rollout.version is None
    with mine_of_trainer.stream.writing(0, 4) as views:
        views[0][:4] = np.float32(2.0).tobytes()
    target(3)
    draft(3)
    assert rollout.update() == rollout.version == 3
    assert numbers(mine) == {3.0}


@pytest.mark.parametrize("member", range(len(MODELS)))
def test_who_raises_what_a_call_before_went_on_with_tells_the_other_shards(trainer, server, member):
    """They wait in the choice of the version, whichever member it was."""
    sets = [
        tensorhub.open_set(MODELS, replica="r", shard=s, shards=2, server=server.address, call_timeout=20)
        for s in range(2)
    ]
    for each in sets:
        each.register(arrays())
    (choosing, *_), clients = (each._calls._clients for each in sets)

    async def lost() -> None:
        while choosing.driver.worker.call is None or choosing.driver.worker.call.answer is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        raise tensorhub.NotDrained("what was held was lost")

    async def begun() -> None:
        clients[member]._behind._task = asyncio.ensure_future(lost())

    asyncio.run_coroutine_threadsafe(begun(), sets[1]._members[0]._thread.loop).result(10)
    try:
        sibling, mine = in_threads(*(partial(each.update, timeout=100) for each in sets))
        assert isinstance(mine, tensorhub.NotDrained)
        assert isinstance(sibling, tensorhub.GroupIncomplete)
        assert "what was held was lost" in str(sibling)
    finally:
        for each in sets:
            each.close(timeout=0.5)


def test_all_shards_get_one_number_however_they_ask(trainer, server):
    """Of two shards one asks before, and one after the next version was published."""

    def shards_of(model: str):
        return [
            tensorhub.open(model, replica="t", shard=shard, shards=2, server=server.address, call_timeout=20)
            for shard in range(2)
        ]

    published = {model: shards_of(model) for model in MODELS}
    content = {model: [np.zeros(SIZES[model], np.float32) for _ in range(2)] for model in MODELS}
    sets = [
        tensorhub.open_set(MODELS, replica="r", shard=s, shards=2, server=server.address, call_timeout=20)
        for s in range(2)
    ]
    mine = [arrays() for _ in range(2)]

    def publish(model: str, version: int) -> None:
        def one(shard: int) -> None:
            with published[model][shard].mutating(version=version):
                content[model][shard][:] = float(version)

        assert in_threads(*(partial(one, shard) for shard in range(2))) == [None, None]

    try:
        for model in MODELS:
            for shard, weights in enumerate(published[model]):
                weights.register({f"{model}.w": content[model][shard]})
        for shard, each in enumerate(sets):
            each.register(mine[shard])
        for version in range(1, 6):
            for model in MODELS:
                publish(model, version)
            later = threading.Event()

            def first(later=later) -> int:
                later.set()
                return sets[0].update()

            def second(version=version, later=later) -> int:
                assert later.wait(10)
                publish("target", version + 10)  # the draft has none such
                return sets[1].update()

            if version < 5:
                assert in_threads(*(each.update for each in sets)) == [version, version]
            else:
                found = in_threads(first, second)
                assert found == [version, version]
            for each in mine:
                assert numbers(each) == {float(version)}
    finally:
        for each in (*sets, *(w for pair in published.values() for w in pair)):
            each.close(timeout=3)


def test_shards_that_name_other_models_are_told_so(trainer, server):
    names = (MODELS, ("draft", "other"))
    sets = [
        tensorhub.open_set(names[s], replica="r", shard=s, shards=2, server=server.address, call_timeout=10)
        for s in range(2)
    ]
    try:
        for each, models in zip(sets, names, strict=True):
            each.register({name: {"w": np.zeros(9, np.float32)} for name in models})

        def error(each) -> str:
            with pytest.raises(tensorhub.TensorHubError) as caught:
                each.replicate()
            return str(caught.value)

        assert any("different sets" in text for text in in_threads(*(partial(error, each) for each in sets)))
    finally:
        for each in sets:
            each.close(timeout=3)


def test_fetched_ahead_all_models_are_of_one_number(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, mine = reader(prefetch="always", host_bytes="8MiB")
    target(1)
    draft(1)
    assert rollout.update() == 1
    target(2)
    assert rollout.update("prefetched") == 1
    draft(2)

    def has_moved() -> bool:
        return rollout.update("prefetched") == 2

    eventually(has_moved, "version 2 of both is in host memory")
    assert numbers(mine) == {2.0}
    idle, _ = reader("idle")
    idle.replicate()
    with pytest.raises(tensorhub.UsageError, match="prefetch"):
        idle.update("prefetched")


def test_a_shard_that_has_no_room_to_fetch_ahead_says_so_to_its_siblings(server):
    trainers, rollouts = [], []
    try:
        for shard, room in enumerate((0, "8MiB")):
            options = {"shard": shard, "shards": 2, "server": server.address, "call_timeout": 20}
            trainers.append(tensorhub.open_set(MODELS, replica="t", **options))
            rollouts.append(tensorhub.open_set(MODELS, replica="r", prefetch="always", host_bytes=room, **options))
            trainers[-1].register(arrays(1.0))
            rollouts[-1].register(arrays())
        assert in_threads(*(partial(each.publish, 1) for each in trainers)) == [1, 1]
        assert in_threads(*(each.replicate for each in rollouts)) == [1, 1]
        found = in_threads(*(partial(each.update, "prefetched", timeout=3) for each in rollouts))
        assert isinstance(found[0], tensorhub.UsageError)
        assert "host_bytes is 0 B" in str(found[1])
        assert in_threads(*(each.update for each in rollouts)) == [1, 1]
    finally:
        for each in (*rollouts, *trainers):
            each.close(timeout=3)


def test_a_trainer_of_all_models_publishes_them_together(server, reader):
    trainer = tensorhub.open_set(MODELS, replica="t", server=server.address, call_timeout=20)
    with trainer:
        trained = arrays()
        trainer.register(trained)
        rollout, mine = reader()
        for version in (1, 2):
            with trainer.mutating(version=version, metadata={"step": version}):
                for each in trained.values():
                    for array in each.values():
                        array[:] = float(version)
            assert rollout.update() == version
            assert numbers(mine) == {float(version)}
        assert rollout.metadata == {"target": {"step": 2}, "draft": {"step": 2}}
        assert trainer.wait_held(2) == ("r",)
        with pytest.raises(RuntimeError, match="diverged"), trainer.mutating(version=3):
            raise RuntimeError("diverged")
        assert trainer.version is None


def test_where_one_model_cannot_be_joined_none_is(server, reader):
    taken = tensorhub.open("draft", replica="r", server=server.address)
    with taken, pytest.raises(tensorhub.ShardTaken, match="draft/r"):
        tensorhub.open_set(MODELS, replica="r", server=server.address, timeout=2)
    eventually(lambda: not tensorhub.connect(server.address).replicas("target"), "nobody is there")


@pytest.mark.parametrize(
    "models", ["target", ["target"], ["target", "target"], ["target", "no name!"], 7, [f"m{i}" for i in range(17)]]
)
def test_models_that_are_none(models, server):
    with pytest.raises(tensorhub.UsageError):
        tensorhub.open_set(models, replica="r", server=server.address)


def test_tensors_of_other_models_are_refused(reader):
    rollout, _ = reader()
    for wrong in ({"target": {}}, {**arrays(), "critic": {}}, [arrays()]):
        with pytest.raises(tensorhub.UsageError, match="mapping of target, draft"):
            rollout.register(wrong)
    with pytest.raises(tensorhub.UsageError, match="critic"):
        rollout.register(arrays(), boxes={"critic": {}})


def test_what_a_set_can_do_is_what_its_models_can():
    alone = {name: call for name, call in vars(tensorhub.Weights).items() if not name.startswith("_")}
    together = {name: getattr(tensorhub.WeightsSet, name) for name in dir(tensorhub.WeightsSet) if name[0] != "_"}
    assert sorted(together) == sorted([*alone, "models"])
    for name, call in alone.items():
        if callable(call) and name not in ("register", "resume"):
            assert list(inspect.signature(call).parameters) == list(inspect.signature(together[name]).parameters), name
    joining = [name for name in inspect.signature(tensorhub.open).parameters if name != "model"]
    assert list(inspect.signature(tensorhub.open_set).parameters) == ["models", *joining]
    assert list(inspect.signature(aio.open).parameters)[1:] == joining


def test_no_step_begins_on_models_of_different_versions(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, _ = reader()
    target(1)
    draft(1)
    assert rollout.replicate() == 1
    target(2)
    rollout._wait([rollout._members[0].update()], None, "update() of one model alone")
    with pytest.raises(tensorhub.GroupMismatch, match="draft is of 1, target is of 2"), rollout.mutating(version=3):
        pytest.fail("the block ran")
    draft(2)
    assert rollout.update() == 2
    with rollout.mutating(version=3):
        pass
    assert rollout.version == 3


def test_a_number_that_one_model_refuses_leaves_all_as_they_were(server, reader, trainer):
    """Another trainer has taken it for the draft: the target, withdrawn first or not, is what it was, and is read."""
    both = tensorhub.open_set(("target", "draft"), replica="t", server=server.address, call_timeout=20)
    with both:
        trained = arrays(1.0)
        both.register(trained)
        both.publish(1)
        trainer("target", replica="other")(5)
        with pytest.raises(tensorhub.VersionConflict), both.mutating(version=5):
            pytest.fail("the block ran")
        assert both.version == 1
        rollout, mine = reader()
        assert rollout.replicate(1) == 1
        assert numbers(mine) == {1.0}
        with both.mutating(version=6):
            for each in trained.values():
                for array in each.values():
                    array[:] = 6.0
        assert rollout.update() == 6
        assert numbers(mine) == {6.0}


@pytest.mark.parametrize("kind", ["metadata", "masters"])
def test_what_is_published_again_is_what_it_was(server, trainer, kind):
    """With the words that it had; and with masters, which may have changed since."""
    is_cast = kind == "masters"
    both = tensorhub.open_set(("target", "draft"), replica="t", server=server.address, call_timeout=20)
    with both:
        trained = arrays(1.0)
        both.register(trained, dtype="float16" if is_cast else None)
        with both.mutating(version=1, metadata={"step": 1}):
            pass
        if is_cast:
            trained["target"]["target.w"] += 1
            trained["draft"]["draft.w"] += 1
        trainer("target", replica="other")(5)
        with pytest.raises(tensorhub.VersionConflict), both.mutating(version=5):
            pytest.fail("the block ran")
        assert both.version == 1
        assert both.metadata == {name: {"step": 1} for name in MODELS}
        target = np.zeros(SIZES["draft"], np.float16 if is_cast else np.float32)
        with tensorhub.open("draft", replica="r", server=server.address, call_timeout=20) as rollout:
            rollout.register({"draft.w": target})
            assert rollout.replicate(1) == 1
        assert (target == 1.0).all()


@pytest.mark.parametrize("kind", ["in place", "masters", "read"])
def test_what_newer_versions_have_passed_by_is_held_again(server, trainer, kind):
    """The draft is at 3 by then, the target at 5: version 1 of the draft is not published, but filled in again."""
    both = tensorhub.open_set(("target", "draft"), replica="t", server=server.address, call_timeout=20)
    first = tensorhub.open_set(("target", "draft"), replica="first", server=server.address, call_timeout=20)
    with first, both:
        trained = arrays(0.0 if kind == "read" else 1.0)
        both.register(trained, dtype="float16" if kind == "masters" else None)
        if kind == "read":
            first.register(arrays(1.0))
            first.publish(1, metadata={"step": 1})
            assert both.replicate() == 1
        else:
            both.publish(1, metadata={"step": 1})
        if kind == "masters":
            trained["draft"]["draft.w"] += 1
            trained["target"]["target.w"] += 1
        trainer("draft", replica="other")(3)
        trainer("target", replica="other")(5)
        with pytest.raises(tensorhub.VersionConflict, match="version 4 of target") as raised, both.mutating(version=4):
            pytest.fail("the block ran")
        assert not [note for note in raised.value.__notes__ if "withdrawn" in note]
        assert both.version == 1
        assert both.metadata == {name: {"step": 1} for name in MODELS}
        assert numbers(trained) == ({2.0} if kind == "masters" else {1.0}), "masters are their owner's"
        both.check()
        with both.mutating(version=6):
            pass
        assert both.version == 6


def test_what_cannot_be_published_again_is_said(server, trainer, caplog):
    """The draft was changed in place while it was published: it is not that version any more."""
    both = tensorhub.open_set(("target", "draft"), replica="t", server=server.address, call_timeout=20)
    with both:
        trained = arrays(1.0)
        both.register(trained)
        both.publish(1)
        trained["draft"]["draft.w"] += 1
        trainer("target", replica="other")(5)
        with pytest.raises(tensorhub.VersionConflict, match="version 5 of target") as raised, both.mutating(version=5):
            pytest.fail("the block ran")
        said = "version 1 of draft/t[0] was withdrawn, and cannot be published again: "
        assert [note for note in raised.value.__notes__ if note.startswith(said)]
        assert said in caplog.text
        assert both.version is None


def test_what_takes_long_is_published_again_after_the_deadline_too(server, monkeypatch):
    """The claim of the target fails by its deadline. To hash the draft again takes longer than a caller waits then."""
    both = tensorhub.open_set(("target", "draft"), replica="t", server=server.address, call_timeout=20)
    with both:
        both.register(arrays(1.0))
        both.publish(1)
        target, draft = (both._calls._clients[at] for at in (1, 0))
        publish = draft.publish

        async def late(verb, spec, deadline, **options):
            await target.driver.until(lambda: False, deadline)
            raise tensorhub.DeadlineExceeded("readers are slow")

        async def slow(*arguments, **options):
            await draft.driver.until(lambda: False, time.monotonic() + GRACE_S + 0.5)
            return await publish(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(target, "operate", late)
            patch.setattr(draft, "publish", slow)
            slowly = pytest.raises(tensorhub.DeadlineExceeded, match="readers are slow")
            with slowly, both.mutating(version=2, timeout=0.2):
                pytest.fail("the block ran")
        assert both.version == 1
        with both.mutating(version=2):
            pass
        assert both.version == 2


def test_no_call_is_made_in_the_block(server):
    both = tensorhub.open_set(("target", "draft"), replica="t", server=server.address, call_timeout=20)
    with both:
        both.register(arrays(1.0))
        with both.mutating(version=1), pytest.raises(tensorhub.UsageError, match=r"inside the block of its mutating"):
            both.publish(1)
        assert both.version == 1


def test_a_pin_that_one_model_cannot_have_is_none(trainer, reader):
    target, draft = trainer("target"), trainer("draft")
    rollout, _ = reader()
    target(1)
    draft(1)
    rollout.replicate()
    rollout.pin(1)
    target(4)
    with pytest.raises(tensorhub.VersionUnavailable, match="draft"):
        rollout.pin(4)
    assert [member._client.driver.worker.pins for member in rollout._members] == [(1,), (1,)]
    rollout.unpin(1)


def test_shards_may_name_the_models_in_any_order(server, trainer):
    names = (("target", "draft"), ("draft", "target"))
    sets = [
        tensorhub.open_set(names[s], replica="r", shard=s, shards=2, server=server.address, call_timeout=10)
        for s in range(2)
    ]
    try:
        for each in sets:
            each.register({name: {"w": np.zeros(9, np.float32)} for name in MODELS})
        assert in_threads(*(partial(each.publish, 3) for each in sets)) == [3, 3]
        assert in_threads(*(each.update for each in sets)) == [3, 3]
    finally:
        for each in sets:
            each.close(timeout=3)
