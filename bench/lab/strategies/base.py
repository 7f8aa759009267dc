"""The two sides of every strategy. Whatever time passes in their calls is stall, and the workers measure it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Committed:
    """What it cost the trainer to make a version readable."""

    unpublish_s: float  # before it could change its tensors
    publish_s: float  # before it could train again


class NotNow(Exception):
    """The weights cannot be had at the moment; trying again may help."""


class TrainerSide(Protocol):
    """The trainer's part."""

    def commit(self, version: int, change: Callable[[], None]) -> Committed:
        """Let `change` write the tensors when nobody needs what they were, then let the rollouts have what they are."""
        ...

    def statistics(self) -> dict[str, int]:
        """Counters, at the end."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class RolloutSide(Protocol):
    """A rollout's part."""

    def join(self) -> int:
        """Get the newest version for the first time. Returns it. Raises `NotNow`."""
        ...

    def sync(self) -> int:
        """Look for a newer version, and get it. Returns the version that the tensors hold now. Raises `NotNow`."""
        ...

    def bytes_by_source(self) -> dict[str, int]:
        """What came from whom so far."""
        ...

    def statistics(self) -> dict[str, int]:
        """Counters, at the end."""
        ...

    def close(self) -> None:
        """Leave."""
        ...
