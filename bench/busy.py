"""One reader beside a busy interpreter: a thread that counts in Python, in its process, in another, in the source's.

A trainer and an engine are Python programs that run Python, so this is what a prefetch meets. Each way is measured by
the native mover and by Python, in turn, and so is what the counting thread loses.

All processes share one session, because Linux divides the cores among sessions first: or else a thread would get less
for no other reason than that its process has more of them.
"""

import random
from statistics import median

from .one_reader import Pair
from .processes import Child, Failed
from .section import GIB, Goal, Options, Section, size_text

KINDS = ("tcp", "local")
WAYS = {"native": {}, "Python": {"TENSORHUB_NATIVE": "no"}}
WHERE = ("idle", "reader", "other", "source")
TITLES = {"idle": "idle", "reader": "reader's process", "other": "another process", "source": "source's process"}
LEAST, MIN_KEPT = 0.9, 0.95

Key = tuple[str, str, str]


class Measured:
    """Rates of transfers, and of the counting beside them."""

    def __init__(self) -> None:
        self.rates: dict[Key, list[float]] = {}
        self.laps: dict[Key, list[float]] = {}

    def rate(self, kind: str, way: str, where: str) -> float:
        return median(self.rates[kind, way, where])

    def kept(self, kind: str, way: str, where: str) -> float:
        """Of the counting beside a transfer of other processes."""
        beside = median(self.laps[kind, way, "other"])
        return median(self.laps[kind, way, where]) / beside if beside else 0.0


def _transfer(pair: Pair, other: Child, key: Key, found: Measured, size_bytes: int, *, is_counted: bool) -> None:
    kind, _, where = key
    counting = {"reader": pair.reader, "other": other, "source": pair.source}.get(where)
    pair.reader.do("clear")
    if counting is not None:
        counting.do("busy", is_on=True)
    try:
        timed = pair.read_transport(kind, "full")
        if counting is not None:
            laps = counting.do("laps_per_s", began=timed["began"], ended=timed["ended"])
    finally:
        if counting is not None:
            counting.do("busy", is_on=False)
    if pair.reader.do("digest") != pair.right:
        raise Failed("the bytes that came are not those that were sent")
    if is_counted:
        found.rates.setdefault(key, []).append(size_bytes / timed["seconds"] / GIB)
        if counting is not None:
            found.laps.setdefault(key, []).append(laps)


def measure(options: Options) -> Measured:
    """Rounds in changing order; the first is not counted."""
    found, size_bytes = Measured(), options.size_bytes
    with (
        Pair(size_bytes, env=WAYS["native"], is_session=False) as native,
        Pair(size_bytes, env=WAYS["Python"], is_session=False) as python,
    ):
        pairs = {"native": native, "Python": python}
        other = Child("other", is_session=False)
        try:
            other.wait_started()
            for number in range(options.rounds + 1):
                order = [(kind, way, where) for kind in KINDS for way in WAYS for where in WHERE]
                random.Random(number).shuffle(order)
                for key in order:
                    options.tell(f"{size_text(size_bytes)}, round {number} of {options.rounds}: {' '.join(key)}")
                    _transfer(pairs[key[1]], other, key, found, size_bytes, is_counted=number > 0)
        finally:
            other.kill()
    return found


def run(options: Options) -> list[Section]:
    """The part."""
    found = measure(options)
    section = Section(
        "busy",
        f"Beside a thread that counts in Python, {size_text(options.size_bytes)}, verified, GiB/s",
        ("way", *(TITLES[where] for where in WHERE), "counting keeps: reader's", "source's"),
    )
    for kind in KINDS:
        for way in WAYS:
            rates = [f"{found.rate(kind, way, where):.2f}" for where in WHERE]
            kept = [f"{found.kept(kind, way, where):.2f}" for where in ("reader", "source")]
            section.rows.append([f"{kind}, {way}", *rates, *kept])
    section.figures = {
        "size_bytes": options.size_bytes,
        "gib_per_s": {" ".join(key): [round(rate, 3) for rate in rates] for key, rates in found.rates.items()},
        "laps_per_s": {" ".join(key): [round(laps, 1) for laps in all_laps] for key, all_laps in found.laps.items()},
    }
    for kind in KINDS:
        for where in ("reader", "source"):
            share = found.rate(kind, "native", where) / found.rate(kind, "native", "other")
            what = f"busy thread in the {where}'s process: {kind}, native, of the same beside a busy process"
            section.goals.append(Goal(what, f"≥ {LEAST}", f"{share:.2f}", share >= LEAST))
            kept = found.kept(kind, "native", where)
            what = f"counting in the {where}'s process: {kind}, native, of the same beside transfers of others"
            section.goals.append(Goal(what, f"≥ {MIN_KEPT}", f"{kept:.2f}", kept >= MIN_KEPT))
    section.notes.append("counting keeps: of what it does in another process beside the same transfer")
    return [section]
