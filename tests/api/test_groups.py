"""Replicas of several shards, each a thread here: one version for all of them, or an error for all of them."""

import asyncio

import numpy as np
import pytest

import tensorhub
from runtime.kit import eventually, in_threads


def all_of(workers, call):
    return in_threads(*(lambda weights=weights: call(weights) for weights, _ in workers))


def test_two_shards_are_published_replicated_and_updated_as_one(join):
    trainer = [join("t", float(shard + 1), shard=shard, shards=2) for shard in range(2)]
    rollouts = [[join(f"r{i}", shard=shard, shards=2) for shard in range(2)] for i in range(3)]
    assert all_of(trainer, lambda weights: weights.publish(1)) == [1, 1]
    everybody = [worker for rollout in rollouts for worker in rollout]
    assert all_of(everybody, lambda weights: weights.replicate("latest")) == [1] * 6

    def step(weights):
        with weights.mutating(version=2):
            dict(trainer)[weights][:] += 10

    all_of(trainer, step)
    assert all_of(everybody, lambda weights: weights.update("latest")) == [2] * 6
    for rollout in rollouts:
        for shard, (_, array) in enumerate(rollout):
            assert (array == shard + 11).all()


def test_a_version_exists_only_when_all_shards_have_published_it(join, server):
    first, second = (join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2))
    reader, _ = join("x", shard=0, shards=2)
    results = in_threads(
        lambda: first.publish(1, timeout=20),
        lambda: reader.wait_for("latest", timeout=20),
        lambda: (tensorhub.connect(server.address).versions("m"), second.publish(1, timeout=20)),
    )
    versions, published = results[2]
    assert not any(version.is_complete for version in versions)
    assert (results[0], results[1], published) == (1, 1, 1)


def test_latest_is_one_version_for_the_whole_group_while_the_trainer_goes_on(join):
    """Shards ask at different times while versions come and go: they always get the same one."""
    trainer = [join("t", 0.0, shard=shard, shards=2, size=1000) for shard in range(2)]
    rollout = [join("r", shard=shard, shards=2, size=1000) for shard in range(2)]
    all_of(trainer, lambda weights: weights.publish(0))

    def train(shard):
        weights, array = trainer[shard]
        for step in range(1, 20):
            with weights.mutating(version=step, timeout=20):
                array += 1

    def roll(shard):
        weights, array = rollout[shard]
        seen = []
        while not seen or seen[-1] < 19:
            try:
                seen.append(weights.update("latest", timeout=20))
                assert (array == seen[-1]).all()
            except tensorhub.Unavailable:  # the trainer went on meanwhile: all shards are told so, and retry
                seen.append(-1)
        return seen

    results = in_threads(lambda: train(0), lambda: train(1), lambda: roll(0), lambda: roll(1))
    assert results[:2] == [None, None]
    assert results[2] == results[3]
    versions = [version for version in results[2] if version >= 0]
    assert versions == sorted(versions)


def test_who_cannot_begin_a_step_tells_its_siblings(join):
    trainer = [join("t", 1.0, shard=shard, shards=2) for shard in range(2)]
    other = [join("o", shard=shard, shards=2, transports=("tcp",)) for shard in range(2)]
    all_of(trainer, lambda weights: weights.publish(1))
    trainer[1][1][5] = 9.0

    def failed(call):
        def ended(weights):
            with pytest.raises(tensorhub.TensorHubError) as caught:
                call(weights)
            return type(caught.value)

        return ended

    def step(weights):
        with weights.mutating(version=2, timeout=60):
            pytest.fail("the block ran")

    all_of(other, failed(lambda weights: weights.replicate(timeout=8)))
    assert all_of(other, failed(step)) == [tensorhub.UsageError] * 2


@pytest.mark.parametrize("verb", ["replicate", "update"])
def test_who_cannot_be_filled_tells_its_siblings(join, verb):
    """A tensor was replaced on one shard alone: the others would wait for it until their time is up."""
    torch = pytest.importorskip("torch")
    trainer = [join("t", tensors={"w": torch.ones(10)}, shard=shard, shards=2) for shard in range(2)]
    all_of(trainer, lambda weights: weights.publish(1))
    modules = [torch.nn.ParameterDict({"w": torch.zeros(10)}) for _ in range(2)]
    rollout = [join("r", tensors=module, shard=shard, shards=2) for shard, module in enumerate(modules)]
    modules[1]["w"] = torch.nn.Parameter(torch.zeros(10))

    waiting = rollout[0][0]._aio._client.driver.worker

    def failed(weights):
        if weights is rollout[1][0]:
            eventually(lambda: waiting.call is not None and waiting.call.answer is not None, "its sibling waits")
        with pytest.raises(tensorhub.TensorHubError) as caught:
            getattr(weights, verb)("latest", timeout=100)
        return type(caught.value), str(caught.value)

    (sibling, text), (mine, _) = all_of(rollout, failed)
    assert mine is tensorhub.UsageError
    assert sibling is tensorhub.GroupIncomplete
    assert "no longer holds what was registered" in text


@pytest.mark.parametrize("verb", ["replicate", "update", "publish", "unpublish", "mutating"])
def test_who_raises_what_a_call_before_went_on_with_tells_its_siblings(join, verb):
    """Whose tensors are published from a buffer hears only at the next call what became of the last unpublish."""
    group = [join("t", 1.0, shard=shard, shards=2) for shard in range(2)]
    leave_behind(group[1][0], tensorhub.NotDrained("version 1 was lost"), sibling=group[0][0])

    def call(weights):
        if verb == "mutating":
            with weights.mutating(version=2, timeout=100):
                pytest.fail("the block ran")
        spec = {"publish": (2,), "unpublish": ()}.get(verb, ("latest",))
        getattr(weights, verb)(*spec, timeout=100)

    def failed(weights):
        with pytest.raises(tensorhub.TensorHubError) as caught:
            call(weights)
        return type(caught.value), str(caught.value)

    (sibling, text), mine = all_of(group, failed)
    assert mine == (tensorhub.NotDrained, "version 1 was lost")
    assert sibling is tensorhub.GroupIncomplete
    assert "version 1 was lost" in text
    assert all_of(group, lambda weights: weights.publish(2)) == [2, 2]


def leave_behind(weights, error, sibling):
    """What goes on behind the caller's back ends with that error once the server has heard the sibling's next call."""
    aio, other = weights._aio, sibling._aio._client.driver.worker

    async def lost():
        while other.call is None or other.call.answer is None:  # noqa: ASYNC110 - it is another loop's
            await asyncio.sleep(0.01)
        raise error

    async def begun():
        aio._client._behind._task = asyncio.ensure_future(lost())

    asyncio.run_coroutine_threadsafe(begun(), aio._thread.loop).result(10)


def test_two_models_in_one_process_do_not_meet(join):
    actor, _ = join("t", 1.0, model="actor")
    critic, _ = join("t", 2.0, model="critic")
    actor.publish(1)
    critic.publish(9)
    reader, array = join("r", model="critic")
    assert reader.replicate("latest") == 9
    assert np.all(array == 2.0)


def test_a_job_of_another_number_of_shards_comes_after_one_that_has_left(join):
    former = [join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2)]
    all_of([(weights, None) for weights in former], lambda weights: weights.publish(1))
    others = [join("u", shard=shard, shards=4) for shard in range(4)]

    def fails(weights):
        with pytest.raises(tensorhub.LayoutMismatch, match="cut in 2"):
            weights.replicate("latest")

    all_of(others, fails)
    in_threads(*(lambda weights=weights: weights.close(timeout=0.5) for weights, _ in others))
    in_threads(*(lambda weights=weights: weights.close(timeout=0.5) for weights in former))
    job = [join("t", 2.0, shard=shard, shards=4) for shard in range(4)]
    assert all_of(job, lambda weights: weights.publish(2)) == [2] * 4
    rollout = [join("r", shard=shard, shards=4) for shard in range(4)]
    assert all_of(rollout, lambda weights: weights.replicate("latest")) == [2] * 4
