"""The half of `integrations.vllm` that lives in each of vLLM's ranks. Only vLLM imports it, and it imports vLLM.

`start_weight_update` does nothing, `update_weights` fetches to the host, `finish_weight_update` loads: vLLM calls each
of them on all ranks before it goes on to the next.

With `in_place` there are two models: the trainer's, and that of vLLM's own parameters, fused and cut, whose shards are
the ranks. What an engine has loaded it publishes as the second one too. An engine that finds its version there reads it
over the parameters that it computes with, and fetches nothing to the host.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import tensorhub

from .vllm import BACKEND, WAIT_S, newest_version
from .whole import Whole

logger = logging.getLogger("vllm.tensorhub")  # below vLLM's own, so that it is written where vLLM writes
LEAVE_S = 5.0
COMPUTES = ("forward", "compute_logits")  # the second is called where a captured graph takes the place of the first


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Which replica of what."""

    model: str
    replica: str
    in_place: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to fetch."""

    version: int
    timeout: float | None = None


class TensorHubWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Fetches versions to the host, and has vLLM load them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._whole: Whole | None = None
        self._ours: tensorhub.Weights | None = None  # vLLM's parameters
        self._peers = ""  # the model of theirs
        self._loaded: int | None = None
        self._next: tuple[int, bool] | None = None  # the version to load, and whether peers have it
        given = vllm_config.additional_config
        if isinstance(given, dict) and BACKEND in given:
            self._begin(self.parse_init_info(given[BACKEND]))

    def _begin(self, init_info: InitInfo) -> None:
        """Load a first version before vLLM serves: the newest one, as rank 0 sees it."""
        self.init_transfer_engine(init_info)
        newest = self._told(lambda: newest_version(self._view, init_info.model, time.monotonic() + WAIT_S))
        with set_current_vllm_config(self.vllm_config):
            self.receive_weights(UpdateInfo(newest))
            self.finish_weight_update()
        if self._loaded is None:
            raise tensorhub.VersionUnavailable(f"version {newest} of {init_info.model} could not be loaded; see above")

    def _told(self, ask: Callable[[], int]) -> int:
        """What rank 0 finds."""
        group = get_world_group()
        found = torch.tensor([ask() if group.rank_in_group == 0 else 0])
        if group.world_size > 1:
            torch.distributed.broadcast(found, group.ranks[0], group=group.cpu_group)
        return int(found)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Become a replica. Nothing is fetched yet."""
        if self._whole is not None:  # from `additional_config`, or a driver that was started again
            return
        parallel = self.parallel_config
        engine = f"{init_info.replica}.{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else ""
        engine = engine or init_info.replica
        name = f"{engine}.{parallel.rank}" if parallel.world_size > 1 else engine
        self._whole = Whole(init_info.model, replica=name, **init_info.options)
        self._view = tensorhub.connect(init_info.options.get("server"), token=init_info.options.get("token"))
        if init_info.in_place:
            self._join_peers(init_info, engine)

    def _join_peers(self, init_info: InitInfo, engine: str) -> None:
        found = dict(sorted(self.model.named_parameters()))
        if gone := [name for name, parameter in found.items() if not parameter.numel()]:
            text = f"vLLM computes with processed copies of {len(gone)} parameters, such as {gone[0]}"
            raise tensorhub.UsageError(text, hint="leave in_place out: then versions are reloaded")
        parallel = self.parallel_config
        facts = [parallel.world_size, *((name, str(each.dtype)) for name, each in found.items())]
        self._peers = f"{init_info.model}.vllm-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
        place = {"shard": parallel.rank, "shards": parallel.world_size}
        self._ours = tensorhub.open(self._peers, replica=engine, reliable=False, **place, **init_info.options)
        self._ours.register({name: parameter.data for name, parameter in found.items()})

    def start_weight_update(self) -> None:
        """Nothing is touched before everybody has the version."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch. Unlike vLLM's own there is no device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fetch the version to the host. vLLM computes with the one before."""
        if self._whole is None:
            raise tensorhub.UsageError("the engine has joined nothing", hint="integrations.vllm.attach() first")
        wanted, self._next = update_info.version, None
        if self._ours is not None and self._told(lambda: self._have_peers(wanted)):
            self._next = (wanted, True)
            return
        try:
            found = self._whole.update(wanted, timeout=update_info.timeout)
        except Exception as error:  # noqa: BLE001 - said to the driver through the reference server: who raises is not read
            logger.error("version %s of %s could not be fetched: %s", wanted, self._whole.model, error)
            return
        if found == wanted:
            self._next = (wanted, False)
        else:
            logger.error("version %s was asked for, and %s holds %s already", wanted, self._whole.replica, found)

    def _have_peers(self, version: int) -> bool:
        try:
            return any(each.version == version and each.holders for each in self._view.versions(self._peers))
        except tensorhub.TensorHubError:
            return False  # the other ranks wait for an answer; then it is reloaded

    def finish_weight_update(self) -> None:
        """Load what was fetched, or read it over what is there; where a rank has nothing to load, none does."""
        ready, self._next = self._next, None
        if not self._all(ready is not None) or ready is None:
            return
        version, from_peers = ready
        if self._all(version == self._loaded):
            return
        self._refuse(f"loading version {version} has failed half-way")
        self._loaded = None
        try:
            if from_peers and self._ours is not None:
                self._ours.update(version)
            else:
                self._reload(version)
        except Exception as error:  # reported as above; this rank refuses to compute
            logger.exception("version %s was loaded in part: %s", version, error)
            if self._whole is not None:
                self._whole.close(timeout=LEAVE_S)
            return
        self._loaded = version
        for name in COMPUTES:
            delattr(self.model, name)  # the refusal: the class's own is there again

    def _all(self, well: bool) -> bool:
        """Whether it is so on all ranks."""
        group = get_world_group()
        found = torch.tensor([int(well)])
        if group.world_size > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return bool(found)

    def _reload(self, version: int) -> None:
        assert self._whole is not None
        if self._ours is not None:
            self._ours.unpublish()
        with self.device, torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(self._whole))
            finalize_layerwise_reload(self.model, self.model_config)
        if self._ours is not None:
            self._ours.publish(version)

    def _refuse(self, why: str) -> None:
        def refused(*_: object, **__: object) -> torch.Tensor:
            raise tensorhub.VersionUnavailable(f"the weights are no version: {why}", hint="update() again")

        for name in COMPUTES:
            setattr(self.model, name, refused)

    def shutdown(self) -> None:
        """Leave."""
        for each in (self._ours, self._whole):
            if each is not None:
                each.close(timeout=LEAVE_S)
