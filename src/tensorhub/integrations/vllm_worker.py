"""The half of `integrations.vllm` that lives in each of vLLM's ranks. Only vLLM imports it, and it imports vLLM.

`start_weight_update` does nothing, `update_weights` fetches, `finish_weight_update` loads: vLLM calls each of them on
all ranks before it goes on to the next. There are two ways to do it: `Reload` fetches whole tensors to the host, and
has vLLM load them; `InPlace` reads over the parameters that vLLM computes with.

`init_transfer_engine` joins, and answers what the driver asks: whether these ranks, all of them, have a version. It is
the only call that may raise, and one rank raises for all.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
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

from .newest import newest_version, of_view
from .vllm import BACKEND
from .vllm_engines import NOTHING, WAIT_S
from .vllm_in_place import InPlace
from .vllm_plan import Published, refuse_unused
from .vllm_reload import Reload
from .whole import Whole, layout_of_whole

logger = logging.getLogger("vllm.tensorhub")  # below vLLM's own, so that it is written where vLLM writes
LEAVE_S = 5.0
COMPUTES = ("forward", "compute_logits")  # the second is called where a captured graph takes the place of the first


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Which replica of what."""

    model: str
    replica: str
    in_place: bool = False
    ignore: list[str] = field(default_factory=list)  # patterns of names that are left out
    options: dict[str, Any] = field(default_factory=dict, repr=False)  # a token may be among them
    timeout: float | None = None
    loaded: int | None = None  # asked: whether all ranks have loaded this version, and hold it
    kept: int | None = None  # asked: whether they compute with this one still; `NOTHING`: none has come to any of them
    same: bool = False  # asked: whether they compute with a version still, whichever it is


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to fetch; None: nothing, and what was fetched before is not to be loaded."""

    version: int | None
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
        self._options: dict[str, Any] = {}  # with which it has joined
        self._ignore: list[str] = []
        self._judged: Published | None = None  # all ranks together have a place for it
        self._loaded: int | None = None
        self._next: int | None = None  # fetched, and to be loaded
        self._is_mixture = False
        self._why = ""  # the last version is not there
        given = vllm_config.additional_config
        if isinstance(given, dict) and BACKEND in given:
            self._begin(self.parse_init_info(given[BACKEND]))

    def _begin(self, info: InitInfo) -> None:
        """Load a first version before vLLM serves: the newest one, as rank 0 sees it."""
        newest = self._told(lambda: newest_version(_view(info), info.model, time.monotonic() + WAIT_S))
        with set_current_vllm_config(self.vllm_config):
            self._join(info)
            self.receive_weights(UpdateInfo(newest))
            self.finish_weight_update()
        if self._loaded is None:
            raise tensorhub.VersionUnavailable(f"version {newest} of {info.model} could not be loaded; see above")

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Become a replica, or a shard of one, and answer what is asked: by an error if it is not so.

        The last rank raises it for all of them. vLLM reads what ranks answer in their order, up to the first error, and
        would take what it has left unread for answers to its next call.
        """
        try:
            if init_info.loaded is None and init_info.kept is None and not init_info.same:
                self._join(init_info)
            self._answer(init_info)  # a question makes nobody join again who has left
        except tensorhub.TensorHubError as error:
            parallel = self.parallel_config
            if parallel.rank == parallel.world_size - 1 or parallel.distributed_executor_backend == "external_launcher":
                raise
            logger.error("%s", error)

    def _join(self, info: InitInfo) -> None:
        """All ranks do, or none: then it raises on all."""
        said = info.model, info.replica, info.in_place
        way, wrong, was_here = self._way, None, self._way is not None and self._way.weights is not None
        try:
            if self._joined not in (None, said):
                text = f"the engine has joined {self._joined[0]} as {self._joined[1]}, in_place={self._joined[2]}"
                raise tensorhub.UsageError(
                    text, hint="one engine is one replica: attach() with the same, or start another one"
                )
            if way is not None and info.options != self._options:
                if was_here:
                    text = f"the engine has joined {info.model} with other options, such as another server"
                    raise tensorhub.UsageError(text, hint="close() what attach() has returned, then attach() again")
                way = None  # it has left: with the new ones it joins anew
            way = way or self._made(info)
            self._ignore = info.ignore
            way.join(info.timeout)
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            wrong = error
        try:
            self._agree(wrong)
            assert way is not None, "else the line above raises"
            unused = self._unused(way)
            self._agree(tensorhub.UsageError(unused) if unused else None)
        except tensorhub.TensorHubError:
            if way is not None and not was_here:
                way.close(LEAVE_S)
            raise
        finally:
            del wrong
        self._way, self._joined, self._options = (
            way,
            said,
            info.options,
        )  # not before: who is refused in place may do without

    def _made(self, info: InitInfo) -> Reload | InPlace:
        parallel = self.parallel_config
        name = info.replica
        if parallel.data_parallel_size > 1:
            name = f"{name}.{parallel.data_parallel_index}"
        if not info.in_place:
            name = f"{name}.{parallel.rank}" if parallel.world_size > 1 else name
            whole = Whole(info.model, replica=name, **info.options)
            return Reload(self.model, self.vllm_config, self.device, whole, self._chosen)
        place = {"replica": name, "shard": parallel.rank, "shards": parallel.world_size, **info.options}

        view = _view(info)

        def layout(timeout: float | None, version: int | str) -> Published:
            deadline = time.monotonic() + (WAIT_S if timeout is None else timeout)
            return self._chosen(layout_of_whole(view, info.model, deadline, version))

        return InPlace(self.model, self.model_config.dtype, layout, info.model, **place)

    def _chosen(self, layout: Any) -> Published:
        """What of it is to be loaded."""
        tensors = (each for each in layout.shards[0] if not any(fnmatchcase(each.name, it) for it in self._ignore))
        return Published(tuple(tensors), tuple(map(tuple, layout.tied)), is_partial=bool(self._ignore))

    def _unused(self, way: Reload | InPlace, is_well: bool = True) -> str:
        """What of the version no rank takes; "" if there is nothing. All ranks ask, once for each layout."""
        published = way.published if is_well else None
        if self._all(published is not None and published == self._judged):
            return ""
        found = self._gathered(way.taken if published is not None else None)
        if published is None or None in found:  # something else is wrong, there
            return ""
        parallel = self.parallel_config
        is_spread = parallel.data_parallel_size > 1 and parallel.enable_expert_parallel  # experts of other engines
        try:
            if not is_spread:
                refuse_unused(published.tensors, published.tied, found)
        except tensorhub.UsageError as error:
            return said(error)
        self._judged = published
        return ""

    def _answer(self, asked: InitInfo) -> None:
        """Raises on all ranks if it is not so on one."""
        wrong = ""
        if asked.loaded is not None and not self._has(asked.loaded):
            wrong = f"version {asked.loaded} is not loaded"
        if asked.kept is not None and (self._is_mixture or asked.kept != _number(self._loaded)):
            wrong = "the weights are not what they were"
        if asked.same and (self._is_mixture or self._loaded is None):
            wrong = "the weights are no version"
        why = next(
            filter(None, self._gathered(self._why)), "nothing was loaded"
        )  # where one rank has failed none loads
        self._agree(tensorhub.VersionUnavailable(f"{wrong}: {why}") if wrong else None)

    def _agree(self, wrong: Exception | None) -> None:
        """Raise on all ranks what is wrong on the first of them."""
        found = self._gathered(None if wrong is None else said(wrong))
        for rank, each in enumerate(found):
            if each is not None:
                text = f"rank {rank}: {each}" if len(found) > 1 else each
                raise tensorhub.TensorHubError(text) from wrong

    def _gathered(self, mine: Any) -> list[Any]:
        """What each rank gives, on all of them."""
        group = get_world_group()
        found = [mine] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
        return found

    def start_weight_update(self) -> None:
        """Nothing is touched before everybody has the version."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch. Unlike vLLM's own there is no device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fetch the version, as far as it can be while vLLM computes with the one before."""
        if self._way is None:
            raise tensorhub.UsageError("the engine has joined nothing", hint="integrations.vllm.attach() first")
        self._next, self._why = None, ""
        if update_info.version is None:
            return
        why = ""
        try:
            self._way.fetch(update_info.version, update_info.timeout)
        except Exception as error:  # noqa: BLE001 - said to the driver when it asks: who raises here is not read
            why = said(error) or type(error).__name__
        why = self._unused(self._way, is_well=not why) or why
        if why:
            self._why = f"version {update_info.version} could not be fetched: {why}"
            logger.error("%s", self._why)
            return
        self._next = update_info.version

    def finish_weight_update(self) -> None:
        """Load what was fetched; where a rank has nothing to load, none does. All have loaded it, or all refuse."""
        wanted, self._next = self._next, None
        if not self._all(wanted is not None) or wanted is None or self._way is None:
            return
        if self._all(self._has(wanted)):
            return
        before, self._loaded, self._is_mixture = self._loaded, None, True
        self._refuse(f"loading version {wanted} has failed half-way")
        if self._all(self._has_loaded(wanted)):
            self._loaded = wanted
            _clear_caches(self.model)
        elif self._all(self._way.holds(before)):
            self._loaded = before
        else:
            self._way.close(LEAVE_S)  # what is on the host, or was written over in part, is for nobody
            return
        self._is_mixture = False
        for name in COMPUTES:
            delattr(self.model, name)  # the refusal: the class's own is there again

    def _has(self, version: int) -> bool:
        """Whether this rank, and nobody else of its name, has loaded it, and has not left since."""
        return self._loaded == version and self._way is not None and self._way.holds(version)

    def _has_loaded(self, version: int) -> bool:
        assert self._way is not None
        try:
            self._way.load(version)
        except Exception as error:  # said as above; this rank refuses to compute
            self._why = f"version {version} was not loaded: {type(error).__name__}: {said(error)}"
            logger.exception("%s", self._why)
            return False
        return True

    def _refuse(self, why: str) -> None:
        def refused(*_: object, **__: object) -> torch.Tensor:
            raise tensorhub.VersionUnavailable(f"the weights are no version: {why}", hint="update() again")

        for name in COMPUTES:
            setattr(self.model, name, refused)

    def _told(self, ask: Callable[[], int]) -> int:
        """What rank 0 finds. Where it finds nothing all raise: they wait for its word."""
        group, found = get_world_group(), NOTHING
        try:
            if group.rank_in_group == 0:
                found = ask()
        finally:  # they wait for a word also where there is none
            said = torch.tensor([found])
            if group.world_size > 1:
                torch.distributed.broadcast(said, group.ranks[0], group=group.cpu_group)
        if int(said) == NOTHING:
            raise tensorhub.VersionUnavailable("rank 0 has found no version; its log says why")
        return int(said)

    def _all(self, well: bool) -> bool:
        """Whether it is so on all ranks."""
        group = get_world_group()
        found = torch.tensor([int(well)])
        if group.world_size > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return bool(found)

    def shutdown(self) -> None:
        """Stop being a replica. What vLLM computes with stays, and the next fetch joins again."""
        if self._way is not None:
            self._way.close(LEAVE_S)


def _clear_caches(model: torch.nn.Module) -> None:
    """Zeros for keys and values that an earlier version has computed: a NaN among them would spoil what comes after.

    vLLM forgets to whom they belong, and attention multiplies what lies there by 0, which leaves NaN what it is.
    """
    for layer in model.modules():
        for cache in torch.utils._pytree.tree_leaves(getattr(layer, "kv_cache", None)):
            if isinstance(cache, torch.Tensor) and not cache.is_meta:
                cache.zero_()


def said(wrong: Exception) -> str:
    """What is wrong, and what to do."""
    return " - ".join([str(wrong), *filter(None, [getattr(wrong, "hint", None)])])


def _number(version: int | None) -> int:
    return NOTHING if version is None else version


def _view(info: InitInfo) -> "tensorhub.View":
    return tensorhub.connect(**of_view(info.options))
