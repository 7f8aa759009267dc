"""A model in one process, in whole tensors: read from any layout, or published tensor by tensor."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tensorhub

if TYPE_CHECKING:
    import torch


WAIT_S = 300.0
POLL_S = 0.2  # for a first version of the model
SILENT_S = 5.0  # after it a log line says that it waits

_log = logging.getLogger("vllm.tensorhub.newest")  # below vLLM's own, which writes it


def of_view(options: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the options of `open` that `connect` takes too."""
    return {name: options[name] for name in ("server", "token", "insecure") if name in options}


def latest(view: "tensorhub.View", model: str) -> int | None:
    """The newest version that there is now."""
    return next((each.version for each in view.versions(model) if each.is_latest), None)


def newest_version(view: "tensorhub.View", model: str, deadline: float) -> int:
    """The newest version that there is. Waits for a first one. Raises `VersionUnavailable` at the deadline."""
    says_so_at = time.monotonic() + SILENT_S
    while True:
        found = latest(view, model)
        if found is not None:
            return found
        now = time.monotonic()
        if now >= deadline:
            raise tensorhub.VersionUnavailable(f"{model} has no version yet", hint="is the trainer there?")
        if now >= says_so_at:
            _log.warning("%s has no version yet: waiting for its trainer to publish one", model)
            says_so_at = inf
        time.sleep(POLL_S)


class Whole:
    """One replica of a model, in whole tensors: one worker over memory of its own, sorted by name.

    What the whole is, boxes say: `fsdp.attach` publishes with them, and so does `register(module, boxes={})`.
    Nothing is asked or allocated before `join`, or the first `update`.

        with Whole("policy", replica="rollout-0") as policy:
            policy.update("latest")
            model.load_state_dict(dict(policy))
    """

    weights: "tensorhub.Weights | None" = None  # from then on
    layout: Any = None  # what it is made of: `View.layout`

    def __init__(self, model: str, *, replica: str, reliable: bool = False, **options: Any) -> None:
        self.model, self.replica = model, replica
        self._options = {**options, "reliable": reliable}
        self._tensors: dict[str, torch.Tensor] = {}

    def __enter__(self) -> "Whole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=None if error is None else 5.0)

    @property
    def version(self) -> int | None:
        """What is held, whole and verified; None if nothing is."""
        return self.weights.version if self.weights is not None else None

    @property
    def metadata(self) -> dict[str, Any]:
        """What the publisher of the version said."""
        return dict((self.weights.metadata if self.weights is not None else None) or {})

    def join(self, *, timeout: float | None = None) -> None:
        """Become a replica, without a version as yet. Waits until there is one, for it tells what tensors there are.

        Does nothing where that is done. `update` does it by itself. Raises as `tensorhub.open` and `register` do.
        """
        if self.weights is None:
            self._join(time.monotonic() + (WAIT_S if timeout is None else timeout))

    def update(self, spec: int | str = "latest", *, timeout: float | None = None) -> int:
        """Hold that version. Waits for a first one. Raises as `tensorhub.Weights.update` does."""
        deadline = time.monotonic() + (WAIT_S if timeout is None else timeout)
        self.join(timeout=max(0.1, deadline - time.monotonic()))
        assert self.weights is not None
        return self.weights.update(spec, timeout=max(0.1, deadline - time.monotonic()))

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Each tensor, whole, in the memory that the next `update` changes."""
        if self.version is None:
            raise tensorhub.UsageError(f"{self.replica} holds no version of {self.model}", hint="update() first")
        return iter(self._tensors.items())

    def copies(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """The same, for callers that change what they are given: each is copied when it is its turn."""
        for name, tensor in self:
            yield name, tensor.clone()

    def close(self, *, timeout: float | None = None) -> None:
        """Leave. The version goes with it."""
        weights, self.weights, self._tensors = self.weights, None, {}
        if weights is not None:
            weights.close(timeout=timeout)

    def _join(self, deadline: float) -> None:
        import torch

        view = tensorhub.connect(**of_view(self._options))
        layout = layout_of_whole(view, self.model, deadline)
        first = {name: names[0] for names in layout.tied for name in names}
        tensors: dict[str, torch.Tensor] = {}
        for each in layout.shards[0]:
            tied = tensors.get(first.get(each.name, ""))
            made = tensorhub.empty(each.shape, dtype=each.dtype) if tied is None else tied
            tensors[each.name] = torch.as_tensor(made)
        weights = tensorhub.open(self.model, replica=self.replica, **self._options)
        try:
            weights.register(tensors, boxes={})
        except BaseException:
            weights.close(timeout=1.0)
            raise
        self.weights, self.layout, self._tensors = weights, layout, tensors


def layout_of_whole(view: "tensorhub.View", model: str, deadline: float, version: int | str = "latest") -> Any:
    """What that version is made of, in whole tensors. Waits until it is there."""
    while True:
        try:
            found = view.layout(model, version, timeout=max(POLL_S, deadline - time.monotonic()))
            break
        except tensorhub.VersionUnavailable:
            if time.monotonic() + POLL_S >= deadline:
                raise
            time.sleep(POLL_S)
    if not found.is_whole:
        text = f"{model}@{found.version} was published without boxes, so its tensors cannot be put together"
        raise tensorhub.UsageError(text, hint="publish with fsdp.attach(), or with register(..., boxes={})")
    return found


class StagedPublisher:
    """Publishes tensors that come one after another and do not last, as trainers give them that gather a model.

    Each is copied into host memory that stays: the trainer may change its parameters while others read. That costs the
    model's size. The tensors are those of the first `publish`; `options` are those of `tensorhub.open`.

    `dtype` is what tensors of floating-point numbers are published in. All others, such as ids, stay what they are.
    """

    def __init__(self, model: str, *, replica: str, dtype: "torch.dtype | None" = None, **options: Any) -> None:
        self._dtype = dtype
        self._view = tensorhub.connect(**of_view(options))
        self._model = model
        self._weights = tensorhub.open(model, replica=replica, **options)
        self._tensors: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # what they came in

    @property
    def version(self) -> int | None:
        """The version that is published."""
        return self._weights.version

    def next_version(self) -> int:
        """The lowest number above all that were ever taken, also before this process began."""
        return self._view.next_version(self._model)

    def publish(
        self,
        tensors: "Iterable[tuple[str, torch.Tensor]]",
        metadata: Mapping[str, object] | None = None,
        *,
        version: int | None = None,
    ) -> int:
        """Copy these tensors, and let other workers read them as `version`, or as the next one. Returns the version.

        All are taken, whatever happens, since the other ranks gather each of them together with this one. Raises what
        `tensorhub.Weights.publish` raises, and `UsageError` if the tensors are not those of the first time.
        """
        coming = iter(tensors)
        try:
            number = self.next_version() if version is None else version
            if self._tensors:
                with self._weights.mutating(version=number, metadata=metadata):
                    self._copy(coming)
            else:
                dtypes: dict[str, torch.dtype] = {}
                made: dict[str, torch.Tensor] = {}
                for name, tensor in coming:
                    made[name], dtypes[name] = self._staged(tensor), tensor.dtype
                self._weights.register(dict(sorted(made.items())), boxes={})  # the order in which others have them
                self._tensors, self._dtypes = made, dtypes
                self._weights.publish(number, metadata=metadata)
            return number
        finally:
            for _ in coming:
                pass

    def close(self) -> None:
        """Leave. The last version stays where others hold it."""
        self._weights.close()

    def _staged(self, tensor: "torch.Tensor") -> "torch.Tensor":
        import torch

        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        made: torch.Tensor = torch.as_tensor(tensorhub.empty(tuple(tensor.shape), dtype=dtype))
        return made.copy_(tensor.detach())

    def _copy(self, coming: "Iterable[tuple[str, torch.Tensor]]") -> None:
        missing = set(self._tensors)
        for name, tensor in coming:
            if name not in self._tensors or tensor.shape != self._tensors[name].shape:
                raise tensorhub.UsageError(f"the model has another tensor {name!r} than before, {tuple(tensor.shape)}")
            if tensor.dtype != self._dtypes[name]:  # copy_() would round it without a word
                raise tensorhub.UsageError(f"tensor {name!r} is {tensor.dtype} now, and was {self._dtypes[name]}")
            self._tensors[name].copy_(tensor.detach())
            missing.discard(name)
        if missing:
            raise tensorhub.UsageError(f"the model has lost tensors: {sorted(missing)[:5]}")
