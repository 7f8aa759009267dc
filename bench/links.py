"""A laboratory of links: network namespaces, each behind a shaped link of its own, joined by an unlimited switch.

    worker 0 ── rate ──┐
    worker 1 ── rate ──┤ bridge, in a namespace of its own ├── server (unlimited)
    worker 2 ── rate ──┘

`bench.lab.network` makes and removes them; this is its plainest case.
"""

from collections.abc import Callable

from bench.lab.network import Network, NoLinks, Place, why_not

from .section import Options, Section

__all__ = ["Links", "NoLinks", "on_links", "why_not"]

SITE = "lab"


class Links:
    """`workers` namespaces on links of `rate_mbit`, and one for the server. Removed at the end of the block."""

    def __init__(self, workers: int, rate_mbit: int) -> None:
        self.workers = workers
        self.rate_mbit = rate_mbit
        self._network = Network()
        self._places: list[Place] = []

    @property
    def bytes_per_s(self) -> float:
        return self.rate_mbit * 1e6 / 8

    def wrapper(self, index: int) -> list[str]:
        """What goes before a command, so that it runs at worker `index`."""
        return self._places[index].wrapper

    @property
    def server_wrapper(self) -> list[str]:
        return self._places[-1].wrapper

    def address(self, index: int) -> str:
        return self._places[index].address

    @property
    def server_address(self) -> str:
        return self._places[-1].address

    def __enter__(self) -> "Links":
        self._network.__enter__()
        try:
            self._network.add_site(SITE)
            self._places = [self._network.add(str(i), SITE, rate_mbit=self.rate_mbit) for i in range(self.workers)]
            self._places.append(self._network.add("srv", SITE, rate_mbit=None))
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Idempotent; links go with their namespaces."""
        self._network.remove()


def on_links(section: Section, options: Options, measure: Callable[[Options, Section], Section]) -> list[Section]:
    """The part, or why it was skipped: links want root, and what the kernel has to have."""
    problem = why_not()
    if problem is None:
        try:
            return [measure(options, section)]
        except NoLinks as error:
            problem = str(error)
    section.skipped = problem
    return [section]
