"""Keeps browsers away from a reference server: a page that is open on a host must not reach the server there.

A page's request says where the page is from (`Origin`, `Sec-Fetch-Site`). A page whose own name was made to lead to
this server (DNS rebinding) says that name in `Host`. Both are refused before anything else of the request is looked at.
No name is looked up for a request.
"""

import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from aiohttp import web

from ..transport.threads import Thread, start

_HOST = re.compile(r"(?:\[([^\[\]@]+)\]|([^:\[\]@]+))(?::\d{1,5})?\Z")
OWN_PAGES = ("none", "same-origin")  # what was typed into the address bar, and what follows from it


class Names:
    """What a server is called: by IP address, as localhost, by its machine's name, and by the names it was given."""

    def __init__(self, given: Iterable[str] = ()) -> None:
        self._own = {"localhost"}
        self.add(socket.gethostname(), *given)

    def add(self, *names: str) -> None:
        """It is called so too."""
        self._own.update(name.strip("[]").lower().removesuffix(".") for name in names)

    def look_up(self) -> None:
        """Ask the name service for this machine's full name, in a thread: that may take a while."""
        start(Thread(lambda: self.add(socket.getfqdn()), name="tensorhub-name"))

    def why_refuse(self, request: web.Request) -> web.Response | None:
        """The answer to what a page sends, and to what was sent to another name."""
        headers = request.headers
        if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") not in OWN_PAGES:
            return web.Response(status=403, text="a reference server talks to no page\n")
        said = headers.getall("Host", [])
        found = _HOST.match(said[0]) if len(said) == 1 else None
        if found is None or not self._has(found[1] or found[2]):
            text = "this server is not called so: use its IP address, or give it the name (--name, TENSORHUB_NAMES)\n"
            return web.Response(status=421, text=text)
        return None

    def _has(self, host: str) -> bool:
        if host.lower().removesuffix(".") in self._own:
            return True
        try:
            return bool(ip_address(host))
        except ValueError:
            return False
