"""Metrics: the server's page, the pages of workers, and the files that use their names."""

import contextlib
import json
import re
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tensorhub
from tensorhub.runtime import metrics
from tensorhub.runtime.metrics import METRICS, OTHERS, Metric, Record

from .kit import eventually, own_token

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"  # as Prometheus 2.42 asks


def fetch(url, *, token=None, accept=""):
    """Body and content type."""
    headers = {"Authorization": f"Bearer {own_token() if token is None else token}", "Accept": accept}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


class Page:
    """The samples of a page, by name and labels."""

    def __init__(self, address):
        self.families = list(text_string_to_metric_families(fetch(f"http://{address}/metrics")[0]))

    def of(self, name, **labels):
        """The sum of the samples with these labels; None if there is none."""
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


@pytest.fixture
def first_port(monkeypatch):
    """The first of some ports that were free just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("TENSORHUB_METRICS_PORT", str(min(port, 65_000)))
    return min(port, 65_000)


@contextlib.contextmanager
def joined(server, replica, tensors, **options):
    with tensorhub.open("policy", replica=replica, server=server.address, **options) as weights:
        weights.register(tensors)
        yield weights


def ends_gone(address):
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(f"http://{address}/metrics")


def test_pages_show_an_update_by_the_metrics_of_the_table(server, first_port):
    ours, theirs = ({"w": np.zeros(1 << 16, "float32")} for _ in range(2))
    size_bytes = ours["w"].nbytes
    with joined(server, "trainer", ours) as trainer, joined(server, "rollout-0", theirs, reliable=False) as rollout:
        for version in (1, 2):
            with trainer.mutating(version=version):
                ours["w"] += 1
        rollout.replicate("latest")
        with trainer.mutating(version=3):
            ours["w"] += 1
        rollout.update("latest")
        rollout.check()
        address = f"127.0.0.1:{first_port}"
        assert json.loads(fetch(f"http://{server.address}/v1/targets")[0]) == [{"targets": [address], "labels": {}}]
        eventually(lambda: Page(server.address).of("tensorhub_loop_lag_seconds_count"), "the first look at the loop")
        central, own = Page(server.address), Page(address)
    us = {"model": "policy", "replica": "rollout-0", "shard": "0"}
    assert own.of("tensorhub_worker_received_bytes_total", memory="host", **us) == 2 * size_bytes
    assert own.of("tensorhub_worker_sent_bytes_total", replica="trainer") == 2 * size_bytes
    for verb in ("replicate", "update"):
        assert own.of("tensorhub_worker_call_seconds_count", verb=verb, **us) == 1
    for phase, count in (("drain", 1), ("read", 2), ("verify", 1)):
        assert own.of(f"tensorhub_worker_{phase}_seconds_count", **us) == count
    assert own.of("tensorhub_worker_hash_seconds_count", replica="trainer") == 3
    assert own.of("tensorhub_worker_version", **us) == own.of("tensorhub_worker_newest_version", **us) == 3
    assert central.of("tensorhub_latest_version", model="policy") == 3
    assert central.of("tensorhub_version_lag", replica="rollout-0") == 0
    assert central.of("tensorhub_version_lag", replica="trainer") is None, "the writer lags behind nothing"
    assert central.of("tensorhub_workers", model="policy", state="holding") == 2
    assert central.of("tensorhub_read_bytes_total", transport="local", cross_site="no") == 2 * size_bytes
    assert central.of("tensorhub_read_seconds_count", transport="local") == 2
    assert central.of("tensorhub_publish_hash_seconds_count") == 3
    for verb, count in {"publish": 3, "mutating": 3, "replicate": 1, "update": 1}.items():
        assert central.of("tensorhub_call_seconds_count", verb=verb) == count
    assert central.of("tensorhub_published_bytes_total", model="policy") == 3 * size_bytes
    known = {metric.name for metric in METRICS}
    shown = {family.name for page in (central, own) for family in page.families}
    assert {name for name in shown if not name.startswith("process_")} <= known
    ends_gone(address)


def test_the_farthest_replicas_are_shown_where_there_are_too_many(server, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_SERIES", 1)
    ours, theirs, others = ({"w": np.zeros(8, "float32")} for _ in range(3))
    with (
        joined(server, "trainer", ours) as trainer,
        joined(server, "late", theirs) as late,
        joined(server, "new", others) as new,
    ):
        trainer.publish(1)
        late.replicate("latest")
        with trainer.mutating(version=2):
            ours["w"] += 1
        new.replicate("latest")
        page = Page(server.address)
    assert (page.of("tensorhub_version_lag"), page.of("tensorhub_version_lag", replica="late")) == (1, 1)
    assert page.of("tensorhub_version_lag_left_out") == 1


def test_bytes_that_differ_are_counted_by_both_sides(server, first_port):
    ours, theirs = ({"w": np.zeros(1 << 12, "float32")} for _ in range(2))
    with joined(server, "trainer", ours) as trainer, joined(server, "rollout-0", theirs) as rollout:
        trainer.publish(1)
        assert Page(server.address).of("tensorhub_read_failures_total", code="corrupt-transfer") == 0
        ours["w"] += 1  # which it has promised not to do
        with pytest.raises(tensorhub.TensorHubError):
            rollout.replicate("latest", timeout=3)
        own, central = Page(f"127.0.0.1:{first_port}"), Page(server.address)
    assert own.of("tensorhub_worker_read_failures_total", replica="rollout-0", code="corrupt-transfer") >= 1
    assert own.of("tensorhub_worker_call_errors_total", replica="rollout-0", verb="replicate") == 1
    assert central.of("tensorhub_read_failures_total", code="corrupt-transfer") >= 1


def test_a_call_that_waits_for_a_first_version_is_no_long_one(server):
    def waits(call, *arguments):
        with pytest.raises(tensorhub.TensorHubError):
            call(*arguments, timeout=2)

    def longest(verb):
        return Page(server.address).of("tensorhub_longest_call_seconds", verb=verb)

    with (
        joined(server, "early", {"w": np.zeros(8)}) as early,
        tensorhub.open("other", replica="r", shard=0, shards=2, server=server.address) as half,
        ThreadPoolExecutor() as pool,
    ):
        half.register({"w": np.zeros(8)})
        calls = [pool.submit(waits, early.update), pool.submit(waits, half.publish, 1)]
        eventually(lambda: (longest("update"), bool(longest("publish"))) == (0.0, True), "both calls")
        for call in calls:
            call.result()


def test_no_page_without_the_token(server, first_port):
    def refused(url):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(url, token="another")

    before = Page(server.address).of("tensorhub_refusals_total")
    with joined(server, "r", {"w": np.zeros(8)}):
        for url in (f"{server.address}/metrics", f"{server.address}/v1/targets", f"127.0.0.1:{first_port}/metrics"):
            refused(f"http://{url}")
    assert (before, Page(server.address).of("tensorhub_refusals_total")) == (0, 2)


def test_a_port_that_is_taken_is_passed_over(server, first_port):
    with (
        socket.create_server(("127.0.0.1", first_port)),
        joined(server, "a", {"w": np.zeros(8)}),
        joined(server, "b", {"w": np.zeros(8)}),
    ):
        (found,) = json.loads(fetch(f"http://{server.address}/v1/targets")[0])
        (address,) = found["targets"]
        assert first_port < int(address.rpartition(":")[2]) < first_port + metrics.PORTS
        assert {Page(address).of("tensorhub_worker_connected", replica=each) for each in "ab"} == {1}
    ends_gone(address)


def test_without_the_setting_there_is_no_page(server):
    with joined(server, "r", {"w": np.zeros(8)}):
        assert json.loads(fetch(f"http://{server.address}/v1/targets")[0]) == []


def test_the_format_is_the_one_that_prometheus_asks_for(server):
    plain, kind = fetch(f"http://{server.address}/metrics")
    assert (kind.partition(";")[0], plain.endswith("# EOF\n")) == ("text/plain", False)
    open_metrics, kind = fetch(f"http://{server.address}/metrics", accept=ACCEPTED)
    assert (kind.partition(";")[0], open_metrics.endswith("# EOF\n")) == ("application/openmetrics-text", True)


def test_a_metric_has_so_many_series_and_one_for_the_rest(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_SERIES", 2)
    metric, record = Metric("counter", "tensorhub_x", "x", ("model",)), Record()
    for model in "abca":
        record.add(metric, 1, model)
    assert record.counts[metric] == {("a",): 2, ("b",): 1, (OTHERS,): 1}


FILES = sorted([*ROOT.glob("deploy/prometheus/*"), *ROOT.glob("deploy/grafana/*"), ROOT / "docs/metrics.md"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_name_metrics_that_exist(file):
    known = {
        f"{metric.shown_name}{end}"
        for metric in METRICS
        for end in (("_bucket", "_count", "_sum", "") if metric.kind == "histogram" else ("",))
    }
    named = set(re.findall(r"\btensorhub_[a-z_]+\b", file.read_text(encoding="utf-8")))
    assert named - known - {"tensorhub_worker_"} == set()


def test_the_board_is_one_that_grafana_reads():
    board = json.loads((ROOT / "deploy/grafana/tensorhub.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert "agent_tx_bytes_total" in json.dumps(panels), "NIXL is on the same board"
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])
