"""The server's list of events: bounded, numbered over restarts, read page by page."""

import msgspec
import pytest

from tensorhub.protocol import events
from tensorhub.protocol.events import MAX_EVENTS, Event, EventsView, Joined, Left, Refused, Warned
from tensorhub.protocol.messages import Hello
from tensorhub.protocol.names import ModelName, ReplicaName, Shard
from tensorhub.runtime.event_log import AGAIN_S, MAX_ADDRESSES, MAX_PAGE, EventLog, UncheckedRefusals

FIRST = 1_000_000


def log_of(count: int, *, first: int = FIRST, models: int = 1) -> EventLog:
    log = EventLog(first, clock=lambda: 1.0)
    for number in range(count):
        log.add(Left(model=f"m{number % models}", replica=f"r{number}"))
    return log


def read_all(log: EventLog, after: int = 0, model: str = "") -> list[Event]:
    found: list[Event] = []
    while (page := log.after(after, model)).events:
        assert len(page.events) <= MAX_PAGE
        found += page.all()
        after = page.last
    return found


def test_a_burst_keeps_the_bound_and_a_reader_hears_how_many_it_has_missed() -> None:
    log = log_of(MAX_EVENTS + 500)
    assert len(log) == MAX_EVENTS
    found = read_all(log)
    assert [each.number for each in found] == list(range(FIRST + 501, FIRST + 501 + MAX_EVENTS))
    late = read_all(log, after=FIRST + 100)
    assert isinstance(late[0], Warned)
    assert "400 events" in late[0].text
    assert late[1:] == found
    assert not log.after(log.last).all()


def test_a_reader_goes_on_after_a_restart_and_after_one_with_lower_numbers() -> None:
    before = log_of(10)
    assert len(read_all(log_of(3, first=FIRST + 500), after=before.last)) == 3
    assert len(read_all(log_of(3, first=5), after=before.last)) == 3
    assert log_of(3, first=FIRST + 500).after(before.last).missed == 0


def hello(replica: str = "r") -> Hello:
    return Hello("tensorhub/7", ModelName("m"), ReplicaName(replica), Shard(0), 1, "life")


def test_clients_without_a_right_token_do_not_fill_the_list() -> None:
    log, now = EventLog(FIRST), [0.0]
    refusals = UncheckedRefusals(log, clock=lambda: now[0])
    for _ in range(50):
        refusals.add("10.0.0.1", hello("no name at all\n"), "another token")
    assert [each.text for each in read_all(log)] == ["refused a client at 10.0.0.1: another token"]
    now[0] = AGAIN_S
    refusals.add("10.0.0.1", hello(), "another token")
    (again,) = read_all(log, after=FIRST + 1)
    assert isinstance(again, Refused)
    assert (again.worker, again.left_out) == ("m/r[0]", 49)
    for number in range(MAX_ADDRESSES + 10):
        refusals.add(f"10.1.{number}", None, "another token")
    assert len(log) <= MAX_ADDRESSES + 1


SAMPLES: dict[str, object] = {"int": 7, "str": "x", "float": 1.5, "bool": True, "Literal": "failed"}


@pytest.mark.parametrize("kind", events.Event.__args__, ids=lambda kind: kind.__name__)
def test_each_kind_travels_and_is_one_line(kind: type[Event]) -> None:
    fields = {name: SAMPLES[str(annotation).split(" ")[0]] for name, annotation in annotations_of(kind).items()}
    event = kind(**fields)
    assert msgspec.json.decode(msgspec.json.encode(EventsView((event,))), type=EventsView).events == (event,)
    assert event.text
    assert "\n" not in event.text
    assert kind is Joined or not events.is_alarming(event) or kind.__name__ in ("Died", "Lost", "Refused", "Warned")


def annotations_of(kind: type[Event]) -> dict[str, str]:
    found = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {name: getattr(each, "__name__", str(each)) for name, each in found.items()}


def test_every_kind_is_of_the_union_and_so_of_the_documentation() -> None:
    kinds = {each for each in vars(events).values() if isinstance(each, type) and issubclass(each, events._Event)}
    assert kinds - {events._Event} == set(events.Event.__args__)
