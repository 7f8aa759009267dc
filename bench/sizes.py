"""From 1 MiB to several GiB, and one tensor beside ten thousand small ones of the same bytes."""

from statistics import median

from .machine import available_bytes
from .one_reader import Move, Pair, contestants, measure
from .section import MIB, Goal, Options, Samples, Section, seconds_text, size_text

CHOSEN = (
    "process_vm_readv, 2 threads",
    "raw sockets, 2 streams",
    "TensorHub local transport alone, verified",
    "TensorHub tcp transport alone, verified",
    "TensorHub replicate() over local, verified",
    "TensorHub replicate() over tcp, verified",
)
MANY, SMALL_BYTES = 10_000, 4096


def sizes(options: Options) -> tuple[list[int], list[str]]:
    """1 MiB, 4, 16 … as far as memory goes, and what was left out."""
    wanted = [MIB << shift for shift in range(0, 12) if shift % 2 == 0 or shift == 11]
    wanted = [size for size in wanted if size <= options.largest_bytes]
    if options.is_tiny:
        return wanted[:2], []
    fits = [size for size in wanted if 2.5 * size < available_bytes()]
    return fits, [size_text(size) for size in wanted if size not in fits]


def run(options: Options) -> list[Section]:
    """Every size with the same contestants."""
    chosen = [each for each in contestants() if each.name in CHOSEN]
    fits, left_out = sizes(options)
    found: list[Samples] = []
    rows = []
    for size_bytes in fits:
        samples = measure(options, size_bytes, chosen)
        found += samples
        rows.append([size_text(size_bytes), *(_cell(each) for each in _in_order(samples))])
    section = Section(
        "sizes",
        "Sizes, one tensor: GiB/s (time)",
        ("size", *(name.replace("TensorHub ", "").replace(", verified", "") for name in CHOSEN)),
        rows,
        {"samples": [each.figures() for each in found]},
    )
    if left_out:
        section.notes.append(f"left out because memory is short: {', '.join(left_out)}")
    section.notes.append(
        "TensorHub is verified everywhere; replicate() is the public call of a replica that just joined"
    )
    return [section]


def _in_order(samples: list[Samples]) -> list[Samples]:
    return sorted(samples, key=lambda each: CHOSEN.index(each.name))


def _cell(samples: Samples) -> str:
    if not samples.seconds:
        return f"– ({samples.error[:40]})"
    return f"{samples.rate:.2f} ({seconds_text(median(samples.seconds))})"


def run_many(options: Options) -> list[Section]:
    """Ten thousand torch tensors of 4 KiB, each an allocation of its own, beside one tensor of the same bytes."""
    count = 200 if options.is_tiny else MANY
    size_bytes = count * SMALL_BYTES
    is_torch = not options.is_tiny  # numpy is there at once
    ways: dict[str, Move] = {}
    for kind in ("local", "tcp"):
        ways[f"{kind} transport alone"] = lambda pair, k=kind: pair.read_transport(k, "full")
        ways[f"replicate() over {kind}"] = lambda pair, k=kind: pair.replicate(k, "full")
    found = {(name, tensors): Samples(name, size_bytes, "ours") for name in ways for tensors in (1, count)}
    with Pair(size_bytes, is_torch=is_torch) as one, Pair(size_bytes, tensors=count, is_torch=is_torch) as many:
        pairs = {1: one, count: many}
        todo = list(found)
        for number in range(options.rounds + 1):
            for name, tensors in todo[:: -1 if number % 2 else 1]:
                options.tell(f"{tensors} tensors, round {number} of {options.rounds}: {name}")
                pairs[tensors].measure(found[name, tensors], ways[name], is_counted=number > 0)
    return [_compare(found, count, size_bytes)]


def run_chunks(options: Options) -> list[Section]:
    """What the size of a chunk costs one reader: the price of finer pipelines."""
    chunks = [MIB << shift for shift in (range(2) if options.is_tiny else range(5))]
    kinds = ("local", "tcp")
    size_bytes = options.size_bytes
    found = {(kind, chunk): Samples(f"{kind}, {size_text(chunk)}", size_bytes) for kind in kinds for chunk in chunks}
    with Pair(size_bytes) as pair:
        roots = {}
        for chunk in chunks:
            roots[chunk] = pair.source.do("export", kinds=list(kinds), chunk_bytes=chunk, key=f"chunks-{chunk}")["root"]
        todo = list(found)
        for number in range(options.rounds + 1):
            for kind, chunk in todo[:: -1 if number % 2 else 1]:
                options.tell(f"chunks of {size_text(chunk)}, round {number} of {options.rounds}: {kind}")
                where = {"endpoint": pair.endpoints.get(kind, ""), "root": roots[chunk], "key": f"chunks-{chunk}"}
                move = lambda p, k=kind, w=where: p.reader.do("read_transport", kind=k, **w)  # noqa: E731 - one of many moves
                pair.measure(found[kind, chunk], move, is_counted=number > 0)
    section = Section(
        "chunks",
        f"Size of a chunk, {size_text(size_bytes)}, verified, transport alone: GiB/s (CPU s/GiB of the reader)",
        ("way", *(size_text(chunk) for chunk in chunks)),
        figures={"samples": [each.figures() for each in found.values()]},
    )
    for kind in kinds:
        cells = [found[kind, chunk] for chunk in chunks]
        section.rows.append([kind, *(f"{each.rate:.2f} ({each.cpu_per_gib(each.reader_cpu_s):.2f})" for each in cells)])
    return [section]


def _compare(found: dict[tuple[str, int], Samples], count: int, size_bytes: int) -> Section:
    section = Section(
        "many_tensors",
        f"One tensor beside {count:,} of 4 KiB, {size_text(size_bytes)} in all",
        ("way", "one tensor", f"{count:,} tensors", "ratio", "CPU s/GiB, one", f"CPU s/GiB, {count:,}"),
    )
    for name in dict.fromkeys(name for name, _ in found):
        one, many = found[name, 1], found[name, count]
        if not one.seconds or not many.seconds:
            section.rows.append([name, "–", "–", "", "", one.error or many.error])
            section.goals.append(Goal(f"many tensors: {name}", "≤ 1.2", "not measured", None))
            continue
        ratio = median(many.seconds) / median(one.seconds)
        cells = [
            f"{seconds_text(median(each.seconds))} ({seconds_text(min(each.seconds))} at best)" for each in (one, many)
        ]
        cpu = [f"{each.cpu_per_gib(each.reader_cpu_s):.2f}" for each in (one, many)]
        section.rows.append([name, *cells, f"{ratio:.2f}", *cpu])
        section.goals.append(
            Goal(f"many tensors: {name}, time against one tensor", "≤ 1.2", f"{ratio:.2f}", ratio <= 1.2)
        )
    section.figures = {
        "tensors": count,
        "samples": [{**each.figures(), "tensors": tensors} for (_, tensors), each in found.items()],
    }
    return section
