"""What the simulated users do: trainers that publish, rollouts that update, all shards of a replica in step.

Each step is one call on every shard of the replica, with a little skew; when all have ended, the app looks at how and
decides what next, as a real SPMD program would. A shard that died is started again, empty, after a while.
"""

from typing import TYPE_CHECKING

from ..core.events import Finished
from ..core.messages import Failure
from ..core.names import Digest, Shard, Version
from ..core.specs import PREFETCHED
from .process import Process

if TYPE_CHECKING:
    from .cluster import Cluster

Outcomes = dict[int, Finished]
DIED = Finished(0, error=Failure("died", "the process was killed"))


class App:
    """One replica's program, over the lives of its processes."""

    def __init__(self, cluster: "Cluster", model: str, replica: str) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.model = model
        self.replica = replica
        self.shards: dict[int, Process] = {}
        self.is_calm = False
        self.is_settling = False
        self._waiting_for: dict[int, None] = {}
        self._outcomes: Outcomes = {}

    def start(self) -> None:
        for shard in range(self.cluster.weather.shards):
            self.world.after(self.world.chance.uniform(0, 0.5), lambda s=shard: self._start_shard(s))  # type: ignore[misc]
        self.world.after(0.6, self.next_step)

    def _start_shard(self, shard: int) -> None:
        if shard not in self.shards:
            self.shards[shard] = self.cluster.start(self.model, self.replica, shard)

    def died(self, process: Process) -> None:
        for shard, mine in list(self.shards.items()):
            if mine is process:
                del self.shards[shard]
                self.world.after(self._rest(), lambda s=shard: self._start_shard(s))  # type: ignore[misc]
                self._ended(shard, DIED)

    def _rest(self) -> float:
        return self.world.chance.uniform(0.1, 2 * self.cluster.weather.settings.lease_s) if not self.is_calm else 0.1

    def calm(self) -> None:
        self.is_calm = True

    def settle(self) -> None:
        """The last phase: no new versions any more."""
        self.is_settling = True

    # --- one call on all shards ---------------------------------------------------------------------------------------

    def call_all(self, verb: str, spec: int | str, timeout_s: float, roots: dict[int, Digest] | None = None) -> None:
        if len(self.shards) < self.cluster.weather.shards and self.world.happens(0.7):
            self.world.after(0.3, self.next_step)
            return
        self._outcomes = {}
        self._waiting_for = dict.fromkeys(self.shards)
        self.cluster.oracles.called(self, verb, spec)
        skew_s = self.world.chance.choice((0.0, 0.01, 0.3))
        for shard, process in list(self.shards.items()):
            root = (roots or {}).get(shard, Digest(""))
            delay = self.world.chance.uniform(0, skew_s)
            self.world.after(delay, lambda p=process, s=shard, r=root: self._call(p, s, verb, spec, timeout_s, r))  # type: ignore[misc]
        if not self._waiting_for:
            self.world.after(0.3, self.next_step)

    def _call(self, process: Process, shard: int, verb: str, spec: int | str, timeout_s: float, root: Digest) -> None:
        if process.is_alive and self.shards.get(shard) is process:
            process.call(verb, spec, timeout_s, lambda finished: self._ended(shard, finished), root)

    def _ended(self, shard: int, finished: Finished) -> None:
        if shard not in self._waiting_for:
            return
        del self._waiting_for[shard]
        self._outcomes[shard] = finished
        if not self._waiting_for:
            outcomes, self._outcomes = self._outcomes, {}
            self.cluster.oracles.group_ended(self, outcomes)
            self.ended(outcomes)

    def succeeded(self, outcomes: Outcomes) -> bool:
        return len(outcomes) == self.cluster.weather.shards and all(o.error is None for o in outcomes.values())

    def timeout_s(self) -> float:
        if self.is_calm or self.cluster.weather.is_fair:
            return self.cluster.weather.settings.lease_s * 3 + 3
        return self.world.chance.choice((0.5, 2.0, 5.0, 12.0))

    def next_step(self) -> None:
        raise NotImplementedError

    def ended(self, outcomes: Outcomes) -> None:
        raise NotImplementedError


class TrainerApp(App):
    """unpublish, train (which changes every byte), publish the next version; now and then a mistake."""

    def __init__(self, cluster: "Cluster", model: str, replica: str) -> None:
        super().__init__(cluster, model, replica)
        self.version = 0
        self.number = 0  # as published: the version, or by mistake a former one
        self.phase = "publish"
        self.published: Version | None = None
        self.is_refused = False  # it may not leave what it holds: there is no host memory for it
        self._content = 0

    def next_step(self) -> None:
        if self.phase == "rest" and self.is_settling:
            self.world.after(0.5, self.next_step)
        elif self.phase == "publish":
            self._publish()
        else:
            self.phase = "unpublish"
            self.call_all("unpublish", "", self.timeout_s())

    def _publish(self) -> None:
        if not self.is_settling and self.world.happens(0.15):
            self.number = max(0, self.version - self.world.chance.randrange(0, 3))  # from an old checkpoint, say
        else:
            self.version += 1
            self.number = self.version
        self._content += 1
        self._pin()
        for process in self.shards.values():
            if process.worker.held is not None:  # an unpublish failed here: the memory may not be changed
                self.phase = "unpublish"
                self.next_step()
                return
        roots = {}
        for shard, process in self.shards.items():
            roots[shard] = self._content_of(shard, self._content)
            for chunk, value in enumerate(self.cluster.data.contents[roots[shard]]):
                process.write(chunk, value)
        self.call_all("publish", self.number, self.timeout_s(), roots)

    def _pin(self) -> None:
        """Keep the version published last, for a while; or let go of what is kept."""
        is_wanted = not self.is_calm and self.published is not None and self.world.happens(self.cluster.weather.pins)
        pins = (self.published,) if is_wanted and self.published is not None else ()
        for process in list(self.shards.values()):
            process.wish(None, pins)

    def _content_of(self, shard: int, content: int) -> Digest:
        first = (content * 100 + shard) * 1000
        values = tuple(first + chunk + 1 for chunk in range(self.cluster.weather.chunks))
        root = Digest(f"{self.model}/{self.replica}/{shard}/{content}")
        self.cluster.data.contents[root] = values
        return root

    def ended(self, outcomes: Outcomes) -> None:
        is_good = self.succeeded(outcomes)
        self.is_refused = any(o.error is not None and o.error.code == "host-memory-full" for o in outcomes.values())
        if self.is_refused:
            for process in list(self.shards.values()):
                process.wish(None, ())  # as the error's hint says
        if self.phase == "publish":
            if is_good:
                self.published = Version(self.number)
                self.phase = "rest"
            else:
                self.phase = "unpublish"
        elif self.phase == "unpublish" and all(o.error is None for o in outcomes.values()):
            self.phase = "publish"
            self._train()
        self.world.after(self.world.chance.uniform(0, 1.0), self.next_step)

    def _train(self) -> None:
        for process in self.shards.values():
            if process.worker.held is None:
                for chunk in range(len(process.memory)):
                    process.write(chunk, -self.world.chance.randrange(1, 10**9))


class RolloutApp(App):
    """replicate once, then update again and again, and generate with what it has."""

    def __init__(self, cluster: "Cluster", model: str, replica: str) -> None:
        super().__init__(cluster, model, replica)
        self.last: tuple[str, int | str] = ("", "")
        self.has: Version | None = None

    def next_step(self) -> None:
        verb: str = self.world.chance.choice(("update", "update", "update", "replicate"))
        spec: int | str = self.world.chance.choice(("latest", "latest", "latest", "latest", "latest-1", -1))
        if spec == -1:
            spec = self.world.chance.randrange(0, 6)
        if spec == "latest" and verb == "update" and self.world.aside.random() < self.cluster.weather.ahead:
            spec = PREFETCHED
        if self.is_settling:
            verb, spec = "update", "latest"
        self.last = (verb, spec)
        self.call_all(verb, spec, self.timeout_s())

    def ended(self, outcomes: Outcomes) -> None:
        if self.succeeded(outcomes):
            self.has = outcomes[0].version
            rest = self.world.chance.uniform(0, 1.5)
            wish = "latest" if not self.is_settling and self.world.happens(0.3) else None
            for process in list(self.shards.values()):
                process.wish(wish, ())
        else:
            rest = self.world.chance.uniform(0.05, 0.6)
        if not self.is_calm and not self.cluster.weather.is_fair and self.world.happens(0.03) and self.shards:
            leaver = self.world.chance.choice(list(self.shards.values()))
            leaver.close(self.world.chance.choice((0.5, 3.0)))
        if self.cluster.weather.is_in_step:
            rest += -(self.world.now + rest) % 1.0
        self.world.after(rest, self.next_step)

    @property
    def shard_ids(self) -> list[Shard]:
        return [Shard(shard) for shard in self.shards]
