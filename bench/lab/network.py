"""Network namespaces behind shaped links, joined by an unlimited switch for each site, sites by a slow, long relay.

    trainer   ── rate ──┐                                             ┌── rate ── rollout 2
    rollout 0 ── rate ──┤ switch of site a ── relay ── switch of site b ┤
    server    ──────────┘                  rate, delay                └── rate ── rollout 3

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
from dataclasses import dataclass
from pathlib import Path

PREFIX = "thb"
MTU = 65000
WAN_MTU = 9000
PATIENCE_S = 20.0
DEFAULT_QUEUE_MS = 100
MAX_SITES, MAX_PLACES = 100, 240  # one byte each of an address; the rest is the router's
ROUTER = 254
UPLINK = "up0"  # of a router, towards the other sites


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


def run(*command: str) -> str:
    """What a command of iproute2 prints. Raises `NoLinks`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLinks(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NoLinks(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def remove(names: Sequence[str]) -> None:
    """Remove namespaces, and with them their links."""
    for name in names:
        with contextlib.suppress(NoLinks):
            run("ip", "netns", "del", name)


def remove_stale(prefix: str = PREFIX) -> None:
    """Remove what a process has left that did not live to do it."""
    with contextlib.suppress(NoLinks):
        for line in run("ip", "netns", "list").splitlines():
            found = re.match(rf"({prefix}(\d+)-\S+)", line)
            if found and not Path(f"/proc/{found.group(2)}").exists():
                remove([found.group(1)])


@dataclass(frozen=True)
class Place:
    """One namespace, in which processes may run."""

    name: str
    namespace: str
    address: str

    @property
    def wrapper(self) -> list[str]:
        """What goes before a command, so that it runs here."""
        return ["ip", "netns", "exec", self.namespace]

    @property
    def path(self) -> str:
        """The file that stands for the namespace."""
        return f"/run/netns/{self.namespace}"


def sent_bytes(place: Place, device: str) -> int:
    """What that device of a place has sent so far, headers and all."""
    return int(run(*place.wrapper, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"))


class Network:
    """Sites and places. Removed at the end of the block."""

    def __init__(self, *, queue_ms: int = DEFAULT_QUEUE_MS) -> None:
        """`queue_ms` is how long a packet may wait at a shaped link's end before it is dropped."""
        self._base = f"{PREFIX}{os.getpid()}"
        self._queue_ms = queue_ms
        self._names: list[str] = []
        self._sites: dict[str, list[Place]] = {}
        self._routers: dict[str, Place] = {}
        self._switch = ""
        self._ports: dict[str, str] = {}  # of the switch, by place
        self._has_core = False

    def __enter__(self) -> "Network":
        problem = why_not()
        if problem is not None:
            raise NoLinks(problem)
        remove_stale()
        atexit.register(self.remove)
        try:
            self._switch = self._namespace("sw")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Idempotent; links go with their namespaces."""
        names, self._names = self._names, []
        remove(names)
        atexit.unregister(self.remove)

    def add_site(self, site: str) -> None:
        """A switch of its own."""
        assert len(self._sites) < MAX_SITES, "more sites than addresses"
        bridge = f"br{len(self._sites)}"
        self._sites[site] = []
        run("ip", "-n", self._switch, "link", "add", bridge, "mtu", str(MTU), "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", bridge, "up")

    def add(self, name: str, site: str, *, rate_mbit: int | None) -> Place:
        """A place behind a link of that rate; None: unlimited."""
        places, number = self._sites[site], list(self._sites).index(site)
        assert len(places) < MAX_PLACES, "more places than addresses"
        place = Place(name, f"{self._base}-{name}", f"10.77.{number}.{len(places) + 1}")
        places.append(place)
        self._attach(place, number, f"p{number}x{len(places)}", rate_mbit)
        return place

    def add_link(self, place: Place, site: str, *, rate_mbit: int) -> str:
        """One more link of that place, to another site's switch; returns its address there."""
        places, number = self._sites[site], list(self._sites).index(site)
        there = Place(place.name, place.namespace, f"10.77.{number}.{len(places) + 1}")
        places.append(there)
        self._link(there, number, f"p{number}x{len(places)}", rate_mbit, device=f"eth{number}")
        return there.address

    def join(self, site_a: str, site_b: str) -> tuple[Place, Place]:
        """Routers for two sites. Between them go only what a relay (`wan`) carries from one's device to the other's."""
        for site in (site_a, site_b):
            number = list(self._sites).index(site)
            router = Place(f"r{number}", f"{self._base}-r{number}", f"10.77.{number}.{ROUTER}")
            self._attach(router, number, f"p{number}r", None)
            run(*router.wrapper, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._routers[site] = router
            for place in self._sites[site]:
                way = ["via", router.address, "mtu", str(WAN_MTU)]
                run("ip", "-n", place.namespace, "route", "add", "10.77.0.0/16", *way)
        return self._routers[site_a], self._routers[site_b]

    def uplink(self, site: str, rate_mbit: int) -> Place:
        """The one way out of a site, shaped in both directions; all uplinks meet in the unlimited switch "core".

        Returns the site's router: what left the site is what its `UPLINK` has sent (`sent_bytes`).
        """
        number = list(self._sites).index(site)
        if not self._has_core:
            self._has_core = True
            run("ip", "-n", self._switch, "link", "add", "core", "mtu", str(MTU), "type", "bridge")
            run("ip", "-n", self._switch, "link", "set", "core", "up")
        router = Place(f"r{number}", f"{self._base}-r{number}", f"10.77.{number}.{ROUTER}")
        self._attach(router, number, f"p{number}r", None)
        peer = ["peer", "name", f"up{number}", "mtu", str(MTU), "netns", self._switch]
        run("ip", "-n", router.namespace, "link", "add", UPLINK, "mtu", str(MTU), "type", "veth", *peer)
        run("ip", "-n", router.namespace, "addr", "add", f"10.79.0.{number + 1}/24", "dev", UPLINK)
        run("ip", "-n", router.namespace, "link", "set", UPLINK, "up")
        run("ip", "-n", self._switch, "link", "set", f"up{number}", "master", "core", "up")
        for space, device in ((router.namespace, UPLINK), (self._switch, f"up{number}")):
            run("tc", "-n", space, "qdisc", "add", "dev", device, *self._shape(rate_mbit))
        run(*router.wrapper, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for other, (_, places) in enumerate(self._sites.items()):
            if other != number:
                beyond = [f"10.77.{other}.0/24", "via", f"10.79.0.{other + 1}"]
                run("ip", "-n", router.namespace, "route", "add", *beyond)
            else:
                for place in places:
                    run("ip", "-n", place.namespace, "route", "add", "10.77.0.0/16", "via", router.address)
        return router

    def reshape(self, place: Place, rate_mbit: int) -> None:
        """Another rate for a link that is in use, at both ends."""
        for space, device in ((place.namespace, "eth0"), (self._switch, self._ports[place.name])):
            run("tc", "-n", space, "qdisc", "change", "dev", device, *self._shape(rate_mbit))

    def _shape(self, rate_mbit: int) -> list[str]:
        return ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", "1mb", "latency", f"{self._queue_ms}ms"]

    def _namespace(self, name: str) -> str:
        full = f"{self._base}-{name}"
        self._names.append(full)  # before it exists: an interrupt in between must not leave it
        run("ip", "netns", "add", full)
        return full

    def _attach(self, place: Place, site_number: int, port: str, rate_mbit: int | None) -> None:
        self._namespace(place.name)
        run("ip", "-n", place.namespace, "link", "set", "lo", "up")
        self._link(place, site_number, port, rate_mbit, device="eth0")
        self._ports[place.name] = port

    def _link(self, place: Place, site_number: int, port: str, rate_mbit: int | None, *, device: str) -> None:
        inner, switch = place.namespace, self._switch
        peer = ["peer", "name", port, "mtu", str(MTU), "netns", switch]
        run("ip", "-n", inner, "link", "add", device, "mtu", str(MTU), "type", "veth", *peer)
        run("ip", "-n", inner, "addr", "add", f"{place.address}/24", "dev", device)
        run("ip", "-n", inner, "link", "set", device, "up")
        run("ip", "-n", switch, "link", "set", port, "master", f"br{site_number}", "up")
        if rate_mbit is not None:
            for space, end in ((inner, device), (switch, port)):
                run("tc", "-n", space, "qdisc", "add", "dev", end, *self._shape(rate_mbit))
