"""What the simulated users do: trainers that publish, rollouts that update, all shards of a replica in step.

Each step is one call on every shard of the replica, with a little skew. When all have ended, the program looks at how
and makes the next step of its plan, as a real SPMD program would. A shard that died is started again after a while.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tensorhub.protocol.messages import PREFETCHED, Failure, Poisoned
from tensorhub.protocol.names import Digest, Version
from tensorhub.worker.events import Called, Finished
from tensorhub.worker.state import FILLS

from .contents import plain_root_of, root_of, values_of
from .plan import Replica, Step
from .process import Process

if TYPE_CHECKING:
    from .cluster import Cluster

Outcomes = dict[int, Finished]
DIED = Finished(0, error=Failure("died", "the process was killed"))
TORN = Failure("usage", "its tensors are torn")
AT_ONCE_S = 0.001  # no time for the shards to hear of each other
HEEDS = 0.3  # share of the programs in the storm that do what an error's hint says
VAIN = 0.1  # share of the updates to what was fetched ahead where nothing is, by mistake
TWIN = 999  # the number of all programs that make the same content
BOLD = 0.3  # a program whose shards are not all there calls all the same, so often


class App:
    """One replica's program, over the lives of its processes."""

    def __init__(self, cluster: "Cluster", replica: Replica) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.replica = replica
        self.name = f"{replica.model}/{replica.name}"
        self.chance = cluster.world.stream(f"app {self.name}")
        self.shards: dict[int, Process] = {}
        self.is_calm = False
        self.is_settling = False
        self.step = Step()
        self._taken = 0  # steps of the plan
        self._waiting_for: dict[int, None] = {}
        self._outcomes: Outcomes = {}
        self._filled: dict[str, None] = {}  # the processes that have called for a version, by name
        self._failures = 0  # of steps, one after another
        self.has: Version | None = None  # as its latest step that succeeded published or gave it
        self.is_refused = False  # there is no host memory for what it would have to keep

    @property
    def shard_count(self) -> int:
        return self.cluster.plan.conditions.shards_in(self.replica.cut)

    def start(self) -> None:
        for shard in range(self.shard_count):
            self._start_later(shard, self.replica.starts_s + self.chance.uniform(0, 0.5))
        self.world.after(self.replica.starts_s + 0.6, self.next_step)

    def _start_later(self, shard: int, delay_s: float) -> None:
        def start() -> None:
            if shard not in self.shards:
                process = self.cluster.start(self.replica, shard)
                if process is not None:
                    self.shards[shard] = process

        self.world.after(delay_s, start)

    def died(self, process: Process) -> None:
        for shard, mine in list(self.shards.items()):
            if mine is process:
                del self.shards[shard]
                lease_s = self.cluster.plan.settings.lease_s
                rest_s = self.chance.uniform(0.1, 2 * lease_s)
                self._start_later(shard, 0.1 if self.is_calm else rest_s)
                self._ended(shard, DIED)

    def calm(self) -> None:
        self.is_calm = True
        self.chance = self.world.stream(f"calm app {self.name}")  # as drawn whatever came before

    def settle(self) -> None:
        """The last phase: no new versions any more."""
        self.is_settling = True

    @property
    def is_quiet(self) -> bool:
        """Nobody makes mistakes, gives up or leaves."""
        return self.is_calm

    # --- one call on all shards ---------------------------------------------------------------------------------------

    def next_step(self) -> None:
        """The next of the plan; when that is over, plain ones."""
        if len(self.shards) < self.shard_count and self.chance.random() > BOLD:
            self.world.after(0.3, self.next_step)
            return
        steps = self.replica.steps
        self.step = steps[self._taken] if self._taken < len(steps) and not self.is_settling else self.plain_step()
        self._taken += 1
        for shard, process in list(self.shards.items()):
            if self.step.registers and not self.is_quiet:
                process.run(lambda p=process: self._registers(p))  # type: ignore[misc]
            elif shard in self.other_tensors:
                process.run(lambda p=process, s=shard: self._registers_again(p, s))  # type: ignore[misc]
        self.take(self.step)

    def plain_step(self) -> Step:
        raise NotImplementedError

    def take(self, step: Step) -> None:
        raise NotImplementedError

    def ended(self, outcomes: Outcomes) -> None:
        raise NotImplementedError

    other_tensors: dict[int, None]  # shards that have others than the model's

    def _registers(self, process: Process) -> None:
        if process.register(self.step.registers) and self.step.registers == "other":
            self.other_tensors[process.me.shard] = None

    def _registers_again(self, process: Process, shard: int) -> None:
        if process.register("same"):
            self.other_tensors.pop(shard, None)

    def call_all(
        self, verb: str, spec: int | str, roots: dict[int, Digest] | None = None, claim: Version | None = None
    ) -> None:
        step, timeout_s = self.step, self.timeout_s()
        self._outcomes = {}
        self._waiting_for = dict.fromkeys(self.shards)
        self.cluster.watch.group_called(self, verb, spec)
        for shard, process in list(self.shards.items()):
            own: tuple[str, int | str] = (verb, spec)
            if shard == step.stray and not self.is_quiet and self.shard_count > 1:
                own = ("unpublish", "") if verb != "unpublish" else ("replicate", "latest")
            misses = TORN if shard == step.misses and not self.is_quiet else None
            delay_s = self.chance.uniform(0, step.skew_s)
            root = roots.get(shard, Digest("")) if roots else Digest("")
            is_stray = own != (verb, spec)
            left_s, claims = 0.0 if misses else timeout_s, None if is_stray else claim
            call = Called(*own, left_s, root, claims, waits=step.waits and not is_stray, missed=misses)
            self.world.after(delay_s, lambda p=process, s=shard, c=call: self._call(p, s, c))  # type: ignore[misc]
        if step.cancel_s and not self.is_quiet:
            waited_for = self._waiting_for
            self.world.after(step.cancel_s, lambda: self._cancel(waited_for))
        if not self._waiting_for:
            self.world.after(0.3, self.next_step)

    def _call(self, process: Process, shard: int, called: Called) -> None:
        def call() -> None:
            if self.shards.get(shard) is process:
                self._filled.update({process.name: None} if called.verb in FILLS else {})
                process.call(called, lambda finished: self._ended(shard, finished))

        process.run(call)

    def _cancel(self, waited_for: dict[int, None]) -> None:
        if waited_for is self._waiting_for:
            for shard in list(waited_for):
                process = self.shards.get(shard)
                if process is not None and self.step.canceller in (-1, shard):
                    process.run(process.cancel)

    def _ended(self, shard: int, finished: Finished) -> None:
        if shard not in self._waiting_for:
            return
        del self._waiting_for[shard]
        self._outcomes[shard] = finished
        if not self._waiting_for:
            outcomes, self._outcomes = self._outcomes, {}
            self._failures = 0 if self.succeeded(outcomes) else self._failures + 1
            self.cluster.watch.group_ended(self, outcomes)
            closer = self.shards.get(self.step.closer)
            if closer is not None and not self.is_quiet:
                closer.run(lambda: closer.close(self.step.close_s))
            self.ended(outcomes)

    def succeeded(self, outcomes: Outcomes) -> bool:
        return len(outcomes) == self.shard_count and all(o.error is None for o in outcomes.values())

    def timeout_s(self) -> float:
        """A plain program gives a call the time that the network takes: what a call has read goes with its failure."""
        plan = self.cluster.plan
        if self.step.timeout_s and not self.is_calm:
            return self.step.timeout_s
        return plan.settings.lease_s * 2 + 3 + (plan.slowest_read_s if self.is_settling else 0.0)

    def again(self, rest_s: float, then: Callable[[], None]) -> None:
        """After the rest, at a whole second if that is how the program runs. Who is in haste rests only if one try more
        has not helped."""
        if self.replica.is_hasty and self._failures == 1:
            self.world.after(AT_ONCE_S, then)
            return
        if self.replica.is_in_step:
            rest_s += -(self.world.now + rest_s) % 1.0
        self.world.after(rest_s, then)


class TrainerApp(App):
    """unpublish, train (which changes every byte), publish the next version; now and then a mistake."""

    def __init__(self, cluster: "Cluster", replica: Replica, index: int) -> None:
        super().__init__(cluster, replica)
        self.other_tensors = {}
        self.index = index  # of all programs: no two make the same content
        self.version = 0
        self.number = 0  # as published: the version, or by mistake a former one
        self.phase = "publish"
        self.claimed: Version | None = None  # what it asks to publish next, or may
        self._has_failed_to_claim = False  # then it takes its version back without
        self._is_anew = False  # one of its processes has died
        self._content = 0

    def died(self, process: Process) -> None:
        self._is_anew = self._is_anew or process in self.shards.values()
        super().died(process)

    def plain_step(self) -> Step:
        return Step("publish", rest_s=0.5, claims=any(step.claims for step in self.replica.steps))

    def take(self, step: Step) -> None:
        if self.is_settling and self.phase == "rest" and self.has is not None:
            self.world.after(0.5, self.next_step)
        elif self.replica.resumes and (self._is_anew or (step.back and not self.is_quiet)):
            self.phase, self.claimed, self._is_anew = "resume", None, False
            self.call_all("replicate", "latest")
        elif self.phase == "publish":
            self._publish(step)
        else:
            self.phase = "unpublish"
            self.claimed = Version(self._next(step)) if step.claims and not self._has_failed_to_claim else None
            self.call_all("unpublish", "", claim=self.claimed)

    def _next(self, step: Step) -> int:
        """The number that comes next; by mistake a former one, from an old checkpoint, say."""
        if not self.is_quiet and step.back:
            return max(0, self.version - step.back)
        return max(self.version, self.cluster.watch.newest(self.replica.model)) + 1

    def _publish(self, step: Step) -> None:
        self.number = self.claimed if self.claimed is not None else self._next(step)
        self.version = max(self.version, self.number)
        self._content += 1
        self._pin(step)
        if any(process.worker.held is not None for process in self.shards.values()):
            self.phase, self.claimed = "unpublish", None  # one failed here: the memory may not be changed
            self.call_all("unpublish", "")
            return
        roots = {}
        for shard, process in self.shards.items():
            roots[shard] = self._content_of(shard)
            if not process.is_paused:
                self._fill(process, roots[shard])
            else:
                process.run(lambda p=process, r=roots[shard]: self._fill(p, r))  # type: ignore[misc]
        self.call_all("publish", self.number, roots)

    def _fill(self, process: Process, root: Digest) -> None:
        """Good content. Who has spoiled its buffer with a call by mistake registers it again, as the error's hint says.

        In the storm a program does not always listen to hints.
        """
        is_spoiled = process.name in self._filled and isinstance(process.worker.buffer, Poisoned)
        if is_spoiled and (self.is_quiet or self.chance.random() < HEEDS):
            process.register("same")
        if process.worker.held is None:
            for chunk, value in enumerate(self.cluster.data.contents[root]):
                process.write(chunk, value)

    def _pin(self, step: Step) -> None:
        """Keep the version published last, for a while; or let go of what is kept."""
        is_wanted = not self.is_calm and self.has is not None and step.wishes
        pins = (self.has,) if is_wanted and self.has is not None else ()
        for process in list(self.shards.values()):
            process.wish(None, pins)

    def _content_of(self, shard: int) -> Digest:
        if self.replica.cut:
            root = root_of(f"{self.index}.{self._content}", self.replica.cut, shard)
            self.cluster.data.contents[root] = values_of(root, self.cluster.plan.conditions.chunks)
            return root
        index, content = (TWIN, self.number) if self.replica.is_twin else (self.index, self._content)
        first = ((index * 1000 + content) * 100 + shard) * 1000
        values = tuple(first + chunk + 1 for chunk in range(self.cluster.plan.conditions.chunks))
        root = plain_root_of(str(TWIN) if self.replica.is_twin else self.name, content, shard)
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
                self.has = Version(self.number)
                self.phase = "rest"
            else:
                self.phase = "unpublish"
            self.claimed = None
        elif self.phase == "resume":
            self.phase = "rest" if is_good else "unpublish"
        elif self.phase == "unpublish" and all(o.error is None for o in outcomes.values()):
            self.phase, self._has_failed_to_claim = "publish", False
            self._train()
            if self.step.breaks and not self.is_quiet:
                self._drop_claim()
        elif self.claimed is not None:
            self._has_failed_to_claim = True
            self._drop_claim()
        self.again(self.step.rest_s, self.next_step)

    def _drop_claim(self) -> None:
        """As `mutating` does where it does not come to the publish."""
        self.claimed = None

    def _train(self) -> None:
        for process in self.shards.values():
            process.run(lambda p=process: self._change(p))  # type: ignore[misc]

    def _change(self, process: Process) -> None:
        if process.worker.held is None:
            for chunk in range(len(process.memory)):
                process.write(chunk, -self.chance.randrange(1, 10**9))


class RolloutApp(App):
    """replicate once, then update again and again, and generate with what it has."""

    def __init__(self, cluster: "Cluster", replica: Replica) -> None:
        super().__init__(cluster, replica)
        self.other_tensors = {}

    def plain_step(self) -> Step:
        return Step("update", "latest", rest_s=0.5)

    def take(self, step: Step) -> None:
        may_fetch = self.cluster.plan.conditions.host_copies > 0
        if step.spec == PREFETCHED and not may_fetch and self.chance.random() > VAIN:
            step = replace(step, spec="latest")
        for process in list(self.shards.values()):
            fetches = process.hello.prefetch == "always" or process.worker.prefetch is not None
            if step.spec == PREFETCHED and not fetches and self.chance.random() > VAIN:
                process.wish("latest", ())
        self.call_all(step.verb, step.spec)

    def ended(self, outcomes: Outcomes) -> None:
        self.is_refused = any(o.error is not None and o.error.code == "host-memory-full" for o in outcomes.values())
        if self.succeeded(outcomes):
            self.has = outcomes[0].version
            wish = "latest" if not self.is_settling and self.step.wishes else None
            for process in list(self.shards.values()):
                process.wish(wish, ())
        self.again(max(self.step.rest_s, 0.05), self.next_step)
