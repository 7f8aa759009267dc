"""The reference server dies, falls silent, or starts again and again: transfers go on, calls wait or end in time."""

import socket
import time

import pytest

import tensorhub

from .midway import held_midway, release
from .process import LATE_S, ServerProcess, eventually

pytestmark = pytest.mark.processes


def test_the_server_is_killed_in_mid_transfer_and_the_transfer_ends_without_it(start):
    """All chunks arrive and are verified while nobody answers; what comes next waits for the server's return."""
    cluster = start(lease_s=6)
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads = held_midway(cluster, reader)
    cluster.server.kill()
    release(reader)
    eventually(lambda: all(look["version"] == 1 for look in reader.looks()), "all chunks are in place", within_s=5.5)
    cluster.judge(reader, 1)
    assert not any(read.is_over for read in reads)  # nobody could say yet that all shards have it
    update = trainer.start("unpublish")
    cluster.restart_server()
    assert [read.result() for read in reads] == [1, 1]
    assert [call.result() for call in update] == [None, None]
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2) == 2
    assert reader.call("update", spec="latest") == 2
    cluster.judge(reader, 2)


@pytest.mark.parametrize(
    ("fate", "lease_s"),
    [
        ("whole", 60),
        pytest.param("gone", 4, marks=pytest.mark.long),
        pytest.param("torn", 4, marks=pytest.mark.long),
        pytest.param("old", 4, marks=pytest.mark.long),
    ],
)
def test_a_server_that_is_killed_in_mid_update_goes_on_with_its_journal(start, tmp_path, fate, lease_s):
    """At once, where the journal names all workers; else after a lease. Nothing is lost either way."""
    journal = tmp_path / "journal"
    cluster = start(lease_s=lease_s, state=journal)
    (trainer,) = cluster.replicas("trainer")
    cluster.publish(trainer, 1)
    old = journal.read_bytes()
    reader = cluster.replica("rollout-1")
    reads = held_midway(cluster, reader)
    cluster.server.kill()
    if fate == "gone":
        journal.unlink()
    elif fate == "torn":
        journal.write_bytes(journal.read_bytes()[:-3])
    elif fate == "old":
        journal.write_bytes(old)
    release(reader)
    cluster.restart_server()
    assert [read.result() for read in reads] == [1, 1]
    trainer.call("unpublish", timeout=20)
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2, timeout=20) == 2
    assert reader.call("update", spec="latest", timeout=20) == 2
    cluster.judge(reader, 2)


def test_a_standby_server_takes_over_when_the_first_one_is_killed(start, tmp_path):
    cluster = start(lease_s=60, state=tmp_path / "journal")
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert reader.call("replicate", spec="latest") == 1
    first = cluster.server
    cluster.restart_server(standby=True)
    first.kill()
    cluster.server.wait_until_it_listens()
    trainer.call("unpublish", timeout=30)
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2, timeout=30) == 2
    assert reader.call("update", spec="latest", timeout=30) == 2
    cluster.judge(reader, 2)


def standby_elsewhere(cluster, tmp_path):
    """A server with a journal of its own and another port, and both addresses as workers name them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    state, keeps = tmp_path / "other journal", {"lease_s": cluster.lease_s, "fresh": False}
    first = cluster.server.address
    second = cluster._add(ServerProcess(tmp_path, port=port, state=state, standby_of=first, **keeps))
    eventually(state.exists, "it has copied the journal")
    return second, f"{first},127.0.0.1:{port}"


def test_a_server_on_another_host_takes_over_when_the_first_one_is_gone(start, tmp_path):
    cluster = start(lease_s=1, state=tmp_path / "journal")
    second, named = standby_elsewhere(cluster, tmp_path)
    trainer, reader = cluster.replicas("trainer", "rollout-1", server=named)
    cluster.publish(trainer, 7)
    assert reader.call("replicate", spec="latest") == 7
    cluster.server.kill()
    second.wait_until_it_listens()
    cluster.server = second
    assert tensorhub.connect(named, timeout=20).next_version("policy") == 8
    step(cluster, trainer, 8)
    assert reader.call("wait_for", spec=8) == 8
    assert reader.call("update", spec="latest") == 8
    cluster.judge(reader, 8)


@pytest.mark.long
def test_of_two_servers_the_one_that_began_later_goes_on(start, tmp_path):
    cluster = start(lease_s=1, state=tmp_path / "journal")
    second, named = standby_elsewhere(cluster, tmp_path)
    trainer, reader = cluster.replicas("trainer", "rollout-1", server=named)
    cluster.publish(trainer, 1)
    first = cluster.server
    first.stop()
    second.wait_until_it_listens()
    first.go_on()
    assert first.process.wait(20) == 1
    assert "another reference server began later" in first.log
    eventually(lambda: f"the reference server at {first.address} was still there" in second.log, "it hears of that")
    cluster.server = second
    step(cluster, trainer, 2)
    assert reader.call("replicate", spec=2, wait=True) == 2
    cluster.judge(reader, 2)


def test_calls_on_a_server_that_stands_still_end_by_their_deadline(start):
    cluster = start()
    trainer, reader, idle = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    assert reader.call("replicate", spec="latest") == 1
    cluster.server.stop()
    began = time.monotonic()
    calls = trainer.start("unpublish", timeout=1.5) + reader.start("update", spec="latest", timeout=1.5)
    calls += idle.start("replicate", spec="latest", timeout=1.5)
    found = [call.outcome() for call in calls]
    late_s = max(call.ended for call in calls) - began - 1.5
    assert all(isinstance(each, tensorhub.DeadlineExceeded) for each in found), found
    assert all("reference server" in str(each) for each in found), found
    assert late_s < LATE_S + 0.5  # each call is also held to its deadline by its own clock
    waiting = idle.start("wait_for", spec=2, timeout=1.5) + trainer.start("check", timeout=10)
    found = [call.outcome() for call in waiting]
    assert [type(each) for each in found[:2]] == [tensorhub.DeadlineExceeded] * 2, found
    assert found[2:] == [None, None]  # asks nobody
    calls = idle.start("close", timeout=1)
    assert [call.result() for call in calls] == [None, None]
    cluster.server.go_on()
    cluster.publish(trainer, 2)
    assert reader.call("update", spec="latest") == 2
    cluster.judge(reader, 2)


@pytest.mark.long
def test_a_server_that_stood_still_for_two_leases_has_lost_nobody(start):
    """SIGSTOP amid reads and updates. All reconnect in vain meanwhile; afterwards each goes on in its own session."""
    cluster = start(lease_s=3, retain=2)
    trainer, *rollouts = cluster.replicas("trainer", *(f"rollout-{number}" for number in (1, 2, 3)))
    first, second, third = rollouts
    cluster.publish(trainer, 1)
    for rollout in (first, second):
        assert rollout.call("replicate", spec="latest") == 1
    reads = held_midway(cluster, third)
    trainer.call("unpublish")
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2) == 2
    updates = held_midway(cluster, first, verb="update")
    before = cluster.sessions()
    assert len(before) == 8
    stopped = cluster.server.stop()
    update = second.start("update", spec="latest")  # asked of a server that does not hear it
    assert [call.result() for call in update] == [1] * 2
    eventually(lambda: all(look["lease_is_over"] for look in first.looks() + third.looks()), "nobody trusts a read")
    release(first)
    release(third)
    eventually(lambda: time.monotonic() >= stopped + 2 * cluster.lease_s + 1, "two leases are over")
    cluster.server.go_on()
    assert [call.result() for call in reads] == [1, 1]
    assert [call.result() for call in updates] == [2] * 2
    assert second.call("update", spec="latest") == 2
    assert cluster.sessions() == before
    cluster.judge(third, 1)
    for rollout in (first, second):
        cluster.judge(rollout, 2)
    cluster.publish(trainer, 3)
    for rollout in rollouts:
        assert rollout.call("update", spec="latest") == 3
        cluster.judge(rollout, 3)
    assert cluster.sessions() == before


# --- a trainer works on without a server ------------------------------------------------------------------------------


def step(cluster, trainer, version, shards=(0, 1)):
    """A step of a training loop on these shards."""
    withdrawn = [trainer[shard].start("unpublish") for shard in shards]
    assert [call.result() for call in withdrawn] == [None] * len(shards)
    for shard in shards:
        cluster.contents.write(trainer[shard].memory, version, shard)
    published = [trainer[shard].start("publish", version=version) for shard in shards]
    assert [call.result() for call in published] == [version] * len(shards)


def test_a_trainer_trains_on_without_a_server_and_what_it_made_last_arrives(start):
    """It waits once, for a lease; a rollout waits as long, and keeps what it has. Four leases pass without a server."""
    cluster = start(lease_s=1)
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    cluster.server.kill()
    gone = time.monotonic()
    version = 1
    while version < 4 or time.monotonic() < gone + 4 * cluster.lease_s:
        version += 1
        step(cluster, trainer, version)
        assert rollout.call("update", spec="latest") == 1
    cluster.judge(rollout, 1)
    log = "goes on without the reference server, which has said nothing for"
    assert [worker.log.count(log) for worker in (*trainer, *rollout)] == [1] * 4
    cluster.restart_server()
    assert rollout.call("wait_for", spec=version) == version
    assert rollout.call("update", spec="latest") == version
    cluster.judge(rollout, version)
    step(cluster, trainer, version + 1)
    assert rollout.call("update", spec="latest") == version + 1
    cluster.judge(rollout, version + 1)
