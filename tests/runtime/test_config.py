"""Settings: argument, then variable, then default; and the secrets of the state directory."""

import io
import os
import stat
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console
from rich.pretty import Pretty

from tensorhub.protocol import messages
from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.config import (
    Access,
    Options,
    access_of,
    secret,
    server_names,
    server_settings,
    state_directory,
    table,
    variable_of,
    worker_options,
)
from tensorhub.transport.local.transport import LocalSettings
from tensorhub.transport.nixl.transport import NixlSettings
from tensorhub.transport.tcp import wire
from tensorhub.transport.tcp.settings import TcpSettings


def test_defaults_hold_where_nothing_is_said():
    assert worker_options({}) == Options()
    assert server_settings({}) == Settings()


def test_a_variable_beats_the_default_and_an_argument_beats_both():
    environ = {"TENSORHUB_SERVER": "one:1", "TENSORHUB_CHUNK_BYTES": "2MiB", "TENSORHUB_TIMEOUT_S": "7"}
    assert worker_options(environ).server == "one:1"
    assert worker_options(environ).chunk_bytes == 2 << 20
    assert worker_options(environ, server="two:2").server == "two:2"
    assert worker_options(environ, timeout_s=8).timeout_s == 8.0
    assert worker_options(environ, timeout_s=None).timeout_s == 7.0
    assert server_settings({"TENSORHUB_LEASE_S": "20"}).lease_s == 20.0
    assert server_settings({"TENSORHUB_LEASE_S": "20"}, lease_s=30).lease_s == 30.0


def test_transports_are_named_in_their_order():
    assert worker_options({}).transports == (), "nobody has said anything"
    assert worker_options({"TENSORHUB_TRANSPORTS": "tcp, local"}).transports == ("tcp", "local")
    assert worker_options({"TENSORHUB_TRANSPORTS": "tcp"}, transports=["local"]).transports == ("local",)
    for wrong in ([], (), [1], 5, {"tcp": 1}):
        with pytest.raises(UsageError, match="transports"):
            worker_options({}, transports=wrong)


def test_a_switch():
    assert worker_options({}).ptrace
    assert not worker_options({"TENSORHUB_PTRACE": "no"}).ptrace
    assert worker_options({"TENSORHUB_PTRACE": "no"}, ptrace=True).ptrace
    assert {row.name: row.default for row in table()}["ptrace"] == "yes"
    for no in ("no", "0", "False", " off "):
        assert not server_settings({"TENSORHUB_KEEP_ESTABLISHED": no}).keep_established
    for yes in ("yes", "1", "TRUE", "on"):
        assert server_settings({"TENSORHUB_KEEP_ESTABLISHED": yes}).keep_established
    with pytest.raises(UsageError, match="TENSORHUB_KEEP_ESTABLISHED='maybe'"):
        server_settings({"TENSORHUB_KEEP_ESTABLISHED": "maybe"})


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("10.0.0.1:99", "10.0.0.1:99"),
        ("head-node", "head-node:7450"),
        ("http://head:1/", "head:1"),
        ("[::1]:8", "[::1]:8"),
        ("[fe80::1%eth0]:8", "[fe80::1%eth0]:8"),
        ("http://[fe80::1%25eth0]", "[fe80::1%eth0]:7450"),
        ("a:1, b ,http://[::1]:8/,a:1", "a:1,b:7450,[::1]:8"),
    ],
)
def test_ways_to_write_an_address(given, address):
    assert worker_options({}, server=given).server == address


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("::1:7450", "[::1]:7450"),
        ("::1", "[::1]:7450"),
        ("http://fd00::5:99/", "[fd00::5]:99"),
        ("fe80::1%eth0:8", "[fe80::1%eth0]:8"),
    ],
)
def test_an_address_without_its_brackets_is_refused_with_them(given, meant):
    with pytest.raises(UsageError, match="is no address") as raised:
        worker_options({}, server=given)
    assert raised.value.hint == f"an IPv6 address stands in brackets: {meant}"


BAD = {
    "server": ["", "  ", "http://", "ftp://x:1", "a:b", "x:99999", "x:1/path", "http://[x", "a b:1", "a:1,", "a,b:x"],
    "chunk_bytes": ["0", "-1", "4 parsecs", "2GiB", "1e6", ""],
    "verify": ["maybe", "FULL"],
    "timeout_s": ["0", "-1", "nan", "inf", "soon", "1e99"],
    "connect_s": ["0", "never"],
    "token": ["a\nb", "x" * 2000, "a\tb", "s3cret\n", "s3cret ", " s3cret", " ", "\udcff"],
    "site": ["\x00"],
    "transports": ["smoke", "tcp,tcp", ",", "tcp,", "TCP"],
    "ptrace": ["maybe", "2", "", "yes no"],
    "device_share": ["0", "-0.5", "1.01", "half", "nan", ""],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_its_name(name, value):
    with pytest.raises(UsageError, match=name):
        worker_options({}, **{name: value})
    if value:
        with pytest.raises(UsageError, match=variable_of(name)):
            worker_options({variable_of(name): value})


@pytest.mark.parametrize(
    "server",
    [
        "http://user:s3cret@head:7450",
        "user:s3cret@head",
        "http://:s3cret@head:7450",
        "s3cret@head:7450",
        "http://user:s3cret@head:99999",
        "https://user:s3cret@head:7450",
        "http://user:s3cret@[::1",
        "http://user:s3cret%40head:7450",
        "http://head:7450/?token=s3cret",
        "http://head:7450/#s3cret",
        "http://head?s3cret",
        "user:s3cret,s3cret@head",
    ],
)
def test_a_token_inside_an_address_is_not_shown(server):
    for given in (({}, {"server": server}), ({"TENSORHUB_SERVER": server}, {})):
        with pytest.raises(UsageError, match=r"server|TENSORHUB_SERVER") as found:
            worker_options(given[0], **given[1])
        assert "s3cret" not in "".join(traceback.format_exception(found.value))
        assert "TENSORHUB_TOKEN" in found.value.hint


SHOWN = [
    Options(token="s3cret"),
    Access("s3cret"),
    TcpSettings(token="s3cret"),
    LocalSettings(token="s3cret"),
    LocalSettings(token="s3cret").as_tcp(),
    NixlSettings(token="s3cret"),
    messages.Hello("p", "m", "r", 0, 1, "life", token="s3cret"),
    wire.Hello("s3cret", "key", 0, 1000, False),
]


@pytest.mark.parametrize("value", SHOWN, ids=lambda value: type(value).__name__)
def test_nothing_shows_the_token_that_it_has(value):
    console = Console(file=io.StringIO(), width=1000)
    console.print(value, Pretty(value))
    for text in (repr(value), str(value), f"{[value]}", console.file.getvalue()):
        assert "s3cret" not in text
        assert type(value).__name__ in text


def test_where_a_token_is_from(tmp_path):
    state = {"TENSORHUB_STATE_DIR": str(tmp_path / "state")}
    path = tmp_path / "file"
    path.write_text("of the file\n")
    file = {"TENSORHUB_TOKEN_FILE": str(path)}
    assert access_of(state) == Access(), "a worker makes none"
    assert worker_options(state).token == ""
    made = access_of(state, create=True)
    assert (len(made.token), made.kept_in) == (64, str(tmp_path / "state" / "token"))
    assert worker_options(state).token == access_of(state, create=True).token == made.token
    assert worker_options(state | {"TENSORHUB_TOKEN": "of the variable"}).token == "of the variable"
    assert worker_options(state | file).token == "of the file"
    assert worker_options(state | file, token="of the argument").token == "of the argument"
    assert worker_options(state | file, token="").token == "of the file", "an empty token is none"
    assert access_of(state | {"TENSORHUB_TOKEN": "x"}, create=True, token_file=path).token == "of the file"


def test_only_who_says_so_is_insecure(tmp_path):
    state = {"TENSORHUB_STATE_DIR": str(tmp_path)}
    token = access_of(state, create=True).token
    for environ, said in ((state | {"TENSORHUB_INSECURE": "1"}, None), (state | {"TENSORHUB_TOKEN": "x"}, True)):
        found = access_of(environ, insecure=said, create=True)
        assert (found.token, found.insecure) == ("", True)
        assert worker_options(environ, insecure=said).token == ""
    for environ, said in ((state | {"TENSORHUB_INSECURE": "0"}, None), (state | {"TENSORHUB_INSECURE": "1"}, False)):
        found = access_of(environ, insecure=said)
        assert (found.token, found.insecure) == (token, False)
    assert access_of(state | {"TENSORHUB_INSECURE": "1"}, token="x").token == "x"
    for environ, arguments in (
        ({"TENSORHUB_TOKEN": "s3cret", "TENSORHUB_INSECURE": "1"}, {}),
        ({"TENSORHUB_TOKEN": "s3cret", "TENSORHUB_TOKEN_FILE": "f"}, {}),
        ({}, {"token": "s3cret", "insecure": True}),
    ):
        with pytest.raises(UsageError, match=r"(?i)token and .* are given together") as found:
            worker_options(state | environ, **arguments)
        assert "s3cret" not in str(found.value)


@pytest.mark.parametrize("content", [b"", b"a\nb\n", b"\xff", b"x" * 5000])
def test_a_token_file_without_a_token_is_named(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for wrong in (path, tmp_path / "none", tmp_path, b"x", 3):
        with pytest.raises(UsageError, match=r"none|holds no secret|cannot read|token_file"):
            access_of({}, token_file=wrong)


@pytest.mark.parametrize("names", ["", "head:7450", "http://head", "a b", ["*"], 3, [b"x"], "head,,x"])
def test_names_that_are_no_names_are_refused(names):
    with pytest.raises(UsageError, match="names="):
        server_names(names)


@pytest.mark.parametrize("value", [True, [], 1.5, b"x"])
def test_values_of_another_type_are_refused(value):
    for name in ("chunk_bytes", "server", "verify", "token"):
        with pytest.raises(UsageError, match=name):
            worker_options({}, **{name: value})


def test_a_lease_that_no_report_could_renew_is_refused():
    with pytest.raises(UsageError, match="lease_s"):
        server_settings({}, lease_s=1, report_s=1)
    for name, value in (("lease_s", 0), ("max_workers", 0), ("max_workers", "many"), ("drift", 2)):
        with pytest.raises(UsageError):
            server_settings({}, **{name: value})


# --- state directory --------------------------------------------------------------------------------------------------


root_may_all = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def test_the_directory_is_given_or_the_users_own() -> None:
    assert state_directory({"TENSORHUB_STATE_DIR": "/a/b", "XDG_STATE_HOME": "/x"}) == Path("/a/b")
    assert state_directory({"XDG_STATE_HOME": "/x", "HOME": "/h"}) == Path("/x/tensorhub")
    assert state_directory({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == Path("/h/.local/state/tensorhub")


def test_a_secret_is_made_once_by_processes_that_start_together(tmp_path: Path) -> None:
    environ = {"TENSORHUB_STATE_DIR": str(tmp_path / "new" / "state")}
    assert secret("token", create=False, environ=environ) is None
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: secret("token", create=True, environ=environ), range(64)))
    assert len(found) == 1
    assert found == {secret("token", create=False, environ=environ)}
    (text,) = found
    assert text is not None
    assert len(bytes.fromhex(text)) == 32
    assert secret("other", create=True, environ=environ) != text
    path = tmp_path / "new" / "state" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(os.listdir(path.parent)) == ["other", "token"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\x1b[31m\n", b"\xff\xfe", b"x" * 5000])
def test_a_file_without_a_secret_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(UsageError, match="token") as caught:
        secret("token", create=True, environ={"TENSORHUB_STATE_DIR": str(tmp_path)})
    assert "remove it" in str(caught.value.hint)


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    environ = {"TENSORHUB_STATE_DIR": str(tmp_path)}
    secret("token", create=True, environ=environ)
    (tmp_path / "token").chmod(0o640)
    with pytest.raises(UsageError, match=r"other users \(mode 0640\)") as caught:
        secret("token", create=False, environ=environ)
    assert f"chmod 600 {tmp_path / 'token'}" in str(caught.value.hint)


def test_a_directory_that_others_may_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="other users may change") as caught:
        secret("token", create=True, environ={"TENSORHUB_STATE_DIR": str(tmp_path)})
    assert "chmod 700" in str(caught.value.hint)


@pytest.mark.parametrize("place", ["/proc/tensorhub", "a-file", pytest.param("closed", marks=root_may_all)])
def test_where_a_secret_cannot_be_made_the_error_names_the_ways_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").touch()
    (tmp_path / "closed").mkdir(0o500)
    environ = {"TENSORHUB_STATE_DIR": str(tmp_path / place / "state")}
    assert secret("token", create=False, environ=environ) is None
    with pytest.raises(UsageError, match="cannot make") as caught:
        secret("token", create=True, environ=environ)
    assert all(way in str(caught.value.hint) for way in ("TENSORHUB_STATE_DIR", "--token-file", "--insecure"))
