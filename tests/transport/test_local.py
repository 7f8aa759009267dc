"""The parts of the local transport: addresses, seals, processes, places; and what it does where it cannot work."""

import ctypes
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tensorhub.protocol.errors import Refused, SourceLost, TransportMissing
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.local import memory as local_memory
from tensorhub.transport.local.memory import (
    Lost,
    Process,
    format_endpoint,
    here,
)
from tensorhub.transport.local.transport import LocalTransport
from tensorhub.transport.ranges import Addresses

from . import kit
from .kit import DEADLINE_S, MIB, Local, Target, content, full, read_all, start_read

CHUNK = 4096


# -- addresses ---------------------------------------------------------------------------------------------------------


def words(*numbers: int) -> bytes:
    return struct.pack(f"={len(numbers)}Q", *numbers)


def test_addresses_that_are_none() -> None:
    for data, why in (
        (b"x", "in 1 B"),
        (words(4096), "in 8 B"),
        (words(4096, 0), "without a length"),
        (words(4096, 2**64 - 1, 8192, 2**64 - 1), "more bytes"),
    ):
        with pytest.raises(ValueError, match=why):
            Addresses.decode(memoryview(data))


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_process_that_ended_is_never_asked_again(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the process that gets its PID: the kernel is told which one to give out next."""
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", _unknown_call)
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, byte = Process(dead.pid), Addresses.of_ranges([(1, 1)])
    process.check()
    began = local_memory._start_time(dead.pid)
    monkeypatch.setattr(process, "_read", pytest.fail)
    dead.kill()
    dead.communicate()
    try:
        with pytest.raises(Lost):
            process.read(0, 1, byte, byte)
        heir = _process_with(dead.pid, began)
        try:
            with pytest.raises(Lost):
                process.read(0, 1, byte, byte)
        finally:
            heir.kill()
            heir.communicate()
    finally:
        process.close()


def _process_with(pid: int, began: str) -> "subprocess.Popen[bytes]":
    """One that began at another time, which the kernel tells to a hundredth of a second."""
    for _ in range(200):  # others start processes too
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"PIDs cannot be chosen here: {error}")
        found = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        if found.pid == pid and local_memory._start_time(pid) != began:
            return found
        found.kill()
        found.communicate()
    pytest.skip("another process was always faster to take the PID")


def _unknown_call(*_: object) -> int:
    raise OSError(errno.ENOSYS, "no such call")


# -- places ------------------------------------------------------------------------------------------------------------


def test_who_cannot_be_read_is_known_before_anybody_tries(local: Local) -> None:
    reader, source = local(), local()
    assert reader.why_not(source.endpoint) is None
    for there, why in (
        ({"boot": "f00"}, "another host"),
        ({"pid_namespace": 1}, "PID namespace"),
        ({"network_namespace": 1}, "network namespace"),
        ({"user": 4711}, "user 4711"),
    ):
        endpoint = format_endpoint(replace(here(), **there), "nobody")  # type: ignore[arg-type]
        assert why in (reader.why_not(endpoint) or "")
        error = read_all(reader, endpoint, "k", Target(content(1), CHUNK))
        assert isinstance(error, TransportMissing)
        assert why in str(error)
    assert reader.why_not("local://nonsense")


# -- where it cannot work ----------------------------------------------------------------------------------------------


def _refuse(number: int) -> Callable[..., int]:
    def refused(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return refused


def test_a_kernel_that_refuses_is_found_out_before_anything_is_begun(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, yama = content(3 * CHUNK), tmp_path / "ptrace_scope"
    source, reader = local(), local()
    source.export(full("k", right, CHUNK))
    monkeypatch.setattr(local_memory, "YAMA", str(yama))
    for number, scope, hint in (
        (errno.EPERM, "1", "TENSORHUB_PTRACE"),
        (errno.EPERM, "2", "ptrace_scope=1"),
        (errno.ENOSYS, "", "SYS_PTRACE"),
    ):
        yama.write_text(scope)
        monkeypatch.setattr(local_memory, "_function", partial(_refuse, number))
        target = Target(right, CHUNK)
        read, ended = start_read(reader, source.endpoint, "k", target)
        error = ended.wait()
        assert isinstance(error, TransportMissing)
        assert os.strerror(number) in str(error)
        assert hint in str(error.hint)
        assert target.manifest is None
        assert read.received_bytes == 0
    with pytest.raises(TransportMissing):
        LocalTransport()
    monkeypatch.setattr(local_memory, "_namespace", _unknown_call)
    local_memory._here.cache_clear()
    with pytest.raises(TransportMissing, match="/proc"):
        LocalTransport()
    local_memory._here.cache_clear()


def test_memory_that_has_no_addresses_is_not_served_but_the_reason_is(local: Local) -> None:
    """As a device's, which is staged block by block."""

    class Staged:
        size_bytes = 3 * CHUNK
        reading = writing = None

    source, reader = local(), local()
    source.export(Export("k", b"", CHUNK, Staged(), Progress(3, complete=True)))  # type: ignore[arg-type]
    error = read_all(reader, source.endpoint, "k", Target(content(3 * CHUNK), CHUNK))
    assert isinstance(error, TransportMissing)
    assert "device" in str(error)


def test_a_target_without_lasting_addresses_is_filled_too(local: Local) -> None:
    """As a device's, whose bytes come through a ring."""

    class Staged:
        def __init__(self, memory: bytearray) -> None:
            self._pieces = kit.Pieces(memory, 1000)
            self.size_bytes, self.views_to_write = len(memory), self._pieces.views_to_write
            self.views_to_read = self.views_to_write

        @property
        def inside(self) -> int:
            return self._pieces.inside

    right = content(2 * MIB + 17)
    source, reader = local(), local()
    source.export(full("k", right, MIB, piece_bytes=333))
    target = Target(right, MIB)
    target.stream = Staged(target.buffer)  # type: ignore[assignment]
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right


def test_token(local: Local) -> None:
    right = content(CHUNK)
    source = local(token="only for friends")
    source.export(full("k", right, CHUNK))
    assert read_all(local(token="only for friends"), source.endpoint, "k", Target(right, CHUNK)) is None
    error = read_all(local(), source.endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, SourceLost)
    assert isinstance(error.__cause__, Refused)


STRANGER = """
import os, sys
sys.path.insert(0, sys.argv[3])
import kit
from tensorhub.transport.local import memory as local_host
from tensorhub.transport.local import transport as local_reader
os.setuid(65534)
reader = kit.KINDS["local-1"].make(5.0)
place, name = local_host.parse_endpoint(sys.argv[1])
mine = local_host.format_endpoint(local_host.here(), name)
for endpoint in (sys.argv[1], mine, mine):
    error = kit.read_all(reader, endpoint, "k", kit.Target(kit.content(4096), 4096))
    print(type(error).__name__, error)
    if endpoint is mine:
        local_reader.check_listener = lambda *_: None
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.processes
def test_another_user_is_refused_by_both_sides(local: Local) -> None:
    source = local()
    source.export(full("k", content(CHUNK), CHUNK))
    command = [sys.executable, "-c", STRANGER, source.endpoint, "", str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    first, second, third = done.stdout.splitlines()
    assert first.startswith("TransportMissing")
    assert "user 0, this worker as user 65534" in first
    assert second.startswith("TransportMissing")  # the kernel knows whose socket it is
    assert "is listened to by user 0" in second
    assert third.startswith("TransportMissing")  # it lied about itself; the kernel does not
    assert "reader as user 65534" in third
    assert source.statistics()["sent_bytes"] == 0


SQUATTER = """
import os, socket, sys
from tensorhub.transport.local import memory as local_host
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(local_host.socket_address(sys.argv[1]))
listener.listen()
print("listens", flush=True)
print(listener.accept()[0].recv(1000))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.processes
def test_who_has_taken_the_name_of_a_dead_source_is_told_no_token(local: Local) -> None:
    name = local_memory.new_name()
    squatter = subprocess.Popen([sys.executable, "-c", SQUATTER, name], stdout=subprocess.PIPE, text=True)
    assert squatter.stdout is not None
    assert squatter.stdout.readline() == "listens\n"
    endpoint = format_endpoint(here(), name)
    error = read_all(local(token="only for friends"), endpoint, "k", Target(content(CHUNK), CHUNK))
    heard, _ = squatter.communicate(timeout=DEADLINE_S)
    assert heard == "b''\n"
    assert isinstance(error, TransportMissing)
    assert "is listened to by user 65534, this worker runs as user 0" in str(error)
