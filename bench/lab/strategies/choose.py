"""Which strategies there are, and how to make each one's sides. Imports torch only for those that need it."""

from typing import NamedTuple

from ..content import Tensors
from ..job import Job
from .base import RolloutSide, TrainerSide


class Strategy(NamedTuple):
    """What it is called, how rollouts of TensorHub prefetch, and what it cannot do."""

    title: str
    prefetch: str = ""
    only_near: str = ""
    needs_torch: bool = False
    is_fixed: bool = False  # who is in at the start is in until the end
    has_store: bool = False
    is_ours: bool = False
    server: tuple[str, ...] = ()  # settings of its reference server, as variables
    workers: tuple[str, ...] = ()  # the same of the workers
    host_bytes: int | None = None  # of each rollout, for host copies
    is_recut: bool = False  # rollouts have all tensors fused into one, and say so with boxes


STRATEGIES: dict[str, Strategy] = {
    "hub-ready": Strategy("TensorHub, prefetched by each, taken when it is there", "always", "self", is_ours=True),
    "hub-near": Strategy("TensorHub, prefetched by a seed, taken when the site has it", "seed", "site", is_ours=True),
    "hub-always": Strategy('TensorHub, prefetch="always"', "always", is_ours=True),
    "hub-python": Strategy(
        'TensorHub, prefetch="always", bytes moved by Python', "always", is_ours=True, workers=("TENSORHUB_NATIVE=no",)
    ),
    "hub-seed": Strategy('TensorHub, prefetch="seed"', "seed", is_ours=True),
    "hub": Strategy('TensorHub, prefetch="never"', "never", is_ours=True),
    "hub-recut": Strategy(
        "TensorHub, rollouts of another layout than the trainer", "never", is_ours=True, is_recut=True
    ),
    "hub-free": Strategy(
        "TensorHub, that keeps nothing established", "never", is_ours=True, server=("TENSORHUB_KEEP_ESTABLISHED=no",)
    ),
    "hub-roomless": Strategy("TensorHub, rollouts without room for host copies", "never", is_ours=True, host_bytes=1),
    "ring": Strategy("global stage, pipelined ring", needs_torch=True, is_fixed=True),
    "broadcast": Strategy("global stage, gloo broadcast", needs_torch=True, is_fixed=True),
    "star": Strategy("star, point to point"),
    "store": Strategy("object store", has_store=True),
}


def trainer_side(job: Job, tensors: Tensors) -> TrainerSide:
    """The trainer's part of the job's strategy."""
    if STRATEGIES[job.strategy].needs_torch:
        from .stage import StageTrainer

        return StageTrainer(job, tensors)
    if STRATEGIES[job.strategy].is_ours:
        from .hub import HubTrainer

        return HubTrainer(job, tensors)
    from .star import StarTrainer

    return StarTrainer(job, tensors)


def rollout_side(job: Job, tensors: Tensors) -> RolloutSide:
    """A rollout's part of the job's strategy."""
    if STRATEGIES[job.strategy].needs_torch:
        from .stage import StageRollout

        return StageRollout(job, tensors)
    if STRATEGIES[job.strategy].is_ours:
        from .hub import HubRollout

        return HubRollout(job, tensors)
    from .star import StarRollout

    return StarRollout(job, tensors)
