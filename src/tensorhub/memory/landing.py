"""Tiles of another layout on a device: they land in memory of bounded size, are judged there, and are put in place.

A reader opens the source's memory, and goes through its batches window by window. Each window is gathered from rows of
the source's stream, tile by tile, each tile in the order of its digest. Only tiles that are right go on to the
registered tensors. Two windows are under way at a time, so that the host judges one while the device gathers the other.

Rules:
1. Tables for all batches are made and uploaded once for a read. A window is a range of their rows.
2. Each tile lies at a multiple of 4 KiB of the landing memory, so that rows of aligned memory stay aligned.
3. A tile that comes in another order (`Scatter.turns`) is copied once more, in its own order, and hashed there.
4. The device hashes tiles of `LEAST_BYTES` and more. Shorter ones go to the host.
5. All reads of a process share `MAX_BYTES`. Each takes half of it, for it is the faster the longer its windows are.
   Where less is left, it waits for 50 ms, as long as a read of some 10 GiB takes. Then it takes what is left, and room
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
    LEAST_BYTES,
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
LEAST_WINDOW_BYTES = 8 << 20  # for a read that finds little left of it
WAIT_S = 0.05  # for others to give theirs back: their sources may be filling, and stand still
MAX_TILE_BYTES = 128 << 20  # a longer one is left to other transports
SHORT_BYTES = 16  # of these, each short tile takes a multiple
PART_BYTES = 8192  # of a row, copied at once: PART of xxh3.cu
ROW_WORDS = COLUMNS + 1
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
        """For all tiles."""
        tiles, first_tile = _ints(scatter.tiles), _ints(scatter.first_tile)
        padded = -(-np.diff(tiles) // GROUP_BYTES) * GROUP_BYTES
        is_turned = np.diff(_ints(scatter.first_turn)) > 0
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
        self.address = 0  # once it is uploaded

    def job(self, first: int, last: int, source: int, target: int) -> tuple[int, ...]:
        """A `Move` of rows [first, last), with what is added to their places; nothing where there are none."""
        if first == last:
            return ()
        return self.address + 8 * ROW_WORDS * first, last - first, source & _WORD, target & _WORD


class Share:
    """What one read takes of the landing memory that all reads of this process share."""

    _changed = threading.Condition()
    _taken_bytes = 0

    def __init__(self, whole_bytes: int, largest_bytes: int) -> None:
        """For a read of so many bytes in all, and in its largest batch. May wait for `WAIT_S`."""
        group_bytes = WINDOWS * (GROUP_BYTES + SUMS_BYTES)
        wanted = min(MAX_BYTES // 2, whole_bytes // GROUP_BYTES * group_bytes)
        with self._changed:
            self._changed.wait_for(lambda: MAX_BYTES - Share._taken_bytes >= wanted, WAIT_S)
            fair = max(0, min(wanted, MAX_BYTES - Share._taken_bytes)) // group_bytes * GROUP_BYTES
            self.window_bytes = min(whole_bytes, max(largest_bytes, LEAST_WINDOW_BYTES, fair))
            self._bytes = self.window_bytes // GROUP_BYTES * group_bytes
            Share._taken_bytes += self._bytes

    def give_back(self) -> None:
        """Once nothing uses it."""
        with self._changed:
            Share._taken_bytes -= self._bytes
            self._changed.notify_all()


class Shorts:
    """Tiles that the host hashes: brought together for it."""

    def __init__(self, places: Places) -> None:
        sizes = np.diff(places.tiles)
        tiles = np.flatnonzero(sizes < LEAST_BYTES)
        at = starts_of(-(-sizes[tiles] // SHORT_BYTES) * SHORT_BYTES)
        rows = np.zeros((len(tiles), COLUMNS), np.int64)
        rows[:, SOURCE], rows[:, TARGET], rows[:, RUN] = places.seen[tiles], at[:-1], sizes[tiles]
        rows[:, (COUNT, COUNTS)] = 1
        self.moves = Moves(rows, np.searchsorted(tiles, np.arange(len(places.tiles))))  # by tile
        self.at: list[int] = at.tolist()
        self.tiles: list[tuple[int, int]] = list(zip(tiles.tolist(), sizes[tiles].tolist(), strict=True))  # and sizes


@dataclass
class _Window:
    """Batches under way."""

    batches: range
    lane: int
    base: int  # the address of the landing memory's first byte, if all of it were there
    device: Launcher  # for what this window alone needs
    found: int = 0
    shorts: int = 0


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
        places = Places.of(scatter)
        self._first_tile, self._batch_at = places.first_tile.tolist(), places.batch_at.tolist()
        self._gathers = _gathers(places, batches, source)
        self._turns = _turns(places, scatter)
        self._scatters = _scatters(places, scatter, target)
        self._shorts = Shorts(places)
        sizes = np.diff(places.tiles)
        self._firsts = first_groups(sizes)
        self._device = make()
        self._slots, self._sums = self._memory()
        self._under_way: deque[_Window] = deque()
        self._lane = 0
        chunks = chunk_table(places.seen, sizes, self._firsts)
        self._chunks, self._constants = self._device.upload(chunks), self._device.upload(CONSTANTS)
        for moves in (self._gathers, self._turns, self._scatters, self._shorts.moves):
            moves.address = self._device.upload(moves.table)
        self._device.wait(0)

    def _memory(self) -> tuple[list[int], list[int]]:
        """Landing memory for each window, and room for sums."""
        largest = max(b - a for a, b in pairwise(self._batch_at))
        if largest > MAX_TILE_BYTES:
            raise NoRoom(f"no room for tiles of {largest} B to land in")
        share = Share(self._batch_at[-1], largest)
        self._give_back = weakref.finalize(self, share.give_back)
        for self._window_bytes in (share.window_bytes, min(share.window_bytes, max(largest, LEAST_WINDOW_BYTES))):
            with suppress(NoRoom):
                slots = [self._device.room(self._window_bytes, lane=lane) for lane in range(WINDOWS)]
                sums_bytes = self._window_bytes // GROUP_BYTES * SUMS_BYTES
                return slots, [self._device.room(sums_bytes, lane=lane) for lane in range(WINDOWS)]
            self._device = self._make()  # gives back what it had
        raise NoRoom("the device has no memory left for tiles to land in")

    def reach(self, first: int) -> int:
        """A window that begins with this batch can have those up to which one."""
        return bisect_right(self._batch_at, self._batch_at[first] + self._window_bytes) - 1

    def gather(self, batches: range) -> None:
        """Begin to bring these from the source, and to hash them. Two windows at most may be under way."""
        assert len(self._under_way) < WINDOWS, "a window would land on one that is not in place yet"
        lane = self._lane
        self._lane = (lane + 1) % WINDOWS
        at = self._batch_at[batches.start]
        window = _Window(batches, lane, self._slots[lane] - at, self._make())
        jobs = [self._move(self._gathers, batches, target=window.base)]
        jobs.append(self._move(self._turns, batches, source=window.base, target=window.base))
        if self._is_hashing:
            jobs += self._hashing(window, at)
        self._launch(window, jobs)
        self._under_way.append(window)

    def _hashing(self, window: _Window, at: int) -> list[tuple[str, int, tuple[int, ...]]]:
        first, last = (self._first_tile[batch] for batch in (window.batches.start, window.batches.stop))
        device, lane = window.device, window.lane
        window.found = device.room(16 * (last - first), lane=lane)
        segment = device.upload(array("Q", (at, self._slots[lane])), lane=lane)
        words = job(
            *((segment, 1, 0, 0), self._chunks, self._firsts, first, last),
            *(self._constants, self._sums[lane], window.found),
        )
        jobs = [("sum_only", 0, words), ("chain", CHAIN_LANES * (last - first), words)]
        shorts = self._shorts
        low, high = shorts.moves.first[first], shorts.moves.first[last]
        if low < high:
            window.shorts = device.room(shorts.at[high] - shorts.at[low], lane=lane)
            jobs.append(("move", 0, shorts.moves.job(low, high, window.base, window.shorts - shorts.at[low])))
        return jobs

    def digests(self) -> bytes:
        """Of each tile of the earliest window under way, 16 bytes. Waits for it; empty where nothing is hashed."""
        window = self._under_way[0]
        if not self._is_hashing:
            window.device.wait(window.lane)
            return b""
        first, last = (self._first_tile[batch] for batch in (window.batches.start, window.batches.stop))
        found = bytearray(as_digests(window.device.download(window.found, 2 * (last - first), lane=window.lane)))
        if window.shorts:
            low, high = self._shorts.moves.first[first], self._shorts.moves.first[last]
            base = self._shorts.at[low]
            words = window.device.download(window.shorts, (self._shorts.at[high] - base) // 8, lane=window.lane)
            for (tile, size), start in zip(self._shorts.tiles[low:high], self._shorts.at[low:high], strict=True):
                digest = xxhash.xxh3_128_digest(memoryview(words).cast("B")[start - base :][:size])
                at = DIGEST_BYTES * (tile - first)
                found[at : at + DIGEST_BYTES] = digest
        return bytes(found)

    def scatter(self) -> None:
        """Put the earliest window under way in place; its digests were right. Waits for it."""
        window = self._under_way[0]
        self._launch(window, [self._move(self._scatters, window.batches, source=window.base)])
        window.device.wait(window.lane)
        self._under_way.popleft()

    def close(self) -> None:
        """Wait for what was launched, and give the memory back."""
        for lane in range(WINDOWS):
            self._device.wait(lane)
        self._under_way.clear()
        del self._device
        self._give_back()

    @staticmethod
    def _move(moves: Moves, batches: range, *, source: int = 0, target: int = 0) -> tuple[str, int, tuple[int, ...]]:
        return "move", 0, moves.job(moves.first[batches.start], moves.first[batches.stop], source, target)

    def _launch(self, window: _Window, jobs: list[tuple[str, int, tuple[int, ...]]]) -> None:
        words = array("Q")
        for _, _, its in jobs:
            words.extend(its)
        if not words:
            return
        at = window.device.upload(words, lane=window.lane)
        for kernel, threads, its in jobs:
            if its:
                window.device.launch(kernel, threads, at, lane=window.lane)
            at += 8 * len(its)


# -- rows --------------------------------------------------------------------------------------------------------------


def row_table(rows: Ints) -> "array[int]":
    """`Row`s for the kernels, and the one behind the last."""
    table = np.zeros((len(rows) + 1, ROW_WORDS), np.int64)
    table[:-1, :COLUMNS] = rows
    table[:, COLUMNS] = starts_of(-(-_sizes(rows) // PART_BYTES))
    return array("Q", table.tobytes())


def _gathers(places: Places, batches: Batches, source: Spans) -> Moves:
    """From the source to the landing memory."""
    theirs = _ints(batches.rows.words).reshape(-1, len(THEIRS))
    rows = _packed(len(theirs), THEIRS, theirs, TARGET)
    rows[:, TARGET] = places.of_bytes(_ints(batches.rows.starts)[:-1])
    _place(rows, THEIRS, source)
    return Moves(rows, _ints(batches.first_row))


def _turns(places: Places, scatter: Scatter) -> Moves:
    """Within the landing memory: tiles that have come in another order."""
    turns, first_turn = _ints(scatter.turns).reshape(-1, len(THEIRS)), _ints(scatter.first_turn)
    tile = np.repeat(np.arange(len(places.at)), np.diff(first_turn))
    rows = _packed(len(turns), THEIRS, turns, TARGET)
    before = starts_of(_sizes(rows))
    batch = np.searchsorted(places.first_tile, tile, "right") - 1
    rows[:, SOURCE] = places.of_bytes(rows[:, SOURCE] + places.tiles[places.first_tile[batch]])
    rows[:, TARGET] = places.seen[tile] + before[:-1] - before[first_turn[tile]]
    return Moves(rows, first_turn[places.first_tile])


def _scatters(places: Places, scatter: Scatter, target: Spans) -> Moves:
    """From the landing memory to the registered tensors."""
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
