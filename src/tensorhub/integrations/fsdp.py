"""The trainer's side: publishes a torch module that FSDP2 or tensor parallelism has cut, or that is whole.

    publisher = fsdp.attach(model, "policy", replica="trainer")
    for batch in batches:
        loss(model, batch).backward()
        with publisher.step() as version:
            optimizer.step()

Rules:
1. Each rank that holds a shard is one worker. Which shard it is follows from the mesh of the module's DTensors. Along a
   dimension of the mesh on which nothing is cut (HSDP), and without any DTensor (DDP), ranks hold copies, and the first
   one publishes. Ranks that were cut by anything else say `shard=`, `shards=` and `boxes=` themselves.
2. Registered are the tensors of the module where they lie, by the names of its checkpoint (`checkpoint_names`).
   DTensors say which part of what they are, all others are whole: readers that say boxes can read them, however those
   are cut. What FSDP2 gathers it also frees: gathered parameters are never registered, and `state_dict()` puts the
   shards back.
3. All ranks begin a step together and end it together. A rank that raises, or is gone, makes it a failure on all of
   them: nothing is published, the tensors stay unpublished, and the number is free again.
4. Where somebody holds a version of the model, the module is filled with the newest one: a trainer that was started
   again, also with another number of ranks, goes on where its rollouts are. Optimizers have a state of their own, which
   this does not bring back.

It must never: gather a parameter, or wait for a rank that has raised.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tensorhub

from ..steps import check_metadata, check_step, longest_s, seconds_of, state_of_module
from .checkpoint_names import Names, as_checkpoint
from .ranks import Ranks
from .whole import of_view

if TYPE_CHECKING:
    import torch

WAIT_S = 300.0  # for the slowest rank at the beginning and the end of a step; longer where a call may take longer
SLACK_S = 30.0  # from a call's deadline to its error, on hosts that are busy
HURRY_S = 5.0  # for readers, when something has gone wrong already


def attach(
    module: "torch.nn.Module",
    model: str,
    *,
    replica: str = "trainer",
    version: int = 0,
    fill: bool = True,
    dtype: "torch.dtype | str | None" = None,
    shard: int | None = None,
    shards: int | None = None,
    boxes: Mapping[str, "Sequence[tensorhub.Box]"] | None = None,
    leave_out: str | Sequence[str] = (),
    rename: "Mapping[str, str] | Callable[[str], str | None] | None" = None,
    **options: Any,
) -> "Publisher":
    """Register this rank's part of the module, and publish what it holds now, as `version` or the next free number.

    Where somebody else holds a version of the model, the module is filled with the newest of those instead, unless
    `fill=False`. `Publisher.version` says which it is. `dtype` is what is published ("bfloat16"), where the optimizer
    works on another; `boxes` are those of `register`, of plain tensors that are parts. Names are those of the model's
    checkpoint (see `checkpoint_names`). `leave_out`, as of `register`, and `rename`, a mapping or a function, go by the
    module's names, without those of wrappers; what is renamed is published as it lies in memory. `options` are those of
    `tensorhub.open`. On all ranks at once; raises as `open`, `register`, `publish` and `replicate` do, and
    `GroupIncomplete` where another rank did.
    """
    ranks = Ranks(WAIT_S + SLACK_S)
    with ExitStack() as stack:  # who leaves for an error keeps no sibling waiting
        stack.callback(ranks.leave, "this rank has left the others: attach() failed")
        with ranks.agreeing("attach() failed"):
            timeout = options.get("timeout")
            joining_s, call_s = longest_s(timeout=timeout, call_timeout=options.get("call_timeout"))
            ranks.wait_s = max(WAIT_S, 2 * joining_s, joining_s + call_s) + SLACK_S  # two questions, or join and call
            publisher, version = Publisher(module, ranks, call_s, leave_out), max(version, 0)
            publisher.names.check_merged()
            tensors, known = as_checkpoint(publisher.names, publisher.state(), rename, boxes)
            cut = [value for value in tensors.values() if _is_cut(value)]
            place = ranks.place(cut, shard, shards)
            view = tensorhub.connect(**of_view(options), timeout=timeout)
            after = view.next_version(model)  # first: a restarted server answers when it has heard what is held
            held = _held_by_others(view.versions(model), replica) if fill else -1
            after = max(after, held + 1)
            is_one_of_many = not cut and shard is None and shards is None  # and so has, as is said, the same as rank 0
            mine = _outline(tensors)
        held, after, first = ranks.told(held, after, mine)
        number = max(version, after) if held < 0 else held
        publishes, weights = place.copy == 0, None
        with ranks.agreeing("attach() failed"):  # else they would wait for a shard that never joins
            if is_one_of_many and mine != first:
                text = f"rank {ranks.rank} has other tensors than rank 0, and each would be the whole of {model}"
                raise tensorhub.UsageError(text, hint="give shards=, on all ranks: each publishes what it has")
            if publishes or held >= 0:
                name = replica if publishes else f"{replica}-copy-{place.copy}"
                options |= {} if publishes else {"reliable": False, "host_bytes": 0}
                opening = tensorhub.open(model, replica=name, shard=place.shard, shards=place.shards, **options)
                weights = stack.enter_context(opening)
                weights.register(tensors, dtype=dtype, boxes=known)
        with ranks.agreeing("attach() failed"):
            if weights is not None:
                if held >= 0:
                    weights.replicate(held)
                else:
                    weights.publish(number)
                if publishes:
                    publisher.weights = weights
                else:  # it serves nobody: nobody would ask before this rank's next step
                    weights.close()
        stack.pop_all()
    publisher.version, publisher.next_version = number, max(after, number + 1)
    return publisher


def _outline(tensors: Mapping[str, Any]) -> int:
    """Equal where names and shapes are."""
    facts = repr([(name, tuple(tensor.shape)) for name, tensor in tensors.items()])
    return int.from_bytes(blake2b(facts.encode(), digest_size=7).digest())


def _held_by_others(versions: Sequence[Any], replica: str) -> int:
    """The newest version that somebody else holds, -1 for none. A former self that was killed may still be believed.

    Who left tensors out on purpose (`partial=True`) holds a version too, which is lost where nobody has all of it.
    """
    found = (each.version for each in versions if set(each.holders) - {replica} and not each.is_lost)
    return max(found, default=-1)


class Publisher:
    """A trainer's rank. Made by `attach`; every method is called on all ranks."""

    weights: "tensorhub.Weights | None" = None  # None on ranks that hold copies
    version: int | None = None  # what the module is a version of; None while it is none
    next_version: int = 0  # what the next step publishes, unless it says another number

    def __init__(
        self, module: "torch.nn.Module", ranks: "Ranks", call_s: float, leave_out: str | Sequence[str]
    ) -> None:
        self._module, self._ranks, self._call_s, self._leave_out = module, ranks, call_s, leave_out
        self.names = Names(module)
        self._known = _facts(self.state())

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=None if error is None else HURRY_S)

    def close(self, *, timeout: float | None = None) -> None:
        """Withdraw, wait for readers, leave. Other ranks are not waited for, unless for a moment."""
        try:
            if self.weights is not None:
                self.weights.close(timeout=timeout)
        finally:
            self._ranks.leave()

    @contextmanager
    def step(
        self, version: int | None = None, *, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> Iterator[int]:
        """Withdraw the version before, let the block change the parameters, publish them under the next number.

        Or as `version`, which is the same on all ranks.

        As `tensorhub.Weights.mutating`, on all ranks or on none: where one rank raises, the others raise
        `GroupIncomplete`. Where the number cannot be claimed, no block runs, and the version before is still published.
        `timeout` is for each of its calls, and the same on all ranks: they wait for each other a little longer.
        """
        version = self.next_version if version is None else version
        not_begun = f"step({version}) could not begin"
        with ExitStack() as stack:
            with self._ranks.agreeing(not_begun):  # first what a rank says alone: the others would wait in the claim
                self._check_same()  # and so no rank is left with gathered parameters if it raises in the block
                check_step(self.weights, version, metadata, timeout)
                call_s = self._call_s if timeout is None else seconds_of(timeout)
                self._ranks.wait_s = max(WAIT_S, call_s) + SLACK_S
            with self._ranks.agreeing(not_begun):
                if self.weights is not None:
                    stack.enter_context(self.weights.mutating(version=version, metadata=metadata, timeout=timeout))
            self.version = None
            with self._ranks.agreeing(f"step({version}) failed, and nothing was published"):
                yield version
                self._check_same()
                self.names.check_merged()
                check_metadata(metadata)
            with self._ranks.agreeing(f"step({version}) was not published by all ranks"):  # who holds a copy asks too
                stack.close()
        self.version, self.next_version = version, version + 1

    def state(self) -> dict[str, Any]:
        """This rank's parameters and persistent buffers that are published, by name, without those of wrappers.

        Raises `UsageError` naming other state that is not left out: a version would be less than the module.
        """
        return state_of_module(self._module, self._leave_out, self.names)

    def _check_same(self) -> None:
        now = _facts(self.state())
        wrong = sorted(name for name in self._known.keys() | now.keys() if self._known.get(name) != now.get(name))
        if wrong:
            text = f"{len(wrong)} tensors of the module are no longer those that were registered"
            hint = "change them in place, or close() and attach(..., fill=False), which keeps what is there"
            raise tensorhub.UsageError(f"{text}: {', '.join(wrong[:5])}", hint=hint)


def _facts(tensors: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    import torch

    with torch.no_grad():
        found = [(name, value.to_local() if _is_cut(value) else value) for name, value in tensors.items()]
    return {
        name: (each.data_ptr() if each.numel() else 0, each.dtype, each.shape, each.stride()) for name, each in found
    }


def _is_cut(value: "torch.Tensor") -> bool:
    return hasattr(value, "device_mesh")
