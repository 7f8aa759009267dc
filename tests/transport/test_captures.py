"""What threads of this library tell NVIDIA's driver, so that a CUDA graph can be captured beside them."""

import threading
from typing import Any

import pytest

from tensorhub.transport import threads
from tensorhub.transport.threads import RELAXED, beside_captures

from . import kit
from .conftest import Make
from .kit import Target, content, full, read_all

STRICTEST, NOT_INITIALIZED = 0, 3


class Driver(threading.local):
    """Every thread begins in the strictest mode. It may refuse, as it does before anybody has used a device."""

    mode = STRICTEST
    calls = 0

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def exchange(self, mode: Any) -> int:
        self.calls += 1
        if self.code == 0:
            self.mode, mode._obj.value = mode._obj.value, self.mode
        return self.code


def test_a_thread_is_as_strict_afterwards_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(threads, "mode_exchange", lambda: driver.exchange)
    driver.mode = 1
    modes = []

    def fail() -> None:
        with beside_captures():
            pass
        modes.append(driver.mode)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), beside_captures():
        fail()
    assert [*modes, driver.mode] == [RELAXED, 1]


def test_a_driver_that_refuses_is_asked_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(NOT_INITIALIZED)
    monkeypatch.setattr(threads, "mode_exchange", lambda: driver.exchange)
    with beside_captures():
        pass
    assert driver.calls == 1


@pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
def test_whatever_nixl_is_asked_it_is_asked_beside_captures(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It registers memory, and lets the device copy, in threads of ours at both ends."""
    driver, agent = Driver(), kit._pretended_nixl().nixlAgent
    modes: dict[str, set[int]] = {}
    monkeypatch.setattr(threads, "mode_exchange", lambda: driver.exchange)

    def noting(name: str, call: Any) -> Any:
        def noted(*given: object) -> object:
            modes.setdefault(name, set()).add(driver.mode)
            return call(*given)

        return noted

    for name in ("createBackend", "registerMem", "loadRemoteMD", "makeXferReq", "postXferReq", "releaseXferReq"):
        monkeypatch.setattr(agent, name, noting(name, getattr(agent, name)))
    right = content(100_000)
    source, reader = make(), make()
    source.export(full("k", right, 4096))
    assert read_all(reader, source.endpoint, "k", Target(right, 4096)) is None
    assert len(modes) == 6
    assert {name: found for name, found in modes.items() if found != {RELAXED}} == {}
