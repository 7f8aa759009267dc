"""What the server believes of one version: its content, who has any of it, who is on the way; and of all together."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ..names import Digest, ReplicaName, Version, WorkerId
from .companions import Names
from .keepers import Keepers
from .lines import Line


class Taken(NamedTuple):
    """What all shards of a replica said that they have published, and what the version was taken for by that."""

    publisher: ReplicaName
    roots: dict[Line, Digest]


@dataclass
class VersionRecord:
    """One version: its content by line, and the workers that have any of it."""

    version: Version
    exists: bool = False
    roots: dict[Line, Digest] = field(default_factory=dict)
    layouts: dict[Line, Digest] = field(default_factory=dict)
    holders: dict[Line, dict[WorkerId, None]] = field(default_factory=dict)  # holding, withdrawing or filling
    whole: dict[Line, dict[WorkerId, None]] = field(default_factory=dict)  # holders that have all of it
    idle: dict[Line, list[WorkerId]] = field(default_factory=dict)  # holders from whom nobody reads, by name
    refused: dict[WorkerId, float] = field(default_factory=dict)  # sources of wrong bytes, and until when that counts
    publishers: dict[ReplicaName, None] = field(default_factory=dict)  # replicas that have published it, or half of it
    proved: dict[Line, None] = field(default_factory=dict)  # shown by a receipt, or seen by this server
    named: dict[ReplicaName, None] = field(default_factory=dict)  # those of them that are known to have ended that well
    is_unsettled: bool = False  # one more is named: whose publish never finished is looked at again
    disputed: dict[Line, None] = field(default_factory=dict)  # found to have other content than was believed
    keepers: dict[Line, Keepers] = field(default_factory=dict)  # who could make a host copy of it ahead of need
    is_established: bool = False  # each shard has been whole outside its publishers
    claims: dict[ReplicaName, None] = field(default_factory=dict)  # replicas whose publish of it has not ended
    accepted: dict[ReplicaName, dict[Line, Digest]] = field(
        default_factory=dict
    )  # those that this server has let publish it, and what content
    taken: Taken | None = None  # the measure of what nothing proves, as long as somebody has any of it
    promised: dict[ReplicaName, None] = field(default_factory=dict)  # replicas whose fill with it has not ended
    last_holder: str = ""
    usual: dict[tuple[bool, bool], float | None] = field(default_factory=dict)  # rates of its reads, by distance
    usual_until: float = -inf  # and until when they are believed
    cross_site_bytes: dict[str, int] = field(default_factory=dict)  # by site: what has come into it from others

    @property
    def is_idle(self) -> bool:
        return not self.claims and not self.promised and not any(self.holders.values())

    def note_published(self, lines: Iterable[Line], by: ReplicaName) -> None:
        """That replica has published it to the end: what these lines are is proved by that."""
        self.proved.update(dict.fromkeys(lines))
        self.note_named(by)

    def note_named(self, publisher: ReplicaName) -> None:
        """That replica has published it to the end."""
        if publisher not in self.named:
            self.named[publisher], self.is_unsettled = None, True


class Known(NamedTuple):
    """The versions of a model, newest first."""

    key: tuple[object, ...]
    existing: tuple[Version, ...]
    available: tuple[Version, ...]  # of these: not lost


class Glance(NamedTuple):
    """What follows from all versions of a model together."""

    key: tuple[object, ...]
    available: tuple[Version, ...]  # that exist and are not lost, newest first
    together: tuple[tuple[Names, tuple[Version, ...]], ...]  # of each set: those that all of its models have
    newest_established: Version | None
    outliving: dict[Version, None]  # that one, and those established after it that are lost: kept outside publishers
    newest: dict[Version, None]  # the newest `retain`: of all, and of those that are not lost. Others may be back.
    retained: dict[Version, None]
