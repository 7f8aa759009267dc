"""Versions of each model: their content and their holders."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from ..protocol.errors import HIGHER
from ..protocol.messages import MAX_FIRST_VERSION, MAX_VERSION_JUMP, Failure, Spec, parse_spec, steps_back
from ..protocol.names import Digest, ModelName, Number, ReplicaName, Version, WorkerId, is_partial
from .groups import Replica
from .journal import Sessions
from .members import (
    BufferHolders,
    Content,
    LayoutKey,
    LayoutSet,
    Place,
    Tier,
    Watches,
    plain_layout_set,
)

NOT_CUT_ANEW = Digest("")


# --- What the server believes of one version: its content, its holders, and the replicas that are to get it.


@dataclass
class VersionRecord:
    """One version: its content by layout key, and the workers that have any of it."""

    version: Version
    exists: bool = False  # its publish has ended well on all shards
    exists_since: float | None = None  # in time awake; None: a server before this one has seen it
    epoch: Number = Number(0)  # the number of that publish, or of the latest one that is under way
    publisher: ReplicaName | None = None  # the replica that has published it, if that is known
    is_publishing: bool = False  # that goes on
    roots: dict[LayoutKey, Digest] = field(default_factory=dict)
    layouts: dict[LayoutKey, Digest] = field(default_factory=dict)
    holders: dict[LayoutKey, dict[WorkerId, None]] = field(default_factory=dict)  # holding, withdrawing or filling
    whole: dict[LayoutKey, dict[WorkerId, None]] = field(default_factory=dict)  # holders that have all of it
    idle: dict[LayoutKey, list[WorkerId]] = field(default_factory=dict)  # holders without readers, by name
    refused: dict[WorkerId, float] = field(default_factory=dict)  # sources of wrong bytes, and until when that counts
    keepers: dict[LayoutKey, WorkerId] = field(default_factory=dict)  # outside its publisher, since it is established
    is_established: bool = False  # each shard has been whole outside its publisher
    promised: dict[ReplicaName, None] = field(default_factory=dict)  # replicas whose fill with it has not ended
    last_holder: str = ""
    rates: dict[Tier, dict[WorkerId, float]] = field(default_factory=dict)  # the best ones of its last readers
    cross_site_bytes: dict[str, int] = field(default_factory=dict)  # by site: what has come into it from others

    @property
    def is_idle(self) -> bool:
        return not self.is_publishing and not self.promised and not any(self.holders.values())

    def note_rate(self, tier: Tier, reader: WorkerId, rate: float, max_readers: int) -> None:
        """The reader reads it at that rate."""
        rates = self.rates.setdefault(tier, {})
        rates[reader] = max(rate, rates.pop(reader, 0.0))  # newest last
        if len(rates) > max_readers:
            del rates[next(iter(rates))]

    def begin(self, epoch: Number) -> list[WorkerId]:
        """It has the content of that publish. Returns the workers that had counted by another one."""
        outdated = {worker: None for whole in self.whole.values() for worker in whole}
        self.epoch, self.publisher, self.is_established = epoch, None, False
        self.roots, self.layouts, self.keepers = {}, {}, {}
        return list(outdated)

    def accepts(self, key: LayoutKey, root: Digest, epoch: Number) -> bool:
        """This is its content: the same bytes as known for that key, or of the same publish."""
        return self.roots[key] == root if key in self.roots else epoch == self.epoch


class Writer(NamedTuple):
    """The one replica that may publish versions of a model."""

    replica: ReplicaName
    number: Number  # of two replicas that take themselves for the writer, the one with the higher number is it
    since: float  # in time awake


class Known(NamedTuple):
    """The versions of a model, newest first."""

    key: tuple[object, ...]
    existing: tuple[Version, ...]
    available: tuple[Version, ...]  # of these: not lost


class Glance(NamedTuple):
    """What follows from all versions of a model together."""

    key: tuple[object, ...]
    available: tuple[Version, ...]  # that exist and are not lost, newest first
    newest_established: Version | None
    outliving: dict[
        Version, None
    ]  # that one, and those established after it that are lost: kept outside their publishers
    anywhere: dict[Version, None]  # the newest `retain`, of all and of those that are not lost, and what is pinned
    retained: dict[Version, None]  # all that are kept


# --- What the server believes of one model: which versions exist, their content, and their holders.
#
# A model has one *writer* at a time. A version is named by its number and its *epoch*, the number that the server gave
# to its publish. Of two publishes of one number the finished one counts; of two finished ones the one with the higher
# epoch. A version *exists* once all shards of the writer have published it. From then on it is known as long as the
# table has room, held or not, so that its number cannot be used for other content. It is *lost* while no layout set has
# a whole holder with a session for each of its keys. `latest` is the newest version that exists and is not lost: only a
# loss takes it back.


@dataclass
class Model:
    """One model by name: its replicas and its versions."""

    name: ModelName
    shards: int  # of the replica that came last
    max_versions: int
    layout_sets: dict[LayoutSet, None] = field(default_factory=dict)  # in which its replicas are, or were
    has_boxes: bool = False  # a worker has, or had, registered tensors with boxes
    replicas: dict[ReplicaName, Replica] = field(default_factory=dict)
    versions: dict[Version, VersionRecord] = field(default_factory=dict)
    newest: Version | None = None  # the newest that exists or existed
    newest_epoch: Number = Number(0)
    began: Number = Number(0)  # versions with a lower epoch are of the time before it was begun anew
    writer: Writer | None = None
    is_listening: bool = False  # the server was restarted, and workers may come that it has promised something
    awaited: dict[WorkerId, list[Sessions]] = field(default_factory=dict)  # those, if it knows them
    keeps_established: bool = True
    retain: int = 0  # the most that the server or a reliable worker wishes
    pins: dict[WorkerId, tuple[Version, ...]] = field(default_factory=dict)
    closing: dict[WorkerId, float] = field(default_factory=dict)  # members that want to leave, and since when
    sites: Counter[str] = field(default_factory=Counter)  # members by site
    hosts: dict[str, dict[WorkerId, None]] = field(default_factory=dict)  # the members of each host
    reliable: dict[LayoutKey, dict[WorkerId, None]] = field(default_factory=dict)  # members that count for retention
    buffer_holders: BufferHolders = field(default_factory=BufferHolders)
    watches: Watches = field(default_factory=Watches)  # what each member waits for
    changed: dict[Version, None] = field(default_factory=dict)  # versions whose whole holders have changed
    lost: dict[Version, bool] = field(default_factory=dict)  # those known to be lost: true if that was told
    has_died: bool = False  # a worker has, and what is lost with it is not told yet
    noted: Glance | None = None  # when workers that wait for news were last decided for
    read_from: dict[WorkerId, None] = field(default_factory=dict)  # workers with open readers
    _held: dict[WorkerId, dict[Place, None]] = field(default_factory=dict)  # of what each is a holder
    _ascending: list[Version] = field(default_factory=list)  # the keys of `versions`
    _changes: int = 0  # of what all versions together depend on
    _known: Known | None = None
    _glance: Glance | None = None

    def record(self, version: Version) -> VersionRecord:
        """The version's record, made if need be; the oldest unused one makes room."""
        found = self.versions.get(version)
        if found is None:
            found = self.versions[version] = VersionRecord(version)
            self._changes += 1
            insort(self._ascending, version)
            if len(self.versions) > self.max_versions:
                kept = version, self.newest, *[v for v in self._ascending if self.versions[v].is_established][-1:]
                idle = [v for v in self._ascending if self.versions[v].is_idle and v not in kept]
                for v in idle[: len(self.versions) - self.max_versions]:
                    del self.versions[v]
                    self.lost.pop(v, None)
                self._ascending = sorted(self.versions)
        return found

    def look_up(self, version: Version) -> VersionRecord:
        """The version's record; where there is none, an empty one that is not kept."""
        return self.versions.get(version) or VersionRecord(version)

    def forget_numbers(self, number: Number) -> None:
        """Its numbers are forgotten. What has an epoch below that number does not count any more."""
        self.began = number
        self.versions, self._ascending, self.newest, self.newest_epoch = {}, [], None, Number(0)
        self.changed, self.lost, self.noted = {}, {}, None
        self._changes += 1
        self._known = self._glance = None

    def note_newest(self, version: Version, epoch: Number) -> None:
        """A version of that number exists, or has existed."""
        if epoch >= self.began and (self.newest is None or version > self.newest):
            self.newest, self.newest_epoch = version, epoch

    def note_exists(self, record: VersionRecord) -> bool:
        """The version has come into being, or was heard of. Returns whether that is news."""
        is_news = not record.exists
        record.exists = True
        if is_news:
            self.changed[record.version] = None
            self._changes += 1
        self.note_newest(record.version, record.epoch)
        return is_news

    def move(self, worker: WorkerId, old: Content, new: Content) -> None:
        """The worker has something else than before: keep the index of holders."""
        self.buffer_holders.move(worker, old, new)
        for version in new.kept:
            if version not in old.kept:
                self.changed[version] = None  # a leaving worker stays after all, or has a copy now
        before, after = old.places, new.places
        for place in before:
            version, key = place
            record = self.versions.get(version)
            if record is None:
                continue
            if place not in after:
                self.remove_holder(record, worker, key)
            if not after.get(place) and worker in record.whole.get(key, {}):
                del record.whole[key][worker]
                record.last_holder = str(worker)
                self._note_whole(record, is_turn=not record.whole[key])
        for place, is_whole in after.items():
            version, key = place
            record = self.record(version)
            if place not in before:
                self.add_holder(record, worker, key)
            whole = record.whole.setdefault(key, {})
            if is_whole and worker not in whole:
                whole[worker] = None
                self._note_whole(record, is_turn=len(whole) == 1)

    def _note_whole(self, record: VersionRecord, *, is_turn: bool) -> None:
        """The whole holders of the version have changed. `is_turn`: it had none, or has none now."""
        self.changed[record.version] = None
        self._changes += is_turn

    def note_pins(self, worker: WorkerId, pins: tuple[Version, ...]) -> None:
        """These versions the worker wants kept."""
        if pins != self.pins.pop(worker, ()):
            self._changes += 1
        if pins:
            self.pins[worker] = pins

    def note_established(self, record: VersionRecord) -> None:
        """Now the version is."""
        record.is_established = True
        self._changes += 1

    def note_given_up(self, record: VersionRecord) -> None:
        """The version is not established any more: a worker may give up the last reference to a shard of it."""
        record.is_established = False
        self._note_whole(record, is_turn=True)

    def add_holder(self, record: VersionRecord, worker: WorkerId, key: LayoutKey) -> None:
        """The worker has some of the version with that key, or is about to."""
        holders = record.holders.setdefault(key, {})
        if worker not in holders:
            holders[worker] = None
            self._held.setdefault(worker, {})[record.version, key] = None
            if worker not in self.read_from:
                insort(record.idle.setdefault(key, []), worker)

    def remove_holder(self, record: VersionRecord, worker: WorkerId, key: LayoutKey) -> None:
        """The worker has nothing of the version with that key any more."""
        holders = record.holders.get(key, {})
        if worker in holders:
            del holders[worker]
            record.refused.pop(worker, None)
            _remove(self._held, worker, (record.version, key))
            if worker not in self.read_from:
                _take_out(record.idle[key], worker)

    def note_load(self, worker: WorkerId, load: int) -> None:
        """Notes how many reads are open on the worker."""
        if (load > 0) == (worker in self.read_from):
            return
        for version, key in self._held.get(worker, ()):
            idle = self.versions[version].idle.setdefault(key, [])
            if load:
                _take_out(idle, worker)
            else:
                insort(idle, worker)
        if load:
            self.read_from[worker] = None
        else:
            del self.read_from[worker]

    def note_layout_set(self, layout_set: LayoutSet) -> None:
        """A replica has that layout set. A partial replica does not count: it holds no version whole."""
        if layout_set not in self.layout_sets and not any(is_partial(key.layout) for key in layout_set):
            self.layout_sets[layout_set] = None
            self._changes += 1
            self.changed.update(dict.fromkeys(self.versions))

    def known_layout_sets(self) -> Collection[LayoutSet]:
        """The layout sets that may hold a version; the plain one while none is known."""
        return self.layout_sets or (plain_layout_set(self.shards),)

    def is_lost(self, record: VersionRecord) -> bool:
        """Each of its layouts lacks a key: no worker that may come back holds it whole."""
        if self.is_listening or not record.exists:
            return False
        return all(any(not record.whole.get(key) for key in layout_set) for layout_set in self.known_layout_sets())

    def news_of_losses(self) -> tuple[list[Version], list[Version]]:
        """(versions that are lost and were not known to be, versions that are back since)."""
        lost: list[Version] = []
        back: list[Version] = []
        former = self.noted.available if self.noted is not None else ()
        newest = max([*former[:1], *self.lost], default=-1)  # what newer ones have replaced may go without a word
        if self.noted is None and self.newest is not None:
            newest = max(newest, self.newest - 1)  # a server before this one may have told of the others
        for version in self.changed:
            record = self.versions.get(version)
            if record is not None and self.is_lost(record):
                is_newer = (self.latest is None or version > self.latest) and (version in former or version > newest)
                if version not in self.lost and is_newer:
                    lost.append(version)
            elif record is not None and version in self.lost:
                back.append(version)
        return lost, back

    def note_losses(self, lost: list[Version], back: list[Version], *, is_told: bool = True) -> None:
        """These losses and returns are known from now on. `is_told`: there is an event of each loss."""
        self.lost.update(dict.fromkeys(lost, is_told))
        for version in back:
            del self.lost[version]

    @property
    def latest(self) -> Version | None:
        """The newest version that exists and is not lost."""
        return next(iter(self.available()), None)

    def available(self) -> tuple[Version, ...]:
        """The versions that exist and are not lost, newest first."""
        key = self._changes, self.is_listening, len(self.layout_sets), self.shards
        if self._known is None or self._known.key != key:
            existing = tuple(version for version in reversed(self._ascending) if self.versions[version].exists)
            found = tuple(version for version in existing if not self.is_lost(self.versions[version]))
            self._known = Known(key, existing, found)
        return self._known.available

    @property
    def newest_established(self) -> Version | None:
        """The version that is not given up before a newer one is as safe."""
        return self.glance().newest_established

    def glance(self) -> "Glance":
        """What follows from all versions together. Found anew only when something of that has changed."""
        self.available()
        key = self._known, self.retain, self.keeps_established
        if self._glance is None or self._glance.key != key:
            self._glance = self._look(key)
        return self._glance

    def _look(self, key: "tuple[Known | None, int, bool]") -> "Glance":
        known = key[0]
        assert known is not None, "a glance at versions before they were looked up"
        existing, available = known.existing, known.available
        established = [v for v in existing if self.keeps_established and self.versions[v].is_established]
        newest_established = next((version for version in established if version in available), None)
        anywhere = dict.fromkeys([*existing[: self.retain], *available[: self.retain]])  # what is lost may be back
        for pins in self.pins.values():
            anywhere.update((each, None) for each in pins if each in self.versions and self.versions[each].exists)
        outliving: dict[Version, None] = {}
        for version in established:  # a version may be lost only because all its holders were away
            outliving[version] = None
            if version == newest_established:
                break
        return Glance(key, available, newest_established, outliving, anywhere, anywhere | outliving)

    def take_place(self, worker: WorkerId, site: str, host: str) -> None:
        """Note that the worker is at this site and on this host."""
        self.sites[site] += 1
        self.hosts.setdefault(host, {})[worker] = None

    def leave_place(self, worker: WorkerId, site: str, host: str) -> None:
        """The worker is there no more."""
        self.sites[site] -= 1
        if not self.sites[site]:
            del self.sites[site]
        del self.hosts[host][worker]
        if not self.hosts[host]:
            del self.hosts[host]

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, and what it wanted with it."""
        self.note_pins(worker, ())
        self.closing.pop(worker, None)
        self.watches.watch(worker, ())

    def is_retained(self, version: Version, retain: int) -> bool:
        """A worker keeps it though it has no room: it is among the newest `retain`, or pinned.

        `retain` is what the server or the worker's own replica keeps. Other replicas do not count.
        """
        self.available()
        known = self._known
        assert known is not None, "they were looked for"
        newest = (*known.existing[:retain], *known.available[:retain])
        return version in newest or any(version in pins for pins in self.pins.values())

    def gives_way(self, version: Version, retain: int) -> bool:
        """It goes where there is no room: only another replica wants it kept."""
        return not self.is_retained(version, retain) and version != self.newest_established

    def retained(self) -> dict[Version, None]:
        """The versions that no voluntary departure may lose: the newest, the newest established, and what is pinned."""
        return self.glance().retained

    def resolve(self, spec: Spec) -> tuple[Version | None, Failure | None]:
        """The version that the spec means now. (None, why) where there is none."""
        version = parse_spec(spec)
        if version is not None:
            record = self.versions.get(version)
            if record is not None and record.exists:
                return (None, self.loss(record)) if self.is_lost(record) else (version, None)
            newest, hint = "nothing was published yet", "replicate(version, wait=True) waits until it is published"
            if self.newest is not None:
                newest = f"its newest version is {self.newest}"
                hint = hint if self.newest < version else 'numbers only rise: replicate("latest") takes the newest'
            return None, Failure("version-unavailable", f"{self.name} has no version {version}; {newest}", hint)
        known = self.available()[: steps_back(str(spec)) + 1]
        if len(known) > steps_back(str(spec)):
            return known[-1], None
        if known:
            text = f"{spec} of {self.name}: only these versions can be had: {', '.join(map(str, known))}"
            return None, Failure("version-unavailable", text, "wait for a newer version")
        if self.newest is not None:
            return None, self.loss(self.record(self.newest))
        return None, Failure("version-unavailable", f"no version of {self.name} yet", "wait for the first publish")

    def loss(self, record: VersionRecord) -> Failure:
        """The error for a call that wants a lost version."""
        missing = [[key for key in layout_set if not record.whole.get(key)] for layout_set in self.known_layout_sets()]
        shards = [str(key.shard) for key in min(missing, key=len)]
        last = f"; {record.last_holder} held it last" if record.last_holder else ""
        text = f"version {record.version} of {self.name} is lost: no worker holds shard {', '.join(shards[:8])}{last}"
        instead = ", or publish it" if self.latest is None else f", or replicate version {self.latest}"
        return Failure("version-unavailable", text, f"wait until a newer version is published{instead}")

    def reached(self, spec: Spec) -> Version | None:
        """What a caller that waits for `spec` gets: that version or a newer one; None while there is none."""
        version = parse_spec(spec)
        if version is None:
            return self.resolve(spec)[0]
        newest = self.latest
        return newest if newest is not None and newest >= version else None

    @property
    def highest_next(self) -> Version:
        """The highest number that may be published next: one publish must not use up the numbers of all after it."""
        return Version(MAX_FIRST_VERSION if self.newest is None else self.newest + MAX_VERSION_JUMP)

    def too_far(self, version: Version) -> Failure | None:
        """Why the number is too high to be published next, or None."""
        if version <= self.highest_next:
            return None
        text = f"version {version} of {self.name} is above {MAX_FIRST_VERSION}, the highest number to begin with"
        if self.newest is not None:
            text = f"version {version} of {self.name} is more than {MAX_VERSION_JUMP} above the newest, {self.newest}"
        hint = "count steps, samples, tokens or milliseconds; another model name begins with numbers of its own"
        return Failure("version-conflict", text, f"publish at most {self.highest_next}: {hint}")

    def conflict(
        self, replica: Replica, version: Version, roots: dict[LayoutKey, Digest], former: Digest = NOT_CUT_ANEW
    ) -> Failure | None:
        """Why the writer may not publish this content under this number, or None.

        `former`: what it published as that before, without boxes; it says that it is the same.
        """
        name, record = f"version {version} of {self.name}", self.versions.get(version)
        if self.newest is not None and version < self.newest:
            text = f"{name} is lower than the newest, {self.newest}"
            return Failure("version-conflict", text, f"versions only rise: {HIGHER}")
        if (failure := self.too_far(version)) is not None:
            return failure
        if version == self.newest and (record is None or not record.exists or not record.roots):
            return Failure("version-conflict", f"{name} has existed, and its content is not known any more", HIGHER)
        if record is not None and record.exists and not is_again(record, replica, roots, former):
            return Failure("version-conflict", f"{name} exists with other content", HIGHER)
        return None

    def why_late(self, version: Version, epoch: Number) -> Failure | None:
        """Why a publish cannot end well that was accepted in that epoch, by this server or one before it."""
        record = self.versions.get(version)
        if record is not None and record.exists and record.epoch == epoch:
            return None
        if self.newest is None or version > self.newest:
            return None
        text = f"version {version} of {self.name} is not higher than the newest, {self.newest}"
        return Failure("version-conflict", f"{text}, which was published meanwhile", f"versions only rise: {HIGHER}")


def is_again(record: VersionRecord, replica: Replica, roots: dict[LayoutKey, Digest], former: Digest) -> bool:
    """The version is published once more with the same content."""
    is_anew = bool(former) and replica.name == record.publisher and is_cut_anew(record.roots, roots, former)
    return is_anew or is_same_content(record.roots, roots)


def is_same_content(known: dict[LayoutKey, Digest], roots: dict[LayoutKey, Digest]) -> bool:
    """These roots are the version's, for layout keys that are known."""
    return all(known.get(key) == root for key, root in roots.items())


def is_cut_anew(known: dict[LayoutKey, Digest], roots: dict[LayoutKey, Digest], former: Digest) -> bool:
    """The version is known without boxes as `former`, and not yet as these are cut: one shard, now with boxes."""
    plain = plain_layout_set(1)[0]
    return known.get(plain) == former and all(key.is_boxed and key not in known for key in roots)


def _take_out(ascending: list[WorkerId], worker: WorkerId) -> None:
    at = bisect_left(ascending, worker)
    assert ascending[at] == worker, f"{worker} is not among the idle"
    del ascending[at]


def _remove(table: dict[WorkerId, dict[Place, None]], worker: WorkerId, place: Place) -> None:
    del table[worker][place]
    if not table[worker]:
        del table[worker]
