"""Who reads from whom when a whole fleet updates: the real machines over a model of links.

Inside a site a read moves a chunk in each step. What leaves a site shares that site's one uplink, which takes `SLOW`
steps for a chunk.
"""

from collections import Counter

from tensorhub.core.manifest import Layout, TensorSpec
from tensorhub.core.messages import PROTOCOL, Hello
from tensorhub.core.names import worker_id
from tensorhub.core.settings import Settings

from .player import CHUNKS
from .stage import Stage
from .words import name_of

SLOW = 20
STEP_S = 0.05
LAYOUT = Layout((TensorSpec("w", "float32", (CHUNKS,), (1,), 0, CHUNKS),), CHUNKS)


class Fleet:
    """`sites` datacenters with so many workers in each; the trainer is in the first."""

    def __init__(self, sites: int, workers: int) -> None:
        self.stage = Stage(Settings(default_retain=0))
        self.left: Counter[str] = Counter()  # chunks that have left each site
        self.credit: dict[str, float] = {}
        with self.stage.quietly():
            self.stage.start_server(fresh=True)
            for site in range(sites):
                for index in range(workers):
                    self.start("trainer" if not site and not index else f"{site}-{index}", f"site-{site}")
        self.call("trainer", "publish", 1)
        self.update()

    def start(self, replica: str, site: str) -> None:
        me = worker_id("policy", replica, 0)
        where = {"site": site, "host": replica, "endpoints": (f"link://{replica}",), "prefetch": "never"}
        self.stage.start_worker(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, replica, **where), LAYOUT)
        self.stage.pump()

    def call(self, name: str, verb: str, spec: int | str) -> None:
        with self.stage.quietly():
            self.stage.players[f"{name}/0"].call(verb, spec, 1e6, f"v{spec}")
            self.stage.pump()

    def publish(self, version: int) -> None:
        self.left.clear()
        self.call("trainer", "unpublish", "")
        self.call("trainer", "publish", version)

    def update(self, *sites: int) -> float:
        """Everybody in these sites (none: in all) but the trainer updates. Returns how many steps the last one took."""
        for name, player in self.stage.players.items():
            if player.me.replica != "trainer" and int(player.hello.site.removeprefix("site-")) in (sites or range(99)):
                self.call(name.partition("/")[0], "update", "latest")
        for steps in range(100_000):
            if not any(player.worker.call for player in self.stage.players.values()):
                return steps
            with self.stage.quietly():
                self.step()
        raise AssertionError("an update without an end")

    def step(self) -> None:
        """Every open read that its source can serve moves on."""
        stage = self.stage
        reads = []
        for player in stage.players.values():
            source = stage.players[name_of(player.grant.source)] if player.grant is not None else None
            if source is not None and len(source.source_of(player.grant)) > player.done:
                reads.append((player, source))
        far = Counter(source.hello.site for player, source in reads if source.hello.site != player.hello.site)
        near = Counter(source.name for player, source in reads if source.hello.site == player.hello.site)
        for player, source in reads:
            is_far = source.hello.site != player.hello.site
            share = 1 / far[source.hello.site] / SLOW if is_far else 1 / near[source.name]
            credit = self.credit.get(player.name, 0.0) + share
            if credit > 1 - 1e-9:
                credit = 0.0
                self.left[source.hello.site] += is_far
                player.read_chunk()
            self.credit[player.name] = credit
        stage.pump()
        stage.advance(STEP_S)

    def copies(self) -> list[float]:
        """How many copies have left each site."""
        sites = dict.fromkeys(player.hello.site for player in self.stage.players.values())
        return [self.left[site] / CHUNKS for site in sites]


def test_one_copy_leaves_each_site_when_all_of_them_want_it_together() -> None:
    fleet = Fleet(sites=8, workers=4)
    fleet.publish(2)
    steps = fleet.update()
    assert all(player.worker.held == 2 for player in fleet.stage.players.values())
    assert fleet.copies() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert steps <= 3 * CHUNKS * SLOW  # the best chain takes 2.5: 4 chunks and 6 more hops, each of one chunk's time


def test_one_copy_leaves_a_site_in_which_everybody_has_it() -> None:
    fleet = Fleet(sites=8, workers=4)
    fleet.publish(2)
    fleet.update(0)
    steps = fleet.update()
    assert fleet.copies() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert steps <= 3 * CHUNKS * SLOW
