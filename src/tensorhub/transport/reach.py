"""Which endpoints of a source nobody can reach from here, as far as the endpoints themselves say so.

A worker listens at the address that its host has on the way to the reference server. Who went there by `127.0.0.1` can
be read on its own host only. On another host a connection to that address would end at a stranger, or nowhere; so it is
not tried, and the reader says what to change. Where a source is, its endpoint of `local` tells.
"""

import ipaddress
from collections.abc import Sequence

from ..core.errors import TransportMissing, Unavailable
from . import local_host
from .tcp_addresses import parse_endpoint

LISTENING = ("tcp", "nixl")  # both are begun by a connection to an address


def out_of_reach(offered: Sequence[str]) -> dict[str, str]:
    """Of a source's endpoints those that cannot be reached from this process, and why in words."""
    if not _is_elsewhere(offered):
        return {}
    found = {}
    for endpoint in offered:
        at = _loopback(endpoint)
        if at:
            found[endpoint] = (
                f"it is to be reached at {at}, which only its own host reaches: open it with a server= address that "
                "other hosts use too, or with host= (TENSORHUB_HOST)"
            )
    return found


def _is_elsewhere(offered: Sequence[str]) -> bool:
    """The source is known to be on another host, or in another network namespace of this one."""
    try:
        here = local_host.here()
    except (TransportMissing, Unavailable):
        return False
    for endpoint in offered:
        try:
            place, _ = local_host.parse_endpoint(endpoint)
        except ValueError:
            continue
        return (place.boot, place.network_namespace) != (here.boot, here.network_namespace)
    return False


def _loopback(endpoint: str) -> str:
    """The endpoint's first host, if all of them are loopback addresses; else an empty string."""
    scheme = endpoint.partition("://")[0]
    if scheme not in LISTENING:
        return ""
    try:
        hosts = [host for host, _ in parse_endpoint(endpoint, scheme)]
        return hosts[0] if all(ipaddress.ip_address(host).is_loopback for host in hosts) else ""
    except ValueError:  # garbage, or a name, which may mean anything
        return ""
