"""NIXL agents, the memory that they register, and UCX's ways between two workers."""

import atexit
import ctypes
import importlib
import logging
import os
import resource
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet, finalize

import msgspec

from ...protocol.errors import TransportMissing, UsageError
from ..base import ByteStream
from ..ranges import Located
from ..threads import beside_captures, scope, tolerated

# --- Which way of UCX a pair of workers has. NIXL does not tell.
#
# A read that was over when its call returned was copied by UCX itself (cma, xpmem), on one host. Most of several reads
# must agree. Any other read is done by hardware, or by the source's process over TCP, at ten times the CPU of sockets.


HOST = 0  # a device's code: 0 is the host's memory, n + 1 the memory of CUDA device n

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RDMA = Path("/sys/class/infiniband")
_SHARED = ("cma", "xpmem", "posix", "sysv", "knem")  # UCX's ways through memory that both processes can reach
_DESCRIPTORS = 32  # UCX takes up to two for each thread of a peer; others of this process go on opening theirs
_GPUS = Path("/proc/driver/nvidia/gpus")
USE_TCP = "take tcp for this pair: its own sockets are several times faster than UCX over TCP, at a tenth of the CPU"


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What one end knows of itself."""

    boot: str  # of the kernel that runs: equal for two workers exactly when they share a host; "" where unknown
    rdma: tuple[str, ...]  # names of RDMA devices
    tls: str  # UCX_TLS as it is set, "" where UCX chooses


class Lane(msgspec.Struct, frozen=True):
    """A way in words, and whether it is the slow one."""

    name: str
    is_tcp: bool


def lacks_descriptors() -> str:
    """Why UCX should not be let connect now: too few files can be opened. Empty where there are enough.

    A reader whose source can take in no connection may be aborted by its own UCX ("Assertion `0' failed", one in two
    with NIXL 1.5.1 and three threads). A new descriptor has the lowest number that is free.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return f"no file can be opened: {error.strerror}"
    os.close(lowest)
    if limit == resource.RLIM_INFINITY or lowest + _DESCRIPTORS <= limit:
        return ""
    return f"next to all of the {limit} files that this process may open are open"


def facts(tls: str = "") -> Facts:
    """This process's."""
    boot, rdma = "", tuple[str, ...]()
    with tolerated("it looked for RDMA devices"):
        boot = _BOOT.read_text().strip()
    with tolerated("it looked for RDMA devices"):
        rdma = tuple(sorted(entry.name for entry in _RDMA.iterdir()))
    return Facts(boot, rdma, tls or os.environ.get("UCX_TLS", ""))


def has_gpu(gpus: Path = _GPUS) -> bool:
    """This machine has an NVIDIA device."""
    with tolerated("it looked for GPUs"):
        return any(gpus.iterdir())
    return False


def advantage(rdma: Path = _RDMA, gpus: Path = _GPUS) -> tuple[bool, str]:
    """Whether anything is here that NIXL moves bytes with better than the other transports, and what, or what lacks.

    Reads names of the kernel's, in microseconds: this is asked at every `open`.
    """
    active, idle = list[str](), list[str]()
    with tolerated("it looked for RDMA devices"):
        for device in sorted(rdma.iterdir()):
            states = [state.read_text() for state in sorted((device / "ports").glob("*/state"))]
            (active if any("ACTIVE" in state for state in states) else idle).append(device.name)
    found = [f"RDMA ({', '.join(active)})"] if active else []
    if has_gpu(gpus):
        found.append("a GPU (CUDA IPC, NVLink)")
    if found:
        return True, " and ".join(found)
    ports = f"no port of {', '.join(idle)} is active" if idle else "no RDMA device"
    return False, f"{ports} and no GPU is here, so local and tcp are faster"


def lane(here: Facts, there: Facts, *, is_immediate: bool, devices: Sequence[int]) -> Lane:
    """What carries bytes between the two; `devices` are the codes of all memory involved, on both sides."""
    chosen = f", UCX_TLS={here.tls}" if here.tls else ""
    is_one_host = bool(here.boot) and here.boot == there.boot
    is_immediate = is_immediate and is_one_host and _permits(here.tls, *_SHARED)
    has_cuda = any(device != HOST for device in devices)
    is_all_cuda = bool(devices) and all(device != HOST for device in devices)
    if is_one_host and is_all_cuda and _permits(here.tls, "cuda"):  # what was read at once lay on the host
        return Lane(f"NIXL/UCX: CUDA IPC{chosen}", False)
    if is_immediate and not has_cuda:
        return Lane(f"NIXL/UCX: shared memory (cma){chosen}", False)
    if is_immediate and _permits(here.tls, "cuda"):
        return Lane(f"NIXL/UCX: CUDA IPC and shared memory (cma){chosen}", False)
    if here.rdma and there.rdma and _permits(here.tls, "rc", "ud", "dc", "ib", "srd") and here.tls != "tcp":
        return Lane(f"NIXL/UCX: RDMA ({', '.join(here.rdma)}){chosen}", False)
    return Lane(f"NIXL/UCX: TCP{chosen}", True)


def why_tcp(here: Facts, there: Facts) -> str:
    """Why a pair would end up on TCP."""
    if here.tls and not _permits(here.tls, "rc", "ud", "dc", "ib", "srd", "cma", "cuda"):
        return f"UCX_TLS={here.tls} permits nothing else"
    if here.boot and here.boot == there.boot:
        return "they share a host, but UCX cannot read the source's memory from here (another container?)"
    lacking = " and ".join(name for name, found in (("here", here.rdma), ("there", there.rdma)) if not found)
    return f"there is no RDMA device {lacking}" if lacking else "UCX takes none of the RDMA devices"


def _permits(tls: str, *names: str) -> bool:
    """UCX_TLS may name transports or, with ^, those that must not be used."""
    if not tls or tls == "all":
        return True
    if tls.startswith("^"):
        forbidden = tls[1:].split(",")
        return any(name not in forbidden for name in names)
    wanted = tls.split(",")
    return any(
        one == "all" or one.startswith(name) or (one in ("shm", "sm") and name in _SHARED)
        for one in wanted
        for name in names
    )


# --- Where bytes lie, as NIXL is told. A place is (device, address, length).
#
# NIXL copies descriptor by descriptor, so both ends cut the stream at the same bytes: where either end's memory is
# interrupted, and at each chunk's border. A `Page` holds the seals of all exports: 16 random bytes each, zeroed when
# the export ends. A reader reads the seal after the bytes, by the same way.


DESCRIPTOR_BYTES = 4 << 20  # measured: 4 MiB 12.6 GiB/s, 1 GiB 9.9, 64 KiB 6.9
SEAL_BYTES = 16
_SEALS = 4096  # exports at one time; there are a handful


class Place(NamedTuple):
    """A range of memory."""

    device: int  # HOST, or 1 + the number of the CUDA device
    address: int
    size_bytes: int


@runtime_checkable
class Placed(Protocol):
    """A stream whose bytes have addresses that this process or its devices know."""

    def places(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Bytes [start, stop) as (device, address, length), in order; a device is "cpu" or "cuda:0"."""
        ...


def places_of(stream: ByteStream) -> list[Place] | None:
    """All of a stream's memory, neighbours on the host joined; None for a stream without addresses."""
    if isinstance(stream, Placed):
        found = [Place(device_code(name), address, size) for name, address, size in stream.places(0, stream.size_bytes)]
    elif isinstance(stream, Located):
        found = [Place(HOST, address, size) for address, size in stream.ranges(0, stream.size_bytes)]
    else:
        return None
    joined: list[Place] = []
    for place in found:
        last = joined[-1] if joined else None
        if last is not None and place.device == last.device == HOST and last.address + last.size_bytes == place.address:
            joined[-1] = Place(HOST, last.address, last.size_bytes + place.size_bytes)
        elif place.size_bytes:
            joined.append(place)
    return joined


def device_code(name: str) -> int:
    """ "cpu" is 0, "cuda:3" is 4."""
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return HOST
    if kind != "cuda":
        raise ValueError(f"memory on {name!r} is unknown to this transport")
    return 1 + int(number or 0)


def cut(ours: Sequence[Place], theirs: Sequence[Place], chunk_bytes: int) -> Iterator[tuple[int, Place, Place]]:
    """(chunk, our place, their place) of every descriptor, in stream order; the two places are of one length."""
    at = our_index = their_index = our_done = their_done = 0
    while our_index < len(ours) and their_index < len(theirs):
        our, their = ours[our_index], theirs[their_index]
        size = min(
            our.size_bytes - our_done,
            their.size_bytes - their_done,
            chunk_bytes - at % chunk_bytes,
            DESCRIPTOR_BYTES,
        )
        yield (
            at // chunk_bytes,
            Place(our.device, our.address + our_done, size),
            Place(their.device, their.address + their_done, size),
        )
        at, our_done, their_done = at + size, our_done + size, their_done + size
        if our_done == our.size_bytes:
            our_index, our_done = our_index + 1, 0
        if their_done == their.size_bytes:
            their_index, their_done = their_index + 1, 0


def do_overlap(some: Sequence[Place], others: Sequence[Place]) -> bool:
    """Whether any byte is in both. Those of one side may overlap among themselves."""
    before = {False: (-1, 0), True: (-1, 0)}  # of each side, the device and the end of what reaches farthest so far
    every = [(place, False) for place in some] + [(place, True) for place in others]
    for place, is_other in sorted(every):
        device, end = before[not is_other]
        if device == place.device and place.address < end:
            return True
        before[is_other] = max(before[is_other], (place.device, place.address + place.size_bytes))
    return False


class Page:
    """Host memory in slots of 16 bytes, each lent to one owner."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_SEALS * SEAL_BYTES)
        self.place = Place(HOST, ctypes.addressof(self._memory), _SEALS * SEAL_BYTES)
        self._free = list(range(_SEALS))
        self._lock = threading.Lock()

    def take(self) -> int:
        """A slot's address."""
        with self._lock:
            if not self._free:
                raise UsageError(f"all {_SEALS} seals of this worker's nixl transport are in use")
            return self.place.address + self._free.pop() * SEAL_BYTES

    def give(self, address: int) -> None:
        """The slot may be lent again."""
        with self._lock:
            self._free.append((address - self.place.address) // SEAL_BYTES)


class Seal:
    """An export's word that it lasts."""

    def __init__(self, page: Page) -> None:
        self._is_broken = True
        self._page = page
        self.address = page.take()
        self.value = secrets.token_bytes(SEAL_BYTES)
        ctypes.memmove(self.address, self.value, SEAL_BYTES)
        self._is_broken = False

    def break_(self) -> None:
        """From now on nothing that is read of this export counts. The next seal here has another value."""
        if not self._is_broken:
            self._is_broken = True
            ctypes.memset(self.address, 0, SEAL_BYTES)
            self._page.give(self.address)

    def __del__(self) -> None:
        self.break_()  # of an export that was refused


# --- One NIXL agent with its UCX back end. It knows memory and peers, and no keys. Measured with NIXL 1.5.1:
#
# 1. The progress thread spins a whole core with NIXL's default (`pthrDelay=0`). With a delay it sleeps until there is
#    work.
# 2. Nothing cancels a transfer but the end of the whole agent: over TCP, bytes of a stopped source came late in each
#    other case. So a transfer that does not end in time ends its agent.
# 3. A source's deregistration stops no reader. The seal does.
# 4. Where UCX cannot read natively, the source's process sends ("emulation"). A reader that is killed meanwhile aborts
#    the source. So UCX is told never to emulate, and to read by CUDA IPC.
# 5. UCX keeps a peer's device memory mapped. It is told to map it anew for each read.
# 6. A reader finds a peer's memory in a list to which each introduction adds, and from which nothing goes but with the
#    peer. Memory that was there before hides what is there now, so a source introduces that by a further agent.
# 7. A thread inside it aborts the process when the interpreter ends, so every agent ends before that (`atexit`). A
#    forked child's agent has no threads: it is neither used nor deleted.


MODULES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")  # CUDA is not needed to import any of them; `nixl` only picks one
_BACKEND = "UCX"
_PROGRESS_DELAY_US = 100_000  # the progress thread looks without being woken: see above
_IDLE_PEERS = 64  # kept connected without being read from
_GONE = 64  # introductions of memory that is not there any more, which peers go on knowing
_END_S = 5.0  # native calls end within milliseconds: the longest is one post of a few MiB that copies inside
_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 1e-3  # twice as long each time: 4 MiB at 200 Gbit/s take 170 µs
_TURN_POLL_S = 0.05  # how often a waiting thread looks whether its read is over
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}  # we report what happens; both are read while loading
_NATIVE = {  # read with each agent
    "UCX_PROTO_EMULATION_ENABLE": "n",
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    "UCX_CUDA_IPC_CACHE": "n",
}

_environment = threading.Lock()


class Broken(Exception):
    """The peer, or the way to it, is gone; or it never was there. Never leaves the transport."""


class Stuck(Exception):
    """A transfer is not over, and cannot be called back: only the end of its agent fences it. Never leaves either."""


def _let_live(native: Any) -> None:
    """It is never deleted, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


@contextmanager
def _told(settings: Mapping[str, str]) -> Iterator[None]:
    """What is loaded inside finds these, where the user has not chosen. NIXL reads the environment at import."""
    with _environment:
        missing = {key: value for key, value in settings.items() if key not in os.environ}
        os.environ.update(missing)
        try:
            yield
        finally:
            for key in missing:
                os.environ.pop(key, None)


def load(name: str) -> Any:
    """NIXL's bindings: the only module here that has no types. Raises `ImportError`."""
    with _told(_QUIET):
        module = importlib.import_module(f"{name}._bindings")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return module


class Region(NamedTuple):
    """Registered memory: its places, and what NIXL calls it."""

    places: list[Place]
    lists: list[Any]


class Agent:
    """Registers memory, knows peers, reads from them. Thread-safe."""

    def __init__(
        self, bindings: Any, seals: Page, scratch: Page, *, workers: int, tls: str = "", emulates: bool = False
    ) -> None:
        """Peers may read `seals`. `workers`: so many threads read at once. Raises `TransportMissing`.

        `emulates`: UCX may let the source's process send what cannot be read natively.
        """
        self.name = f"tensorhub-{os.getpid()}-{secrets.token_hex(8)}"
        self.ended: str | None = None
        self._nixl = bindings
        self._errors = tuple(
            kind for name, kind in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")
        )
        self._inside = 0
        self._changed = threading.Condition()
        self._regions: WeakKeyDictionary[object, Region] = WeakKeyDictionary()
        self._orphans: deque[Region] = deque()  # regions whose stream is gone: filled by the garbage collector
        self._told: WeakSet[ByteStream] = WeakSet()  # what peers are told of, as far as it is still there
        self._introduced: list[Place] = []  # all that they ever were told of
        self._introductions = 0
        self._peers: dict[str, int] = {}  # and the number of open reads
        self.connecting = threading.Lock()  # for readers: one thread at a time makes first contact
        self._meeting = threading.Lock()  # no peer is met while another one is forgotten
        options = {"num_workers": str(workers)}
        if tls:
            options["engine_config"] = f"TLS={tls}"
        try:
            config = bindings.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = _PROGRESS_DELAY_US
            config.syncMode = bindings.NIXL_THREAD_SYNC_RW
            with beside_captures():
                with _told(_QUIET if emulates else _QUIET | _NATIVE):
                    self._native = bindings.nixlAgent(self.name, config)
                    self._native.createBackend(_BACKEND, options)
                self._seals = self._register([seals.place])
                self._register([scratch.place])
        except self._errors as error:
            raise TransportMissing(f"NIXL cannot start its UCX back end: {error}", hint=_hint()) from error

    @scope
    def _using(self) -> Iterator[None]:
        """Inside, the native agent is there. NIXL's errors are raised as `Broken`."""
        with self._changed:
            if self.ended is not None:
                self._changed.wait_for(lambda: self._native is None, _END_S)  # then memory may be reused
                raise Broken(self.ended)
            self._inside += 1
        try:
            with beside_captures():
                yield
        except self._errors as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def end(self, reason: str) -> None:
        """No thread enters any more; when this returns, nothing moves, unless a thread has not left in time."""
        with self._changed:
            if self.ended is not None:
                return
            self.ended = reason
            if not self._changed.wait_for(lambda: self._inside == 0, _END_S):
                _let_live(self._native)  # a thread is inside still
            self._native = None
            self._regions.clear()
            self._changed.notify_all()

    def forget(self, reason: str) -> None:
        """Called in a forked child: the agent is the parent's. No lock is taken, for its holder is not here."""
        if self._native is not None:
            _let_live(self._native)
        self.ended, self._native = reason, None

    # -- memory --------------------------------------------------------------------------------------------------------

    def region(self, stream: ByteStream) -> Region | None:
        """The stream's memory, registered for as long as the stream exists; None for one without addresses."""
        with self._using():
            known = self._regions.get(stream)
            if known is None and (places := places_of(stream)) is not None:
                known = self.know(stream, places)
            return known

    def know(self, owner: object, places: list[Place]) -> Region:
        """Register that memory for as long as its owner exists."""
        with self._using():
            made = self._register(places)
            with self._changed:
                known = self._regions.setdefault(owner, made)
            if known is not made:
                self._deregister(made)
            else:
                finalize(owner, self._orphans.append, made).atexit = False
            return known

    def _register(self, places: list[Place]) -> Region:
        with suppress(IndexError):
            while True:
                self._deregister(self._orphans.popleft())
        lists = [
            self._nixl.nixlRegDList(self._kind(device), [(p.address, p.size_bytes, _number(p), "") for p in group])
            for device in (HOST, HOST + 1)
            if (group := [p for p in places if min(p.device, HOST + 1) == device])
        ]
        for index, one in enumerate(lists):
            try:
                self._native.registerMem(one, [])
            except self._errors:
                for former in lists[:index]:
                    self._native.deregisterMem(former, [])
                raise
        return Region(places, lists)

    def _deregister(self, region: Region) -> None:
        for one in region.lists:
            with suppress(*self._errors):
                self._native.deregisterMem(one, [])

    def introduction(self, region: Region) -> list[bytes]:
        """What a peer has to be told before it can read this region, and our seals."""
        with self._using():
            every = [one for known in (self._seals, region) for one in known.lists]
            return [self._native.getLocalPartialMD(one, True, []) for one in every]

    def tells_of(self, stream: ByteStream) -> bool:
        """Whether it is by this one that peers are told where the stream is."""
        with self._changed:
            return stream in self._told

    def take_on(self, stream: ByteStream, places: Sequence[Place]) -> bool:
        """From now on peers are told of the stream by this one. False if that would confuse them: see above."""
        with self._changed:
            gone = self._introductions - len(self._told)
            if gone >= _GONE or do_overlap(self._introduced, places):
                return False
            self._told.add(stream)
            self._introduced += places
            self._introductions += 1
            return True

    @property
    def is_needed(self) -> bool:
        """Whether peers may read by it."""
        with self._changed:
            return bool(self._inside or self._told)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def meet(self, name: str, metadata: Sequence[bytes]) -> None:
        """Remember a peer for a read. `part` ends that."""
        with self._meeting, self._using():
            if name != self.name:  # an agent knows itself
                names = {self._native.loadRemoteMD(one) for one in metadata}
                if names != {name.encode()}:
                    raise Broken("it introduces itself by another agent's name")
            self._peers[name] = self._peers.pop(name, 0) + 1  # last in order: the most recent

    def part(self, name: str, *, is_lost: bool) -> None:
        """A read of this peer is over. A lost peer is forgotten, and so is who was met longest ago, if many were."""
        with self._meeting:
            self._peers[name] -= 1
            idle = [peer for peer, reads in self._peers.items() if not reads]
            leaving = idle[: max(0, len(idle) - _IDLE_PEERS)]
            if is_lost and name in idle and name not in leaving:
                leaving.append(name)
            for peer in leaving:
                del self._peers[peer]
                if peer != self.name:
                    with suppress(Broken), self._using():
                        self._native.invalidateRemoteMD(peer)

    @property
    def peer_count(self) -> int:
        return len(self._peers)

    def await_turn(self, within_s: float, given_up: Callable[[], bool]) -> bool:
        """Take `connecting`, which is the caller's to release. False if that was not to be had in time, or given up."""
        deadline = time.monotonic() + within_s
        while not self.connecting.acquire(timeout=_TURN_POLL_S):
            if given_up() or time.monotonic() > deadline:
                return False
        return True

    # -- reading -------------------------------------------------------------------------------------------------------

    def prepare(self, peer: str | None, places: Sequence[Place]) -> int:
        """A descriptor list of one kind of memory, of a peer or our own, to be read by index."""
        kind = self._kind(places[0].device)
        with self._using():
            described = self._nixl.nixlXferDList(kind, [(p.address, p.size_bytes, _number(p)) for p in places])
            handle: int = self._native.prepXferDlist(peer or self._nixl.NIXL_INIT_AGENT, described, [])
            return handle

    def drop(self, prepared: int) -> None:
        """The descriptor list is not needed any more."""
        with suppress(Broken), self._using():
            self._native.releasedDlistH(prepared)

    def read(
        self, ours: int, theirs: int, indices: range, limit_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> bool:
        """Read descriptors, and return when they are there: True if the very call that posted them did it all.

        Raises `Broken` when it is over and failed, `Stuck` when it is not over within `limit_s`, or was given up:
        then it goes on.
        """
        deadline = time.monotonic() + limit_s
        chosen = list(indices)
        with self._using():
            request = self._native.makeXferReq(self._nixl.NIXL_READ, ours, chosen, theirs, chosen, "", [], False)
        is_over = False
        try:
            with self._using():
                is_over = is_immediate = bool(self._native.postXferReq(request, "") == self._nixl.NIXL_SUCCESS)
            pause_s = _FIRST_POLL_S
            while not is_over:
                if time.monotonic() > deadline or given_up():
                    raise Stuck(f"a read was not over after {limit_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_POLL_S)
                with self._using():
                    is_over = self._native.getXferStatus(request) == self._nixl.NIXL_SUCCESS
            return is_immediate
        finally:
            with suppress(Broken), self._using():
                self._native.releaseXferReq(request)

    def _kind(self, device: int) -> Any:
        return self._nixl.DRAM_SEG if device == HOST else self._nixl.VRAM_SEG


def _number(place: Place) -> int:
    """The device as NIXL counts it: 0 for the host."""
    return max(0, place.device - 1)


def _hint() -> str:
    tls = os.environ.get("UCX_TLS")
    return f"UCX_TLS={tls} may permit too little: unset it" if tls else "run `tensorhub doctor`; tcp works without NIXL"


# --- The NIXL agents of one transport: one that reads and introduces memory, and further ones for memory that it cannot
# introduce (6 above). Those end when nothing that they have introduced is there any more.


_living: "WeakSet[Agents]" = WeakSet()


class Agents:
    """All of them. Thread-safe."""

    def __init__(self, bindings: Any, *, workers: int, tls: str = "", emulates: bool = False) -> None:
        """As `Agent`. Raises `TransportMissing`."""
        self.seals = Page()
        self.scratch = Page()  # where readers put the seals that they look at
        self._make = partial(Agent, bindings, self.seals, self.scratch, workers=workers, tls=tls, emulates=emulates)
        self._lock = threading.Lock()
        self._agent: Agent | None = self._make()
        self._further: list[Agent] = []
        self.replaced = 0  # agents that had to end
        _living.add(self)

    def current(self) -> Agent:
        """To read by. Raises `TransportMissing` if a new one cannot be had, `Broken` once closed."""
        with self._lock:
            return self._current()

    def introducing(self, stream: ByteStream) -> Agent:
        """To tell peers of this stream's memory by. Raises the same."""
        with self._lock:
            self._end_needless()
            agents = [self._current(), *self._further]
            for agent in agents:
                if agent.tells_of(stream):
                    return agent
            places = places_of(stream) or ()
            for agent in agents:
                if agent.take_on(stream, places):
                    return agent
            made = self._make()
            made.take_on(stream, places)
            self._further.append(made)
            return made

    def _current(self) -> Agent:
        if self._agent is None:
            raise Broken("this nixl transport was closed")
        if self._agent.ended is not None:
            self._agent = self._make()
            self.replaced += 1
        return self._agent

    def _end_needless(self) -> None:
        for agent in self._further:
            if not agent.is_needed:
                agent.end("nothing is there any more that it has told of")
        self._further = [agent for agent in self._further if agent.ended is None]

    def close(self) -> None:
        with self._lock:
            agents, self._agent, self._further = [self._agent, *self._further], None, []
        for agent in agents:
            if agent is not None:
                agent.end("its worker closed")

    def forget(self) -> None:
        """Called in a forked child: forget the parent's agents."""
        for agent in (self._agent, *self._further):
            if agent is not None:
                agent.forget("this process is a fork of the one that opened it")
        self._agent, self._further = None, []


def _end_all() -> None:
    for agents in list(_living):
        agents.close()


def _forget_all() -> None:
    for agents in list(_living):
        agents.forget()
    _living.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
