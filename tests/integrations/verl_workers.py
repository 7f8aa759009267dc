"""Actors and rollouts for verl's own manager: FSDP2 on gloo, and engines that only keep what they are given."""

import hashlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs


def digest(tensors):
    """Of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Actor(Worker):
    """As verl's actors: a model that FSDP2 has cut, and a checkpoint engine beside it."""

    def __init__(self, config):
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(501, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7))
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=1 << 20,
            **config.engine_kwargs[config.backend],
        )

    def _full(self):
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.full_tensor()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self):
        """One step of training; the digest of what it has made of the model."""
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 501)).square().sum().backward()
        self.optimizer.step()
        return digest(dict(self._full()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode=None):
        return await self.checkpoint_engine.send_weights(self._full(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *arguments, **options):
        return getattr(self.checkpoint_engine, method)(*arguments, **options)


class Engine:
    """In place of a server of vLLM or SGLang: copies what it is given, as they do."""

    def __init__(self):
        self.held = {}

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        assert wire_format == "named_tensors"
        self.held = {name: tensor.clone() async for name, tensor in weights}


class RolloutWorker(CheckpointEngineWorker):
    """verl's own worker, which can be asked what its engine holds."""

    def __init__(self, rollout_config, model_config):
        super().__init__(rollout_config, model_config, server_adapter=Engine())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self):
        """(the digest of what the engine holds, by whom the bytes were sent)."""
        return digest(self.server_adapter.held), self.checkpoint_engine.statistics().get("bytes_by_source")


class Replica:
    """What verl's manager asks of a `RolloutReplica`, and the order in which it did."""

    def __init__(self, group):
        self.group, self.workers, self.calls = group, group.workers, []

    async def abort_all_requests(self, reject_request=False):
        self.calls.append("abort")

    async def release_kv_cache(self):
        self.calls.append("release")

    async def resume_kv_cache(self):
        self.calls.append("restore")

    async def resume_generation(self):
        self.calls.append("resume")
