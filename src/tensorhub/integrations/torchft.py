"""torchft heals its replicas over TensorHub: a replica that is behind reads the whole state from those that are not.

    manager = torchft.Manager(..., checkpoint_transport=TensorHubTransport(server="head:7450"))

1. The source publishes its state where it lies: nothing is copied (unless `copies=True`), and nothing is pickled.
2. What several replicas read at a time leaves the source once: they read from each other, verified.
3. Each transport is a model of its own, since two sources may hold different states for one step (random numbers, data
   loaders). Its versions are steps and, for a step that is sent again after a failed commit, tries of that step.

It must never: let a state be changed while somebody reads it. `disallow_checkpoint`, which torchft calls before it
applies a step, returns when nobody does. What changes before that (the running mean of a BatchNorm) makes a reader's
call fail, and never its state wrong. Such models need `copies=True`.
"""

import contextlib
import secrets
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torchft.checkpointing.transport import CheckpointTransport

import tensorhub

from .state_dicts import pack, unpack

TREE = "tree"  # the name of the tensor that says where the others belong
TRIES = 1 << 20  # of one step
LOADS = (
    "server",
    "site",
    "token",
    "insecure",
    "host",
    "verify",
    "transports",
)  # of what `open` takes, what `load` takes too


class TensorHubTransport(CheckpointTransport[Any]):
    """A `CheckpointTransport` of torchft. `where` is what `tensorhub.open` takes: server, token, host, call_timeout, …

    `disallow_checkpoint`, which has no timeout, waits for readers and the server as long as `call_timeout` says.

    Raises `ServerUnreachable` without a reference server, and from its methods what `tensorhub.Weights` raises;
    `TimeoutError` for what was not there in time.
    """

    def __init__(self, model: str = "torchft", *, copies: bool = False, **where: Any) -> None:
        self._model = f"{model}-{secrets.token_hex(8)}"
        self._copies = copies
        self._where = where
        self._from_where = {name: value for name, value in where.items() if name in LOADS}
        self._weights = tensorhub.open(self._model, replica="source", reliable=False, **where)  # nothing is kept
        self._sent = -1
        self._is_out = False  # somebody may read the state

    def metadata(self) -> str:
        """By what the others find this source: the name of its model."""
        return self._model

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Publish the state until `disallow_checkpoint`, for whoever asks."""
        deadline = time.monotonic() + timeout.total_seconds()
        self._withdraw(timeout.total_seconds())
        tensors, tree = pack(state_dict)
        if self._copies:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors[TREE] = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
        self._weights.register(tensors)
        self._sent = max(step * TRIES, self._sent + 1)  # a call that fails late may have published it
        self._is_out = True
        self._weights.publish(self._sent, metadata={"step": step}, timeout=_left(deadline))

    def disallow_checkpoint(self) -> None:
        """The state may be changed when this returns. Readers that are not done by then are cut off.

        torchft calls it in each step. Where nothing is out, the reference server is not asked, and may be gone.
        """
        self._withdraw(None)

    def _withdraw(self, timeout: float | None) -> None:
        if self._is_out:
            self._weights.unpublish(timeout=timeout)
            self._is_out = False

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """The state of that step, in memory of its own, from its source and from those who read it at the same time."""
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            return self._receive(metadata, step, deadline)
        except tensorhub.Unavailable as error:
            if time.monotonic() < deadline and not isinstance(error, tensorhub.DeadlineExceeded):
                raise
            raise TimeoutError(f"timed out: step {step} of {metadata} was not there in {timeout}") from error

    def _receive(self, model: str, step: int, deadline: float) -> Any:
        left = partial(_left, deadline)
        me = f"healing-{secrets.token_hex(4)}"
        with tensorhub.open(model, replica=me, reliable=False, **{**self._where, "timeout": left()}) as waiting:
            version = waiting.wait_for(step * TRIES, timeout=left())
            if version // TRIES != step:
                raise tensorhub.UsageError(f"step {step} was asked for, but {model} is at step {version // TRIES}")
            found = tensorhub.load(f"{model}@{version}", timeout=left(), **self._from_where)
        tensors = {name: torch.as_tensor(tensor) for name, tensor in found.items()}
        return unpack(tensors, tensors.pop(TREE).numpy().tobytes())

    def shutdown(self, wait: bool = True) -> None:
        """Leave; with `wait=False` readers are cut off soon."""
        with contextlib.suppress(tensorhub.DeadlineExceeded):
            self._weights.close(timeout=None if wait else 1.0)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
