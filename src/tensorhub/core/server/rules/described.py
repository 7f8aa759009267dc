"""What a version is and who has it, for somebody who has registered nothing: one shard at a time."""

from ...messages import Failure, Spec
from ...names import ModelName, Shard
from ...snapshot import DescribedView, SourceView
from .. import facts
from ..catalog import Model
from ..lines import Cut, Line
from ..records import VersionRecord
from ..state import State

MOST_SOURCES = 8  # one of which should answer

LISTENS = Failure(
    "unavailable", "the reference server has restarted, and not everybody has reported to it yet", "retry"
)


def describe(state: State, name: ModelName, spec: Spec, shard: Shard) -> DescribedView:
    """The layout of that shard of the version that the spec means now, and those who have it whole."""
    model = state.models.get(name)
    if model is None:
        unknown = Failure("version-unavailable", f"no model {name!r} is known", "is its trainer running?")
        return DescribedView(failure=LISTENS if state.is_recovering else unknown)
    if not model.roll.is_over:
        return DescribedView(failure=LISTENS)
    version, failure = model.resolve(spec)
    if version is None:
        return DescribedView(failure=failure)
    record = model.look_up(version)
    cut = _cut_of(model, record)
    if shard >= len(cut):
        text = f"{name} has {len(cut)} shards, and none is number {shard}"
        return DescribedView(failure=Failure("usage", text, "shards count from 0"))
    line = cut[shard]
    layout = state.layouts.get(record.layouts[line]) if line in record.layouts else None
    if layout is None:
        text = f"nobody has said how shard {shard} of version {version} of {name} is laid out"
        return DescribedView(failure=Failure("version-unavailable", text, "whoever registers it says so"))
    sources = tuple(_sources(state, model, record, line)[:MOST_SOURCES])
    return DescribedView(version, len(cut), record.roots[line], bytes(layout.layout), sources)


def _cut_of(model: Model, record: VersionRecord) -> Cut:
    """In which the version is told of: one of which somebody has each line."""
    cuts = list(model.known_cuts())
    return next((cut for cut in cuts if all(record.whole.get(line) for line in cut)), cuts[0])


def _sources(state: State, model: Model, record: VersionRecord, line: Line) -> list[SourceView]:
    """Those of whom most is to be hoped first."""
    found = []
    for member in [state.known(worker) for worker in record.whole.get(line, {})]:
        from_host = not member.holds(record.version)
        likely = facts.is_here(state, member), not member.report.closing, not from_host
        found.append((tuple(not each for each in likely), member.worker, from_host, member.hello.endpoints))
    return [SourceView(str(worker), endpoints, from_host) for _, worker, from_host, endpoints in sorted(found)]
