"""The promises, judged by what is in everybody's memory and by what every caller was told.

Nothing here asks the core's tables whether the core was right. What a machine *offers* (a buffer that it calls whole)
counts as usable only if its bytes are those that were published.
"""

from math import inf
from typing import TYPE_CHECKING

from tensorhub.protocol.errors import InvariantViolation
from tensorhub.protocol.messages import Failure, Grant, Holding, Vacated, Withdrawing
from tensorhub.protocol.names import Version

from .actor import Actor, content

if TYPE_CHECKING:
    from .small import Small

NEVER = ("usage", "version-conflict", "layout-mismatch", "group-mismatch", "refused", "not-drained", "corrupt-transfer")


class Broken(AssertionError):
    """A promise was broken."""


def _broken(small: "Small", promise: str, how: str) -> None:
    if promise not in small.shape.excused:
        raise Broken(f"{promise}: {how}")


# --- after every event of a machine -----------------------------------------------------------------------------------


def check(small: "Small", actor: Actor) -> None:
    """What a machine says of itself is true of its memory."""
    if not actor.is_alive:
        return
    try:
        actor.worker.check_invariants()
    except InvariantViolation as error:
        raise Broken(f"invariant: {error}") from error
    buffer = actor.worker.buffer
    if isinstance(buffer, Holding | Withdrawing | Vacated) and actor.memory != content(buffer.version):
        raise Broken(f"G1 immutable: {actor.name} is {buffer}, and its memory is {actor.memory}")
    for version, place in actor.copies.items():
        if actor.worker.state.copies.whole(version) is not None and place != content(version):
            raise Broken(f"G1 immutable: the host copy of {version} at {actor.name} is {place}")


def accepted(actor: Actor, grant: Grant, chunk: int, value: int) -> None:
    """G4: a chunk that was accepted is the chunk of that version."""
    if value != content(grant.version)[chunk]:
        raise Broken(f"G4 no torn read: {actor.name} accepted {value} as chunk {chunk} of version {grant.version}")


# --- after every action -----------------------------------------------------------------------------------------------


def usable(actor: Actor) -> dict[int, None]:
    """The versions that others could read here, now or after it is asked for them: offered, and true."""
    if not actor.is_alive:
        return {}
    found: dict[int, None] = {}
    buffer = actor.worker.buffer
    if isinstance(buffer, Holding | Withdrawing | Vacated) and actor.memory == content(buffer.version):
        found[int(buffer.version)] = None
    for version, place in actor.copies.items():
        if actor.worker.state.copies.whole(version) is not None and place == content(version):
            found[int(version)] = None
    return found


def usable_outside(small: "Small") -> dict[int, None]:
    """The versions that somebody other than the trainer could serve."""
    found: dict[int, None] = {}
    for actor in small.actors.values():
        if actor.name != "trainer":
            found.update(usable(actor))
    return found


def after(small: "Small", had: dict[int, None], action: tuple[str, ...]) -> None:
    """G6: what was whole outside the trainer stays so, whatever becomes of the trainer.

    Once another has crashed or is cut off, nobody knows of that for a lease; then it is enough that somebody has
    something. And a version that only such as nobody hears have is lost.
    """
    is_misfortune = action[0] in ("crashes", "is cut off")
    is_excused = is_misfortune or small.has_lost_a_rollout
    have = usable_outside(small)
    everywhere = {version: None for actor in small.actors.values() for version in usable(actor)}
    kept = everywhere if is_excused else have
    if had and not kept and not is_misfortune and small.shape.copies:
        _broken(small, "G6 retention", f"{list(had)} was whole outside the trainer, now nothing is")
    note_lost(small)
    small.has_lost_a_rollout |= is_misfortune and action[-1] != "trainer"


def note_lost(small: "Small") -> None:
    """Versions that nobody has, or only one whom the server does not hear."""
    heard = [actor for actor in small.actors.values() if actor.name != small.unheard]
    known = {version: None for actor in heard for version in usable(actor)}
    for version in range(1, small.published + 1):
        if version not in known and version not in small.lost:
            small.lost = sorted([*small.lost, version])


# --- calls ------------------------------------------------------------------------------------------------------------


def judge_fill(small: "Small", actor: Actor, verb: str, version: Version | None, floor: int) -> None:
    """G3, G8: the caller gets the version that it was promised, and it is all there."""
    if version is None or actor.memory != content(version):
        raise Broken(f"G8 never run early: {verb} of {actor.name} gave {version}, its memory is {actor.memory}")
    if actor.has is not None and version < actor.has:
        raise Broken(f"G3 monotonic: {verb} of {actor.name} gave {version} after {actor.has}")
    if version < floor and floor not in small.lost:
        _broken(small, "G3 latest", f"{verb} of {actor.name} gave {version} though {floor} had been published")


def judge_error(small: "Small", actor: Actor, verb: str, error: Failure) -> None:
    """Every error is justified: there are mistakes that nobody makes here, and no other without a misfortune."""
    if error.code in NEVER:
        _broken(small, "errors", f"{verb} of {actor.name} raised {error.code}, a mistake of nobody: {error.message}")
    if error.code == "host-memory-full" and not small.shape.copies:
        return  # it has no room for what it wants to leave, and when that was decided it was the last holder
    if error.code == "deadline-exceeded" and small.shape.patience_s < inf:
        return
    if small.faults == small.budget:
        _broken(small, "errors", f"{verb} of {actor.name} raised {error.code} in fair weather: {error.message}")


def at_rest(small: "Small") -> None:
    """Nothing can happen any more but that time passes, and that changes nothing: everybody has got what can be had."""
    everywhere = [version for actor in small.actors.values() for version in usable(actor)]
    newest = max(everywhere, default=None)
    for actor in small.actors.values():
        if not actor.is_alive or not actor.verb:
            continue
        if actor.name == "trainer":
            _broken(small, "progress", f"{actor.verb} of the trainer waits for ever")
        if newest is not None and newest >= (actor.has or 0):
            _broken(
                small, "progress", f"{actor.verb} of {actor.name} waits for ever, though somebody has version {newest}"
            )
