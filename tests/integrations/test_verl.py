"""verl's own manager, actors with FSDP2 and rollouts that come and go, with the checkpoint engine "tensorhub"."""

import asyncio
import os
from pathlib import Path
from unittest import mock

import pytest

import tensorhub

pytest.importorskip("verl", reason="verl is not installed here: make test-engines")

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

import tensorhub.integrations.verl
from tensorhub import aio
from tensorhub.integrations.ray import start_server

from . import verl_workers
from .kit import start_ray

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config():
    folders = [ROOT, ROOT / "src", ROOT / "tests"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    start_ray(16)
    start_server(lease_s=2, report_s=0.2)
    yield CheckpointEngineConfig(
        backend="tensorhub",
        custom_backend_module="tensorhub.integrations.verl",
        engine_kwargs={"tensorhub": {"model": "policy", "chunk_bytes": "64KiB"}},
    )
    ray.shutdown()


def group(kind, count, **arguments):
    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def replica(config):
    rollout = RolloutConfig(name="vllm", checkpoint_engine=config)
    return verl_workers.Replica(group(verl_workers.RolloutWorker, 1, rollout_config=rollout, model_config=None))


@pytest.mark.timeout(600)
def test_rollouts_come_and_go_between_updates(config):
    actors = group(verl_workers.Actor, 2, config=config)
    replicas = [replica(config) for _ in range(2)]
    manager = CheckpointEngineManager(config=config, actor_wg=actors, replicas=list(replicas))

    def update(step):
        wanted = set(actors.step())
        manager.update_weights(global_steps=step)
        held = [each.group.held()[0] for each in manager.replicas]
        assert {digest for digest, _ in held} == wanted
        assert len(wanted) == 1
        return wanted, held

    seen = [update(step)[0] for step in range(3)]
    assert len(set(map(frozenset, seen))) == 3, "training changes nothing"
    assert replicas[0].calls == ["abort", "release", "restore", "resume"] * 3

    late = replica(config)
    late.group.held()  # its process has started: seconds, which are not the update's
    manager.add_replicas([late])
    update(3)

    ray.kill(replicas[0].workers[0])  # nobody is told but verl, by whoever noticed it
    manager.remove_replicas([replicas[0]])
    for step in range(4, 7):
        update(step)
    assert len(manager.replicas) == 2


def test_who_publishes_has_to_be_certain():
    engine = CheckpointEngineRegistry.get("tensorhub")
    assert engine.build_topology(2, 1, [{}, {"version": 4}, {}]) == ({"version": [4, 4]}, {"version": [4]})
    with pytest.raises(tensorhub.UsageError, match="2 actors publish"):
        engine.build_topology(2, 0, [{"version": 4}, {"version": 4}])


@pytest.mark.parametrize("name", ["replica", "shard", "shards", "reliable"])
def test_what_the_adapter_chooses_is_not_configured(name):
    with pytest.raises(tensorhub.UsageError, match=rf"engine_kwargs.tensorhub has {name}, which"):
        CheckpointEngineRegistry.get("tensorhub")(bucket_size=1, server="127.0.0.1:1", **{name: 1})


async def received(engine):
    return {name: tensor.clone() async for name, tensor in engine.receive_weights()}


@pytest.mark.parametrize("error", [tensorhub.UsageError("not these"), asyncio.CancelledError()])
def test_a_rollout_that_could_not_register_takes_the_next_update(monkeypatch, error):
    monkeypatch.setattr(tensorhub.integrations.verl, "placed", lambda **given: {**given, "replica": "rollout-0"})
    with tensorhub.serve() as server, tensorhub.open("policy", replica="trainer", server=server.address) as trainer:
        trainer.register({"w": torch.ones(4)}, boxes={})
        trainer.publish(1)
        engine = CheckpointEngineRegistry.get("tensorhub")(bucket_size=1, server=server.address)
        engine.init_process_group(1)
        with mock.patch.object(aio.Weights, "register", side_effect=error), pytest.raises(type(error)):
            asyncio.run(received(engine))
        assert torch.equal(asyncio.run(received(engine))["w"], torch.ones(4))
        asyncio.run(engine._weights.close(timeout=5.0))
