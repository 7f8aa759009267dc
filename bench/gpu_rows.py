"""The table of `make gpu`: `python -m bench.gpu_rows PART DEVICE` measures a part, and prints a row of JSON each.

Every figure has its limit beside it, measured in the same run. What came is compared with what was sent, each time. A
row whose way is not taken says by what it came instead, and has no figure.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median

from .processes import Child, Failed, Server

MIB, GIB = 1 << 20, 1 << 30
MODULE = f"{__package__}.gpu_child"
SHRINK = 1024  # of a rehearsal
NO_COPIES = {
    "TENSORHUB_DEFAULT_RETAIN": "0",
    "TENSORHUB_KEEP_ESTABLISHED": "no",
}  # an update alone is measured, without a copy to the host
ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}


class Table:
    """One part on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_real = device != "cpu"
        self.cuda = "cuda" if self.is_real else "local"
        self.models = 0

    def size(self, size_bytes: int) -> int:
        return size_bytes if self.is_real else size_bytes // SHRINK

    def say(
        self,
        what: str,
        value: float | None,
        unit: str,
        *,
        least: float | None = None,
        most: float | None = None,
        beside: dict[str, float] | None = None,
        samples: list[float] | None = None,
        error: str = "",
    ) -> None:
        wanted = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else ""
        is_met = None
        if self.is_real and value is not None and (least is not None or most is not None):
            is_met = value >= least if least is not None else value <= most  # type: ignore[operator]
        row = {
            "what": what,
            "value": value,
            "unit": unit,
            "wanted": f"{wanted} {unit}".strip() if wanted else "",
            "is_met": is_met,
            "beside": beside or {},
            "samples": samples or [],
            "error": error.replace("\n", " ")[-400:],
        }
        print(json.dumps(row), flush=True)

    def fails(self, what: str, error: object) -> None:
        self.say(what, None, "", error=str(error))

    @contextmanager
    def processes(self, *names: str, **environments: dict[str, str]) -> Iterator[list[Child]]:
        began: list[Child] = []
        try:
            began += [Child(name, module=MODULE, env=environments.get(name)) for name in names]
            for child in began:
                child.wait_started()
            yield began
        finally:
            for child in reversed(began):
                child.kill()

    def model(self) -> str:
        self.models += 1
        return f"model-{self.models}"

    # --- transfers ----------------------------------------------------------------------------------------------------

    def versions(
        self, server: Server, source: Child, reader: Child, way: str, rounds: int, *, verify: str = "full"
    ) -> list[float]:
        """Seconds of the reader's calls: the first one, which opens the memory, and one for each later version."""
        options = {"server": server.address, "model": self.model(), "transports": way}
        source.do("open", replica="source", **options)
        reader.do("open", replica="reader", verify=verify, **options)
        seconds = []
        for version in range(1, rounds + 2):
            if version > 1:
                source.do("call", verb="unpublish", timeout=30)
            source.do("write", seed=version)
            source.do("call", verb="publish", version=version, timeout=30)
            verb = "replicate" if version == 1 else "update"
            seconds.append(reader.do("call", verb=verb, spec=version, timeout=30)["seconds"])
            if not reader.do("is_right", seed=version):
                raise Failed("the bytes that came are not those that were sent")
        ways = list(reader.do("statistics")["bytes_by_transport"])
        if ways != [way]:
            raise Failed(f"the bytes came over {', '.join(ways)}")
        for child in (reader, source):
            with suppress(Failed):
                child.do("close")
        return seconds

    def device_row(self) -> None:
        """What this is measured on, and whether the kernels work."""
        from . import machine

        found: dict[str, object] = {"machine": machine.describe()}
        if self.is_real:
            import torch

            from tensorhub.memory.cuda_device import why_not

            began = time.perf_counter()
            reason = why_not(torch.device(self.device).index or 0)
            seconds = time.perf_counter() - began
            properties = torch.cuda.get_device_properties(self.device)
            found["gpu"] = {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "uuid": str(properties.uuid),
                "cuda": torch.version.cuda,
                "driver": getattr(torch._C, "_cuda_getDriverVersion", int)(),
                "kernels": reason or "they work",
            }
            print(json.dumps(found), flush=True)
            what = "kernels: context, compiled or taken from the cache, tried"
            self.say(what, seconds, "s", error=reason or "")
        else:
            print(json.dumps(found), flush=True)

    def digests(self) -> None:
        what, size = "digests of what is published, 4 GiB, at the host", self.size(4 * GIB)
        with self.processes("one") as (one,):
            one.do("allocate", device=self.device, size_bytes=size)
            one.do("write", seed=1)
            copy = size / GIB / median(one.do("copy", kind="device", rounds=5))
            samples = one.do("hash", rounds=10)
            self.say(
                what,
                size / GIB / median(samples),
                "GiB/s",
                least=2000,
                beside={"a copy on the device": copy, "reading alone, at most": 2 * copy},
                samples=samples,
            )

    def publish(self) -> None:
        what, size = "publish() of 16 GiB, the whole call", self.size(16 * GIB)
        with Server(env=NO_COPIES) as server, self.processes("one") as (one,):
            one.do("allocate", device=self.device, size_bytes=size)
            copy = one.do("copy", kind="device", rounds=3)
            one.do("open", server=server.address, model=self.model(), replica="one", transports=self.cuda)
            samples = []
            for version in range(1, 8):
                one.do("write", seed=version)
                samples.append(1000 * one.do("call", verb="publish", version=version, timeout=30)["seconds"])
                one.do("call", verb="unpublish", timeout=30)
            self.say(
                what,
                median(samples[1:]),
                "ms",
                most=30,
                beside={"a copy on the device, ms": 1000 * median(copy), "the first call, ms": samples[0]},
                samples=samples,
            )

    def same_device(self) -> None:
        """Another process's tensors on this device."""
        with Server(env=NO_COPIES) as server, self.processes("source", "reader") as (source, reader):
            for name, size_bytes, rounds in (("1 GiB", GIB, 8), ("16 GiB", 16 * GIB, 5)):
                what, size = f"replicate() of {name} on the same device, verified", self.size(size_bytes)
                for child in (source, reader):
                    child.do("allocate", device=self.device, size_bytes=size)
                copy = median(reader.do("copy", kind="device", rounds=3))
                seconds = self.versions(server, source, reader, self.cuda, rounds)
                whole = median(seconds[1:])
                beside = {"a bare copy, ms": 1000 * copy, "the first call, ms": 1000 * seconds[0]}
                if size_bytes == GIB:
                    self.say(what, 1000 * whole, "ms", most=15, beside=beside, samples=seconds)
                else:
                    self.say(what, size / GIB / whole, "GiB/s", least=500, beside=beside, samples=seconds)
            exported = source.do("export", kind=self.cuda)
            alone = reader.do("read", kind=self.cuda, rounds=3, **exported)
            beside = {"the read, GiB/s": size / GIB / median(alone), "the copy, GiB/s": size / GIB / copy}
            what = "its read alone, of a bare copy"
            self.say(what, copy / median(alone), "", least=0.7, beside=beside, samples=alone)

    def rings(self) -> None:
        """Memory that cannot be opened by another process, and devices that do not reach each other."""
        size = self.size(4 * GIB)
        for what, environment, refused in (
            ("the same through the ring on the device", ASYNC, []),
            ("the same through pinned shared memory, of the bus", {}, ["share", "make_ring"]),
        ):
            is_on_device = not refused
            children = self.processes("source", "reader", source=environment)
            try:
                with Server(env=NO_COPIES) as server, children as (source, reader):
                    for child in (source, reader):
                        child.do("allocate", device=self.device, size_bytes=size)
                    if self.is_real:
                        source.do("refuse", ways=refused)
                    kind = "device" if is_on_device else "to_pinned"
                    limit = size / GIB / median(reader.do("copy", kind=kind, rounds=3))
                    seconds = self.versions(server, source, reader, self.cuda, 3)
            except Failed as error:
                self.fails(what, error)
                continue
            rate = size / GIB / median(seconds[1:])
            if is_on_device:
                beside = {"a bare copy, GiB/s": limit}
                self.say(what, rate, "GiB/s", least=250, beside=beside, samples=seconds)
                continue
            beside = {"GiB/s": rate, "the bus, GiB/s": limit}
            is_other = self.is_real and rate > 1.1 * limit  # faster than the bus: it did not go through the host
            error = f"it went another way, at {rate:.0f} GiB/s" if is_other else ""
            value = None if is_other else rate / limit
            self.say(what, value, "", least=0.75, beside=beside, samples=seconds, error=error)

    def host_copy(self) -> None:
        """The last holder's unpublish: the version stays, in host memory."""
        size = self.size(2 * GIB)
        with Server() as server, self.processes("one") as (one,):
            one.do("allocate", device=self.device, size_bytes=size)
            to_host = size / GIB / median(one.do("copy", kind="to_pinned", rounds=2))
            from_host = size / GIB / median(one.do("copy", kind="from_pinned", rounds=2))
            options = {"server": server.address, "model": self.model(), "transports": "tcp", "retain": 1}
            one.do("open", replica="one", **options)
            taken, back = [], []
            for version in range(1, 6):
                one.do("write", seed=version)
                one.do("call", verb="publish", version=version, timeout=40)
                if version == 1:
                    one.do("await_host_copy", within_s=25.0)  # by then its memory is there, and prepared
                taken.append(one.do("call", verb="unpublish", timeout=40)["seconds"])
                one.do("write", seed=0)
                back.append(one.do("call", verb="replicate", spec=version, timeout=40)["seconds"])
                if not one.do("is_right", seed=version):
                    raise Failed("what came back is not what was published")
                one.do("call", verb="unpublish", timeout=40)
            for what, seconds, limit in (
                ("unpublish() by the last holder into a prepared host copy", taken, to_host),
                ("replicate() back from it", back, from_host),
            ):
                rate = size / GIB / median(seconds[1:])
                self.say(what, rate, "GiB/s", least=40, beside={"pinned, GiB/s": limit}, samples=seconds)

    def tcp(self) -> None:
        size, found = self.size(2 * GIB), {}
        with Server(env=NO_COPIES) as server, self.processes("source", "reader") as (source, reader):
            for name, device, verify in (
                ("devices", self.device, "full"),
                ("hosts", "cpu", "full"),
                ("devices, not verified", self.device, "none"),
            ):
                for child in (source, reader):
                    child.do("allocate", device=device, size_bytes=size)
                found[name] = self.versions(server, source, reader, "tcp", 4, verify=verify)
        rate = {name: size / GIB / median(seconds[1:]) for name, seconds in found.items()}
        for what, other, least in (
            ("tcp between devices, verified, beside hosts", "hosts", 0.9),
            ("tcp between devices, verified, beside not verified", "devices, not verified", 0.95),
        ):
            beside = {"GiB/s": rate["devices"], other: rate[other]}
            self.say(what, rate["devices"] / rate[other], "", least=least, beside=beside, samples=found["devices"])

    def layouts(self) -> None:
        what, shape, count = "rows of FSDP2 into columns of TP, same device", [8192, 8192], 32
        if not self.is_real:
            shape, count = [256, 256], 4
        size = count * shape[0] * shape[1] * 2
        with Server(env=NO_COPIES) as server, self.processes("source", "reader") as (source, reader):
            ways = "cuda,local,tcp" if self.is_real else "local,tcp"
            options = {"server": server.address, "model": self.model(), "transports": ways}
            cut = {"device": self.device, "shape": shape, "count": count, "shards": 2}
            source.do("open_shards", replica="trainer", dim=0, **cut, **options)
            seconds, staging = [], []
            for version in range(1, 5):
                if version > 1:
                    source.do("call", verb="unpublish", timeout=30)
                source.do("write_shards", seed=version)
                source.do("call", verb="publish", version=version, timeout=30)
                if version == 1:
                    reader.do("open_shards", replica="engine", dim=1, **cut, **options)
                before = reader.do("allocated")
                verb = "replicate" if version == 1 else "update"
                seconds.append(reader.do("call", verb=verb, spec=version, timeout=30)["seconds"])
                staging.append((reader.do("peak") - before) / MIB)
                if not reader.do("are_shards_right", seed=version):
                    raise Failed("the bytes that came are not those that were sent")
            ways = ", ".join(reader.do("statistics")["bytes_by_transport"])
            rate = size / GIB / median(seconds[1:])
            self.say(f"{what} ({ways})", rate, "GiB/s", least=300, samples=seconds)
            self.say("its staging memory on the device", max(staging), "MiB", most=512, samples=staging)

    def small(self) -> None:
        what, count = "10,000 tensors of 4 KiB, replicate()", 10_000 if self.is_real else 500
        with Server(env=NO_COPIES) as server, self.processes("source", "reader") as (source, reader):
            for child in (source, reader):
                child.do("allocate", device=self.device, size_bytes=count * 4096, tensor_bytes=4096)
            copy = 1000 * median(reader.do("copy_many", rounds=5))
            seconds = self.versions(server, source, reader, self.cuda, 5)
            beside = {"one call of torch for all, ms": copy, "the first call, ms": 1000 * seconds[0]}
            self.say(what, 1000 * median(seconds[1:]), "ms", most=20, beside=beside, samples=seconds)

    def training(self) -> None:
        what, size = "what a read of 16 GiB costs a training loop beside it", self.size(16 * GIB)
        work = {"size": 8192 if self.is_real else 64, "products": 12}
        with Server(env=NO_COPIES) as server, self.processes("source", "reader") as (source, reader):
            for child in (source, reader):
                child.do("allocate", device=self.device, size_bytes=size)
            options = {"server": server.address, "model": self.model(), "transports": self.cuda}
            source.do("open", replica="source", **options)
            reader.do("open", replica="reader", **options)
            costs, calls, step = [], [], 0.0
            for version in range(1, 6):
                if version > 1:
                    source.do("call", verb="unpublish", timeout=30)
                source.do("write", seed=version)
                source.do("call", verb="publish", version=version, timeout=30)
                source.do("train", is_on=True, **work)
                time.sleep(1.5)  # some sixty steps alone
                verb = "replicate" if version == 1 else "update"
                call = reader.do("call", verb=verb, spec=version, timeout=30)
                time.sleep(0.3)
                steps = source.do("train", is_on=False, **work)
                if not reader.do("is_right", seed=version):
                    raise Failed("the bytes that came are not those that were sent")
                alone = [end - begin for begin, end in steps[3:] if end < call["began"]]
                beside = [end - begin for begin, end in steps if end > call["began"] and begin < call["ended"]]
                step = median(alone) if alone else 0.0
                costs.append(1000 * sum(each - step for each in beside))
                calls.append(1000 * call["seconds"])
            beside_it = {"a step alone, ms": 1000 * step, "the read, ms": median(calls[1:])}
            self.say(what, median(costs[1:]), "ms", most=25, beside=beside_it, samples=costs)


PARTS = {
    "device": Table.device_row,
    "digests": Table.digests,
    "publish": Table.publish,
    "same_device": Table.same_device,
    "small": Table.small,
    "training": Table.training,
    "layouts": Table.layouts,
    "tcp": Table.tcp,
    "host_copy": Table.host_copy,
    "rings": Table.rings,
}


def main(name: str, device: str) -> int:
    table = Table(device)
    try:
        PARTS[name](table)
    except Failed as error:
        table.fails(name, error)
    sys.stdout.flush()
    os._exit(0)  # a device in a bad state must not hold up what comes next


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
