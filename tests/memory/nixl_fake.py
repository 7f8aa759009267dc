"""A NIXL of our own, for machines without it and for devices that are not here: its agents are strict.

Memory may only be read if it was registered as the kind that it is, on the device where it is, and was introduced to
the reader. What touches a device is over only when it is asked about the second time, as a real copy would be.
What a peer introduced is looked for as NIXL does it, so that it may be hidden by what the peer introduced before; and
every registration has another key, as with RDMA.
"""

import ctypes
import os
import secrets
import threading
from bisect import bisect_left, insort

import msgspec

NIXL_THREAD_SYNC_RW = NIXL_READ = NIXL_INIT_AGENT = ""
NIXL_SUCCESS, NIXL_IN_PROG = 0, 1
DRAM_SEG, VRAM_SEG = "DRAM", "VRAM"


class nixlFakeError(Exception):
    """What NIXL would raise."""


class nixlAgentConfig:
    pass


class DList:
    def __init__(self, kind, descriptors):
        self.kind = kind
        self.descriptors = [tuple(one)[:3] for one in descriptors]


nixlRegDList = nixlXferDList = DList


class nixlAgent:
    """One agent. `known` are the others, and what they have told; memory of other processes the kernel copies.

    As NIXL with its lock for threads (`NIXL_THREAD_SYNC_RW`), one thread at a time reads or changes what is known.
    """

    def __init__(self, name, config):
        self.name = name
        self.regions = []
        self.known = {}  # of each peer and kind, what it has introduced, sorted
        self.knowing = threading.Lock()
        self.stuck = set()  # peers of whom nothing but the connection is known
        self.processes = {}
        self.lists = {}
        self.requests = {}

    def createBackend(self, name, options):
        assert name == "UCX"

    def registerMem(self, memory, backends):
        if any(not size for _, size, _ in memory.descriptors):
            raise nixlFakeError("an empty descriptor")
        self.regions.append(memory)
        memory.key = secrets.token_hex(4)

    def deregisterMem(self, memory, backends):
        self.regions.remove(memory)

    def getLocalPartialMD(self, memory, with_connection, backends):
        if memory not in self.regions:
            raise nixlFakeError("not registered")
        return msgspec.json.encode((self.name, os.getpid(), memory.kind, memory.descriptors, memory.key))

    def loadRemoteMD(self, metadata):
        name, pid, kind, descriptors, key = msgspec.json.decode(metadata)
        with self.knowing:
            if name in self.stuck:
                raise nixlFakeError("NIXL_ERR_INVALID_PARAM")
            section = self.known.setdefault(name, {}).setdefault(kind, [])
            for address, size, device in descriptors:
                keys = [known for *place, known in section if place == [device, address, size]]
                if keys not in ([], [key]):
                    del self.known[name]
                    self.stuck.add(name)
                    raise nixlFakeError("NIXL_ERR_NOT_ALLOWED")
                if not keys:
                    insort(section, (device, address, size, key))
            self.processes[name] = pid
        return name.encode()

    def invalidateRemoteMD(self, name):
        with self.knowing:
            del self.known[name]

    def prepXferDlist(self, peer, described, backends):
        if peer in (NIXL_INIT_AGENT, self.name):
            for address, size, device in described.descriptors:
                if not any(_covers(region, described.kind, address, size, device) for region in self.regions):
                    raise nixlFakeError(f"{described.kind} {device} at {address} was not registered")
        else:
            with self.knowing:
                _look_up(self.known.get(peer, {}).get(described.kind, []), described.descriptors)
        described.pid = self.processes.get(peer, os.getpid())
        self.lists[number := secrets.randbits(60)] = described
        return number

    def releasedDlistH(self, number):
        del self.lists[number]

    def makeXferReq(self, operation, ours, our_indices, theirs, their_indices, *rest):
        assert operation == NIXL_READ
        pairs = [
            (self.lists[ours].descriptors[a], self.lists[theirs].descriptors[b])
            for a, b in zip(our_indices, their_indices, strict=True)
        ]
        touches_device = VRAM_SEG in (self.lists[ours].kind, self.lists[theirs].kind)
        self.requests[number := secrets.randbits(60)] = [pairs, touches_device, self.lists[theirs].pid]
        return number

    def postXferReq(self, number, message):
        pairs, touches_device, pid = self.requests[number]
        return NIXL_IN_PROG if touches_device else self._copy(pairs, pid)

    def getXferStatus(self, number):
        request = self.requests[number]
        if request[1]:
            request[1] = False
            return NIXL_IN_PROG
        return self._copy(request[0], request[2])

    def _copy(self, pairs, pid):
        for (our, our_size, _), (their, their_size, _) in pairs:
            if our_size != their_size:
                raise nixlFakeError("descriptors of different lengths")
            if pid == os.getpid():
                ctypes.memmove(our, their, our_size)
            else:
                _fetch(pid, our, their, our_size)
        return NIXL_SUCCESS

    def releaseXferReq(self, number):
        del self.requests[number]


class Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


def _fetch(pid, our, their, size_bytes):
    libc = ctypes.CDLL(None, use_errno=True)
    while size_bytes:
        ours, theirs = Range(our, size_bytes), Range(their, size_bytes)
        number = ctypes.c_ulong(1)
        moved = libc.process_vm_readv(pid, ctypes.byref(ours), number, ctypes.byref(theirs), number, ctypes.c_ulong(0))
        if moved <= 0:
            raise nixlFakeError(f"remote disconnect: {os.strerror(ctypes.get_errno())}")
        our, their, size_bytes = our + moved, their + moved, size_bytes - moved


def _look_up(section, descriptors):
    """In a sorted list, as NIXL's `populate`: the first and what goes back by bisection, then forward step by step."""
    index, last = 0, None
    for address, size, device in descriptors:
        wanted = (device, address, size)
        if last is None or wanted < last:
            index = bisect_left(section, wanted)
            if not (index < len(section) and _is_in(section[index], wanted)):
                index -= 1
            if index < 0 or not _is_in(section[index], wanted):
                raise nixlFakeError("NIXL_ERR_NOT_FOUND")
        while not _is_in(section[index], wanted):
            index += 1
            if index == len(section):
                raise nixlFakeError("NIXL_ERR_NOT_FOUND")
        last = wanted


def _is_in(known, wanted):
    return known[0] == wanted[0] and known[1] <= wanted[1] and wanted[1] + wanted[2] <= known[1] + known[2]


def _covers(region, kind, address, size, device):
    """Whether registered memory holds a range; neighbours that were registered apart are not one."""
    return region.kind == kind and any(
        begin <= address and address + size <= begin + length and device == where
        for begin, length, where in region.descriptors
    )
