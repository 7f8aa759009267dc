"""A history before it happens, as data: the cluster, its programs, its misfortunes, and how hostile the network is.

A seed becomes a plan (`draw`), a plan becomes a history (`cluster`). What a plan leaves open (how long this one message
takes) is drawn from streams named by the plan's seed and by who needs it. So a plan from which a misfortune was taken
is the same history but for what follows from that misfortune. `plantext` writes a plan for people to read.
"""

from dataclasses import dataclass, replace
from math import inf

from tensorhub.protocol.settings import Settings

MAX_LEASES = 2  # a chunk takes no longer: transports end what is so slow
KINDS = (
    "crash",  # processes are killed; their program starts them again after a while
    "gone",  # killed, and nobody starts them again
    "mute",  # what they say to the server is lost
    "deaf",  # what the server says to them is lost
    "cut",  # both
    "unplug",  # reads between them and `other` (nobody named: everybody) fail
    "disconnect",  # their connection to the server is lost, and they need a while for a new one
    "pause",  # they stand still: nothing is handled; then all of it at once
    "slow",  # what is read from them takes `value` times longer
    "stutter",  # they send nothing for `value` of the time
    "pause-server",
    "restart-server",
)


@dataclass(frozen=True, order=True)
class Misfortune:
    """Something bad at a time. `target` is a worker, a host or a site; `length_s` may be for ever."""

    at_s: float
    kind: str
    target: str = ""
    length_s: float = 0.0
    other: str = ""
    value: float = 0.0

    @property
    def stays(self) -> bool:
        """It outlasts the storm."""
        return self.length_s == inf


@dataclass(frozen=True)
class Step:
    """One call of a program on all its shards, and what it does besides. Shards are numbers, -1 is none of them."""

    verb: str = "update"
    spec: int | str = "latest"
    timeout_s: float = 0.0  # 0: as long as anybody could need
    rest_s: float = 0.3  # after the call has ended
    skew_s: float = 0.0  # the shards call within this time
    back: int = 0  # a trainer publishes a number that is lower by this
    wishes: bool = False  # a rollout asks for a copy ahead; a trainer pins what it published last
    closer: int = -1  # this shard closes after the call
    close_s: float = 0.0
    stray: int = -1  # this shard makes another call
    cancel_s: float = 0.0  # 0: nobody gives up; else the shard `canceller` does after so long
    canceller: int = -1
    misses: int = -1  # this shard fails before it makes the call: its tensors are torn, say
    registers: str = ""  # before the call: "same" or "other" tensors
    waits: bool = False  # a replicate of a number: until that is published
    claims: bool = False  # a trainer takes its version back as `mutating` does: it claims the number that comes next
    breaks: bool = False  # and its step raises, so that nothing is published under that number


@dataclass(frozen=True)
class Replica:
    """One replica and its program. It is over when its steps are; then it makes the plain ones for ever."""

    model: str
    name: str
    is_trainer: bool = False
    site: str = "site-0"
    host: str = "host-0"
    reliable: bool = True
    is_in_step: bool = False  # it calls at whole seconds
    is_hasty: bool = False  # after a call that has failed it makes the next one at once
    steps: tuple[Step, ...] = ()
    starts_s: float = 0.0  # it comes only then
    resumes: bool = False  # a trainer gets the latest version back after a process has died, and as a mistake
    is_twin: bool = False  # what a trainer publishes follows from the number alone
    cut: str = ""  # "a" or "b": its tensors have boxes, and are cut in that way


@dataclass(frozen=True)
class Fate:
    """What becomes of one message to or from a process: after which delays it arrives, if at all."""

    process: str
    direction: str  # "up" to the server, "down" from it
    number: int
    delays: tuple[float, ...]


@dataclass(frozen=True)
class Conditions:
    """Shape and climate. Probabilities are for one message or one chunk, as named."""

    shards: int = 1
    chunks: int = 3
    storm_s: float = 10.0
    calm_s: float = 36.0
    chunk_s: float = 0.03  # time of one chunk from an idle source
    delay_s: float = 0.01  # typical, of a control message
    loss: float = 0.0  # per message
    duplication: float = 0.0  # per message
    long_delay: float = 0.0  # per message: it takes up to two leases
    read_error: float = 0.0  # per chunk
    corruption: float = 0.0  # per chunk, on the wire
    copy_error: float = 0.0  # per copy to or from host memory
    stuck_stop: float = 0.0  # per read that is told to stop: it takes up to a lease
    is_one_sided: bool = False  # reads like RDMA: the source does not notice them, and cannot refuse
    verifies: bool = True  # readers compare digests; without, only tickets and leases protect
    is_shared: bool = False  # readers of one source share its uplink
    uplink: float = 0.0  # what a chunk that leaves a site takes longer for each other that does
    drift: float = 0.0  # clocks run faster or slower by up to this share
    clock_goes_back: bool = False  # a restarted server may begin with lower numbers than the one before it
    codec: bool = False  # messages go through the wire's encoding
    host_copies: int = 2  # of one worker, at most
    retain: int = 1  # newest versions
    prefetch: str = "seed"  # what rollouts were opened with
    maps: bool = False  # workers of one host say that they can map each other's host copies
    unmappable: float = 0.0  # per host copy that is to be shared: it cannot be mapped, whatever was said
    shards_b: int = 0  # of those that are cut in the way "b"; 0: as many as the others

    def shards_in(self, cut: str) -> int:
        """Of how many shards a replica is that is cut so."""
        return self.shards_b if cut == "b" and self.shards_b else self.shards


@dataclass(frozen=True)
class Plan:
    """One history before it happens."""

    seed: str
    settings: Settings
    conditions: Conditions
    replicas: tuple[Replica, ...]
    misfortunes: tuple[Misfortune, ...] = ()
    fates: tuple[Fate, ...] | None = None  # None: drawn for each message; else these, and all others go well

    @property
    def models(self) -> tuple[str, ...]:
        """In the order in which they are named."""
        return tuple(dict.fromkeys(replica.model for replica in self.replicas))

    @property
    def workers(self) -> int:
        """How many there are, while all live."""
        return sum(self.conditions.shards_in(replica.cut) for replica in self.replicas)

    @property
    def ends_s(self) -> float:
        return self.conditions.storm_s + self.conditions.calm_s

    @property
    def is_fair(self) -> bool:
        """Nothing bad happens at all."""
        c = self.conditions
        rates = (c.loss, c.duplication, c.long_delay, c.read_error, c.corruption, c.copy_error, c.stuck_stop)
        return not any(rates) and not self.misfortunes and not self.fates

    @property
    def slowest_read_s(self) -> float:
        """As long as a whole version may take across an uplink that all shards share, from whoever stays slow.

        Whoever sends nothing for nine tenths of the time is as slow as one that takes ten times as long. Where readers
        of one source share its uplink, all of them may share that of a slow one: nobody knows yet that it is slow.
        """
        c, sites = self.conditions, dict.fromkeys(replica.site for replica in self.replicas)
        streams = len(sites) * sum(map(c.shards_in, dict.fromkeys(replica.cut for replica in self.replicas)))
        staying = [bad for bad in self.misfortunes if bad.stays]
        slow = max([1.0, *(bad.value for bad in staying if bad.kind == "slow")])
        slow = max([slow, *(1 / (1 - bad.value) for bad in staying if bad.kind == "stutter")])
        one_s = c.chunk_s * slow * (1 + c.uplink * streams)
        if c.is_shared and slow > 1:
            one_s = max(one_s, min(one_s * len(self.replicas), MAX_LEASES * self.settings.lease_s))
        return c.chunks * one_s

    def with_conditions(self, **changes: object) -> "Plan":
        """The same plan under other conditions."""
        return replace(self, conditions=replace(self.conditions, **changes))  # type: ignore[arg-type]
