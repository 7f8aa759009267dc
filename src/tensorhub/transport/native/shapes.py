"""The structures that Python and the mover both know, field by field as in `mover.h`.

Python owns their memory and fills in what does not change; it keeps all that they point to as long as the library has
them. Fields that the library changes are read here at any time: each is a word that is written in one go.

It must never: differ from `mover.h`. `load` compares the sizes, and the tests the fields.
"""

from ctypes import POINTER, Structure, c_double, c_int32, c_ubyte, c_uint32, c_uint64, c_ulong, c_void_p

MAX_RANGES = 1024
MAX_STOP_FLAGS = 4
MAX_AHEAD = 1024
MAX_WANT_BYTES = 64 * 1024
MAX_BATCH_BYTES = 1 << 30
NOTHING = (1 << 64) - 1
IS_SENT, IS_KEPT = 1, 2  # flags of a batch
WORDS_BYTES = 16 + 3 + MAX_RANGES * 19

# How a stream or a conversation ended.
(DONE, OVER, VANISHED, SILENT, GARBLED, SAID_GONE, CORRUPT, UNTRUSTED, LOST, UNREADABLE, ENDED, FAILED, NEEDS_PIPE) = (
    range(13)
)
WAIT_FOR_LEAVE, MAY_WRITE, MAY_NOT_WRITE = range(3)
ASKS_LEAVE, IS_FAST, HAS_NEWS, HAS_ENDED, IS_WHOLE = 1, 2, 4, 8, 16


def _of(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    """Fields of one type that follow each other."""
    return tuple((name, kind) for name in names.split())


class StopFlag(Structure):
    """Set once, for good."""

    _fields_ = _of(c_uint32, "is_set inside")


class Marks(Structure):
    """Which chunks are there."""

    _fields_ = (
        ("have", c_void_p),
        *_of(c_uint64, "count prefix"),
        *_of(c_uint32, "changed waiters has_failed unused"),
    )


class Loop(Structure):
    """Two loops around a run of bytes."""

    _fields_ = _of(c_uint64, "count stride counts strides")


class Table(Structure):
    """Where the bytes of a stream lie."""

    _fields_ = (*_of(c_void_p, "pairs starts"), *_of(c_uint64, "count size"), ("loops", c_void_p))


class Large(Structure):
    """Memory that others map, and of which of its large pages the kernel was asked for."""

    _fields_ = (*_of(c_uint64, "address size"), ("asked", c_void_p), *_of(c_uint32, "is_refused unused"))


class Keep(Structure):
    """Part of a batch in scratch memory, and where it is kept."""

    _fields_ = _of(c_uint64, "from to run count from_stride to_stride counts from_strides to_strides")


class Batches(Structure):
    """What a reader wants of a stream, batch by batch."""

    _fields_ = (
        *_of(c_void_p, "bounds flags"),
        ("count", c_uint64),
        *_of(c_void_p, "first_row needs first_tile tiles first_keep keeps first_turn turns"),
    )


class ReadState(Structure):
    """What the streams of one read share."""

    _fields_ = (
        ("ours", Table),
        ("chunk_bytes", c_uint64),
        ("wanted", c_void_p),
        ("wanted_count", c_uint64),
        ("digests", c_void_p),
        ("batches", POINTER(Batches)),
        ("progress", POINTER(Marks)),
        ("stop_flags", c_void_p * MAX_STOP_FLAGS),
        ("until", c_void_p),
        ("large", POINTER(Large)),
        ("doubted", c_void_p),
        *_of(c_double, "ahead_s fast_bytes_per_s tell_s"),
        *_of(c_uint64, "ahead_first max_ahead tile_bytes"),
        *_of(c_uint32, "lock streams"),
        ("next", c_uint64),
        *_of(c_uint32, "is_over events may_write is_lent_to"),
        *_of(c_uint64, "received_bytes received_chunks stored_chunks stored_bytes"),
        ("tell_at", c_double),
    )


class DigestState(Structure):
    """A digest of bytes that come piece by piece."""

    _fields_ = (
        ("lanes", c_uint64 * 8),
        *_of(c_uint64, "size seen stripes taken"),
        ("held", c_ubyte * 240),
        ("last", c_ubyte * 64),
    )


class StreamState(Structure):
    """One connection of a read."""

    _fields_ = (
        ("read", POINTER(ReadState)),
        *_of(c_int32, "descriptor is_local pid pidfd is_mapped is_hashing"),
        ("theirs", Table),
        ("seal_address", c_uint64),
        ("seal", c_ubyte * 16),
        ("scratch", c_void_p),
        *_of(c_int32, "status error"),
        *_of(c_uint64, "kind length number chunk tile heard_bytes read_bytes ready ready_count ahead first count"),
        ("asked", c_uint64 * MAX_AHEAD),
        ("asked_at", c_double * MAX_AHEAD),
        *_of(c_int32, "is_lent is_bridging is_judging_speed is_started"),
        *_of(c_uint32, "index unused"),
        ("digest", DigestState),
        ("thread", c_ulong),
        ("words", c_ubyte * WORDS_BYTES),
    )


class ServeState(Structure):
    """One connection of a source."""

    _fields_ = (
        ("table", Table),
        *_of(c_uint64, "chunk_bytes chunk_count"),
        ("batches", POINTER(Batches)),
        ("progress", POINTER(Marks)),
        ("ended", POINTER(StopFlag)),
        *_of(c_int32, "descriptor is_announcing"),
        ("keepalive_s", c_double),
        ("lent", c_void_p),
        *_of(c_int32, "may_lend pipe_in pipe_out is_fast"),
        *_of(c_double, "lend_bytes_per_s window_began"),
        *_of(c_uint64, "lend_piece_bytes window_bytes"),
        *_of(c_int32, "status error"),
        *_of(c_uint64, "kind length number sent_bytes sent_chunks lent_bytes range_count range_next at"),
        ("idle_since", c_double),
        ("ranges", c_uint64 * (2 * MAX_RANGES)),
        ("words", c_ubyte * MAX_WANT_BYTES),
    )


class OffloadState(Structure):
    """Chunks that are copied inside this process."""

    _fields_ = (
        *_of(Table, "source into"),
        *_of(c_uint64, "chunk_bytes tile_bytes"),
        ("digests", c_void_p),
        ("large", POINTER(Large)),
        *_of(c_uint64, "next stop"),
        *_of(c_uint32, "threads has_failed"),
        *_of(c_int32, "status error"),
        *_of(c_uint64, "chunk at"),
    )


ALL: tuple[type[Structure], ...] = (
    *(StopFlag, Marks, Table, ReadState, StreamState, ServeState, DigestState),
    *(Loop, Keep, Batches, OffloadState, Large),
)
