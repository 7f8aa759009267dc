"""Opens a worker: its transports, its hello and its connection; and closes at exit what was left open."""

import asyncio
import atexit
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from msgspec.structs import replace

from ..protocol.errors import (
    ServerUnreachable,
    ShardTaken,
    TensorHubError,
    TransportMissing,
    Unavailable,
    UsageError,
)
from ..protocol.messages import PROTOCOL, Hello
from ..protocol.names import ModelName, ReplicaName, Shard
from ..transport import sealed, threads
from ..transport.base import Transport
from ..transport.local.transport import LocalTransport
from ..transport.tcp.addresses import host_of, is_loopback, parse_endpoint
from ..transport.threads import Thread, start
from .client import Client, living
from .config import OTHER_HOST, Options
from .loops import in_thread, loop_thread
from .metrics import open_page
from .transports import TRANSPORTS, wanted_transports

if TYPE_CHECKING:
    pass


_log = logging.getLogger(__name__)

TRY_TCP = "add tcp to transports= or TENSORHUB_TRANSPORTS, and see `tensorhub doctor`"
MAX_PROBE_S = 30.0  # of NIXL, in a child process: it takes 1 s, and 6 s were seen under ten times too much load
PROBE_SHARE = 0.5  # and at most so much of what `open` may take: a NIXL that hangs must not make it fail
ABANDONED_S = 5.0  # for a worker whose caller gave up to leave: it takes milliseconds with a server there
EXIT_S = 0.5  # for all workers: the interpreter must not hang


async def open_client(
    model: str,
    replica: str,
    shard: int,
    shards: int,
    reliable: bool,
    options: Options,
    deadline: float,
    *,
    is_passing: bool = False,
) -> Client:
    """A connected worker. In the worker loop. Whatever ends it before, nothing of it is left.

    `is_passing`: it comes for one version and leaves.
    """
    listening, page = Listening(options), None
    try:
        try:
            async with asyncio.timeout_at(deadline):
                host = options.host or await in_thread(partial(_address_towards, options.server), name="resolve")
                probe_s = min(MAX_PROBE_S, PROBE_SHARE * (deadline - time.monotonic()))
                transports = await in_thread(partial(listening.listen, host, probe_s), name="listen")
        except TimeoutError as error:
            text = f"{model}/{replica}[{shard}]: names on the way to {options.server} were not resolved in time"
            raise ServerUnreachable(text, hint="is the name service of this machine well?") from error
        page = await open_page(options, *_page_host(host, transports))
        hello = _hello(model, replica, shard, shards, reliable, options, transports)
        hello = replace(hello, is_passing=is_passing, metrics="" if page is None else page.address)
        client = Client(hello, options, transports)
        if page is not None:
            page.show(client.driver, options.token)
        await client.start(deadline)
    except ShardTaken as error:
        listening.give_up()
        same = [other for other in list(living) if other.me == client.me and other.options.server == options.server]
        if any(not other.driver.is_gone for other in same):
            hint = "close() that one first, or use `with`: a notebook cell that is run twice leaves it open"
            raise ShardTaken(f"{client.me} is open in this process already", hint=hint) from error
        raise
    except BaseException:
        listening.give_up()
        if page is not None:
            await page.leave(None)
        raise
    living.add(client)
    return client


async def leave_at_once(client: Client) -> None:
    """Close one whose caller has given up meanwhile."""
    await client.close(time.monotonic() + ABANDONED_S)


class Listening:
    """Transports that are made in a thread, for a caller that may no longer wait for them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._found: dict[str, Transport] = {}
        self._is_given_up = False
        self._lock = threading.Lock()

    def listen(self, host: str, probe_s: float) -> dict[str, Transport]:
        """Called in a thread: makes the transports. Raises `TransportMissing`, `Unavailable` or `UsageError`."""
        found = _listen(host, self._options, probe_s)
        with self._lock:
            self._found = found
            is_given_up = self._is_given_up
        if is_given_up:
            self._close()
        return found

    def give_up(self) -> None:
        """They are not used: they are closed, or will be once they are there. Closing takes a moment, in a thread."""
        with self._lock:
            self._is_given_up = True
            is_there = bool(self._found)
        if is_there:
            try:
                start(Thread(self._close, name="tensorhub-close"))
            except Unavailable:
                self._close()

    def _close(self) -> None:
        for transport in self._found.values():
            transport.close()


def _hello(
    model: str,
    replica: str,
    shard: int,
    shards: int,
    reliable: bool,
    options: Options,
    transports: Mapping[str, Transport],
) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        model=ModelName(model),
        replica=ReplicaName(replica),
        shard=Shard(shard),
        shards=shards,
        life=uuid4().hex,
        endpoints=tuple(transport.endpoint for transport in transports.values()),
        revocable=all(transport.is_revocable for transport in transports.values()),
        reliable=reliable,
        site=options.site,
        host=socket.gethostname(),
        token=options.token,
        prefetch=options.prefetch,
        retain=options.retain,
        place=_place(transports),
    )


def _page_host(host: str, transports: Mapping[str, Transport]) -> tuple[str, str]:
    """Where a page listens, and where others reach it: as the `tcp` transport, if there is one."""
    tcp = transports.get("tcp")
    if tcp is None:
        first = host.partition(",")[0].strip()
        return first, first
    return tcp.addresses[0], parse_endpoint(tcp.endpoint)[0][0]


def _place(transports: Mapping[str, Transport]) -> str:
    """The place in which workers can map host copies; empty if they cannot. Raises `Unavailable` at a limit."""
    local = transports.get("local")
    if not isinstance(local, LocalTransport):
        return ""
    try:
        sealed.probe()
    except sealed.Unmappable as error:
        if error.__cause__ is not None and threads.is_shortage(error.__cause__):
            raise threads.unavailable(error.__cause__, "it made memory that others can map") from error
        return ""
    return local.mapping_place


def _listen(host: str, options: Options, probe_s: float) -> dict[str, Transport]:
    """The transports that are wanted and can be had, in the order wanted. Those that cannot be had are logged."""
    found: dict[str, Transport] = {}
    missing: list[str] = []
    try:
        for scheme in wanted_transports(options):
            try:
                found[scheme] = make_transport(scheme, host, options, probe_s=probe_s)
            except TransportMissing as error:
                missing.append(f"{scheme}: {error}")
                _log.info("no %s transport here: %s%s", scheme, error, f" ({error.hint})" if error.hint else "")
        if not found:
            raise TransportMissing(f"none of the wanted transports is here: {'; '.join(missing)}", hint=TRY_TCP)
        _check_guarded(found, options)
    except BaseException:
        for transport in found.values():
            transport.close()
        raise
    return found


def _check_guarded(transports: Mapping[str, Transport], options: Options) -> None:
    """Without a token only this host may read, unless the caller says that all may. Raises `UsageError`."""
    if options.token or options.insecure:
        return
    for transport in transports.values():
        if not all(map(is_loopback, transport.addresses)):
            at = ", ".join(transport.addresses)
            text = f"other hosts could read from this worker, at {at}, and it has no token"
            raise UsageError(text, hint=f"{OTHER_HOST}; or let any client read: insecure=True, TENSORHUB_INSECURE=1")


def make_transport(scheme: str, host: str, options: Options, *, probe_s: float = MAX_PROBE_S) -> Transport:
    """A transport by its scheme, listening. Raises `TransportMissing` where it cannot be had, or is `Unavailable` now.

    The first `nixl` of a process tries NIXL in a child process, which takes about a second, and `probe_s` at most.
    """
    if scheme not in TRANSPORTS:
        raise TransportMissing(f"this version of tensorhub has no transport {scheme!r}")
    try:
        return TRANSPORTS[scheme].make(host, options, probe_s)
    except OSError as error:
        if threads.is_shortage(error):
            raise threads.unavailable(error, f"it made its {scheme} transport") from error
        text = f"cannot listen for peers on host={host!r}: {error.strerror or error}"
        hint = "set host= or TENSORHUB_HOST to an address of this machine"
        if error.errno == errno.EADDRINUSE and options.data_port:
            text = f"{text}, at each port from {options.data_port} on"
            hint = "set TENSORHUB_DATA_PORT to the first of 32 ports that are free"
        raise UsageError(text, hint=hint) from error


def _address_towards(server: str) -> str:
    """This machine's address on the way to the server: peers reach us there. Sends nothing."""
    for each in server.split(","):
        host, _, port = each.rpartition(":")
        with threads.tolerated("it looked for its own address"):
            for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM):
                with threads.tolerated("it looked for its own address"), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return host_of(probe.getsockname())
    return "127.0.0.1"


def _close_forgotten() -> None:
    """Called at interpreter exit: tells the server which workers leave. Takes at most half a second."""
    _close_all(EXIT_S)


def leave_on_sigterm(grace_s: float) -> None:
    """On SIGTERM: close every worker of this process within the grace, then end as SIGTERM does. Main thread only."""

    def leave(number: int, _: object) -> None:
        _log.info("SIGTERM: leaving within %.3g s", grace_s)
        _close_all(grace_s)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    try:
        signal.signal(signal.SIGTERM, leave)
    except ValueError as error:
        raise UsageError("leave_on_sigterm() is for the main thread", hint="call it before starting threads") from error


def _close_all(patience_s: float) -> None:
    if not living:
        return
    thread = loop_thread()
    deadline = time.monotonic() + patience_s

    async def close_all() -> None:  # in the loop, where workers come and go
        clients = [client for client in list(living) if not client.driver.is_gone]
        await asyncio.gather(*(client.driver.leave(deadline) for client in clients), return_exceptions=True)

    with contextlib.suppress(TensorHubError, RuntimeError, asyncio.CancelledError):
        thread.wait(close_all(), deadline=deadline, what="closing at exit")


def _forget_after_fork() -> None:
    living.clear()


atexit.register(_close_forgotten)
os.register_at_fork(after_in_child=_forget_after_fork)
