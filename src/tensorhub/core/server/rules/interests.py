"""What a member waits for, as things are: what has to change elsewhere before there is something new for it.

What it hears of its own its own report leads to. What becomes of its source, of who reads from it, and of its replica
leads to it anyway.
"""

from ...messages import Withdrawing
from ..catalog import Model
from ..groups import Replica
from ..membership import Member
from ..state import State
from ..watches import ARRIVALS, NEWS, SERVICE, Topic, loss_of, references_of, sources_of
from . import crossing, grants, retention
from .wanted import Wanted


def interests_of(
    state: State, model: Model, replica: Replica, member: Member, wanted: Wanted | None
) -> tuple[Topic, ...]:
    """The topics that the member waits for. `wanted` is what it should be reading."""
    line, content, call = member.line, member.content, replica.call
    found: list[Topic] = []
    if wanted is not None and grants.is_looking(state, member, wanted):
        found.append(sources_of(wanted.version, line))
        if crossing.can_cross(model.look_up(wanted.version), line):
            found += [sources_of(wanted.version, each) for cut in model.cuts for each in cut]
    is_leaving = isinstance(content.buffer, Withdrawing) and not member.is_drained
    if isinstance(content.buffer, Withdrawing) and is_leaving:
        found.append(references_of(content.buffer.version, line))
    if content.copies:
        found += [references_of(copy.version, content.line_of(copy.version, is_copy=True)) for copy in content.copies]
    if line.is_boxed:  # who has it in another cut counts too
        kept = [topic[1] for topic in found if topic[0] == "references" and topic[1] is not None]
        found += [references_of(version, each) for version in kept for cut in model.cuts for each in cut]
    if retention.leaves_last(state, member):  # until others have what they are on their way to, or give it up
        found.append(ARRIVALS)
        if call is not None and call.version is not None:
            found += [references_of(call.version, each) for cut in model.known_cuts() for each in cut]
    is_open = call is not None and not call.is_over
    if call is not None and is_open:
        found += [loss_of(call.version)] if call.version is not None else [SERVICE]
    is_electable = member.hello.prefetch != "never" and len(model.sites) > 1
    fetches = member.report.prefetch is not None or member.hello.prefetch == "always" or is_electable
    is_unresolved = call is not None and is_open and call.version is None
    if is_unresolved or is_leaving or fetches or content.copies or member.report.closing:
        found.append(NEWS)
    return tuple(dict.fromkeys(found)) if found else ()
