"""A read across that loses one of its sources: what it costs in bytes and in time, while the other source goes on.

The publisher has two shards, each half of the rows, and so has a replica that was filled from it. A reader with whole
tensors reads one half from each of two processes. One of them gets SIGKILL (its host lives on and says so); what that
had not brought comes from the one that has the same half.
"""

import signal
from contextlib import ExitStack
from statistics import median

from .links import Links, on_links
from .processes import Child, Failed, Server
from .section import Goal, Options, Section, seconds_text, size_text

SHARES = (0.1, 0.5, 0.9)
HALVES = 2
ROW_BYTES = 4096
CHUNK_BYTES = 4 << 20


def run(options: Options) -> list[Section]:
    """The part."""
    return on_links(Section("faults_across", "A source of a read across that is killed"), options, _measured)


def _measured(options: Options, section: Section) -> Section:
    size_bytes = max(options.link_bytes, 6 * CHUNK_BYTES)
    repeats = 1 if options.is_tiny else min(options.rounds, 3)
    shares: tuple[float | None, ...] = (None, *(SHARES[1:2] if options.is_tiny else SHARES))
    runs: dict[float | None, list[dict[str, float]]] = {share: [] for share in shares}
    with Links(2 * HALVES + 1, options.rate_mbit) as links:
        for share in shares:
            for _ in range(repeats):
                options.tell("across: undisturbed" if share is None else f"across: one source killed at {share:.0%}")
                runs[share].append(_one(links, size_bytes, share))
    undisturbed = runs.pop(None)
    base_s = median(each["seconds"] for each in undisturbed)
    base_bytes = median(each["arrived_bytes"] for each in undisturbed)
    section.title = (
        f"One of two sources of a read across killed, {size_text(size_bytes)} over {options.rate_mbit} Mbit/s "
        f"(undisturbed: {seconds_text(base_s)})"
    )
    section.columns = ("source killed at", "bytes beyond the undisturbed", "of a chunk", "time beyond")
    for share, found in runs.items():
        extra = median(each["arrived_bytes"] for each in found) - base_bytes
        late_s = median(each["seconds"] for each in found) - base_s
        text = f"{share:.0%}"
        section.rows.append(
            [text, size_text(max(0.0, extra)), f"{extra / CHUNK_BYTES:.2f}", f"{late_s * 1000:+.0f} ms"]
        )
        what, wanted = f"a source of two killed at {text}: extra bytes", f"≤ {size_text(CHUNK_BYTES)}"
        section.goals.append(Goal(what, wanted, size_text(max(0.0, extra)), extra <= CHUNK_BYTES))
    section.figures = {
        "undisturbed": undisturbed,
        "runs": [{"share": share, "runs": found} for share, found in runs.items()],
    }
    section.notes.append(
        "bytes are those that came over the reader's link, headers and all, against the undisturbed run; "
        f"a piece that is sent again is at most a chunk of {size_text(CHUNK_BYTES)}"
    )
    return section


def _one(links: Links, size_bytes: int, share: float | None) -> dict[str, float]:
    """One life of everybody."""
    with ExitStack() as stack:
        server = Server(links.server_address, wrapper=links.server_wrapper)
        stack.callback(server.kill)
        children = []
        for index in range(2 * HALVES + 1):
            child = Child(f"worker-{index}", wrapper=links.wrapper(index))
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            child.wait_started()
        trainers, copies, reader = children[:HALVES], children[HALVES : 2 * HALVES], children[-1]
        rows = size_bytes // ROW_BYTES // HALVES * HALVES
        half = rows // HALVES
        for replica, group in (("trainer", trainers), ("copy", copies)):
            for shard, child in enumerate(group):
                child.do("allocate", size_bytes=half * ROW_BYTES, seed=shard + 3 if group is trainers else 0)
                _open(server, child, replica, shard=shard, shards=HALVES, rows=(rows, shard * half, half))
        reader.do("allocate", size_bytes=rows * ROW_BYTES)
        _open(server, reader, "reader", shard=0, shards=1, rows=(rows, 0, rows))
        for group, call in ((trainers, {"verb": "publish", "version": 1}), (copies, {"verb": "replicate", "spec": 1})):
            for pending in [child.ask("call", timeout=100, **call) for child in group]:
                pending.result()
        right = [child.do("digest") for child in trainers]
        found = _read(reader, [trainers[0], copies[0]], rows * ROW_BYTES, share)
        for shard, digest in enumerate(right):
            at = shard * half * ROW_BYTES
            if reader.do("digest", start=at, stop=at + half * ROW_BYTES) != digest:
                raise Failed("the bytes that came are not those that were published")
        return found


def _open(server: Server, child: Child, replica: str, *, shard: int, shards: int, rows: tuple[int, int, int]) -> None:
    """`rows`: of all, the first of its own, and how many it has."""
    everything, start, count = rows
    box = {"name": "w", "global_shape": [everything, ROW_BYTES], "at": [start, 0], "size": [count, ROW_BYTES]}
    options = {"server": server.address, "model": "m", "replica": replica, "shard": shard, "shards": shards}
    child.do("open", transports="tcp", chunk_bytes=CHUNK_BYTES, boxes={"w": [box]}, **options)


def _read(reader: Child, firsts: list[Child], size_bytes: int, share: float | None) -> dict[str, float]:
    """`firsts` have the first half. At that share the one of them that sends it is killed."""
    sent = [_sent(child) for child in firsts]
    before = reader.do("arrived_bytes")
    following = reader.ask("follow", timeout=60)
    if share is not None:
        reader.do("await_received", size_bytes=int(share * size_bytes))
        sending = [child for child, sent_before in zip(firsts, sent, strict=True) if _sent(child) > sent_before]
        if len(sending) != 1:
            raise Failed(f"{len(sending)} processes have sent of the first half, and not one")
        sending[0].signal(signal.SIGKILL)
    found = following.result()
    return {"seconds": found["seconds"], "arrived_bytes": float(reader.do("arrived_bytes") - before)}


def _sent(child: Child) -> int:
    return int(child.do("look")["statistics"]["sent_bytes"])
