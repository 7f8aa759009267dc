"""A reference server's life: in the foreground for `tensorhub serve`, or in a thread of this process.

It must never: leave a port, a thread or a signal handler behind.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypedDict

from aiohttp import web

from ..protocol.errors import Closed, TensorHubError, UsageError
from ..protocol.settings import Settings
from ..protocol.status import Status
from ..transport import threads
from ..transport.tcp.addresses import check_all_interfaces, is_loopback
from ..transport.threads import Thread, block_sigpipe, start
from .admission import Seldom, check_limit, raise_limit
from .config import access_of, check_integer, parse_address, parse_text, server_names, state_directory
from .journal import JournalFile, JournalInUse
from .loops import check_process, check_unpatched, held_lock, inheritable_loop, wait_in, warn_unreferenced
from .server import SPARE_CONNECTIONS, ServerShell
from .standby import First

_log = logging.getLogger(__name__)

STOP_S = 0.5  # for open requests, and for what a request goes on to send; workers are told goodbye within one second
IDLE_S = 75.0  # between two requests on a connection: more than the minute after which a proxy may cut it
START_S = 30.0
BACKLOG = 1024
STANDBY_S = 0.2  # so often a standby server looks whether the other one is gone
GARBAGE_AFTER = 50_000  # new objects: some tens of megabytes


class Access(TypedDict):
    """Who may ask the server."""

    token: str | None
    insecure: bool | None
    names: str | Sequence[str] | None


class Beginning(TypedDict):
    """How a server begins."""

    fresh: bool
    state: str | os.PathLike[str] | None
    standby: bool
    standby_of: str


class RunningServer:
    """A reference server in the running loop."""

    def __init__(self, shell: ServerShell, runner: web.AppRunner, address: str, token: str) -> None:
        self.shell = shell
        self.address = address
        self.token = token
        self._runner = runner

    async def stop(self) -> None:
        """Say goodbye to all workers and free the port."""
        await self._runner.cleanup()


async def start_server(
    host: str,
    port: int,
    *,
    settings: Settings,
    token: str | None = None,
    insecure: bool | None = None,
    names: str | Sequence[str] | None = None,
    fresh: bool,
    state: str | os.PathLike[str] | None = "",
    standby: bool = False,
    standby_of: str = "",
) -> RunningServer:
    """Listen. With `standby` it waits until no other server uses the journal. Port 0 takes any free port.

    `standby_of`: the address of a server whose journal it copies, until that one has been gone for two leases.

    Raises `Unavailable` at a limit of this process. Raises `UsageError` for what is no address, or one that cannot be
    had, for a token that no client could give, and where the token of this user cannot be made.
    """
    check_integer(port, "port", least=0, most=65535)
    host = parse_text(host, "host").strip("[]")
    shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
    access = access_of(token=token, insecure=insecure, create=True)
    called = (host, *server_names(names))
    journal = await _journal(state, port, is_standby=standby)
    first = First(parse_address(standby_of, "standby_of"), access.token, settings) if standby_of else None
    if first is not None:
        if journal is None or fresh:
            raise UsageError("a standby server needs a journal, and is not fresh", hint="give --state, not --fresh")
        await first.follow(journal)
    shell = ServerShell(settings=settings, token=access.token, names=called, fresh=fresh, journal=journal, first=first)
    seldom = Seldom()
    seldom.listen_to(asyncio.get_running_loop())
    runner = web.AppRunner(
        shell.application(),
        access_log=None,
        logger=seldom,
        keepalive_timeout=IDLE_S,
        lingering_time=STOP_S,
        shutdown_timeout=STOP_S,
        handler_cancellation=True,
    )
    await runner.setup()
    shell.accepted.server = runner.server
    try:
        await _site(runner, host, port).start()
    except TensorHubError:
        await runner.cleanup()
        raise
    except OSError as error:
        await runner.cleanup()
        if threads.is_shortage(error):
            raise threads.unavailable(error, f"it listened on {shown}:{port}") from error
        raise _not_to_be_had(f"{shown}:{port}", error) from error
    if threads.lacks_files():  # asyncio passes over an address for which it has no socket
        await runner.cleanup()
        raise threads.unavailable(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), f"it listened on {shown}:{port}")
    bound = runner.addresses[0][1]
    if not all(is_loopback(address[0]) for address in runner.addresses):
        shell.names.look_up()
        if access.insecure:
            _log.warning(
                "this server is insecure: any client that reaches %s:%d may join, publish and read", shown, bound
            )
    return RunningServer(shell, runner, f"{shown}:{bound}", access.token)


def _site(runner: web.AppRunner, host: str, port: int) -> web.BaseSite:
    """The site to listen on. All interfaces are one socket, so that both families have one port."""
    if host not in ("", "::"):
        return web.TCPSite(runner, host, port, backlog=BACKLOG)
    if host:
        check_all_interfaces(f"cannot listen on [::]:{port}")
    if not socket.has_dualstack_ipv6():
        return web.TCPSite(runner, "0.0.0.0", port, backlog=BACKLOG)
    everywhere = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return web.SockSite(runner, everywhere, backlog=BACKLOG)


async def _journal(state: str | os.PathLike[str] | None, port: int, *, is_standby: bool) -> JournalFile | None:
    """Opens the journal in that file. Empty: that of the port in the state directory; None: there is none."""
    if state is None or (not state and not port):
        if is_standby:
            raise UsageError("a standby server needs the journal of the server that it waits for", hint="give --state")
        return None
    if state or is_standby:
        return await _opened(Path(state) if state else _usual_journal(port), is_standby=is_standby)
    try:
        return JournalFile(_usual_journal(port))
    except UsageError as error:
        _log.warning("a restart of this server will wait for a lease, for it cannot keep a journal: %s", error)
        return None


def _usual_journal(port: int) -> Path:
    return state_directory() / f"server-{port}.journal"


async def _opened(path: Path, *, is_standby: bool) -> JournalFile:
    """The journal; a standby server waits until the system says that no process uses it."""
    is_told = False
    while True:
        try:
            return JournalFile(path)
        except JournalInUse:
            if not is_standby:
                raise
        if not is_told:
            _log.info("stands by: another server uses the journal %s", path)
            is_told = True
        await asyncio.sleep(STANDBY_S)


def _not_to_be_had(address: str, error: OSError) -> UsageError:
    """The error for an address that the system refuses: it says whose fault that is."""
    text, hint = f"cannot listen on {address}: ", None
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, None):  # asyncio's own, from 3.13 on
        text += "this machine does not have that address"
        hint = "use one of its own, for example 127.0.0.1, or 0.0.0.0 for all of them; the port is given apart from it"
    elif error.errno == errno.EADDRINUSE:
        text += "that port is in use"
        hint = f"is another server running there? `tensorhub status --server {address}` tells; or use another port"
    elif error.errno in (errno.EACCES, errno.EPERM):
        text, hint = f"{text}this user may not", "use a port from 1024 on"
    else:
        text += str(error.strerror or error)
    return UsageError(text, hint=hint)


def run_server(
    host: str,
    port: int,
    *,
    settings: Settings,
    token: str | None = None,
    insecure: bool | None = None,
    names: str | Sequence[str] | None = None,
    fresh: bool = False,
    state: str | os.PathLike[str] | None = "",
    standby: bool = False,
    standby_of: str = "",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Run a reference server until SIGTERM or SIGINT; blocks. `on_ready` gets its address once it listens.

    The process is taken for the server's own: garbage is collected rarely, since next to all of it goes by itself, and
    it may open as many connections as the system lets it.

    Raises `UsageError` if the address cannot be had, and what the machine raised if it contradicted itself.
    """

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        access = Access(token=token, insecure=insecure, names=names)
        how = Beginning(fresh=fresh, state=state, standby=standby, standby_of=standby_of)
        beginning = start_server(host, port, settings=settings, **access, **how)
        server = await _unless(stop, beginning)
        if server is None:
            return  # while it stood by
        _log.info("reference server at %s", server.address)
        check_limit(raise_limit(), settings.max_workers + SPARE_CONNECTIONS)
        if on_ready is not None:
            on_ready(server.address)
        await _either(stop, server.shell.on_failure)
        _log.info("reference server at %s stops", server.address)
        await server.stop()
        if server.shell.failure is not None:
            raise server.shell.failure

    with (
        threads.named("it ran a server"),
        _garbage_collected_rarely(),
        asyncio.Runner(loop_factory=_fastest_loop()) as runner,
    ):
        runner.run(serve())


@contextlib.contextmanager
def _garbage_collected_rarely() -> Iterator[None]:
    """Python looks for circles after each 700 new objects: here a tenth of the processor's time, for next to none."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _Life:
    """What a server's thread knows of it: not who started it, so that an unreferenced one can be closed."""

    def __init__(self, start: Callable[[], Coroutine[object, object, RunningServer]]) -> None:
        self.address = ""
        self.token = ""  # that its workers are to show; empty: it is insecure
        self.tried = held_lock()  # until it listens, or could not
        self.error: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.server: RunningServer | None = None
        self._stop: asyncio.Event | None = None
        self._has_tried = False
        self._start = start

    def run(self) -> None:
        """Runs in its thread until it ends."""
        block_sigpipe()
        try:
            with threads.named("it ran a server"), asyncio.Runner(loop_factory=inheritable_loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # noqa: BLE001 - the top of a thread: raised where the server was started
            self.error = error
            if self._has_tried:
                _log.critical("the reference server at %s has ended: %r", self.address, error)
        finally:
            self._note_tried()

    def stop(self) -> None:
        """Called from any thread. Does not wait."""
        if self.loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self.loop.call_soon_threadsafe(self._stop.set)

    def _note_tried(self) -> None:
        if not self._has_tried:
            self._has_tried = True
            self.tried.release()

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.server = await self._start()
        self.address, self.token = self.server.address, self.server.token
        self._note_tried()
        await _either(self._stop, self.server.shell.on_failure)
        await self.server.stop()
        if self.server.shell.failure is not None:
            raise self.server.shell.failure


class ServerThread:
    """A reference server inside this process, in a thread of its own: for notebooks, tests and single-node runs.

    Runs from the start until `close` or the end of its `with` block; an unreferenced one is a
    `ResourceWarning`, and it ends. A child that is forked meanwhile does not have it.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        settings: Settings | None = None,
        token: str | None = None,
        insecure: bool | None = None,
        names: str | Sequence[str] | None = None,
        fresh: bool = True,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        check_unpatched()
        self._pid = os.getpid()
        self._life = _Life(
            partial(
                start_server,
                *(host, port),
                settings=settings or Settings(),
                token=token,
                insecure=insecure,
                names=names,
                fresh=fresh,
                state=state,
            )
        )
        self._is_closed = False
        self._thread = Thread(self._life.run, name="tensorhub-server")
        try:
            start(self._thread)
            if not self._life.tried.acquire(timeout=START_S):
                raise TensorHubError(f"the reference server did not start within {START_S:.0f} s")
            if self._life.error is not None:
                raise self._life.error
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """What `open` takes as `server`."""
        return self._life.address

    @property
    def token(self) -> str:
        """The token that its workers have to show. Empty if it is insecure."""
        return self._life.token

    @property
    def _server(self) -> RunningServer | None:
        return self._life.server

    def __repr__(self) -> str:
        return f"<reference server at {self.address}>"

    def __enter__(self) -> "ServerThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and not getattr(self, "_is_closed", True) and os.getpid() == self._pid:
            was_alive = self._thread.is_alive()  # it may end as soon as it is told to
            self._life.stop()
            if was_alive:
                warn_unreferenced(self, repr(self))

    def status(self) -> Status:
        """The status, read inside this process. Raises `Closed` once it has ended, and in a child that was forked."""
        check_process(self._pid, repr(self))
        loop, server = self._life.loop, self._server
        assert loop is not None
        assert server is not None
        work = _ask(server.shell)
        try:
            return wait_in(loop, work, deadline=time.monotonic() + START_S, what="status()")
        except (RuntimeError, asyncio.CancelledError) as error:
            work.close()
            if isinstance(error, RuntimeError) and not loop.is_closed():
                raise
            raise Closed(f"{self!r} is closed", hint="start another with tensorhub.serve()") from error

    def close(self) -> None:
        """Stop it and free its port. Idempotent."""
        self._is_closed = True
        if os.getpid() == self._pid and self._thread.is_alive():
            self._life.stop()
            self._thread.join(STOP_S + START_S)


async def _ask(shell: ServerShell) -> Status:
    return shell.status()


async def _either(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _unless(stop: asyncio.Event, work: Coroutine[object, object, RunningServer]) -> RunningServer | None:
    """What the work gives; None if it was to stop before."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except Exception as error:  # noqa: BLE001 - whatever a broken one raises, asyncio's own loop does
        if not isinstance(error, ModuleNotFoundError):
            _log.warning("uvloop cannot be loaded, and is done without: %r", error)
        return None
    return uvloop.new_event_loop
