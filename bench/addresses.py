"""One reader and one source that have several networks in common, each a link of its own.

source  ── rate ── switch ── rate ──  reader
        ── rate ── switch ── rate ──
"""

from statistics import median

from bench.lab.network import Network, Place

from .links import NoLinks, on_links
from .machine import Idle
from .processes import Child, Failed
from .section import GIB, Options, Section, closing_all, seconds_text, size_text

COUNTS = (1, 2, 4)
MAX_REPEATS = 3


def run(options: Options) -> list[Section]:
    """The part."""
    return on_links(Section("addresses", "Several addresses of a host, side by side"), options, _measured)


class Pair:
    """Two namespaces with `most` links between them."""

    def __init__(self, network: Network, most: int, rate_mbit: int) -> None:
        for at in range(most):
            network.add_site(f"network-{at}")
        self._places = [network.add(name, "network-0", rate_mbit=rate_mbit) for name in ("source", "reader")]
        self._hosts = [[place.address] for place in self._places]
        for at in range(1, most):
            for place, hosts in zip(self._places, self._hosts, strict=True):
                hosts.append(network.add_link(place, f"network-{at}", rate_mbit=rate_mbit))

    def ends(self, count: int) -> list[tuple[Place, str]]:
        """Source and reader: where each is, and what it has as `host` to use so many of the links."""
        return [(place, ",".join(hosts[:count])) for place, hosts in zip(self._places, self._hosts, strict=True)]


def _measured(options: Options, section: Section) -> Section:
    counts = COUNTS[:2] if options.is_tiny else COUNTS
    repeats = min(options.rounds, MAX_REPEATS)
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    try:
        with Network() as network:
            pair = Pair(network, counts[-1], options.rate_mbit)
            for number in range(repeats):
                for count in counts if number % 2 == 0 else counts[::-1]:
                    options.tell(f"addresses, round {number + 1} of {repeats}: {count}")
                    found[count].append(_read(pair, count, options.link_bytes))
    except NoLinks as error:
        section.skipped = str(error)
        return section
    size_bytes, rate_mbit = options.link_bytes, options.rate_mbit
    section.title = (
        f"Several addresses of a host, side by side: {size_text(size_bytes)} to one reader, each network a link of "
        f"{rate_mbit} Mbit/s"
    )
    section.columns = ("addresses", "time", "GiB/s", "of one address", "of the links in payload", "idle")
    one_s = median(each["seconds"] for each in found[1])
    for count in counts:
        took_s = median(each["seconds"] for each in found[count])
        wire_s = size_bytes / (count * rate_mbit * 1e6 / 8)
        idle = median(each["idle_share"] for each in found[count])
        row = [str(count), seconds_text(took_s), f"{size_bytes / took_s / GIB:.3f}"]
        section.rows.append([*row, f"{one_s / took_s:.2f}", f"{wire_s / took_s:.2f}", f"{idle:.0%}"])
    section.figures = {
        "size_bytes": size_bytes,
        "rate_mbit": rate_mbit,
        "runs": [{"addresses": count, "runs": runs} for count, runs in found.items()],
    }
    section.notes.append(f"medians of {repeats}; a new pair of processes each time; idle is the share of all cores")
    return section


def _read(pair: Pair, count: int, size_bytes: int) -> dict[str, float]:
    began: list[object] = []
    with closing_all(began):
        children, hosts = [], []
        for name, (place, host) in zip(("source", "reader"), pair.ends(count), strict=True):
            child = Child(name, wrapper=place.wrapper)
            began.append(child)
            children.append(child)
            hosts.append(host)
        source, reader = (child.wait_started() for child in children)
        source.do("allocate", size_bytes=size_bytes, seed=3)
        reader.do("allocate", size_bytes=size_bytes)
        found = source.do("export", kinds=["tcp"], host=hosts[0])
        idle = Idle()
        asked = {"kind": "tcp", "endpoint": found["endpoints"]["tcp"], "root": found["root"], "host": hosts[1]}
        took = reader.do("read_transport", **asked)
        share = idle.share()
        if reader.do("digest") != source.do("digest"):
            raise Failed("the bytes that came are not those that were sent")
    return {"seconds": took["seconds"], "idle_share": share}
