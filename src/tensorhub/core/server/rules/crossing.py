"""Whether a version can be read into what a worker has registered: by its own line, or out of a cut of another kind."""

from collections.abc import Iterator

from ...errors import UsageError
from ...manifest import difference_hint, layout_difference
from ...messages import MAX_PARTS, Failure
from ...names import Digest, is_tiled
from ..catalog import Model
from ..lines import Cut, Line
from ..membership import Member
from ..records import VersionRecord
from ..state import State


def may_fit(model: Model, record: VersionRecord, member: Member) -> bool:
    """The version can fill its tensors, as far as is known."""
    theirs = record.layouts.get(member.line)
    if theirs is not None or not member.report.layout:
        return member.fits(theirs)
    return not record.roots or _is_of_its_cut(model, record, member.line) or can_cross(record, member.line)


def can_cross(record: VersionRecord, line: Line) -> bool:
    """Its boxes say what is wanted, and somebody's boxes where that is; and there is a digest for each piece."""
    return line.is_boxed and any(is_readable(record, other) for other in record.roots)


def is_readable(record: VersionRecord, line: Line) -> bool:
    """Other cuts can be filled from that line of the version."""
    return line.is_boxed and is_tiled(record.roots.get(line, Digest("")))


def cuts_to_read(model: Model, record: VersionRecord, line: Line) -> Iterator[Cut]:
    """The other cuts in which all of the version is, as far as is known, and out of which it can be read."""
    for cut in cuts_to_come(model, record, line):
        if all(is_readable(record, each) and record.whole.get(each) for each in cut):
            yield cut


def cuts_to_come(model: Model, record: VersionRecord, line: Line) -> Iterator[Cut]:
    """The other cuts out of which it can be read as soon as all of the version is there."""
    for cut in model.cuts:
        if line in cut or len(cut) > MAX_PARTS:
            continue
        if all(is_readable(record, each) if each in record.roots else each.is_boxed for each in cut):
            yield cut


def _is_of_its_cut(model: Model, record: VersionRecord, line: Line) -> bool:
    """The version is known in a cut with that line, though perhaps not all of it is."""
    return any(line in cut and any(other in record.roots for other in cut) for cut in model.known_cuts())


def why_unreadable(state: State, model: Model, record: VersionRecord, member: Member) -> Failure | None:
    """Why nobody could ever read the version into the tensors that this worker has registered; None if somebody may."""
    if not member.report.layout:
        return None
    if may_fit(model, record, member):
        return _why_too_wide(model, record, member)
    line, layouts = member.line, record.layouts
    name = f"version {record.version} of {model.name}"
    if record.roots and line.is_boxed != any(each.is_boxed for each in record.roots):
        published, registered = ("without", "with") if line.is_boxed else ("with", "without")
        text = f"{name} was published {published} boxes, and {member.worker} has registered {registered} them"
        hint = "register(..., boxes={...}) on both sides, or on neither; boxes={} says that all tensors are whole"
        return Failure("layout-mismatch", text, hint)
    its = line if line in layouts else next((each for each in layouts if each[:2] == line[:2]), None)
    difference = _difference(state, record, member, layouts[its]) if its is not None else None
    if difference is None and line.is_boxed:
        text = f"{name} has no digests of tiles, and {member.worker} is cut in another way"
        return Failure("layout-mismatch", text, "publish it with boxes too, or register the same tensors as there")
    if difference is None and its is None:
        others = sorted({each.shards for each in record.roots})
        text = f"{member.worker} was opened with shards={line.shards}, {name} is cut in {', '.join(map(str, others))}"
        hint = "open as many shards on both sides, or say with boxes what each of them has"
        return Failure("layout-mismatch", text, hint)
    if difference is None:
        text = f"the tensors of {member.worker} differ from those of {name}"
        return Failure("layout-mismatch", text, "register the same tensors in the same order on both sides")
    return Failure("layout-mismatch", *difference)


def _why_too_wide(model: Model, record: VersionRecord, member: Member) -> Failure | None:
    """It could be read across if it were cut in fewer shards. (Who is cut as the member is has it from elsewhere.)"""
    line = member.line
    if not line.is_boxed or line in record.layouts or not can_cross(record, line):
        return None
    cuts = [cut for cut in model.cuts if line not in cut and all(is_readable(record, each) for each in cut)]
    if not cuts or any(len(cut) <= MAX_PARTS for cut in cuts):
        return None
    text = f"version {record.version} of {model.name} is cut in {min(map(len, cuts))} shards, and {member.worker} in"
    text = f"{text} another way: no read is made out of more than {MAX_PARTS} shards at once"
    return Failure("layout-mismatch", text, "publish it from fewer ranks, each with more of it")


def _difference(state: State, record: VersionRecord, member: Member, layout: Digest) -> tuple[str, str] | None:
    """In words, and what to do."""
    mine, theirs = state.layouts.get(member.report.layout), state.layouts.get(layout)
    if mine is None or theirs is None:
        return None
    here, there = f"in {member.worker}", f"in version {record.version}"
    try:
        ours, others = mine.decode(), theirs.decode()
    except UsageError:
        return None  # what is no layout differs too, but no word of it is repeated
    text = layout_difference(ours, others, here=here, there=there)
    return (text, difference_hint(ours, others, shards=member.line.shards)) if text is not None else None
