"""One reader, one host: what the memory bus gives, what plain programs get of it, and TensorHub and its peers beside.

All ways but the peers' move the same buffers between the same two processes. A peer brings its own pair of processes,
started anew in each round.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from .peers_run import PEERS, run_peer
from .processes import Child, Failed, Server
from .section import Goal, Options, Samples, Section, seconds_text, size_text

WAYS = ("local", "nixl", "tcp")  # of tensors on the host
Move = Callable[["Pair"], dict[str, float]]


class Pair:
    """A source and a reader with memory of the same size, and a reference server."""

    def __init__(self, size_bytes: int, *, tensors: int = 1, is_torch: bool = False, **child: Any) -> None:
        """`child`: how its processes are started."""
        self.size_bytes = size_bytes
        self.tensors = tensors
        self._began: list[Server | Child] = []
        self._opened = 0
        self._has_copy = False
        try:
            self.server = self._add(Server())
            self.source = self._add(Child("source", **child))
            self.reader = self._add(Child("reader", **child))
            for child in (self.source, self.reader):
                child.wait_started()
            shape = {"size_bytes": size_bytes, "tensors": tensors, "is_torch": is_torch}
            source = self.source.ask("allocate", seed=3, **shape)
            self.reader.do("allocate", **shape)
            self.address = source.result()
            self.right = self.source.do("digest")
            options = {"server": self.server.address, "model": "m"}
            self.source.do("open", replica="source", transports=",".join(WAYS), **options)
            self.source.do("call", verb="publish", version=1)
            found = self.source.do("export", kinds=list(WAYS))
            self.root, self.endpoints, self.errors = found["root"], found["endpoints"], found["errors"]
            self.raw_port = self.source.do("serve_raw") if tensors == 1 else 0
        except BaseException:
            self.end()
            raise

    def _add(self, process):  # type: ignore[no-untyped-def]
        self._began.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self._began):
            process.kill()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def read_transport(self, kind: str, verify: str, **options: str) -> dict[str, float]:
        """One transport, without server and API."""
        if kind not in self.endpoints:
            raise Failed(self.errors.get(kind, "not there"))
        asked = {"kind": kind, "endpoint": self.endpoints[kind], "root": self.root, "verify": verify, **options}
        return self.reader.do("read_transport", **asked)

    def read_copy(self, verify: str) -> dict[str, float]:
        """The same out of a host copy, which the source makes once."""
        if not self._has_copy:
            self.source.do("export", kinds=["local"], key=COPY, is_copy=True)
            self._has_copy = True
        return self.read_transport("local", verify, key=COPY)

    def replicate(self, kind: str, verify: str) -> dict[str, float]:
        """Through the public API, by a replica that has just joined."""
        self._opened += 1
        replica = f"reader-{self._opened}"
        options = {"server": self.server.address, "model": "m", "replica": replica, "verify": verify}
        self.reader.do("open", transports=kind, **options)
        try:
            found = self.reader.do("call", verb="replicate", spec=1, timeout=100)
            ways = set(self.reader.do("look")["statistics"]["bytes_by_transport"])
            if ways != {kind}:
                raise Failed(f"the bytes came over {', '.join(sorted(ways)) or 'nothing'}")
            return found
        finally:
            self.reader.do("close")

    def measure(self, samples: Samples, move: Move, *, is_counted: bool) -> None:
        """One transfer, judged; an error ends this contestant."""
        if samples.error:
            return
        try:
            self.reader.do("clear")
            before = self.source.do("cpu")
            found = move(self)
            source_cpu_s = self.source.do("cpu") - before
            if samples.name != MEMCPY and self.reader.do("digest") != self.right:
                raise Failed("the bytes that came are not those that were sent")
        except Failed as error:
            samples.error = str(error)
            return
        if is_counted:
            samples.add(found["seconds"], found["cpu_s"], source_cpu_s)


@dataclass(frozen=True)
class Contestant:
    name: str
    kind: str
    move: Move


COPY = "a host copy"
FROM_COPY = "TensorHub local transport alone, from a host copy"
BARE = "process_vm_readv, 2 threads"
MEMCPY = "memcpy, one process, one thread"


def _vm(threads: int) -> Move:
    return lambda pair: pair.reader.do("read_vm", pid=pair.source.pid, address=pair.address, threads=threads)


def _checked(threads: int) -> Move:
    return lambda pair: pair.reader.do("read_vm_hashed", pid=pair.source.pid, address=pair.address, threads=threads)


def _raw(streams: int) -> Move:
    return lambda pair: pair.reader.do("read_raw", host="127.0.0.1", port=pair.raw_port, streams=streams)


def _alone(kind: str, verify: str) -> Move:
    return lambda pair: pair.read_transport(kind, verify)


def _copied(verify: str) -> Move:
    return lambda pair: pair.read_copy(verify)


def _whole(kind: str, verify: str) -> Move:
    return lambda pair: pair.replicate(kind, verify)


def contestants() -> list[Contestant]:
    """All that use the one pair."""
    found = [
        Contestant(MEMCPY, "limit", lambda pair: pair.reader.do("copy_memory")),
        Contestant("process_vm_readv, 1 thread", "plain local", _vm(1)),
        Contestant(BARE, "plain local", _vm(2)),
        Contestant("process_vm_readv and xxh3, 1 thread", "plain checked", _checked(1)),
        Contestant("process_vm_readv and xxh3, 2 threads", "plain checked", _checked(2)),
        Contestant("raw sockets, 1 stream", "plain tcp", _raw(1)),
        Contestant("raw sockets, 2 streams", "plain tcp", _raw(2)),
    ]
    for kind in WAYS:
        for verify, text in (("full", "verified"), ("none", "not verified")):
            found.append(Contestant(f"TensorHub {kind} transport alone, {text}", "ours", _alone(kind, verify)))
    for verify, text in (("full", "verified"), ("none", "not verified")):
        found.append(Contestant(f"{FROM_COPY}, {text}", "ours", _copied(verify)))
    for kind in WAYS:
        for verify, text in (("full", "verified"), ("none", "not verified")):
            found.append(Contestant(f"TensorHub replicate() over {kind}, {text}", "ours", _whole(kind, verify)))
    return found


def measure(options: Options, size_bytes: int, chosen: list[Contestant]) -> list[Samples]:
    """Rounds in changing order; the first is not counted."""
    found = {each.name: Samples(each.name, size_bytes, each.kind) for each in chosen}
    with Pair(size_bytes) as pair:
        for number in range(options.rounds + 1):
            order = list(chosen)
            random.Random(number).shuffle(order)
            for each in order:
                options.tell(f"{size_text(size_bytes)}, round {number} of {options.rounds}: {each.name}")
                pair.measure(found[each.name], each.move, is_counted=number > 0)
            pair.reader.do("forget_copy")
    return list(found.values())


def run(options: Options) -> list[Section]:
    """The part."""
    size_bytes = options.size_bytes
    chosen = contestants()
    found = {each.name: Samples(each.name, size_bytes, each.kind) for each in chosen}
    peers = {peer.name: Samples(peer.name, size_bytes, "peer") for peer in PEERS}
    with Pair(size_bytes) as pair:
        for number in range(options.rounds + 1):
            order: list[Contestant | object] = [*chosen, *(PEERS if number else ())]
            random.Random(number).shuffle(order)
            for each in order:
                name = each.name  # type: ignore[attr-defined]
                options.tell(f"{size_text(size_bytes)}, round {number} of {options.rounds}: {name}")
                if isinstance(each, Contestant):
                    pair.measure(found[name], each.move, is_counted=number > 0)
                else:
                    run_peer(each, peers[name], options)  # type: ignore[arg-type]
            pair.reader.do("forget_copy")
    samples = [*found.values(), *peers.values()]
    section = Section(
        "one_reader",
        f"One reader on the same host, {size_text(size_bytes)}",
        ("way", "GiB/s", "time", "min … max", "CPU s/GiB reader", "CPU s/GiB source", "remark"),
        [row_of(each) for each in samples],
        {"size_bytes": size_bytes, "samples": [each.figures() for each in samples]},
    )
    section.goals = goals_of(found)
    section.notes.append("the first transfer of each way is not counted; every target was compared with its source")
    return [section]


def row_of(samples: Samples) -> list[str]:
    """A line of the table."""
    if samples.error or not samples.seconds:
        return [samples.name, "–", "", "", "", "", f"does not run here: {samples.error or 'no sample'}"]
    return [
        samples.name,
        f"{samples.rate:.2f}",
        seconds_text(median(samples.seconds)),
        f"{seconds_text(min(samples.seconds))} … {seconds_text(max(samples.seconds))}",
        f"{samples.cpu_per_gib(samples.reader_cpu_s):.2f}",
        f"{samples.cpu_per_gib(samples.source_cpu_s):.2f}",
        samples.note,
    ]


def goals_of(found: dict[str, Samples]) -> list[Goal]:
    """The goals: each way reaches 90 % of the best plain way, by medians."""
    goals = []
    for kind, beside in (("local", "local"), ("local", "checked"), ("tcp", "tcp")):
        least = 0.9
        plain = [each for each in found.values() if each.kind == f"plain {beside}" and each.seconds]
        best = max(plain, key=lambda each: each.rate, default=None)
        for text in (f"replicate() over {kind}", f"{kind} transport alone"):
            for verify in ("verified", "not verified")[: 1 if beside == "checked" else 2]:
                ours = found[f"TensorHub {text}, {verify}"]
                what = f"one reader: {text}, {verify}, of the best plain way ({best.name if best else 'none'})"
                if best is None or not ours.seconds:
                    goals.append(Goal(what, f"≥ {least}", f"not measured: {ours.error}", None))
                else:
                    ratio = ours.rate / best.rate
                    best_ratio = min(best.seconds) / min(ours.seconds)
                    got = f"{ratio:.2f} (best times: {best_ratio:.2f})"
                    goals.append(Goal(what, f"≥ {least}", got, ratio >= least))
    return [*goals, goal_of_copies(found)]


def goal_of_copies(found: dict[str, Samples]) -> Goal:
    """What a mapping gives over the kernel's copying, digests and all: by medians, and in CPU."""
    ours, bare = found[f"{FROM_COPY}, verified"], found[BARE]
    what = f"one reader: local transport alone, from a host copy, verified, of bare {BARE}"
    if not ours.seconds or not bare.seconds:
        return Goal(what, "≥ 1.2", f"not measured: {ours.error or bare.error}", None)
    ratio, best_ratio = ours.rate / bare.rate, min(bare.seconds) / min(ours.seconds)
    cpu = bare.cpu_per_gib(bare.reader_cpu_s) / max(1e-9, ours.cpu_per_gib(ours.reader_cpu_s))
    got = f"{ratio:.2f} (best times: {best_ratio:.2f}; by CPU: {cpu:.2f})"
    return Goal(what, "≥ 1.2", got, ratio >= 1.2)
