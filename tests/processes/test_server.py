"""The reference server dies, falls silent, or starts again and again: transfers go on, calls wait or end in time."""

import asyncio
import time

import pytest

import tensorhub
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.server import ServerShell

from .midway import STREAMS, held_midway, read_again, release
from .process import LATE_S, eventually

pytestmark = pytest.mark.processes


def test_the_server_is_killed_in_mid_transfer_and_the_transfer_ends_without_it(start, figures):
    """All chunks arrive and are verified while nobody answers; what comes next waits for the server's return."""
    cluster = start(lease_s=6)
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads, at = held_midway(cluster, reader)
    killed = cluster.server.kill()
    release(reader)
    eventually(lambda: all(look["version"] == 1 for look in reader.looks()), "all chunks are in place", within_s=5.5)
    ended_s = time.monotonic() - killed
    cluster.judge(reader, 1)
    assert not any(read.is_over for read in reads)  # nobody could say yet that all shards have it
    update = trainer.start("unpublish")
    cluster.restart_server()
    assert [read.result() for read in reads] == [1, 1]
    assert [call.result() for call in update] == [None, None]
    took_s = max(call.ended for call in update) - killed
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2) == 2
    assert reader.call("update", spec="latest") == 2
    cluster.judge(reader, 2)
    figures(
        f"server killed at {at:.0f} %: the transfer ended {ended_s:.1f} s later without it; the next call waited "
        f"and succeeded {took_s:.1f} s after the kill (lease {cluster.lease_s} s)",
        ended_s=ended_s,
        took_s=took_s,
    )


def test_a_call_waits_for_a_restarted_server_and_not_for_its_lease(start, figures):
    """Everybody who lived has reported to it within a second, so nobody is missing."""
    cluster = start(lease_s=20)
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert reader.call("replicate", spec="latest") == 1
    killed = cluster.server.kill()
    calls = trainer.start("unpublish")
    cluster.restart_server()
    back_s = time.monotonic() - killed
    assert [call.result() for call in calls] == [None, None]
    took_s = max(call.ended for call in calls) - killed
    assert took_s - back_s < cluster.lease_s / 2
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2) == 2
    assert reader.call("update", spec="latest") == 2
    cluster.judge(reader, 2)
    figures(
        f"server killed and back after {back_s:.1f} s: an unpublish that was called at the kill returned after "
        f"{took_s:.1f} s (lease {cluster.lease_s} s)",
        back_s=back_s,
        took_s=took_s,
    )


def test_who_died_with_the_server_is_awaited_for_a_lease(start):
    """It might be reading: nobody can know that it does not."""
    cluster = start(lease_s=3)
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert reader.call("replicate", spec="latest") == 1
    reader.kill()
    cluster.server.kill()
    calls = trainer.start("unpublish")
    began = time.monotonic()
    cluster.restart_server()
    assert [call.result() for call in calls] == [None, None]
    assert max(call.ended for call in calls) - began >= cluster.lease_s


def test_a_transfer_that_outlives_its_lease_stops_and_goes_on_where_it_was(start, figures):
    """Nobody renews the lease, so what is read later does not count. The restarted server grants it again."""
    cluster = start()
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads, at = held_midway(cluster, reader)
    cluster.server.kill()
    eventually(lambda: all(look["lease_is_over"] for look in reader.looks()), "the lease has ended")
    release(reader)
    before = reader.looks()
    cluster.restart_server()
    assert [read.result() for read in reads] == [1, 1]
    cluster.judge(reader, 1)
    again = read_again(reader)
    assert all(look["version"] is None for look in before)
    assert again <= 2 * STREAMS * cluster.shards
    line = f"server away from {at:.0f} % on for longer than the lease: resumed after its return"
    figures(f"{line}, re-read {again} of {cluster.chunks} chunks", chunks_read_again=again)


def test_calls_on_a_server_that_stands_still_end_by_their_deadline(start, figures):
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
    figures(f"server stopped: every call of 1.5 s ended at most {late_s:.2f} s after its deadline", late_s=late_s)


def test_the_server_is_restarted_three_times_in_a_row_while_versions_go_on(start, figures):
    """`latest` never goes backwards, no number is used twice, and everybody ends with the newest."""
    cluster = start()
    trainer, *rollouts = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    for rollout in rollouts:
        assert rollout.call("replicate", spec="latest") == 1
    began = time.monotonic()
    for version in (2, 3, 4):
        trainer.call("unpublish")
        cluster.write(trainer, version)
        publish = trainer.start("publish", version=version)
        cluster.server.kill()  # in mid-publish
        cluster.restart_server()
        assert [call.result() for call in publish] == [version] * 2
        for rollout in rollouts:
            assert rollout.call("update", spec="latest") == version
            cluster.judge(rollout, version)
    trainer.call("unpublish")
    calls = trainer.start("publish", version=3, timeout=10)
    assert all(isinstance(call.outcome(), tensorhub.VersionConflict) for call in calls)
    took_s = time.monotonic() - began
    figures(f"server killed in mid-publish of three versions in a row: all right, in {took_s:.1f} s", took_s=took_s)


def test_a_server_whose_timer_is_due_at_once_goes_on(monkeypatch):
    """A storm found it: uvloop's handle of such a timer cannot say when it is due, and a worker was refused for it."""
    uvloop = pytest.importorskip("uvloop")

    async def hurry():
        shell = ServerShell(settings=Settings(), key="k")
        monkeypatch.setattr(shell.machine, "next_deadline", lambda: time.monotonic() - 1.0)
        for _ in range(3):
            shell._set_timer()
        assert shell._timer is not None
        shell._timer.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hurry())


def test_a_server_that_stood_still_for_two_leases_has_lost_nobody(start, figures):
    """SIGSTOP amid reads and updates. All reconnect in vain meanwhile; afterwards each goes on in its own session."""
    cluster = start(lease_s=3, retain=2)
    trainer, *rollouts = cluster.replicas("trainer", *(f"rollout-{number}" for number in (1, 2, 3)))
    first, second, third = rollouts
    cluster.publish(trainer, 1)
    for rollout in (first, second):
        assert rollout.call("replicate", spec="latest") == 1
    reads, _ = held_midway(cluster, third)
    trainer.call("unpublish")
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2) == 2
    updates, _ = held_midway(cluster, first, verb="update")
    before = cluster.sessions()
    assert len(before) == 8
    stopped = cluster.server.stop()
    update = second.start("update", spec="latest")  # asked of a server that does not hear it
    eventually(lambda: all(look["lease_is_over"] for look in first.looks() + third.looks()), "nobody trusts a read")
    release(first)
    release(third)
    eventually(lambda: time.monotonic() >= stopped + 2 * cluster.lease_s + 1, "two leases are over")
    paused_s = cluster.server.go_on() - stopped
    assert [call.result() for call in reads] == [1, 1]
    assert [call.result() for call in updates + update] == [2] * 4
    took_s = max(call.ended for call in reads + updates + update) - stopped - paused_s
    assert cluster.sessions() == before
    cluster.judge(third, 1)
    for rollout in (first, second):
        cluster.judge(rollout, 2)
    cluster.publish(trainer, 3)
    for rollout in rollouts:
        assert rollout.call("update", spec="latest") == 3
        cluster.judge(rollout, 3)
    assert cluster.sessions() == before
    figures(
        f"server stopped for {paused_s:.1f} s (lease {cluster.lease_s} s): all 8 sessions live, "
        f"what was going on ended {took_s:.1f} s after it went on",
        paused_s=paused_s,
        took_s=took_s,
    )
