"""HTTP to a reference server whose name may not be resolved: a name service that hangs holds nobody up.

A name is looked up in a daemon thread. The event loop's own threads are waited for at the interpreter's exit, so a
lookup that hangs would keep a process alive long after its call has ended. It must never: look up a plain address.
"""

import socket
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from ..core.errors import Unavailable
from ..transport.tcp_addresses import host_of
from .loops import in_thread

_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class ThreadResolver(AbstractResolver):
    """Looks names up in daemon threads. Raises `OSError` if it cannot; so aiohttp knows it."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host, in the order in which they are to be tried."""
        try:
            return await in_thread(partial(_look_up, host, port, family), name="resolve")
        except Unavailable as error:
            raise OSError(str(error)) from error

    async def close(self) -> None:
        """There is nothing to give back."""


def http_session(*, timeout: aiohttp.ClientTimeout | None = None) -> aiohttp.ClientSession:
    """A session that looks names up so; without `timeout`, each request says its own. In a running loop."""
    connector = aiohttp.TCPConnector(resolver=ThreadResolver())
    return aiohttp.ClientSession(connector=connector, timeout=timeout or aiohttp.ClientTimeout())


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = []
    for kind, _, proto, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
    ):
        where = host_of(address)
        found.append(
            ResolveResult(hostname=host, host=where, port=int(address[1]), family=kind, proto=proto, flags=_NUMERIC)
        )
    return found
