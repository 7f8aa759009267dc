"""A set: models that are published one by one, and of which a reader has all under one number, or none.

The target and the draft of speculative decoding, or actor and critic, often have trainers of their own. Each publishes
its model under the numbers of the whole. A version of the set is a number that all of them have published. `open_set`
joins all of the models at once; what it calls resolves to one number for all of them, on all shards.
"""

import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING

from . import aio
from .group import Several, all_or_none, leave, together
from .memory.registration import register as register_tensors
from .protocol.errors import UsageError
from .protocol.layout import Box
from .protocol.manifest import Json
from .protocol.messages import MAX_COMPANIONS, Spec, parse_spec
from .runtime.config import MAX_SECONDS, Options, check_name, parse_seconds, worker_options
from .runtime.loops import loop_thread
from .runtime.questions import plain_spec, wait_for_version
from .runtime.sets import SetCalls

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights


def open_set(
    models: Sequence[str],
    *,
    replica: str,
    shard: int = 0,
    shards: int = 1,
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
) -> "WeightsSet":
    """Join each of these models (2 to 16) as one shard of the replica of that name; the rest is as in `tensorhub.open`.

    `host_bytes` is for each model. Where one of them cannot be joined none is. Raises as `tensorhub.open` does.
    """
    names = _models(models)
    began = time.monotonic()
    options = worker_options(
        server=server,
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
        connect_s=None if timeout is None else parse_seconds(timeout, "timeout"),
        timeout_s=None if call_timeout is None else parse_seconds(call_timeout, "call_timeout"),
    )

    async def join() -> list[aio.Weights]:
        return await all_or_none(
            [aio._join(name, replica, shard, shards, reliable, options, sorted({*names} - {name})) for name in names]
        )

    what = f"open_set of {'+'.join(names)}/{replica}[{shard}]"
    opened = loop_thread().wait(join(), deadline=began + options.connect_s, what=what, undo=leave)
    return WeightsSet(names, opened, options)


class WeightsSet(Several):
    """One shard of each model of a set, in this process. Made by `open_set`; a context manager.

    `replicate` and `update` bring one version of all models, or none: `version` is a number only while all of them hold
    it, and whoever computes with the models asks that. What is held is not given up before each model has a source
    of the new version within reach. A call that fails after that may leave some models with the new version: then
    `version` is None until a call succeeds. `mutating` claims its number in one model after the other; where one of
    them refuses it the others are published again as what they were. All else is done for each of the models.
    """

    def __init__(self, models: Sequence[str], members: list[aio.Weights], options: Options) -> None:
        me = members[0]._client.me
        super().__init__(members, f"{'+'.join(models)}/{me.replica}[{me.shard}]")
        self._models, self._options = tuple(models), options
        by_name = sorted(zip(models, members, strict=True), key=lambda each: each[0])  # the same order on all shards
        self._calls = SetCalls([member._client for _, member in by_name], self._name)

    def __repr__(self) -> str:
        return f"<WeightsSet {self._name}>"

    def __enter__(self) -> "WeightsSet":
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """Their names, in order."""
        return self._models

    # --- calls --------------------------------------------------------------------------------------------------------

    def register(
        self,
        tensors: "Mapping[str, type_of_weights]",
        *,
        dtype: "type_of_dtype | Mapping[str, type_of_dtype] | None" = None,
        boxes: "Mapping[str, Mapping[str, Sequence[Box]]] | None" = None,
        partial: bool = False,
    ) -> None:
        """Take these tensors in place: by model, a module or a mapping; likewise `boxes`. See `Weights.register`.

        Tensors that cannot be taken are refused before any model has let go of what it had.
        """
        if not isinstance(tensors, Mapping) or sorted(tensors) != sorted(self._models):
            given = ", ".join(map(str, tensors)) if isinstance(tensors, Mapping) else type(tensors).__name__
            text = f"tensors of {self._name} are a mapping of {', '.join(self._models)}, not {given}"
            raise UsageError(text, hint="a module or a mapping of tensors for each model, by its name")
        strange = [name for name in boxes or () if name not in self._models]
        if strange:
            raise UsageError(f"boxes of {self._name} for {strange[0]!r}, which is none of its models")
        self._members[0]._check_process()
        taken = [
            register_tensors(tensors[name], dtype, None if boxes is None else boxes.get(name, {}), partial=partial)
            for name in self._models
        ]
        every = zip(self._members, taken, self._models, strict=True)
        works = [member.take(one, of=tensors[name]) for member, one, name in every]
        self._wait(works, None, "register()")

    def publish(
        self, version: int, *, metadata: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> int:
        """As `Weights.publish`, of all. Where one model fails, others may be published: it is no version of the set."""
        self._calls.check_idle("publish")
        return super().publish(version, metadata=metadata, timeout=timeout)

    def unpublish(self, *, timeout: float | None = None) -> None:
        """As `Weights.unpublish`, of all."""
        self._calls.check_idle("unpublish")
        super().unpublish(timeout=timeout)
        self._calls.forget()

    def suspend(self, *, timeout: float | None = None) -> None:
        """As `Weights.suspend`, of all."""
        self._calls.check_idle("suspend")
        super().suspend(timeout=timeout)

    def pin(self, version: int, *, timeout: float | None = None) -> None:
        """As `Weights.pin`, in all of the models or, where one of them has no such version, in none."""

        async def pin() -> None:
            done: list[aio.Weights] = []
            try:
                for member in self._members:
                    if version not in member._client.driver.worker.pins:
                        await member.pin(version, timeout=timeout)
                        done.append(member)
            except BaseException:
                await together([member.unpin(version, timeout=timeout) for member in done])
                raise

        self._wait([pin()], timeout, f"pin({version!r})")

    def replicate(self, spec: Spec = "latest", *, wait: bool = False, timeout: float | None = None) -> int:
        """Fill all models with one version, verified. Returns it when all shards of the replica have it.

        "latest" is the newest number that each of the models has; a number that one of them lacks is
        `VersionUnavailable`, or waited for with `wait=True`. Raises as `Weights.replicate` does.
        """
        if not isinstance(wait, bool):
            raise UsageError(f"wait={wait!r} is neither True nor False")
        return self._fill("replicate", spec, timeout, waits=wait)

    def update(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """Leave the version held for a newer one of all models, if there is one. Returns the version now held.

        It never goes behind what all of them have held. "prefetched" is the newest version that all of them, on every
        shard, have whole in host memory. Raises as `Weights.update` does.
        """
        return self._fill("update", spec, timeout)

    def wait_for(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """Wait until all of the models have the version, or a newer one. Returns what there is then."""

        async def wait() -> int:
            first, *others = self._models
            deadline = self._members[0]._deadline(timeout)
            return await wait_for_version(self._options, first, spec, deadline, companions=others)

        return self._wait([wait()], timeout, f"wait_for({spec!r})")[0]

    def wait_held(self, version: int, fraction: float = 1.0, *, timeout: float | None = None) -> tuple[str, ...]:
        """As `Weights.wait_held`, in each of the models. Returns the replicas that are said of all of them."""
        found = self._all(lambda m: m.wait_held(version, fraction, timeout=timeout), timeout, f"wait_held({version!r})")
        return tuple(name for name in found[0] if all(name in each for each in found))

    # --- how things are -----------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> dict[str, dict[str, Json]] | None:
        """By model, what its publisher said of the version that all of them hold; None if there is none."""
        held = self.version
        found = {name: member.metadata for name, member in zip(self._models, self._members, strict=True)}
        return None if held is None else {name: each or {} for name, each in found.items()}

    def statistics(self) -> dict[str, dict[str, object]]:
        """Counters of each model's worker, by model."""
        return {name: member.statistics() for name, member in zip(self._models, self._members, strict=True)}

    # ------------------------------------------------------------------------------------------------------------------

    def _claim(self, version: int, timeout: float | None, begun: list[aio.Weights]) -> None:
        self._calls.check_idle("mutating")
        deadline = self._members[0]._deadline(timeout)
        patience_s = min(MAX_SECONDS, deadline - time.monotonic() + self._calls.back_s)

        async def claim() -> None:
            await self._calls.claim(version, deadline)
            begun.extend(self._members)

        self._wait([claim()], patience_s, f"mutating(version={version!r})")

    def _fill(self, verb: str, spec: Spec, timeout: float | None, *, waits: bool = False) -> int:
        spec = plain_spec(spec)
        parse_spec(spec, verb)

        async def fill() -> int:
            return await self._calls.fill(verb, spec, self._members[0]._deadline(timeout), waits=waits)

        works: list[Coroutine[object, object, int]] = [fill()]
        return self._wait(works, timeout, f"{verb}({spec!r})")[0]


def _models(models: object) -> tuple[str, ...]:
    """Their names. Raises `UsageError`."""
    if isinstance(models, str) or not isinstance(models, Sequence):
        raise UsageError(f"models={models!r} is no list of names", hint='open_set(["target", "draft"], …)')
    names = tuple(check_name(name, "a model") for name in models)
    if not 2 <= len(names) <= 1 + MAX_COMPANIONS:
        text = f"a set of {len(names)} models, not of 2 to {1 + MAX_COMPANIONS}"
        raise UsageError(text, hint="open() is for one model" if len(names) == 1 else None)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"models={list(names)} names {twice[0]!r} twice")
    return names
