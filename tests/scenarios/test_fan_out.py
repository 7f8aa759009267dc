"""Who reads from whom when a whole fleet updates: the real machines over a model of links.

Inside a site a read moves at the rate of the slower of its two ends; what a source sends it shares fairly among its
readers. What leaves a site shares that site's one uplink, which is `FAR` times slower.
"""

from collections import Counter
from random import Random

import pytest

from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import PROTOCOL, Hello
from tensorhub.protocol.names import worker_id
from tensorhub.protocol.settings import Settings
from tensorhub.worker.events import ReadMeasured

from . import player as players
from .player import Player
from .stage import Stage
from .words import name_of

FAR = 20
CHUNK_BYTES = 1 << 20


class Fleet:
    """`sites` datacenters with so many workers in each; the trainer is in the first. All hold version 1."""

    def __init__(self, sites: int, workers: int, *, chunk_s: float = 0.05, step_s: float = 0.05) -> None:
        self.stage = Stage(Settings(default_retain=0, keep_established=False))
        self.chunk_s, self.step_s = chunk_s, step_s
        self.left: Counter[str] = Counter()  # chunks that have left each site
        self.credit: dict[int, float] = {}  # of the chunk under way, by ticket
        self.arrived: Counter[int] = Counter()  # chunks, by ticket
        self.sending: dict[str, float] = {}  # of the usual rate, by worker; 1.0 where none is named
        self.receiving: dict[str, float] = {}
        size = players.CHUNKS * CHUNK_BYTES
        self.layout = Layout((TensorSpec("w", "uint8", (size,), (1,), 0, size),), size)
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
        self.stage.start_worker(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, replica, **where), self.layout)
        self.stage.pump()

    def call(self, name: str, verb: str, spec: int | str) -> None:
        with self.stage.quietly():
            self.stage.players[f"{name}/0"].call(verb, spec, 1e6, f"v{spec}")
            self.stage.pump()

    def publish(self, version: int) -> None:
        self.left.clear()
        self.call("trainer", "unpublish", "")
        self.call("trainer", "publish", version)

    def ask(self, *sites: int) -> None:
        """Everybody in these sites (none: in all) but the trainer calls `update`."""
        for name, player in self.stage.players.items():
            if player.me.replica != "trainer" and int(player.hello.site.removeprefix("site-")) in (sites or range(99)):
                self.call(name.partition("/")[0], "update", "latest")

    def update(self, *sites: int) -> float:
        """They do, and get it. Returns how long the last one took."""
        self.ask(*sites)
        return self.wait()

    def wait(self, until_s: float = 1e6, without: str = "") -> float:
        """Until all calls have ended (but that one's), or for so long. Returns how long it took."""
        began = self.stage.now
        while self.stage.now < began + until_s:
            waiting = [p for p in self.stage.players.values() if p.worker.call and p.me.replica != without]
            if not waiting:
                break
            assert self.stage.now < began + 10_000, "an update without an end"
            with self.stage.quietly():
                self.step()
        return self.stage.now - began

    def step(self) -> None:
        """Every open read that its source can serve moves on."""
        stage = self.stage
        reads: list[tuple[Player, Player]] = []
        for player in stage.players.values():
            source = stage.players[name_of(player.grant.source.worker)] if player.grant is not None else None
            served = source.served(player.grant.version) if source is not None else None
            if source is not None and served is not None and len(served) > player.done:
                reads.append((player, source))
        far = Counter(source.hello.site for player, source in reads if source.hello.site != player.hello.site)
        near = Counter(source.name for player, source in reads if source.hello.site == player.hello.site)
        rates: dict[str, float] = {}
        for name, count in near.items():
            source = stage.players[name]
            spare = self.sending.get(source.me.replica, 1.0)
            mine = [p for p, s in reads if s is source and s.hello.site == p.hello.site]
            for player in sorted(mine, key=lambda p: self.receiving.get(p.me.replica, 1.0)):
                rates[player.name] = min(self.receiving.get(player.me.replica, 1.0), spare / count)
                spare, count = spare - rates[player.name], count - 1
        for player, source in reads:
            is_cross_site = source.hello.site != player.hello.site
            rate = 1 / far[source.hello.site] / FAR if is_cross_site else rates[player.name]
            ticket = player.grant.ticket
            credit = self.credit.get(ticket, 0.0) + rate * self.step_s / self.chunk_s
            while (
                credit > 1 - 1e-9
                and player.grant is not None
                and len(source.served(player.grant.version)) > player.done
            ):
                credit -= 1.0
                self.left[source.hello.site] += is_cross_site
                self.arrived[ticket] += 1
                player.read_chunk()
            self.credit[ticket] = min(max(credit, 0.0), 1.0)
            arrived = round((self.arrived[ticket] + self.credit[ticket]) * CHUNK_BYTES)
            player.tell(ReadMeasured(ticket, "link", "", "", 0, arrived))
        stage.pump()
        stage.advance(self.step_s)

    def copies(self) -> list[float]:
        """How many copies have left each site."""
        sites = dict.fromkeys(player.hello.site for player in self.stage.players.values())
        return [self.left[site] / players.CHUNKS for site in sites]

    @property
    def moved(self) -> int:
        """How often a reader left a source that was too slow."""
        return self.stage.server.state.counters["moved"]

    def sources(self) -> dict[str, str]:
        """Who reads from whom now."""
        open_reads = self.stage.server.state.reads.all()
        return {read.reader.replica: read.source.replica for read in open_reads if not read.is_void}


@pytest.mark.parametrize("is_here_first", [pytest.param(False, marks=pytest.mark.long), True])
def test_one_copy_leaves_each_site_also_one_in_which_everybody_has_it(is_here_first: bool) -> None:
    fleet = Fleet(sites=8, workers=4)
    fleet.publish(2)
    if is_here_first:
        fleet.update(0)
    took_s = fleet.update()
    assert all(player.worker.held == 2 for player in fleet.stage.players.values())
    assert fleet.copies() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert took_s <= 3 * players.CHUNKS * FAR * fleet.chunk_s  # the best chain takes 2.5: 4 chunks, and 6 hops of one
    assert fleet.moved == 0, "nobody is slow who only waits for what comes"


class Slowed:
    """A site of nine workers; each transfer takes 20 s, 64 chunks of it."""

    @pytest.fixture(autouse=True)
    def many_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(players, "CHUNKS", 64)

    def fleet(self) -> Fleet:
        fleet = Fleet(sites=1, workers=9, chunk_s=20 / 64, step_s=0.1)
        fleet.publish(2)
        fleet.ask()
        return fleet


@pytest.fixture(scope="module")
def usual_s() -> float:
    """How long the last of a slowed site's workers waits where none is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(players, "CHUNKS", 64)
        return Slowed().fleet().wait()


class TestARelayIsSlowedInMidTransfer(Slowed):
    """In the chain trainer, 0-1, 0-2, … 0-8."""

    @pytest.mark.parametrize(("rate", "most"), [(0.25, 1.3), (0.0, 1.4)], ids=["slow", "still"])
    @pytest.mark.parametrize(
        ("who", "ways"),
        [
            ("0-1", "sending and receiving"),
            pytest.param("0-4", "sending", marks=pytest.mark.long),
            ("0-7", "receiving"),
            pytest.param("0-1", "sending", marks=pytest.mark.long),
            pytest.param("0-4", "receiving", marks=pytest.mark.long),
            pytest.param("0-7", "sending and receiving", marks=pytest.mark.long),
        ],
    )
    def test_it_costs_the_others_no_more_than_notice_and_a_move(
        self, who: str, ways: str, rate: float, most: float, usual_s: float
    ) -> None:
        fleet = self.fleet()
        took_s = fleet.wait(10.0)
        fleet.sending[who] = rate if "sending" in ways else 1.0
        fleet.receiving[who] = rate if "receiving" in ways else 1.0
        took_s += fleet.wait(without=who if "receiving" in ways else "")
        assert took_s <= most * usual_s
        assert fleet.moved <= 4

    def test_what_others_get_behind_it_is_not_taken_for_usual(self, usual_s: float) -> None:
        fleet = self.fleet()
        took_s = fleet.wait(3.0)
        fleet.sending["0-3"] = fleet.receiving["0-3"] = 0.1
        took_s += fleet.wait(without="0-3")
        assert took_s <= 1.5 * usual_s

    def test_when_all_are_slowed_nobody_is_moved_about(self) -> None:
        fleet = self.fleet()
        fleet.wait(10.0)
        for player in fleet.stage.players.values():
            fleet.sending[player.me.replica] = 0.25
        fleet.wait()
        assert fleet.moved <= 2, "the first reader and the one behind it change places"

    def test_when_the_only_source_is_slowed_it_is_not_asked_by_all(self, usual_s: float) -> None:
        fleet = self.fleet()
        took_s = fleet.wait(10.0)
        fleet.sending["trainer"] = 0.25
        most = 0
        while any(player.worker.call for player in fleet.stage.players.values()):
            took_s += fleet.wait(1.0)
            most = max(most, list(fleet.sources().values()).count("trainer"))
        assert most <= 2
        assert took_s <= 10 + (usual_s - 10) * 4 * 1.1
        assert fleet.moved <= 6, "it is tried ever more rarely"


class TestASourceSendsNextToNothing(Slowed):
    """A byte now and then, so that no transport takes it for dead."""

    @pytest.mark.parametrize(("rate", "after_s"), [(0.0, 5.0), (1e-6, 0.0)])
    def test_it_is_left_for_the_publisher(self, rate: float, after_s: float) -> None:
        fleet = Fleet(sites=1, workers=3, chunk_s=20 / 64, step_s=0.1)
        fleet.publish(2)
        fleet.call("0-1", "update", "latest")
        fleet.wait()
        fleet.call("0-2", "update", "latest")
        assert fleet.sources() == {"0-2": "0-1"}
        fleet.wait(after_s)
        fleet.sending["0-1"] = rate
        fleet.wait(4.0)
        assert fleet.sources() == {"0-2": "trainer"}
        assert fleet.wait() < 20.0
        assert fleet.moved == 1


class TestSeveralAreSlowAtOnce(Slowed):
    """Up to three workers send or receive little, or nothing, from some time on."""

    @pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
    def test_each_reader_that_can_receive_gets_it_and_moves_seldom(self, seed: int) -> None:
        chance, fleet = Random(seed), self.fleet()
        fleet.wait(chance.uniform(1.0, 14.0))
        names = [player.me.replica for player in fleet.stage.players.values() if player.me.replica != "trainer"]
        for name in chance.sample(names, chance.choice((1, 2, 3))):
            rate, ways = (
                chance.choice((0.0, 0.1, 0.25)),
                chance.choice(("sending", "receiving", "sending and receiving")),
            )
            fleet.sending[name] = rate if "sending" in ways else 1.0
            fleet.receiving[name] = rate if "receiving" in ways else 1.0
        began, last, moves = fleet.stage.now, fleet.sources(), Counter[str]()
        while self.waiting(fleet):
            assert fleet.stage.now < began + 5 * 20.0, "five transfers one after another"
            fleet.wait(1.0)
            now = fleet.sources()
            moves.update(name for name, source in now.items() if last.get(name, source) != source)
            last.update(now)
        assert max(moves.values(), default=0) <= 5
        assert fleet.moved <= 16

    def waiting(self, fleet: Fleet) -> list[str]:
        """Those that can receive at the full rate, and have not got it yet."""
        players = [player.me.replica for player in fleet.stage.players.values() if player.worker.call]
        return [name for name in players if fleet.receiving.get(name, 1.0) == 1.0]
