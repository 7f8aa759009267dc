"""All shards of a replica in one process: `open_group`, and one object for what each shard would call.

For an engine that has several shards in one process, and for whoever wants a full model of N shards without boxes. Each
shard is a worker of its own, as if it lived in a process of its own; their calls run at the same time, which is what a
group's calls need.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import aio
from .core.boxes import Box
from .core.errors import UsageError
from .core.messages import Spec
from .core.metadata import Json
from .memory.registration import register as register_tensors
from .runtime.config import MOST_SHARDS, check_integer, options_without_token, parse_seconds
from .runtime.loops import loop_thread
from .several import Several, all_or_none, leave

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights


def open_group(
    model: str,
    *,
    replica: str,
    shards: int,
    server: str | None = None,
    reliable: bool = True,
    site: str | None = None,
    token: str | None = None,
    insecure: bool | None = None,
    host: str | None = None,
    verify: str | None = None,
    chunk_bytes: int | str | None = None,
    transports: str | Sequence[str] | None = None,
    prefetch: str | None = None,
    retain: int | None = None,
    host_bytes: int | str | None = None,
    timeout: float | None = None,
    call_timeout: float | None = None,
) -> "Group":
    """Join `model` as all shards of one replica; the arguments and errors are those of `tensorhub.open`.

    `host_bytes` is for each shard. Where one of them cannot join none does.
    """
    shards = check_integer(shards, "shards", least=1, most=MOST_SHARDS)
    began = time.monotonic()
    options = options_without_token(connect_s=None if timeout is None else parse_seconds(timeout, "timeout"))

    async def join() -> list[aio.Weights]:
        opening = [
            aio.open(
                model,
                replica=replica,
                shard=shard,
                shards=shards,
                server=server,
                reliable=reliable,
                site=site,
                token=token,
                insecure=insecure,
                host=host,
                verify=verify,
                chunk_bytes=chunk_bytes,
                transports=transports,
                prefetch=prefetch,
                retain=retain,
                host_bytes=host_bytes,
                timeout=timeout,
                call_timeout=call_timeout,
            )
            for shard in range(shards)
        ]
        return await all_or_none(opening)

    what = f"open_group of {model}/{replica}"
    return Group(loop_thread().wait(join(), deadline=began + options.connect_s, what=what, undo=leave))


class Group(Several):
    """All shards of one replica, in order, in this process. Made by `open_group`.

    A call is made for all shards at once, and returns when all have ended; of their errors it raises the cause. What a
    call does, and what it raises, `tensorhub.Weights` says.
    """

    def __init__(self, members: list[aio.Weights]) -> None:
        me = members[0]._client.me
        super().__init__(members, f"{me.model}/{me.replica}[0..{len(members) - 1}]")

    def __repr__(self) -> str:
        return f"<Group {self._name}>"

    def __enter__(self) -> "Group":
        return self

    # --- calls --------------------------------------------------------------------------------------------------------

    def register(
        self,
        tensors: "Sequence[type_of_weights]",
        *,
        dtype: "type_of_dtype | Mapping[str, type_of_dtype] | None" = None,
        boxes: "Sequence[Mapping[str, Sequence[Box]] | None] | None" = None,
        partial: bool = False,
    ) -> None:
        """Take these tensors in place: for each shard, in order, a module or a mapping; likewise `boxes`.

        Tensors that cannot be taken are refused before any shard has let go of what it had.
        """
        count = len(self._members)
        every, cut = _listed(tensors), [None] * count if boxes is None else _listed(boxes)
        for what, given in (("tensors", every), ("boxes", cut)):
            if given is None or len(given) != count:
                is_what = "" if given is None else f", not {len(given)}"
                text = f"{what} of {self._name} are for {count} shards, in order{is_what}"
                raise UsageError(text, hint="a sequence with one module or mapping for each shard")
        self._members[0]._check_process()
        taken = [
            register_tensors(each, dtype, box, partial=partial)
            for each, box in zip(every or (), cut or (), strict=True)
        ]
        members = self._members
        self._wait([m._here(m._client.may_register(m._deadline(None))) for m in members], None, "register()")
        works = [member.take(one, of=each) for member, one, each in zip(self._members, taken, every or (), strict=True)]
        self._wait(works, None, "register()")

    def replicate(self, spec: Spec = "latest", *, wait: bool = False, timeout: float | None = None) -> int:
        """As `Weights.replicate`, of all shards."""
        return self._all(lambda m: m.replicate(spec, wait=wait, timeout=timeout), timeout, f"replicate({spec!r})")[0]

    def update(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """As `Weights.update`, of all shards."""
        return self._all(lambda m: m.update(spec, timeout=timeout), timeout, f"update({spec!r})")[0]

    def wait_held(self, version: int, fraction: float = 1.0, *, timeout: float | None = None) -> tuple[str, ...]:
        """As `Weights.wait_held`."""
        waiting = [self._members[0].wait_held(version, fraction, timeout=timeout)]
        return self._wait(waiting, timeout, f"wait_held({version!r}, {fraction!r})")[0]

    def wait_for(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """As `Weights.wait_for`."""
        return self._wait([self._members[0].wait_for(spec, timeout=timeout)], timeout, f"wait_for({spec!r})")[0]

    # --- how things are -----------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> dict[str, Json] | None:
        """What its publisher said of the version that every shard holds; None if there is none."""
        return self._metadata()

    def statistics(self) -> list[dict[str, object]]:
        """Counters of each shard, in order."""
        return [member.statistics() for member in self._members]


def _listed(given: object) -> list[Any] | None:
    """What is given one by one for each shard; None where it is not."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else None
