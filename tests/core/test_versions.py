"""Which versions exist, what their content is, and which workers have them."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    PROTOCOL,
    Buffer,
    CallReport,
    Empty,
    Filling,
    Hello,
    Holding,
    HostCopy,
    Orders,
    Reading,
    Refusal,
    Report,
    Source,
)
from tensorhub.protocol.names import Digest, ModelName, Number, ReplicaName, Shard, Ticket, Version, WorkerId
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server
from tensorhub.server.admission import forget_numbers
from tensorhub.server.calls import next_version
from tensorhub.server.groups import Replica
from tensorhub.server.journal import FORMAT, Begun, Joined, ModelHistory, Over, Record, Writes, encoded, history_of
from tensorhub.server.members import Content, LayoutKey
from tensorhub.server.versions import Model

from .kit import worker
from .town import Town

# --- which versions exist, what their content is, and who has them ---

ROOT, OTHER = Digest("root"), Digest("other")


def model(max_versions: int = 256) -> Model:
    return Model(ModelName("policy"), 1, max_versions)


def trainer() -> Replica:
    return Replica(ReplicaName("trainer"), 1)


def hold(found: Model, version: int, name: str = "a") -> None:
    """Somebody has all of it, and nothing else."""
    found.note_exists(found.record(Version(version)))
    found.move(worker(name), content(Empty()), content(Holding(Version(version), ROOT)))


def code_of(found: Model, version: int, root: Digest = ROOT) -> str:
    failure = found.conflict(trainer(), Version(version), {LayoutKey(1, Shard(0)): root})
    return failure.code if failure is not None else ""


def test_content_that_agrees_in_one_shard_only_is_other_content() -> None:
    found = Model(ModelName("policy"), 2, 256)
    first, second = LayoutKey(2, Shard(0)), LayoutKey(2, Shard(1))
    for line in (first, second):
        found.record(Version(7)).roots[line] = ROOT
    found.note_exists(found.record(Version(7)))
    again = Replica(ReplicaName("again"), 2)
    assert found.conflict(again, Version(7), {first: ROOT, second: ROOT}) is None
    for roots in ({first: ROOT, second: OTHER}, {first: OTHER, second: ROOT}):
        failure = found.conflict(again, Version(7), roots)
        assert failure is not None
        assert failure.code == "version-conflict"


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
    assert found.reached(4) is None
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
    found.note_losses(*found.news_of_losses())
    assert found.news_of_losses() == ([], [])
    found.move(worker("b"), content(Empty()), content(Holding(Version(5), ROOT)))
    assert found.news_of_losses() == ([], [5])
    found.note_losses(*found.news_of_losses())
    assert found.news_of_losses() == ([], [])


def test_after_a_restart_only_the_newest_version_is_told_as_lost() -> None:
    found = model()
    for number in (1, 2, 3):
        found.note_exists(found.record(Version(number)))
    assert found.news_of_losses() == ([3], [])


def content(buffer: Buffer, *beside: HostCopy) -> Content:
    return Content(buffer, beside, LayoutKey(1, Shard(0)))


def test_versions_that_nobody_needs_make_room_the_oldest_first() -> None:
    found = model(max_versions=3)
    for version in range(1, 4):
        found.note_exists(found.record(Version(version)))
    found.move(worker("a"), content(Empty()), content(Holding(Version(1), ROOT)))
    found.note_exists(found.record(Version(4)))
    assert sorted(found.versions) == [1, 3, 4]
    assert found.newest == 4


# --- what one worker tells of numbers: no other worker is taken along ---

SETTINGS = Settings(lease_s=4.0, report_s=1.0)
HIGHEST = 2**62


def server(first: int = 1000, *, fresh: bool = True) -> Server:
    return Server(SETTINGS, 0.0, first, fresh=fresh)


def hear(found: Server, name: str, now: float = 0.0, **told: object) -> Orders:
    """The answer to a report of that replica's one worker."""
    me = worker(name)
    found.handle(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, name), sender=name, now=now)
    number = told.pop("number", 1)
    out = found.handle(Report(number=number, **told), sender=name, now=now)  # type: ignore[arg-type]
    orders = [message for sender, message in out if sender == name]
    assert orders, out
    assert isinstance(orders[-1], Orders), orders
    return orders[-1]


@pytest.mark.parametrize("what", ["seen", "session", "closed"])
def test_a_number_that_no_server_gave_out_takes_no_other_worker_along(what: str) -> None:
    found, me = server(), worker("liar")
    found.handle(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, "liar"), sender="liar", now=0.0)
    ((_, refusal),) = found.handle(Report(1, **{what: HIGHEST}), sender="liar", now=0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_s > 0
    assert hear(found, "honest").number < 2000
    assert found.state.counters["odd_numbers"] == 1


def test_a_restarted_server_goes_on_above_what_its_workers_have_heard() -> None:
    known = hear(server(5_000_000), "a")
    found = server(10, fresh=False)
    assert hear(found, "a", seen=known.number, session=known.session).number > known.number


def test_the_same_content_is_taken_with_boxes_from_its_publisher_that_names_what_it_was() -> None:
    found, plain = model(), LayoutKey(1, Shard(0))
    boxed = {plain._replace(layout=Digest("boxed-x")): Digest("tiled-y")}
    hold(found, 3)
    found.record(Version(3)).roots[plain] = ROOT
    conflicts = [found.conflict(trainer(), Version(3), boxed, ROOT)]
    found.record(Version(3)).publisher = trainer().name
    assert found.conflict(trainer(), Version(3), boxed, ROOT) is None
    conflicts += [found.conflict(trainer(), Version(3), boxed, former) for former in (OTHER, Digest(""))]
    conflicts += [found.conflict(trainer(), Version(3), {plain: OTHER}, ROOT)]
    found.record(Version(3)).roots.update(dict.fromkeys(boxed, OTHER))
    conflicts += [found.conflict(trainer(), Version(3), boxed, ROOT)]
    assert ["other content" in failure.message for failure in conflicts if failure is not None] == [True] * 5


def test_what_has_not_heard_that_a_model_was_begun_anew_brings_back_neither_number_nor_content() -> None:
    """It may have been cut off for longer than its lease, and holds what it held; others have begun with 1 again."""
    found, name = server(), worker("a").model
    old = {"newest": Version(7), "newest_epoch": Number(500)}
    hear(found, "idle", **old)
    assert forget_numbers(found.state, name).is_begun
    told = hear(found, "idle", number=2, **old)
    assert (told.newest, told.newest_epoch) == (None, 0)
    held = Holding(Version(7), Digest("x"), published=True, epoch=Number(500))
    told = hear(found, "away", buffer=held, **old)
    assert (told.newest, told.superseded) == (None, 500)
    assert found.state.models[name].newest is None


# --- two publishes of one number, of servers that knew nothing of each other ---


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_finished_publishes_the_one_with_the_higher_epoch_counts(is_first: bool) -> None:
    """Whichever is heard first. The holder of the other one is told, and counts for nothing."""
    found = server(fresh=False)
    told = {
        "a": {"buffer": Holding(Version(7), Digest("x"), epoch=Number(5)), "layout": Digest("l")},
        "b": {"buffer": Holding(Version(7), Digest("y"), epoch=Number(6)), "layout": Digest("l")},
    }
    for name in ("a", "b") if is_first else ("b", "a"):
        hear(found, name, **told[name])
    assert hear(found, "a", number=2, **told["a"]).superseded == 5
    assert hear(found, "b", number=2, **told["b"]).superseded == 0
    record = found.state.models[worker("a").model].versions[Version(7)]
    assert [who.replica for held in record.whole.values() for who in held] == ["b"]


def test_an_unfinished_publish_yields_to_a_finished_one_whatever_its_epoch() -> None:
    found = server(fresh=False)
    half = Holding(Version(7), Digest("x"), published=True, epoch=Number(9), is_pending=True)
    hear(found, "a", buffer=half, layout=Digest("l"))
    hear(found, "b", buffer=Holding(Version(7), Digest("y"), epoch=Number(5)), layout=Digest("l"))
    assert hear(found, "a", number=2, buffer=half, layout=Digest("l")).superseded == 9
    assert found.state.models[worker("a").model].versions[Version(7)].epoch == 5


HELD = Holding(Version(HIGHEST), Digest("x"))
WORDS = {
    "filling": {"buffer": Filling(Version(HIGHEST))},
    "holding": {"buffer": HELD},
    "published": {"buffer": Holding(Version(HIGHEST), Digest("x"), published=True)},
    "a copy": {"copies": (HostCopy(1, Version(HIGHEST), Digest("x"), 1, 1, whole=True),)},
    "an answer": {"call": CallReport(1, "publish", HIGHEST, Digest("x"), resolved=Version(HIGHEST)), "buffer": HELD},
    "a next one": {"buffer": Holding(Version(2**54 + 1), Digest("x"))},
}


@pytest.mark.parametrize("told", WORDS.values(), ids=WORDS)
def test_a_version_that_no_publish_could_make_exists_nowhere(told: dict) -> None:
    """A worker that shows one is sent away for a moment, and its next report may be right."""
    found, me = server(), worker("liar")
    publish(found, "trainer", 7, "right")
    for number in (1, 2):
        found.handle(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, "liar"), sender="liar", now=0.0)
        ((_, refusal),) = found.handle(Report(number=number, **told), sender="liar", now=0.0)
        assert isinstance(refusal, Refusal)
        assert refusal.retry_s > 0
    assert next_version(found.state, me.model) == 8
    assert found.state.models[me.model].newest == 7
    assert hear(found, "liar", number=3).acknowledged == 3


def publish(found: Server, name: str, version: int, root: str) -> None:
    """One replica of one shard publishes, from its call to its end."""
    call = CallReport(1, "publish", version, Digest(root))
    hear(found, name, number=2, layout=Digest("l"), call=call)
    held = Holding(Version(version), Digest(root), published=True)
    found.handle(Report(number=3, layout=Digest("l"), call=call, buffer=held), sender=name, now=0.0)
    out = found.handle(Report(number=4, layout=Digest("l"), buffer=held, ended=1, finished=1), sender=name, now=0.0)
    assert not any(isinstance(message, Refusal) for _, message in out)


def test_a_read_under_a_ticket_that_nobody_gave_out_is_not_adopted() -> None:
    found, me = server(10, fresh=False), worker("a")
    found.handle(Hello(PROTOCOL, me.model, me.replica, me.shard, 1, "a"), sender="a", now=0.0)
    told = Report(1, reading=Reading(Ticket(HIGHEST), (Source(worker("b")),), Version(7)))
    assert isinstance(found.handle(told, sender="a", now=0.0)[0][1], Refusal)
    assert found.state.reads.all() == []


# --- a publish that a server before this one has accepted, or this one for a former session ---


def test_a_publish_that_was_accepted_before_another_writer_came_does_not_end_well() -> None:
    """Its replica was cut off for longer than its lease, and the number of the other one is higher."""
    town = Town(lease_s=4.0)
    late, other = worker("late"), worker("other")
    town.joins(late)
    call = CallReport(1, "publish", 5, Digest("x"))
    town.says(late, call=call)
    answer = town.orders[late].answer
    assert answer is not None
    assert answer.version == 5
    town.joins(other)
    for second in (1.0, 2.0, 3.0, 4.5):
        town.until(second)
        town.says(other)
    publishes = CallReport(1, "publish", 6, Digest("y"))
    town.says(other, call=publishes)
    epoch = town.orders[other].answer.epoch  # type: ignore[union-attr]
    held = Holding(Version(6), Digest("y"), published=True, epoch=epoch, is_pending=True)
    town.says(other, call=publishes, buffer=held)
    assert town.orders[other].answer.finished  # type: ignore[union-attr]
    town.says(other, buffer=replace(held, is_pending=False), ended=1, finished=1)
    back = replace(call, resolved=Version(5), epoch=answer.epoch)
    mine = Holding(Version(5), Digest("x"), published=True, epoch=answer.epoch, is_pending=True)
    town.loses_its_line(late)
    town.says_hello_again(late)
    town.says(late, call=back, buffer=mine)
    found = town.orders[late].answer
    assert found is not None
    assert found.error is not None
    assert found.error.code == "version-conflict"


def test_a_number_that_has_existed_is_not_used_again_where_its_content_is_not_known() -> None:
    found = model()
    found.note_newest(Version(7), Number(3))
    assert code_of(found, 7) == "version-conflict"
    assert code_of(found, 8) == ""


# --- what a journal says of the workers that may live ---


def history_after(*records: Record) -> ModelHistory:
    told = history_of(encoded([Begun(FORMAT, Number(1), "boot"), *records]), boot="boot", max_versions=9)
    assert told is not None
    assert told.is_whole
    return told.models[ModelName("m")]


def test_a_worker_is_awaited_by_each_session_that_it_may_name_and_a_newcomer_does_not_take_its_place() -> None:
    one = ModelName("m"), ReplicaName("r"), Shard(0)
    sessions = [Joined(*one, Number(2)), Joined(*one, Number(5), Number(2)), Joined(*one, Number(9))]
    assert history_after(*sessions).sessions == {WorkerId(*one): [[2, 5], [9]]}
    assert history_after(*sessions, Over(*one, Number(9))).sessions == {WorkerId(*one): [[2, 5]]}
    assert history_after(*sessions, Over(*one, Number(2))).sessions == {WorkerId(*one): [[9]]}


def test_the_writer_is_none_any_more_when_its_last_session_is_over() -> None:
    one = ModelName("m"), ReplicaName("r"), Shard(0)
    told = [Joined(*one, Number(2)), Writes(ModelName("m"), ReplicaName("r"), Number(3))]
    assert history_after(*told).writer is not None
    assert history_after(*told, Over(*one, Number(2)), Joined(*one, Number(7))).writer is None


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_journal_is_not_whole(cut: int) -> None:
    one = ModelName("m"), ReplicaName("r"), Shard(0)
    data = encoded([Begun(FORMAT, Number(1), "boot"), Joined(*one, Number(2)), Joined(*one, Number(3))])
    told = history_of(data[:-cut], boot="boot", max_versions=9)
    assert told is not None
    assert not told.is_whole
    other = history_of(data, boot="another boot", max_versions=9)
    assert other is not None
    assert not other.is_whole
