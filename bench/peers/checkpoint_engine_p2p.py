"""checkpoint-engine's P2P store: Mooncake's engine behind its own class, which asks for a GPU or an NPU."""

import os

import pair

os.environ.setdefault("RANK", "0")


def _store():  # type: ignore[no-untyped-def]
    from checkpoint_engine.device_utils import DeviceManager
    from checkpoint_engine.p2p_store import P2PStore

    return P2PStore(DeviceManager())


def source(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    import torch

    array, store, timing = pair.content(size_bytes), _store(), pair.Timing()
    store.register_named_tensors({"w": torch.from_numpy(array)})
    pipe.send((store.addr, array.ctypes.data))
    for _ in range(transfers):
        with timing:
            pair.told(pipe)
        pipe.send("go on")
    return {"cpu": timing.cpu, "digest": pair.digest(array)}


def reader(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    import torch

    array, store, timing = pair.np.zeros(size_bytes, dtype=pair.np.uint8), _store(), pair.Timing()
    store.register_named_tensors({"w": torch.from_numpy(array)})
    peer, address = pair.told(pipe)  # type: ignore[misc]
    for _ in range(transfers):
        with timing:
            store.batch_transfer_sync_read(peer, [array.ctypes.data], [address], [size_bytes])
        pipe.send("done")
        pair.told(pipe)
    return {"seconds": timing.seconds, "cpu": timing.cpu, "digest": pair.digest(array)}


if __name__ == "__main__":
    pair.main(source, reader, "batch_transfer_sync_read")
