"""The slow, long link between two sites: carries packets between two tunnel devices, late and no faster than its rate.

    python -m bench.lab.wan NAMESPACE_A NAMESPACE_B RATE_MBIT DELAY_MS COUNTS

A packet leaves when those before it have left at the rate, and arrives a delay later. One that would wait longer than
the queue holds is dropped, as a router does. Twenty times a second the bytes carried so far are written to COUNTS, as
two numbers: to b, to a. It ends when its standard input does.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from ..demo.parent import Parent
from .namespaces import enter
from .network import WAN_MTU

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_DEVICE = "wan0"
COUNT_S = 0.05  # whoever wants to know how far a crossing is reads the file
MAX_QUEUE_S = 0.1  # a router's buffer: some hundred milliseconds at the most


class Direction:
    """From one device to the other."""

    def __init__(self, source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
        self.source = source
        self.carried_bytes = 0
        self.dropped = 0
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._free_at = 0.0
        self._queue: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        """Read what there is."""
        while True:
            try:
                packet = os.read(self.source, WAN_MTU + 64)
            except BlockingIOError:
                return
            starts = max(now, self._free_at)
            if starts - now > MAX_QUEUE_S:
                self.dropped += 1
                continue
            self._free_at = starts + len(packet) / self._bytes_per_s
            self._queue.append((self._free_at + self._delay_s, packet))

    def give(self, now: float) -> float:
        """Deliver what is due. Returns when the next is, or a far future."""
        while self._queue and self._queue[0][0] <= now:
            packet = self._queue.popleft()[1]
            try:
                os.write(self._target, packet)
            except OSError:  # its queue is full: lost, as on any link
                self.dropped += 1
            else:
                self.carried_bytes += len(packet)
        return self._queue[0][0] if self._queue else now + COUNT_S


def open_device(namespace: str, address: str, beyond: str) -> int:
    """A tunnel device in a namespace, through which the network `beyond` is reached."""
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        ["addr", "add", address, "dev", _DEVICE],
        ["link", "set", _DEVICE, "mtu", str(WAN_MTU), "txqueuelen", "10000", "up"],
        ["route", "add", beyond, "dev", _DEVICE],
    ):
        subprocess.run(["ip", *command], check=True)
    return descriptor


def main(arguments: list[str]) -> None:
    """Until standard input ends."""
    namespace_a, namespace_b, rate_mbit, delay_ms, counts = arguments
    Parent()
    a = open_device(namespace_a, "10.78.0.1/30", "10.77.1.0/24")
    b = open_device(namespace_b, "10.78.0.2/30", "10.77.0.0/24")
    bytes_per_s, delay_s = float(rate_mbit) * 1e6 / 8, float(delay_ms) / 1e3
    to_b, to_a = Direction(a, b, bytes_per_s, delay_s), Direction(b, a, bytes_per_s, delay_s)
    written_at, path = 0.0, Path(counts)
    while True:
        now = time.monotonic()
        due = min(to_b.give(now), to_a.give(now))
        if now - written_at >= COUNT_S:
            written_at = now
            path.with_suffix(".new").write_text(f"{to_b.carried_bytes} {to_a.carried_bytes}")
            path.with_suffix(".new").replace(path)
        ready, _, _ = select.select([a, b], [], [], max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for way in (to_b, to_a):
            if way.source in ready:
                way.take(now)


if __name__ == "__main__":
    main(sys.argv[1:])
