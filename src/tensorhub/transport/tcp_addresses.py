"""Where a worker listens, where its peers find it, and which of its addresses a stream goes to.

A host may have several networks side by side, such as one for each of its cards. Who names several addresses, or the
interfaces that they belong to, listens on each of them, and a read from it has a stream or more on each:

    host     10.0.0.5,10.0.1.5                              or eth0,eth1
    peers    tcp://10.0.0.5:41234,10.0.1.5:41877

The first address that answers carries the conversation that begins a read. Addresses that do not answer are left out:
the others do their work (decision 0036). It must never: listen on more than was asked for.
"""

import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..core.errors import UsageError
from .shortages import is_shortage, tolerated, unavailable
from .tcp_settings import TcpSettings, tune

SCHEME = "tcp"
MOST_ADDRESSES = 8  # of one endpoint, which a peer may have made
_WILDCARDS = ("", "0.0.0.0", "::")
_BACKLOG = 1024  # a full queue drops the SYN and costs its sender a second; with 16, strangers filled it within 20 ms
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_IFREQ = struct.Struct("16s2xH4s16x")  # struct ifreq with a sockaddr_in
_GLOBAL, _LINK = "00", "20"  # scopes, in /proc/net/if_inet6

Address = tuple[str, int]  # host and port


def parse_endpoint(endpoint: str, scheme: str = SCHEME) -> tuple[Address, ...]:
    """`tcp://host:port,host:port` as ((host, port), …), one of them at least. Raises `ValueError` for anything else."""
    given, _, rest = endpoint.partition("://")
    found = [urlsplit(f"//{each}") for each in rest.split(",")]
    addresses = tuple((parts.hostname, parts.port) for parts in found if parts.hostname and parts.port)
    is_bare = all(not (parts.path or parts.query or parts.fragment or parts.username) for parts in found)
    if given != scheme or not is_bare or len(addresses) != len(found):
        raise ValueError(f"{endpoint!r} is not of the form {scheme}://host:port")
    if len(addresses) > MOST_ADDRESSES:
        raise ValueError(f"{endpoint!r} has {len(addresses)} addresses, where {MOST_ADDRESSES} are the limit")
    return addresses


def format_endpoint(*addresses: Address) -> str:
    """`tcp://host:port,host:port`; the inverse of `parse_endpoint`."""
    return f"{SCHEME}://" + ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses
    )


def advertised_endpoint(settings: TcpSettings, ports: Sequence[int]) -> str:
    """Where peers reach listeners on these ports, one for each host that was asked for."""
    if settings.advertise is None:
        both = zip(_hosts(settings), ports, strict=True)
        return format_endpoint(*[(reachable, port) for host, port in both for reachable in _reachable(host)])
    found: list[Address] = []
    for at, text in enumerate(settings.advertise.split(",")):
        wrong = f"tcp transport: advertise={settings.advertise!r} "
        try:
            parts = urlsplit(f"//{text.strip()}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"{wrong}is not host or host:port") from error
        if not host:
            raise UsageError(f"{wrong}is not host or host:port")
        if port is None and at >= len(ports):
            raise UsageError(f"{wrong}has more addresses than host={settings.host!r}", hint="name their ports")
        found.append((host, port if port is not None else ports[at]))
    return format_endpoint(*found)


def listeners(settings: TcpSettings) -> list[socket.socket]:
    """A listening socket for each host that was asked for.

    Raises `OSError` if an address is taken or not of this machine, and `UsageError` if the hosts make no sense.
    """
    with ExitStack() as undo:
        made = [undo.enter_context(_listener(settings, host)) for host in _hosts(settings)]
        undo.pop_all()
    return made


def addresses_of(listening: Sequence[socket.socket]) -> tuple[str, ...]:
    """What those are bound to that listen on a network."""
    networks = (socket.AF_INET, socket.AF_INET6)
    return tuple(host_of(listener.getsockname()) for listener in listening if listener.family in networks)


def host_of(address: tuple[Any, ...]) -> str:
    """The host of a socket's address, in numbers. One of a single link has its zone: `fe80::1%eth0`."""
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def is_loopback(address: str) -> bool:
    """Whether only this host reaches that IP address. A name is none."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def _hosts(settings: TcpSettings) -> list[str]:
    """The hosts that were asked for, as something to bind to."""
    named = [each.strip().strip("[]") for each in settings.host.split(",")]
    hosts = [_address_of_interface(name) or name for name in named]
    if len(hosts) > 1:
        wrong = f"tcp transport: host={settings.host!r} "
        for host in hosts:
            if host in _WILDCARDS:
                raise UsageError(f"{wrong}names {host or 'nothing'!r} beside other addresses", hint="name each once")
            if hosts.count(host) > 1:
                raise UsageError(f"{wrong}names {host} twice", hint="name each once")
        if len(hosts) > MOST_ADDRESSES:
            raise UsageError(f"{wrong}names {len(hosts)} addresses, where {MOST_ADDRESSES} are the limit")
    return hosts


def _address_of_interface(name: str) -> str | None:
    """The first address of the network interface of this name; None if there is no such interface."""
    try:
        socket.if_nametoindex(name)
    except ValueError:
        return None
    except OSError as error:  # it says of each failure that there is no such interface
        if is_shortage(error):
            raise unavailable(error, "it looked at a network interface") from error
        return None
    with tolerated("it looked at a network interface"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return _ipv4_address_of(probe, name)
    with tolerated("it looked at a network interface"):
        lines = list(map(str.split, Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()))
        for scope, zone in ((_GLOBAL, ""), (_LINK, f"%{name}")):
            for address, _, _, found, _, device in lines:
                if (device, found) == (name, scope):
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)) + zone
    text = f"tcp transport: no address of network interface {name} was found"
    raise UsageError(text, hint="is it up? `ip address` shows it; or name the address itself")


def _ipv4_address_of(probe: socket.socket, name: str) -> str:
    from fcntl import ioctl  # Linux and macOS only

    answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("40s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _reachable(host: str) -> list[str]:
    """Where peers reach a listener there. Who listens on all interfaces has an address of each family."""
    if host not in _WILDCARDS:
        return [host]
    ways = {socket.AF_INET: "192.0.2.1"}
    if host == "::":
        ways = {socket.AF_INET6: "2001:db8::1"} | ways
    found = [address for family, target in ways.items() if (address := _outward_address(family, target))]
    return found or ["::1" if host == "::" else "127.0.0.1"]


def _outward_address(family: socket.AddressFamily, target: str) -> str:
    """The address that the default route leaves from; empty on a host without one. Sends nothing."""
    with tolerated("it looked for this host's address"), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return host_of(probe.getsockname())
    return ""


def check_all_interfaces(what: str) -> None:
    """Raises `UsageError` where `::` cannot mean all interfaces, IPv4 too."""
    if not socket.has_dualstack_ipv6():
        raise UsageError(f"{what}: IPv6 is switched off on this machine", hint="0.0.0.0 means all interfaces with IPv4")


def _listener(settings: TcpSettings, host: str) -> socket.socket:
    if host == "::":
        check_all_interfaces("tcp transport: host='::'")
    found = socket.getaddrinfo(host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever the system's default is
        tune(listener, settings)  # the receive buffer must be known before the first SYN
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
