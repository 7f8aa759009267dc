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
4. Where another replica holds a version of the model, the module is filled with the newest one: a trainer that starts
   again, also with another number of ranks, goes on where its rollouts are. The state of optimizers is not part of it.

It must never: gather a parameter, or wait for a rank that has raised.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import tensorhub

from ..steps import check_metadata, check_step, longest_s, seconds_of, state_of_module
from .checkpoint_names import Names, as_checkpoint
from .whole import of_view

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

WAIT_S = 300.0  # for the slowest rank at the beginning and the end of a step; longer where a call may take longer
SLACK_S = 30.0  # from a call's deadline to its error, on hosts that are busy
HURRY_S = 5.0  # for readers, when something has gone wrong already

FAILED, WELL, LEFT = 0, 1, -1  # what a rank votes; the lowest counts
LEAVE_S = 2.0  # for the others, when a rank leaves: they mostly leave too
CLOSED = "this rank has left the others: its publisher was closed"

_left: "list[tuple[ProcessGroup, list[Any]]]" = []  # groups that were left, and votes there that others still wait for


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
    """Register this rank's part of the module and publish its weights, as `version` or as the next free number.

    Where another replica holds a version of the model, the module is filled with the newest of those instead, unless
    `fill=False`. `Publisher.version` says which it is. `dtype` is what is published ("bfloat16"), where the optimizer
    works on another; `boxes` are those of `register`, of plain tensors that are parts. Names are those of the model's
    checkpoint (see `checkpoint_names`). `leave_out`, as of `register`, and `rename`, a mapping or a function, go by the
    module's names, without those of wrappers; what is renamed is published as it lies in memory. `options` are those of
    `tensorhub.open`. On all ranks at once; raises as `open`, `register`, `publish` and `replicate` do, and
    `GroupIncomplete` where another rank did.
    """
    ranks = Ranks(WAIT_S + SLACK_S)
    with ExitStack() as stack:  # a rank that leaves for an error keeps no sibling waiting
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
                else:  # no reader would ask it before this rank's next step
                    weights.close()
        stack.pop_all()
    publisher.version, publisher.next_version = number, max(after, number + 1)
    return publisher


def _outline(tensors: Mapping[str, Any]) -> int:
    """Equal where names and shapes are."""
    facts = repr([(name, tuple(tensor.shape)) for name, tensor in tensors.items()])
    return int.from_bytes(blake2b(facts.encode(), digest_size=7).digest())


def _held_by_others(versions: Sequence[Any], replica: str) -> int:
    """The newest version that another replica holds, -1 for none. A former self that was killed may still be believed.

    A partial replica (`partial=True`) holds a version too. The version is lost if no replica has all of it.
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
            with self._ranks.agreeing(f"step({version}) was not published by all ranks"):  # ranks with copies ask too
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


# What the ranks of one job agree on, on a gloo group of its own: a vote never meets a collective of the job. It never
# waits for a rank that has failed or is gone, and never gives up a rank that is in a call that may still end well.


class Place(NamedTuple):
    """What a rank is of a replica."""

    shard: int
    shards: int
    copy: int  # which rank with the same shard; 0: it publishes


class Ranks:
    """All ranks of `torch.distributed`, or this process alone where that was not begun. Made on all of them at once.

    `wait_s` is how long a vote waits for the slowest rank. A vote that is not held by then is the last one.
    """

    def __init__(self, wait_s: float) -> None:
        import torch.distributed as dist

        _let_go()
        self.wait_s = wait_s
        self.rank, self.count = 0, 1
        self._group: ProcessGroup | None = None
        self._last: Any = None  # a vote for which no rank may wait, and its tensor
        self._gone = ""  # once a rank was, no vote can be held any more
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))

    def told(self, *values: int) -> list[int]:
        """Returns the value of rank 0, on all ranks."""
        import torch
        import torch.distributed as dist

        said = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            dist.broadcast(said, 0, group=self._group)
        return [int(value) for value in said]

    @contextmanager
    def agreeing(self, what: str) -> Iterator[None]:
        """The block goes well on all ranks, or raises on all of them."""
        try:
            yield
        except BaseException:
            self._vote(well=False)
            raise
        if not self._vote(well=True):
            raise tensorhub.GroupIncomplete(f"{what}: another rank raised", hint="see what it said, then retry on all")

    def _vote(self, *, well: bool) -> bool:
        """Whether it went well everywhere. A rank that has failed says so, and does not wait."""
        import torch

        if self._group is None:
            if self._gone and well:
                raise tensorhub.GroupIncomplete(self._gone, hint="restart the job")
            return well
        votes, began = torch.tensor([WELL if well else FAILED]), time.monotonic()
        try:
            voting = self._cast(self._group, votes, self.wait_s)
            if well:
                voting.wait()
        except RuntimeError as error:
            is_late = time.monotonic() - began >= self.wait_s
            late = f"timed out: another rank did not come to an end within {self.wait_s:g} s"
            self._gone = late if is_late else f"another rank is gone, or has waited too long for this one: {error}"
            self._hang_up()
            if well:
                raise tensorhub.GroupIncomplete(self._gone, hint="restart the job") from error
        if well and votes.item() == LEFT:
            self.leave("another rank has left: it has closed its publisher")
            raise tensorhub.GroupIncomplete(
                self._gone, hint="attach() again on all ranks (fill=False keeps what is there), or restart the job"
            )
        return well and votes.item() == WELL

    def _cast(self, group: "ProcessGroup", votes: "torch.Tensor", wait_s: float) -> Any:
        """Each vote has its own time, for calls have theirs."""
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MIN), timedelta(seconds=wait_s)
        voting = group.allreduce([votes], options)
        self._last = (voting, votes)
        return voting

    def leave(self, why: str = CLOSED) -> None:
        """Let go of the group, in which no vote can be held any more. A rank that votes hears that this one has left.

        The group is taken down when all have heard the votes of this rank. That is not waited for long: the next call
        that makes or leaves a group does the rest.
        """
        import torch

        group, self._group = self._group, None
        if group is not None:
            self._gone = why
            votes = [] if self._last is None else [self._last]
            is_heard = all(voting.is_completed() for voting, _ in votes)
            with suppress(RuntimeError):  # the others have left, or are gone
                wait_s = LEAVE_S if is_heard else self.wait_s  # a vote that ends in vain closes the lines of the others
                leaving = self._cast(group, torch.tensor([LEFT]), wait_s)
                votes.append(self._last)
                leaving.wait(timedelta(seconds=2 * LEAVE_S))
            _left.append((group, votes))
            self._last = None
        _let_go()

    def _hang_up(self) -> None:
        """Close the lines of the group: a rank that waits for this one then hears that it waits in vain."""
        import torch.distributed as dist

        group, self._group, self._last = self._group, None, None
        if group is not None:
            dist.destroy_process_group(group)

    def place(self, cut: Sequence[Any], shard: int | None, shards: int | None) -> Place:
        """Of this rank. `cut`: its DTensors, from whose mesh it follows where neither `shard` nor `shards` is given."""
        if shard is not None or shards is not None:
            return Place(self.rank if shard is None else shard, self.count if shards is None else shards, 0)
        if not cut:
            return Place(0, 1, self.rank)
        mesh = max((value.device_mesh for value in cut), key=lambda each: each.ndim)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            self._refuse(f"rank {self.rank} is not in the mesh of the module")
        if mesh.size() != self.count:  # such as mesh["tp"]: ranks outside of it may hold copies or parts
            self._refuse(f"the module's DTensors are on a mesh of {mesh.size()} ranks, and the job has {self.count}")
        here, count, copy = 0, 1, 0
        alike: list[Any] = []  # where in the mesh are those that hold the same
        for along, (at, size) in enumerate(zip(coordinate, mesh.shape, strict=True)):
            if any(not each.placements[along].is_replicate() for each in cut if each.device_mesh == mesh):
                here, count = here * size + at, count * size
                alike.append(at)
            else:
                copy = copy * size + at
                alike.append(slice(None))
        copies = set(mesh.mesh[tuple(alike)].flatten().tolist()) - {self.rank}
        for each in cut:
            if each.device_mesh != mesh and copies & _ranks_along(each):
                self._refuse(f"ranks that hold copies on a mesh of {mesh.ndim} dimensions hold parts on another one")
        return Place(here, count, copy)

    def _refuse(self, text: str) -> NoReturn:
        hint = f"give shards={self.count}: each rank publishes what it has; see shard= too"
        raise tensorhub.UsageError(text, hint=hint)


def _ranks_along(cut: Any) -> set[int]:
    """The ranks that hold the shards of this rank's copy of the DTensor."""
    pairs = zip(cut.device_mesh.get_coordinate(), cut.placements, strict=True)
    line = tuple(at if placement.is_replicate() else slice(None) for at, placement in pairs)
    return set(cut.device_mesh.mesh[line].flatten().tolist())


def _let_go() -> None:
    """Take down those groups in which no rank waits for a vote of this one. One that is in use would make it wait."""
    import torch.distributed as dist

    for each in list(_left):
        group, votes = each
        if all(voting.is_completed() for voting, _ in votes):
            _left.remove(each)
            with suppress(ValueError):  # destroy_process_group() has taken down all of them
                dist.destroy_process_group(group)
