"""Tiles of another layout on a device: they land in memory of bounded size, are checked there, and are put in place.

A reader opens the source's memory, and goes through its batches window by window. Each window is gathered from rows of
the source's stream, tile by tile, each tile in the order of its digest. Only tiles that are right go on to the
registered tensors. Two windows are under way at a time, so that the host checks one while the device gathers the other.

Rules:
1. Tables for all batches are made once for a plan, a source and a target, and uploaded once for a read. A window is a
   range of their rows.
2. Each tile lies at a multiple of 4 KiB of the landing memory, so that rows of aligned memory stay aligned.
3. A tile that comes in another order (`Scatter.reorder_rows`) is copied once more, in its own order, and hashed there.
4. The device hashes tiles of `MIN_BYTES` and more. Shorter ones go to the host.
5. All reads of a process share `MAX_BYTES`, tables and scratch memory included. Each takes half of it, for it is the
   faster the longer its windows are. Where less is left, it waits for `WAIT_S`. Then it takes what is left, and room
   for two windows of its longest tile in any case.
6. Rows that lie in several pieces of memory are refused (`ValueError`), before anything is launched.
"""

import threading
import weakref
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from ..protocol.manifest import DIGEST_BYTES
from ..reshard.copies import (
    COLUMNS,
    COUNT,
    COUNTS,
    OURS,
    RUN,
    SOURCE,
    SOURCE_STRIDE,
    SOURCE_STRIDES,
    TARGET,
    TARGET_STRIDE,
    TARGET_STRIDES,
    THEIRS,
)
from ..reshard.grid import Ints, starts_of
from ..transport.on_device import WINDOWS
from ..transport.ranges import Batches, Scatter
from .xxh3 import (
    CHAIN_LANES,
    CONSTANTS,
    GROUP_BYTES,
    LANES,
    MIN_BYTES,
    SUMS_BYTES,
    Launcher,
    NoRoom,
    Spans,
    as_digests,
    chunk_table,
    first_groups,
    job,
)

MAX_BYTES = 512 << 20  # for all reads of this process, of tiles of 8 MiB at most
MIN_WINDOW_BYTES = 8 << 20  # for a read that finds little left of it
WAIT_S = 1.0  # for others to give theirs back: their sources may be filling, and stand still
MAX_TILE_BYTES = 128 << 20  # a longer one is left to other transports
SHORT_BYTES = 16  # of these, each short tile takes a multiple
PART_BYTES = 8192  # of a row, copied at once: PART of xxh3.cu
ROW_WORDS = COLUMNS + 1
JOBS_BYTES = 512  # of one window
ROUNDED_BYTES = 16 << 10  # what a device rounds up, and jobs
_WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Places:
    """Where each tile of a read lies in a landing memory that had room for all of them, and in which batch it is."""

    tiles: Ints  # [tiles + 1] where each begins in the batches' stream
    at: Ints  # [tiles] where it comes to lie
    seen: Ints  # [tiles] where it is hashed: there, or in its own order behind
    first_tile: Ints  # [batches + 1]
    batch_at: Ints  # [batches + 1]

    @classmethod
    def of(cls, scatter: Scatter) -> "Places":
        """The tables for all tiles."""
        tiles, first_tile = _ints(scatter.tiles), _ints(scatter.first_tile)
        padded = -(-np.diff(tiles) // GROUP_BYTES) * GROUP_BYTES
        is_turned = np.diff(_ints(scatter.first_reorder_row)) > 0
        starts = starts_of(padded * (1 + is_turned))
        return cls(tiles, starts[:-1], starts[:-1] + padded * is_turned, first_tile, starts[first_tile])

    def of_bytes(self, place: Ints) -> Ints:
        """Where these bytes of the batches' stream come to lie."""
        tile = np.searchsorted(self.tiles, place, "right") - 1
        found: Ints = self.at[tile] + place - self.tiles[tile]
        return found


class Moves:
    """Rows to copy, in the order of batches."""

    def __init__(self, rows: Ints, first: Ints) -> None:
        """`first` says for each batch which row is its first, and behind the last batch how many there are."""
        self.first: list[int] = first.tolist()
        self.table = row_table(rows)
        self.at = 0  # where it begins in the words that are uploaded, in bytes

    def job(self, tables: int, first: int, last: int, source: int, target: int) -> tuple[int, ...]:
        """A `Move` of rows [first, last), with what is added to their places; nothing where there are none."""
        if first == last:
            return ()
        return tables + self.at + 8 * ROW_WORDS * first, last - first, source & _WORD, target & _WORD


class Share:
    """What one read takes of the landing memory that all reads of this process share."""

    _changed = threading.Condition()
    _taken_bytes = 0
    _readers: ClassVar[list[int]] = [0] * (LANES // WINDOWS)  # of each pair of lanes

    def __init__(self, whole_bytes: int, largest_bytes: int, group_bytes: int, tables_bytes: int) -> None:
        """For a read of so many bytes in all, and in its largest batch. May wait for `WAIT_S`.

        `group_bytes`: what both windows take for each group of one. `tables_bytes`: what the read takes beside that.
        """
        wanted = min(MAX_BYTES // 2, tables_bytes + -(-whole_bytes // GROUP_BYTES) * group_bytes)
        with self._changed:
            self._changed.wait_for(lambda: MAX_BYTES - Share._taken_bytes >= wanted, WAIT_S)
            left = min(wanted, MAX_BYTES - Share._taken_bytes) - tables_bytes
            fair = max(0, left) // group_bytes * GROUP_BYTES
            self.window_bytes = min(whole_bytes, max(largest_bytes, MIN_WINDOW_BYTES, fair))
            self._bytes = tables_bytes + self.window_bytes // GROUP_BYTES * group_bytes
            Share._taken_bytes += self._bytes
            self._pair = self._readers.index(min(self._readers))
            self._readers[self._pair] += 1

    @property
    def lanes(self) -> range:
        """Of its windows: as few other reads as can be launch there."""
        return range(WINDOWS * self._pair, WINDOWS * (self._pair + 1))

    def give_back(self) -> None:
        """Give the memory back. Call it once nothing uses it."""
        with self._changed:
            Share._taken_bytes -= self._bytes
            self._readers[self._pair] -= 1
            self._changed.notify_all()


class Shorts:
    """Tiles that the host hashes: brought together for it."""

    def __init__(self, places: Places) -> None:
        sizes = np.diff(places.tiles)
        tiles = np.flatnonzero(sizes < MIN_BYTES)
        at = starts_of(-(-sizes[tiles] // SHORT_BYTES) * SHORT_BYTES)
        rows = np.zeros((len(tiles), COLUMNS), np.int64)
        rows[:, SOURCE], rows[:, TARGET], rows[:, RUN] = places.seen[tiles], at[:-1], sizes[tiles]
        rows[:, (COUNT, COUNTS)] = 1
        self.moves = Moves(rows, np.searchsorted(tiles, np.arange(len(places.tiles))))  # by tile
        self.at: list[int] = at.tolist()
        self.tiles: list[tuple[int, int]] = list(zip(tiles.tolist(), sizes[tiles].tolist(), strict=True))  # and sizes


class Tables:
    """What the kernels are told of all batches: of one plan, source and target."""

    def __init__(self, batches: Batches, scatter: Scatter, source: Spans, target: Spans) -> None:
        """Raises `ValueError` for a row that does not lie in one piece of memory."""
        self.source, self.target = source, target
        places = Places.of(scatter)
        sizes = np.diff(places.tiles)
        self.tile_count = len(sizes)
        self.first_tile: list[int] = places.first_tile.tolist()
        self.batch_at: list[int] = places.batch_at.tolist()
        self.largest_bytes = max(b - a for a, b in pairwise(self.batch_at))
        self.gathers = _gathers(places, batches, source)
        self.turns = _turns(places, scatter)
        self.scatters = _scatters(places, scatter, target)
        self.shorts = Shorts(places)
        self.firsts = first_groups(sizes)
        self.words = CONSTANTS + chunk_table(places.seen, sizes, self.firsts)
        for moves in (self.gathers, self.turns, self.scatters, self.shorts.moves):
            moves.at = 8 * len(self.words)
            self.words += moves.table


_tables: "WeakKeyDictionary[Scatter, Tables]" = WeakKeyDictionary()  # of each plan that is kept


def _tables_of(batches: Batches, scatter: Scatter, source: Spans, target: Spans) -> Tables:
    """As they were made for an earlier read, if source and target lie where they lay."""
    known = _tables.get(scatter)
    if known is None or (known.source, known.target) != (source, target):
        known = _tables[scatter] = Tables(batches, scatter, source, target)
    return known


@dataclass
class _Slot:
    """Memory for one window, and the lane in which it is used."""

    lane: int
    memory: int
    sums: int
    found: int
    shorts: int
    jobs: int


@dataclass
class _Window:
    """The batches of one window that are under way."""

    batches: range
    slot: _Slot
    scatter_at: int = 0  # its job, once it is uploaded


class Landing:
    """Landing memory of a device, for one read. One thread uses it, and closes it."""

    def __init__(
        self,
        make: Callable[[], Launcher],
        source: Spans,
        target: Spans,
        batches: Batches,
        scatter: Scatter,
        *,
        is_hashing: bool,
    ) -> None:
        """Source and target are streams on the device. Raises `NoRoom`, and `ValueError` for rows that cannot be."""
        self._make = make
        self._is_hashing = is_hashing
        self._its = _tables_of(batches, scatter, source, target)
        self._device = make()
        self._slots = self._memory()
        self._under_way: deque[_Window] = deque()
        self._next = 0
        self._tables = self._device.upload(self._its.words, lane=self._slots[0].lane)
        self._device.wait(self._slots[0].lane)

    def _memory(self) -> list[_Slot]:
        """The landing memory of each window."""
        its = self._its
        if its.largest_bytes > MAX_TILE_BYTES:
            raise NoRoom(f"no room for tiles of {its.largest_bytes} B to land in")
        short_bytes = -(-MIN_BYTES // SHORT_BYTES) * SHORT_BYTES if its.shorts.tiles else 0
        group_bytes = WINDOWS * (GROUP_BYTES + SUMS_BYTES + DIGEST_BYTES + short_bytes)
        share = Share(its.batch_at[-1], its.largest_bytes, group_bytes, 8 * len(its.words) + ROUNDED_BYTES)
        self._give_back = weakref.finalize(self, share.give_back)
        least_bytes = min(share.window_bytes, max(its.largest_bytes, MIN_WINDOW_BYTES))
        for self._window_bytes in (share.window_bytes, least_bytes):
            groups = self._window_bytes // GROUP_BYTES  # at most as many tiles
            sizes = (self._window_bytes, SUMS_BYTES * groups, DIGEST_BYTES * groups, short_bytes * groups, JOBS_BYTES)
            with suppress(NoRoom):
                return [
                    _Slot(
                        lane, *(self._device.room(size_bytes, lane=lane) if size_bytes else 0 for size_bytes in sizes)
                    )
                    for lane in share.lanes
                ]
            self._device = self._make()  # gives back what it had
        raise NoRoom("the device has no memory left for tiles to land in")

    def reach(self, first: int) -> int:
        """A window that begins with this batch can have those up to which one."""
        return bisect_right(self._its.batch_at, self._its.batch_at[first] + self._window_bytes) - 1

    def gather(self, batches: range) -> None:
        """Begin to bring these from the source, and to hash them. Two windows at most may be under way."""
        assert len(self._under_way) < WINDOWS, "a window would land on one that is not in place yet"
        its, slot = self._its, self._slots[self._next]
        self._next = (self._next + 1) % WINDOWS
        at = its.batch_at[batches.start]
        base = slot.memory - at  # the address of the landing memory's first byte, if all of it were there
        jobs = [("move", 0, self._move(its.gathers, batches, target=base))]
        jobs.append(("move", 0, self._move(its.turns, batches, source=base, target=base)))
        if self._is_hashing:
            jobs += self._hashing(batches, slot, base)
        words, places = array("Q", (at, slot.memory)), []
        for job_ in (*(job_ for _, _, job_ in jobs), self._move(its.scatters, batches, source=base)):
            places.append(slot.jobs + 8 * len(words) if job_ else 0)
            words.extend(job_)
        self._device.upload(words, lane=slot.lane, at=slot.jobs)
        for (kernel, threads, _), place in zip(jobs, places, strict=False):
            if place:
                self._device.launch(kernel, threads, place, lane=slot.lane)
        self._under_way.append(_Window(batches, slot, places[-1]))

    def _hashing(self, batches: range, slot: _Slot, base: int) -> list[tuple[str, int, tuple[int, ...]]]:
        its, (first, last) = self._its, self._tiles(batches)
        maps, chunks = (slot.jobs, 1, 0, 0), self._tables + 8 * len(CONSTANTS)
        words = job(maps, chunks, its.firsts, first, last, self._tables, slot.sums, slot.found)
        shorts = its.shorts
        low, high = shorts.moves.first[first], shorts.moves.first[last]
        move = shorts.moves.job(self._tables, low, high, base, slot.shorts - shorts.at[low])
        return [("sum_only", 0, words), ("chain", CHAIN_LANES * (last - first), words), ("move", 0, move)]

    def _tiles(self, batches: range) -> tuple[int, int]:
        return self._its.first_tile[batches.start], self._its.first_tile[batches.stop]

    def digests(self) -> bytes:
        """Of each tile of the earliest window under way, 16 bytes. Waits for it; empty where nothing is hashed."""
        window = self._under_way[0]
        slot, shorts, (first, last) = window.slot, self._its.shorts, self._tiles(window.batches)
        if not self._is_hashing:
            self._device.wait(slot.lane)
            return b""
        found = as_digests(self._device.download(slot.found, 2 * (last - first), lane=slot.lane))
        low, high = shorts.moves.first[first], shorts.moves.first[last]
        if low == high:
            return found
        made, base = bytearray(found), shorts.at[low]
        words = self._device.download(slot.shorts, (shorts.at[high] - base) // 8, lane=slot.lane)
        for (tile, size), start in zip(shorts.tiles[low:high], shorts.at[low:high], strict=True):
            at = DIGEST_BYTES * (tile - first)
            made[at : at + DIGEST_BYTES] = xxhash.xxh3_128_digest(memoryview(words).cast("B")[start - base :][:size])
        return bytes(made)

    def scatter(self) -> None:
        """Put the earliest window under way in place; its digests were right. Waits for it."""
        window = self._under_way[0]
        lane = window.slot.lane
        if window.scatter_at:
            self._device.launch("move", 0, window.scatter_at, lane=lane)
        self._device.wait(lane)
        self._under_way.popleft()

    def close(self) -> None:
        """Wait for what was launched, and give the memory back."""
        for slot in self._slots:
            self._device.wait(slot.lane)
        self._under_way.clear()
        del self._device
        self._give_back()

    def _move(self, moves: Moves, batches: range, *, source: int = 0, target: int = 0) -> tuple[int, ...]:
        return moves.job(self._tables, moves.first[batches.start], moves.first[batches.stop], source, target)


# -- rows --------------------------------------------------------------------------------------------------------------


def row_table(rows: Ints) -> "array[int]":
    """`Row`s for the kernels, and the one behind the last."""
    table = np.zeros((len(rows) + 1, ROW_WORDS), np.int64)
    table[:-1, :COLUMNS] = rows
    table[:, COLUMNS] = starts_of(-(-_sizes(rows) // PART_BYTES))
    return array("Q", table.tobytes())


def _gathers(places: Places, batches: Batches, source: Spans) -> Moves:
    """The copies from the source to the landing memory."""
    theirs = _ints(batches.rows.words).reshape(-1, len(THEIRS))
    rows = _packed(len(theirs), THEIRS, theirs, TARGET)
    rows[:, TARGET] = places.of_bytes(_ints(batches.rows.starts)[:-1])
    _place(rows, THEIRS, source)
    return Moves(rows, _ints(batches.first_row))


def _turns(places: Places, scatter: Scatter) -> Moves:
    """Within the landing memory: tiles that have come in another order."""
    turns, first_turn = _ints(scatter.reorder_rows).reshape(-1, len(THEIRS)), _ints(scatter.first_reorder_row)
    tile = np.repeat(np.arange(len(places.at)), np.diff(first_turn))
    rows = _packed(len(turns), THEIRS, turns, TARGET)
    before = starts_of(_sizes(rows))
    batch = np.searchsorted(places.first_tile, tile, "right") - 1
    rows[:, SOURCE] = places.of_bytes(rows[:, SOURCE] + places.tiles[places.first_tile[batch]])
    rows[:, TARGET] = places.seen[tile] + before[:-1] - before[first_turn[tile]]
    return Moves(rows, first_turn[places.first_tile])


def _scatters(places: Places, scatter: Scatter, target: Spans) -> Moves:
    """The copies from the landing memory to the registered tensors."""
    ours = _ints(scatter.ours.words).reshape(-1, len(OURS))
    near = _packed(len(ours), OURS, ours, SOURCE)
    starts = _ints(scatter.ours.starts)[: len(ours)]
    near[:, SOURCE] = places.of_bytes(starts)
    first_keep = _ints(scatter.first_keep)
    kept = _ints(scatter.keeps).reshape(-1, COLUMNS).copy()
    of_kept = np.repeat(np.arange(len(first_keep) - 1), np.diff(first_keep))
    kept[:, SOURCE] = places.of_bytes(kept[:, SOURCE] + places.tiles[places.first_tile[of_kept]])
    bounds = places.tiles[places.first_tile]
    batch = np.concatenate([np.searchsorted(bounds, starts, "right") - 1, of_kept])
    order = np.argsort(batch, kind="stable")
    rows = np.concatenate([near, kept])[order]
    _place(rows, OURS, target)
    return Moves(rows, np.searchsorted(batch[order], np.arange(len(bounds))))


def _packed(count: int, columns: tuple[int, ...], known: Ints, side: int) -> Ints:
    """Copies with one side known, and the other one packed: run after run."""
    rows = np.zeros((count, COLUMNS), np.int64)
    rows[:, columns] = known
    inner, outer = (SOURCE_STRIDE, SOURCE_STRIDES) if side == SOURCE else (TARGET_STRIDE, TARGET_STRIDES)
    rows[:, inner] = rows[:, RUN]
    rows[:, outer] = rows[:, RUN] * rows[:, COUNT]
    return rows


def _place(rows: Ints, columns: tuple[int, ...], spans: Spans) -> None:
    """Make addresses of one side's places. Raises `ValueError` for a row that does not lie in one piece of memory."""
    place, run, count, stride, counts, strides = (rows[:, column] for column in columns)
    starts = np.array(spans.starts, np.int64)
    stops = np.append(starts[1:], spans.stop)
    piece = np.searchsorted(starts, place, "right") - 1
    stop = place + run + (count - 1) * stride + (counts - 1) * strides
    is_wrong = (piece < 0) | (stop > stops[piece])
    if is_wrong.any():
        at = int(np.flatnonzero(is_wrong)[0])
        raise ValueError(f"bytes {int(place[at])} to {int(stop[at])} do not lie in one piece of memory")
    rows[:, columns[0]] += np.array(spans.addresses, np.int64)[piece] - starts[piece]


def _sizes(rows: Ints) -> Ints:
    found: Ints = rows[:, RUN] * rows[:, COUNT] * rows[:, COUNTS]
    return found


def _ints(words: "array[int]") -> Ints:
    return np.frombuffer(words, np.int64) if len(words) else np.zeros(0, np.int64)
