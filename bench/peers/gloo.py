"""`torch.distributed`, gloo: broadcast from rank 0 to rank 1 over loopback."""

import os
from datetime import timedelta

import pair
import torch
import torch.distributed as dist


def _both(rank: int, port: int, size_bytes: int, transfers: int) -> dict[str, object]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=pair.PATIENCE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=pair.PATIENCE_S))
    array = pair.content(size_bytes) if rank == 0 else pair.np.zeros(size_bytes, dtype=pair.np.uint8)
    tensor, timing = torch.from_numpy(array), pair.Timing()
    for _ in range(transfers):
        dist.barrier()
        with timing:
            dist.broadcast(tensor, 0)
            if rank == 0:
                dist.barrier()
        if rank == 1:
            dist.barrier()
    return {"seconds": timing.seconds, "cpu": timing.cpu, "digest": pair.digest(array)}


def source(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipe.send(port)
    return _both(0, port, size_bytes, transfers)


def reader(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    return _both(1, int(str(pair.told(pipe))), size_bytes, transfers)


if __name__ == "__main__":
    pair.main(source, reader, "broadcast of one tensor, 2 ranks")
