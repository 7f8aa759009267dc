"""SGLang takes its weights from TensorHub: a custom weight loader, which runs in each of its ranks.

    engine = sglang.Engine(..., custom_weight_loader=[LOADER])    # or --custom-weight-loader
    engine.update_weights_from_tensor(wanted("policy", 7, replica="rollout-0"), load_format=LOADER)

What SGLang carries to its ranks is a tensor of some bytes that says which version is wanted, and from which server.
Each rank is a replica of its own that holds the whole model on the host, by the trainer's names, and serves it to
others; the model's own `load_weights` fuses and cuts for the rank. It is given a copy of each tensor, one after the
other, for it may change what it is given. It must never: load what is not yet whole, or change what others read.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch

import tensorhub

from .whole import Whole

LOADER = "tensorhub.integrations.sglang.load"
WANTED = "tensorhub"  # the name of the tensor
LEAVE_S = 5.0

_readers: dict[tuple[str, str], tuple[Any, Whole]] = {}  # of this process, by model and replica; and their options


def wanted(
    model: str, version: int, *, replica: str, timeout: float | None = None, **options: Any
) -> list[tuple[str, torch.Tensor]]:
    """What to give to `update_weights_from_tensor`. `options` are those of `tensorhub.open`, plain values."""
    said = {"model": model, "version": version, "replica": replica, "timeout": timeout, "options": options}
    return [(WANTED, torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8))]


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fetch the version, then load it. SGLang calls it in each rank.

    An error of the fetch leaves the model as it was. One of the model's `load_weights` leaves a mixture: load again.
    """
    given = dict(named_tensors)
    if set(given) != {WANTED}:
        raise tensorhub.UsageError(f"{LOADER} was given {sorted(given)[:5]}", hint="give it what wanted() returns")
    said = json.loads(given[WANTED].cpu().numpy().tobytes())
    replica = f"{said['replica']}.{_rank()}"
    reader = _reader(said["model"], replica, said["options"])
    try:
        held = reader.update(said["version"], timeout=said["timeout"])
    except tensorhub.LayoutMismatch:  # another model has its name by now: what was laid out is of no more use
        reader.close(timeout=LEAVE_S)
        held = reader.update(said["version"], timeout=said["timeout"])
    if held != said["version"]:
        raise tensorhub.UsageError(f"{replica} holds version {held} already, and {said['version']} was wanted")
    model.load_weights(reader.copies())


def _reader(model: str, replica: str, options: dict[str, Any]) -> Whole:
    """One for each: with other options, such as another token, it joins anew."""
    key = model, replica
    if key in _readers and _readers[key][0] != options:
        _readers.pop(key)[1].close(timeout=LEAVE_S)
    if key not in _readers:
        _readers[key] = options, Whole(model, replica=replica, **options)
    return _readers[key][1]


def _rank() -> int:
    is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_one_of_many else 0
