"""`python -m bench`: choose parts and sizes, measure, and write table, JSON, markdown and picture."""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from . import (
    addresses,
    busy,
    control,
    decisions,
    fan_out,
    faults,
    faults_across,
    footprint,
    lateness,
    machine,
    masters,
    one_reader,
    pieces,
    plans,
    plots,
    processes,
    report,
    sizes,
    taking_back,
)
from .links import NoLinks
from .section import GIB, MIB, Options, Section

PARTS: dict[str, tuple[str, tuple[Callable[[Options], list[Section]], ...]]] = {
    "one": ("one reader on this host, beside plain programs and peers; CPU of both sides", (one_reader.run,)),
    "busy": ("one reader beside a busy Python thread: in its process, another one, the source's", (busy.run,)),
    "sizes": (
        "1 MiB to several GiB; sizes of chunks; one tensor beside 10,000",
        (sizes.run, sizes.run_chunks, sizes.run_many),
    ),
    "fanout": ("N readers on N shaped links, beside the star (root)", (fan_out.run,)),
    "addresses": ("one reader of a source with 1, 2 and 4 networks, used side by side (root)", (addresses.run,)),
    "faults": ("a source is killed at 10, 50 and 90 % (root)", (faults.run, faults_across.run)),
    "memory": ("peak beyond the tensors; growth over many updates", (footprint.run, footprint.run_growth)),
    "masters": (
        "what a step waits for while the version before is read, with and without a cast (root)",
        (masters.run,),
    ),
    "unpublish": ("what unpublish() takes beside a reader, from the first on (root)", (taking_back.run,)),
    "plans": ("from any layout to any layout: time and memory of planning, sizes of manifests", (plans.run,)),
    "pieces": ("pieces of another layout beside the same layout, rows of 256 B to 64 KiB", (pieces.run,)),
    "server": (
        "what a report, a version, a death, a restart cost the reference server as the fleet grows; its lateness",
        (control.run, decisions.run, lateness.run),
    ),
}
OUT = processes.ROOT / "out" / "bench"


def _size(text: str) -> int:
    units = {"KiB": 1024, "MiB": MIB, "GiB": GIB}
    for unit, factor in units.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    known = "; ".join(f"{name}: {text}" for name, (text, _) in PARTS.items())
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=f"Parts: {known}.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (5)")
    parser.add_argument("--size", type=_size, default=1 * GIB, help="of the model that one reader reads (1GiB)")
    parser.add_argument("--largest", type=_size, default=2 * GIB, help="of part sizes (2GiB)")
    parser.add_argument("--readers", default="1,2,4,8", help="of part fanout (1,2,4,8)")
    parser.add_argument("--rate", type=int, default=800, help="Mbit/s of each link (800)")
    parser.add_argument("--link-size", type=_size, default=512 * MIB, help="of the model on links (512MiB)")
    parser.add_argument("--updates", type=int, default=200, help="successive updates of part memory (200)")
    parser.add_argument("--fleets", default="64,512,2048,8192", help="workers of part server (64,512,2048,8192)")
    parser.add_argument("--crowds", default="100,500,2000", help="of them with real connections (100,500,2000)")
    parser.add_argument(
        "--max-cpu", type=float, default=60.0, help="of the server for one figure, in s; more is extrapolated (60)"
    )
    parser.add_argument(
        "--peers-venv", action="append", default=[], help="environment with peers' packages; repeatable"
    )
    parser.add_argument("--no-star", action="store_true", help="part fanout without the star, which takes N transfers")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: a few minutes in all")
    parser.add_argument("--selfcheck", action="store_true", help="everything once and tiny: does it still run?")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON, markdown and picture (out/bench)")
    given = parser.parse_args(arguments)
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return given


def options_of(given: argparse.Namespace) -> Options:
    """What was chosen."""
    readers, fleets, crowds = (_counts(text) for text in (given.readers, given.fleets, given.crowds))
    options = Options(
        rounds=given.rounds,
        size_bytes=given.size,
        largest_bytes=given.largest,
        readers=readers,
        rate_mbit=given.rate,
        link_bytes=given.link_size,
        peers=tuple(given.peers_venv),
        updates=given.updates,
        has_star=not given.no_star,
        fleets=fleets,
        crowds=crowds,
        max_cpu_s=given.max_cpu,
    )
    if given.quick:
        options.is_quick = True
        options.rounds, options.largest_bytes = min(3, given.rounds), min(256 * MIB, given.largest)
        options.size_bytes, options.link_bytes = min(256 * MIB, given.size), min(128 * MIB, given.link_size)
        options.fleets, options.crowds = fleets[:3], crowds[:1]
        options.max_cpu_s = min(5.0, given.max_cpu)
    if given.selfcheck:
        options = Options(
            rounds=1, is_tiny=True, size_bytes=4 * MIB, largest_bytes=4 * MIB, readers=(1, 2), link_bytes=4 * MIB
        )
    return options


def measure(console: Console, options: Options, parts: list[str]) -> tuple[list[Section], list[str]]:
    """Every part's sections, and what went wrong in parts that ended by an error."""
    sections, problems = [], []
    with console.status("") as status:
        for name in parts:
            for run in PARTS[name][1]:
                options.say = lambda text, name=name: status.update(f"{name}: {text}")
                began = time.monotonic()
                try:
                    found = run(options)
                except (processes.Failed, NoLinks, OSError, RuntimeError, TimeoutError) as error:
                    problems.append(f"{name}: {error}")
                    console.print(f"[red]{name} ended by an error:[/] ", end="")
                    console.print(str(error), markup=False)
                    continue
                found[-1].notes.append(
                    f"took {time.monotonic() - began:.0f} s; load average {machine.load_average()} after"
                )
                sections += found
                for section in found:
                    report.print_section(console, section)
    return sections, problems


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 where a part ended by an error, never for a figure."""
    given = parse(arguments)
    options = options_of(given)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told its background to ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = machine.describe()
    for line in report.header(found)[:3]:
        console.print(line, style="dim", markup=False)
    console.print(f"load average {found['load_average']}, {float(found['idle_share']):.0%} idle\n", style="dim")  # type: ignore[arg-type]
    try:
        sections, problems = measure(console, options, given.parts or list(PARTS))
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        processes.kill_all()
    found["load_average_after"] = machine.load_average()
    report.print_goals(console, [goal for section in sections for goal in section.goals])
    command = f"python -m bench {' '.join(arguments)}".strip()
    given.out.mkdir(parents=True, exist_ok=True)
    report.write_json(given.out / "bench.json", found, sections, command)
    (given.out / "bench.md").write_text(report.markdown(found, sections, command), encoding="utf-8")
    pictures = plots.draw(given.out, sections, " · ".join(report.header(found)[::2]))
    names = [given.out / "bench.json", given.out / "bench.md", *pictures]
    console.print(f"written: {', '.join(str(name) for name in names)}", style="dim", soft_wrap=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
