"""The example: a trainer, rollouts and the reference server as Ray actors, killed and replaced by Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: make test-engines")

import ray

import tensorhub
from tensorhub.integrations.ray import server_address, start_server

from .kit import start_ray

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_actors.py"


def test_actors_come_and_go():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=110, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.split(": ")[0] for line in done.stdout.splitlines() if "rollouts hold version" in line]
    assert shown == [
        "at first",
        "one was added",
        "one was killed, and replaced by Ray",
        "the trainer was killed, and filled from the rollouts",
        "the reference server was killed, and learned from the workers",
        "one was taken away",
    ]


def test_where_no_server_runs_the_error_says_how_to_start_one():
    start_ray(1)
    try:
        with pytest.raises(tensorhub.ServerUnreachable) as raised:
            server_address(name="nobody")
        assert "start_server" in str(raised.value.__notes__)
        address = start_server(report_s=0.2, lease_s=2)
        assert start_server() == address == server_address()
        assert tensorhub.connect(address).models() == []
    finally:
        ray.shutdown()
