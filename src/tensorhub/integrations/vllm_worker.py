"""The half of the vLLM integration that runs in each of vLLM's ranks."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_MODULES, SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import tensorhub

from ..steps import is_mapped
from . import vllm_plan
from .vllm import BACKEND, NOTHING
from .vllm_plan import PROCESSED, Published, Taken, planned, refuse, refuse_unused
from .whole import WAIT_S, Whole, layout_of_whole, newest_version, of_view

ONCE = "_already_called_process_weights_after_loading"  # vLLM's mark for layers that it must not process twice


class InPlace:
    """One rank of an engine: a shard of a replica, over the model's own parameters.

    That is only right where parameters are what vLLM computes with. Packed, quantized and absorbed ones vLLM itself
    tells: its processing after a load is begun once more, and what it would touch is refused by name.
    """

    weights: "tensorhub.Weights | None" = None
    published: "Published | None" = None  # what it was planned for
    taken: Taken

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        layout: "Callable[[float | None, int | str], Published]",
        name: str,
        **where: Any,
    ) -> None:
        """`layout` tells within a time what a version is made of: `View.layout`.

        Raises `UsageError` naming a parameter that cannot be read in place.
        """
        if wrong := processed(model, dtype):
            refuse(wrong)
        self._model, self._layout, self._name, self._where = model, layout, name, where
        self._timeout: float | None = None

    def join(self, timeout: float | None) -> None:
        """Become a shard of the replica, without a version as yet. What goes where, what is published now tells."""
        if self.weights is not None:
            return
        published = self._layout(timeout, "latest")
        plan = planned(self._model, published.tensors, published.tied)
        mine = {box.name for boxes in plan.boxes.values() for box in boxes}
        others = any(tensor.name not in mine for tensor in published.tensors)  # which other ranks have
        is_reliable = bool(self._where.get("reliable"))  # only then it keeps copies, which others may rely on
        options = {"reliable": is_reliable, **({} if is_reliable else {"host_bytes": 0}), **self._where}
        weights = tensorhub.open(self._name, **options)
        try:
            weights.register(plan.tensors, boxes=plan.boxes, partial=published.is_partial or others)
        except BaseException:  # else the next fetch could not join, and would say only that
            weights.close(timeout=LEAVE_S)
            raise
        self.weights, self.published, self.taken = weights, published, plan.taken

    def fetch(self, version: int, timeout: float | None) -> None:
        """Nothing moves yet: what is there is what vLLM computes with. Raises if it never comes, or is unfit."""
        self.join(timeout)
        assert self.weights is not None
        self.weights.wait_for(version, timeout=timeout)
        published = self._layout(timeout, version)
        if published != self.published:
            self.taken = planned(self._model, published.tensors, published.tied).taken
            self.published = published
        self._timeout = timeout

    def load(self, version: int) -> None:
        """Read it, verified, over the one before."""
        assert self.weights is not None, "fetched before"
        found = self.weights.update(version, timeout=self._timeout)
        if found != version:
            raise tensorhub.UsageError(f"version {version} was asked for, and {found} is held already")

    def holds(self, version: int | None) -> bool:
        """Whether that is what the parameters are, whole."""
        return version is not None and self.weights is not None and self.weights.version == version

    def close(self, timeout: float) -> None:
        """Stop being a shard of the replica. The parameters stay as they are, and the next `fetch` joins again."""
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.close(timeout=timeout)


def processed(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """The parameters that vLLM makes something else of after it has loaded them, and how that shows."""
    found = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in found.items()}
    wrong = {name: PROCESSED for name, parameter in found.items() if not parameter.numel()}
    for at, layer in model.named_modules():
        prefix = f"{at}." if at else ""
        before, _ = get_layerwise_info(layer).restore_metadata
        for name, meta in before.items():
            now = getattr(layer, name, None)
            if now is None or (now.shape, now.dtype, now.stride()) != (meta.shape, meta.dtype, meta.stride()):
                wrong[names.get(id(now), prefix + name)] = PROCESSED
        if hasattr(layer, ONCE):
            wrong |= {prefix + name: PROCESSED for name, _ in layer.named_parameters(recurse=False)}
    if wrong:
        return wrong
    for _, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        watched = _Watching(found)
        with watched.until_touched():
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)
                if (kernel := getattr(method, "moe_kernel", None)) is not None:  # not called again by the method
                    kernel.fused_experts.process_weights_after_loading(layer)
            elif is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(dtype)
            elif layer is model and hasattr(model, "process_weights_after_loading"):
                model.process_weights_after_loading()
        wrong |= {name: f"vLLM's processing after a load reads it ({how})" for name, how in watched.touched.items()}
    moved = [name for name, parameter in model.named_parameters() if parameter is not found.get(name)]
    return wrong | dict.fromkeys(moved, PROCESSED)


class _Touched(BaseException):
    """Ends what vLLM has begun, before it has done anything; no `except Exception` of its may keep it."""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops the first operation on the memory of a parameter that is not a mere view of it."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {each.untyped_storage().data_ptr(): name for name, each in parameters.items()}
        self.touched: dict[str, str] = {}

    @contextmanager
    def until_touched(self) -> Iterator[None]:
        """A block that ends where a parameter is touched."""
        try:
            with self, _WatchingCalls(self), torch.no_grad():
                yield
        except _Touched:
            pass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        if func.overloadpacket.__name__ == "copy_" and _is_same(args[0], args[1]):
            return args[0]
        if not func.is_view:
            self.look(func.overloadpacket.__name__, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def look(self, operation: str, given: object) -> None:
        """Raises `_Touched` if what an operation is given is memory of a parameter."""
        for each in torch.utils._pytree.tree_leaves(given):
            if isinstance(each, torch.Tensor) and not each.is_meta and each.numel():
                name = self._names.get(each.untyped_storage().data_ptr())
                if name is not None:
                    self.touched[name] = operation
                    raise _Touched(name)


class _WatchingCalls(TorchFunctionMode):
    """Sees operations of other libraries when they are called: the dispatcher hides those that are "composite".

    26 of the 50 in vLLM 0.32's library for CPUs are, among them the one that packs a linear layer.
    """

    def __init__(self, watching: _Watching) -> None:
        super().__init__()
        self._watching = watching

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        if isinstance(func, OpOverload | OpOverloadPacket) and not str(func).startswith(("aten.", "prims.")):
            self._watching.look(str(func), (args, kwargs))
        return func(*args, **(kwargs or {}))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a copy of one into the other changes nothing."""
    places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (one, other) if not each.is_meta]
    return len(places) == 2 and places[0] == places[1]


VLLMS = "online_process_loader"  # the name of what vLLM puts in place of a `weight_loader` while it reloads


class Reload:
    """One rank of an engine: a replica of whole tensors on the host, which vLLM's layerwise reload loads.

    It is given a copy of each tensor, since loaders may change what they are given. Before a version is fetched,
    `vllm_plan` follows the model's `load_weights`: vLLM itself notes only a layer into which nothing came, and its
    reload loses what `load_weights` copies into a parameter past its own `weight_loader`.
    """

    published: "Published | None" = None  # what it was planned for
    taken: Taken

    def __init__(
        self,
        model: torch.nn.Module,
        config: VllmConfig,
        device: torch.device,
        whole: Whole,
        chosen: "Callable[[Any], Published]",
    ) -> None:
        """`chosen`: what is to be loaded of a layout."""
        self._model, self._model_config, self._device = model, config.model_config, device
        self.whole, self._chosen = whole, chosen
        self._is_loaded = False  # what is on the host, as it lies there

    @property
    def weights(self) -> "tensorhub.Weights | None":
        """What serves them."""
        return self.whole.weights

    def join(self, timeout: float | None) -> None:
        """Become a replica, without a version as yet. Raises `UsageError` if the engine cannot load what there is."""
        was_here = self.weights is not None
        self.whole.join(timeout=timeout)
        published = self._chosen(self.whole.layout)
        if published == self.published:
            return
        try:
            with self._device, before_processing(self._model) as reload:
                self.taken = planned(self._model, published.tensors, published.tied, reload).taken
        except BaseException:  # else the next one would be expected to be made of these tensors
            if not was_here:
                self.whole.close(timeout=LEAVE_S)
            raise
        self.published = published

    def fetch(self, version: int, timeout: float | None) -> None:
        """Fetches to host memory. vLLM computes with the version before. Tensors made of others raise an error."""
        self.join(timeout)
        if self.whole.version != version:  # the number alone does not tell: another job may have begun with it anew
            self._is_loaded = False
        found = self.whole.update(version, timeout=timeout)
        if found != version:
            raise tensorhub.UsageError(f"{version} was asked for, and {self.whole.replica} holds {found} already")

    def load(self, version: int) -> None:
        """Over the version before. A load that fails leaves a mixture, which the next one mends."""
        assert self.published is not None, "fetched before"
        asleep = [name for name, each in self._model.named_parameters() if not is_mapped(each)]
        if asleep:
            text = f"vLLM sleeps: no memory is behind {len(asleep)} parameters, {asleep[0]!r} for one"
            raise tensorhub.UsageError(text, hint="wake_up() comes before update()")
        self._is_loaded = False
        if self._device.type == "cpu":
            _forget_kernels_of_experts(self._model)
        names = {tensor.name for tensor in self.published.tensors}
        layers, tied = _Layers(self._model), _tied(self._model)
        try:
            with self._device, torch.no_grad():
                initialize_layerwise_reload(self._model)
                self._model.load_weights(each for each in self.whole.copies() if each[0] in names)  # type: ignore[operator]
                again = [layer for layer in tied if _is_passed_by(layer)]
                finalize_layerwise_reload(self._model, self._model_config)
                for layer in again:
                    method = getattr(layer, "quant_method", None)
                    if isinstance(method, QuantizeMethodBase):
                        method.process_weights_after_loading(layer)
        except BaseException:  # else vLLM would go on with this load when the next one begins
            layers.put_back()
            for layer in self._model.modules():
                get_layerwise_info(layer).reset()
            raise
        self._is_loaded = True

    def holds(self, version: int | None) -> bool:
        """Whether that is on the host, and loaded from there. After a load that has failed nothing is."""
        return self._is_loaded and version is not None and self.whole.version == version

    def close(self, timeout: float) -> None:
        """Stop being a replica, and free its host memory. The next `fetch` joins again.

        What that brings counts as new, also under the number that is loaded now: it may be another job's.
        """
        self._is_loaded = False
        self.whole.close(timeout=timeout)


class _Layers:
    """A snapshot of a model's layers, to restore them: parameters, buffers and other values, not their contents."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._were = []
        for layer in model.modules():
            values = {name: each for name, each in vars(layer).items() if not callable(each)}
            tensors = {"_parameters": {**layer._parameters}, "_buffers": {**layer._buffers}}
            values.update(tensors, _non_persistent_buffers_set={*layer._non_persistent_buffers_set})
            self._were.append((layer, values))

    def put_back(self) -> None:
        for layer, values in self._were:
            vars(layer).update(values)


@contextmanager
def before_processing(model: torch.nn.Module) -> "Iterator[vllm_plan.Reload]":
    """A block in which parameters and buffers are what vLLM's reload loads into, and nothing can be written."""
    layers, inside = _Layers(model), [0]
    same, optional = _names(model)
    try:
        if hasattr(model, "_do_torchao_reload"):  # else its load_weights would begin a reload by itself
            model._do_torchao_reload = False  # type: ignore[assignment]
        for layer in model.modules():
            if type(layer).__name__ not in SKIP_MODULES:
                _put_before(layer, inside)
        yield vllm_plan.Reload(lambda: inside[0] > 0, same, optional)
    finally:
        layers.put_back()


def _put_before(layer: torch.nn.Module, inside: list[int]) -> None:
    """The layer's tensors as they were before vLLM processed them; those that its reload leaves alone stay."""
    before = get_layerwise_info(layer).restore_metadata
    for kind, metas in zip(("_parameters", "_buffers"), before, strict=True):
        made = {name: each for name, each in vars(layer)[kind].items() if each is None or name in SKIP_TENSORS}
        for name, meta in metas.items():
            if name not in SKIP_TENSORS:
                made[name] = restore_layer_refs(to_meta_tensor(meta), layer)
                loader = getattr(made[name], "weight_loader", default_weight_loader)
                while loader.__name__ == VLLMS:
                    loader = loader.__wrapped__
                made[name].weight_loader = _noted(loader, inside)
                vars(layer).pop(name, None)
        vars(layer)[kind] = made


def _noted(loader: Callable[..., Any], inside: list[int]) -> Callable[..., Any]:
    """The loader, and that it runs: what it copies vLLM's reload copies as well."""

    @wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        try:
            return loader(*args, **kwargs)
        finally:
            inside[0] -= 1

    return load


def _names(model: torch.nn.Module) -> tuple[dict[str, str], frozenset[str]]:
    """(other names of parameters and their first name, names of parameters that vLLM may lack)."""
    first: dict[int, str] = {}
    same: dict[str, str] = {}
    optional: set[str] = set()
    for at, layer in model.named_modules():
        before, _ = get_layerwise_info(layer).restore_metadata  # vLLM drops some of them when it has used them
        for name in {**before, **layer._parameters}:
            full, parameter = f"{at}.{name}" if at else name, layer._parameters.get(name)
            if parameter is not None:
                same[full] = first.setdefault(id(parameter), full)
            if name in SKIP_LOAD_TENSORS or is_deferred_attention_layer(layer):
                optional.add(full)
    return same, frozenset(optional)


def _tied(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers whose parameters are all of other layers, such as a tied head."""
    seen: set[int] = set()
    found = []
    for layer in model.modules():
        mine = {id(each) for each in layer.parameters(recurse=False)}
        if mine and mine <= seen:
            found.append(layer)
        seen |= mine
    return found


def _is_passed_by(layer: torch.nn.Module) -> bool:
    """True while a reload has brought nothing to it: vLLM then does not process it.

    Where it computes with a processed copy, as on CPUs, that would stay the one of the version before.
    """
    info = get_layerwise_info(layer)
    return info.can_load() and not info.load_numel


def _forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """Makes vLLM build them anew while it loads.

    vLLM 0.32 packs experts for CPUs only when it makes their kernels: after a load that keeps them it computes with
    unpacked weights as if they were packed. On GPUs captured graphs hold the kernels, which stay.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


logger = logging.getLogger("vllm.tensorhub")  # below vLLM's own, so that it is written where vLLM writes
LEAVE_S = 5.0
COMPUTES = ("forward", "compute_logits")  # the second is called where a captured graph takes the place of the first


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Names the model and the replica; or asks what the ranks hold."""

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
    """Brings one rank to new versions, together with the others: `update_weights` fetches, `finish_…` loads.

    Only `init_transfer_engine` may raise, and one rank raises for all.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._way: Reload | InPlace | None = None
        self._joined: tuple[str, str, bool] | None = None  # model, replica, in place
        self._options: dict[str, Any] = {}  # with which it has joined
        self._ignore: list[str] = []
        self._complete: Published | None = None  # all ranks together have a place for it
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
            self._answer(init_info)  # a question makes no rank that has left join again
        except tensorhub.TensorHubError as error:
            parallel = self.parallel_config
            if parallel.rank == parallel.world_size - 1 or parallel.distributed_executor_backend == "external_launcher":
                raise
            logger.error("%s", error)

    def _join(self, info: InitInfo) -> None:
        """Opens the workers on all ranks, or raises on all ranks."""
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
        # not before: an engine that is refused in place may do without
        self._way, self._joined, self._options = way, said, info.options

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
        if self._all(published is not None and published == self._complete):
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
        self._complete = published
        return ""

    def _answer(self, asked: InitInfo) -> None:
        """Raises on all ranks if it is not so on one."""
        wrong = ""
        if asked.loaded is not None and not self._has(asked.loaded):
            wrong = f"version {asked.loaded} is not loaded"
        here = NOTHING if self._loaded is None else self._loaded
        if asked.kept is not None and (self._is_mixture or asked.kept != here):
            wrong = "the weights are not what they were"
        if asked.same and (self._is_mixture or self._loaded is None):
            wrong = "the weights are no version"
        # where one rank has failed none loads
        why = next(filter(None, self._gathered(self._why)), "nothing was loaded")
        self._agree(tensorhub.VersionUnavailable(f"{wrong}: {why}") if wrong else None)

    def _agree(self, wrong: Exception | None) -> None:
        """Raise on all ranks what is wrong on the first of them."""
        found = self._gathered(None if wrong is None else said(wrong))
        for rank, each in enumerate(found):
            if each is not None:
                text = f"rank {rank}: {each}" if len(found) > 1 else each
                raise tensorhub.TensorHubError(text) from wrong

    def _gathered(self, mine: Any) -> list[Any]:
        """Gathers a value of each rank, on all ranks."""
        group = get_world_group()
        found = [mine] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
        return found

    def start_weight_update(self) -> None:
        """Changes nothing: the weights stay until every rank has the version."""

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
        except Exception as error:  # noqa: BLE001 - the driver is told when it asks
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
            self._way.close(LEAVE_S)  # what is on the host, or was written over in part, serves no reader
            return
        self._is_mixture = False
        for name in COMPUTES:
            delattr(self.model, name)  # the refusal: the class's own is there again

    def _has(self, version: int) -> bool:
        """Whether this rank, and no other process of its name, has loaded it, and has not left since."""
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
        found = NOTHING
        try:
            if get_world_group().rank_in_group == 0:
                found = ask()
        finally:  # they wait for a word also where there is none
            first: int = self._gathered(found)[0]
        if first == NOTHING:
            raise tensorhub.VersionUnavailable("rank 0 has found no version; its log says why")
        return first

    def _all(self, well: bool) -> bool:
        """Whether it is so on all ranks."""
        return all(self._gathered(well))

    def shutdown(self) -> None:
        """Stop being a replica. What vLLM computes with stays, and the next fetch joins again."""
        if self._way is not None:
            self._way.close(LEAVE_S)


def _clear_caches(model: torch.nn.Module) -> None:
    """Clears keys and values that an earlier version has computed: a NaN among them would spoil later requests.

    vLLM forgets which request they belong to. Attention multiplies them by 0, and 0 * NaN is NaN.
    A cache that sleeps has no memory until vLLM wakes it, and then other memory.
    """
    for layer in model.modules():
        for cache in torch.utils._pytree.tree_leaves(getattr(layer, "kv_cache", None)):
            if isinstance(cache, torch.Tensor) and not cache.is_meta and is_mapped(cache):
                cache.zero_()


def said(wrong: Exception) -> str:
    """The error's text with its hint."""
    return " - ".join([str(wrong), *filter(None, [getattr(wrong, "hint", None)])])


def _view(info: InitInfo) -> "tensorhub.View":
    return tensorhub.connect(**of_view(info.options))
