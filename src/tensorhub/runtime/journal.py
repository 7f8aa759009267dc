"""The file of the server's journal: written before anything is sent, so that a restarted server knows its workers.

The journal goes to the machine's page cache at once, and to its disk soon after. A file that cannot be written is
removed: the server goes on without it, and the next one listens for a lease.
"""

import asyncio
import fcntl
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from ..protocol.errors import UsageError
from ..server.journal import MAX_RECORD_BYTES, History, Record, begins_a_journal, encoded, history_of

_log = logging.getLogger(__name__)

BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
MIN_BYTES = 1 << 20  # below that the file is never begun anew
SYNC_S = 0.5  # so often at most it is synced


def boot_id() -> str:
    """Names this boot of the machine; empty where that cannot be known."""
    try:
        return BOOT_FILE.read_text().strip()
    except OSError:
        return ""


class JournalInUse(UsageError):
    """Another server uses the journal."""


class JournalFile:
    """One server's journal. Another server cannot open it meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises `UsageError` if another server uses the file, or if it cannot be had."""
        self.path = path
        self.boot = boot_id()
        self._is_written = asyncio.Event()
        self._file = self._lock = -1
        self._begun_bytes = self._bytes = 0
        self._name = uuid4().hex  # of this process's journal, whatever its number is
        self._part = 0  # how often it was begun anew
        self._is_copied = False
        try:
            self._check()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            hint = "one server for each journal: give this one another --state"
            raise JournalInUse(f"another server uses the journal {path}", hint=hint) from error
        except OSError as error:
            self.close()
            raise UsageError(f"cannot use the journal {path}: {error.strerror or error}") from error

    def _check(self) -> None:
        """Raises `UsageError` for what would be lost if it were overwritten."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{self.path} is no regular file", hint="name the file in which the journal is to be")
        with self.path.open("rb") as file:
            if found.st_size and not begins_a_journal(file.read(MAX_RECORD_BYTES)):
                raise UsageError(
                    f"{self.path} is no journal of a reference server", hint="move it, or name another file"
                )

    def history(self, *, max_versions: int) -> History | None:
        """The records of former lives of the server; None if there are none."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("the journal %s cannot be read: %s", self.path, error)
            return None
        boot = "" if self._is_copied else self.boot
        return history_of(data, boot=boot, max_versions=max_versions)

    @property
    def is_long(self) -> bool:
        """It is to be begun anew."""
        return self._bytes > max(MIN_BYTES, 2 * self._begun_bytes)

    def write(self, records: Sequence[Record], *, is_whole: bool) -> None:
        """Append the records; `is_whole`: in place of all that is there."""
        self._put(encoded(records), is_whole=is_whole)

    def copy(self, data: bytes, *, is_whole: bool) -> None:
        """Append what another server has written, some time ago: it does not tell which workers live."""
        self._is_copied = True
        self._put(data, is_whole=is_whole)

    def since(self, part: str, offset: int) -> tuple[str, int, bytes]:
        """The part that is written now, an offset in it, and all bytes from there on: none before, if that is known."""
        mine = f"{self._name}-{self._part}"
        begins = offset if part == mine and 0 <= offset <= self._bytes else 0
        if self._file < 0:
            return mine, 0, b""
        return mine, begins, os.pread(self._file, self._bytes - begins, begins)

    def _put(self, data: bytes, *, is_whole: bool) -> None:
        try:
            if is_whole:
                self._begin(data)
            elif self._file >= 0:
                _write(self._file, data)
                self._bytes += len(data)
        except OSError as error:
            self._give_up(error)
        self._is_written.set()

    def _begin(self, data: bytes) -> None:
        new = Path(f"{self.path}.new")
        new.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
        file = os.open(new, flags, 0o600)
        try:
            _write(file, data)
            os.fsync(file)
            os.rename(new, self.path)
        except OSError:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._begun_bytes, self._bytes = file, len(data), len(data)
        self._part += 1

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "the journal %s cannot be written (%s): a restart of this server will wait for a lease", self.path, error
        )
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._begun_bytes = self._bytes = 0
        for path in (self.path, Path(f"{self.path}.new")):
            try:
                path.unlink(missing_ok=True)
            except OSError as left:
                text = "remove it before the next server starts: it does not say which workers live any more"
                _log.error("the journal %s cannot be removed (%s); %s", path, left, text)

    async def sync(self) -> None:
        """Bring to the disk what was written, again and again. Nothing waits for that."""
        while True:
            await self._is_written.wait()
            self._is_written.clear()
            if self._file >= 0:
                file = os.dup(self._file)  # it may be begun anew meanwhile
                try:
                    await asyncio.to_thread(os.fdatasync, file)
                except OSError as error:
                    self._give_up(error)
                finally:
                    os.close(file)
            await asyncio.sleep(SYNC_S)

    def close(self) -> None:
        """The file stays for the next life."""
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
