"""Which workers the server talks to: one for each shard, and all of a replica agree on how many there are.

The server asks on a worker's hello, so that it hears at once, and again when its session begins: two hellos may have
come before either worker reported. A connection carries one session: what the server said in it may still be on its
way, and must not be heard after something else was made of the worker's next report.
"""

from ...messages import PROTOCOL, Empty, Hello, Refusal, Report
from ...names import NAME_RULE, is_name
from ...version_spec import MAX_FIRST_VERSION, MAX_VERSION_JUMP
from .. import facts
from ..catalog import Model
from ..groups import Replica
from ..membership import Member
from ..receipts import are_equal
from ..state import State

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
    if model is None and len(state.models) >= state.settings.most_models and state.model_to_forget() is None:
        retry_s = _retry_s(state.settings.lease_s) if state.left else 0.0
        return Refusal("refused", f"{len(state.models)} models is the most here", "raise most_models", retry_s=retry_s)
    replica = model.replicas.get(hello.replica) if model is not None else None
    is_other = replica is not None and replica.shards != hello.shards
    if model is not None and replica is not None and is_other and not _may_give_way(state, model, replica, report):
        return _of_another_count(state, replica, hello)
    if member is not None and member.hello.life != hello.life:
        return taken(state, member)
    if report is not None and len(state.members) >= state.settings.most_workers:
        return Refusal("refused", f"{len(state.members)} workers is the most here", "raise most_workers")
    return None


def taken(state: State, member: Member) -> Refusal:
    """Another worker is that shard already. It lives, or has died so lately that nobody can tell."""
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
    read = [each.version for each in (*shown, report.reading, report.across) if each is not None]
    resolved = report.call.resolved if report.call is not None else None
    highest = max([each for each in (*read, report.claim, resolved) if each is not None], default=0)
    if highest <= MAX_FIRST_VERSION:
        return None
    model, newest = state.models.get(hello.model), report.newest
    if newest is None or not are_equal(state.notary.newest(hello.model, newest), report.newest_receipt):
        newest = None
    known = [each for each in (newest, model.newest if model is not None else None) if each is not None]
    if known and highest <= max(known) + MAX_VERSION_JUMP:
        return None
    text = f"{hello.worker} shows version {highest} of {hello.model}, and no number so high was published"
    return Refusal("refused", text, "is this a TensorHub worker?", retry_s=ODD_S)


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
