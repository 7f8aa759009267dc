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


class StopFlag(Structure):
    """Set once, for good."""

    _fields_ = (("is_set", c_uint32), ("inside", c_uint32))


class Marks(Structure):
    """Which chunks are there."""

    _fields_ = (
        ("have", c_void_p),
        ("count", c_uint64),
        ("prefix", c_uint64),
        ("changed", c_uint32),
        ("waiters", c_uint32),
        ("has_failed", c_uint32),
        ("unused", c_uint32),
    )


class Loop(Structure):
    """Two loops around a run of bytes."""

    _fields_ = (("count", c_uint64), ("stride", c_uint64), ("counts", c_uint64), ("strides", c_uint64))


class Table(Structure):
    """Where the bytes of a stream lie."""

    _fields_ = (
        ("pairs", c_void_p),
        ("starts", c_void_p),
        ("count", c_uint64),
        ("size", c_uint64),
        ("loops", c_void_p),
    )


class Large(Structure):
    """Memory that others map, and of which of its large pages the kernel was asked for."""

    _fields_ = (
        ("address", c_uint64),
        ("size", c_uint64),
        ("asked", c_void_p),
        ("is_refused", c_uint32),
        ("unused", c_uint32),
    )


class Keep(Structure):
    """Part of a batch in scratch memory, and where it is kept."""

    _fields_ = (
        ("from", c_uint64),
        ("to", c_uint64),
        ("run", c_uint64),
        ("count", c_uint64),
        ("from_stride", c_uint64),
        ("to_stride", c_uint64),
        ("counts", c_uint64),
        ("from_strides", c_uint64),
        ("to_strides", c_uint64),
    )


class Batches(Structure):
    """What a reader wants of a stream, batch by batch."""

    _fields_ = (
        ("bounds", c_void_p),
        ("flags", c_void_p),
        ("count", c_uint64),
        ("first_row", c_void_p),
        ("needs", c_void_p),
        ("first_tile", c_void_p),
        ("tiles", c_void_p),
        ("first_keep", c_void_p),
        ("keeps", c_void_p),
        ("first_turn", c_void_p),
        ("turns", c_void_p),
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
        ("ahead_s", c_double),
        ("fast_bytes_per_s", c_double),
        ("tell_s", c_double),
        ("ahead_first", c_uint64),
        ("ahead_most", c_uint64),
        ("tile_bytes", c_uint64),
        ("lock", c_uint32),
        ("streams", c_uint32),
        ("next", c_uint64),
        ("is_over", c_uint32),
        ("events", c_uint32),
        ("may_write", c_uint32),
        ("is_lent_to", c_uint32),
        ("received_bytes", c_uint64),
        ("received_chunks", c_uint64),
        ("stored_chunks", c_uint64),
        ("stored_bytes", c_uint64),
        ("tell_at", c_double),
    )


class DigestState(Structure):
    """A digest of bytes that come piece by piece."""

    _fields_ = (
        ("lanes", c_uint64 * 8),
        ("size", c_uint64),
        ("seen", c_uint64),
        ("stripes", c_uint64),
        ("taken", c_uint64),
        ("held", c_ubyte * 240),
        ("last", c_ubyte * 64),
    )


class StreamState(Structure):
    """One connection of a read."""

    _fields_ = (
        ("read", POINTER(ReadState)),
        ("descriptor", c_int32),
        ("is_local", c_int32),
        ("pid", c_int32),
        ("pidfd", c_int32),
        ("is_mapped", c_int32),
        ("is_hashing", c_int32),
        ("theirs", Table),
        ("seal_address", c_uint64),
        ("seal", c_ubyte * 16),
        ("scratch", c_void_p),
        ("status", c_int32),
        ("error", c_int32),
        ("kind", c_uint64),
        ("length", c_uint64),
        ("number", c_uint64),
        ("chunk", c_uint64),
        ("tile", c_uint64),
        ("heard_bytes", c_uint64),
        ("read_bytes", c_uint64),
        ("ready", c_uint64),
        ("ready_count", c_uint64),
        ("ahead", c_uint64),
        ("first", c_uint64),
        ("count", c_uint64),
        ("asked", c_uint64 * MAX_AHEAD),
        ("asked_at", c_double * MAX_AHEAD),
        ("is_lent", c_int32),
        ("is_bridging", c_int32),
        ("is_judging_speed", c_int32),
        ("is_started", c_int32),
        ("index", c_uint32),
        ("unused", c_uint32),
        ("digest", DigestState),
        ("thread", c_ulong),
        ("words", c_ubyte * WORDS_BYTES),
    )


class ServeState(Structure):
    """One connection of a source."""

    _fields_ = (
        ("table", Table),
        ("chunk_bytes", c_uint64),
        ("chunk_count", c_uint64),
        ("batches", POINTER(Batches)),
        ("progress", POINTER(Marks)),
        ("ended", POINTER(StopFlag)),
        ("descriptor", c_int32),
        ("is_announcing", c_int32),
        ("keepalive_s", c_double),
        ("lent", c_void_p),
        ("may_lend", c_int32),
        ("pipe_in", c_int32),
        ("pipe_out", c_int32),
        ("is_fast", c_int32),
        ("lend_bytes_per_s", c_double),
        ("window_began", c_double),
        ("lend_piece_bytes", c_uint64),
        ("window_bytes", c_uint64),
        ("status", c_int32),
        ("error", c_int32),
        ("kind", c_uint64),
        ("length", c_uint64),
        ("number", c_uint64),
        ("sent_bytes", c_uint64),
        ("sent_chunks", c_uint64),
        ("lent_bytes", c_uint64),
        ("range_count", c_uint64),
        ("range_next", c_uint64),
        ("at", c_uint64),
        ("idle_since", c_double),
        ("ranges", c_uint64 * (2 * MAX_RANGES)),
        ("words", c_ubyte * MAX_WANT_BYTES),
    )


class OffloadState(Structure):
    """Chunks that are copied inside this process."""

    _fields_ = (
        ("source", Table),
        ("into", Table),
        ("chunk_bytes", c_uint64),
        ("tile_bytes", c_uint64),
        ("digests", c_void_p),
        ("large", POINTER(Large)),
        ("next", c_uint64),
        ("stop", c_uint64),
        ("threads", c_uint32),
        ("has_failed", c_uint32),
        ("status", c_int32),
        ("error", c_int32),
        ("chunk", c_uint64),
        ("at", c_uint64),
    )


ALL: tuple[type[Structure], ...] = (
    *(StopFlag, Marks, Table, ReadState, StreamState, ServeState, DigestState),
    *(Loop, Keep, Batches, OffloadState, Large),
)
