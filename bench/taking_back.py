"""What `unpublish` takes while a reader is in the middle of its read, from the trainer's first on.

The reader is on a link. With spot readers only the trainer is the last reliable worker, and its host copy is made while
the version rests; beside a reliable reader once it has rested for a second.
"""

from statistics import median

from .links import Links, on_links
from .processes import Child, Failed, Process, Server
from .section import Goal, Options, Section, closing_all, seconds_text, size_text

READERS = {"spot": False, "reliable": True}
SHARE = 0.5  # that the reader has then
CHUNK_BYTES = 4 << 20
MIN_BYTES = 24 << 20  # less, and the reader has all before anybody sees that it has half
STEPS, FEWEST = 40, 8
LONGEST_S = 60.0  # for all steps of one reader, if there are not too few then
MAX_TIMES = 2.0
PATIENCE_S = 60


def run(options: Options) -> list[Section]:
    """The part."""
    return on_links(Section("taking_back", "unpublish() beside a reader"), options, _measured)


def _measured(options: Options, section: Section) -> Section:
    size_bytes = max(options.link_bytes // 4, MIN_BYTES)
    with Links(2, options.rate_mbit) as links:
        fitting = int(LONGEST_S * links.bytes_per_s / size_bytes)
        steps = 2 if options.is_tiny else max(FEWEST, min(STEPS, fitting))
        chunk_s = CHUNK_BYTES / links.bytes_per_s
        found = {}
        for who, is_reliable in READERS.items():
            options.tell(f"taking back: {who} reader")
            began: list[Process] = []
            with closing_all(began):
                found[who] = _life(links, began, size_bytes, steps, is_reliable=is_reliable)
    section.title = (
        f"unpublish() beside a reader that has half of {size_text(size_bytes)}, on a link of "
        f"{options.rate_mbit} Mbit/s (a chunk takes {seconds_text(chunk_s)})"
    )
    section.columns = ("reader", "the first", "median of the others", "longest of them")
    for who, seconds in found.items():
        first, others = seconds[0], seconds[1:]
        section.rows.append([who, *(seconds_text(each) for each in (first, median(others), max(others)))])
        times = first / median(others)
        what = f"the first unpublish over a later one, {who} reader"
        section.goals.append(Goal(what, f"≤ {MAX_TIMES:g}", f"{times:.2f}", times <= MAX_TIMES))
        # Of so few the longest is the 99th percentile.
        what = f"p99 of unpublish, {who} reader"
        got = max(seconds)
        section.goals.append(Goal(what, f"≤ a chunk ({seconds_text(chunk_s)})", seconds_text(got), got <= chunk_s))
    section.figures = {"size_bytes": size_bytes, "rate_mbit": options.rate_mbit, "seconds": found}
    section.notes.append(f"{steps} steps; the reader gets all of each version, and its bytes are compared")
    return section


def _life(links: Links, began: list[Process], size_bytes: int, steps: int, *, is_reliable: bool) -> list[float]:
    """Seconds that each `unpublish` took."""
    server = Server(links.server_address, wrapper=links.server_wrapper)
    began.append(server)
    trainer, reader = (Child(name, wrapper=links.wrapper(at)) for at, name in enumerate(("trainer", "reader")))
    began += [trainer, reader]
    for child, seed, reliable in ((trainer, 3, True), (reader, 0, is_reliable)):
        child.wait_started()
        child.do("allocate", size_bytes=size_bytes, seed=seed)
        told = {"server": server.address, "model": "m", "replica": child.name, "transports": "tcp"}
        child.do("open", reliable=reliable, **told)
    took = []
    for version in range(1, steps + 1):
        trainer.do("change", seed=version)
        trainer.do("call", verb="publish", version=version, timeout=PATIENCE_S)
        before = trainer.do("digest")
        if version > 1:
            reader.do("call", verb="unpublish", timeout=PATIENCE_S)  # so that what is in place now is this version
        reading = reader.ask("call", verb="replicate", spec=version, timeout=PATIENCE_S)
        reader.do("await_progress", share=SHARE)
        took.append(trainer.do("call", verb="unpublish", timeout=PATIENCE_S)["seconds"])
        reading.result()
        if reader.do("digest") != before:
            raise Failed(f"the bytes of version {version} are not those that were published")
    return took
