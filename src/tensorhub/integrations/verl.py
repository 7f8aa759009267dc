"""verl's checkpoint engine "tensorhub": actors publish, rollouts read from them and from each other.

    actor_rollout_ref.rollout.checkpoint_engine.backend=tensorhub
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tensorhub.integrations.verl

and under `engine_kwargs.tensorhub` what `tensorhub.open` takes (server, token, …), `model` for the model's name, and
`dtype`. Without `server` and TENSORHUB_SERVER it is the one of `tensorhub.integrations.ray.start_server()`.

1. Nothing is built: `prepare` and `init_process_group` only say which number the next version has. So replicas come and
   go between updates, and one that died costs the others nothing.
2. verl's actors give full tensors, one after the other. The first actor stages them in host memory (`staged`); the
   others take part in gathering them.
3. A rollout keeps what it has received in host memory and serves it until the next update: newcomers read it there too.

It must never: hand over a tensor before all of its version has been verified.
"""

import os
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import tensorhub
from tensorhub import aio

from .ray import placed
from .whole import StagedPublisher, of_view

Role = dict[str, list[Any]]
OWN = ("replica", "shard", "shards", "reliable")


@CheckpointEngineRegistry.register("tensorhub")
class TensorHubCheckpointEngine(CheckpointEngine):
    """One in each actor and each rollout worker, made by verl."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        model: str = "policy",
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        chosen = ", ".join(name for name in OWN if name in options)
        if chosen:
            text = f"engine_kwargs.tensorhub has {chosen}, which the adapter chooses for each actor and rollout"
            raise tensorhub.UsageError(text, hint="leave it out")
        self._is_master, self._model = is_master, model
        self._dtype = getattr(torch, dtype) if dtype else None
        self._options = {"server": os.environ.get("TENSORHUB_SERVER"), **options}
        self._publisher: StagedPublisher | None = None
        self._weights: aio.Weights | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._version = -1  # of the update under way

    def prepare(self) -> dict[str, Any]:
        """The first actor says which version comes; the others have nothing to say."""
        if not self._is_master:
            return {}
        if self._publisher is None:
            self._publisher = StagedPublisher(self._model, dtype=self._dtype, **placed(**self._options))
        return {"version": self._publisher.next_version()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[Role, Role]:
        """Tells each rank the version. Runs in the driver."""
        versions = [said["version"] for said in metadata if "version" in said]
        if len(versions) != 1:
            raise tensorhub.UsageError(f"{len(versions)} actors publish; it has to be one, with is_master=True")
        return {"version": versions * actor_wg_world_size}, {"version": versions * rollout_world_size}

    def init_process_group(self, version: int, **_: Any) -> None:
        """What `build_topology` has said."""
        self._version = version

    def finalize(self) -> None:
        """Does nothing: published versions stay for later rollouts."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish these tensors as the version that was announced. On all actors, for gathering them is collective."""
        if self._publisher is None:
            for _ in weights:
                pass
            return {}
        said = {} if global_steps is None else {"step": global_steps}
        self._publisher.publish(weights, said, version=self._version)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """The tensors of the version that was announced, when all of it is here and verified."""
        if self._weights is None:
            where = placed(**self._options, reliable=False)
            self._view = aio.connect(**of_view(where))
            self._weights = await aio.open(self._model, **where)
        await self._weights.wait_for(self._version)
        if self._tensors:
            await self._weights.update(self._version)
        else:
            (found,) = (await self._view.layout(self._model, self._version)).shards
            empty = ((each.name, tensorhub.empty(each.shape, dtype=each.dtype)) for each in found)
            made = {name: torch.as_tensor(tensor) for name, tensor in empty}
            await self._weights.register(made, boxes={})
            self._tensors = made  # not before: what was never registered cannot be updated
            await self._weights.replicate(self._version)
        for name, tensor in self._tensors.items():
            yield name, tensor

    def statistics(self) -> dict[str, object]:
        """Counters of this rollout: bytes by the replica that they came from, and more."""
        return dict(self._weights.statistics()) if self._weights is not None else {}
