"""Mooncake's transfer engine over TCP: the reader reads synchronously from the source's registered memory."""

import os

import pair

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


def _engine():  # type: ignore[no-untyped-def]
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("TransferEngine.initialize failed")
    return engine


def source(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    array, engine, timing = pair.content(size_bytes), _engine(), pair.Timing()
    if engine.register_memory(array.ctypes.data, size_bytes) != 0:
        raise RuntimeError("register_memory failed")
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", array.ctypes.data))
    for _ in range(transfers):
        with timing:
            pair.told(pipe)
        pipe.send("go on")
    return {"cpu": timing.cpu, "digest": pair.digest(array)}


def reader(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    array, engine, timing = pair.np.zeros(size_bytes, dtype=pair.np.uint8), _engine(), pair.Timing()
    if engine.register_memory(array.ctypes.data, size_bytes) != 0:
        raise RuntimeError("register_memory failed")
    peer, address = pair.told(pipe)  # type: ignore[misc]
    for _ in range(transfers):
        with timing:
            code = engine.transfer_sync_read(peer, array.ctypes.data, address, size_bytes)
        if code != 0:
            raise RuntimeError(f"transfer_sync_read gave {code}")
        pipe.send("done")
        pair.told(pipe)
    return {"seconds": timing.seconds, "cpu": timing.cpu, "digest": pair.digest(array)}


if __name__ == "__main__":
    pair.main(source, reader, "transfer_sync_read, protocol tcp")
