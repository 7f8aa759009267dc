"""Tensors from the store alone: `tensorhub.load` and `tensorhub.load_shards`, and the same as coroutines.

Nothing of the caller's is registered, and nothing needs to be known before but the model's name.
"""

import time
from typing import TYPE_CHECKING, NamedTuple, Unpack

from .protocol.errors import UsageError
from .protocol.manifest import Json
from .protocol.messages import Spec
from .runtime.config import LoadArguments, Options, check_arguments, check_name, open_options, parse_seconds
from .runtime.loops import loop_thread
from .runtime.opening import Filled, fill_all
from .runtime.questions import spec_of_text

if TYPE_CHECKING:
    from .memory.registration import type_of_tensor

    type_of_tensors = dict[str, type_of_tensor]
else:
    type_of_tensors = dict


class Loaded(type_of_tensors):
    """The tensors of one shard of a version, by name: a dict that says what it is a version of.

    Torch tensors on the host where torch is installed, numpy arrays elsewhere, of the dtypes, shapes and strides that
    the publisher registered. What shares memory there (tied weights) shares it here.
    """

    def __init__(self, filled: Filled, model: str) -> None:
        super().__init__(filled.tensors)
        self.model = model
        self.version = filled.version
        self.metadata: dict[str, Json] = filled.metadata

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self.model}@{self.version}>"


class Asked(NamedTuple):
    """What a caller of `load` wants, checked."""

    model: str
    spec: Spec
    options: Options
    deadline: float


def asked(reference: str, timeout: float | None, **where: Unpack[LoadArguments]) -> Asked:
    """Raises `UsageError` that names what is wrong."""
    model, at, text = reference.rpartition("@") if isinstance(reference, str) else ("", "", "")
    if not at:
        hint = 'load("policy@latest"), "policy@7" or "policy@latest-1"'
        raise UsageError(f"{reference!r} names no version of a model", hint=hint)
    spec = spec_of_text(text)
    check_arguments(where, LoadArguments)
    options = open_options(**where)
    seconds = options.timeout_s if timeout is None else parse_seconds(timeout, "timeout")
    return Asked(check_name(model, "model"), spec, options, time.monotonic() + seconds)


async def run(wanted: Asked, *, only_one: bool) -> list[Loaded]:
    """In the worker loop."""

    def check(shards: int) -> None:
        if only_one and shards > 1:
            text = f"{wanted.model} has {shards} shards, each with tensors of its own"
            raise UsageError(text, hint="load_shards() returns a mapping for each of them")

    filled = await fill_all(wanted.options, wanted.model, wanted.spec, wanted.deadline, check=check)
    return [Loaded(each, wanted.model) for each in filled]


async def load_async(
    reference: str,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    **where: Unpack[LoadArguments],
) -> Loaded:
    """The tensors of a version, by name: `load("policy@latest")`, "policy@7", "policy@latest-1".

    A dict with `.version` and `.metadata`, in memory of its own: nothing is registered before, and nothing published
    after. Reads from whoever holds the version, as any replica does, and blocks until all of it is there and verified.
    `timeout` is for all of that (300 s), the others are as of `open`. Raises `VersionUnavailable`, `ServerUnreachable`,
    `Refused`, what `replicate` raises, and `UsageError` for several shards that were published without boxes: see
    `load_shards`. What was published with boxes comes as whole tensors, however it was cut.
    """
    (found,) = await loop_thread().here(run(asked(reference, timeout, **where), only_one=True))
    return found


async def load_shards_async(
    reference: str,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - our own deadline
    **where: Unpack[LoadArguments],
) -> list[Loaded]:
    """As `load`, of a model of any number of shards: the tensors of each of them, in order, all of one version."""
    return await loop_thread().here(run(asked(reference, timeout, **where), only_one=False))


def load(reference: str, *, timeout: float | None = None, **where: Unpack[LoadArguments]) -> Loaded:
    """As `tensorhub.aio.load`, whose text it gets below."""
    (found,) = _load(asked(reference, timeout, **where), f"load({reference!r})", only_one=True)
    return found


def load_shards(reference: str, *, timeout: float | None = None, **where: Unpack[LoadArguments]) -> list[Loaded]:
    """As `tensorhub.aio.load_shards`, whose text it gets below."""
    return _load(asked(reference, timeout, **where), f"load_shards({reference!r})", only_one=False)


load.__doc__, load_shards.__doc__ = load_async.__doc__, load_shards_async.__doc__


def _load(wanted: Asked, what: str, *, only_one: bool) -> list[Loaded]:
    return loop_thread().wait(run(wanted, only_one=only_one), deadline=wanted.deadline, what=what)
