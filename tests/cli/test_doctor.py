"""The doctor: what it finds, that it cannot hang, and that it fits a screen."""

import io
import json
import os
import resource
import stat
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tensorhub.cli import doctor
from tensorhub.cli.doctor import (
    Check,
    Findings,
    TransportCheck,
    check_server,
    check_transport,
    draw_findings,
    machine_checks,
    with_choice,
)

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
        ("sleep 1000", "gave no answer within 0.5 s"),
        ("echo noise; sleep 1000", "gave no answer within 0.5 s"),
        ("echo '{}'; exec >&-; sleep 1000", "gave no answer within 0.5 s"),
        ("printf '\\377\\n'; exit 3", "ended with 3"),
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
    assert "TENSORHUB_TRANSPORTS=local,tcp" in found.remedy


NOISY = """
import os
os.write(2, b"noise\\n" * 50_000)  # more than a pipe takes
os.write(1, b"[1699] ucp_context.c:1 UCX  INFO  noise\\n{}\\n[1, 2]\\n\\377\\n and half a line")
"""


@pytest.mark.processes
def test_what_a_library_says_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native libraries write to stdout and to stderr as they like: UCX does, where it is told to log."""
    import tensorhub

    (tmp_path / "sitecustomize.py").write_text(NOISY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    found = check_transport("tcp", size_bytes=MIB)
    assert found.works, found.reason
    with tensorhub.serve() as server:
        asked = check_server(server.address)
    assert asked.state == "good", asked.says


def test_where_no_process_can_be_started_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = check_transport("tcp", size_bytes=MIB)
    assert not found.works
    assert "/nowhere/python" in found.reason
    asked = check_server("127.0.0.1:1")
    assert asked.state == "bad"
    assert "/nowhere/python" in asked.says


NOTHING, RDMA = (False, "no RDMA device and no GPU is here"), (True, "RDMA (mlx5_0)")


@pytest.mark.parametrize(
    ("name", "named", "nixl", "is_taken", "says"),
    [
        ("local", (), NOTHING, True, ""),
        ("nixl", (), NOTHING, False, "no RDMA device and no GPU is here"),
        ("nixl", (), RDMA, True, ""),
        ("nixl", ("nixl", "tcp"), NOTHING, True, ""),
        ("nixl", ("tcp",), RDMA, False, "TENSORHUB_TRANSPORTS=tcp leaves it out"),
        ("local", ("tcp",), NOTHING, False, "TENSORHUB_TRANSPORTS=tcp leaves it out"),
    ],
)
def test_what_works_and_is_not_taken_says_why(
    name: str, named: tuple[str, ...], nixl: tuple[bool, str], is_taken: bool, says: str
) -> None:
    found = with_choice(TransportCheck(name, True, "use", 5), named, nixl)
    assert (found.works, found.is_taken) == (True, is_taken)
    assert says in found.reason
    assert bool(found.remedy) == (not is_taken)
    missing = with_choice(TransportCheck(name, False, "use", reason="absent", remedy="install"), named, nixl)
    assert missing.reason.startswith("absent")
    assert missing.remedy == ("install" if is_taken else ""), "no remedy for what nobody needs"
    assert ("mlx5_0" in found.use) == (is_taken and name == "nixl" and nixl[0])


@pytest.mark.processes
def test_the_setting_orders_and_limits_what_the_doctor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_TRANSPORTS", "tcp,local")
    found = doctor.examine(None, size_bytes=MIB)
    assert [each.name for each in found.transports] == ["tcp", "local", "cuda", "nixl"]
    assert [each.is_taken for each in found.transports] == [True, True, False, False]
    assert "take tcp" in drawn(found)


@pytest.mark.processes
def test_it_asks_the_server_that_workers_here_would_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_SERVER", "127.0.0.1:1")
    _, out, _ = run("doctor", "--json")
    asked = [check for check in json.loads(out)["machine"] if check["name"] == "reference server"]
    assert len(asked) == 1
    assert "127.0.0.1:1" in asked[0]["says"]
    assert "the address is from TENSORHUB_SERVER" in asked[0]["says"]
    _, out, _ = run("doctor", "--json", "--server", "127.0.0.1:2")
    asked = [check for check in json.loads(out)["machine"] if check["name"] == "reference server"]
    assert "127.0.0.1:2" in asked[0]["says"], "who names one means that one"
    assert "TENSORHUB_SERVER" not in asked[0]["says"]


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
    assert names >= {"host", "reading memory", "GPU", "RDMA", "congestion control", "open files"}


def test_every_fact_about_the_machine_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine_checks()
    assert all(check.says and check.state in ("good", "note", "absent") for check in found)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    monkeypatch.setattr(doctor, "yama_scope", lambda: 2)
    monkeypatch.setattr(doctor, "_status", lambda name: "")
    notes = {check.name: check for check in machine_checks() if check.state == "note"}
    assert notes["open files"].remedy == "ulimit -n 1024"
    assert "ptrace_scope" in notes["reading memory"].remedy


def test_what_cannot_be_found_out_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(doctor.platform, "release", broken)
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


WORST = Findings(
    [
        TransportCheck(
            "local",
            False,
            "two workers of one host",
            reason="reading the memory of process 15816 is refused: Operation not permitted",
            remedy="run both as one user; in a container `--cap-add=SYS_PTRACE`, and let its seccomp filter pass it",
        ),
        TransportCheck("nixl", False, "RDMA, NVLink, CUDA IPC", reason="none is installed. Not taken: no GPU is here"),
        TransportCheck("tcp", True, "any two hosts", 2 << 30, "2 streams"),
    ],
    [
        Check("host", "good", "Linux"),
        Check("reading memory", "note", "Yama 2 (administrators only)", "sysctl kernel.yama.ptrace_scope=1"),
        Check("GPU", "absent", "no NVIDIA device: weights stay in host memory"),
        Check("RDMA", "absent", "no device in /sys/class/infiniband; between hosts it is tcp"),
        Check("open files", "note", "1024 (at most 4096)", "ulimit -n 4096"),
        Check("shared memory", "good", "23.5 GiB free"),
    ],
)


@pytest.mark.parametrize("width", [80, 120])
def test_a_machine_with_many_faults_fits_a_screen_too(width: int) -> None:
    text = drawn(WORST, width)
    assert len(text.splitlines()) <= 23, "24 with the prompt below it"
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "the rest ok host, shared memory" in words, "what is well is one line"
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw_findings(WORST, is_long=True))
    assert "23.5 GiB free" in console.export_text()


def test_where_nothing_works_it_says_so() -> None:
    found = Findings(SOME.transports[:1], SOME.machine)
    assert not found.is_well
    assert "No transport works" in drawn(found)
    assert not Findings(SOME.transports, [Check("reference server", "bad", "no answer")]).is_well
    assert SOME.is_well
