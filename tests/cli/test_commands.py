"""The commands as programs: what they print, where, and with which exit status."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

import tensorhub
from tensorhub.cli.main import app
from tensorhub.cli.output import error_text
from tensorhub.protocol.errors import ServerUnreachable


def start(*arguments: str) -> subprocess.Popen[str]:
    """The program, started. Wide enough that nothing folds, and told nothing about colours by who runs the tests."""
    command = [sys.executable, "-m", "tensorhub", *arguments]
    pipe = subprocess.PIPE
    colours = ("PY_COLORS", "FORCE_COLOR", "NO_COLOR", "GITHUB_ACTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in colours}
    environment |= {"COLUMNS": "120", "PYTHONUNBUFFERED": "1", "TERM": "dumb"}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environment)


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of a command that looks at a server, in this process."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        patch.setenv("TERM", "dumb")
        try:
            app(list(arguments))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
    return status, out.getvalue(), err.getvalue()


def run_program(*arguments: str) -> tuple[int, str, str]:
    """The same of a program of its own."""
    with start(*arguments) as program:
        try:
            out, err = program.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
    return program.returncode, out, err


def run_into(stdout: BinaryIO, *arguments: str) -> tuple[int, str]:
    """Exit status and stderr, where stdout is that file."""
    command = [sys.executable, "-m", "tensorhub", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, timeout=60)
    return done.returncode, done.stderr.decode()


def test_help_names_every_command() -> None:
    status, out, err = run_program("--help")
    assert (status, err) == (0, "")
    for command in ("serve", "status", "watch", "doctor", "push", "pull", "ls", "rm", "hold", "archive"):
        assert re.search(rf"\b{command}\b", out), command
    assert re.fullmatch(r"tensorhub \d+\.\d+\.\d+\S*\n", run("--version")[1])


def test_a_server_that_is_not_there_is_two_clear_lines() -> None:
    status, out, err = run("status", "--server", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert "Traceback" not in err
    what, hint = err.strip().splitlines()
    assert what == "error (server-unreachable): no reference server at 127.0.0.1:1: Connection refused"
    assert hint.startswith("hint: ")


def test_a_bad_address_is_an_error_not_a_traceback() -> None:
    status, _, err = run("status", "--server", "http://[nonsense")
    assert status == 1
    assert err.startswith("error (usage)")


def test_a_token_is_in_no_argument_and_one_that_cannot_be_given_is_not_shown(tmp_path: Path) -> None:
    """Arguments are seen by everybody, in `ps`."""
    status, _, err = run("serve", "--token", "s3cret")
    assert (status, "No such option: --token" in err) == (2, True)
    path = tmp_path / "token"
    path.write_text("s3cret\nof two lines\n")
    status, out, err = run("serve", "--token-file", str(path))
    assert (status, out) == (1, "")
    assert err == f"error (usage): {path} holds no secret\nhint: it is to hold one line: the token\n"


def test_misuse_has_status_2_and_names_the_bounds() -> None:
    status, out, err = run("watch", "--every", "nan")
    assert (status, out) == (2, "")
    assert "--every" in err
    assert "from 0.1 to 86,400" in " ".join(err.split())
    assert "Traceback" not in err


def test_what_a_peer_said_of_an_error_is_not_obeyed() -> None:
    assert "\x1b" not in error_text(ServerUnreachable("it says \x1b[2J", hint="\x1b]0;owned\x07"))


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server in this process."""
    with tensorhub.serve() as server:
        yield server.address


@pytest.mark.processes
def test_serve_and_look() -> None:
    """The server is started by the command, and ended by SIGTERM, cleanly."""
    with start("serve", "--port", "0", "--fresh") as program:
        assert program.stdout is not None
        found = re.search(r"reference server at (\S+);", program.stdout.readline())
        assert found is not None
        look(found[1])
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=20)
        assert program.returncode == 0


def look(address: str) -> None:
    """At a server that knows no model."""
    status, out, err = run("status", "--server", address)
    assert (status, err) == (0, "")
    assert "No model yet" in out
    status, out, _ = run("status", "--server", address, "--json")
    assert status == 0
    assert json.loads(out)["models"] == []
    status, out, _ = run("watch", "--server", address, "--every", "0.1", "--times", "2")
    assert status == 0
    assert out.count("reference server") == 2
    status, out, _ = run("watch", "--server", address, "--every", "0.1", "--times", "2", "--json")
    assert status == 0
    assert [json.loads(line)["models"] for line in out.splitlines()] == [[], []]
    with Path("/dev/full").open("wb") as full:
        status, err = run_into(full, "status", "--json", "--server", address)
        assert (status, err) == (1, "error: cannot write to standard output: No space left on device\n")


def test_a_model_that_is_not_there_is_said_and_those_that_are(address: str) -> None:
    with tensorhub.open("policy", replica="a", server=address), tensorhub.open("draft", replica="a", server=address):
        status, out, err = run("status", "--server", address, "--model", "polcy")
        assert (status, out) == (1, "")
        words = f"error (version-unavailable): {address} knows no model 'polcy'\nhint: there are: draft, policy\n"
        assert err == words
        status, out, _ = run("status", "--server", address, "--model", "policy")
        assert status == 0
        assert "draft" not in out
        status, out, _ = run("status", "--server", address, "--replica", "[bc]", "--json")
        assert (status, [each["replicas"] for each in json.loads(out)["models"]]) == (0, [[], []])


AS_BY_DEFAULT = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program on a terminal that can be drawn on, and the other end of that terminal.

    It ignores no signal, also where these tests were started by `nohup`.
    """
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, "-c", AS_BY_DEFAULT, sys.executable, "-m", "tensorhub", *arguments]
    program = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    try:
        yield program, ours
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def heard(terminal: int, until: bytes = b"") -> bytes:
    """What comes from the terminal up to these words, or else until nobody has it open any more."""
    text = b""
    while not until or until not in text:
        is_ready, _, _ = select.select([terminal], [], [], 30)
        assert is_ready, f"nothing more came after {text!r}"
        try:
            text += os.read(terminal, 65536)
        except OSError:  # Linux's way to say so
            break
    return text


SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


@pytest.mark.processes
def test_a_signal_that_ends_watch_leaves_the_terminal_as_it_was(address: str) -> None:
    with on_a_terminal("watch", "--server", address, "--every", "0.1") as (program, terminal):
        assert b"\x1b[?1049h" in heard(terminal, until=b"No model yet"), "it has taken the whole screen"
        program.send_signal(signal.SIGHUP)
        assert heard(terminal).endswith(SHOW_CURSOR + b"\x1b[?1049l"), "the screen is that of before"
        assert program.wait(timeout=20) == 128 + signal.SIGHUP


@pytest.mark.processes
def test_q_ends_watch_and_keys_are_typed_again(address: str) -> None:
    with on_a_terminal("watch", "--server", address, "--every", "60") as (program, terminal):
        heard(terminal, until=b"No model yet")
        before = termios.tcgetattr(terminal)[3]
        assert not before & termios.ICANON, "a key counts without Return"
        os.write(terminal, b"q")
        assert heard(terminal, until=b"\x1b[?1049l").endswith(SHOW_CURSOR + b"\x1b[?1049l")
        assert program.wait(timeout=20) == 0
        assert termios.tcgetattr(terminal)[3] & termios.ICANON


@pytest.mark.processes
def test_a_signal_that_ends_the_doctor_shows_the_cursor_again() -> None:
    with on_a_terminal("doctor") as (program, terminal):
        heard(terminal, until=HIDE_CURSOR)
        program.send_signal(signal.SIGTERM)
        assert SHOW_CURSOR in heard(terminal)
        assert program.wait(timeout=20) == 128 + signal.SIGTERM


@pytest.mark.processes
def test_a_server_makes_its_token_and_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_STATE_DIR", str(tmp_path / "state"))
    with start("serve", "--host", "0.0.0.0", "--port", "0", "--fresh") as program:
        assert program.stdout is not None
        said = [program.stdout.readline() for _ in range(3)]
        address = f"127.0.0.1:{said[0].split()[3].rstrip(';').rpartition(':')[2]}"
        token = (tmp_path / "state" / "token").read_text().strip()
        assert said[1].startswith(f"its token is in {tmp_path}/state/token: ")
        assert said[2].startswith("on other hosts: copy that file")
        with pytest.raises(tensorhub.Refused):
            tensorhub.connect(address, insecure=True).models()
        assert run("status", "--server", address)[0] == 0, "it finds the token by itself"
        assert tensorhub.connect(address).models() == []
        monkeypatch.setenv("TENSORHUB_STATE_DIR", str(tmp_path / "elsewhere"))
        status, _, err = run("status", "--server", address)
        assert (status, "error (refused)" in err) == (1, True)
        assert "copy ~/.local/state/tensorhub/token" in err
        assert run("status", "--server", address, "--token-file", str(tmp_path / "state" / "token"))[0] == 0
        arguments = Path(f"/proc/{program.pid}/cmdline").read_bytes() + b"".join(map(str.encode, said))
        assert token.encode() not in arguments
        program.terminate()


@pytest.mark.long
@pytest.mark.processes
def test_a_server_that_lets_everybody_in_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_STATE_DIR", str(tmp_path / "state"))
    with start("serve", "--host", "0.0.0.0", "--port", "0", "--fresh", "--insecure") as program:
        assert program.stdout is not None
        address = program.stdout.readline().split()[3].rstrip(";")
        assert tensorhub.connect(f"127.0.0.1:{address.rpartition(':')[2]}").models() == []
        program.terminate()
        _, err = program.communicate(timeout=60)
    assert err.count("this server is insecure: any client that reaches") == 1
    assert not (tmp_path / "state" / "token").exists()


@pytest.mark.processes
def test_a_port_that_is_taken_is_said(address: str) -> None:
    status, _, err = run_program("serve", "--port", address.rpartition(":")[2])
    assert status == 1
    assert "error (usage): cannot listen" in err


def test_rm_forgets_a_models_numbers_and_names_who_holds_a_version():
    with tensorhub.serve(lease_s=2, report_s=0.2) as server:
        weights = tensorhub.open("policy", replica="t", server=server.address, reliable=False, host_bytes=0)
        weights.register({"w": np.zeros(9, np.float32)})
        weights.publish(8)
        status, out, err = run("rm", "policy", "--yes", "--server", server.address)
        assert (status, out) == (1, "")
        assert "versions of policy are held, its newest is 8: by policy/t[0]" in err
        weights.close()
        assert run_program("rm", "policy", "--server", server.address)[0] == 1, "its question was not answered"
        status, out, err = run("rm", "policy", "--yes", "--server", server.address)
        assert (status, err + out) == (0, "policy is begun anew: its next version may have any number\n")
        assert tensorhub.connect(server.address).next_version("policy") == 0
