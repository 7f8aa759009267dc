"""N readers of one source, each worker on a link of its own: what they take together, beside one transfer and the star.

The star is what point-to-point systems do: every reader reads from the source itself, over the same transport. It does
not use the reference server at all, so nothing of the product has to pretend.
"""

from statistics import median

from .links import Links, NoLinks, why_not
from .machine import Idle
from .processes import Child, Failed, Server
from .section import Goal, Options, Section, seconds_text, size_text

MAX_REPEATS = 3
KIB = 1024
CHUNKS = (4096 * KIB, 1024 * KIB)  # the default, and what suits links as slow as these
BUSY_SHARE = 0.15  # less idle than this, and the cores were part of the bottleneck


class LinkedWorkers:
    """A server, a source at namespace 0 and readers at 1..N, all with memory of the same size."""

    def __init__(self, links: Links, size_bytes: int, readers: int, *, chunk_bytes: int) -> None:
        self.links = links
        self.size_bytes = size_bytes
        self._began: list[Server | Child] = []
        self.chunk_bytes = chunk_bytes
        self._lives = 0
        try:
            self.server = Server(links.server_address, wrapper=links.server_wrapper)
            self._began.append(self.server)
            self.workers = []
            for index in range(readers + 1):
                child = Child(f"worker-{index}", wrapper=links.wrapper(index))
                self._began.append(child)
                self.workers.append(child)
            for child in self.workers:
                child.wait_started()
            allocated = [
                child.ask("allocate", size_bytes=size_bytes, seed=0 if index else 3)
                for index, child in enumerate(self.workers)
            ]
            for pending in allocated:
                pending.result()
            self.source, self.readers = self.workers[0], self.workers[1:]
            self.right = self.source.do("digest")
            self.open(self.source, "source")
            self.source.do("call", verb="publish", version=1)
            host = links.address(0)
            found = self.source.do("export", kinds=["tcp"], host=host, chunk_bytes=chunk_bytes)
            self.root, self.endpoint = found["root"], found["endpoints"]["tcp"]
        except BaseException:
            self.end()
            raise

    def open(self, child: Child, replica: str) -> None:
        options = {"server": self.server.address, "model": "m", "replica": replica, "transports": "tcp"}
        child.do("open", chunk_bytes=self.chunk_bytes, **options)

    def join(self, readers: list[Child]) -> None:
        """Each reader as a replica that has just joined."""
        self._lives += 1
        for index, child in enumerate(readers):
            self.open(child, f"reader-{self._lives}-{index}")

    def judge(self, readers: list[Child]) -> None:
        for child in readers:
            if child.do("digest") != self.right:
                raise Failed(f"{child.name}: the bytes that came are not those that were sent")

    def clear(self) -> None:
        for pending in [child.ask("clear") for child in self.readers]:
            pending.result()

    def end(self) -> None:
        for process in reversed(self._began):
            process.kill()

    def __enter__(self) -> "LinkedWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _span(found: list[dict[str, float]]) -> float:
    """From the first beginning to the last end, by the machine's one clock."""
    return max(each["ended"] for each in found) - min(each["began"] for each in found)


def replicate(lab: LinkedWorkers, count: int) -> dict[str, object]:
    """`count` replicas join and fill themselves at the same time."""
    readers = lab.readers[:count]
    lab.clear()
    lab.join(readers)
    sent_before = lab.source.do("look")["statistics"]["sent_bytes"]
    idle = Idle()
    found = [pending.result() for pending in [c.ask("call", verb="replicate", spec=1, timeout=100) for c in readers]]
    share = idle.share()
    sent = lab.source.do("look")["statistics"]["sent_bytes"] - sent_before
    lab.judge(readers)
    for child in readers:
        child.do("close")
    return {"seconds": _span(found), "idle_share": share, "source_copies": sent / lab.size_bytes}


def star(lab: LinkedWorkers, count: int) -> dict[str, object]:
    """All read from the source."""
    readers = lab.readers[:count]
    lab.clear()
    hosts = [lab.links.address(index + 1) for index in range(count)]
    idle = Idle()
    asked = [
        child.ask("read_transport", kind="tcp", endpoint=lab.endpoint, root=lab.root, host=host)
        for child, host in zip(readers, hosts, strict=True)
    ]
    found = [pending.result() for pending in asked]
    share = idle.share()
    lab.judge(readers)
    return {"seconds": _span(found), "idle_share": share, "source_copies": float(count)}


def run(options: Options) -> list[Section]:
    """The part: once with each size of chunks."""
    problem = why_not()
    if problem is not None:
        return [Section("fan_out", "Fan-out", skipped=problem)]
    counts = sorted({1, *options.readers})
    sections = []
    try:
        with Links(counts[-1] + 1, options.rate_mbit) as links:
            for number, chunk_bytes in enumerate(CHUNKS[:1] if options.is_tiny else CHUNKS):
                section = Section("fan_out" if number == 0 else f"fan_out_{chunk_bytes // KIB}k", "Fan-out")
                sections.append(_measured(options, section, links, counts, chunk_bytes))
    except NoLinks as error:
        return [*sections, Section("fan_out", "Fan-out", skipped=str(error))]
    return sections


def _measured(options: Options, section: Section, links: Links, counts: list[int], chunk_bytes: int) -> Section:
    size_bytes = options.link_bytes
    repeats = min(options.rounds, MAX_REPEATS)
    found: dict[tuple[str, int], list[dict[str, object]]] = {}
    ideal_s = size_bytes / links.bytes_per_s
    with LinkedWorkers(links, size_bytes, counts[-1], chunk_bytes=chunk_bytes) as lab:
        for number in range(repeats):
            for count in counts if number % 2 == 0 else counts[::-1]:
                for name, way in (("replicate", replicate), ("star", star)):
                    if name == "star" and (number or section.key != "fan_out" or not options.has_star):
                        continue  # nothing is as steady as a queue: once is enough
                    text = f"fan-out, chunks of {size_text(chunk_bytes)}, round {number + 1} of {repeats}"
                    options.tell(f"{text}: {name}, {count} readers")
                    found.setdefault((name, count), []).append(way(lab, count))
    section.title = (
        f"Fan-out: {size_text(size_bytes)} in chunks of {size_text(chunk_bytes)} to N readers, every worker on a link "
        f"of {options.rate_mbit} Mbit/s (the wire alone: {seconds_text(ideal_s)})"
    )
    section.columns = (
        "readers",
        "last reader done",
        "of one transfer",
        "a perfect chain",
        "copies the source sent",
        "idle",
        "star: last reader done",
        "of one transfer",
        "idle",
    )
    for count in counts:
        _add_row(section, count, found, chunk_bytes / size_bytes)
    section.figures = {
        "size_bytes": size_bytes,
        "chunk_bytes": chunk_bytes,
        "rate_mbit": options.rate_mbit,
        "wire_seconds": ideal_s,
        "runs": [{"way": name, "readers": count, "runs": runs} for (name, count), runs in found.items()],
    }
    one_s = _middle(found["replicate", 1], "seconds")
    goodput = size_bytes / one_s / links.bytes_per_s
    section.notes.append(f"one transfer: {seconds_text(one_s)}, {goodput:.2f} of the link's rate in payload")
    section.notes.append(
        f"medians of {repeats} (star: 1); a perfect chain is 1 + (readers - 1) chunks; idle is the share of all cores' "
        "time that nobody used meanwhile"
    )
    return section


def _middle(runs: list[dict[str, object]], what: str) -> float:
    return median(float(each[what]) for each in runs)  # type: ignore[arg-type]


def _add_row(
    section: Section, count: int, found: dict[tuple[str, int], list[dict[str, object]]], chunk_share: float
) -> None:
    ours, stars = found["replicate", count], found.get(("star", count), [])
    seconds, idle = _middle(ours, "seconds"), _middle(ours, "idle_share")
    ratio = seconds / _middle(found["replicate", 1], "seconds")
    perfect = 1 + (count - 1) * chunk_share
    row = [str(count), seconds_text(seconds), f"{ratio:.2f}", f"{perfect:.2f}"]
    row += [f"{_middle(ours, 'source_copies'):.2f}", f"{idle:.0%}"]
    if stars:
        star_s = _middle(stars, "seconds")
        row += [seconds_text(star_s), f"{star_s / _middle(found['star', 1], 'seconds'):.2f}"]
        row += [f"{_middle(stars, 'idle_share'):.0%}"]
    section.rows.append(row + [""] * (9 - len(row)))
    if count > 1:
        busy = f" (only {idle:.0%} idle: the cores had a part in it)" if idle < BUSY_SHARE else ""
        chunks = f"{1 / chunk_share:.0f} chunks"
        goal = f"fan-out to {count}, {chunks}: last reader done, of one transfer"
        section.goals.append(Goal(goal, "≤ 1.1", f"{ratio:.2f}{busy}", ratio <= 1.1))
