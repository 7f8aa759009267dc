"""The server's journal: what it has promised to which workers, in a small file that outlives it.

The journal tells a restarted server which workers may still live, which versions were published, and which replica is
the writer of each model. Everything else the workers report.

Rules:
- Records are only appended. Each is written before the orders that depend on it are sent.
- A record is its length and its CRC-32 (both 4 bytes, little-endian), then MessagePack. The first one is `Begun`.
- Records of the page cache survive the server's process and not its machine. So a journal of another boot says what was
  published, and not which workers live.
- A journal that is torn, or older than what a worker has heard, counts for nothing: the server listens for a lease.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from ..protocol.names import ModelName, Number, ReplicaName, Shard, Version, WorkerId

FORMAT = 1
_FRAME = struct.Struct("<II")
MAX_RECORD_BYTES = 4096  # names have 200 characters


class _Record(msgspec.Struct, frozen=True, array_like=True):
    pass


class Begun(_Record, frozen=True, tag="begun"):
    """A life of the server has begun. `boot` names the machine's boot: its page cache has what was not synced.

    It is empty while the server does not know which workers live.
    """

    format: int
    number: Number
    boot: str


class Joined(_Record, frozen=True, tag="joined"):
    """A session has begun. `former` is the one that its worker had before, perhaps with a former life."""

    model: ModelName
    replica: ReplicaName
    shard: Shard
    session: Number
    former: Number = Number(0)

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.model, self.replica, self.shard)


class Over(_Record, frozen=True, tag="over"):
    """The session of that worker is over, and those before it."""

    model: ModelName
    replica: ReplicaName
    shard: Shard
    session: Number


class Writes(_Record, frozen=True, tag="writes"):
    """The replica is the writer of its model."""

    model: ModelName
    replica: ReplicaName
    number: Number


class Published(_Record, frozen=True, tag="published"):
    """The publish of that version has ended well on all shards."""

    model: ModelName
    version: Version
    epoch: Number
    replica: ReplicaName


class Established(_Record, frozen=True, tag="established"):
    """All of that version is held outside its publisher."""

    model: ModelName
    version: Version


class Anew(_Record, frozen=True, tag="anew"):
    """The model was begun anew: versions with a lower epoch do not count."""

    model: ModelName
    number: Number


class Forgotten(_Record, frozen=True, tag="forgotten"):
    """No worker is of the model, and another model has its place."""

    model: ModelName


Record = Begun | Joined | Over | Writes | Published | Established | Anew | Forgotten

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Record)


# One process of a worker, by the sessions that it may name: it may not have heard of the latest ones.
Sessions = list[Number]


@dataclass
class ModelHistory:
    """What a journal says of one model."""

    sessions: dict[WorkerId, list[Sessions]] = field(default_factory=dict)  # processes that may still live
    writer: Writes | None = None
    versions: dict[Version, Published] = field(default_factory=dict)  # the latest, oldest first
    established: Version | None = None
    began: Number = Number(0)

    def join(self, record: Joined) -> None:
        """A session begins: of a process that had one before, if it names that."""
        processes = self.sessions.setdefault(record.worker, [])
        for numbers in processes:
            if record.former in numbers:
                numbers.append(record.session)
                return
        processes.append([record.session])

    def end(self, record: Over) -> None:
        """A session ends. The writer is none any more when its last one has ended."""
        worker = WorkerId(record.model, record.replica, record.shard)
        left = [numbers for numbers in self.sessions.pop(worker, []) if record.session not in numbers]
        if left:
            self.sessions[worker] = left
        is_writer = self.writer is not None and self.writer.replica == record.replica
        if is_writer and all(each.replica != record.replica for each in self.sessions):
            self.writer = None

    def records(self, name: ModelName) -> Iterator[Record]:
        """The same in as few records as it takes."""
        if self.began:
            yield Anew(name, self.began)
        for worker, processes in self.sessions.items():
            for numbers in processes:
                formers = [Number(0), *numbers[:-1]]
                yield from (Joined(*worker, each, former) for each, former in zip(numbers, formers, strict=True))
        if self.writer is not None:
            yield self.writer
        yield from self.versions.values()
        if self.established is not None:
            yield Established(name, self.established)


@dataclass
class History:
    """What a journal says."""

    is_whole: bool = True  # true if no record is torn, and it tells which workers may live
    boot: str | None = None  # of the machine, as the latest life says
    last: Number = Number(0)  # the highest number in it
    models: dict[ModelName, ModelHistory] = field(default_factory=dict)

    def take(self, record: Record, *, max_versions: int) -> None:
        """Take in the next record."""
        if isinstance(record, Begun):
            self.boot, self.last = record.boot, max(self.last, record.number)
            return
        if isinstance(record, Forgotten):
            self.models.pop(record.model, None)
            return
        model = self.models.setdefault(record.model, ModelHistory())
        match record:
            case Joined(session=number):
                model.join(record)
            case Over(session=number):
                model.end(record)
            case Writes(number=number):
                model.writer = record
            case Published(version=version, epoch=number):
                model.versions.pop(version, None)
                model.versions[version] = record
                while len(model.versions) > max_versions:
                    del model.versions[next(iter(model.versions))]
            case Established(version=version):
                model.established, number = version, Number(0)
            case Anew(number=number):
                model.versions, model.established, model.began = {}, None, number
        self.last = max(self.last, number)


def encoded(records: Iterable[Record]) -> bytes:
    """The records as the journal has them."""
    found = bytearray()
    for record in records:
        body = _encode(record)
        found += _FRAME.pack(len(body), zlib.crc32(body)) + body
    return bytes(found)


def history_of(data: bytes, *, boot: str, max_versions: int) -> History | None:
    """What a journal says that is read in that boot of the machine; None for one that says nothing."""
    found, at = History(), 0
    while at < len(data):
        record, at = _record_at(data, at)
        if record is None or (isinstance(record, Begun) and record.format != FORMAT):
            found.is_whole = False
            break
        if found.boot is None and not isinstance(record, Begun):
            return None
        found.take(record, max_versions=max_versions)
    if found.boot is None:
        return None
    found.is_whole &= bool(boot) and found.boot == boot
    return found


def begins_a_journal(data: bytes) -> bool:
    """The first bytes of a file are those of a journal."""
    return isinstance(_record_at(data, 0)[0], Begun)


def _record_at(data: bytes, at: int) -> tuple[Record | None, int]:
    """The record that begins there, and where the next one begins. None: it is torn."""
    begin = at + _FRAME.size
    if begin > len(data):
        return None, at
    length, check = _FRAME.unpack_from(data, at)
    body = data[begin : begin + length]
    if length > MAX_RECORD_BYTES or len(body) < length or zlib.crc32(body) != check:
        return None, at
    try:
        return _decoder.decode(body), begin + length
    except msgspec.MsgspecError:
        return None, at
