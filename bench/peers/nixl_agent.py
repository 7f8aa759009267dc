"""NIXL alone, its UCX back end as it chooses by itself: one read in descriptors of 4 MiB."""

import importlib
import time

import pair

DESCRIPTOR_BYTES = 4 << 20


def _agent(name: str):  # type: ignore[no-untyped-def]
    for package in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        try:
            api = importlib.import_module(package)
        except ModuleNotFoundError:
            continue
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    raise ModuleNotFoundError("no module named nixl, nixl_cu12 or nixl_cu13")


def _pieces(address: int, size_bytes: int) -> list[tuple[int, int, int]]:
    step = DESCRIPTOR_BYTES
    return [(address + at, min(step, size_bytes - at), 0) for at in range(0, size_bytes, step)]


def source(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    array, agent, timing = pair.content(size_bytes), _agent("source"), pair.Timing()
    agent.register_memory([(array.ctypes.data, size_bytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), array.ctypes.data))
    for _ in range(transfers):
        with timing:
            pair.told(pipe)
        pipe.send("go on")
    return {"cpu": timing.cpu, "digest": pair.digest(array)}


def reader(pipe: pair.Connection, size_bytes: int, transfers: int) -> dict[str, object]:
    array, agent, timing = pair.np.zeros(size_bytes, dtype=pair.np.uint8), _agent("reader"), pair.Timing()
    agent.register_memory([(array.ctypes.data, size_bytes, 0, "")], "DRAM")
    metadata, address = pair.told(pipe)  # type: ignore[misc]
    peer = agent.add_remote_agent(metadata)
    ours = agent.get_xfer_descs(_pieces(array.ctypes.data, size_bytes), "DRAM")
    theirs = agent.get_xfer_descs(_pieces(address, size_bytes), "DRAM")
    for _ in range(transfers):
        with timing:
            handle = agent.initialize_xfer("READ", ours, theirs, peer, b"")
            state = agent.transfer(handle)
            deadline = time.monotonic() + pair.PATIENCE_S
            while state != "DONE":
                if state == "ERR" or time.monotonic() > deadline:
                    raise RuntimeError(f"the transfer is in state {state}")
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        pipe.send("done")
        pair.told(pipe)
    return {"seconds": timing.seconds, "cpu": timing.cpu, "digest": pair.digest(array)}


if __name__ == "__main__":
    pair.main(source, reader, "READ of 4 MiB descriptors, UCX chooses its own way")
