"""A NIXL of our own, for what needs devices that are not here: its agents share one process, and are strict.

Memory may only be read if it was registered as the kind that it is, on the device where it is, and was introduced to
the reader. What touches a device is over only when it is asked about the second time, as a real copy would be.
"""

import ctypes
import secrets
from itertools import pairwise

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
    """One agent. `known` are the others, and what they have told."""

    told = {}  # noqa: RUF012 - of all agents: metadata is opaque to those who carry it, here a ticket

    def __init__(self, name, config):
        self.name = name
        self.regions = []
        self.known = {}
        self.lists = {}
        self.requests = {}

    def createBackend(self, name, options):
        assert name == "UCX"

    def registerMem(self, memory, backends):
        if any(not size for _, size, _ in memory.descriptors):
            raise nixlFakeError("an empty descriptor")
        self.regions.append(memory)

    def deregisterMem(self, memory, backends):
        self.regions.remove(memory)

    def getLocalPartialMD(self, memory, with_connection, backends):
        if memory not in self.regions:
            raise nixlFakeError("not registered")
        ticket = secrets.token_bytes(8)
        self.told[ticket] = self.name, memory
        return ticket

    def loadRemoteMD(self, ticket):
        name, memory = self.told[ticket]
        self.known.setdefault(name, []).append(memory)
        return name.encode()

    def invalidateRemoteMD(self, name):
        del self.known[name]

    def prepXferDlist(self, peer, described, backends):
        regions = self.regions if peer in (NIXL_INIT_AGENT, self.name) else self.known.get(peer, [])
        for address, size, device in described.descriptors:
            if not any(_covers(region, described.kind, address, size, device) for region in regions):
                raise nixlFakeError(f"{described.kind} {device} at {address} was not registered")
        self.lists[number := len(self.lists) + 1] = described
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
        self.requests[number := secrets.randbits(60)] = [pairs, touches_device]
        return number

    def postXferReq(self, number, message):
        pairs, touches_device = self.requests[number]
        if touches_device:
            return NIXL_IN_PROG
        return self._copy(pairs)

    def getXferStatus(self, number):
        request = self.requests[number]
        if request[1]:
            request[1] = False
            return NIXL_IN_PROG
        return self._copy(request[0])

    def _copy(self, pairs):
        for (our, our_size, _), (their, their_size, _) in pairs:
            if our_size != their_size:
                raise nixlFakeError("descriptors of different lengths")
            ctypes.memmove(our, their, our_size)
        return NIXL_SUCCESS

    def releaseXferReq(self, number):
        del self.requests[number]


def _covers(region, kind, address, size, device):
    """Whether registered memory holds a range; neighbours that were registered apart are not one."""
    assert all(a <= b for a, b in pairwise(sorted(one[0] for one in region.descriptors)))
    return region.kind == kind and any(
        begin <= address and address + size <= begin + length and device == where
        for begin, length, where in region.descriptors
    )
