"""How much host memory may be taken before somebody is killed: the limits of every cgroup above us, and the host's.

Memory is promised when it is allocated and taken when it is touched, and who touches more than a limit allows is not
told, but killed. So whoever is about to touch a lot asks here first, and again while he does (`Footing`).

Rules:
1. Of each cgroup from ours up to the root: version 2 `memory.max` and `memory.high` (beyond which it is throttled to a
   crawl), version 1 `memory.limit_in_bytes`, less what is used, plus what of that the kernel would give back: inactive
   file pages, and half of the active ones. Of the host: MemAvailable. The tightest counts.
2. What cannot be read is no limit.

Never: count on swap, or keep an answer: others take memory too.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ..protocol.errors import HostMemoryFull

_log = logging.getLogger(__name__)

MIB = 1 << 20
STEP_BYTES = (
    64 * MIB
)  # to ask takes 1 ms, to touch so much 20: and by so much each of several that ask at once may be wrong
MAX_COPIES = 2  # the newest version, and the newest that is known to be safe outside its publisher
SPARE_BYTES = 96 * MIB  # for all else that this process and its neighbours do meanwhile
HINT = (
    "give it more memory, let another reliable replica hold the version too, or let versions go: serve with "
    "TENSORHUB_DEFAULT_RETAIN=0 and TENSORHUB_KEEP_ESTABLISHED=no"
)


class Room(NamedTuple):
    """What may still be taken, and what says so."""

    left_bytes: int
    limit: str


def room(proc: Path = Path("/proc")) -> Room | None:
    """The tightest limit of this process; None where nothing can be learnt."""
    found = [*_host(proc), *_cgroups(proc)]
    return min(found) if found else None


def size_text(size_bytes: int) -> str:
    """As people read it."""
    if size_bytes < 10 * MIB:
        return f"{size_bytes / MIB:.1f} MiB" if size_bytes >= MIB else f"{size_bytes} B"
    return f"{size_bytes / (1 << 30):.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / MIB:.0f} MiB"


def copies_that_fit(size_bytes: int, found: Room | None, most: int = MAX_COPIES) -> int:
    """How many host copies of that size there is room for, where nobody has set a limit."""
    if found is None or not size_bytes:
        return most
    return max(0, min(most, (found.left_bytes - SPARE_BYTES) // size_bytes))


class Footing:
    """Memory that was allocated and is touched part by part: each part only while there is room for it."""

    def __init__(
        self,
        size_bytes: int,
        look: Callable[[], Room | None] = room,
        spare_bytes: int = SPARE_BYTES,
        *,
        what: str = "a host copy",
        hint: str = HINT,
    ) -> None:
        """Raises `HostMemoryFull` if all of it does not fit now, or if less than `spare_bytes` would be left.

        `what` and `hint` are for that error.
        """
        self.is_short = False  # once there was no room, there is none for this
        self._left_bytes = size_bytes  # not touched yet
        self._granted_bytes = 0
        self._look = look
        self._spare_bytes = spare_bytes
        self._what, self._hint = what, hint
        self._lock = Lock()
        self._check(size_bytes)

    def step(self, size_bytes: int) -> None:
        """So many bytes are about to be touched. Raises `HostMemoryFull` before they are, if others have taken it."""
        if not self._left_bytes and not self.is_short:
            return
        with self._lock:
            if self.is_short:
                raise HostMemoryFull(f"there was no room for all of {self._what}", hint=self._hint)
            if self._granted_bytes < size_bytes and self._left_bytes:
                wanted = min(self._left_bytes, max(STEP_BYTES, size_bytes))
                self._check(wanted)
                self._granted_bytes += wanted
                self._left_bytes -= wanted
            self._granted_bytes -= min(size_bytes, self._granted_bytes)

    def _check(self, size_bytes: int) -> None:
        found = self._look()
        if found is not None and found.left_bytes < size_bytes + self._spare_bytes:
            self.is_short = True
            needs, leaves = size_text(size_bytes), size_text(found.left_bytes)
            text = f"{self._what} needs {needs} more, and {found.limit} leaves {leaves}"
            raise HostMemoryFull(f"{text} ({size_text(self._spare_bytes)} of that for all else)", hint=self._hint)


def _host(proc: Path) -> Iterator[Room]:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield Room(int(line.split()[1]) << 10, "this host's memory")


def _cgroups(proc: Path) -> Iterator[Room]:
    """Of every cgroup that limits our memory, of whichever version."""
    with suppress(OSError, ValueError, IndexError):
        ours = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        for line in (proc / "self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            root, mount = before.split()[3:5]
            for _, controllers, path in ours:
                if kind == "cgroup2" and not controllers:
                    yield from _each(Path(mount), root, path, _version_2)
                elif kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                    yield from _each(Path(mount), root, path, _version_1)


def _each(mount: Path, root: str, path: str, limits: Callable[[Path], Iterator[Room]]) -> Iterator[Room]:
    """From our cgroup up to the highest that is seen from here. In a container the mount may be our own cgroup."""
    inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
    folder = mount / str(inside).lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = mount
    yield from limits(folder)
    while folder != mount:
        folder = folder.parent
        yield from limits(folder)


def _version_2(folder: Path) -> Iterator[Room]:
    for name in ("memory.max", "memory.high"):
        with suppress(OSError, ValueError):
            limit = int((folder / name).read_text())  # "max" is no number, and no limit
            used = int((folder / "memory.current").read_text()) - _given_back(folder, "")
            yield Room(max(0, limit - used), f"{name} = {size_text(limit)} of cgroup {folder}")


def _version_1(folder: Path) -> Iterator[Room]:
    with suppress(OSError, ValueError):
        limit = int((folder / "memory.limit_in_bytes").read_text())
        used = int((folder / "memory.usage_in_bytes").read_text()) - _given_back(folder, "total_")
        yield Room(max(0, limit - used), f"memory.limit_in_bytes = {size_text(limit)} of cgroup {folder}")


def _given_back(folder: Path, prefix: str) -> int:
    """What the kernel drops before it kills anybody."""
    found = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(found.get(f"{prefix}inactive_file", 0)) + int(found.get(f"{prefix}active_file", 0)) // 2
