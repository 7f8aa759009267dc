"""What was said of a version outlives who said it, and the server."""

import pytest

pytestmark = pytest.mark.processes

SAID = {"step": 1, "loss": 0.25, "notes": "é" * 4000}


def test_publisher_and_server_are_killed_and_a_late_reader_has_it_all_the_same(start):
    cluster = start(lease_s=3)
    trainer, first = cluster.replicas("trainer", "rollout-1")
    cluster.write(trainer, 1)
    assert trainer.call("publish", version=1, metadata=SAID) == 1
    assert first.call("replicate", spec="latest") == 1
    trainer.kill()
    cluster.server.kill()
    cluster.restart_server()
    (late,) = cluster.replicas("rollout-2")
    assert late.call("replicate", spec="latest") == 1
    cluster.judge(late, 1)
    assert [look["metadata"] for look in (*first.looks(), *late.looks())] == [SAID] * 2 * cluster.shards
