"""What the server believes of one model: which versions exist, what their content is, and who has them.

A version *exists* once all shards of one replica have published it; from then on it never ceases to be known while the
table has room, held or not, so `latest` cannot go backwards and a number cannot be used for other content.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from .groups import Replica
from .messages import Buffer, Failure, Filling, Holding, Report, Spec, Vacated, Withdrawing
from .names import Digest, ModelName, ReplicaName, Shard, Version, WorkerId
from .specs import parse_spec, steps_back


@dataclass
class VersionRecord:
    """One version: its content by shard, and the workers that have any of it."""

    version: Version
    exists: bool = False
    roots: dict[Shard, Digest] = field(default_factory=dict)
    layouts: dict[Shard, Digest] = field(default_factory=dict)
    holders: dict[Shard, dict[WorkerId, None]] = field(default_factory=dict)  # holding, withdrawing or filling
    claims: dict[ReplicaName, None] = field(default_factory=dict)  # replicas whose publish of it has not ended
    promised: dict[ReplicaName, None] = field(default_factory=dict)  # replicas whose fill with it has not ended
    last_holder: str = ""
    usual: dict[tuple[bool, bool], float | None] = field(default_factory=dict)  # rates of its reads, by distance
    usual_until: float = -inf  # and until when that is taken for true
    far_bytes: dict[str, int] = field(default_factory=dict)  # by site: what has come into it from others

    @property
    def is_idle(self) -> bool:
        return not self.claims and not self.promised and not any(self.holders.values())


@dataclass
class Model:
    """One model by name: its replicas and its versions."""

    name: ModelName
    shards: int
    most_versions: int
    replicas: dict[ReplicaName, Replica] = field(default_factory=dict)
    versions: dict[Version, VersionRecord] = field(default_factory=dict)
    newest: Version | None = None  # the newest that exists or existed
    retain: int = 0
    pins: dict[WorkerId, tuple[Version, ...]] = field(default_factory=dict)
    closing: dict[WorkerId, None] = field(default_factory=dict)  # members that want to leave
    sites: Counter[str] = field(default_factory=Counter)  # members by site

    def record(self, version: Version) -> VersionRecord:
        """The version's record, made if need be; the oldest that nobody needs makes room."""
        found = self.versions.get(version)
        if found is None:
            found = self.versions[version] = VersionRecord(version)
            if len(self.versions) > self.most_versions:
                kept = (version, self.newest)
                idle = [v for v in sorted(self.versions) if self.versions[v].is_idle and v not in kept]
                for v in idle[: len(self.versions) - self.most_versions]:
                    del self.versions[v]
        return found

    def note_exists(self, version: Version) -> bool:
        """The version has come into being, or was heard of. Returns whether that is news."""
        record = self.record(version)
        is_news = not record.exists
        record.exists = True
        self.newest = version if self.newest is None else max(self.newest, version)
        return is_news

    def pin(self, worker: WorkerId, version: Version, root: Digest, layout: Digest) -> bool:
        """The worker has the version with this content. False: the version's content is another one."""
        record = self.record(version)
        if record.roots.setdefault(worker.shard, root) != root:
            return False
        record.layouts.setdefault(worker.shard, layout)
        return True

    def move(self, worker: WorkerId, old: Report | None, new: Report | None) -> None:
        """What the worker has changed: keep the index of holders."""
        before, after = versions_in(old), versions_in(new)
        for version, was_whole in before.items():
            record = self.versions.get(version) if version not in after else None
            if record is not None and record.holders.get(worker.shard, {}).pop(worker, "absent") is None and was_whole:
                record.last_holder = str(worker)
        for version in after:
            if version not in before:
                self.record(version).holders.setdefault(worker.shard, {})[worker] = None

    def newest_existing(self, count: int) -> list[Version]:
        """The newest versions that exist, newest first."""
        found: list[Version] = []
        for version in sorted(self.versions, reverse=True) if count > 1 else [self.newest]:
            if version is not None and len(found) < count and self.versions[version].exists:
                found.append(version)
        return found

    def forget(self, worker: WorkerId, site: str) -> None:
        """The worker is gone, and what it wanted with it."""
        self.pins.pop(worker, None)
        self.closing.pop(worker, None)
        self.sites[site] -= 1
        if not self.sites[site]:
            del self.sites[site]

    def retained(self) -> dict[Version, None]:
        """The versions that no voluntary departure may lose: the newest, and those that are pinned."""
        found = dict.fromkeys(self.newest_existing(self.retain))
        for version in self.pins.values():
            found.update((each, None) for each in version if each in self.versions and self.versions[each].exists)
        return found

    def resolve(self, spec: Spec) -> tuple[Version | None, Failure | None]:
        """The version that the spec means now. (None, why) where there is none."""
        version = parse_spec(spec)
        if version is not None:
            record = self.versions.get(version)
            if record is not None and record.exists:
                return version, None
            newest = f"its newest version is {self.newest}" if self.newest is not None else "nothing was published yet"
            return None, Failure("version-unavailable", f"{self.name} has no version {version}; {newest}")
        known = sorted((v for v, record in self.versions.items() if record.exists), reverse=True)
        back = steps_back(str(spec))
        if back < len(known):
            return known[back], None
        text = f"{spec} of {self.name}: {len(known)} versions are known" if known else f"no version of {self.name} yet"
        return None, Failure("version-unavailable", text, "wait for the first publish")

    def awaited(self, spec: Spec) -> Version | None:
        """What somebody who waits for `spec` gets: that version or a newer one; None while there is none."""
        version = parse_spec(spec)
        if version is None:
            return self.resolve(spec)[0]
        return self.newest if self.newest is not None and self.newest >= version else None

    def conflict(self, replica: Replica, version: Version, roots: dict[Shard, Digest]) -> Failure | None:
        """Why the replica may not publish this content under this number, or None."""
        name, record = f"version {version} of {self.name}", self.versions.get(version)
        is_same = record is not None and is_same_content(record.roots, roots)
        if self.newest is not None and version < self.newest:
            text = f"{name} is lower than the newest, {self.newest}"
            return Failure("version-conflict", text, "versions only rise: publish a higher number")
        if record is not None and record.exists and not is_same:
            return Failure("version-conflict", f"{name} exists with other content", "publish a higher number")
        if record is not None and not record.exists and not is_same:
            others = [str(name) for name in record.claims if name != replica.name]
            others += [str(w) for held in record.holders.values() for w in held if w.replica != replica.name]
            if others:
                text = f"{name} is being published with other content by {others[0]}"
                hint = "one replica publishes a number, or all of them the same content"
                return Failure("version-conflict", text, hint)
        return None


def is_same_content(known: dict[Shard, Digest], roots: dict[Shard, Digest]) -> bool:
    """These are the version's shards, all of them and no others: it may have been cut into another number of them."""
    return len(known) == len(roots) and all(known.get(shard) == root for shard, root in roots.items())


def version_in(buffer: Buffer | None) -> Version | None:
    """The version that the buffer has, whole or in part."""
    return buffer.version if isinstance(buffer, Filling | Holding | Withdrawing | Vacated) else None


def versions_in(report: Report | None) -> dict[Version, bool]:
    """The versions that a worker has, in its buffer or beside it, and whether it has all of it."""
    if report is None:
        return {}
    found = {copy.version: copy.whole for copy in report.copies}
    held = version_in(report.buffer)
    if held is not None:
        found[held] = found.get(held, False) or not isinstance(report.buffer, Filling)
    return found
