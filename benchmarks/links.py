"""A laboratory of links: network namespaces, each behind a shaped link of its own, joined by an unlimited switch.

    worker 0 ── rate ──┐
    worker 1 ── rate ──┤ bridge, in a namespace of its own ├── server (unlimited)
    worker 2 ── rate ──┘

Both ends of a link are shaped, by `tbf` with a burst of 1 MiB and frames of up to 65000 B: a smaller burst would cut
every super-packet to pieces and burn the processor. Needs root. Whatever ends this process, the next one removes what
it left: the names carry its number.
"""

import atexit
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PREFIX = "thb"
MTU = 65000
PATIENCE_S = 20.0
SERVER = "srv"


class NoLinks(Exception):
    """Links cannot be made here, and why."""


def why_not() -> str | None:
    """Why there can be no laboratory here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    return None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLinks(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NoLinks(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _remove(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(NoLinks):
            _run("ip", "netns", "del", name)


def remove_stale() -> None:
    """Remove what a benchmark has left that did not live to do it."""
    with contextlib.suppress(NoLinks):
        for line in _run("ip", "netns", "list").splitlines():
            found = re.match(rf"({PREFIX}(\d+)-\S+)", line)
            if found and not Path(f"/proc/{found.group(2)}").exists():
                _remove([found.group(1)])


class Links:
    """`workers` namespaces on links of `rate_mbit`, and one for the server. Removed at the end of the block."""

    def __init__(self, workers: int, rate_mbit: int) -> None:
        self.workers = workers
        self.rate_mbit = rate_mbit
        self._base = f"{PREFIX}{os.getpid()}"
        self._names: list[str] = []

    @property
    def bytes_per_s(self) -> float:
        return self.rate_mbit * 1e6 / 8

    def wrapper(self, index: int) -> list[str]:
        """What goes before a command, so that it runs at worker `index`."""
        return ["ip", "netns", "exec", f"{self._base}-{index}"]

    @property
    def server_wrapper(self) -> list[str]:
        return ["ip", "netns", "exec", f"{self._base}-{SERVER}"]

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    server_address = "10.77.0.250"

    def __enter__(self) -> "Links":
        problem = why_not()
        if problem is not None:
            raise NoLinks(problem)
        remove_stale()
        atexit.register(self.remove)
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Idempotent; links go with their namespaces."""
        names, self._names = self._names, []
        _remove(names)
        atexit.unregister(self.remove)

    def _namespace(self, name: str) -> str:
        full = f"{self._base}-{name}"
        self._names.append(full)  # before it exists: an interrupt in between must not leave it
        _run("ip", "netns", "add", full)
        return full

    def _build(self) -> None:
        switch = self._namespace("sw")
        _run("ip", "-n", switch, "link", "add", "br0", "mtu", str(MTU), "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for index in range(self.workers):
            self._attach(switch, str(index), self.address(index), is_shaped=True)
        self._attach(switch, SERVER, self.server_address, is_shaped=False)

    def _attach(self, switch: str, name: str, address: str, *, is_shaped: bool) -> None:
        inner, port = self._namespace(name), f"p{name}"
        peer = ["peer", "name", port, "mtu", str(MTU), "netns", switch]
        _run("ip", "-n", inner, "link", "add", "eth0", "mtu", str(MTU), "type", "veth", *peer)
        _run("ip", "-n", inner, "addr", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", inner, "link", "set", "lo", "up")
        _run("ip", "-n", inner, "link", "set", "eth0", "up")
        _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        if is_shaped:
            shape = ["root", "tbf", "rate", f"{self.rate_mbit}mbit", "burst", "1mb", "latency", "100ms"]
            for space, device in ((inner, "eth0"), (switch, port)):
                _run("tc", "-n", space, "qdisc", "add", "dev", device, *shape)
