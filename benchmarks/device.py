"""Tensors on a CUDA device, from one process to another: what copies alone take, hashing, and each transport."""

from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from .processes import Child, Failed, Server
from .section import GIB, MIB, Options, Section, closing_all, seconds_text, size_text

MODULE = "benchmarks.device_child"
COPIES = {
    "device": "copy on the device",
    "to_pinned": "copy to pinned host memory",
    "from_pinned": "copy from pinned host memory",
    "to_pageable": "copy to pageable host memory",
}
WAYS = ("tcp", "nixl")


@dataclass
class Row:
    """What was measured of one thing."""

    what: str
    seconds: list[float]
    reader_cpu_s: list[float]
    source_cpu_s: list[float]
    error: str = ""


def run(options: Options) -> list[Section]:
    """The part."""
    section = Section("device", "Tensors on a CUDA device")
    try:
        import torch
    except ImportError:
        section.skipped = "torch is not here"
        return [section]
    if not torch.cuda.is_available():
        section.skipped = "no CUDA device on this machine"
        return [section]
    size_bytes = 64 * MIB if options.is_tiny else max(options.size_bytes, GIB)
    rounds = 1 if options.is_tiny else options.rounds
    began: list[object] = []
    with closing_all(began):
        server, source, reader = Server(), Child("source", module=MODULE), Child("reader", module=MODULE)
        began += [server, source, reader]
        for child in (source, reader):
            child.wait_started()
            child.do("allocate", size_bytes=size_bytes)
        source.do("write", seed=3)
        name = source.do("name")
        rows = [_alone(options, reader, text, rounds, "copy", kind=kind) for kind, text in COPIES.items()]
        rows.append(_alone(options, reader, "digests of what is published", rounds, "hash"))
        rows.append(_taken_back(options, server, source, rounds))
        for way in WAYS:
            for verify in ("full", "none"):
                transfer = _Transfer(server, source, reader, way, verify)
                options.tell(f"device: {transfer.text}")
                rows.append(transfer.measured(rounds))
    return [_section(section, name, size_bytes, rounds, rows)]


def _alone(options: Options, child: Child, what: str, rounds: int, do: str, **arguments: object) -> Row:
    """Rounds of one command; the first is not counted."""
    options.tell(f"device: {what}")
    row = Row(what, [], [], [])
    try:
        for number in range(rounds + 1):
            found = child.do(do, **arguments)
            if number:
                row.seconds.append(found["seconds"])
                row.reader_cpu_s.append(found["cpu_s"])
    except Failed as error:
        row.error = str(error)
    return row


def _taken_back(options: Options, server: Server, source: Child, rounds: int) -> Row:
    """The last holder's unpublish: the version stays, in host memory."""
    row = Row("unpublish() by the last holder: a copy to host memory", [], [], [])
    options.tell(f"device: {row.what}")
    try:
        source.do("open", transports="tcp", server=server.address, model="alone", replica="source")
        for number in range(rounds + 1):
            source.do("call", verb="publish", version=number + 1)
            found = source.do("call", verb="unpublish")
            if number:
                row.seconds.append(found["seconds"])
                row.reader_cpu_s.append(found["cpu_s"])
    except Failed as error:
        row.error = str(error)
    finally:
        with suppress(Failed):
            source.do("close")
    return row


@dataclass
class _Transfer:
    """A replica that has just joined, again and again."""

    server: Server
    source: Child
    reader: Child
    way: str
    verify: str

    @property
    def text(self) -> str:
        checked = "verified" if self.verify == "full" else "not verified"
        return f"replicate() over {self.way}, {checked}"

    def measured(self, rounds: int) -> Row:
        row = Row(self.text, [], [], [])
        model = f"{self.way}-{self.verify}"
        options = {"server": self.server.address, "model": model, "transports": self.way, "verify": self.verify}
        try:
            self.source.do("open", replica="source", **options)
            self.source.do("call", verb="publish", version=1)
            for number in range(rounds + 1):
                self._once(row, {**options, "replica": f"reader-{number}"}, is_counted=number > 0)
        except Failed as error:
            row.error = str(error)
        finally:
            for child in (self.reader, self.source):
                with suppress(Failed):
                    child.do("close")
        return row

    def _once(self, row: Row, options: dict[str, str], *, is_counted: bool) -> None:
        self.reader.do("write", seed=0)
        self.reader.do("open", **options)
        try:
            before = self.source.do("cpu")
            found = self.reader.do("call", verb="replicate", spec=1, timeout=100)
            source_cpu_s = self.source.do("cpu") - before
            if self.reader.do("ways") != [self.way]:
                raise Failed(f"the bytes did not come over {self.way}")
            if not self.reader.do("is_right", seed=3):
                raise Failed("the bytes that came are not those that were sent")
        finally:
            self.reader.do("close")
        if is_counted:
            row.seconds.append(found["seconds"])
            row.reader_cpu_s.append(found["cpu_s"])
            row.source_cpu_s.append(source_cpu_s)


def _section(section: Section, name: str, size_bytes: int, rounds: int, rows: list[Row]) -> Section:
    section.title = f"{size_text(size_bytes)} on one {name}, of one process to another's"
    section.columns = ("what", "time", "GiB/s", "CPU s/GiB", "of the source")
    for row in rows:
        if not row.seconds:
            section.rows.append([row.what, "–", "–", row.error, ""])
            continue
        seconds, gib = median(row.seconds), size_bytes / GIB
        source = f"{median(row.source_cpu_s) / gib:.2f}" if row.source_cpu_s else ""
        cpu = f"{median(row.reader_cpu_s) / gib:.2f}"
        section.rows.append([row.what, seconds_text(seconds), f"{gib / seconds:.2f}", cpu, source])
    section.figures = {
        "device": name,
        "size_bytes": size_bytes,
        "runs": [
            {
                "what": row.what,
                "seconds": row.seconds,
                "reader_cpu_s": row.reader_cpu_s,
                "source_cpu_s": row.source_cpu_s,
                "error": row.error,
            }
            for row in rows
        ],
    }
    section.notes.append(f"medians of {rounds}, after one round that is not counted; what came is compared")
    return section
