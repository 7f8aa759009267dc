"""torchstore: `put` a tensor from one actor of Monarch, `get` it into the memory of another."""

import asyncio

import pair


async def _measure(size_bytes: int, transfers: int) -> dict[str, object]:
    import torch
    import torchstore
    from monarch.actor import Actor, endpoint, this_host

    class Side(Actor):
        def __init__(self, size_bytes: int, is_source: bool) -> None:
            self.array = pair.content(size_bytes) if is_source else pair.np.zeros(size_bytes, dtype=pair.np.uint8)
            self.tensor = torch.from_numpy(self.array)

        @endpoint
        async def put(self) -> tuple[float, float]:
            timing = pair.Timing()
            with timing:
                await torchstore.put("w", self.tensor)
            return timing.seconds[0], timing.cpu[0]

        @endpoint
        async def get(self) -> tuple[float, float]:
            timing = pair.Timing()
            with timing:
                await torchstore.get("w", self.tensor)
            return timing.seconds[0], timing.cpu[0]

        @endpoint
        async def digest(self) -> str:
            return pair.digest(self.array)

    await torchstore.initialize()
    sides = [
        this_host().spawn_procs(per_host={"gpus": 1}).spawn(f"side{i}", Side, size_bytes, i == 0) for i in range(2)
    ]
    seconds, cpu, source_cpu = [], [], []
    for _ in range(transfers):
        put_s, put_cpu = await sides[0].put.call_one()
        get_s, get_cpu = await sides[1].get.call_one()
        seconds.append(put_s + get_s)
        cpu.append(get_cpu)
        source_cpu.append(put_cpu)
    digests = [await side.digest.call_one() for side in sides]
    if digests[0] != digests[1]:
        return {"error": "the bytes that came are not those that were sent"}
    answer = {"seconds": seconds[1:], "reader_cpu_s": cpu[1:], "source_cpu_s": source_cpu[1:]}
    return {**answer, "note": "put + get into the reader's tensor; CPU of its volume not counted"}


def main() -> None:
    given = pair.arguments()
    try:
        found = asyncio.run(asyncio.wait_for(_measure(given.size, given.repeat + 1), pair.PATIENCE_S))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    pair.finish(found)


if __name__ == "__main__":
    main()
