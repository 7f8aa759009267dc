"""Reads whose bytes the native mover brings."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, le, mul

from ...protocol.manifest import DIGEST_BYTES, chunk_count
from ..base import ByteStream, Sink, Terms, Trusting
from ..ranges import COUNT, COUNTS, ROW_WORDS, RUN, BadRow, Batches, Rows, Scatter, bare_addresses, placed, table_of
from ..sealed import large_of
from ..tcp.settings import TcpSettings
from . import load, shapes

# --- Where the bytes of a read belong, as the mover sees it: each number is checked here.


KEEP_WORDS = 9  # from, to, run, count, and its strides; counts, and its strides
FROM, TO = (0, 2, 3, 4, 6, 7), (1, 2, 3, 5, 6, 8)  # of a keep, what is a row on either side


@dataclass(frozen=True, eq=False, repr=False)
class Goal:
    """Where a read's bytes belong. Holds that memory."""

    table: shapes.Table
    count: int  # of chunks, or batches
    chunk_bytes: int  # of one of them, about
    digest_count: int
    held: object
    batches: shapes.Batches | None = None
    scratch_bytes: int = 0  # that each stream needs
    large: "ctypes._Pointer[shapes.Large] | None" = None  # what all of it lies in


def goal_of_batches(terms: Terms, batches: Batches) -> Goal | None:
    """Of a read of pieces. None where something does not fit: Python finds out what."""
    scatter = terms.scatter
    if scatter is None or not _fits(scatter, batches):
        return None
    spans = zip(pairwise(batches.bounds), scatter.is_kept, strict=True)
    scratch_bytes = max((stop - start for (start, stop), is_kept in spans if is_kept), default=0)
    ours, keeps = placed(scatter.ours, scatter.stream), _placed_keeps(scatter.keeps, scatter.stream, scratch_bytes)
    if ours is None or keeps is None or not _are_within(scatter.reorder_rows, scratch_bytes):
        return None
    both = zip(batches.flags, scatter.is_kept, strict=True)
    flags = bytes(flag | shapes.IS_KEPT if is_kept else flag for flag, is_kept in both)
    held_flags = ctypes.create_string_buffer(flags, len(flags))
    state = shapes.Batches(
        bounds=batches.bounds.buffer_info()[0],
        flags=ctypes.addressof(held_flags),
        count=len(batches),
        first_tile=scatter.first_tile.buffer_info()[0],
        tiles=scatter.tiles.buffer_info()[0],
        first_keep=scatter.first_keep.buffer_info()[0],
        keeps=keeps.buffer_info()[0],
        first_turn=scatter.first_reorder_row.buffer_info()[0],
        turns=scatter.reorder_rows.buffer_info()[0],
    )
    return Goal(
        table=ours.table,
        count=len(batches),
        chunk_bytes=max(1, batches.size_bytes // max(1, len(batches))),
        digest_count=len(scatter.tiles) - 1,
        held=(ours, keeps, held_flags, scatter, batches),
        batches=state,
        scratch_bytes=scratch_bytes,
        large=large_of(addresses) if (addresses := bare_addresses(scatter.stream)) is not None else None,
    )


def _fits(scatter: Scatter, batches: Batches) -> bool:
    """Batches are made of whole tiles and lie in rows, or are kept; and keeps belong to batches."""
    count, tiles = len(batches), scatter.tiles
    if {len(scatter.first_tile), len(scatter.first_keep)} != {count + 1} or len(scatter.is_kept) != count or not tiles:
        return False
    numbers = (scatter.first_tile, scatter.first_keep, scatter.first_reorder_row, tiles)
    if not all(all(map(le, row, row[1:])) for row in numbers):
        return False
    if scatter.first_tile[-1] != len(tiles) - 1 or scatter.first_keep[-1] * KEEP_WORDS != len(scatter.keeps):
        return False
    if len(scatter.first_reorder_row) != len(tiles) or scatter.first_reorder_row[-1] * ROW_WORDS != len(
        scatter.reorder_rows
    ):
        return False
    if not all(tiles[tile] == at for tile, at in zip(scatter.first_tile, batches.bounds, strict=True)):
        return False
    placed_whole = zip(pairwise(batches.bounds), scatter.is_kept, strict=True)
    return _stretches(scatter.ours) == _joined([span for span, is_kept in placed_whole if not is_kept])


def _stretches(rows: Rows) -> list[tuple[int, int]]:
    """Which bytes of the stream that they make have a place in one of these rows."""
    runs, counts, outer = (rows.words[column::ROW_WORDS] for column in (RUN, COUNT, COUNTS))
    stops = map(add, rows.starts, map(mul, map(mul, runs, counts), outer))
    return _joined(list(zip(rows.starts, stops, strict=False)))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins adjacent spans, so that the same bytes need fewer of them."""
    if not spans:
        return []
    gaps = [at for at, (one, other) in enumerate(pairwise(spans), start=1) if one[1] != other[0]]
    return [(spans[first][0], spans[last - 1][1]) for first, last in pairwise([0, *gaps, len(spans)])]


def _are_within(rows: "array[int]", size_bytes: int) -> bool:
    try:
        Rows.checked(rows, size_bytes)
    except (BadRow, OverflowError):
        return False
    return True


def _placed_keeps(keeps: "array[int]", stream: ByteStream, scratch_bytes: int) -> "array[int] | None":
    """Replaces offsets by addresses to copy to. None if one lies outside scratch memory, or outside a piece."""
    found = array("Q", keeps)
    if not _are_within(_side(found, FROM), scratch_bytes):
        return None
    try:
        theirs = Rows.checked(_side(found, TO), stream.size_bytes)
    except (BadRow, OverflowError):
        return None
    there = placed(theirs, stream)
    if there is None:
        return None
    found[1::KEEP_WORDS] = there.addresses
    return found


def _side(keeps: "array[int]", columns: Sequence[int]) -> "array[int]":
    words = array("Q", bytes(8 * ROW_WORDS * (len(keeps) // KEEP_WORDS)))
    for at, column in enumerate(columns):
        words[at::ROW_WORDS] = keeps[column::KEEP_WORDS]
    return words


# --- A read whose bytes the mover brings: what Python prepares for it, and what it asks and tells meanwhile.
#
# Python has greeted the source, fetched the manifest and asked the sink for its terms. The mover's threads then do what
# `Stream.pump` does, and look at the terms' stop flags before each chunk counts. The read's first thread permits the
# first byte, opens more streams, and tells the sink of news at most every 50 ms. Memory that the mover is given lives
# until the last stream has ended.


TELL_EVERY_S = 0.05  # 20 times a second
WAIT_S = 60.0  # nothing happens at its end
LOCAL_TILE_BYTES = 256 << 10  # copied, then hashed in the near cache, and a stopped read ends soon
TCP_TILE_BYTES = 1 << 20


class Mover:
    """One read that the native library performs. Holds all memory that the library is given."""

    def __init__(
        self,
        library: load.Library,
        settings: TcpSettings,
        terms: Terms,
        wanted: Sequence[int],
        goal: Goal,
        streams: int,
        tile_bytes: int,
    ) -> None:
        chunk_bytes = goal.chunk_bytes
        most = max(2, min(settings.ahead_bytes // chunk_bytes, shapes.MAX_AHEAD))
        self._library = library
        self._told_bytes = 0
        self._wanted = array("Q", wanted)
        self._doubted = (ctypes.c_ubyte * goal.count)()
        self._digests = ctypes.c_char_p(terms.digests) if terms.digests is not None else None
        self._held = (goal, terms)
        self._scratch_bytes = goal.scratch_bytes
        self._scratch: list[ctypes.Array[ctypes.c_ubyte]] = []
        assert terms.progress.marks is not None, "the mover without its marks"
        self.state = shapes.ReadState(
            ours=goal.table,
            chunk_bytes=chunk_bytes,
            wanted=self._wanted.buffer_info()[0],
            wanted_count=len(wanted),
            digests=ctypes.cast(self._digests, ctypes.c_void_p) if self._digests is not None else None,
            batches=ctypes.pointer(goal.batches) if goal.batches is not None else None,
            progress=ctypes.pointer(terms.progress.marks),
            until=terms.until.address if terms.until is not None else None,
            large=goal.large,
            doubted=ctypes.addressof(self._doubted),
            ahead_s=settings.ahead_s,
            fast_bytes_per_s=settings.stream_rate_bytes_per_s,
            tell_s=TELL_EVERY_S,
            ahead_first=max(2, min(most, settings.stream_bytes // chunk_bytes)),
            max_ahead=most,
            tile_bytes=tile_bytes,
            streams=streams,
        )
        for at, stop_flag in enumerate(terms.stop_flags):
            self.state.stop_flags[at] = stop_flag.address

    @property
    def missing(self) -> int:
        """Wanted chunks that are not stored yet."""
        return len(self._wanted) - int(self.state.stored_chunks)

    def have(self, streams: int) -> None:
        """So many are to bring chunks from now on: those with a higher index end with what they have asked for."""
        self.state.streams = streams

    def stream(self, descriptor: int, index: int = 0) -> shapes.StreamState:
        """One more connection; its thread keeps the descriptor open until it has ended."""
        state = shapes.StreamState(
            read=ctypes.pointer(self.state), descriptor=descriptor, pidfd=-1, status=-1, index=index
        )
        if self._scratch_bytes:
            scratch = (ctypes.c_ubyte * self._scratch_bytes)()  # and not the last of them: streams begin at once
            self._scratch.append(scratch)
            state.scratch = ctypes.addressof(scratch)
        return state

    def start(self, stream: shapes.StreamState) -> None:
        """In a thread of the library's. Raises `RuntimeError` if the process may start no more."""
        if self._library.stream_start(stream):
            raise RuntimeError("can't start new thread")

    def join(self, stream: shapes.StreamState) -> None:
        """Wait until that thread has ended."""
        self._library.stream_join(stream)

    def run(self, stream: shapes.StreamState) -> None:
        """Runs the read in this thread, without the interpreter lock."""
        self._library.stream_run(stream)

    def stop(self) -> None:
        """Every stream ends at its next look, at the latest with the piece that is being moved."""
        self._library.read_stop(self.state)

    def poke(self) -> None:
        """Let the thread that waits for events look at what has changed."""
        self._library.read_tell(self.state, shapes.HAS_ENDED)

    def events(self) -> int:
        """Wait until there is something to do."""
        return int(self._library.read_wait(self.state, WAIT_S))

    def answer(self, *, may_write: bool) -> None:
        """Permission to write, or none."""
        self._library.read_answer(self.state, shapes.MAY_WRITE if may_write else shapes.MAY_NOT_WRITE)

    def news_bytes(self) -> int:
        """What has been stored since this was asked last."""
        stored = int(self.state.stored_bytes)
        news, self._told_bytes = stored - self._told_bytes, stored
        return news


def make_mover(
    settings: TcpSettings,
    sink: Sink,
    wanted: Sequence[int],
    streams: int,
    tile_bytes: int,
    batches: Batches | None = None,
) -> Mover | None:
    """The mover for this read; None where Python brings the bytes: no library, or a sink that wants to see each chunk.

    Every number that the library relies on is checked here.
    """
    library = load.library()
    if library is None or not wanted or not isinstance(sink, Trusting):
        return None
    terms = sink.terms()
    if terms is None or terms.progress.marks is None or len(terms.stop_flags) > shapes.MAX_STOP_FLAGS:
        return None
    goal = _goal_of_chunks(sink) if batches is None else goal_of_batches(terms, batches)
    if goal is None or terms.progress.chunk_count != goal.count:
        return None
    if terms.digests is not None and len(terms.digests) != goal.digest_count * DIGEST_BYTES:
        return None
    return Mover(library, settings, terms, wanted, goal, streams, tile_bytes)


def _goal_of_chunks(sink: Sink) -> Goal | None:
    stream, chunk_bytes = sink.stream, sink.chunk_bytes
    ours, count = bare_addresses(stream), chunk_count(stream.size_bytes, chunk_bytes)
    if ours is None or ours.stop != stream.size_bytes:
        return None
    return Goal(table_of(ours), count, chunk_bytes, count, (ours, stream), large=large_of(ours))
