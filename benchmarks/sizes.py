"""From 1 MiB to several GiB, and one tensor beside ten thousand small ones of the same bytes."""

from statistics import median

from .machine import available_bytes
from .one_reader import Contestant, Pair, contestants, measure
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
        section.notes.append(f"left out for want of memory: {', '.join(left_out)}")
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
    """Ten thousand tensors of 4 KiB, each an allocation of its own, beside one tensor of the same bytes."""
    count = 200 if options.is_tiny else MANY
    size_bytes = count * SMALL_BYTES
    ways = [("local", "full"), ("tcp", "full")]
    found: dict[tuple[str, int], Samples] = {}
    with Pair(size_bytes) as one, Pair(size_bytes, tensors=count) as many:
        pairs = {1: one, count: many}
        todo = []
        for kind, verify in ways:
            for tensors, pair in pairs.items():
                name = f"replicate() over {kind}"
                found[name, tensors] = Samples(name, size_bytes, "ours")
                move = lambda p, k=kind, v=verify: p.replicate(k, v)  # noqa: E731 - one of many moves
                todo.append((name, tensors, pair, Contestant(name, "ours", move)))
        for number in range(options.rounds + 1):
            for name, tensors, pair, contestant in todo[:: -1 if number % 2 else 1]:
                options.tell(f"{tensors} tensors, round {number} of {options.rounds}: {name}")
                pair.measure(found[name, tensors], contestant.move, is_counted=number > 0)
    return [_compare(found, count, size_bytes)]


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
