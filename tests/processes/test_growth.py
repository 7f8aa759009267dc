"""Two hundred updates of three models at once: right bytes every time, and nothing that grows."""

import os
import threading
from pathlib import Path

import pytest

from .memory import MIB

pytestmark = pytest.mark.processes

UPDATES = 200
SETTLED = 60  # by then pools, caches and arenas have the size that they keep
MODELS = ("actor", "critic", "draft")


def sizes(worker):
    look = worker.look()
    return {name: look[name] for name in ("descriptors", "threads", "private_bytes")}


def of_process(process):
    """The same of a process that cannot be asked. A library's clean pages turn private when others that used it end."""
    folder = Path(f"/proc/{process.process.pid}")
    rollup = [line.split() for line in (folder / "smaps_rollup").read_text().splitlines()]
    private_bytes = sum(int(words[1]) * 1024 for words in rollup if words[0] == "Private_Dirty:")
    counts = {"descriptors": len(os.listdir(folder / "fd")), "threads": len(os.listdir(folder / "task"))}
    return {**counts, "private_bytes": private_bytes}


@pytest.mark.long
def test_nothing_grows_over_many_updates_of_three_models(start):
    cluster = start(shards=1, shard_bytes=5 * MIB + 8)
    pairs = {model: cluster.replicas("trainer", "rollout", model=model) for model in MODELS}
    failures, seen = [], {}

    def train(model):
        trainer, rollout = pairs[model]
        try:
            for step in range(1, UPDATES + 1):
                cluster.publish(trainer, step)
                assert rollout.call("update", spec="latest") == step
                cluster.judge(rollout, step)
                if step in (SETTLED, UPDATES):
                    seen[model, step] = {"trainer": sizes(trainer[0]), "rollout": sizes(rollout[0])}
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(model,), daemon=True) for model in MODELS]
    before = of_process(cluster.server)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(110)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    grown = {}
    for model in MODELS:
        for role in ("trainer", "rollout"):
            first, last = seen[model, SETTLED][role], seen[model, UPDATES][role]
            for name in first:
                grown[name] = max(grown.get(name, 0), last[name] - first[name])
    after = of_process(cluster.server)
    assert grown["descriptors"] <= 4, grown
    assert grown["threads"] <= 4, grown
    assert grown["private_bytes"] <= 2 * MIB, grown
    assert after["descriptors"] <= before["descriptors"] + 8
    assert after["threads"] <= before["threads"] + 2
    assert after["private_bytes"] <= before["private_bytes"] + 4 * MIB
