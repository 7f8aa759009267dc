"""This user's state directory, and the secrets that all servers and workers of this user find there.

A secret is a file that only this user may read. It is made once: processes that start together agree on one value.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ..core.errors import TensorHubError, UsageError
from ..transport import shortages

SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096
ELSEWHERE = "set TENSORHUB_STATE_DIR to a directory of this user, give a token with --token-file, or use --insecure"
ANEW = "remove it: the next server makes another"


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """TENSORHUB_STATE_DIR, else $XDG_STATE_HOME/tensorhub, else ~/.local/state/tensorhub. Raises `UsageError`."""
    environ = os.environ if environ is None else environ
    try:
        if given := environ.get("TENSORHUB_STATE_DIR"):
            return Path(given).expanduser().absolute()
        xdg = environ.get("XDG_STATE_HOME", "")  # its standard says that a relative path is to be ignored
        home = environ.get("HOME") or (Path.home() if environ is os.environ else "")
    except (RuntimeError, OSError) as error:
        raise UsageError(f"there is no state directory: {error}", hint=ELSEWHERE) from error
    if xdg.startswith("/"):
        return Path(xdg) / "tensorhub"
    if not home:
        raise UsageError("there is no state directory: HOME is not set", hint=ELSEWHERE)
    return Path(home).absolute() / ".local" / "state" / "tensorhub"


def secret(name: str, *, create: bool, environ: Mapping[str, str] | None = None) -> str | None:
    """The secret `name` of this user. Where there is none: makes one with `create`, else None.

    Raises `UsageError` where the file is not this user's own, where others may read it, or where it cannot be made.
    """
    try:
        directory = state_directory(environ)
    except UsageError:
        if create:
            raise
        return None
    path = directory / name
    found = _read(path)
    if found is None and create:
        try:
            _make(path)
        except OSError as error:
            raise _refused(error, f"cannot make {path}") from error
        found = _read(path)
        if found is None:
            raise UsageError(f"{path} was removed while this process made it", hint="start again")
    return found


def _read(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _refused(error, f"cannot read {path}") from error
    try:
        _check_ours(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return _secret_in(path, file, ANEW)
    except OSError as error:
        raise _refused(error, f"cannot read {path}") from error
    finally:
        os.close(descriptor)


def read_secret(path: Path) -> str:
    """The secret in a file that its user names. Raises `UsageError`."""
    try:
        with open(path, "rb") as file:
            return _secret_in(path, file, "it is to hold one line: the token")
    except OSError as error:
        raise _refused(error, f"cannot read {path}", "name a file that holds the token") from error


def _secret_in(path: Path, file: IO[bytes], hint: str) -> str:
    """One line of text. No error shows what else there is."""
    content = file.read(MAX_SECRET_BYTES + 1)
    text = content.decode(errors="replace").strip()
    if not text or len(content) > MAX_SECRET_BYTES or not text.isprintable() or "\ufffd" in text:
        raise UsageError(f"{path} holds no secret", hint=hint)
    return text


def _check_ours(path: Path, found: os.stat_result) -> None:
    """Checks that `path` is a regular file of this user that others may neither read nor write. Raises `UsageError`."""
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is no file", hint=ANEW)
    if found.st_uid != os.geteuid():
        text = f"{path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        raise UsageError(text, hint=ELSEWHERE)
    if found.st_mode & 0o077:
        text = f"{path} may be read or written by other users (mode {stat.S_IMODE(found.st_mode):04o})"
        raise UsageError(text, hint=f"chmod 600 {path}; or remove it, if others have seen it")


def _make(path: Path) -> None:
    """Write a new secret beside `path`, then link it: another process's link that came first stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_mode & 0o022 or found.st_uid not in (os.geteuid(), 0):
        text = f"other users may change {path.parent} (mode {stat.S_IMODE(found.st_mode):04o}, user {found.st_uid})"
        raise UsageError(text, hint=f"chmod 700 {path.parent}; or {ELSEWHERE}")
    draft = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _refused(error: OSError, did: str, hint: str = ELSEWHERE) -> TensorHubError:
    if shortages.is_shortage(error):
        return shortages.unavailable(error, f"it {did.replace('cannot ', 'tried to ')}")
    text = f"{did}: {error.strerror or error}"
    return UsageError(text, hint=hint)
