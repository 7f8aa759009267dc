"""Addresses of the tcp transport: which to listen on, how to resolve names, how to connect."""

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...protocol.errors import Unavailable, UsageError
from ..threads import Thread, made, named, start, tolerated
from .settings import PORTS, TcpSettings, tune
from .wire import Garbled, Vanished, Wire

if TYPE_CHECKING:
    from .reader import Job

# --- Where a worker listens, where its peers find it, and which of its addresses a stream goes to (decision 0011).
#
#     host     10.0.0.5,10.0.1.5                              or eth0,eth1
#     peers    tcp://10.0.0.5:41234,10.0.1.5:41877
#
# A worker listens on each address, or interface, that is named, and on no other. A read from it has a stream or more on
# each. Addresses that do not answer are left out.


SCHEME = "tcp"
MAX_PORT = 65535
MAX_ADDRESSES = 8  # of one endpoint, which a peer may have made
_WILDCARDS = ("", "0.0.0.0", "::")
_BACKLOG = (
    1024  # a full queue drops the SYN and costs its sender a second; with 16, other programs filled it within 20 ms
)
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
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
    if len(addresses) > MAX_ADDRESSES:
        raise ValueError(f"{endpoint!r} has {len(addresses)} addresses, where {MAX_ADDRESSES} are the limit")
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

    Raises `OSError` if no port is free, or an address is not of this machine. Raises `UsageError` if the hosts make no
    sense.
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
    found = _ip(address)
    return found is not None and bool((getattr(found, "ipv4_mapped", None) or found).is_loopback)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    """None for a name, or what the resolver is to look at."""
    try:
        return ip_address(host)
    except ValueError:
        return None


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
        if len(hosts) > MAX_ADDRESSES:
            raise UsageError(f"{wrong}names {len(hosts)} addresses, where {MAX_ADDRESSES} are the limit")
    return hosts


def _address_of_interface(name: str) -> str | None:
    """The first address of the network interface of this name; None if there is no such interface."""
    index = 0
    with suppress(ValueError), tolerated("it looked at a network interface"):
        index = socket.if_nametoindex(name)
    if not index:
        return None
    with tolerated("it looked at a network interface"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        from fcntl import ioctl  # Linux and macOS only

        answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("40s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with tolerated("it looked at a network interface"):
        lines = list(map(str.split, Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()))
        for scope, zone in ((_GLOBAL, ""), (_LINK, f"%{name}")):
            for address, _, _, found, _, device in lines:
                if (device, found) == (name, scope):
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)) + zone
    text = f"tcp transport: no address of network interface {name} was found"
    raise UsageError(text, hint="is it up? `ip address` shows it; or name the address itself")


def _reachable(host: str) -> list[str]:
    """Where peers reach a listener there: on all interfaces an address of each family."""
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
    """Raises `OSError` where no port can be had."""
    last = min(settings.port + PORTS, MAX_PORT + 1) - 1 if settings.port else 0
    for port in range(settings.port, last + 1):
        try:
            return _listener_at(settings, host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                raise
    raise AssertionError("the last try returns or raises")


def _listener_at(settings: TcpSettings, host: str, port: int) -> socket.socket:
    if host == "::":
        check_all_interfaces("tcp transport: host='::'")
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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


# --- Names of hosts, where the resolver may take its time, or never answer.
#
# A call of the resolver cannot be cancelled. A thread of its own makes it, which knows the name and no read. Reads wait
# for the answer as long as a connection may take, or until they are over. All that want the same name at once wait for
# one question. An answer that comes too late is kept for a while: it serves the next try. Numbers are not asked for.


_KEPT_S = 15.0  # the next try comes within seconds; a resolver that asks its second server has answered by then

Found = list[tuple[Any, ...]]  # what `getaddrinfo` gives


class Lookup:
    """One name that is being looked up."""

    def __init__(self, address: Address) -> None:
        self.found: Found | None = None
        self.why_not = "its look-up failed"
        self.answered_at: float | None = None  # once it was
        self._address = address
        self._changed = threading.Condition()

    def ask(self) -> None:
        """Resolve the name. Blocks the calling thread until there is an answer."""
        try:
            self.found = list(socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # a label that is too long, or empty, is no Unicode of a host
            self.why_not = str(error)
        finally:
            with self._changed:
                self.answered_at = time.monotonic()
                self._changed.notify_all()

    def wait(self, within_s: float, is_over: Callable[[], bool]) -> bool:
        """Until it is answered, or so long, or until that is so and `wake` is called. Whether it is answered."""
        with self._changed:
            self._changed.wait_for(lambda: self.answered_at is not None or is_over(), within_s)
            return self.answered_at is not None

    def wake(self) -> None:
        """Waiting reads look whether they are over."""
        with self._changed:
            self._changed.notify_all()


class Asking:
    """A stream that waits for a lookup. Its job can cut it, like the streams that wait in a socket."""

    all_heard_bytes = 0

    def __init__(self, lookup: Lookup) -> None:
        self.cut = lookup.wake


_lock = threading.Lock()
_lookups: dict[Address, Lookup] = {}  # under way, or answered too late


def look_up(job: "Job", address: Address, within_s: float) -> Found:
    """What `getaddrinfo` says. Raises `Vanished` if that is nothing, or not said in time, or the read is over."""
    lookup = _lookup_of(address)
    asking = Asking(lookup)
    job.enter(asking)
    try:
        is_answered = lookup.wait(within_s, lambda: job.is_over)
    finally:
        job.leave(asking)
    if not is_answered:
        why = "the read is over" if job.is_over else f"no answer within {within_s:g} s where {address[0]} is"
        raise Vanished(f"cannot find the host: {why}")
    with _lock:
        if _lookups.get(address) is lookup:
            del _lookups[address]
    if lookup.found is None:
        raise Vanished(f"cannot find the host: {lookup.why_not}")
    return lookup.found


def _lookup_of(address: Address) -> Lookup:
    """The lookup of this name that is under way, or was answered too late; else a new one. A number needs no answer."""
    if _ip(address[0]) is not None:
        lookup = Lookup(address)
        lookup.ask()
        return lookup
    with _lock:
        for known, lookup in list(_lookups.items()):
            at = lookup.answered_at
            if at is not None and (lookup.found is None or at + _KEPT_S < time.monotonic()):
                del _lookups[known]
        if address in _lookups:
            return _lookups[address]
        lookup = _lookups[address] = Lookup(address)
    try:
        start(Thread(lookup.ask, name="tensorhub-find-host"))
    except Unavailable:
        lookup.ask()  # at a limit on threads this one has to
    return lookup


def _forget() -> None:
    """Called in a forked child: forget the lookups, because no resolver thread runs here."""
    global _lock
    _lock = threading.Lock()
    _lookups.clear()


os.register_at_fork(after_in_child=_forget)


# --- How the streams of a read reach their source, which may have several addresses.
#
# The first stream tries them in turn. Each further stream goes to the next address, round and round. Where this worker
# has as many addresses as the source, a stream leaves from the one at the same place in the row. A further stream that
# cannot get through is left out: the others do its work.


MAX_FOUND = 4  # of one host name; each may cost `connect_s`
_NO_PORT_YET = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Linux: a port is chosen when it connects


def dial(job: "Job", index: int, *, parse: Callable[[str], tuple[Address, ...]] = parse_endpoint) -> Wire:
    """Reach the source over tcp. `parse` makes addresses of its endpoint, or raises `ValueError`."""
    try:
        addresses = parse(job.endpoint)
    except ValueError as error:
        raise Garbled(str(error)) from error
    if len(addresses) == 1:
        return _reach(job, addresses, 0)
    own = job.settings.leave_from if len(job.settings.leave_from) == len(addresses) else ()
    if index == 0:
        return _reach_any(job, addresses, own)
    at = (job.answered_at + index) % len(addresses)
    return _reach(job, addresses, at, leave_from=own[at] if own else "")


def _reach_any(job: "Job", addresses: tuple[Address, ...], own: tuple[str, ...]) -> Wire:
    """One after the other: first from this worker's own, then from whatever the kernel chooses.

    Only the last try has all the time that there is.
    """
    job.addresses = len(addresses)
    for at, leave_from in [*enumerate(own), *((at, "") for at in range(len(addresses) - 1))]:
        try:
            within_s = min(job.settings.try_s, job.settings.connect_s)
            return _reach(job, addresses, at, within_s=within_s, leave_from=leave_from)
        except Vanished:
            if job.is_over:
                raise
    return _reach(job, addresses, len(addresses) - 1)


def _reach(
    job: "Job", addresses: tuple[Address, ...], at: int, *, within_s: float | None = None, leave_from: str = ""
) -> Wire:
    """At that one of its addresses. Raises `Vanished` if it cannot be reached."""
    failure = Vanished("the host has no address")
    try:
        every = look_up(job, addresses[at], within_s or job.settings.connect_s)
        for family, kind, protocol, _, found in every[:MAX_FOUND]:
            wire = wire_for(job, family, kind, protocol)
            try:
                if leave_from:
                    _leave(wire, leave_from)
                wire.connect(found, within_s)
                wire.limit_waits(receive_s=job.settings.silence_s, send_s=job.settings.silence_s)
                job.note_address(at)
                return wire
            except Vanished as error:
                failure = error
                job.leave(wire)
                wire.close()
                if job.is_over:
                    break
        raise failure
    finally:
        del failure  # its traceback knows this frame: they would wait for the garbage collector together


def wire_for(job: "Job", family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> Wire:
    """A connection to be, which the job knows. Raises `Unavailable` where this process has no descriptor for it."""
    try:
        with named("it connected to a source"):
            wire = Wire(made(lambda: socket.socket(family, kind, protocol)), job.settings)
    except OSError as error:
        raise Vanished(f"cannot connect: {error}") from error
    job.enter(wire)
    return wire


def _leave(wire: Wire, own: str) -> None:
    """Bind the socket to this local address."""
    with suppress(OSError):
        wire.sock.setsockopt(socket.IPPROTO_IP, _NO_PORT_YET, 1)
    try:
        wire.sock.bind((own, 0))
    except OSError as error:
        raise Vanished(f"cannot leave from {own}: {error}") from error
