"""The state directory and its secrets: one per user, agreed on by all, and read by nobody else."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorhub.protocol.errors import UsageError
from tensorhub.runtime.config import secret, state_directory

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
    assert secret("server-key", create=True, environ=environ) != text
    path = tmp_path / "new" / "state" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(os.listdir(path.parent)) == ["server-key", "token"]


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
