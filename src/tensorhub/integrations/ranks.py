"""What the ranks of one job agree on: a value that rank 0 says, whether something went well on all of them; and what
each of them is of a replica.

On a gloo group of its own, so that a vote never meets a collective of the job. It must never wait for a rank that has
failed, or is gone; nor give up one that is only in a call that may still end well.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import tensorhub

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


FAILED, WELL, LEFT = 0, 1, -1  # what a rank votes; the lowest counts
LEAVE_S = 2.0  # for the others, when a rank leaves: they mostly leave too
CLOSED = "this rank has left the others: its publisher was closed"

_left: "list[tuple[ProcessGroup, list[Any]]]" = []  # groups that were left, and votes there that others still wait for


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
        self._last: Any = None  # a vote that nobody may wait for, and its tensor
        self._gone = ""  # once a rank was, no vote can be held any more
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))

    def told(self, *values: int) -> list[int]:
        """What rank 0 says."""
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
        """Whether it went well everywhere. Who has failed says so, and does not wait."""
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
        """Let go of the group, in which no vote can be held any more. Whoever votes hears that this rank has left.

        It is taken down when all have heard the votes of this rank. That is not waited for long: the next who makes or
        leaves a group does the rest.
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
        if mesh.size() != self.count:  # such as mesh["tp"]: what ranks outside of it hold, copies or parts, nobody says
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
    """Those among which this DTensor is cut, in the line of this rank."""
    pairs = zip(cut.device_mesh.get_coordinate(), cut.placements, strict=True)
    line = tuple(at if placement.is_replicate() else slice(None) for at, placement in pairs)
    return set(cut.device_mesh.mesh[line].flatten().tolist())


def _let_go() -> None:
    """Take down those groups in which nobody waits for a vote of this rank. One that is in use would make it wait."""
    import torch.distributed as dist

    for each in list(_left):
        group, votes = each
        if all(voting.is_completed() for voting, _ in votes):
            _left.remove(each)
            with suppress(ValueError):  # destroy_process_group() has taken down all of them
                dist.destroy_process_group(group)
