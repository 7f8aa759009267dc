"""Models with trainers of their own, read under one number: `open_set`.

Models of one trainer need no set. `register({"target": target, "draft": draft})` makes them one model, and each version
of it has both.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from . import aio
from .group import Several, open_several, together
from .memory.registration import register as register_tensors
from .protocol.errors import GroupMismatch, UsageError, VersionUnavailable
from .protocol.layout import Box
from .protocol.manifest import Json
from .protocol.messages import PREFETCHED, Spec, parse_spec, steps_back
from .protocol.names import Version
from .runtime.config import OpenArguments, check_name, open_options
from .runtime.questions import available_versions, plain_spec, wait_for_version
from .runtime.statistics import Statistics
from .tracebacks import brief, brief_methods

if TYPE_CHECKING:
    from .memory.registration import type_of_dtype, type_of_weights

TRIES = 4  # a number may be lost, and shards may choose different ones, while a version is published

Known = Mapping[str, Sequence[int]]  # by model: the versions that can be had, newest first


@brief
def open_set(
    models: Sequence[str],
    *,
    replica: str,
    shard: int = 0,
    shards: int = 1,
    reliable: bool = True,
    **options: Unpack[OpenArguments],
) -> "WeightsSet":
    """Join each of these models as one shard of the replica of that name; the rest is as in `tensorhub.open`.

    `host_bytes` is for each model. If one model cannot be joined, none is. Raises as `tensorhub.open` does.
    """
    names = _models(models)
    places, what = [(name, shard) for name in names], f"open_set of {'+'.join(names)}"
    return WeightsSet(names, open_several(places, replica, shards, reliable, open_options(**options), what))


@brief_methods
class WeightsSet(Several):
    """One shard of each model of a set, in this process. Made by `open_set`; a context manager.

    Each model is a worker of its own, and the server knows nothing of the set. `version` is a number only while all
    models hold it. A call that fails may leave them with different versions: `version` is None until a call succeeds.
    """

    def __init__(self, models: Sequence[str], members: list[aio.Weights]) -> None:
        me = members[0]._client.me
        super().__init__(members, f"{'+'.join(models)}/{me.replica}[{me.shard}]")
        self.models = tuple(models)  # their names, in order

    def __enter__(self) -> "WeightsSet":
        return self

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
        for what, given in (("tensors", tensors), ("boxes", dict.fromkeys(self.models) if boxes is None else boxes)):
            if not isinstance(given, Mapping) or sorted(given) != sorted(self.models):
                found = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
                text = f"{what} of {self._name} are a mapping of {', '.join(self.models)}, not {found}"
                raise UsageError(text, hint="a module or a mapping for each model, by its name")
        self._members[0]._check_process()
        taken = [
            register_tensors(tensors[name], dtype, boxes[name] if boxes is not None else None, partial=partial)
            for name in self.models
        ]
        every = zip(self._members, taken, self.models, strict=True)
        self._wait([member.take(one, of=tensors[name]) for member, one, name in every], None, "register()")

    def replicate(self, spec: Spec = "latest", *, wait: bool = False, timeout: float | None = None) -> int:
        """Fill all models with one version, verified. Returns it when all shards of the replica have it.

        "latest" is the newest number that all models have, and is waited for. A number that one of them lacks is
        `VersionUnavailable`, which names that model; `wait=True` waits for it. Raises as `Weights.replicate` does.
        """
        if not isinstance(wait, bool):
            raise UsageError(f"wait={wait!r} is neither True nor False")
        return self._fill("replicate", spec, timeout, waits=wait, floor=None)

    def update(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """Leave the version held for a newer one that all models have, if there is one. Returns the version now held.

        A number that one of the models has lost is passed over. Raises as `Weights.update` does.
        """
        return self._fill("update", spec, timeout, waits=False, floor=self.version)

    def wait_for(self, spec: Spec = "latest", *, timeout: float | None = None) -> int:
        """Wait until all models have the version, or a newer one. Returns the newest that all have then."""
        number = _parsed(spec, "wait_for")

        def newest(common: Sequence[int]) -> int | None:
            return common[0] if common and (number is None or common[0] >= number) else None

        pick = newest if number is not None else _picks(spec)
        return self._wait([self._choose(pick, self._members[0]._deadline(timeout))], timeout, f"wait_for({spec!r})")[0]

    @property
    def metadata(self) -> dict[str, dict[str, Json]] | None:
        """By model, what its publisher said of the version that all of them hold; None if there is none."""
        held = self.version
        return None if held is None else {name: each.metadata or {} for name, each in self._by_model()}

    def statistics(self) -> dict[str, Statistics]:
        """Figures of each model's worker, by model."""
        return {name: member.statistics() for name, member in self._by_model()}

    def _by_model(self) -> list[tuple[str, aio.Weights]]:
        return list(zip(self.models, self._members, strict=True))

    def _fill(self, verb: str, spec: Spec, timeout: float | None, *, waits: bool, floor: int | None) -> int:
        number = _parsed(spec, verb)
        deadline = self._members[0]._deadline(timeout)

        async def fill() -> int:
            for member in self._members:
                member._client.check_may_call(verb)
            for more in range(TRIES - 1, -1, -1):
                version = await self._version_of(spec, number, deadline, waits=waits, floor=floor)
                try:
                    left_s = max(deadline - time.monotonic(), 0.001)
                    await together([member.replicate(version, timeout=left_s) for member in self._members])
                    return version
                except (GroupMismatch, VersionUnavailable):
                    if not more or number is not None:
                        raise
            raise AssertionError("the last try returns or raises")

        works: list[Coroutine[object, object, int]] = [fill()]
        return self._wait(works, timeout, f"{verb}({spec!r})")[0]

    async def _version_of(
        self, spec: Spec, number: Version | None, deadline: float, *, waits: bool, floor: int | None
    ) -> int:
        """The number that all models are filled with."""
        if number is None:
            pick = _picks(spec)
            return await self._choose(lambda common: _not_behind(pick(common), floor), deadline)
        if floor is not None and floor >= number:
            return floor
        return await self._choose(lambda common: number if number in common else None, deadline, number, waits=waits)

    async def _choose(
        self,
        pick: Callable[[Sequence[int]], int | None],
        deadline: float,
        number: Version | None = None,
        *,
        waits: bool = True,
    ) -> int:
        """The number that `pick` chooses among those of all models. Waits for one; raises if `number` is missing."""
        options = self._members[0]._client.options
        while True:
            found = await asyncio.gather(*(available_versions(options, name, deadline) for name in self.models))
            known: Known = dict(zip(self.models, found, strict=True))
            version = pick([each for each in found[0] if all(each in other for other in found)])
            if version is not None:
                return version
            behind = min(self.models, key=lambda name: known[name][0] if known[name] else -1)  # it has to publish next
            newest = known[behind][0] if known[behind] else None
            if number is not None:
                _check_may_come(number, known, waits=waits)
            await wait_for_version(options, behind, "latest" if newest is None else newest + 1, deadline)


def _models(models: object) -> tuple[str, ...]:
    """Their names. Raises `UsageError`."""
    if isinstance(models, str) or not isinstance(models, Sequence) or not models:
        raise UsageError(f"models={models!r} is no list of names", hint='open_set(["target", "draft"], …)')
    names = tuple(check_name(name, "a model") for name in models)
    if len(set(names)) < len(names):
        raise UsageError(f"models={list(names)} names a model twice")
    return names


def _parsed(spec: Spec, verb: str) -> Version | None:
    if plain_spec(spec) == PREFETCHED:
        raise UsageError(f"{verb}({PREFETCHED!r}) on a set", hint='a set takes an integer, "latest" or "latest-N"')
    return parse_spec(plain_spec(spec), verb)


def _picks(spec: Spec) -> Callable[[Sequence[int]], int | None]:
    """Of versions, newest first, the one that "latest" or "latest-N" names."""
    back = steps_back(str(plain_spec(spec)))
    return lambda common: common[back] if len(common) > back else None


def _not_behind(version: int | None, floor: int | None) -> int | None:
    """An update never goes back."""
    return floor if floor is not None and (version is None or version < floor) else version


def _check_may_come(number: Version, known: Known, *, waits: bool) -> None:
    """Raises `VersionUnavailable` if a model lacks that number, and it is not waited for or has been passed by."""
    for name, versions in known.items():
        is_passed = bool(versions) and versions[0] > number
        if number not in versions and (is_passed or not waits):
            has = f"its newest version is {versions[0]}" if versions else "it has no version yet"
            hint = (
                'numbers only rise: replicate("latest")' if is_passed else "replicate(version, wait=True) waits for it"
            )
            raise VersionUnavailable(f"{name} has no version {number}; {has}", hint=hint)
