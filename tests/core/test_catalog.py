"""Which versions exist, what their content is, and who has them."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.messages import Buffer, Empty, Filling, Holding, HostCopy, Poisoned, Withdrawing
from tensorhub.protocol.names import Digest, ModelName, ReplicaName, Shard, Version
from tensorhub.server.groups import Replica
from tensorhub.server.members import NOTHING, Content, Line, version_in
from tensorhub.server.versions import Model

from .kit import worker

ROOT, OTHER, LAYOUT = Digest("root"), Digest("other"), Digest("layout")


def model(most_versions: int = 256) -> Model:
    return Model(ModelName("policy"), 1, most_versions)


def trainer() -> Replica:
    return Replica(ReplicaName("trainer"), 1)


def hold(found: Model, version: int, name: str = "a") -> None:
    """Somebody has all of it, and nothing else."""
    found.note_exists(Version(version))
    found.move(worker(name), content(Empty()), content(Holding(Version(version), ROOT)))


def code_of(found: Model, version: int, root: Digest = ROOT) -> str:
    failure = found.conflict(trainer(), Version(version), {Line(1, Shard(0)): root})
    return failure.code if failure is not None else ""


def test_a_lower_number_is_a_conflict_for_ever() -> None:
    found = model()
    found.note_exists(Version(7))
    assert code_of(found, 6) == "version-conflict"
    assert code_of(found, 8) == ""


def test_content_that_agrees_in_one_shard_only_is_other_content() -> None:
    found = Model(ModelName("policy"), 2, 256)
    first, second = Line(2, Shard(0)), Line(2, Shard(1))
    for shard, line in enumerate((first, second)):
        found.bind_content(worker("trainer", shard), Version(7), line, ROOT, LAYOUT)
    found.note_exists(Version(7))
    again = Replica(ReplicaName("again"), 2)
    assert found.conflict(again, Version(7), {first: ROOT, second: ROOT}) is None
    for roots in ({first: ROOT, second: OTHER}, {first: OTHER, second: ROOT}):
        failure = found.conflict(again, Version(7), roots)
        assert failure is not None
        assert failure.code == "version-conflict"


def test_a_version_that_somebody_else_is_publishing_is_theirs() -> None:
    found = model()
    record = found.record(Version(7))
    record.roots[Line(1, Shard(0))] = ROOT
    assert code_of(found, 7, OTHER) == ""  # whoever began it gave up
    record.claims[ReplicaName("second")] = None
    assert code_of(found, 7, OTHER) == "version-conflict"


def test_latest_counts_back_over_versions_that_exist() -> None:
    found = model()
    for version, name in ((3, "a"), (5, "b"), (9, "c")):
        hold(found, version, name)
    found.record(Version(12))  # being published
    assert found.resolve("latest") == (9, None)
    assert found.resolve("latest-2") == (3, None)
    assert found.resolve(5) == (5, None)
    for spec in ("latest-3", 12, 4):
        version, failure = found.resolve(spec)
        assert version is None
        assert failure is not None
        assert failure.code == "version-unavailable"


def test_what_nobody_has_is_lost_and_not_the_latest() -> None:
    found = model()
    hold(found, 3, "a")
    hold(found, 5, "b")
    assert found.latest == 5
    held = content(Holding(Version(5), ROOT))
    found.move(worker("b"), held, content(Empty()))
    assert found.is_lost(found.record(Version(5)))
    assert (found.latest, found.newest) == (3, 5)
    assert found.resolve("latest") == (3, None)
    assert found.awaited(4) is None
    failure = found.resolve(5)[1]
    assert failure is not None
    assert "policy/b[0] held it last" in failure.message
    assert code_of(found, 4) == code_of(found, 5, OTHER) == "version-conflict", "its number stays taken"
    found.move(worker("b"), content(Empty()), held)
    assert found.latest == 5


def test_a_loss_is_said_once_and_only_of_what_was_not_replaced() -> None:
    found = model()
    hold(found, 3, "a")
    hold(found, 5, "b")
    assert found.news_of_losses() == ([], [])
    found.move(worker("a"), content(Holding(Version(3), ROOT)), content(Empty()))
    assert found.news_of_losses() == ([], []), "5 has replaced it"
    found.changed = {}
    found.move(worker("b"), content(Holding(Version(5), ROOT)), content(Empty()))
    assert found.news_of_losses() == found.news_of_losses() == ([5], []), "to ask changes nothing"
    assert "version 5 of policy is lost" in found.loss(found.look_up(Version(5))).message
    found.note_said(*found.news_of_losses())
    assert found.news_of_losses() == ([], [])
    found.move(worker("b"), content(Empty()), content(Holding(Version(5), ROOT)))
    assert found.news_of_losses() == ([], [5])
    found.note_said(*found.news_of_losses())
    assert found.news_of_losses() == ([], [])


def test_whoever_waits_gets_that_version_or_a_newer_one() -> None:
    found = model()
    assert found.awaited("latest") is None
    hold(found, 5)
    assert [found.awaited(spec) for spec in ("latest", 4, 5, 6, "latest-1")] == [5, 5, 5, None, None]


def content(buffer: Buffer, *beside: HostCopy) -> Content:
    return Content(buffer, beside, Line(1, Shard(0)))


def test_versions_that_nobody_needs_make_room_the_oldest_first() -> None:
    found = model(most_versions=3)
    for version in range(1, 4):
        found.note_exists(Version(version))
    found.move(worker("a"), content(Empty()), content(Holding(Version(1), ROOT)))
    found.note_exists(Version(4))
    assert sorted(found.versions) == [1, 3, 4]
    assert found.newest == 4


def has(said: Content, version: int) -> bool:
    return version_in(said.buffer) == version or any(copy.version == version for copy in said.copies)


buffers = st.one_of(
    st.just(Empty()),
    st.just(Poisoned()),
    st.builds(Filling, st.integers(1, 3)),
    st.builds(Holding, st.integers(1, 3), st.just(ROOT)),
    st.builds(Withdrawing, st.integers(1, 3), st.just(ROOT)),
)


copies = st.lists(st.builds(HostCopy, st.just(1), st.integers(1, 3), st.just(ROOT)), max_size=2)


@given(st.lists(st.tuples(st.sampled_from("abc"), buffers, copies)))
def test_the_index_of_holders_is_what_was_last_said(moves: list[tuple[str, Buffer, list[HostCopy]]]) -> None:
    found, now = model(), {}
    for name, buffer, beside in moves:
        said = content(buffer, *beside)
        found.move(worker(name), now.get(name, NOTHING), said)
        now[name] = said
    for version in (1, 2, 3):
        record = found.versions.get(Version(version))
        indexed = [who.replica for held in record.holders.values() for who in held] if record is not None else []
        assert sorted(indexed) == sorted(name for name, said in now.items() if has(said, version))
