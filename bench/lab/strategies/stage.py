"""The global stage: a collective over torch.distributed. All stop, all exchange, all go on.

Two ways to exchange, on the same processes: `broadcast` as gloo has it, a tree of whole tensors; and a pipelined ring
of chunks from rank to rank, as NCCL does it, in which each link carries each byte once. A collective knows its members:
who dies takes it down, and nobody can join.
"""

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..content import Tensors
from ..job import Job
from .base import Committed, NotNow

PATIENCE = timedelta(seconds=120)
AHEAD = 4  # chunks under way at a time, in each direction


def _join(job: Job) -> Store:
    host, _, port = job.trainer.rpartition(":")
    is_first = job.rank == 0
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), job.world, is_master=is_first, timeout=PATIENCE, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=PATIENCE)
    return store


class _Member:
    """What trainer and rollouts share."""

    def __init__(self, job: Job, tensors: Tensors) -> None:
        self._job = job
        self._tensors = [torch.from_numpy(tensor) for tensor in tensors.values()]
        self._is_ring = job.strategy == "ring"
        self.store = _join(job)

    def exchange(self) -> None:
        """Everybody calls it at once; rank 0 has the content."""
        if self._is_ring:
            self._pass_on()
            return
        for tensor in self._tensors:
            dist.broadcast(tensor, 0)

    def _pass_on(self) -> None:
        rank, last, size = self._job.rank, self._job.world - 1, self._job.chunk_bytes
        chunks = [part for tensor in self._tensors for part in torch.split(tensor, size)]
        sending: deque[dist.Work | None] = deque()
        coming = deque(dist.irecv(part, rank - 1) for part in chunks[:AHEAD]) if rank else deque()
        for index, part in enumerate(chunks):
            if rank:
                _wait(coming.popleft())
                if index + AHEAD < len(chunks):
                    coming.append(dist.irecv(chunks[index + AHEAD], rank - 1))
            if rank < last:
                sending.append(dist.isend(part, rank + 1))
                if len(sending) > AHEAD:
                    _wait(sending.popleft())
        for work in sending:
            _wait(work)

    def statistics(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        dist.destroy_process_group()


def _wait(work: "dist.Work | None") -> None:
    assert work is not None, "a rank outside the group"
    work.wait()


class StageTrainer(_Member):
    """Rank 0."""

    def commit(self, version: int, change: Callable[[], None]) -> Committed:
        change()
        began = time.monotonic()
        self.store.set(f"stage-{version}", "called")
        dist.barrier()  # until the last rollout has stopped
        self.exchange()
        return Committed(0.0, time.monotonic() - began)


class StageRollout:
    """Every other rank."""

    def __init__(self, job: Job, tensors: Tensors) -> None:
        self._member: _Member | None = None
        self._job, self._tensors = job, tensors
        self._version = -1

    @property
    def member(self) -> _Member:
        """Opened when it joins, which is part of joining."""
        if self._member is None:
            self._member = _Member(self._job, self._tensors)
        return self._member

    def join(self) -> int:
        self.member.store.wait(["stage-0"])
        return self.sync()

    def sync(self) -> int:
        member = self.member
        try:
            if member.store.check([f"stage-{self._version + 1}"]):
                dist.barrier()
                member.exchange()
                self._version += 1
        except RuntimeError as error:
            raise NotNow(f"the collective is broken: {error}") from error
        return self._version

    def bytes_by_source(self) -> dict[str, int]:
        return {}

    def statistics(self) -> dict[str, int]:
        return self.member.statistics()

    def close(self) -> None:
        self.member.close()
