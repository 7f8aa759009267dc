"""`tensorhub events`, and the server's log as JSON."""

import json
import logging
import re
import signal
import sys

import numpy as np
import pytest

import tensorhub
from tensorhub.cli.output import JsonFormat
from tensorhub.protocol.events import Left, Refused
from tensorhub.runtime.serving import ServerThread

from .test_commands import run, start


@pytest.fixture
def told():
    """A server that has seen a worker of each of two models come and go."""
    with tensorhub.serve() as server:
        for model in ("policy", "draft"):
            tensorhub.open(model, replica="a", server=server.address).close()
        yield server.address


def test_each_event_is_a_line_with_its_time(told):
    status, out, err = run("events", "--server", told, "--model", "policy")
    assert (status, err) == (0, "")
    joined, left = out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  policy/a\[0\] joined, host \S+", joined)
    assert left.endswith("  policy/a[0] left")
    assert len(run("events", "--server", told)[1].splitlines()) == 5


def test_as_json_each_is_an_object(told):
    status, out, _ = run("events", "--server", told, "--json", "--model", "draft")
    found = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [each["kind"] for each in found] == ["joined", "left"]
    assert found[0]["number"] < found[1]["number"]


def test_a_server_that_is_not_there_is_an_error_at_once_also_for_who_follows():
    status, out, err = run("events", "-f", "--server", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert "server-unreachable" in err


@pytest.mark.long
@pytest.mark.processes
def test_who_follows_goes_on_after_a_restart_and_ends_by_an_interrupt():
    with tensorhub.serve() as first:
        host, port = first.address.split(":")
        program = start("events", "--follow", "--json", "--server", first.address)
        assert json.loads(program.stdout.readline())["kind"] == "server_started"
    with ServerThread(host, int(port), fresh=True) as second:
        assert json.loads(program.stdout.readline())["kind"] == "server_started"
        tensorhub.open("m", replica="a", server=second.address).close()
        assert [json.loads(program.stdout.readline())["kind"] for _ in range(2)] == ["joined", "left"]
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=20)
    assert program.returncode == 0, err
    assert "Traceback" not in err


def record(text, **more):
    found = logging.LogRecord("tensorhub.events", logging.WARNING, __file__, 0, "%s", (text,), None)
    for name, value in more.items():
        setattr(found, name, value)
    return found


def test_a_line_of_the_log_as_json_has_the_event_and_the_traceback():
    event = Left(number=7, model="m", replica="a")
    line = json.loads(JsonFormat().format(record(event.text, event=event)))
    assert (line["level"], line["logger"], line["message"]) == ("warning", "tensorhub.events", "m/a[0] left")
    assert (line["event"]["kind"], line["event"]["number"]) == ("left", 7)
    try:
        raise ValueError("a\nb")
    except ValueError:
        failed = JsonFormat().format(record("it failed", exc_info=sys.exc_info()))
    assert "\n" not in failed
    assert "ValueError" in json.loads(failed)["traceback"]


def test_serve_takes_the_format_from_its_environment_and_refuses_others(monkeypatch):
    monkeypatch.setenv("TENSORHUB_LOG_FORMAT", "xml")
    status, _, err = run("serve", "--port", "0")
    assert status == 2
    assert "neither text nor json" in " ".join(err.split())


@pytest.mark.processes
def test_a_server_logs_what_a_client_did_as_json():
    with start("serve", "--port", "0", "--fresh", "--log-format", "json") as program:
        address = re.search(r"reference server at (\S+);", program.stdout.readline())[1]
        with pytest.raises(tensorhub.Refused):
            tensorhub.open("m", replica="a", server=address, token="another")
        weights = tensorhub.open("m", replica="a", server=address)
        weights.register({"w": np.ones(10)})
        weights.publish(1)
        weights.close()
        program.send_signal(signal.SIGTERM)
        _, err = program.communicate(timeout=20)
    lines = [json.loads(line) for line in err.splitlines()]
    lines = [line for line in lines if "event" in line and line["event"]["kind"] != "offloaded"]  # it may copy ahead
    told = [line["event"]["kind"] for line in lines]
    assert told == ["server_started", "refused", "joined", "writer_changed", "published", "left"]
    levels = [line["level"] for line in lines]
    assert levels == ["info", "warning", *["info"] * 4]
    assert Refused.__name__ not in err
