"""Versions of each model: their content, their holders, and the receipts that a later server recognises."""

import hmac
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from ..protocol.errors import HIGHER
from ..protocol.messages import MAX_FIRST_VERSION, MAX_VERSION_JUMP, Failure, Spec, parse_spec, steps_back
from ..protocol.names import Digest, ModelName, Number, ReplicaName, Shard, Version, WorkerId, is_partial
from .groups import Replica
from .members import (
    BufferHolders,
    Content,
    LayoutKey,
    LayoutSet,
    Place,
    Roll,
    Tier,
    Watches,
    plain_layout_set,
)

# --- Receipts: what a reference server has said, in a form that a later life of it recognises.
#
# The server remembers nothing over a restart; the workers tell it. Most of what they tell needs no proof. Four things
# do: which content a version number stands for where two workers differ, its publisher and whether it was
# established; how high version numbers have come; how high the server's own numbers have come; and which sessions live.
# For these a worker carries the server's receipt: a keyed hash (BLAKE2b, RFC 7693). The key is random, only the
# server knows it, and it outlives the process. A worker without a receipt is believed as long as no worker with a
# receipt contradicts it.


NOT_CUT_ANEW = Digest("")
MAX_REMEMBERED = 4096  # receipts for content: a version of a few thousand shards
ESTABLISHED = "+"  # a receipt of an established version begins with it
SIZE = 12  # bytes: 96 bits cannot be guessed in a fleet's life


class Notary:
    """Signs: each method says what its receipt states."""

    def __init__(self, key: bytes = b"") -> None:
        """`key`: the same for all lives of one cluster's server; any length."""
        self._key = blake2b(key, digest_size=32, person=b"tensorhub").digest()
        self._contents: dict[tuple[object, ...], str] = {}  # all replicas have the same ones
        # All orders carry the same one for a while.
        self._newest: dict[ModelName, tuple[tuple[Version | None, int], str]] = {}

    def content(
        self,
        model: ModelName,
        version: Version,
        shard: Shard,
        root: Digest,
        publisher: str = "",
        *,
        is_established: bool = False,
    ) -> str:
        """This is what that shard of the version was published as, by all shards of a replica: of that one, if known.

        `is_established`: and the version was established. The receipt says that in plain (`says_established`) and
        names the publisher (`publisher_in`).
        """
        what = is_established, publisher, model, version, shard, root
        receipt = self._contents.get(what)
        if receipt is None:
            if len(self._contents) >= MAX_REMEMBERED:
                self._contents.clear()
            purpose, mark = ("established", ESTABLISHED) if is_established else ("content", "")
            signed = self._sign(purpose, model, version, shard, root, *([publisher] if publisher else []))
            receipt = self._contents[what] = f"{mark}{signed}:{publisher}" if publisher else f"{mark}{signed}"
        return receipt

    def newest(self, model: ModelName, version: Version | None, era: int = 0) -> str:
        """A version of that number has existed, since the model was begun anew for the `era`-th time, if it was.

        The receipt says the era in plain (`era_in`). Where it is above 0, that there is no version yet is signed too.
        """
        if version is None and not era:
            return ""
        made_for, receipt = self._newest.get(model, ((None, 0), ""))
        if made_for != (version, era):
            signed = self._sign("newest", model, version, *([era] if era else []))
            receipt = f"{signed}:{era}" if era else signed
            self._newest[model] = ((version, era), receipt)
        return receipt

    def forget(self, model: ModelName) -> None:
        """Nothing is said of the model any more."""
        self._newest.pop(model, None)

    def ceiling(self, number: Number) -> str:
        """No number above this one was ever given out."""
        return self._sign("ceiling", number)

    def roster(self, model: ModelName, number: Number, count: int, digest: str) -> str:
        """Signs how many sessions of the model live, and their sum."""
        return self._sign("roster", model, number, count, digest)

    def session(self, worker: WorkerId, session: Number) -> int:
        """What one session adds to that sum."""
        return int(self._sign("session", *worker, session), 16)

    def _sign(self, *parts: object) -> str:
        text = "\0".join(map(str, parts)).encode()
        return blake2b(text, key=self._key, digest_size=SIZE).hexdigest()


def publisher_in(receipt: str) -> str:
    """The replica that a receipt for content names as its publisher; empty if it names none. To be verified."""
    return receipt.partition(":")[2]


def says_established(receipt: str) -> bool:
    """The receipt for content says that its version was established. To be verified."""
    return receipt.startswith(ESTABLISHED)


def are_equal(one: str, other: str) -> bool:
    """Compare them in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


# --- What the server believes of one version: its content, its holders, and the replicas that are to get it.


class Taken(NamedTuple):
    """What all shards of a replica said that they have published, and what the version was taken for by that."""

    publisher: ReplicaName
    roots: dict[LayoutKey, Digest]


@dataclass
class VersionRecord:
    """One version: its content by layout key, and the workers that have any of it."""

    version: Version
    exists: bool = False
    roots: dict[LayoutKey, Digest] = field(default_factory=dict)
    layouts: dict[LayoutKey, Digest] = field(default_factory=dict)
    holders: dict[LayoutKey, dict[WorkerId, None]] = field(default_factory=dict)  # holding, withdrawing or filling
    whole: dict[LayoutKey, dict[WorkerId, None]] = field(default_factory=dict)  # holders that have all of it
    idle: dict[LayoutKey, list[WorkerId]] = field(default_factory=dict)  # holders without readers, by name
    refused: dict[WorkerId, float] = field(default_factory=dict)  # sources of wrong bytes, and until when that counts
    publishers: dict[ReplicaName, None] = field(default_factory=dict)  # replicas that have published it, or half of it
    proved: dict[LayoutKey, None] = field(default_factory=dict)  # shown by a receipt, or seen by this server
    named: dict[ReplicaName, None] = field(default_factory=dict)  # those of them that are known to have ended that well
    is_unsettled: bool = False  # one more is named: whose publish never finished is looked at again
    disputed: dict[LayoutKey, None] = field(default_factory=dict)  # found to have other content than was believed
    keepers: dict[LayoutKey, WorkerId] = field(default_factory=dict)  # outside its publishers, since it is established
    is_established: bool = False  # each shard has been whole outside its publishers
    claims: dict[ReplicaName, None] = field(default_factory=dict)  # replicas whose publish of it has not ended
    accepted: dict[ReplicaName, dict[LayoutKey, Digest]] = field(
        default_factory=dict
    )  # those that this server has let publish it, and what content
    taken: Taken | None = None  # content accepted without a receipt, while a worker has any of it
    promised: dict[ReplicaName, None] = field(default_factory=dict)  # replicas whose fill with it has not ended
    last_holder: str = ""
    rates: dict[Tier, dict[WorkerId, float]] = field(default_factory=dict)  # the best ones of its last readers
    cross_site_bytes: dict[str, int] = field(default_factory=dict)  # by site: what has come into it from others

    @property
    def is_idle(self) -> bool:
        return not self.claims and not self.promised and not any(self.holders.values())

    def note_rate(self, tier: Tier, reader: WorkerId, rate: float, max_readers: int) -> None:
        """The reader reads it at that rate."""
        rates = self.rates.setdefault(tier, {})
        rates[reader] = max(rate, rates.pop(reader, 0.0))  # newest last
        if len(rates) > max_readers:
            del rates[next(iter(rates))]

    def note_published(self, keys: Iterable[LayoutKey], by: ReplicaName) -> None:
        """The replica has finished its publish, which proves the content of these keys."""
        self.proved.update(dict.fromkeys(keys))
        self.note_named(by)

    def note_named(self, publisher: ReplicaName) -> None:
        """The replica has finished its publish."""
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
    newest_established: Version | None
    outliving: dict[Version, None]  # that one, and those established after it that are lost: kept outside publishers
    anywhere: dict[Version, None]  # the newest `retain`, of all and of those that are not lost, and what is pinned
    retained: dict[Version, None]  # all that are kept


# --- What the server believes of one model: which versions exist, their content, and their holders.
#
# A version *exists* once all shards of one replica have published it. From then on it is known as long as the table has
# room, held or not, so that its number cannot be used for other content. It is *lost* while no layout set has a whole
# holder with a session for each of its keys. `latest` is the newest version that exists and is not lost: only a loss
# takes it back.


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
    era: int = 0  # how often its numbers were forgotten, as far as is known
    roll: Roll = field(default_factory=Roll)  # its living sessions
    is_listening: bool = False  # for a lease after a restart: nothing counts as lost
    keeps_established: bool = True
    retain: int = 0  # the most that the server or a reliable worker wishes
    pins: dict[WorkerId, tuple[Version, ...]] = field(default_factory=dict)
    closing: dict[WorkerId, None] = field(default_factory=dict)  # members that want to leave
    sites: Counter[str] = field(default_factory=Counter)  # members by site
    hosts: dict[str, dict[WorkerId, None]] = field(default_factory=dict)  # the members of each host
    reliable: dict[LayoutKey, dict[WorkerId, None]] = field(default_factory=dict)  # members that count for retention
    buffer_holders: BufferHolders = field(default_factory=BufferHolders)
    watches: Watches = field(default_factory=Watches)  # what each member waits for
    changed: dict[Version, None] = field(default_factory=dict)  # versions whose whole holders have changed
    lost: dict[Version, None] = field(default_factory=dict)  # those last said to be lost
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

    def begin_anew(self, era: int) -> None:
        """Its numbers are forgotten, but for what workers hold."""
        self.era = era
        self.versions = {v: record for v, record in self.versions.items() if any(record.holders.values())}
        self._ascending = sorted(self.versions)
        self.newest = max((v for v, record in self.versions.items() if record.exists), default=None)
        self.changed, self.lost, self.noted = dict.fromkeys(self.versions), {}, None
        self._changes += 1
        self._known = self._glance = None

    def note_exists(self, version: Version) -> bool:
        """The version has come into being, or was heard of. Returns whether that is news."""
        record = self.record(version)
        is_news = not record.exists
        record.exists = True
        if is_news:
            self.changed[version] = None
            self._changes += 1
        self.newest = version if self.newest is None else max(self.newest, version)
        return is_news

    def bind_content(self, worker: WorkerId, version: Version, key: LayoutKey, root: Digest, layout: Digest) -> bool:
        """The worker has the version with this content. False: the version's content is another one.

        It counts as a holder at once: what it has beside that may take the room of an unused version.
        """
        record = self.record(version)
        if record.roots.setdefault(key, root) != root:
            return False
        record.layouts.setdefault(key, layout)
        self.add_holder(record, worker, key)
        return True

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
        """(versions that are lost and were not said to be, versions that are back since)."""
        lost: list[Version] = []
        back: list[Version] = []
        former = self.noted.available if self.noted is not None else ()
        newest = max([*former[:1], *self.lost], default=-1)  # what newer ones have replaced may go without a word
        for version in self.changed:
            record = self.versions.get(version)
            if record is not None and self.is_lost(record):
                is_newer = (self.latest is None or version > self.latest) and (version in former or version > newest)
                if version not in self.lost and is_newer:
                    lost.append(version)
            elif record is not None and version in self.lost:
                back.append(version)
        return lost, back

    def note_said(self, lost: list[Version], back: list[Version]) -> None:
        """These losses and returns have been said."""
        self.lost.update(dict.fromkeys(lost))
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
        """The worker is there now."""
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

    def awaited(self, spec: Spec) -> Version | None:
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
        """Why the replica may not publish this content under this number, or None.

        `former`: what it published as that before, without boxes; it says that it is the same.
        """
        name, record = f"version {version} of {self.name}", self.versions.get(version)
        is_same = record is not None and is_same_content(record.roots, roots)
        if record is not None and former and replica.name in record.publishers:
            is_same = is_same or is_cut_anew(record.roots, roots, former)
        if self.newest is not None and version < self.newest:
            text = f"{name} is lower than the newest, {self.newest}"
            return Failure("version-conflict", text, f"versions only rise: {HIGHER}")
        if (failure := self.too_far(version)) is not None:
            return failure
        if record is not None and record.exists and not is_same:
            return Failure("version-conflict", f"{name} exists with other content", HIGHER)
        if record is not None and not record.exists and not is_same:
            others = [str(name) for name in record.claims if name != replica.name]
            others += [str(w) for held in record.holders.values() for w in held if w.replica != replica.name]
            if others:
                text = f"{name} is, or was in part, published with other content by {others[0]}"
                hint = "one replica publishes a number, or all of them the same content"
                return Failure("version-conflict", text, hint)
        return None


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
