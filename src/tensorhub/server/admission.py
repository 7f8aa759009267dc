"""Rules: which workers, claims and publishes the server accepts."""

from collections.abc import Sequence
from math import inf

from ..protocol.errors import HIGHER, SPOILED, SPOILED_HINT
from ..protocol.messages import (
    MAX_FIRST_VERSION,
    MAX_VERSION_JUMP,
    PROTOCOL,
    Empty,
    Failure,
    Hello,
    Poisoned,
    Refusal,
    Report,
)
from ..protocol.names import NAME_RULE, ModelName, ReplicaName, Version, era_in, is_name
from ..protocol.status import AnewView
from . import state as facts
from .groups import Replica
from .members import WHOLE, Member
from .selection import Candidate
from .state import State
from .versions import Model, are_equal

# --- Which workers the server talks to: one for each shard, and all of a replica agree on how many there are.
#
# The server asks on a worker's hello, so that it hears at once, and again when its session begins: two hellos may have
# come before either worker reported. A connection carries one session: what the server said in it may still be on its
# way, and must not be heard after something else was made of the worker's next report.


MAX_SHARDS = 4096
AT_ONCE_S = 0.01
ODD_S = 1.0  # a worker whose report had an odd number may be back with its next one


def why_refuse(state: State, hello: Hello, report: Report | None = None) -> Refusal | None:
    """Why the server will not talk to this worker, or None. `report`: the first one of the session that it begins."""
    if hello.protocol != PROTOCOL:
        text = f"this server speaks {PROTOCOL}, the worker speaks {hello.protocol[:40]!r}"
        return Refusal("refused", text, "install the same TensorHub on both sides")
    for what, name in (("model", hello.model), ("replica", hello.replica)):
        if not is_name(name):
            return Refusal("usage", f"{what}={name[:60]!r} is no name", NAME_RULE)
    if not 1 <= hello.shards <= MAX_SHARDS or not 0 <= hello.shard < hello.shards:
        text = f"shard {hello.shard} of {hello.shards}: shards count from 0, up to {MAX_SHARDS} of them"
        return Refusal("usage", text)
    model, member = state.models.get(hello.model), state.members.get(hello.worker)
    if model is None and len(state.models) >= state.settings.max_models and state.model_to_forget() is None:
        retry_s = _retry_s(state.settings.lease_s) if state.empty_models else 0.0
        return Refusal("refused", f"{len(state.models)} models is the most here", "raise max_models", retry_s=retry_s)
    replica = model.replicas.get(hello.replica) if model is not None else None
    is_other = replica is not None and replica.shards != hello.shards
    if model is not None and replica is not None and is_other and not _may_give_way(state, model, replica, report):
        return _of_another_count(state, replica, hello)
    if member is not None and member.hello.life != hello.life:
        return taken(state, member)
    if report is not None and len(state.members) >= state.settings.max_workers:
        return Refusal("refused", f"{len(state.members)} workers is the most here", "raise max_workers")
    return None


def taken(state: State, member: Member) -> Refusal:
    """Another worker is that shard already. It lives, or has died within its lease."""
    text = f"{member.worker} is another live worker, on host {member.hello.host or 'unknown'}"
    if facts.is_here(state, member):
        return Refusal("shard-taken", text, "give each worker its own replica name and shard number")
    left_s = member.lease_end - state.now
    hint = f"if that one has died, its place is free in {left_s:.1f} s"
    return Refusal("shard-taken", text, hint, retry_s=_retry_s(left_s))


def spent(hello: Hello) -> Refusal:
    """The session of this connection has ended. The worker hears all that was said in it, and then begins another."""
    text = f"the session of {hello.worker} has ended: it was not heard in time, or another has its place"
    return Refusal("refused", text, "it connects again by itself", retry_s=AT_ONCE_S)


def why_odd(state: State, hello: Hello, report: Report) -> Refusal | None:
    """A version in the report is higher than any publish was allowed to be. It would use up the model's numbers.

    What a worker shows without a receipt may be as high as a model may begin, or as a publish after the newest may be.
    """
    shown = report.copies if isinstance(report.buffer, Empty) else (report.buffer, *report.copies)
    read = [each.version for each in (*shown, report.reading) if each is not None]
    resolved = report.call.resolved if report.call is not None else None
    highest = max([each for each in (*read, report.claim, resolved) if each is not None], default=0)
    if highest <= MAX_FIRST_VERSION:
        return None
    model, newest = state.models.get(hello.model), report.newest
    if newest is None or not _is_signed(state, hello.model, report):
        newest = None
    known = [each for each in (newest, model.newest if model is not None else None) if each is not None]
    if known and highest <= max(known) + MAX_VERSION_JUMP:
        return None
    text = f"{hello.worker} shows version {highest} of {hello.model}, and no number so high was published"
    return Refusal("refused", text, "is this a TensorHub worker?", retry_s=ODD_S)


def _is_signed(state: State, name: ModelName, report: Report) -> bool:
    receipt = report.newest_receipt
    return are_equal(state.notary.newest(name, report.newest, era_in(receipt)), receipt)


def giving_way(state: State, hello: Hello, report: Report) -> list[Member]:
    """Newcomers to its replica with another number of shards: they go, for this worker lived before the restart."""
    model = state.models.get(hello.model)
    replica = model.replicas.get(hello.replica) if model is not None else None
    if model is None or replica is None or replica.shards == hello.shards:
        return []
    return _members(state, replica) if _may_give_way(state, model, replica, report) else []


def _may_give_way(state: State, model: Model, replica: Replica, report: Report | None) -> bool:
    """A worker that lived before the restart may come after a new one. A hello does not show yet which it is."""
    is_called = model.roll.is_over or not state.is_recovering
    if is_called or (report is not None and not report.session):
        return False
    return not any(member.has_lived_before for member in _members(state, replica))


def _of_another_count(state: State, replica: Replica, hello: Hello) -> Refusal:
    members = _members(state, replica)
    text = f"{hello.worker} has {hello.shards} shards, those of {hello.replica} that live have {replica.shards}"
    if any(facts.is_here(state, member) for member in members):
        return Refusal("layout-mismatch", text, "use one number of shards for a replica, or another replica name")
    left_s = max(member.lease_end for member in members) - state.now
    hint = f"if those have died, the number of shards is free in {left_s:.1f} s"
    return Refusal("layout-mismatch", text, hint, retry_s=_retry_s(left_s))


def _members(state: State, replica: Replica) -> list[Member]:
    found = [state.members.get(worker) for worker in replica.members.values()]
    return [member for member in found if member is not None]


def _retry_s(left_s: float) -> float:
    return max(0.1, min(left_s, 1.0))


# --- Claims: numbers that a trainer will publish, claimed with an unpublish, before the tensors are changed.
#
# A claim is judged before anything is withdrawn: a caller that would get a VersionConflict after a step gets it before.
# The replica's workers remember the claim and repeat it in each report, so it outlives the server. It ends with the
# next call of the replica that ends well, whatever that is; when it is given back; and with the last session of its
# workers.


HINT = "one replica publishes a number: see which other job uses this model name, or publish what next_version() names"


def why_refuse_claim(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Why the replica may not claim the number, or None. All its shards have come, and the roll call is over."""
    taken = why_taken(state, model, replica, version)
    return taken or _why_spoiled(state, replica) or _why_apart(state, replica)


def why_taken(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Another replica has published the number, or may publish it; or a newer version exists."""
    return _why_not_claim(model, replica, version) or conflict_with(state, model, replica, version)


def why_wait(state: State, replica: Replica) -> Failure | None:
    """A reader that is cut off still reads from a shard. Its end tells whether the tensors are the publisher's."""
    for member in _claim_members(state, replica):
        buffer = member.report.buffer
        if isinstance(buffer, Poisoned) and buffer.version is not None:
            return Failure("not-drained", f"version {buffer.version} of {member.worker} still has readers")
    return None


def _why_spoiled(state: State, replica: Replica) -> Failure | None:
    """The publish after the step would be refused."""
    for member in _claim_members(state, replica):
        if isinstance(member.report.buffer, Poisoned):
            return Failure("usage", f"{member.worker} is {SPOILED}", SPOILED_HINT)
    return None


def _why_apart(state: State, replica: Replica) -> Failure | None:
    """An update has succeeded on some shards only: a step would begin on tensors of different versions.

    After a publish that has failed shards may differ too. What they made is of one step all the same.
    """
    buffers = {member.shard: member.content.buffer for member in _claim_members(state, replica)}
    whole = {shard: buffer for shard, buffer in buffers.items() if isinstance(buffer, WHOLE)}
    if len({buffer.version for buffer in whole.values()}) < 2 or all(buffer.published for buffer in whole.values()):
        return None
    held = ", ".join(f"shard {shard} holds {buffer.version}" for shard, buffer in sorted(whole.items()))
    hint = "update() or replicate() until that succeeds on all shards"
    return Failure("group-mismatch", f"the shards of {replica.name} are not of one version: {held}", hint)


def conflict_with(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Another replica has claimed that number, and not before this one.

    Of two claims the later one counts: it was granted when the session that had the other was over.
    """
    mine = claimed_by(state, replica).get(version, 0)
    for name, other in model.replicas.items():
        if name != replica.name and claimed_by(state, other).get(version, -1) >= mine:
            text = f"version {version} of {model.name} is claimed by {name}, which is between its unpublish and publish"
            return Failure("version-conflict", text, HINT)
    return None


def _why_not_claim(model: Model, replica: Replica, version: Version) -> Failure | None:
    name, record = f"version {version} of {model.name}", model.versions.get(version)
    if model.newest is not None and version <= model.newest:
        text = f"{name} is not higher than the newest, {model.newest}: nothing was changed"
        return Failure("version-conflict", text, f"versions only rise: {HIGHER}")
    if (far := model.too_far(version)) is not None:
        return Failure(far.code, f"{far.message}: nothing was changed", far.hint)
    others: list[ReplicaName] = []
    if record is not None:
        others = [*record.claims, *[worker.replica for held in record.holders.values() for worker in held]]
    for other in others:
        if other != replica.name:
            return Failure("version-conflict", f"{name} is being published by {other}: nothing was changed", HINT)
    return None


def claimed_by(state: State, replica: Replica) -> dict[Version, int]:
    """What the replica has claimed: by a call that is under way or has just ended well, or as its workers remember.

    Of each the number of the orders that granted it; they may be on their way yet.
    """
    found: dict[Version, int] = {}
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is None:
            continue
        report, reported = member.report, member.report.call
        granted_in = min(report.claimed_in, report.seen)
        if report.claim is not None:
            found[report.claim] = max(granted_in, found.get(report.claim, 0))
        call = replica.find(reported.number) if reported is not None else None
        is_granted = call is not None and call.error is None and call.version is not None
        if call is not None and call.claim is not None and is_granted:
            is_heard = reported is not None and reported.resolved is not None
            found[call.claim] = max(granted_in if is_heard else state.numbers.last, found.get(call.claim, 0))
    return found


def _claim_members(state: State, replica: Replica) -> list[Member]:
    return [state.members[worker] for worker in replica.members.values() if worker in state.members]


# --- A model is begun anew: its numbers are forgotten, if no worker holds any of its versions.
#
# What the workers that live have heard of numbers is void, and they are told so by a higher *era*: the receipt for the
# newest number says it. They show it to the next life of the server.


MAX_NAMED = 8  # workers, in an error


def begin_anew(state: State, name: ModelName, *, is_asked_again: bool) -> AnewView:
    """Forget the numbers of the model, or say why not. `is_asked_again`: that was done, and not all had heard of it."""
    model = state.models.get(name)
    if model is None:
        hint = f"there are: {', '.join(sorted(state.models)[:MAX_NAMED]) or 'none yet'}"
        return AnewView(failure=Failure("version-unavailable", f"no model {name!r} is known", hint))
    if not is_asked_again:
        if state.is_recovering or not model.roll.is_over:
            return AnewView(awaited="the reference server has restarted, and listens who is there")
        if (failure := _why_not_anew(state, model)) is not None:
            return AnewView(failure=failure)
        forgotten = model.newest
        model.begin_anew(model.era + 1)
        state.mark_everyone_dirty(model)
        if forgotten is not None:
            state.said.append(f"{name} is begun anew: its numbers up to {forgotten} are forgotten")
    members = [state.members.get(w) for replica in model.replicas.values() for w in replica.members.values()]
    late = [str(m.worker) for m in members if m is not None and era_in(m.report.newest_receipt) < model.era]
    return AnewView(is_begun=True, awaited=f"not heard of it yet: {_some(late)}" if late else "")


def _why_not_anew(state: State, model: Model) -> Failure | None:
    holders = {str(w): None for record in model.versions.values() for held in record.holders.values() for w in held}
    if holders:
        newest = f", its newest is {model.newest}" if model.newest is not None else ""
        text = f"versions of {model.name} are held{newest}: by {_some(sorted(holders))}"
        hint = f"close them first; a worker that was killed counts for its lease of {state.settings.lease_s:g} s"
        return Failure("version-conflict", text, hint)
    for replica in model.replicas.values():
        claimed = max(claimed_by(state, replica), default=None)
        if claimed is not None:
            text = f"version {claimed} of {model.name} is about to be published by {replica.name}"
            return Failure("version-conflict", text, "close it first")
    return None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


# --- Witnesses: a worker gets a read, a publish or a claim only when another worker knows of it.
#
# A restarted server would know of it from no report.
#
# A worker that has lived before and is *off the roll*: a former life may have let others read from
# it of which no other worker has heard (see `sessions`).


LATE_REPORTS = 3  # times the pause between two reports: a worker that is asked answers at once
MAX_ASKED = 16  # workers, of which one should be there; the others' usual reports will do too


def is_asked(model: Model, member: Member) -> bool:
    """A worker waits for it to show the roster."""
    return member.asked > model.roll.upto


def may_have_unknown_readers(state: State, member: Member) -> bool:
    """A former life may have granted reads from it of which no other worker has heard."""
    return member.is_off_roll and state.is_recovering


def is_whole(state: State, model: Model, replica: Replica) -> bool:
    """All shards of the replica have said what a former life may have answered them."""
    return model.roll.is_over and (not state.is_recovering or len(replica.members) == replica.shards)


def why_unwitnessed(model: Model, replica: Replica) -> Failure | None:
    """Why nothing can be promised to the replica yet that all others have to respect."""
    for worker in replica.members.values():
        if worker in model.roll.unwitnessed:
            return Failure("unavailable", f"{worker} has just come, and no other worker has heard of it yet", "retry")
    return None


def seek_witness(state: State, model: Model, member: Member) -> None:
    """A worker without a witness asks the one that came last before it, so that each asks another one.

    One that reports and does not say what it was asked, though that takes a round trip, is passed over for the next. If
    all go on like that for a lease, no worker is there that would know of the others, as when the first one came.
    """
    roll = model.roll
    if not roll.is_over or member.worker not in roll.unwitnessed:
        return
    if all(_asked_for_s(state, model, state.known(each)) >= state.settings.lease_s for each in roll.witnessed):
        for worker in roll.witness(next(iter(roll.unwitnessed.values()))):  # the oldest
            state.mark_dirty(worker)
    tried = 0
    for worker in reversed(roll.witnessed):
        other = state.known(worker)
        if _asked_for_s(state, model, other) >= LATE_REPORTS * state.report_s:
            continue
        tried += 1
        if _ask(state, member, other) or tried == MAX_ASKED:
            return


def _asked_for_s(state: State, model: Model, other: Member) -> float:
    """For how long it has been asked for what it does not say."""
    return state.now - other.asked_since if is_asked(model, other) else -inf


def _ask(state: State, member: Member, other: Member) -> bool:
    """Have the other one say that it has heard of the member. False: it would not."""
    if (
        other is member
        or not facts.is_here(state, other)
        or other.report.closing
        or may_have_unknown_readers(state, other)
    ):
        return False
    if other.asked < member.session:
        since = other.asked_since if is_asked(state.models[member.hello.model], other) else state.now
        other.asked, other.asked_since = member.session, since
        state.mark_dirty(other.worker)
    return True


def allowed(state: State, model: Model, reader: Member, found: list[Candidate]) -> list[Candidate]:
    """The candidates that the reader may be given."""
    if model.roll.is_over:
        return found if reader.worker in model.roll.witnessed else []
    return [candidate for candidate in found if _has_heard_us(state.known(candidate.worker))]


def _has_heard_us(member: Member) -> bool:
    return member.report.session == member.session


def wait_for(state: State, model: Model, reader: Member, found: list[Candidate], best: Candidate) -> None:
    """None of these may be given yet: have it decided again as soon as one may."""
    if not model.roll.is_over:
        for candidate in found:
            state.known(candidate.worker).awaited_by[reader.worker] = None
    elif best.worker in model.roll.witnessed:
        _ask(state, reader, state.known(best.worker))


def recovering(state: State) -> Failure:
    """What a call waits for in the first lease after a restart."""
    left_s = state.recovered_at - state.now
    return Failure("unavailable", f"the reference server has restarted and listens for {left_s:.1f} s more", "retry")
