"""One NIXL agent with its UCX back end, and what must be kept in mind about it. Knows memory and peers; no keys.

NIXL's manners, as measured with 1.5.1, that this file is shaped by:
1. Its progress thread spins a whole core with NIXL's own default (`pthrDelay=0`, 0.66 of a core while idle). It sleeps
   until there is something to do if it is given a delay: 100 ms costs 0.001 of a core, and adds no latency.
2. Releasing a request does not cancel it. Neither does forgetting the peer, nor deregistering the local memory: over
   TCP a stopped source's bytes landed in all three cases, 64 MiB of 64, once it went on. Only the end of the whole
   agent fences (none of 13 runs had a late byte). So a transfer that does not end in time ends its agent.
3. A source's deregistration does not stop readers either (cma and TCP: they went on reading). The seal does.
4. Where UCX has no way to read memory by itself, the source's process sends it, in messages over TCP ("emulation"). A
   reader that ends in the middle of that, or is killed, aborts the *source* (UCX: "Fatal: unexpected error: Endpoint
   timeout", 10 of 13 sources). So it was on a GPU without NVLink, where UCX does not read by CUDA IPC on its own. It is
   told to do that, and never to emulate: what cannot be read natively is an error then, and goes by `tcp`.
5. UCX keeps the device memory of a peer mapped once it has read it: what the peer frees then stays taken until the
   reader's process ends (1 GiB read on an H200: 960 MiB). So it is told to map it anew for each read.
6. A reader finds a peer's memory by where it begins, in a sorted list to which every introduction adds, and out of
   which nothing goes but with the whole peer. So what was there before hides what is there now ("NIXL_ERR_NOT_FOUND"),
   and another key for the same place makes it drop all that it knows of the peer. To forget a peer that lives costs
   both ends a socket for each worker, for good. So who has other memory where memory of its own was introduces it by a
   further agent (`nixl_agents`), whose end frees everything at both ends.
7. It logs to stdout and stderr unless told otherwise before it is loaded.
8. A thread that comes out of it while the interpreter ends aborts the process (the way out cannot be unwound): so every
   agent ends before that, also a forgotten one (`atexit`). A forked child has an agent without its threads, whose end
   would wait for them for ever: there it is neither used nor deleted.

It must never: be used once ended, be deleted while a thread is inside, or outlive its worker.
"""

import ctypes
import importlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

from ..core.errors import TransportMissing
from .base import ByteStream
from .captures import beside_captures
from .nixl_memory import Page, Place, do_overlap, places_of
from .nixl_path import HOST
from .scopes import scope

MODULES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")  # CUDA is not needed to import any of them; `nixl` only picks one
_BACKEND = "UCX"
_PROGRESS_DELAY_US = 100_000  # the progress thread looks without being woken: see above
_IDLE_PEERS = 64  # kept connected without being read from
_GONE = 64  # introductions of memory that is not there any more, which peers go on knowing
_END_S = 5.0  # native calls end within milliseconds: the longest is one post of a few MiB that copies inside
_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 1e-3  # twice as long each time: 4 MiB at 200 Gbit/s take 170 µs
_TURN_POLL_S = 0.05  # as often somebody who waits for his turn looks whether he still wants it
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


class Region:
    """Registered memory: its places, and what NIXL calls it."""

    def __init__(self, places: list[Place], lists: list[Any]) -> None:
        self.places = places
        self.lists = lists


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
        self._meeting = threading.Lock()  # nobody is met while somebody is forgotten
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
                self._changed.wait_for(lambda: self._native is None, _END_S)  # whoever is told may reuse the memory
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
                _let_live(self._native)  # deleting it would pull the floor from under whoever is inside
            self._native = None
            self._regions.clear()
            self._changed.notify_all()

    def forget(self, reason: str) -> None:
        """In a forked child: it is the parent's. No lock is taken: whoever held one is not here."""
        if self._native is not None:
            _let_live(self._native)
        self.ended, self._native = reason, None

    # -- memory --------------------------------------------------------------------------------------------------------

    def region(self, stream: ByteStream) -> Region | None:
        """The stream's memory, registered for as long as the stream exists; None for one without addresses."""
        return self._region(stream, lambda: places_of(stream))

    def know(self, owner: object, place: Place) -> None:
        """Register that memory for as long as its owner exists."""
        self._region(owner, lambda: [place])

    def _region(self, owner: object, find: Callable[[], list[Place] | None]) -> Region | None:
        with self._using():
            with self._changed:
                known = self._regions.get(owner)
            with suppress(IndexError):
                while True:
                    self._deregister(self._orphans.popleft())
            if known is not None:
                return known
            places = find()
            if places is None:
                return None
            made = self._register(places)
            with self._changed:
                known = self._regions.setdefault(owner, made)
            if known is not made:
                self._deregister(made)
            else:
                finalize(owner, self._orphans.append, made).atexit = False
            return known

    def _register(self, places: list[Place]) -> Region:
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
