"""How many shards a replica has: those who live agree on it, and when nobody lives whoever comes first sets it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.events import Warned
from tensorhub.protocol.messages import Holding, Refusal
from tensorhub.protocol.names import Digest, ModelName, Number, Version
from tensorhub.protocol.settings import Settings
from tensorhub.server import Server

from .kit import hello, report, worker

SETTINGS = Settings(lease_s=10.0, report_s=1.0, max_models=2)


class Town:
    """A server, and workers of some model that come and go. A worker's life has its own line, named as it is."""

    def __init__(self, *, fresh: bool = True) -> None:
        self.server = Server(SETTINGS, 0.0, 1, fresh=fresh)
        self.now = 0.0
        self.reports: dict[str, int] = {}

    def until(self, now: float) -> None:
        while (at := self.server.next_deadline()) < now:
            self.server.tick(now=at)
        self.now = now
        self.server.tick(now=now)

    def hello(self, name: str, shard: int, shards: int, model: str = "policy") -> Refusal | None:
        who = worker(name.partition("#")[0], shard, model)
        line = f"{name}[{shard}]{model}"
        said = self.server.handle(hello(who, shards=shards, life=name), sender=line, now=self.now)
        return refusal_in(said, line)

    def report(self, name: str, shard: int, model: str = "policy", **more: object) -> Refusal | None:
        line = f"{name}[{shard}]{model}"
        self.reports[line] = self.reports.get(line, 0) + 1
        said = self.server.handle(report(self.reports[line], **more), sender=line, now=self.now)
        self.server.check_invariants()
        return refusal_in(said, line)

    def joins(self, name: str, shard: int, shards: int, **more: object) -> Refusal | None:
        return self.hello(name, shard, shards) or self.report(name, shard, **more)

    def leaves(self, name: str, shard: int) -> None:
        self.report(name, shard, left=True)
        self.server.disconnected(f"{name}[{shard}]policy", now=self.now)

    @property
    def lives(self) -> list[tuple[str, int]]:
        return [(member.worker.replica, member.hello.shards) for member in self.server.state.members.all()]


def test_models_that_were_left_close_the_server_to_no_new_one() -> None:
    town = Town()
    models = town.server.state.models
    for name in ("a", "b"):
        assert (town.hello("w", 0, 1, name), town.report("w", 0, name)) == (None, None)
    refused = town.hello("w", 0, 1, "c")
    assert refused is not None
    assert (refused.message, refused.retry_s) == ("2 models is the most here", 0.0)
    town.report("w", 0, "a", left=True)
    town.report("w", 0, "b", left=True)
    assert (town.hello("w", 0, 1, "c"), town.report("w", 0, "c")) == (None, None), "a, which was left first, goes"
    assert list(models) == ["b", "c"]
    town.until(9.0)
    town.report("w", 0, "c")
    assert list(models) == ["b", "c"]
    town.until(10.0)
    assert list(models) == ["c"], "a lease after its last worker has left"
    town.until(28.0)  # it died: its lease was over at 19
    assert list(models) == ["c"]
    town.until(29.0)
    assert not models


def test_a_model_that_has_had_a_version_is_remembered_until_its_place_is_needed() -> None:
    """So its trainer goes on with the next number, as it could after no restart of the server."""
    town = Town()
    models = town.server.state.models
    for name in ("a", "b"):
        town.hello("w", 0, 1, name)
        town.report("w", 0, name, buffer=Holding(Version(7), Digest("r")))
        town.report("w", 0, name, left=True)
    town.until(9.0)
    refused = town.hello("w", 0, 1, "c")
    assert refused is not None
    assert refused.retry_s > 0, "there will be room"
    town.until(100.0)
    assert [models[ModelName(name)].newest for name in ("a", "b")] == [7, 7]
    assert (town.hello("w", 0, 1, "c"), town.report("w", 0, "c")) == (None, None)
    assert list(models) == ["b", "c"]
    (warned,) = [each for each in town.server.state.events if isinstance(each, Warned)]
    assert "a is forgotten, with its numbers" in warned.text


def refusal_in(said: list, line: str) -> Refusal | None:
    found = [message for sender, message in said if sender == line and isinstance(message, Refusal)]
    return found[0] if found else None


def code(refusal: Refusal | None) -> str:
    return refusal.code if refusal is not None else ""


def test_when_all_have_died_the_next_job_waits_for_their_lease_and_then_sets_it() -> None:
    town = Town()
    assert town.joins("trainer", 0, 2) is None
    town.server.disconnected("trainer[0]policy", now=1.0)
    town.until(1.0)
    refusal = town.joins("trainer#2", 0, 4)
    assert refusal is not None
    assert refusal.code == "layout-mismatch"
    assert 0 < refusal.retry_s <= 1.0
    town.until(11.0)
    assert town.joins("trainer#2", 0, 4) is None


def test_the_limit_on_models_holds_for_hellos_that_met() -> None:
    town = Town()
    for model in ("a", "b", "c"):
        assert town.hello("trainer", 0, 1, model) is None
    assert [code(town.report("trainer", 0, model)) for model in ("a", "b", "c")] == ["", "", "refused"]


@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["hello", "report", "leave", "drop", "time"]),
            st.sampled_from([("a#2", 0, 2), ("a#2", 1, 2), ("a#4", 0, 4), ("b#4", 1, 4)]),
            st.booleans(),
        ),
        min_size=6,
        max_size=40,
    ),
)
def test_in_whatever_order_they_come_all_who_live_agree(fresh: bool, history: list) -> None:
    town = Town(fresh=fresh)
    for what, (name, shard, shards), has_lived in history:
        match what:
            case "hello":
                town.hello(name, shard, shards)
            case "report":
                town.report(name, shard, session=Number(5 * has_lived))
            case "leave":
                town.leaves(name, shard)
            case "drop":
                town.server.disconnected(f"{name}[{shard}]policy", now=town.now)
            case "time":
                town.until(town.now + 3.0)
        counts = set(town.lives)
        assert len({name for name, _ in counts}) == len(counts), "one number for each replica"
        model = town.server.state.models.get(worker("a").model)
        assert {(each.name, each.shards) for each in (model.replicas.values() if model is not None else ())} == counts


@pytest.mark.parametrize(("length", "expected"), [(1, ""), (200, ""), (201, "usage")])
def test_a_name_has_its_longest(length: int, expected: str) -> None:
    assert code(Town().hello("a" * length, 0, 1)) == expected
    assert code(Town().hello("a", 0, 1, model="m" * length)) == expected
