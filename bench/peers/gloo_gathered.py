"""Today's common way: gather full tensors first, then send them to each rank that needs a part.

Two trainer ranks hold halves of a matrix (a `DTensor`, `Shard(0)`) and call `full_tensor()`; rank 0 sends all of it to
the reader. With `--gathered` the reader wants the right half of each row; without, each row goes beside as many other
bytes. All by gloo.
"""

import argparse
import os
import socket
import traceback
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import pair
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

RANKS, READER = 3, 2


def guarded(rank: int, port: int, given: argparse.Namespace, out: Connection) -> None:
    """One rank; what went wrong is told as text."""
    try:
        out.send(run(rank, port, given))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        out.send(f"{type(error).__name__}: {error}".splitlines()[0])


def run(rank: int, port: int, given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds and CPU of each transfer but the first."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    patience = timedelta(seconds=pair.PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=patience)
    mesh = DeviceMesh("cpu", [0, 1])
    rows, width = given.size // given.row, given.row * (2 if given.gathered else 1)
    whole = torch.from_numpy(pair.content(rows * width).reshape(rows, width))
    timing, wanted = pair.Timing(), whole[:, -given.row :].numpy()
    if rank != READER:
        first, last = rank * rows // 2, (rank + 1) * rows // 2
        mine = DTensor.from_local(whole[first:last].clone(), mesh, [Shard(0)], run_check=False)
    else:
        received = torch.zeros_like(whole)
        target = torch.zeros(rows, given.row * (1 if given.gathered else 2), dtype=torch.uint8)
    for _ in range(given.repeat + 1):
        dist.barrier()
        with timing:
            if rank != READER:
                full = mine.full_tensor()
                if rank == 0:
                    dist.send(full, READER)
            else:
                dist.recv(received, 0)
                target[:, -given.row :] = received[:, -given.row :]
    if rank == READER:
        found = target[:, -given.row :].numpy()
        if not np.array_equal(found, wanted):
            raise RuntimeError("the bytes that came are not those that were sent")
    return timing.seconds[1:], timing.cpu[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64 << 20)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--row", type=int, default=4096)
    parser.add_argument("--gathered", action="store_true")
    given = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        context.Process(target=guarded, args=(rank, port, given, pipes[rank][1]), daemon=True) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    found = []
    for pipe, _ in pipes:
        if not pipe.poll(pair.PATIENCE_S):
            pair.finish({"error": f"no end within {pair.PATIENCE_S:.0f} s"})
        found.append(pipe.recv())
        if isinstance(found[-1], str):
            pair.finish({"error": found[-1]})
    (_, one), (_, other), (seconds, reader) = found
    pair.finish(
        {
            "seconds": seconds,
            "reader_cpu_s": reader,
            "source_cpu_s": [sum(both) for both in zip(one, other, strict=True)],
            "note": "full_tensor() on two ranks, then all of it to the reader",
        }
    )


if __name__ == "__main__":
    main()
