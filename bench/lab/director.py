"""Runs one strategy of one scenario: starts everybody, says go, breaks what is to be broken, and ends everybody."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tensorhub.runtime.config import access_of

from ..demo.logs import now
from ..demo.processes import Processes, ProcessFailed
from .events import AnyEvent, Ended, Fault, Updated, read_events
from .goals import Finding
from .idle import Idle, own_cpu_s
from .job import Job, Role
from .network import Network, Place
from .processes import Nursery
from .scenarios import Scenario
from .strategies.choose import STRATEGIES
from .summary import Outcome, summarise

SERVER_PORT, TRAINER_PORT, STORE_PORT = 7450, 7460, 7470
LEASE_S = 5.0
JOIN_S = 60.0
LOOK_S = 0.05
HOME, AWAY = "home", "away"


@dataclass
class Ground:
    """The places of a scenario, and its WAN."""

    server: Place
    store: Place
    trainer: Place
    rollouts: list[Place]
    sites: dict[str, str] = field(default_factory=dict)  # of each place
    wan_counts: Path | None = None
    uplink: Place | None = None  # the router through which everything leaves the trainer's site
    network: Network | None = None


@contextmanager
def ground_of(scenario: Scenario, folder: Path) -> Iterator[Ground]:
    """Namespaces and links, for as long as the block lasts."""
    with ExitStack() as stack:
        network = stack.enter_context(Network(queue_ms=20))
        far = [f"{AWAY}-{number}" for number in range(1, scenario.far_sites + 1)]
        rollout_sites = far or [AWAY if scenario.wan_mbit else HOME]
        for site in dict.fromkeys((HOME, *rollout_sites)):
            network.add_site(site)
        server = network.add("srv", HOME, rate_mbit=None)
        store = network.add("store", HOME, rate_mbit=scenario.rate_mbit)
        trainer = network.add("t", HOME, rate_mbit=scenario.rate_mbit)
        count = scenario.rollouts + scenario.spots
        where = [rollout_sites[index % len(rollout_sites)] for index in range(count)]
        rollouts = [network.add(f"w{i}", site, rate_mbit=scenario.rate_mbit) for i, site in enumerate(where)]
        sites = {place.name: HOME for place in (server, store, trainer)}
        sites |= {place.name: site for place, site in zip(rollouts, where, strict=True)}
        ground = Ground(server, store, trainer, rollouts, sites, network=network)
        if scenario.uplink_mbit:
            ground.uplink, *_ = (network.uplink(site, scenario.uplink_mbit) for site in (HOME, *far))
        if scenario.wan_mbit:
            home, away = network.join(HOME, AWAY)
            processes = stack.enter_context(Processes(folder))
            ground.wan_counts = folder / "wan.txt"
            arguments = [str(scenario.wan_mbit), str(scenario.wan_delay_ms), str(ground.wan_counts)]
            command = [sys.executable, "-m", "bench.lab.wan", home.path, away.path, *arguments]
            processes.start("wan", command)
            wait(ground.wan_counts.exists, "the relay between the sites", processes.check)
        yield ground


class Run:
    """One strategy under way, or over."""

    def __init__(self, scenario: Scenario, strategy: str, ground: Ground, folder: Path) -> None:
        self.scenario, self.strategy, self.ground, self.folder = scenario, strategy, ground, folder
        self.events: list[AnyEvent] = []
        self.began_at = 0.0
        self.seconds = 0.0
        self.idle_share = 1.0
        self.own_cpu_s = 0.0
        self.folder.mkdir(parents=True)
        self._reader = read_events(folder)
        self._seeds = scenario.seed

    def run(self) -> "Run":
        """All of it. Raises `ProcessFailed`."""
        before_s = own_cpu_s()
        with ExitStack() as stack:
            self.processes = stack.enter_context(Processes(self.folder))
            self.start_server()
            chosen = STRATEGIES[self.strategy]
            nursery = Nursery(self.folder, with_torch=chosen.needs_torch, settings=chosen.workers)
            self.nursery = stack.enter_context(nursery)
            self.start_workers()
            self.nursery.go()
            self.began_at, idle = time.monotonic(), Idle()
            self.direct()
            self.seconds, self.idle_share = time.monotonic() - self.began_at, idle.share()
            self.nursery.end()
        self.own_cpu_s = own_cpu_s() - before_s  # all have ended; what starting them took is in it too
        self.look()
        return self

    def start_server(self) -> None:
        """The reference server, for the strategies that have one."""
        if not STRATEGIES[self.strategy].is_ours:
            return
        access_of(create=True)  # before a worker looks for the token
        place = self.ground.server
        where = ["--host", place.address, "--port", str(SERVER_PORT), "--lease", str(LEASE_S), "--fresh"]
        module = [sys.executable, "-m", "bench.demo.server", "serve", "--log", "warning", *where]
        self.processes.start("server", [*place.wrapper, "env", *STRATEGIES[self.strategy].server, *module])

    def start_workers(self) -> None:
        """Trainer, store and the first rollouts, until each rollout has its first version."""
        self.start_trainer()
        world = 1 + self.scenario.rollouts
        if STRATEGIES[self.strategy].has_store:
            self.nursery.start(self.job("store", "store", self.ground.store), self.ground.store)
        for index in range(self.scenario.rollouts):
            place = self.ground.rollouts[index]
            more = {"rank": index + 1, "world": world, "is_reliable": self.scenario.are_reliable}
            host_bytes = STRATEGIES[self.strategy].host_bytes
            self.nursery.start(self.job(f"rollout-{index}", "rollout", place, host_bytes=host_bytes, **more), place)
        wait(lambda: self.joined() == self.scenario.rollouts, "the first version everywhere", self.check, JOIN_S)

    def start_trainer(self) -> None:
        """The trainer, and who watches."""
        if STRATEGIES[self.strategy].is_ours and self.scenario.is_watched:
            self.nursery.start(self.job("watcher", "watcher", self.ground.server), self.ground.server)
        more = {"world": 1 + self.scenario.rollouts, "prefetch": "never"}  # what it publishes it need not fetch
        job = self.job("trainer", "trainer", self.ground.trainer, **more)
        self.nursery.start(job, self.ground.trainer)

    def job(self, name: str, role: Role, place: Place, **more: object) -> Job:
        """What a process is told."""
        scenario, ground = self.scenario, self.ground
        self._seeds += 1
        given: dict[str, object] = {
            "server": f"{ground.server.address}:{SERVER_PORT}",
            "trainer": f"{ground.trainer.address}:{TRAINER_PORT}",
            "origin": f"{ground.trainer.address}:{TRAINER_PORT}",
            "versions": 0 if scenario.duration_s else scenario.versions,
            "prefetch": STRATEGIES[self.strategy].prefetch or "never",
            "only_near": STRATEGIES[self.strategy].only_near,
        }
        if STRATEGIES[self.strategy].has_store:
            given["origin"] = f"{ground.store.address}:{STORE_PORT}"
        return Job(
            name=name,
            role=role,
            strategy=self.strategy,
            site=ground.sites[place.name],
            address=place.address,
            events=str(self.folder),
            seed=self._seeds,
            size_bytes=scenario.size_bytes,
            chunk_bytes=scenario.chunk_bytes,
            train_s=scenario.train_s,
            generate_s=scenario.generate_s,
            jitter=scenario.jitter,
            held_share=scenario.held_share,
            **{**given, **more},  # type: ignore[arg-type]
        )

    def direct(self) -> None:
        """Until all are done."""
        awaited = 1 + self.scenario.rollouts
        wait(lambda: self.ended() >= awaited, f"the end of {self.strategy}", self.check, self.scenario.most_s)

    def outcome(self) -> Outcome:
        """What came of it."""
        return summarise(
            self.events,
            strategy=self.strategy,
            title=STRATEGIES[self.strategy].title,
            size_bytes=self.scenario.size_bytes,
            began_at=self.began_at,
            seconds=self.seconds,
            idle_share=self.idle_share,
            own_cpu_s=self.own_cpu_s,
        )

    def judge(self) -> list[Finding]:
        """What this run is to show by itself, besides what is compared."""
        return []

    def note(self, process: str, what: str) -> None:
        """Write down what was done to whom."""
        self.events.append(Fault(time=now(), process=process, what=what))

    def look(self) -> None:
        """Read what was written down."""
        self.events += self._reader.new()

    def check(self) -> None:
        """Look, and raise `ProcessFailed` if somebody has ended who should not have."""
        self.look()
        self.processes.check()
        self.nursery.check()

    def joined(self) -> int:
        """Rollouts that have had their first version."""
        return sum(isinstance(event, Updated) and event.is_first for event in self.events)

    def ended(self) -> int:
        """Trainer and rollouts that have done all they had to do."""
        return sum(isinstance(event, Ended) and event.process not in ("store", "watcher") for event in self.events)


def wait(is_so: Callable[[], bool], what: str, check: Callable[[], None], within_s: float = JOIN_S) -> None:
    """Look until it is so. Raises `ProcessFailed` when time runs out."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            raise ProcessFailed(f"waited {within_s:.0f} s for {what}")
        time.sleep(LOOK_S)
        check()
