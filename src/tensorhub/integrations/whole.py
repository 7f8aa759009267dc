"""A model in one process, in whole tensors, however its publisher has cut it."""

import logging
import time
from collections.abc import Iterator, Mapping
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tensorhub

if TYPE_CHECKING:
    import torch


SILENT_S = 5.0  # that it waits is said then

_log = logging.getLogger("vllm.tensorhub.newest")  # below vLLM's own, which writes it


def of_view(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options of `open` that `connect` takes too."""
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
        time.sleep(0.2)


WAIT_S = 300.0
POLL_S = 0.2  # for a first version of the model, whose tensors nobody can know before


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
        """The same, for who may change what it is given: each is copied when it is its turn."""
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
        text = f"{model}@{found.version} was published without boxes: nobody knows what its tensors are parts of"
        raise tensorhub.UsageError(text, hint="publish with fsdp.attach(), or with register(..., boxes={})")
    return found
