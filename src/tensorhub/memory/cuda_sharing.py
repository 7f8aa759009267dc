"""Memory of CUDA devices, shared between processes of one host as torch.multiprocessing shares it.

Torch's allocators are both served: default segments by CUDA IPC, expandable segments by file descriptors. Torch keeps a
block that was shared until its last reader has closed it, also where its owner frees it or dies. Handles are numbers
and bytes, so they travel in messages of our own.

What cannot be shared (cudaMallocAsync, memory that an engine made with cuMemCreate) is `TransportMissing`.
"""

import os
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch

from ..core.decoding import Undecodable, decoded
from ..core.errors import TransportMissing
from ..transport.captures import beside_captures
from ..transport.on_device import Shared
from .host import Piece
from .xxh3 import Spans

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Storage(msgspec.Struct, frozen=True, array_like=True):
    """What `UntypedStorage._share_cuda_` returns, less the device's number, which is another one elsewhere."""

    handle: bytes
    size_bytes: _Natural
    offset_bytes: _Natural
    counter_handle: bytes
    counter_offset: _Natural
    event_handle: bytes
    is_event_waited_for: bool


class _Handles(msgspec.Struct, frozen=True, array_like=True):
    process: int
    device: str  # its UUID
    storages: list[_Storage]
    pieces: list[tuple[_Natural, _Natural, _Natural]]  # of the stream, in order: length, storage, first byte in it


_handles = msgspec.msgpack.Decoder(_Handles)


def share(pieces: Sequence[Piece], memory: Sequence[torch.Tensor]) -> Shared:
    """For one reader. `memory` is each piece as bytes. Raises `TransportMissing`."""
    numbers: dict[int, int] = {}
    storages: list[_Storage] = []
    places: list[tuple[int, int, int]] = []
    with beside_captures():
        for piece, tensor in zip(pieces, memory, strict=True):
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            if base not in numbers:
                numbers[base] = len(storages)
                try:
                    _, *rest = storage._share_cuda_()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    raise TransportMissing(
                        f"memory on {piece.device} cannot be shared with another process: {error}",
                        hint="torch's default allocator and expandable_segments can; cudaMallocAsync cannot",
                    ) from error
                storages.append(_Storage(*rest))
            places.append((piece.size_bytes, numbers[base], piece.address - base))
    body = msgspec.msgpack.encode(_Handles(os.getpid(), _uuid(memory[0].device), storages, places))
    return Shared(body, lambda: _give_up(storages))


def _give_up(storages: Sequence[_Storage]) -> None:
    """The reader has not opened them: torch would keep the memory for it for good."""
    for it in storages:
        torch.UntypedStorage._release_ipc_counter_cuda(it.counter_handle, it.counter_offset)


class OpenedCuda:
    """Another process's memory, on a device of this one."""

    def __init__(self, body: bytes, index: int) -> None:
        """Raises `TransportMissing`, and `ValueError` where `body` is malformed."""
        try:
            handles = decoded(_handles, body)
        except Undecodable as error:
            raise ValueError(str(error)) from error
        if handles.process == os.getpid():
            raise TransportMissing("a device opens no memory of its own process", hint="use tcp")
        if handles.device != _uuid(torch.device("cuda", index)):
            raise TransportMissing("the source's tensors are on another device", hint="use nixl, or tcp")
        sizes = [it.size_bytes for it in handles.storages]
        for length, storage, first in handles.pieces:
            if storage >= len(sizes) or first + length > sizes[storage]:
                raise ValueError(f"a piece of {length} B at {first} is not inside its storage")
        with beside_captures(), torch.cuda.device(index):
            try:
                opened = [
                    torch.UntypedStorage._new_shared_cuda(index, *msgspec.structs.astuple(it))
                    for it in handles.storages
                ]
            except RuntimeError as error:
                raise TransportMissing(f"the source's memory cannot be opened here: {error}", hint="use tcp") from error
        starts, addresses, at = [], [], 0
        for length, storage, first in handles.pieces:
            starts.append(at)
            addresses.append(opened[storage].data_ptr() + first)
            at += length
        self._storages = opened  # what keeps the memory open
        self.size_bytes = at
        self.spans = Spans(starts, addresses, at)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
