"""All shards of a model in one process, put together: for a reader that wants whole tensors of a cut model.

    with Whole("policy", replica="rollout-0") as policy:
        policy.update("latest")
        model.load_state_dict(dict(policy))

Rules:
1. A worker for each shard, over memory of its own, which it keeps: so this replica serves what it has to others.
2. How shards are put together is what the publisher said (`fsdp.CUT`). A model of one shard needs no word.

It must never: put together shards of different versions. They are a replica, and a replica has one version.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tensorhub

if TYPE_CHECKING:
    import torch

CUT = "tensorhub.cut"  # metadata: for each tensor, by name, along which dimension shards cut it; r: not, ?: otherwise
WAIT_S = 300.0
POLL_S = 0.2  # for a first version of the model, whose shards nobody can know before


class Whole:
    """One replica of a model, whole. Nothing is asked or allocated before the first `update`."""

    def __init__(self, model: str, *, replica: str, reliable: bool = False, **options: Any) -> None:
        self.model, self.replica = model, replica
        self._options = {**options, "reliable": reliable}
        self._where = {key: options[key] for key in ("server", "token") if key in options}
        self._shards: list[dict[str, Any]] = []
        self._workers: list[tensorhub.Weights] = []
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Whole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=None if error is None else 5.0)

    @property
    def version(self) -> int | None:
        """What is held, whole and verified; None if nothing is."""
        held = {worker.version for worker in self._workers}
        return held.pop() if len(held) == 1 else None

    @property
    def metadata(self) -> dict[str, Any]:
        """What the publisher of the version said."""
        return dict((self._workers[0].metadata if self._workers else None) or {})

    def update(self, spec: int | str = "latest", *, timeout: float | None = None) -> int:
        """Fill all shards with the version. Waits for a first one. Raises as `tensorhub.Weights.update` does."""
        deadline = time.monotonic() + (WAIT_S if timeout is None else timeout)
        if not self._workers:
            self._join(deadline)
        left_s = max(0.1, deadline - time.monotonic())
        return int(self._all(lambda worker: worker.update(spec, timeout=left_s))[0])

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Each tensor, whole. What was cut is put together as it is asked for, one at a time."""
        import torch

        if self.version is None:
            raise tensorhub.UsageError(f"{self.replica} holds no version of {self.model}", hint="update() first")
        names = list(self._shards[0])
        cut = self.metadata.get(CUT, ("r" if len(self._shards) == 1 else "?") * len(names))
        if len(cut) != len(names):
            raise tensorhub.UsageError(f"{CUT} tells of {len(cut)} tensors, and {self.model} has {len(names)}")
        for name, how in zip(names, cut, strict=True):
            if how == "?":
                text = f"nobody has said how the {len(self._shards)} shards of {name!r} are put together"
                raise tensorhub.UsageError(text, hint="publish with integrations.fsdp, cut along one dimension")
            parts = [shard[name] for shard in self._shards]
            yield name, parts[0] if how == "r" else torch.cat(parts, dim=int(how))

    def close(self, *, timeout: float | None = None) -> None:
        """Leave. The version goes with it."""
        if self._pool is not None:
            self._all(lambda worker: worker.close(timeout=timeout))
            self._pool.shutdown()
        self._workers, self._shards, self._pool = [], [], None

    def _join(self, deadline: float) -> None:
        while not self._shards:
            try:
                self._shards = tensorhub.allocate_shards(f"{self.model}@latest", **self._where)
            except tensorhub.VersionUnavailable:
                if time.monotonic() + POLL_S >= deadline:
                    raise
                time.sleep(POLL_S)
        count = len(self._shards)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"whole-{self.model}")

        def opened(shard: int) -> "tensorhub.Weights":
            worker = tensorhub.open(self.model, replica=self.replica, shard=shard, shards=count, **self._options)
            worker.register(self._shards[shard])
            return worker

        calls = [self._pool.submit(opened, shard) for shard in range(count)]
        errors = [error for each in calls if (error := each.exception()) is not None]
        self._workers = [each.result() for each in calls if each.exception() is None]
        if errors:
            self.close(timeout=1.0)
            raise errors[0]

    def _all(self, call: "Any") -> list[Any]:
        """On all shards at once, since each waits for the others. All of them end; the first error is raised."""
        assert self._pool is not None
        calls = [self._pool.submit(call, worker) for worker in self._workers]
        errors = [error for each in calls if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        return [each.result() for each in calls]
