"""What this machine refused this process is remembered for a while, and nothing else is."""

import errno
import os
from collections.abc import Iterator

import pytest

from tensorhub.transport import shortages


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shortages, "_last", None)
    return


def test_what_is_scarce_is_remembered() -> None:
    assert shortages.recent() == ""
    shortages.note(OSError(errno.ECONNREFUSED, "refused"), did="it connected")
    assert shortages.recent() == ""
    shortages.note(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), did="it connected")
    assert shortages.recent().endswith("when it connected: Too many open files")
    shortages.note(MemoryError(), did="it started a thread")
    assert shortages.recent().endswith("when it started a thread: out of memory")


def test_what_was_long_ago_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shortages.note(MemoryError(), did="it started a thread")
    monkeypatch.setattr(shortages, "RECENT_S", -1.0)
    assert shortages.recent() == ""
