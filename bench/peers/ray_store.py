"""Ray's object store: `put` in one process, `get` and a copy into the reader's own memory in another."""

import os

import pair

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def main() -> None:
    given = pair.arguments()
    try:
        import ray

        store_bytes = max(256 << 20, 3 * given.size)
        ray.init(
            num_cpus=2,
            object_store_memory=store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address="127.0.0.1",
        )

        @ray.remote(num_cpus=0)
        class Source:
            def __init__(self, size_bytes: int) -> None:
                self.array = pair.content(size_bytes)

            def put(self) -> tuple[list[object], float, float]:
                timing = pair.Timing()
                with timing:
                    found = ray.put(self.array)
                return [found], timing.seconds[0], timing.cpu[0]

            def digest(self) -> str:
                return pair.digest(self.array)

        source = Source.remote(given.size)
        array = pair.np.zeros(given.size, dtype=pair.np.uint8)
        seconds, cpu, source_cpu = [], [], []
        for _ in range(given.repeat + 1):
            timing = pair.Timing()
            (reference,), put_s, put_cpu = ray.get(source.put.remote(), timeout=pair.PATIENCE_S)
            with timing:
                pair.np.copyto(array, ray.get(reference, timeout=pair.PATIENCE_S))
            seconds.append(put_s + timing.seconds[0])
            cpu.append(timing.cpu[0])
            source_cpu.append(put_cpu)
            del reference
        is_same = pair.digest(array) == ray.get(source.digest.remote(), timeout=pair.PATIENCE_S)
        ray.shutdown()
    except Exception as error:  # noqa: BLE001 - told to the parent
        pair.finish({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    if not is_same:
        pair.finish({"error": "the bytes that came are not those that were sent"})
    answer = {"seconds": seconds[1:], "reader_cpu_s": cpu[1:], "source_cpu_s": source_cpu[1:]}
    pair.finish({**answer, "note": "put + get + copy into the reader's memory; CPU of Ray's own processes not counted"})


if __name__ == "__main__":
    main()
