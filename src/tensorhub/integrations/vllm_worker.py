"""The half of `integrations.vllm` that lives in each of vLLM's ranks. Only vLLM imports it, and it imports vLLM.

`start_weight_update` does nothing, `update_weights` fetches, `finish_weight_update` loads: vLLM calls each of them on
all ranks before it goes on to the next. There are two ways to do it: `Reload` fetches whole tensors to the host, and
has vLLM load them; `InPlace` reads over the parameters that vLLM computes with.
"""

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

import tensorhub

from .newest import newest_version
from .vllm import BACKEND
from .vllm_engines import WAIT_S
from .vllm_in_place import InPlace
from .vllm_reload import Reload
from .whole import Whole, layout_of_whole

logger = logging.getLogger("vllm.tensorhub")  # below vLLM's own, so that it is written where vLLM writes
LEAVE_S = 5.0
NOTHING = -1  # versions begin at 0
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
    """Brings one rank to new versions, together with the others."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._way: Reload | InPlace | None = None
        self._joined: tuple[str, str, bool] | None = None  # model, replica, in place
        self._loaded: int | None = None
        self._next: int | None = None  # fetched, and to be loaded
        given = vllm_config.additional_config
        if isinstance(given, dict) and BACKEND in given:
            self._begin(self.parse_init_info(given[BACKEND]))

    def _begin(self, info: InitInfo) -> None:
        """Load a first version before vLLM serves: the newest one, as rank 0 sees it."""
        newest = self._told(lambda: newest_version(_view(info), info.model, time.monotonic() + WAIT_S))
        with set_current_vllm_config(self.vllm_config):
            self.init_transfer_engine(info)
            self.receive_weights(UpdateInfo(newest))
            self.finish_weight_update()
        if self._loaded is None:
            raise tensorhub.VersionUnavailable(f"version {newest} of {info.model} could not be loaded; see above")

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Become a replica, or a shard of one. Nothing is fetched yet."""
        said = init_info.model, init_info.replica, init_info.in_place
        if self._joined not in (None, said):
            text = f"the engine has joined {self._joined[0]} as {self._joined[1]}, in_place={self._joined[2]}"
            raise tensorhub.UsageError(
                text, hint="one engine is one replica: attach() with the same, or start another one"
            )
        if self._way is not None:  # from `additional_config`, or a driver that was started again
            return
        self._joined = said
        parallel = self.parallel_config
        name = init_info.replica
        if parallel.data_parallel_size > 1:
            name = f"{name}.{parallel.data_parallel_index}"
        if not init_info.in_place:
            name = f"{name}.{parallel.rank}" if parallel.world_size > 1 else name
            whole = Whole(init_info.model, replica=name, **init_info.options)
            self._way = Reload(self.model, self.vllm_config, self.device, whole)
            return
        place = {"replica": name, "shard": parallel.rank, "shards": parallel.world_size, **init_info.options}
        way, why = None, "another rank cannot; its log says why"
        try:
            published = layout_of_whole(_view(init_info), init_info.model, time.monotonic() + WAIT_S)
            way = InPlace(self.model, self.model_config.dtype, published, init_info.model, **place)
        except Exception as error:  # noqa: BLE001 - raised below
            why = str(error)
        if not self._all(way is not None):  # then none of them, so that all of vLLM's ranks answer alike
            raise tensorhub.UsageError(f"{name} cannot read in place: {why}")
        self._way = way

    def start_weight_update(self) -> None:
        """Nothing is touched before everybody has the version."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch. Unlike vLLM's own there is no device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fetch the version, as far as it can be while vLLM computes with the one before."""
        if self._way is None:
            raise tensorhub.UsageError("the engine has joined nothing", hint="integrations.vllm.attach() first")
        self._next = None
        try:
            self._way.fetch(update_info.version, update_info.timeout)
        except Exception as error:  # noqa: BLE001 - said to the driver through the reference server: who raises is not read
            logger.error("version %s could not be fetched: %s", update_info.version, error)
            return
        self._next = update_info.version

    def finish_weight_update(self) -> None:
        """Load what was fetched; where a rank has nothing to load, none does. All have loaded it, or all refuse."""
        wanted, self._next = self._next, None
        if not self._all(wanted is not None) or wanted is None or self._way is None:
            return
        if self._all(wanted == self._loaded):
            return
        before, self._loaded = self._loaded, None
        self._refuse(f"loading version {wanted} has failed half-way")
        if self._all(self._has_loaded(wanted)):
            self._loaded = wanted
        elif self._all(self._way.holds(before)):
            self._loaded = before
        else:
            self._way.close(LEAVE_S)  # by which the driver knows
            return
        for name in COMPUTES:
            delattr(self.model, name)  # the refusal: the class's own is there again

    def _has_loaded(self, version: int) -> bool:
        assert self._way is not None
        try:
            self._way.load(version)
        except Exception as error:  # reported as above; this rank refuses to compute
            logger.exception("version %s was not loaded, or in part: %s", version, error)
            return False
        return True

    def _refuse(self, why: str) -> None:
        def refused(*_: object, **__: object) -> torch.Tensor:
            raise tensorhub.VersionUnavailable(f"the weights are no version: {why}", hint="update() again")

        for name in COMPUTES:
            setattr(self.model, name, refused)

    def _told(self, ask: Callable[[], int]) -> int:
        """What rank 0 finds. Where it finds nothing all raise: they wait for its word."""
        group, wrong, found = get_world_group(), None, torch.tensor([NOTHING])
        if group.rank_in_group == 0:
            try:
                found = torch.tensor([ask()])
            except Exception as error:  # noqa: BLE001 - raised below
                wrong = error
        if group.world_size > 1:
            torch.distributed.broadcast(found, group.ranks[0], group=group.cpu_group)
        if wrong is not None:
            raise wrong
        if int(found) == NOTHING:
            raise tensorhub.VersionUnavailable("rank 0 has found no version; its log says why")
        return int(found)

    def _all(self, well: bool) -> bool:
        """Whether it is so on all ranks."""
        group = get_world_group()
        found = torch.tensor([int(well)])
        if group.world_size > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return bool(found)

    def shutdown(self) -> None:
        """Leave, until the next fetch: what vLLM computes with stays."""
        if self._way is not None:
            self._way.close(LEAVE_S)


def _view(info: InitInfo) -> "tensorhub.View":
    return tensorhub.connect(info.options.get("server"), token=info.options.get("token"))
