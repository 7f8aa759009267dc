"""Memory beyond the registered tensors, and what grows over many updates."""

from .processes import Child, Server
from .section import MIB, Goal, Options, Section, size_text

LIMIT_BYTES = 64 * MIB
WARM_UPDATES = 20
GROWTH_BYTES = MIB  # 0.05 to 0.1 measured; 2.6 when each read left its objects to the garbage collector
KINDS = ("local", "tcp")
COUNTED = ("resident_bytes", "descriptors", "threads", "sockets")


def run(options: Options) -> list[Section]:
    """Peaks of fresh processes, at two sizes."""
    sizes = (4 * MIB,) if options.is_tiny else (1024 * MIB, 4096 * MIB)
    section = Section(
        "memory",
        "Peak memory of a worker beyond its registered tensors",
        ("tensors", "way", "source", "reader", "of it before the first call"),
    )
    peaks = []
    for size_bytes in sizes:
        for kind in KINDS:
            options.tell(f"memory: {size_text(size_bytes)} over {kind}")
            found = _peaks(kind, size_bytes)
            peaks.append({"size_bytes": size_bytes, "way": kind, **found})
            cells = [size_text(found["source"]), size_text(found["reader"]), size_text(found["opened"])]
            section.rows.append([size_text(size_bytes), kind, *cells])
            worst = max(found["source"], found["reader"])
            what = f"peak beyond the tensors, {size_text(size_bytes)} over {kind}"
            section.goals.append(Goal(what, f"≤ {size_text(LIMIT_BYTES)}", size_text(worst), worst <= LIMIT_BYTES))
    section.figures = {"peaks": peaks}
    section.notes.append("VmHWM against VmRSS just before open(), so that interpreter and numpy do not count")
    return [section]


def _peaks(kind: str, size_bytes: int) -> dict[str, int]:
    with Server() as server, Child("source") as source, Child("reader") as reader:
        for child, seed in ((source, 3), (reader, 0)):
            child.wait_started()
            child.do("allocate", size_bytes=size_bytes, seed=seed)
            child.do("digest")
            child.do("reset_peak")
        before = {child: child.do("usage")["resident_bytes"] for child in (source, reader)}
        for child, replica in ((source, "source"), (reader, "reader")):
            child.do("open", server=server.address, model="m", replica=replica, transports=kind)
        opened = reader.do("usage")["peak_bytes"] - before[reader]
        source.do("call", verb="publish", version=1)
        reader.do("call", verb="replicate", spec=1, timeout=100)
        found = {name: child.do("usage")["peak_bytes"] - before[child] for name, child in _named(source, reader)}
        return {**found, "opened": opened}


def _named(source: Child, reader: Child) -> tuple[tuple[str, Child], ...]:
    return (("source", source), ("reader", reader))


def run_growth(options: Options) -> list[Section]:
    """Successive updates of one pair: what is there after twenty, and after the last."""
    updates = max(2 * WARM_UPDATES, options.updates) if not options.is_tiny else 30
    section = Section(
        "growth",
        f"{updates} successive updates of {size_text(16 * MIB)}: growth after the first {WARM_UPDATES}",
        ("way", "worker", "memory", "descriptors", "threads", "sockets", "time of an update"),
    )
    figures = []
    for kind in KINDS:
        options.tell(f"growth: {updates} updates over {kind}")
        found = _growth(kind, updates, (1 if options.is_tiny else 16) * MIB)
        figures.append({"way": kind, "updates": updates, **found})
        for name in ("source", "reader"):
            grown = found[name]
            cells = [f"{grown['resident_bytes'] / MIB:+.2f} MiB", *(f"{grown[each]:+d}" for each in COUNTED[1:])]
            section.rows.append([kind, name, *cells, f"{found['update_s'] * 1000:.1f} ms"])
            is_met = grown["resident_bytes"] <= GROWTH_BYTES and all(grown[each] <= 0 for each in COUNTED[1:])
            goal = f"nothing grows over {updates} updates, {name} over {kind}"
            section.goals.append(Goal(goal, "no", ", ".join(cells), is_met))
    section.figures = {"growth": figures}
    section.notes.append("time of an update: unpublish, change, publish, update(), one after the other, median")
    return [section]


def _growth(kind: str, updates: int, size_bytes: int) -> dict[str, object]:
    with Server() as server, Child("source") as source, Child("reader") as reader:
        for child, seed in ((source, 3), (reader, 0)):
            child.wait_started()
            child.do("allocate", size_bytes=size_bytes, seed=seed)
            child.do("open", server=server.address, model="m", replica=child.name, transports=kind)
        source.do("call", verb="publish", version=1)
        reader.do("call", verb="replicate", timeout=60)
        warm: dict[str, dict[str, int]] = {}
        times = []
        for version in range(2, updates + 2):
            took = [source.do("call", verb="unpublish")]
            source.do("change", seed=version)
            took += [source.do("call", verb="publish", version=version)]
            took += [reader.do("call", verb="update", timeout=60)]
            times.append(sum(each["seconds"] for each in took))
            if version == WARM_UPDATES + 1:
                warm = {name: child.do("usage") for name, child in _named(source, reader)}
        if source.do("digest") != reader.do("digest"):
            raise RuntimeError("the bytes that came are not those that were published")
        end = {name: child.do("usage") for name, child in _named(source, reader)}
        grown = {name: {each: end[name][each] - warm[name][each] for each in COUNTED} for name in warm}
        return {**grown, "update_s": sorted(times)[len(times) // 2]}
