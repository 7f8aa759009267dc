"""Stands by for a reference server on another host: copies its journal, and tells which of two servers goes on.

A standby server asks the first one for its journal once a report. When it has got no answer for two leases, it begins,
with a higher life. Time for which it stood still itself does not count. One without a journal needs an answer first.
The copy may lack the latest sessions, so it listens for a lease. It goes on asking: of two servers that hear of each
other the one with the higher life goes on, and the other one stops. That may have let workers read, of which the one
that goes on knows nothing: so it listens for a lease once more.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from ..protocol.errors import Refused, TensorHubError, UsageError
from ..protocol.settings import Settings
from .connection import CONNECT_S, MAX_NUMBER, http_session, why_away
from .journal import JournalFile

_log = logging.getLogger(__name__)

PATH = "/v1/journal"
LEASES = 2  # without a word of the first server: then no worker trusts what that has said
LIFE, PART, BEGINS = "TensorHub-Life", "TensorHub-Journal", "TensorHub-Offset"  # headers of an answer
STOPS = 409  # HTTP: the server that answers has the lower life, and stops
ASK = 0.25  # of a lease: for one answer
REFUSALS = {
    404: "it keeps no journal: give it --state",
    421: "it is not called so: name its IP address, or give it that name with --name",
}


def other_server(life: int) -> TensorHubError:
    """The error by which a server stops when another one has a higher life."""
    text = f"another reference server began later (life {life}), and has its workers"
    return TensorHubError(text, hint="start it again with --standby-of and the address of that one")


@dataclass
class First:
    """The server for which this one stands by."""

    address: str
    token: str
    settings: Settings
    part: str = ""  # of its journal: another one once that is begun anew
    has_bytes: int = 0  # of that part

    async def follow(self, journal: JournalFile) -> None:
        """Copies its journal until it has said nothing for two leases.

        Raises `Refused` for another token, and `UsageError` where it answers, and gives no journal.
        """
        clock, silent_s, why = asyncio.get_running_loop().time, 0.0, ""
        longest_s = self.settings.report_s + ASK * self.settings.lease_s  # more was a pause of this process
        is_known = journal.path.exists()
        _log.info("stands by for the reference server at %s", self.address)
        async with http_session() as http:
            while not is_known or silent_s < LEASES * self.settings.lease_s:
                began = clock()
                try:
                    status, headers, body = await self._ask(http, part=self.part, offset=str(self.has_bytes))
                    if status == web.HTTPOk.status_code:
                        self._take(journal, headers, body)
                    self._check(status)
                    is_known, silent_s, began = True, 0.0, clock()
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if why_away(error) != why:
                        why = why_away(error)
                        _log.info("the reference server at %s does not answer: %s", self.address, why)
                await asyncio.sleep(self.settings.report_s)
                silent_s += min(clock() - began, longest_s)
        _log.warning("takes over from the reference server at %s, which has said nothing: %s", self.address, why)

    def _check(self, status: int) -> None:
        if status == web.HTTPUnauthorized.status_code:
            raise Refused(f"{self.address} has another token", hint="give both servers the same token")
        if status in REFUSALS:
            raise UsageError(f"cannot stand by for {self.address}", hint=REFUSALS[status])

    async def compare(self, life: int, on_stopped: Callable[[], None], on_higher: Callable[[int], None]) -> None:
        """Shows it this server's life, again and again. `on_stopped`: it stops; `on_higher`: its life is higher."""
        async with http_session() as http:
            while True:
                try:
                    status, headers, _ = await self._ask(http, life=str(life))
                    if status == STOPS:
                        _log.warning("the reference server at %s was still there, and stops", self.address)
                        on_stopped()
                    elif status == web.HTTPOk.status_code and int(headers[LIFE]) > life:
                        on_higher(int(headers[LIFE]))
                except (aiohttp.ClientError, OSError, TimeoutError, KeyError, ValueError) as error:
                    _log.debug("the reference server at %s does not answer: %s", self.address, error)
                await asyncio.sleep(self.settings.report_s)

    async def _ask(self, http: aiohttp.ClientSession, **question: str) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        patience = aiohttp.ClientTimeout(total=ASK * self.settings.lease_s, sock_connect=CONNECT_S)
        url = f"http://{self.address}{PATH}"
        async with http.get(url, params=question, headers=headers, timeout=patience) as answer:
            return answer.status, answer.headers, await answer.read()

    def _take(self, journal: JournalFile, headers: Mapping[str, str], body: bytes) -> None:
        part, offset = headers[PART], int(headers[BEGINS])
        if part == self.part and offset == self.has_bytes:
            journal.copy(body, is_whole=False)
        elif offset == 0:
            journal.copy(body, is_whole=True)
            self.part, self.has_bytes = part, 0
        else:
            raise aiohttp.ClientPayloadError("another part of its journal was asked for")
        self.has_bytes += len(body)


def answer(
    request: web.Request, journal: JournalFile | None, life: int, on_higher: Callable[[int], None]
) -> web.Response:
    """What a server says of its life and its journal. `on_higher`: the asker has a higher life."""
    query = request.query
    try:
        theirs, offset = int(query.get("life", "0")), int(query.get("offset", "0"))
    except ValueError as error:
        raise web.HTTPBadRequest(text="life and offset are numbers") from error
    if not (0 <= theirs <= MAX_NUMBER and 0 <= offset <= MAX_NUMBER):
        raise web.HTTPBadRequest(text="life and offset are numbers of a server")
    if theirs > life:
        on_higher(theirs)
        return web.Response(status=STOPS, headers={LIFE: str(life)})
    if journal is None:
        raise web.HTTPNotFound(text="this server keeps no journal")
    part, begins, data = journal.since(query.get("part", ""), offset)
    headers = {LIFE: str(life), PART: part, BEGINS: str(begins)}
    return web.Response(body=data if "life" not in query else b"", headers=headers)
