"""A source killed while it is read: what it costs in bytes and in time, and how long it takes to be noticed.

The publisher and one replica hold the version; a new replica reads from one of them, which gets SIGKILL (its host lives
on and says so) or is cut from the network (nobody says anything).
"""

import signal
import time
from statistics import median

from .fan_out import LinkedWorkers
from .links import Links, on_links
from .processes import Child, Failed
from .section import Goal, Options, Section, seconds_text, size_text

SHARES = (0.1, 0.5, 0.9)
CHUNK_BYTES = 4 << 20


def run(options: Options) -> list[Section]:
    """The part."""
    return on_links(Section("faults", "A source that is killed"), options, _measured)


def _measured(options: Options, section: Section) -> Section:
    size_bytes = max(options.link_bytes, 6 * CHUNK_BYTES)  # fewer chunks, and 50 % is over before it is seen
    repeats = 1 if options.is_tiny else min(options.rounds, 3)
    with Links(3, options.rate_mbit) as links:
        undisturbed = []
        for _ in range(repeats):
            options.tell("faults: undisturbed")
            undisturbed.append(_one(links, size_bytes, None, ""))
        base_s = median(each["seconds"] for each in undisturbed)
        base_bytes = median(each["arrived_bytes"] for each in undisturbed)
        cases = [(share, "killed") for share in (SHARES[1:2] if options.is_tiny else SHARES)]
        if not options.is_tiny:
            cases.append((0.5, "stopped"))
        runs: dict[tuple[float, str], list[dict[str, float]]] = {}
        for share, how in cases:
            for _ in range(repeats if how == "killed" else 1):
                options.tell(f"faults: source {how} at {share:.0%}")
                one = _one(links, size_bytes, share, how)
                one["extra_bytes"] = one["arrived_bytes"] - base_bytes
                runs.setdefault((share, how), []).append(one)
    section.title = (
        f"A source lost in mid-transfer, {size_text(size_bytes)} over {options.rate_mbit} Mbit/s "
        f"(undisturbed: {seconds_text(base_s)})"
    )
    section.columns = ("source", "bytes beyond the model", "of a chunk", "time beyond", "until a chunk of another came")
    chunk_s = CHUNK_BYTES / (options.rate_mbit * 1e6 / 8)
    for (share, how), each in runs.items():
        _add_row(section, f"{how} at {share:.0%}", how, each, base_s, chunk_s)
    section.figures = {
        "undisturbed": undisturbed,
        "runs": [{"share": share, "how": how, "runs": each} for (share, how), each in runs.items()],
    }
    section.notes.append(
        "bytes are those that came over the reader's link, headers and all, against the undisturbed run"
    )
    section.notes.append(f"a chunk is {size_text(CHUNK_BYTES)} and takes {seconds_text(chunk_s)} on this link")
    return section


def _add_row(
    section: Section, text: str, how: str, runs: list[dict[str, float]], base_s: float, chunk_s: float
) -> None:
    extra = median(each["extra_bytes"] for each in runs)
    late_s = median(each["seconds"] for each in runs) - base_s
    found_s = median(each["switched_s"] for each in runs)
    section.rows.append(
        [
            text,
            size_text(max(0.0, extra)),
            f"{extra / CHUNK_BYTES:.2f}",
            f"{late_s * 1000:+.0f} ms",
            seconds_text(found_s),
        ]
    )
    if how == "killed":
        met = extra <= CHUNK_BYTES
        goal = Goal(f"source {text}: extra bytes", f"≤ {size_text(CHUNK_BYTES)}", size_text(max(0.0, extra)), met)
        section.goals.append(goal)
        # what is seen as "another's bytes came" includes half a chunk of the new read at most: allow the chunk once
        limit_s = found_s + chunk_s
        is_met = late_s <= limit_s
        wanted = f"≤ detection + one chunk ({seconds_text(limit_s)})"
        section.goals.append(Goal(f"source {text}: extra time", wanted, f"{late_s * 1000:+.0f} ms", is_met))


def _one(links: Links, size_bytes: int, share: float | None, how: str) -> dict[str, float]:
    """One life of everybody: the second holder fills itself, then the reader reads and loses its source."""
    with LinkedWorkers(links, size_bytes, 2, chunk_bytes=CHUNK_BYTES) as lab:
        holder, reader = lab.readers
        lab.open(holder, "holder")
        holder.do("call", verb="replicate", spec=1, timeout=100)
        lab.open(reader, "reader")
        before = reader.do("arrived_bytes")
        following = reader.ask("follow", timeout=60)
        lost_at, lost = 0.0, ""
        if share is not None:
            reader.do("await_progress", share=share)
            first = next(iter(reader.do("look")["statistics"]["bytes_by_source"]))
            victim = {"source": lab.source, "holder": holder}[first]
            lost_at, lost = _lose(victim, how), first
        try:
            found = following.result()
        finally:
            for child in (lab.source, holder):
                child.signal(signal.SIGCONT)
        if reader.do("digest") != lab.right:
            raise Failed("the bytes that came are not those that were published")
        arrived = reader.do("arrived_bytes") - before
        others = [when for when, source, _ in found["samples"] if source != lost]
        switched = min(others, default=lost_at) - lost_at if lost else 0.0
        return {"seconds": found["seconds"], "arrived_bytes": float(arrived), "switched_s": switched}


def _lose(victim: Child, how: str) -> float:
    """Kill or stop it. Returns when."""
    victim.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    return time.monotonic()
