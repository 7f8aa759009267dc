"""Settings of a process, from arguments, `TENSORHUB_*` variables and defaults; and this user's secrets."""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from decimal import Decimal
from ipaddress import IPv6Address
from math import isfinite, nan
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

from ..protocol.errors import TensorHubError, UsageError
from ..protocol.messages import PREFETCH
from ..protocol.names import NAME_RULE, is_name, plain, plain_number
from ..protocol.settings import Settings
from ..transport import threads
from .transports import TRANSPORTS

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
    if threads.is_shortage(error):
        return threads.unavailable(error, f"it {did.replace('cannot ', 'tried to ')}")
    text = f"{did}: {error.strerror or error}"
    return UsageError(text, hint=hint)


# `Options` are settings of a worker, `Settings` those of a server. A bad value is a `UsageError` that names it.


DEFAULT_PORT = 7450
MIB = 1 << 20
MAX_CHUNK_BYTES = 1 << 30
MAX_SHARDS = 4096  # of a replica
MAX_SECONDS = 30 * 24 * 3600.0  # longer than any job's patience; keeps clocks and timers in range

Verify = Literal["full", "none"]
T = TypeVar("T")

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}\Z")
_SECRET_PART = re.compile(r"@|%40|[?#]")  # of an address: what stands before or behind it may be a secret
_SIZE = re.compile(r"(\d{1,15})\s*(|B|KiB|MiB|GiB)\Z")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def check_name(value: object, what: str) -> str:
    """A model's or replica's name. Raises `UsageError` that names the argument."""
    if isinstance(value, str) and is_name(value):
        return plain(value)
    raise UsageError(f"{what}={value!r} is no name", hint=NAME_RULE)


def check_integer(value: object, what: str, *, least: int, most: int) -> int:
    """An integer from `least` to `most`. Raises `UsageError` that names the argument."""
    number = plain_number(value)
    if isinstance(number, Integral) and not isinstance(number, bool) and least <= int(number) <= most:
        return int(number)
    raise UsageError(f"{what}={value!r} is not an integer from {least} to {most}")


def check_place(model: object, replica: object, shard: object, shards: object) -> tuple[str, str, int, int]:
    """Names of a model and a replica, and a shard of so many. Raises `UsageError` that names the argument."""
    names = check_name(model, "model"), check_name(replica, "replica")
    shards = check_integer(shards, "shards", least=1, most=MAX_SHARDS)
    if isinstance(shard, Integral) and shards == 1 and int(shard) > 0:
        raise UsageError(
            f"shard={shard} of a replica of 1 shard", hint="shards= says how many there are, on each of them"
        )
    return *names, check_integer(shard, "shard", least=0, most=shards - 1), shards


def parse_text(value: object, what: str) -> str:
    """Short text without control characters."""
    if isinstance(value, str) and len(value) <= 1000 and value.isprintable():
        return plain(value)
    raise UsageError(f"{what} is no printable text of at most 1000 characters")


def parse_token(value: object, what: str) -> str:
    """A shared secret that HTTP carries as it is; empty for none. No error shows it.

    HTTP takes blanks off both ends of what a header says, so a token with blanks would never match.
    """
    try:
        token = parse_text(value, what)
    except UsageError as error:
        raise UsageError(str(error), hint="a token that is read from a file may end with a line break") from error
    if token != token.strip():
        raise UsageError(f"{what} begins or ends with a blank", hint="remove it, on the server and on all workers")
    return token


def parse_address(value: object, what: str) -> str:
    """`host:port` of a reference server; the port may be left out, `http://` may stand before it.

    No error shows what may be a secret: a user and a password before the host, and all that follows it.
    """
    text = parse_text(value, what)
    if _SECRET_PART.search(text):
        hint = "use host:port; a token is given by itself: TENSORHUB_TOKEN, TENSORHUB_TOKEN_FILE or token="
        raise UsageError(f"{what} is no address: it has more than a host and a port", hint=hint)
    bracketed = _bracketed(text.removeprefix("http://").rstrip("/"))
    if bracketed:
        raise UsageError(f"{what}={text!r} is no address", hint=f"an IPv6 address stands in brackets: {bracketed}")
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = (parts.hostname or "").replace("%25", "%"), DEFAULT_PORT if parts.port is None else parts.port
    except ValueError as error:
        raise UsageError(f"{what}={text!r} is no address: {error}", hint="use host:port") from error
    if parts.scheme != "http" or not _HOST.match(host) or not port or parts.path not in ("", "/"):
        raise UsageError(f"{what}={text!r} is no address", hint="use host:port, for example 127.0.0.1:7450")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


MAX_ADDRESSES = 8  # of one reference server and those that stand by


def parse_addresses(value: object, what: str) -> str:
    """Several addresses with commas between them, in the order in which they are tried, or one."""
    text = parse_text(value, what)
    texts = [text] if _SECRET_PART.search(text) else [each.strip() for each in text.split(",")]
    found = dict.fromkeys(parse_address(each, what) for each in texts)
    if len(found) > MAX_ADDRESSES:
        raise UsageError(f"{what} names {len(found)} addresses, and {MAX_ADDRESSES} are the most")
    return ",".join(found)


def _bracketed(text: str) -> str:
    """An IPv6 address without brackets, perhaps with a port, as it is to be given; empty for all else."""
    host, _, port = text.rpartition(":")
    for address, its_port in ((host, port), (text, str(DEFAULT_PORT))):
        try:
            if its_port.isdecimal() and IPv6Address(address):
                return f"[{address}]:{its_port}"
        except ValueError:
            pass
    return ""


def parse_names(value: object, what: str) -> tuple[str, ...]:
    """Names of a reference server: "head,head.example.org", or a sequence of names."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else (None,)
    names = tuple(word.strip().lower().removesuffix(".") if isinstance(word, str) else "" for word in words)
    if not all(_HOST.match(name) and ":" not in name for name in names):
        hint = "use names without a port, for example head.example.org"
        raise UsageError(f"{what}={value!r} does not name hosts", hint=hint)
    return names


def parse_path(value: object, what: str) -> str:
    """The path of a file."""
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and "\0" not in path:
        return plain(path)
    raise UsageError(f"{what}={value!r} is no path")


def parse_seconds(value: object, what: str) -> float:
    """A positive number of seconds."""
    seconds = _number(value) if not isinstance(value, str) else _number_in(value)
    if not isfinite(seconds) or not 0 < seconds <= MAX_SECONDS:
        text = f"{what}={value!r} is not a number of seconds above 0 and up to {MAX_SECONDS:.0f}"
        hint = 'a call takes some milliseconds at least; to take a version without a wait there is update("prefetched")'
        raise UsageError(text, hint=hint if seconds == 0 and what == "timeout" else None)
    return seconds


def parse_fraction(value: object, what: str) -> float:
    """A part of a whole, from 0 to 1."""
    part = _number(value)
    if not 0 <= part <= 1:
        raise UsageError(f"{what}={value!r} is not a number from 0 to 1")
    return part


def parse_share(value: object, what: str) -> float:
    """A part of a whole, above 0 and up to 1."""
    part = _number_in(value) if isinstance(value, str) else _number(value)
    if not 0 < part <= 1:
        raise UsageError(f"{what}={value!r} is not a number above 0 and up to 1")
    return part


def _number(value: object) -> float:
    """Any real number: a float, an integer, a fraction, a decimal, numpy's or torch's. What is none is NaN."""
    number = plain_number(value)
    try:
        return float(number) if isinstance(number, Real | Decimal) and not isinstance(number, bool) else nan
    except (ValueError, OverflowError):
        return nan


def _number_in(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def parse_chunk_bytes(value: object, what: str) -> int:
    """Bytes, as a number or with a unit: 4194304, "4MiB"."""
    found = _size(value)
    size_bytes = int(found.group(1)) * _UNITS[found.group(2)] if found is not None else 0
    if not 1 <= size_bytes <= MAX_CHUNK_BYTES:
        raise UsageError(f"{what}={value!r} is no size from 1 B to 1 GiB", hint='use a number of bytes, or "4MiB"')
    return size_bytes


def _size(value: object) -> re.Match[str] | None:
    """A number of bytes, and the unit in which it is given."""
    given = plain_number(value)
    is_size = isinstance(given, Integral | str) and not isinstance(given, bool)
    return _SIZE.match(str(given).strip()) if is_size else None


def parse_verify(value: object, what: str) -> Verify:
    """ "full" or "none"."""
    if value == "full":
        return "full"
    if value == "none":
        return "none"
    raise UsageError(f'{what}={value!r} is neither "full" nor "none"')


def parse_transports(value: object, what: str) -> tuple[str, ...]:
    """Names of transports in order of preference: "local,tcp", or a sequence of names."""
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    names = tuple(word.strip() if isinstance(word, str) else "" for word in words)
    if not names or len(set(names)) < len(names) or not set(names) <= set(TRANSPORTS):
        known = ", ".join(TRANSPORTS)
        raise UsageError(f"{what}={value!r} does not name transports, each once", hint=f"use some of {known}")
    return names


def parse_prefetch(value: object, what: str) -> str:
    """ "seed", "always" or "never"."""
    if isinstance(value, str) and value in PREFETCH:
        return plain(value)
    raise UsageError(f"{what}={value!r} is none of {', '.join(PREFETCH)}")


def parse_limit(value: object, what: str) -> int:
    """Bytes, as a number or with a unit; 0 for none."""
    found = _size(value)
    if found is None:
        raise UsageError(f"{what}={value!r} is no size in bytes", hint='use a number of bytes, or "64GiB"; 0 for none')
    return int(found.group(1)) * _UNITS[found.group(2)]


MAX_PORT = 65535


def parse_port(value: object, what: str) -> int:
    """A port."""
    return _count(value, what, least=1, most=MAX_PORT)


def parse_retain(value: object, what: str) -> int:
    """A number of versions."""
    return _count(value, what, least=0, most=256)


def _count(value: object, what: str, *, least: int, most: int) -> int:
    """An integer, also as text."""
    is_text = isinstance(value, str) and value.strip().lstrip("+-").isdecimal()
    return check_integer(int(value) if is_text else value, what, least=least, most=most)  # type: ignore[call-overload]


SWITCHES = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}


def parse_switch(value: object, what: str) -> bool:
    """True or False; of a variable, one of the words in `SWITCHES`, in any case."""
    if isinstance(value, bool):
        return value
    found = SWITCHES.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise UsageError(f'{what}={value!r} is neither "yes" nor "no" (nor true, false, on, off, 1, 0)')
    return found


def _option(default: T, parse: Callable[[object, str], T], text: str, *, is_secret: bool = False) -> T:
    return field(default=default, repr=not is_secret, metadata={"parse": parse, "text": text})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one worker. The variable of a setting is TENSORHUB_ and its name in capitals."""

    server: str = _option(
        "127.0.0.1:7450", parse_addresses, "the reference server: host:port; several: `a:7450,b:7450`, tried in order"
    )
    token: str = _option(
        "", parse_token, "shared secret of servers and workers; empty: that of the state directory", is_secret=True
    )
    token_file: str = _option("", parse_path, "a file that has the token, instead of `token`")
    insecure: bool = _option(False, parse_switch, "show no token, and ask for none: any client may join and read")
    site: str = _option("", parse_text, "this worker's datacenter")
    host: str = _option("", parse_text, "addresses or interfaces to be read at; empty: the one that reaches the server")
    data_port: int | None = _option(
        None,
        parse_port,
        "first of 32 ports at which peers read from this worker: each transport takes a free one; empty: any port",
    )
    # 34 ms at 1 Gbit/s and 160 us at 25 GB/s: the most that a drain waits for; 250 chunks in a shard of 1 GiB
    chunk_bytes: int = _option(4 * MIB, parse_chunk_bytes, "the unit of progress, verification and resumption")
    verify: Verify = _option("full", parse_verify, 'check every chunk on arrival: "full" or "none"')
    transports: tuple[str, ...] = _option(
        (),
        parse_transports,
        "ways to move bytes, best first; empty: cuda (where a GPU and its extra are), local, nixl (RDMA or a GPU), tcp",
    )
    ptrace: bool = _option(True, parse_switch, "under Yama, let processes of the same user read this one's memory")
    device_share: float = _option(
        1.0, parse_share, "the part of the time that this worker's reads by `cuda` may keep its device busy"
    )
    host_bytes: int | None = _option(
        None,
        parse_limit,
        "limit of host memory for copies; empty: two of the shard, or `retain` + 1, if there is room",
    )
    pinned_bytes: int | None = _option(
        None,
        parse_limit,
        "limit of host memory that this process registers with CUDA for copies; empty: a quarter of the host's memory",
    )
    prefetch: str = _option("seed", parse_prefetch, 'fill a host copy ahead: "seed" of a site, "always" or "never"')
    retain: int = _option(
        0, parse_retain, "newest versions of the model to keep, until all its workers have left; 0: as the server says"
    )
    metrics_port: int | None = _option(
        None, parse_port, "first of 32 ports for this process's page of metrics: it takes a free one; empty: no page"
    )
    # a lease is 10 s: by then the place of a predecessor that died is free
    connect_s: float = _option(15.0, parse_seconds, "how long open() waits for the reference server")
    timeout_s: float = _option(300.0, parse_seconds, "how long every other call may take")


_SERVER_TEXTS = {  # of `Settings`, those that an operator may have a reason to change
    "default_retain": "newest versions of a model that no voluntary departure may lose, unless its workers want more",
    "keep_established": "keep the newest version that is whole outside its publisher until a newer one is",
    "lease_s": "how long a worker that says nothing is believed to be alive",
    "report_s": "a worker says how things are at least this often",
    "drift": "a worker trusts its lease for (1 - drift) of it: the difference of two clocks' speeds",
    "slow_s": "over how long a read is measured: one that brings nothing, or far less than others, gets another source",
    "keep_held_s": "an update keeps what it holds if no newer source was heard for so long; `lease_s`: never",
    "max_retain": "versions to keep that a worker may ask for",
    "max_workers": "workers at a time",
}


@dataclass(frozen=True)
class Row:
    """One setting, for the documentation."""

    name: str
    variable: str
    default: str
    text: str
    of: str  # "worker" or "server"


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"TENSORHUB_{name.upper()}"


def worker_options(environ: Mapping[str, str] | None = None, **arguments: object) -> Options:
    """Reads the options of a worker. An argument that is None was not given. Raises `UsageError`."""
    token, token_file, insecure = map(arguments.get, ACCESS)
    access = access_of(environ, token=token, token_file=token_file, insecure=insecure)
    return replace(options_without_token(environ, **arguments), token=access.token, insecure=access.insecure)


class LoadArguments(TypedDict, total=False):
    """What `load` and `open` take; what is None, or left out, comes from the environment, else from its default."""

    server: str | None
    site: str | None
    token: str | None
    insecure: bool | None
    host: str | None
    verify: str | None
    transports: str | Sequence[str] | None


class OpenArguments(LoadArguments, total=False):
    """What `open` takes beside a place in a model. `timeout` is for the call itself, `call_timeout` for later ones."""

    chunk_bytes: int | str | None
    prefetch: str | None
    retain: int | None
    host_bytes: int | str | None
    timeout: float | None
    call_timeout: float | None


def check_arguments(given: Mapping[str, object], known: type) -> None:
    """Raises `TypeError`, as Python does, for one that there is none of."""
    names = known.__annotations__
    for name in given:
        if name not in names:
            raise TypeError(f"got an unexpected keyword argument {name!r}; there are {', '.join(names)}")


def open_options(**given: Unpack[OpenArguments]) -> Options:
    """Reads the options of `open`. Raises `UsageError`, and `TypeError` for an argument that there is none of."""
    check_arguments(given, OpenArguments)
    arguments: dict[str, object] = {**given}
    for argument, name in (("timeout", "connect_s"), ("call_timeout", "timeout_s")):
        seconds = arguments.pop(argument, None)
        arguments[name] = None if seconds is None else parse_seconds(seconds, argument)
    return worker_options(None, **arguments)


def options_without_token(environ: Mapping[str, str] | None = None, **arguments: object) -> Options:
    """Reads all options but the token, which the caller does not need."""
    environ = os.environ if environ is None else environ
    found: dict[str, object] = {}
    for each in fields(Options):
        given = _given(each, environ, arguments) if each.name not in ACCESS else None
        if given is not None:
            found[each.name] = each.metadata["parse"](*given)
    return replace(Options(), **found)  # type: ignore[arg-type]


TOKEN = "token"  # the secret that this user's servers and workers share
ACCESS = ("token", "token_file", "insecure")
ACCESS_VARIABLES = ("TENSORHUB_STATE_DIR", *map(variable_of, ACCESS))
OTHER_HOST = (  # what to do about a token that is not the server's
    "give the server's: copy ~/.local/state/tensorhub/token from its host and user to the same place here (mode 600), "
    "or set TENSORHUB_TOKEN, TENSORHUB_TOKEN_FILE or token=, and do not set insecure"
)


@dataclass(frozen=True)
class Access:
    """Which token is shown and asked for. Without one all clients are let in."""

    token: str = field(default="", repr=False)
    insecure: bool = False
    kept_in: str = ""  # the file of the state directory, where the token is that file's


def access_of(
    environ: Mapping[str, str] | None = None,
    *,
    token: object = None,
    token_file: object = None,
    insecure: object = None,
    create: bool = False,
) -> Access:
    """Reads the token from the arguments, else the environment, else the state directory. Raises `UsageError`.

    An empty token counts as none given. `create`: where there is none, the state directory gets one.
    """
    environ = os.environ if environ is None else environ
    given = zip(ACCESS, (token, token_file, insecure), strict=True)
    found = {name: (value, name) for name, value in given if value is not None and value != ""}
    is_guarded = "insecure" in found and not parse_switch(*found["insecure"])
    if is_guarded:
        del found["insecure"]
    if not found:
        found = {name: (value, variable_of(name)) for name in ACCESS if (value := environ.get(variable_of(name)))}
        if "insecure" in found and (is_guarded or not parse_switch(*found["insecure"])):
            del found["insecure"]
    if len(found) > 1:
        names = " and ".join(what for _, what in found.values())
        raise UsageError(f"{names} are given together", hint="give one of them")
    if "insecure" in found:
        return Access(insecure=True)
    if "token" in found:
        return Access(parse_token(*found["token"]))
    if "token_file" in found:
        path = parse_path(*found["token_file"])
        return Access(parse_token(read_secret(Path(path)), path))
    token = secret(TOKEN, create=create, environ=environ)
    if token is None:
        return Access()
    path = str(state_directory(environ) / TOKEN)
    return Access(parse_token(token, path), kept_in=path)


def with_own_token(options: Options) -> Options:
    """The same, with the token that a server of this user has made since."""
    return options if options.token or options.insecure else replace(options, token=access_of().token)


def server_names(names: object = None) -> tuple[str, ...]:
    """The names, beside its machine's own, by which clients may reach a reference server. Raises `UsageError`."""
    if names is not None:
        return parse_names(names, "names")
    text = os.environ.get("TENSORHUB_NAMES", "")
    return parse_names(text, "TENSORHUB_NAMES") if text else ()


def server_settings(environ: Mapping[str, str] | None = None, **arguments: object) -> Settings:
    """Reads the settings of a reference server. Raises `UsageError`."""
    environ = os.environ if environ is None else environ
    found: dict[str, object] = {}
    for each in _server_fields():
        given = _given(each, environ, arguments)
        if given is not None:
            least = 0 if each.name == "default_retain" else 1
            if isinstance(each.default, bool):
                found[each.name] = parse_switch(*given)
            elif isinstance(each.default, int):
                found[each.name] = _count(*given, least=least, most=2**31)
            else:
                found[each.name] = parse_seconds(*given)
    settings = replace(Settings(), **found)  # type: ignore[arg-type]
    if settings.drift >= 1 or settings.report_s >= settings.trust_s:
        raise UsageError(
            f"lease_s={settings.lease_s} with report_s={settings.report_s} and drift={settings.drift}: no report could "
            "renew a lease in time",
            hint="let lease_s be several times report_s",
        )
    return settings


def table() -> list[Row]:
    """Every setting, its variable, default and meaning, in the order of its declaration."""
    worker = [
        Row(each.name, variable_of(each.name), _shown(each), str(each.metadata["text"]), "worker")
        for each in fields(Options)
    ]
    server = [
        Row(each.name, variable_of(each.name), _shown(each), _SERVER_TEXTS[each.name], "server")
        for each in _server_fields()
    ]
    return worker + server


def _server_fields() -> "list[Field[object]]":
    return [each for each in fields(Settings) if each.name in _SERVER_TEXTS]


def _given(
    each: "Field[object]", environ: Mapping[str, str], arguments: Mapping[str, object]
) -> tuple[object, str] | None:
    """The value that was given, and under which name; None where none was."""
    argument = arguments.get(each.name)
    if argument is not None:
        return argument, each.name
    variable = variable_of(each.name)
    text = environ.get(variable, "")
    return (text, variable) if text else None


def _shown(each: "Field[object]") -> str:
    if isinstance(each.default, bool):
        return "yes" if each.default else "no"
    if isinstance(each.default, tuple):
        return ",".join(each.default)
    return "" if each.default in ("", None, MISSING) else str(each.default)
