"""The whole simulated cluster of one seed: server, processes, applications, storm and calm."""

from math import inf

from ..core.names import ModelName, ReplicaName, Shard, WorkerId
from .apps import App, RolloutApp, TrainerApp
from .dataplane import DataPlane
from .network import ControlPlane
from .oracles import Oracles
from .process import Process
from .weather import Weather, draw_weather
from .world import OracleViolation, World

MOST_EVENTS = 400_000  # a history that does not end is a bug of its own


class Cluster:
    """Everything of one history. `run` raises `OracleViolation` if a promise was broken."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.world = World(seed, trace=trace)
        self.weather: Weather = draw_weather(self.world.chance, self.world.aside)
        self.control = ControlPlane(self.world, self.weather)
        self.data = DataPlane(self.world, self.weather, self)
        self.oracles = Oracles(self)
        self.control.after_event = self.oracles.after_event
        self.workers: dict[WorkerId, Process] = {}
        self.lives: dict[WorkerId, int] = {}
        self.places: dict[tuple[str, str], tuple[str, bool]] = {}
        self.apps: list[App] = []
        self.is_stormy = True
        self.world.note("weather", str(self.weather))

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, model: str, replica: str, shard: int) -> Process:
        me = WorkerId(ModelName(model), ReplicaName(replica), Shard(shard))
        self.lives[me] = self.lives.get(me, 0) + 1
        self.world.note(me, f"starts, life {self.lives[me]}")
        place = self.places.setdefault((model, replica), self._place(replica))
        process = Process(self, me, self.lives[me], *place)
        self.workers[me] = process
        return process

    def _place(self, replica: str) -> tuple[str, bool]:
        """The site of a replica, and whether it is reliable."""
        if replica == "trainer":
            return "site-0", True
        return f"site-{self.world.chance.randrange(self.weather.sites)}", not self.world.happens(self.weather.spot)

    def kill(self, process: Process) -> None:
        if process.is_alive:
            process.is_alive = False
            self.oracles.retention.died(process)
            self.world.note(process.name, "is dead")
            self.control.lose(process)
            if self.workers.get(process.me) is process:
                del self.workers[process.me]
            for app in self.apps:
                app.died(process)

    def living(self, worker: WorkerId) -> Process | None:
        return self.workers.get(worker)

    # --- the history --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Storm, then calm, then everybody must have got where he wanted."""
        self.control.start_server()
        for model in self.weather.models:
            self.apps.append(TrainerApp(self, model, "trainer"))
            for index in range(self.weather.rollouts):
                self.apps.append(RolloutApp(self, model, f"rollout-{index}"))
        for app in self.apps:
            app.start()
        self._misfortune()
        self._until(self.weather.storm_s)
        self._calm_down()
        self._until(self.weather.storm_s + self.weather.calm_s / 2)
        for app in self.apps:
            app.settle()
        self._until(self.weather.storm_s + self.weather.calm_s)
        self.oracles.at_the_end()

    def _until(self, until: float) -> None:
        while self.world.next_at <= until:
            self.world.step()
            if self.world.events > MOST_EVENTS:
                raise OracleViolation(f"{MOST_EVENTS} events and no end: messages breed messages")
        self.world.now = until

    def _misfortune(self) -> None:
        """Once in a while something bad happens, as the weather has it."""
        if not self.is_stormy:
            return
        weather, chance = self.weather, self.world.chance
        step_s = 0.25
        if self.world.happens(weather.partition * step_s):
            self._cut(chance.choice((("is_mute", "is_deaf"), ("is_mute",), ("is_deaf",))))
        if self.world.happens(weather.data_partition * step_s):
            self._cut(("is_data_cut",))
        if self.world.happens(weather.crash * step_s) and self.workers:
            self.kill(chance.choice(list(self.workers.values())))
        if self.world.happens(weather.restart * step_s) and self.control.server is not None:
            self.control.kill_server()
            self.world.after(chance.uniform(0.01, 1.5 * weather.settings.lease_s), self._restart_server)
        self.world.after(step_s, self._misfortune)

    def _restart_server(self) -> None:
        if self.control.server is None:
            self.control.start_server()

    def _cut(self, flags: tuple[str, ...]) -> None:
        """Some worker is cut off for a while: from the server in one direction or both, or from its peers."""
        if not self.workers:
            return
        process = self.world.chance.choice(list(self.workers.values()))
        for flag in flags:
            setattr(process, flag, True)
        process.muted_in_life = self.control.lives
        self.world.note(process.name, f"cut off: {' '.join(flags)}")
        length_s = self.world.chance.uniform(0.1, 2.5 * self.weather.settings.lease_s)

        def heal() -> None:
            if process.is_alive:
                for flag in flags:
                    setattr(process, flag, False)
                process.muted_in_life = self.control.lives
                self.world.note(process.name, f"no longer cut off: {' '.join(flags)}")

        self.world.after(length_s, heal)

    def _calm_down(self) -> None:
        self.world.note("weather", "calm")
        self.is_stormy = self.control.is_stormy = self.data.is_stormy = False
        for process in list(self.workers.values()):
            process.is_mute = process.is_deaf = process.is_data_cut = False
        self._restart_server()
        for app in self.apps:
            app.calm()

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def ends_at(self) -> float:
        return self.weather.storm_s + self.weather.calm_s if self.weather.calm_s else inf
