"""What the rules decide: each a value that `apply` carries out, before the rule that decided it goes on."""

from dataclasses import dataclass

from ..protocol.messages import Failure
from ..protocol.names import Number, Version, WorkerId
from .groups import GroupCall, Replica
from .members import Cut, Line, Member, OpenRead, Tier
from .versions import Model, VersionRecord


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Decide for this member again at that time, although nothing may have been heard."""

    member: Member
    at: float


# --- reads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeBack:
    """The read is void: its reader gets another source, or none."""

    read: OpenRead


@dataclass(frozen=True, slots=True)
class Give:
    """Let the reader read the version from that source, for that reason."""

    reader: Member
    record: VersionRecord
    source: WorkerId
    reason: str
    from_host: bool
    to_host: bool
    instead_of: WorkerId | None = None  # a slow source that is left for its own source
    must_beat: float = 0.0  # where this read gets so much, the slow source was at fault
    is_stuck: bool = False  # as the read that this one replaces was
    counted_as: str = ""  # among the counters, beside "grants"
    shares: bool = False  # the memory of a host copy, rather than to make another
    part: Line | None = None  # of the source: this is one part of a read across


@dataclass(frozen=True, slots=True)
class Cross:
    """Let the reader read across, out of that cut. Its parts are given one by one."""

    reader: Member
    version: Version
    to_host: bool
    cut: Cut


@dataclass(frozen=True, slots=True)
class LookedForBetter:
    """A better source for this read was looked for."""

    read: OpenRead


@dataclass(frozen=True, slots=True)
class Leave:
    """The reader leaves the source of this read, which is too slow."""

    reader: Member
    read: OpenRead
    may_move_at: float  # again


@dataclass(frozen=True, slots=True)
class StayFor:
    """There is nowhere to go: the reader does not look again before that time."""

    reader: Member
    until: float


@dataclass(frozen=True, slots=True)
class CallStuck:
    """The read is slow and no other source would help: those who read behind it need not wait. Or that is over."""

    read: OpenRead
    is_stuck: bool


@dataclass(frozen=True, slots=True)
class CallSlow:
    """That source is chosen after others until then."""

    source: Member
    until: float


@dataclass(frozen=True, slots=True)
class ForgetCapacity:
    """The source was thought to have more to give, and was tried in vain."""

    source: Member


@dataclass(frozen=True, slots=True)
class SettlePlaces:
    """It is known now who of the two that read from one source gets more from it."""

    read: OpenRead


@dataclass(frozen=True, slots=True)
class GiveWay:
    """This member is to read behind that one, which has left it for its own source. None: no more."""

    member: Member
    to: WorkerId | None


@dataclass(frozen=True, slots=True)
class NoteUsualRates:
    """What reads of the version get now, by distance."""

    record: VersionRecord
    rates: dict[Tier, float | None]
    until: float  # then they are worked out anew


# --- witnesses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Witness:
    """Sessions up to that one are known to others."""

    model: Model
    upto: Number


@dataclass(frozen=True, slots=True)
class AskToWitness:
    """Have the member say that it has heard of that session."""

    member: Member
    session: Number
    since: float  # when somebody began to wait for that


@dataclass(frozen=True, slots=True)
class AwaitWord:
    """Decide for the reader again when this member has heard of its session."""

    member: Member
    reader: WorkerId


# --- group calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Those who were put at the position of this call are in it: others have said that they still are."""

    replica: Replica
    call: GroupCall


@dataclass(frozen=True, slots=True)
class Wait:
    """The call waits for this. None: for nothing more."""

    call: GroupCall
    waiting: Failure | None


@dataclass(frozen=True, slots=True)
class Fail:
    """The call ends like that on all shards."""

    call: GroupCall
    failure: Failure


@dataclass(frozen=True, slots=True)
class Resolve:
    """The call is about that version."""

    call: GroupCall
    version: Version


@dataclass(frozen=True, slots=True)
class AcceptPublish:
    """The replica's content is to become that version."""

    model: Model
    replica: Replica
    call: GroupCall
    version: Version


@dataclass(frozen=True, slots=True)
class Promise:
    """The replica is to get the version."""

    model: Model
    replica: Replica
    version: Version


@dataclass(frozen=True, slots=True)
class Finish:
    """The call has ended well on all shards."""

    model: Model
    replica: Replica
    call: GroupCall


Decision = (
    LookAgain
    | TakeBack
    | Give
    | Cross
    | LookedForBetter
    | Leave
    | StayFor
    | CallStuck
    | CallSlow
    | ForgetCapacity
    | SettlePlaces
    | GiveWay
    | NoteUsualRates
    | Witness
    | AskToWitness
    | AwaitWord
    | Admit
    | Wait
    | Fail
    | Resolve
    | AcceptPublish
    | Promise
    | Finish
)
