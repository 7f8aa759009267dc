"""The whole simulated cluster of one plan: server, processes, programs, storm and calm."""

from tensorhub.protocol.messages import Source
from tensorhub.protocol.names import ModelName, ReplicaName, Shard, WorkerId

from .apps import App, RolloutApp, TrainerApp
from .cuts import Cuts, is_target
from .dataplane import DataPlane
from .fates import Fates
from .network import ControlPlane
from .plan import Misfortune, Plan, Replica
from .process import Process
from .watch import Watch
from .world import OracleViolation, World

MAX_EVENTS = 400_000  # a history that does not end is a bug of its own; of each eight workers


class Cluster:
    """Everything of one history. `run` raises `OracleViolation` if a promise was broken."""

    def __init__(self, plan: Plan, *, trace: bool = False) -> None:
        self.plan = plan
        self.world = World(plan.seed, trace=trace)
        self.fates = Fates(self.world, plan)
        self.cuts = Cuts(self.world)
        self.control = ControlPlane(self.world, plan, self.fates, self)
        self.data = DataPlane(self.world, plan, self.fates, self)
        self.workers: dict[WorkerId, Process] = {}
        self.lives: dict[WorkerId, int] = {}
        self.apps: list[App] = []
        self.is_stormy = True
        self.watch = Watch(self)
        self.world.note("weather", f"{plan.settings} {plan.conditions}")

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, replica: Replica, shard: int) -> Process | None:
        """A new life of that shard's process; None where nobody may live any more."""
        me = WorkerId(ModelName(replica.model), ReplicaName(replica.name), Shard(shard))
        if self.cuts.is_gone(str(me), replica.host, replica.site):
            return None
        self.lives[me] = self.lives.get(me, 0) + 1
        self.world.note(me, f"starts, life {self.lives[me]}")
        process = Process(self, me, self.lives[me], replica)
        self.workers[me] = process
        return process

    def kill(self, process: Process) -> None:
        if process.is_alive:
            process.is_alive = False
            self.watch.died(process)
            self.world.note(process.name, "is dead")
            if process.connection is not None:
                self.control.close(process.connection)
            if self.workers.get(process.me) is process:
                del self.workers[process.me]
            for app in self.apps:
                app.died(process)

    def process_of(self, source: Source) -> Process | None:
        """The life of that worker that the grant names, if it lives."""
        found = self.workers.get(source.worker)
        return found if found is not None and found.hello.endpoints == source.endpoints else None

    # --- the history --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Storm, then calm, then everybody who can must have got where he wanted."""
        self.control.start_server()
        for index, replica in enumerate(self.plan.replicas):
            self.apps.append(TrainerApp(self, replica, index) if replica.is_trainer else RolloutApp(self, replica))
        for app in self.apps:
            app.start()
        for misfortune in self.plan.misfortunes:
            self.world.after(misfortune.at_s, lambda m=misfortune: self._happen(m))  # type: ignore[misc]
        conditions = self.plan.conditions
        self._until(conditions.storm_s)
        self._calm_down()
        self._until(conditions.storm_s + conditions.calm_s / 2)
        for app in self.apps:
            app.settle()
        self._until(self.plan.ends_s - 2 * self.plan.settings.lease_s)
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        """All replicas get where they want to be, and nothing is left over. Some need more time than the plan has."""
        lease_s = self.plan.settings.lease_s
        until_s, rest_s = self.plan.ends_s, 10 * lease_s + 3 * self.plan.slowest_read_s
        while True:
            reads = self.watch.reads()
            self._until(until_s)
            self.world.seal()
            lacks = self.watch.unsettled(reads)
            if not lacks:
                return
            if until_s > self.plan.ends_s + rest_s:
                raise OracleViolation(lacks)
            until_s += 2 * lease_s

    def _until(self, until: float) -> None:
        most = MAX_EVENTS * (1 + self.plan.workers // 8)
        while self.world.next_at <= until:
            self.world.step()
            if self.world.events > most:
                raise OracleViolation(f"{most} events and no end: messages breed messages")
        self.world.now = until

    # --- misfortunes --------------------------------------------------------------------------------------------------

    def _happen(self, misfortune: Misfortune) -> None:
        if not self.is_stormy:
            return
        kind, hit = misfortune.kind, [p for p in self.workers.values() if is_target(misfortune.target, p)]
        length = "for ever" if misfortune.stays else f"for {misfortune.length_s:.2f} s"
        if not kind.endswith("server"):
            self.world.note(misfortune.target, f"{kind} {misfortune.other}{misfortune.value or ''} {length}")
        number = self.cuts.add(misfortune)
        self.watch.struck(number, misfortune)
        if not misfortune.stays:
            self.world.after(misfortune.length_s, lambda: self._pass(number, misfortune))
        match kind:
            case "crash" | "gone":
                for process in hit:
                    self.kill(process)
            case "disconnect":
                for process in hit:
                    process.hang_up()
            case "pause":
                for process in hit:
                    process.pause()
            case "restart-server":
                self.control.kill_server()
            case "pause-server":
                self.control.pause()

    def _pass(self, number: int, misfortune: Misfortune) -> None:
        """It is over."""
        if number not in self.cuts.in_force:
            return
        self.cuts.remove(number)
        self.watch.passed(number)
        self.world.note(misfortune.target or "server", f"{misfortune.kind} is over")
        self._recover()

    def _recover(self) -> None:
        """What nothing keeps down any more goes on."""
        kinds = [each.kind for each in self.cuts.in_force.values()]
        if "restart-server" not in kinds and self.control.server is None:
            self.control.start_server()
        if "pause-server" not in kinds:
            self.control.resume()
        for process in list(self.workers.values()):
            if process.is_paused and not self.cuts.is_paused(process):
                process.resume()

    def _calm_down(self) -> None:
        self.world.note("weather", "calm")
        self.is_stormy = self.fates.is_stormy = self.data.is_stormy = False
        for number, each in list(self.cuts.in_force.items()):
            if not each.stays:
                self._pass(number, each)
        self._recover()
        for app in self.apps:
            app.calm()

    @property
    def now(self) -> float:
        return self.world.now
