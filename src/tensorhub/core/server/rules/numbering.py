"""The number with which a trainer that was started again goes on: the lowest above every number that was ever taken.

Taken is what exists or existed, lost or not; what was published by some shards only; what is being published; and what
is claimed. A number that was claimed and never published is free again once its claim has ended. A number that is too
high to be published next counts for nothing: its publish is about to be refused.
"""

from collections.abc import Iterator

from ...names import ModelName, Version
from ..catalog import Model
from ..state import State
from . import claims


def next_version(state: State, name: ModelName) -> Version | None:
    """The lowest free number, 0 for a model that nobody knows; None while a restarted server still listens."""
    model = state.models.get(name)
    is_listening = state.is_recovering if model is None else not model.roll.is_over
    if is_listening:
        return None
    if model is None:
        return Version(0)
    return Version(max((each for each in _taken(state, model) if each <= model.highest_next), default=-1) + 1)


def _taken(state: State, model: Model) -> Iterator[int]:
    if model.newest is not None:
        yield model.newest
    yield from model.versions
    for replica in model.replicas.values():
        yield from claims.claimed_by(state, replica)
        call = replica.call
        if call is not None and not call.is_over and call.verb == "publish" and isinstance(call.spec, int):
            yield call.spec
