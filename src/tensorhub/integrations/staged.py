"""Publishes tensors that come one after another and do not last, as trainers give them that gather a model to send it.

Each is copied into host memory that stays, and a version is published from there. So the trainer may change its
parameters while others read, and takes readers away only to copy the next version in. That costs the model's size in
host memory. It must never: publish a model half of which is of another version.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import tensorhub

from .newest import of_view


class StagedPublisher:
    """A replica of one shard, whose tensors are those of its first `publish`. `options`: those of `tensorhub.open`.

    `dtype` is what tensors of floating-point numbers are published in. All others, such as ids, stay what they are.
    """

    def __init__(self, model: str, *, replica: str, dtype: torch.dtype | None = None, **options: Any) -> None:
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
        tensors: Iterable[tuple[str, torch.Tensor]],
        metadata: Mapping[str, object] | None = None,
        *,
        version: int | None = None,
    ) -> int:
        """Copy these tensors, and let everybody read them as `version`, or as the next one. Returns the version.

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

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        made: torch.Tensor = torch.as_tensor(tensorhub.empty(tuple(tensor.shape), dtype=dtype))
        return made.copy_(tensor.detach())

    def _copy(self, coming: Iterable[tuple[str, torch.Tensor]]) -> None:
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
