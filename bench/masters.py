"""What a step waits for at a trainer whose version is being read: tensors in place, and masters that are cast.

One reader, on a link, has a third of the version when the trainer takes it back. It reads on from the trainer's host
copy of it, which is what a cast has for a second buffer. Or it is stopped then, and goes on after the step.
"""

import signal
from statistics import median

from .links import Links, on_links
from .processes import Child, Failed, Process, Server
from .section import Options, Section, closing_all, seconds_text, size_text

WAYS = {"in place": "bfloat16", "masters": "float32"}  # what the trainer registers
READERS = ("none", "reads", "stopped")
SHARE = 0.3
MIN_BYTES = 24 << 20  # less, and the reader has all before anybody sees that it has a third
PATIENCE_S = 60


def run(options: Options) -> list[Section]:
    """The part."""
    return on_links(Section("masters", "A step of masters that are cast"), options, _measured)


def _measured(options: Options, section: Section) -> Section:
    size_bytes = max(options.link_bytes, MIN_BYTES)
    rounds = 1 if options.is_tiny else options.rounds
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with Links(2, options.rate_mbit) as links:
        for way in WAYS:
            options.tell(f"masters: {way}")
            began: list[Process] = []
            with closing_all(began):
                for reads, steps in _life(links, began, way, size_bytes, rounds).items():
                    found[way, reads] = steps
    link_s = size_bytes / links.bytes_per_s
    section.title = (
        f"A step while the version before is read: {size_text(size_bytes)} in bfloat16 to one reader on a link of "
        f"{options.rate_mbit} Mbit/s (the wire alone: {seconds_text(link_s)})"
    )
    section.columns = ("tensors", "reader", "unpublish", "publish", "both", "beyond no reader", "of the whole read")
    for (way, reads), steps in found.items():
        both_s = _both(steps)
        beyond_s = both_s - _both(found[way, "none"])
        row = [way, reads, *(seconds_text(median(each[verb] for each in steps)) for verb in ("unpublish", "publish"))]
        section.rows.append([*row, seconds_text(both_s), f"{beyond_s * 1000:+.0f} ms", f"{beyond_s / link_s:.2f}"])
    section.figures = {
        "size_bytes": size_bytes,
        "rate_mbit": options.rate_mbit,
        "runs": [{"way": way, "reader": reads, "steps": steps} for (way, reads), steps in found.items()],
    }
    section.notes.append(
        f"medians of {rounds}, after one step that is not counted; the reader has {SHARE:.0%} when the trainer takes "
        "the version back, and gets all of it"
    )
    return section


def _both(steps: list[dict[str, float]]) -> float:
    return median(each["unpublish"] + each["publish"] for each in steps)


def _life(
    links: Links, began: list[Process], way: str, size_bytes: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """All steps of one trainer."""
    server = Server(links.server_address, wrapper=links.server_wrapper)
    began.append(server)
    trainer, reader = (Child(name, wrapper=links.wrapper(at)) for at, name in enumerate(("trainer", "reader")))
    began += [trainer, reader]
    elements = size_bytes // 2
    for child, dtype in ((trainer, WAYS[way]), (reader, "bfloat16")):
        child.wait_started()
        child.do("allocate_numbers", elements=elements, dtype=dtype)
        told = {"server": server.address, "model": "m", "replica": child.name, "transports": "tcp"}
        child.do("open", dtype="bfloat16", **told)
    trainer.do("write_numbers", factor=1)
    trainer.do("call", verb="publish", version=1)
    version = 1
    found: dict[str, list[dict[str, float]]] = {}
    for reads in READERS:
        for number in range(rounds + 1):
            step = _step(trainer, reader, version, reads)
            version += 1
            if number:
                found.setdefault(reads, []).append(step)
    return found


def _step(trainer: Child, reader: Child, version: int, reads: str) -> dict[str, float]:
    """The trainer takes this version back, changes its tensors, and publishes the next one."""
    reading = reader.ask("call", verb="replicate", spec=version, timeout=PATIENCE_S) if reads != "none" else None
    if reading is not None:
        reader.do("await_progress", share=SHARE)
        if reads == "stopped":
            reader.signal(signal.SIGSTOP)
    try:
        before = trainer.do("digest_in", dtype="bfloat16")
        took = {"unpublish": trainer.do("call", verb="unpublish", timeout=PATIENCE_S)["seconds"]}
        trainer.do("write_numbers", factor=version + 1)
        took["publish"] = trainer.do("call", verb="publish", version=version + 1, timeout=PATIENCE_S)["seconds"]
    finally:
        reader.signal(signal.SIGCONT)
    if reading is not None:
        reading.result()
        if reader.do("digest") != before:
            raise Failed(f"the bytes of version {version} are not those that were published")
    return took
