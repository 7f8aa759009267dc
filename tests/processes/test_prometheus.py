"""A real Prometheus scrapes a running job by the files of deploy/, and each alert fires by its fault."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import tensorhub
from runtime.kit import ServerProcess, eventually, own_token
from tensorhub.protocol.errors import TensorHubError

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason="no prometheus and promtool in PATH"),
]

DIES = """
import os, sys
import numpy as np
import tensorhub
weights = tensorhub.open("lonely", replica="trainer", server=sys.argv[1])
weights.register({"w": np.zeros(8)})
weights.publish(1)
os._exit(1)
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Prometheus:
    """A Prometheus on the files of deploy/, with the job's address and token, and a second where they say minutes."""

    def __init__(self, folder, server):
        token = folder / "token"
        token.write_text(own_token())
        rules = (DEPLOY / "prometheus/alerts.yml").read_text()
        rules, config = re.sub(r"for: \w+", "for: 0s", rules), (DEPLOY / "prometheus/prometheus.yml").read_text()
        config = config.replace("head:7450", server).replace("/etc/prometheus/tensorhub.token", str(token))
        config = config.replace("15s", "1s").replace("/v1/targets", "/v1/targets\n        refresh_interval: 1s")
        (folder / "alerts.yml").write_text(rules.replace("> 30 #", "> 2 #"))
        (folder / "prometheus.yml").write_text(config)
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
        options["web.listen-address"] = f"127.0.0.1:{port}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            command = [PROMETHEUS, *(f"--{name}={value}" for name, value in options.items())]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(self, what, **query):
        """The answer's data; None while Prometheus does not listen yet."""
        with contextlib.suppress(urllib.error.URLError):
            url = f"{self._url}/{what}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]

    def up(self):
        """How many pages were scraped last, by job."""
        found = (self.ask("query", query="sum by (job) (up)") or {"result": []})["result"]
        return {each["metric"]["job"]: int(each["value"][1]) for each in found}

    def firing(self):
        return {each["labels"]["alertname"] for each in self.ask("alerts")["alerts"] if each["state"] == "firing"}

    def close(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def job(monkeypatch):
    """A server in a process of its own."""
    monkeypatch.setenv("TENSORHUB_METRICS_PORT", str(free_port()))
    with ServerProcess(lease_s=2.0) as server:
        yield server


def opened(stack, server, model, replica, **options):
    weights = tensorhub.open(model, replica=replica, server=server.address, **options)
    stack.callback(weights.close, timeout=1)
    tensors = {"w": np.zeros(1 << 14, "float32")}
    weights.register(tensors)
    return weights, tensors["w"]


@pytest.mark.long
def test_each_alert_fires_by_its_fault(job, tmp_path):
    with contextlib.ExitStack() as stack:
        prometheus = Prometheus(tmp_path, job.address)
        stack.callback(prometheus.close)
        trainer, ours = opened(stack, job, "policy", "trainer", retain=8)
        rollout, _ = opened(stack, job, "policy", "rollout-0", reliable=False)
        full, _ = opened(stack, job, "full", "trainer", host_bytes=0)
        half, _ = (opened(stack, job, "half", "rollout", shard=shard, shards=2)[0] for shard in range(2))
        trainer.publish(1)
        rollout.replicate("latest")
        rollout.check()
        full.publish(1)
        two_pages = {"tensorhub-server": 1, "tensorhub-workers": 1}
        eventually(lambda: prometheus.up() == two_pages, "the scrape of both pages")
        eventually(lambda: prometheus.ask("query", query="tensorhub_version_lag")["result"], "the first lag")
        eventually(lambda: prometheus.firing() == set(), "the end of what fired before the first scrape")
        faults = {
            "TensorHubReplicaLags": lambda: publishes(trainer, ours, 5),
            "TensorHubUpdateStalls": lambda: waits(stack, half),
            "TensorHubVersionLost": lambda: subprocess.run([sys.executable, "-c", DIES, job.address], check=False),
            "TensorHubLeasesLost": lambda: None,  # by the same death
            "TensorHubCorruptChunk": lambda: changes_what_is_published(stack, job),
            "TensorHubRefusals": lambda: asks_with_another_token(job, 10),
            "TensorHubHostMemoryFull": lambda: fails(full.unpublish, timeout=1),
            "TensorHubLoopLag": lambda: stands_still(job, prometheus),
        }
        for alert, fault in faults.items():
            assert alert not in prometheus.firing() or alert == "TensorHubLeasesLost"
            fault()
            eventually(lambda alert=alert: alert in prometheus.firing(), alert)
        assert_board_is_answered(prometheus)
        job.kill()
        eventually(lambda: prometheus.firing() >= {"TensorHubServerDown"}, "TensorHubServerDown")


def publishes(trainer, ours, count):
    for version in range(2, 2 + count):
        with trainer.mutating(version=version):
            ours += 1


def waits(stack, half):
    """One shard of two is in a call."""
    waiting = threading.Thread(target=fails, args=(half.publish, 1), kwargs={"timeout": 20})
    waiting.start()
    stack.callback(waiting.join)


def fails(call, *arguments, **options):
    with contextlib.suppress(TensorHubError):
        call(*arguments, **options)


def changes_what_is_published(stack, job):
    trainer, ours = opened(stack, job, "changed", "trainer")
    rollout, _ = opened(stack, job, "changed", "rollout")
    trainer.publish(1)
    ours += 1
    fails(rollout.replicate, timeout=3)


def asks_with_another_token(job, times):
    question = urllib.request.Request(f"http://{job.address}/metrics", headers={"Authorization": "Bearer no"})
    for _ in range(times):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(question, timeout=5)


def stands_still(job, prometheus):
    """Its process is stopped until a scrape has failed, which takes a second: a timer in it comes that late."""
    job.send(signal.SIGSTOP)
    eventually(lambda: prometheus.up()["tensorhub-server"] == 0, "a failed scrape")
    job.send(signal.SIGCONT)
    eventually(lambda: "TensorHubServerDown" not in prometheus.firing(), "the server's return")


def assert_board_is_answered(prometheus):
    """Each query of the board makes sense to Prometheus, and those of the job have an answer."""
    board = json.loads((DEPLOY / "grafana/tensorhub.json").read_text())
    queries = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", ())]
    empty = []
    for title, query in queries:
        found = prometheus.ask("query", query=query.replace("$__rate_interval", "1m").replace("$model", ".*"))
        assert found is not None, query
        if not found["result"]:
            empty.append(title)
    assert set(empty) <= {"TensorHub and NIXL"}, empty


def test_the_files_are_well_formed():
    for what in (["rules", "alerts.yml"], ["config", "--syntax-only", "prometheus.yml"]):
        *options, name = what
        command = [PROMTOOL, "check", *options, str(DEPLOY / "prometheus" / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
