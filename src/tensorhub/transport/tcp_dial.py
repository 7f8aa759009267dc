"""How the streams of a read reach their source, which may have several addresses.

The first stream tries them in turn, and says how many there are and which one answered. Each further stream goes to the
next address, round and round. Where this worker has as many addresses as the source, it leaves from its own one of the
same place in the row: two hosts with two networks each use the first together, and the second. A further stream that
cannot get through is none: the others do its work. It must never: end a read because one of several addresses is away.
"""

import socket
from collections.abc import Callable
from contextlib import suppress

from . import shortages
from .forks import made
from .tcp_addresses import Address, parse_endpoint
from .tcp_job import Job
from .tcp_names import look_up
from .tcp_wire import Garbled, Vanished, Wire

_MOST_FOUND = 4  # of one host name; each may cost `connect_s`
_NO_PORT_YET = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Linux: a port is chosen when it connects


def dial(job: Job, index: int, *, parse: Callable[[str], tuple[Address, ...]] = parse_endpoint) -> Wire:
    """Reach the source over tcp. `parse` makes addresses of its endpoint, or raises `ValueError`."""
    try:
        addresses = parse(job.endpoint)
    except ValueError as error:
        raise Garbled(str(error)) from error
    if len(addresses) == 1:
        return _reach(job, addresses[0])
    own = job.settings.leave_from if len(job.settings.leave_from) == len(addresses) else ()
    if index == 0:
        return _reach_any(job, addresses, own)
    at = (job.answered_at + index) % len(addresses)
    wire = _reach(job, addresses[at], leave_from=own[at] if own else "")
    job.note_address(at)
    return wire


def _reach_any(job: Job, addresses: tuple[Address, ...], own: tuple[str, ...]) -> Wire:
    """One after the other: first from this worker's own, then from whatever the kernel chooses.

    Only the last try has all the time that there is.
    """
    job.addresses = len(addresses)
    tries = [(at, address, own[at]) for at, address in enumerate(addresses) if own]
    tries += [(at, address, "") for at, address in enumerate(addresses)]
    for at, address, leave_from in tries[:-1]:
        try:
            wire = _reach(job, address, within_s=min(job.settings.try_s, job.settings.connect_s), leave_from=leave_from)
        except Vanished:
            if job.is_over:
                raise
            continue
        job.note_address(at)
        return wire
    at, address, _ = tries[-1]
    wire = _reach(job, address)
    job.note_address(at)
    return wire


def _reach(job: Job, address: Address, *, within_s: float | None = None, leave_from: str = "") -> Wire:
    """At that address. Raises `Vanished` if it cannot be reached."""
    failure = Vanished("the host has no address")
    try:
        for family, kind, protocol, _, found in look_up(job, address, within_s or job.settings.connect_s)[:_MOST_FOUND]:
            wire = wire_for(job, family, kind, protocol)
            try:
                if leave_from:
                    _leave(wire, leave_from)
                wire.connect(found, within_s)
                wire.limit_waits(receive_s=job.settings.silence_s, send_s=job.settings.silence_s)
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


def wire_for(job: Job, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> Wire:
    """A connection to be, which the job knows. Raises `Unavailable` where this process has no descriptor for it."""
    try:
        wire = Wire(made(lambda: socket.socket(family, kind, protocol)), job.settings)
    except OSError as error:
        if shortages.is_shortage(error):
            raise shortages.unavailable(error, "it connected to a source") from error
        raise Vanished(f"cannot connect: {error}") from error
    job.enter(wire)
    return wire


def _leave(wire: Wire, own: str) -> None:
    """From this address of ours."""
    with suppress(OSError):
        wire.sock.setsockopt(socket.IPPROTO_IP, _NO_PORT_YET, 1)
    try:
        wire.sock.bind((own, 0))
    except OSError as error:
        raise Vanished(f"cannot leave from {own}: {error}") from error
