"""Rules: which workers the server accepts, and which replica may publish."""

from collections.abc import Sequence

from ..protocol import events
from ..protocol.errors import HIGHER, SPOILED, SPOILED_HINT, shortened
from ..protocol.messages import (
    MAX_FIRST_VERSION,
    MAX_WORDS,
    PROTOCOL,
    Empty,
    Failure,
    Hello,
    Poisoned,
    Refusal,
    Report,
)
from ..protocol.names import NAME_RULE, ModelName, Number, Version, is_name
from ..protocol.status import ForgetView
from . import state as facts
from .groups import Replica
from .journal import Anew, Writes
from .members import WHOLE, Member, name_of
from .state import State
from .versions import Model, Writer

# --- Which workers the server talks to: one for each shard, and all of a replica agree on how many there are.
#
# The server asks on a worker's hello, so that it hears at once, and again when its session begins: two hellos may have
# come before either worker reported. A connection carries one session: what the server said in it may still be on its
# way, and must not be heard after something else was made of the worker's next report.


MAX_SHARDS = 4096
AT_ONCE_S = 0.01
MAX_REFUSED = 1_000  # workers of which it is known why they were refused last
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


def note_refusal(state: State, hello: Hello | None, refusal: Refusal) -> None:
    """The server refuses that worker. A worker that comes again at once, for the same reason, makes one event."""
    state.counters["refusals"] += 1
    worker = hello.worker if hello is not None and is_name(hello.model) and is_name(hello.replica) else None
    is_again = state.refused.pop(worker, None) == refusal.code
    state.refused[worker] = refusal.code
    if len(state.refused) > MAX_REFUSED:
        del state.refused[next(iter(state.refused))]
    if is_again or refusal.retry_s == AT_ONCE_S:
        return
    why = shortened(refusal.message, MAX_WORDS)
    state.events.append(events.Refused(**name_of(worker), why=why) if worker is not None else events.Refused(why=why))


def spent(hello: Hello) -> Refusal:
    """The session of this connection has ended. The worker hears all that was said in it, and then begins another."""
    text = f"the session of {hello.worker} has ended: it was not heard in time, or another has its place"
    return Refusal("refused", text, "it connects again by itself", retry_s=AT_ONCE_S)


def why_odd(hello: Hello, report: Report, *, is_ours: bool) -> Refusal | None:
    """A version in the report is higher than any publish was allowed to be. It would use up the model's numbers.

    A model begins at most at `MAX_FIRST_VERSION`, and rises by at most `MAX_VERSION_JUMP` with a publish.
    """
    if not is_ours:
        text = f"{hello.worker} shows a number that no reference server can have given out"
        return Refusal("refused", text, "is this a TensorHub worker?", retry_s=ODD_S)
    shown = report.copies if isinstance(report.buffer, Empty) else (report.buffer, *report.copies)
    read = [each.version for each in (*shown, report.reading) if each is not None]
    resolved = report.call.resolved if report.call is not None else None
    come = report.step.version if report.step is not None else None
    highest = max([each for each in (*read, report.newest, resolved, come) if each is not None], default=0)
    if highest <= 2 * MAX_FIRST_VERSION:
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
    if not model.is_listening or (report is not None and not report.session):
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


# --- The writer of a model: the one replica that may publish.
#
# A replica becomes the writer with its first publish, or with its first claim: an unpublish that names the number to be
# published next. So a caller that would get a VersionConflict after a step gets it before, and nothing is withdrawn. It
# stays the writer until all its workers are closing or gone. Its workers are told a number, which they repeat in each
# report: so a server that has no journal finds the writer again.


HINT = "one replica at a time publishes a model: see which other job uses this model name"


def writer_of(state: State, model: Model) -> Replica | None:
    """The replica that is the writer now; None if there is none."""
    replica = model.replicas.get(model.writer.replica) if model.writer is not None else None
    members = [state.members[w] for w in replica.members.values() if w in state.members] if replica is not None else []
    return replica if any(not member.report.closing for member in members) else None


def make_writer(state: State, model: Model, replica: Replica) -> Number:
    """The replica is the writer from now on, if it was not. Returns the number of its lease."""
    if model.writer is None or model.writer.replica != replica.name:
        former = model.writer.replica if model.writer is not None else ""
        state.events.append(events.WriterChanged(model=model.name, replica=replica.name, former=former))
        model.writer = Writer(replica.name, state.next_number(), state.now)
        state.journal.append(Writes(model.name, replica.name, model.writer.number))
    return model.writer.number


def note_writer(state: State, model: Model, replica: Replica, report: Report) -> None:
    """One of its workers says that it is the writer. A server before this one has made it that."""
    if (
        not model.is_listening
        or report.writes <= (model.writer.number if model.writer is not None else 0)
        or report.closing
    ):
        return
    is_same = model.writer is not None and model.writer.replica == replica.name
    since = model.writer.since if is_same and model.writer is not None else state.now
    model.writer = Writer(replica.name, report.writes, since)


def why_not_writer(state: State, model: Model, replica: Replica) -> Failure | None:
    """Another replica is the writer."""
    other = writer_of(state, model)
    if other is None or other is replica or model.writer is None:
        return None
    members = [state.members[worker] for worker in other.members.values() if worker in state.members]
    text = f"{other.name} has been the writer of {model.name} for {state.now - model.writer.since:.0f} s"
    if any(facts.is_here(state, member) for member in members):
        return Failure(
            "version-conflict", f"{text}, and {replica.name} is not", f"{HINT}; its place is free when it closes"
        )
    left_s = max(member.lease_end for member in members) - state.now
    hint = f"its workers are silent: if they have died, its place is free in {left_s:.1f} s"
    return Failure("version-conflict", f"{text}, and {replica.name} is not", hint)


def why_refuse_claim(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Why the replica may not claim the number, or None. All its shards have come, and the model does not listen."""
    taken = why_not_writer(state, model, replica) or _why_too_low(model, version)
    return taken or _why_spoiled(state, replica) or _why_apart(state, replica)


def why_wait(state: State, replica: Replica) -> Failure | None:
    """A reader that is cut off still reads from a shard. Its end tells whether the tensors are the publisher's."""
    for member in _members(state, replica):
        buffer = member.report.buffer
        if isinstance(buffer, Poisoned) and buffer.version is not None:
            return Failure("not-drained", f"version {buffer.version} of {member.worker} still has readers")
    return None


def _why_too_low(model: Model, version: Version) -> Failure | None:
    if model.newest is not None and version <= model.newest:
        text = f"version {version} of {model.name} is not higher than the newest, {model.newest}: nothing was changed"
        return Failure("version-conflict", text, f"versions only rise: {HIGHER}")
    if (far := model.too_far(version)) is not None:
        return Failure(far.code, f"{far.message}: nothing was changed", far.hint)
    return None


def _why_spoiled(state: State, replica: Replica) -> Failure | None:
    """The publish after the step would be refused."""
    for member in _members(state, replica):
        if isinstance(member.report.buffer, Poisoned):
            return Failure("usage", f"{member.worker} is {SPOILED}", SPOILED_HINT)
    return None


def _why_apart(state: State, replica: Replica) -> Failure | None:
    """An update has succeeded on some shards only: a step would begin on tensors of different versions.

    After a publish that has failed shards may differ too. What they made is of one step all the same.
    """
    buffers = {member.shard: member.content.buffer for member in _members(state, replica)}
    whole = {shard: buffer for shard, buffer in buffers.items() if isinstance(buffer, WHOLE)}
    if len({buffer.version for buffer in whole.values()}) < 2 or all(buffer.published for buffer in whole.values()):
        return None
    held = ", ".join(f"shard {shard} holds {buffer.version}" for shard, buffer in sorted(whole.items()))
    hint = "update() or replicate() until that succeeds on all shards"
    return Failure("group-mismatch", f"the shards of {replica.name} are not of one version: {held}", hint)


# --- A model is begun anew: its numbers are forgotten, if no worker holds any of its versions.


MAX_NAMED = 8  # workers, in an error


def forget_numbers(state: State, name: ModelName) -> ForgetView:
    """Forget the numbers of the model, or say why not."""
    model = state.models.get(name)
    if state.is_untold or (model is not None and model.is_listening):
        return ForgetView(awaited="the reference server has restarted, and listens who is there")
    if model is None:
        hint = f"there are: {', '.join(sorted(state.models)[:MAX_NAMED]) or 'none yet'}"
        return ForgetView(failure=Failure("version-unavailable", f"no model {name!r} is known", hint))
    if (failure := _why_not_anew(state, model)) is not None:
        return ForgetView(failure=failure)
    forgotten = model.newest
    model.forget_numbers(state.next_number())
    state.journal.append(Anew(name, model.began))
    state.mark_everyone_dirty(model)
    if forgotten is not None:
        text = f"{name} is begun anew: its numbers up to {forgotten} are forgotten"
        state.events.append(events.Warned(model=name, what=text))
    return ForgetView(is_begun=True)


def _why_not_anew(state: State, model: Model) -> Failure | None:
    holders = {str(w): None for record in model.versions.values() for held in record.holders.values() for w in held}
    if holders:
        newest = f", its newest is {model.newest}" if model.newest is not None else ""
        text = f"versions of {model.name} are held{newest}: by {_some(sorted(holders))}"
        hint = f"close them first; a worker that was killed counts for its lease of {state.settings.lease_s:g} s"
        return Failure("version-conflict", text, hint)
    writer = writer_of(state, model)
    if writer is not None:
        return Failure("version-conflict", f"{writer.name} is the writer of {model.name}", "close it first")
    return None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def recovering(state: State) -> Failure:
    """What a call waits for in the first lease after a restart."""
    left_s = state.recovered_at - state.now
    return Failure("unavailable", f"the reference server has restarted and listens for {left_s:.1f} s at most", "retry")
