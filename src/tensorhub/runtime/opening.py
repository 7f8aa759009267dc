"""Makes a worker: its transports, its hello, its line to the server; and closes those that were forgotten at exit."""

import asyncio
import atexit
import contextlib
import os
import socket
import time
from functools import partial
from uuid import uuid4

from ..core.errors import TensorHubError, UsageError
from ..core.messages import PROTOCOL, Hello
from ..core.names import ModelName, ReplicaName, Shard
from ..transport.base import Transport
from ..transport.tcp import TcpTransport
from ..transport.tcp_settings import TcpSettings
from .client import Client
from .config import Options
from .loops import in_thread, loop_thread

EXIT_S = 0.5  # for everybody together: the interpreter must not hang

_open_clients: dict[Client, int] = {}  # and the process that opened each


async def open_client(
    model: str, replica: str, shard: int, shards: int, reliable: bool, options: Options, deadline: float
) -> Client:
    """A connected worker. In the worker loop."""
    transports = await in_thread(partial(_transports, options), name="listen")
    hello = Hello(
        protocol=PROTOCOL,
        model=ModelName(model),
        replica=ReplicaName(replica),
        shard=Shard(shard),
        shards=shards,
        life=uuid4().hex,
        endpoints=tuple(transport.endpoint for transport in transports.values()),
        reliable=reliable,
        site=options.site,
        host=socket.gethostname(),
        token=options.token,
    )
    client = Client(hello, options, transports)
    await client.start(deadline)
    _open_clients[client] = os.getpid()
    return client


def _transports(options: Options) -> dict[str, Transport]:
    """Listen for peers. Blocks for as long as it takes to resolve names."""
    host = options.host or _address_towards(options.server)
    try:
        tcp = TcpTransport(TcpSettings(host=host, token=options.token or None))
    except OSError as error:
        text = f"cannot listen for peers on host={host!r}: {error.strerror or error}"
        raise UsageError(text, hint="set host= or TENSORHUB_HOST to an address of this machine") from error
    return {"tcp": tcp}


def _address_towards(server: str) -> str:
    """This machine's address on the way to the server: peers reach us there. Sends nothing."""
    host, _, port = server.rpartition(":")
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _close_forgotten() -> None:
    """At the end of the interpreter: tell the server of those who leave, as far as half a second goes."""
    clients = [client for client, pid in _open_clients.items() if pid == os.getpid() and not client.driver.is_gone]
    if not clients:
        return
    thread = loop_thread()
    deadline = time.monotonic() + EXIT_S

    async def close_all() -> None:
        await asyncio.gather(*(client.close(deadline) for client in clients), return_exceptions=True)

    with contextlib.suppress(TensorHubError, RuntimeError, asyncio.CancelledError):
        thread.wait(close_all(), deadline=deadline, what="closing at exit")


atexit.register(_close_forgotten)
