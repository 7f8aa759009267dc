"""Readers and sources of both ways, in every pairing: what travels is the same, whoever moves it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub.transport.native import load

from . import kit
from .conftest import line
from .native import needs_mover

pytestmark = [needs_mover, pytest.mark.processes]

SIZE, CHUNK = 3 * kit.MIB + 777, 64 * 1024
WAYS = ["native", "python"]


class Peers:
    """Processes of `peer.py`, each with the mover or without it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, way: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), *map(str, arguments)]
        environ = {**os.environ, load.VARIABLE: "yes" if way == "native" else "no"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.processes.append(process)
        return process


@pytest.fixture
def peers() -> Iterator[Peers]:
    found = Peers()
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


def lines_until_the_end(reader: "subprocess.Popen[str]") -> list[str]:
    found = [line(reader)]
    while not found[-1].startswith("end"):
        assert found[-1], "the reader has died"
        found.append(line(reader))
    return found


@pytest.mark.parametrize("kind", ["tcp-1", "tcp-3", "tcp-lending-2", "local-1", "local-3", "local-mapped-3"])
@pytest.mark.parametrize("source_way", WAYS)
@pytest.mark.parametrize("reader_way", WAYS)
def test_every_pair_understands_each_other(peers: Peers, kind: str, source_way: str, reader_way: str) -> None:
    """Half of it is there at first, so both sides also wait; and what came is compared by the reader."""
    if why_not := kit.KINDS[kind].why_not():
        pytest.skip(why_not)
    ready = SIZE // CHUNK // 2
    source = peers.start(source_way, "source", kind, SIZE, CHUNK, ready)
    endpoint = line(source)
    reader = peers.start(reader_way, "reader", kind, SIZE, CHUNK, endpoint)
    first = line(reader)
    assert first.startswith("stored")
    assert first.endswith("B") == (reader_way == "native"), "who told: the mover in bytes, Python each chunk"
    assert source.stdin is not None
    source.stdin.write("the rest\n")
    source.stdin.flush()
    assert lines_until_the_end(reader)[-1] == "end None right"


@pytest.mark.parametrize("kind", ["tcp-1", "local-1", "local-mapped-1"])
@pytest.mark.parametrize("source_way", WAYS)
@pytest.mark.parametrize("reader_way", WAYS)
def test_every_pair_is_told_of_the_end_of_an_export(peers: Peers, kind: str, source_way: str, reader_way: str) -> None:
    source = peers.start(source_way, "leaver", kind, SIZE, CHUNK, 5)
    endpoint = line(source)
    reader = peers.start(reader_way, "reader", kind, SIZE, CHUNK, endpoint)
    stored = 0
    while stored < 5 * CHUNK:  # all that is there: from here on both wait
        words = line(reader).split()
        assert words[0] == "stored"
        stored += int(words[1]) if words[-1] == "B" else CHUNK
    assert source.stdin is not None
    source.stdin.write("leave\n")
    source.stdin.flush()
    assert line(source) == "withdrawn True"
    last = lines_until_the_end(reader)[-1]
    assert "does not serve 'k'" in last
    assert "it was withdrawn" in last
