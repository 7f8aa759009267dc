"""The doctor: what it finds, that it cannot hang, and that it fits a screen."""

import io
import json
import resource
import stat
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tensorhub.cli import doctor, machine
from tensorhub.cli.doctor import Check, Findings, TransportCheck, check_server, check_transport
from tensorhub.cli.doctor_draw import draw_findings
from tensorhub.cli.machine import machine_checks

from .test_commands import run

MIB = 1 << 20


def drawn(found: Findings, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw_findings(found))
    return console.export_text()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["local", "tcp"])
def test_a_transport_is_measured_between_two_processes(name: str) -> None:
    found = check_transport(name, size_bytes=9 * MIB + 5)
    assert found.works, found.reason
    assert found.rate_bytes_per_s > 0
    assert found.path


@pytest.mark.processes
def test_a_transport_that_does_not_exist_is_no_accident() -> None:
    found = check_transport("smoke", size_bytes=MIB)
    assert not found.works
    assert "smoke" in found.reason


@pytest.mark.processes
def test_a_server_that_is_there_and_one_that_is_not() -> None:
    import tensorhub

    with tensorhub.serve() as server:
        good = check_server(server.address)
    assert (good.state, good.remedy) == ("good", "")
    assert server.address in good.says
    bad = check_server("127.0.0.1:1")
    assert bad.state == "bad"
    assert "tensorhub serve" in bad.remedy


@pytest.mark.processes
@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("sleep 1000", "nothing within"),
        ("kill -6 $$", "ended with -6"),
        ("echo no transport >&2; exit 3", "ended with 3: no transport"),
        ("echo nonsense", "ended with"),
    ],
)
def test_a_child_that_hangs_or_dies_is_an_answer(
    does: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    found = check_transport("nixl", size_bytes=MIB, deadline_s=0.5)
    assert not found.works
    assert says in found.reason
    assert "tensorhub[nixl]" in found.remedy


@pytest.mark.processes
def test_as_a_command() -> None:
    status, out, err = run("doctor", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["is_well"]
    assert [each["name"] for each in found["transports"]] == list(doctor.PREFERENCE)
    assert found["transports"][-1]["works"]
    assert all(each["works"] or each["reason"] for each in found["transports"])
    names = {check["name"] for check in found["machine"]}
    assert names >= {"host", "reading memory", "GPU", "RDMA", "NIXL", "congestion control", "open files"}


def test_every_fact_about_the_machine_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine_checks()
    assert all(check.says and check.state in ("good", "note", "absent") for check in found)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    monkeypatch.setattr(machine, "yama_scope", lambda: 2)
    monkeypatch.setattr(machine, "_status", lambda name: "")
    notes = {check.name: check for check in machine_checks() if check.state == "note"}
    assert notes["open files"].remedy == "ulimit -n 1024"
    assert "ptrace_scope" in notes["reading memory"].remedy


def test_what_cannot_be_found_out_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(machine.platform, "release", broken)
    assert machine_checks()[0].state == "note"


SOME = Findings(
    [
        TransportCheck("local", False, "two workers of one host", reason="the kernel refuses", remedy="ask it nicely"),
        TransportCheck("tcp", True, "any two hosts", 5 << 30, "2 streams"),
    ],
    [Check("GPU", "absent", "none"), Check("open files", "note", "256 (at most 1024)", "ulimit -n 1024")],
)


@pytest.mark.parametrize("width", [80, 120])
def test_one_screen_says_what_works_why_not_and_what_to_do(width: int) -> None:
    text = drawn(SOME, width)
    assert len(text.splitlines()) < 25
    assert max(map(len, text.splitlines())) <= width
    text = " ".join(text.split())
    for words in ("5.0 GiB/s", "the kernel refuses", "→ ask it nicely", "ulimit -n 1024", "take tcp"):
        assert words in text


def test_where_nothing_works_it_says_so() -> None:
    found = Findings(SOME.transports[:1], SOME.machine)
    assert not found.is_well
    assert "No transport works" in drawn(found)
    assert not Findings(SOME.transports, [Check("reference server", "bad", "no answer")]).is_well
    assert SOME.is_well
