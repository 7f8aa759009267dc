"""The benchmarks still run: every part once and tiny, and what `server` measures with. Not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import decisions, ideal, lateness
from bench.decisions import Curves
from bench.fleet import BUSY, GONE, IDLE, Fleet, TooDear
from bench.thin import hello_of, root_of
from tensorhub.protocol.messages import CallReport, Holding, Report
from tensorhub.protocol.names import Version, worker_id

ROOT = Path(__file__).resolve().parents[2]
ROOT_PARTS = {"addresses", "fan_out", "faults", "faults_across", "masters", "taking_back"}
PARTS = ROOT_PARTS | {"one_reader", "busy", "sizes", "chunks", "many_tensors", "memory", "growth", "pieces", "plans"}
PARTS |= {"pieces_beside", "server", "decisions", "lateness"}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(900)  # two minutes on a quiet machine; only a hang may end it on one that is three times slower
def test_every_part_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--selfcheck", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert set(found["parts"]) == PARTS
    for name, part in found["parts"].items():
        assert "skipped" not in part or name in ROOT_PARTS, f"{name} was skipped: {part['skipped']}"
    assert (tmp_path / "bench.md").read_text(encoding="utf-8").startswith("Measured with")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_fleet_follows_its_trainer(shards):
    fleet = Fleet(8, shards, read_s=1.0)
    with fleet.counting() as meter:
        fleet.join()
    assert meter.counts[BUSY] >= 3 * 8, "a hello, a layout and a report of each"
    assert fleet.holders(1) == 8
    fleet.publish(2)
    began = fleet.now
    fleet.begin_update()
    fleet.finish_update()
    assert fleet.holders(2) == 8
    assert 1.0 <= fleet.now - began < 4.0, "one read, after at most a second"
    assert all(finished.error is None for thin in fleet.workers.values() for _, finished in thin.finished)


def test_only_the_server_is_counted_and_idle_reports_apart():
    fleet = Fleet(8)
    fleet.join()
    fleet.run(within_s=2.0)
    with fleet.counting() as meter:
        fleet.run(within_s=3.0)
    assert meter.counts[IDLE] == 3 * 8
    assert meter.counts[BUSY] == 0
    assert meter.own_s == pytest.approx(meter.total_s - meter.cpu_s[IDLE])
    with pytest.raises(TooDear), fleet.counting(most_s=0.0):
        fleet.run(within_s=3.0)


def test_a_fleet_goes_on_after_a_death_and_a_restart_in_mid_update():
    fleet = Fleet(8, 2)
    fleet.join()
    fleet.publish(2)
    fleet.begin_update()
    fleet.run(within_s=1.2)
    with fleet.counting() as meter:
        dead = fleet.rollouts[0]
        fleet.kill(dead)
    assert meter.counts[GONE] == 1
    fleet.restart_server()
    fleet.finish_update()
    others = [thin for thin in fleet.workers.values() if thin.me.replica != dead.me.replica]
    assert [thin.worker.held for thin in others] == [2] * 6


def test_every_figure_of_a_small_fleet():
    curves = Curves(1, max_cpu_s=60.0)
    decisions.measure(curves, 6, read_s=1.0)
    found = {name: curve.found.get(6) for name, curve in curves.of.items()}
    assert all(value is not None and value > 0 for value in found.values()), found
    assert 500 < found["bytes"] < 100_000


def test_the_stand_in_decides_by_the_report_alone():
    server, state = ideal.Ideal(), {}
    trainer, rollout = (hello_of(worker_id("m", name, 0), 1) for name in ("trainer", "rollout"))
    asked = CallReport(1, "publish", 7, root=root_of(7, 0))
    orders = server.answer(trainer, Report(1, call=asked, buffer=Holding(Version(7), root_of(7, 0))), {})
    assert (orders.answer.version, orders.answer.finished) == (7, True)
    wants = Report(5, call=CallReport(1, "update", "latest"), buffer=Holding(Version(6), root_of(6, 0)))
    first, second = server.answer(rollout, wants, state), server.answer(rollout, wants, state)
    assert (first.acknowledged, first.answer.version, first.answer.finished) == (5, 7, False)
    assert (first.grant.source.worker, first.grant.root) == (trainer.worker, root_of(7, 0))
    assert (second.session, second.grant) == (first.session, first.grant)


@pytest.mark.processes
@pytest.mark.parametrize("is_ideal", [False, True], ids=["server", "stand-in"])
def test_a_small_crowd_with_real_connections(is_ideal, monkeypatch):
    monkeypatch.setattr(lateness, "READ_S", 0.5)
    found = lateness.measure(6, is_ideal=is_ideal, spread_s=0.2, within_s=30.0)
    assert (found["missing"], found["failed"], found["sessions_lost"], found["reconnections"]) == (0, 0, 0, 0)
    assert found["reports"] > 6
    assert 0.5 <= found["last_holder_s"] <= found["last_caller_s"] < 30.0
    assert 0.0 < found["wait_p50_s"] <= found["wait_p99_s"]
