"""The doctor: what it finds and measures, that it cannot hang, and that it fits a screen."""

import io
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tensorhub
from tensorhub.cli import doctor
from tensorhub.cli.doctor import Check, Findings, TransportCheck, Way, check_server, check_transport, draw_findings
from tensorhub.cli.main import app
from tensorhub.memory import rates

MIB = 1 << 20


def drawn(found: Findings, width: int = 100, *, is_long: bool = False) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw_findings(found, is_long=is_long))
    return console.export_text()


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The measuring processes run this shell script instead; its `$3` is the role."""

    def set_child(script: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))

    return set_child


# --- Real processes.


NOISY = """
import os
os.write(2, b"noise\\n" * 50_000)  # more than a pipe takes
os.write(1, b"[1699] ucp_context.c:1 UCX  INFO  noise\\n{}\\n[1, 2]\\n\\377\\n and half a line")
"""


@pytest.mark.processes
def test_as_a_command_whatever_libraries_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOISY)  # as UCX does, where it is told to log
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("TENSORHUB_TRANSPORTS", "tcp,local")
    monkeypatch.setattr(doctor, "examine", partial(doctor.examine, size_bytes=9 * MIB + 5))
    with tensorhub.serve() as server:
        monkeypatch.setenv("TENSORHUB_SERVER", server.address)
        done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["is_well"]
    assert [each["name"] for each in found["transports"]] == ["tcp", "local", "cuda", "nixl"]
    assert [each["is_taken"] for each in found["transports"]] == [True, True, False, False]
    tcp, local, *_ = found["transports"]
    assert min(tcp["rate_bytes_per_s"], local["rate_bytes_per_s"]) > 0
    assert all(each["works"] or each["reason"] for each in found["transports"])
    names = [way["name"] for way in found["ways"]]
    assert names == ["local", "local from mapped memory", "tcp", "tcp without digests", "host digest"]
    assert all(way["rate_bytes_per_s"] > 0 and way["limit_bytes_per_s"] > 0 for way in found["ways"])
    assert isinstance(found["far_below"], list)
    checks = {check["name"]: check for check in found["machine"]}
    assert {"host", "native mover", "reading memory", "GPU", "RDMA", "open files"} <= checks.keys()
    assert server.address in checks["reference server"]["says"]
    assert "the address is from TENSORHUB_SERVER" in checks["reference server"]["says"]


@pytest.mark.processes
def test_a_device_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_devices", lambda: ["0000:01:00.0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checks, ways = doctor.check_device(size_bytes=MIB)
    assert not ways
    assert checks[0].says.startswith("nothing was measured on the device: torch")


# --- Children that misbehave.


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo noise; sleep 1000", "gave no answer within 0.3 s"),
        ("echo '{}'; exec >&-; sleep 1000", "gave no answer within 0.3 s"),
        ("printf '\\377\\n'; exit 3", "ended with 3"),
        ("kill -6 $$", "ended with -6"),
        ("echo no transport >&2; exit 3", "ended with 3: no transport"),
        ("echo nonsense", "ended with"),
    ],
)
def test_a_child_that_hangs_or_dies_is_an_answer(does: str, says: str, child: Callable[[str], None]) -> None:
    child(does)
    found, _ = check_transport("nixl", size_bytes=MIB, deadline_s=0.3)
    assert not found.works
    assert says in found.reason
    assert "TENSORHUB_TRANSPORTS=local,tcp" in found.remedy


def test_where_no_process_can_be_started_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(doctor, "_devices", lambda: ["0000:01:00.0"])
    found, _ = check_transport("tcp", size_bytes=MIB)
    assert not found.works
    checks, _ = doctor.check_device()
    asked = check_server("127.0.0.1:1")
    assert asked.state == "bad"
    assert all("/nowhere/python" in says for says in (found.reason, checks[0].says, asked.says))


# --- Ways beside their limits.


MEASURED = """
case $3 in
source) say='"endpoint": "tcp://1"' ;;
reader) say='"rate_bytes_per_s": 5, "path": "2 streams", "ways": [["tcp", 1000, 1100], ["host digest", 10, 1000]]' ;;
device) say='"ways": [["host copy", 40e9, 50e9], ["digest on the device", 1e9, 4e12]]' ;;
esac
printf 'tensorhub-doctor {%s}\\n' "$say"
"""


def test_a_way_far_below_its_limit_is_named_with_what_to_do(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child(MEASURED)
    monkeypatch.setattr(doctor, "TRANSPORTS", {"tcp": doctor.TRANSPORTS["tcp"]})
    monkeypatch.setattr(doctor, "_devices", lambda: ["0000:01:00.0"])
    found = doctor.examine(None)
    assert json.loads(found.as_json())["far_below"] == ["host digest", "digest on the device"]
    assert found.is_well, "slow, and it works"
    text = " ".join(drawn(found).split())
    assert "host digest slow far below its limit: 10 B/s, 1 % of a bare copy (1000 B/s) → the line" in text
    assert "digest on the device slow" in text
    assert "nvidia-smi" in text
    assert "of the limit ok tcp 91 %, host copy 80 %" in text
    assert "37.3 GiB/s, 80 % of the bus, pinned (46.6 GiB/s)" in drawn(found, is_long=True)


def test_without_a_device_one_line_says_so_and_no_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(doctor, "_devices", lambda: [])
    assert doctor.check_device() == ([], [])
    assert check_transport("cuda")[0].reason == "no NVIDIA device is here"
    (line,) = [check.says for check in doctor.machine_checks() if check.name == "GPU"]
    assert "no NVIDIA device" in line
    assert "no way to one is measured" in line


class DeviceStream:
    """What the measuring process uses of a `CudaStream`: notes which bytes were asked for."""

    size_bytes = 70 * MIB

    def __init__(self, *, hashes: bool) -> None:
        self.has_kernels = hashes
        self.done: list[tuple[str, int, int]] = []

    def hashes(self, start: int, stop: int) -> bool:
        return self.has_kernels

    def device_digests(self, chunk_bytes: int) -> None:
        self.done.append(("digest", 0, self.size_bytes))

    def copy_from(self, source: object, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> None:
        assert digests
        self.done.append(("copy with digest", start, stop))

    def copy_to_host(self, start: int, stop: int, address: int) -> None:
        assert address == 1000 + start
        self.done.append(("host copy", start, stop))

    @contextmanager
    def views_to_read(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        self.done.append(("ring", start, stop))
        yield []

    def of(self, what: str) -> int:
        return sum(stop - start for name, start, stop in self.done if name == what)


def test_each_way_of_a_device_moves_all_of_its_bytes() -> None:
    pytest.importorskip("torch")
    stream = DeviceStream(hashes=True)
    ways = [*rates.on_device_ways(stream, 0, 100.0, 4 * MIB), *rates.bus_ways(stream, 1000, 50.0, 4 * MIB)]
    assert [name for name, _, _ in ways] == ["digest on the device", "copy with digest", "host copy", "pinned ring"]
    assert [limit for _, _, limit in ways] == [200.0, 100.0, 50.0, 50.0]
    assert {name for name, _, _ in ways} < doctor.WAYS.keys()
    whole = rates.ROUNDS * stream.size_bytes
    assert [stream.of(what) for what in ("digest", "copy with digest", "host copy", "ring")] == [whole] * 4
    assert not rates.on_device_ways(DeviceStream(hashes=False), 0, 100.0, 1), "the line GPU says why"


# --- What is taken, and what the machine has.


ALWAYS, NOTHING, RDMA = (True, ""), (False, "no RDMA device and no GPU is here"), (True, "RDMA (mlx5_0)")


@pytest.mark.parametrize(
    ("name", "named", "default", "is_taken", "says"),
    [
        ("local", (), ALWAYS, True, ""),
        ("nixl", (), NOTHING, False, "no RDMA device and no GPU is here"),
        ("nixl", (), RDMA, True, ""),
        ("nixl", ("nixl", "tcp"), NOTHING, True, ""),
        ("nixl", ("tcp",), RDMA, False, "TENSORHUB_TRANSPORTS=tcp leaves it out"),
        ("local", ("tcp",), ALWAYS, False, "TENSORHUB_TRANSPORTS=tcp leaves it out"),
    ],
)
def test_what_works_and_is_not_taken_says_why(
    name: str, named: tuple[str, ...], default: tuple[bool, str], is_taken: bool, says: str
) -> None:
    found = doctor.with_choice(TransportCheck(name, True, "use", 5), named, default)
    assert (found.works, found.is_taken) == (True, is_taken)
    assert says in found.reason
    assert bool(found.remedy) == (not is_taken)
    absent = TransportCheck(name, False, "use", reason="absent", remedy="install")
    missing = doctor.with_choice(absent, named, default)
    assert missing.reason.startswith("absent")
    assert missing.remedy == ("install" if is_taken else ""), "no remedy where none is needed"
    assert ("mlx5_0" in found.use) == (is_taken and default == RDMA)


def test_it_asks_the_server_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_transport", lambda name, **_: (TransportCheck(name, True, "use", 5), []))
    monkeypatch.setenv("TENSORHUB_SERVER", "127.0.0.1:1")
    done = CliRunner().invoke(app, ["doctor", "--json", "--server", "127.0.0.1:2"])
    assert done.exit_code == 1
    (asked,) = [check for check in json.loads(done.stdout)["machine"] if check["name"] == "reference server"]
    assert asked["state"] == "bad"
    assert "127.0.0.1:2" in asked["says"]
    assert "TENSORHUB_SERVER" not in asked["says"]
    assert "tensorhub serve" in asked["remedy"]


def test_every_fact_about_the_machine_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.machine_checks()
    assert all(check.says and check.state in ("good", "note", "absent") for check in found)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    monkeypatch.setattr(doctor, "yama_scope", lambda: 2)
    monkeypatch.setattr(doctor, "_status", lambda name: "")
    monkeypatch.setattr(doctor.load, "library", lambda: None)
    monkeypatch.setattr(doctor.load, "why_not", lambda: "it was not built")

    def broken() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(doctor.platform, "release", broken)
    notes = {check.name: check for check in doctor.machine_checks() if check.state == "note"}
    assert notes["open files"].remedy == "ulimit -n 1024"
    assert "ptrace_scope" in notes["reading memory"].remedy
    assert "it was not built" in notes["native mover"].says
    assert "C compiler" in notes["native mover"].remedy
    assert "no such file" in notes["host"].says


# --- One screen.


LOCAL = TransportCheck("local", False, "two workers of one host", reason="the kernel refuses", remedy="ask it nicely")
WORST = Findings(
    [
        replace(
            LOCAL,
            reason="reading the memory of process 15816 is refused: Operation not permitted",
            remedy="run both as one user; in a container `--cap-add=SYS_PTRACE`, and let its seccomp filter pass it",
        ),
        TransportCheck("tcp", True, "any two hosts", 5 << 30, "2 streams"),
        TransportCheck("nixl", False, "RDMA, NVLink, CUDA IPC", reason="none is installed. Not taken: no GPU is here"),
    ],
    [
        Check("host", "good", "Linux"),
        Check("reading memory", "note", "Yama 2 (administrators only)", "sysctl kernel.yama.ptrace_scope=1"),
        Check("GPU", "absent", "no NVIDIA device: weights stay in host memory"),
        Check("RDMA", "absent", "no device in /sys/class/infiniband; between hosts it is tcp"),
        Check("open files", "note", "1024 (at most 4096)", "ulimit -n 4096"),
        Check("shared memory", "good", "23.5 GiB free"),
    ],
    [Way(name, 5 << 30, 6 << 30) for name in ("tcp", "tcp without digests", "host digest")],
)


@pytest.mark.parametrize("width", [80, 120])
def test_a_machine_with_many_faults_fits_a_screen(width: int) -> None:
    text = drawn(WORST, width)
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for says in ("5.0 GiB/s", "is refused", "→ run both as one user", "ulimit -n 4096", "take tcp"):
        assert says in words
    assert "the rest ok host, shared memory" in words, "what is well is one line"
    assert "23.5 GiB free" in drawn(WORST, width, is_long=True)


def test_where_nothing_works_it_says_so() -> None:
    found = Findings([LOCAL], [])
    assert not found.is_well
    assert "No transport works" in drawn(found)
    assert WORST.is_well
    assert not replace(WORST, machine=[Check("reference server", "bad", "no answer")]).is_well
