"""Who waits for what: each is found by its topics, and by no others."""

from tensorhub.protocol.names import Shard, Version, worker_id
from tensorhub.server.members import NEWS, LayoutKey, Watches, references_of, sources_of

A, B = (worker_id("policy", name, 0) for name in "ab")
SOURCES, REFERENCES = sources_of(Version(1), LayoutKey(1, Shard(0))), references_of(Version(1), LayoutKey(1, Shard(0)))


def test_who_waits_is_found_until_it_waits_for_something_else() -> None:
    watches = Watches()
    watches.watch(A, (SOURCES, NEWS))
    watches.watch(B, (NEWS,))
    assert watches.waiting_for(NEWS) == [A, B]
    assert watches.waiting_for(SOURCES) == [A]
    assert watches.waiting_for(REFERENCES) == []
    watches.watch(A, (REFERENCES,))
    assert watches.waiting_for(NEWS) == [B]
    assert watches.waiting_for(SOURCES) == []
    assert watches.waiting_for(REFERENCES) == [A]


def test_who_waits_for_nothing_is_forgotten() -> None:
    watches = Watches()
    watches.watch(A, (SOURCES,))
    assert watches.is_waiting(A)
    watches.watch(A, ())
    watches.watch(A, ())
    assert not watches.is_waiting(A)
    assert watches.waiting_for(SOURCES) == []


def test_another_shard_or_version_is_another_topic() -> None:
    watches = Watches()
    watches.watch(A, (sources_of(Version(1), LayoutKey(2, Shard(1))), sources_of(Version(2), LayoutKey(1, Shard(0)))))
    assert watches.waiting_for(SOURCES) == []
