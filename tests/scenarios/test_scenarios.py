"""Each text file in this folder, run and compared with what it says happened. `make bless` rewrites them."""

import difflib
import os
from pathlib import Path

import pytest

from tensorhub.server import layouts

from .script import COMMANDS, ScriptError, run_script

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.txt"))
PROMISES = ("G1", "G2", "G3", "G4", "G5", "G7", "G8", "G9")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_conversation(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    title = text.splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("."), title
    now = run_script(text)
    if now == text:
        return
    if os.environ.get("TENSORHUB_BLESS"):
        file.write_text(now, encoding="utf-8")
        return
    lines = difflib.unified_diff(
        text.splitlines(), now.splitlines(), f"{file.name} as written", "as it is", lineterm=""
    )
    pytest.fail("\n".join([*lines, "", "if that is meant: make bless, and read the difference"]), pytrace=False)


def test_a_version_in_more_shards_than_are_read_at_once_is_an_error_and_nobody_waits_for_such_heirs(
    monkeypatch,
) -> None:
    monkeypatch.setattr(layouts, "MAX_READ_SOURCES", 1)
    begin = "settings retain 1\nserver\nworker trainer of 2 cut fsdp copies 1\nworker a cut tp copies 1\n"
    begin += "quietly call trainer publish 7\n"
    said = " ".join(run_script(f"{begin}call a replicate latest\n").split())
    assert "a/0 RAISES layout-mismatch: version 7 of policy has 2 shards, and policy/a[0] has another layout" in said
    assert "one read takes at most 1 shards" in said
    said = run_script(f"{begin}close trainer within 60s\n")
    assert "trainer/1 leaves" in said
    assert "fetch 7" not in said


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [
        ("slow-source-stands-still", "slow"),
        ("g6-leave-together", "withdrawn"),
        ("changed-in-place", "failed"),
        ("g10-seed-cannot-begin", "far"),
    ],
)
def test_the_event_of_a_read_that_moves_has_its_cause(scenario: str, cause: str) -> None:
    text = (HERE / f"{scenario}.txt").read_text(encoding="utf-8")
    assert f"read_moved ({cause})" in run_script(f"{text}events\n")


def test_every_promise_has_a_scenario() -> None:
    titles = " ".join(file.read_text(encoding="utf-8").splitlines()[0] for file in FILES)
    assert [promise for promise in PROMISES if f"({promise})" not in titles] == []


def test_every_command_is_explained_and_used() -> None:
    explained = (HERE / "README.md").read_text(encoding="utf-8")
    lines = [line for file in FILES for line in file.read_text(encoding="utf-8").splitlines()]
    used = {word for line in lines if line for word in line.split(" ")[:2]}
    assert [name for name in COMMANDS if f"`{name}" not in explained or name not in used] == []


def test_a_mistake_in_a_script_names_the_line() -> None:
    with pytest.raises(ScriptError, match=r"line 2: 'frobnicate'.*no command"):
        run_script("server\nfrobnicate\n")
