"""Three trainers and a rank of an engine, each a process: all elements are those that plain indexing gives."""

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.reshard.derive import Source
from tensorhub.reshard.exported import decode_cut

from . import kit, llama
from .conftest import Make, line
from .pieces_kit import Reading, across_for

Start = Callable[[object, float], subprocess.Popen[str]]


@pytest.fixture
def start(kind: kit.Kind, nothing_left_behind: None) -> Iterator[Start]:
    """Starts a process that serves what a trainer has, or all; whatever is still there at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def one(rank: object, share: float = 1.0) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("llama.py")), str(rank), str(share), kind.name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield one
    for process in processes:
        process.kill()
        process.communicate()


def source_of(process: subprocess.Popen[str], name: str) -> tuple[str, Source]:
    """Its endpoint, and what it says that it has."""
    endpoint, root, data = line(process).split()
    cut = decode_cut(base64.b64decode(data), root)
    return endpoint, Source(name, cut.table, cut.manifest)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [kit.KINDS["tcp-3"], kit.KINDS["local-3"]], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rank", "share"), [(0, 0.1), (1, 0.5), (1, 0.9)])
def test_three_trainers_fill_a_rank_and_one_of_them_is_killed(
    make: Make, start: Start, rank: int, share: float
) -> None:
    """The last rank has the padding; of the first tenth of that trainer's shard only the first rank wants something."""
    trainers = [start(number, share if number == 1 else 1.0) for number in range(llama.TRAINERS)]
    spare = start("whole", 1.0)
    reader, target, right = make(), llama.engine(rank), llama.model()
    for array in target.arrays.values():
        array.fill(-1.0)
    before = target.outside()
    found = [source_of(process, f"trainer[{number}]") for number, process in enumerate(trainers)]
    grid = llama.grid()
    across = across_for(target, grid, [source for _, source in found], batch_bytes=64 * 1024)
    legs = across.legs([source for _, source in found])
    assert {leg.number for leg in legs} == {0, 1, 2}, "each has a part"
    readings = [Reading(across, leg, reader, found[leg.number][0], "k") for leg in legs]
    for reading in readings:
        if reading.leg.number != 1:
            assert reading.wait() is None
    wanted = sum(reading.leg.size_bytes for reading in readings)
    (cut_short,) = (reading for reading in readings if reading.leg.number == 1)
    kit.until(lambda: cut_short.read.received_bytes > 0, "some of it has come")
    trainers[1].kill()
    assert isinstance(cut_short.wait(), SourceLost)
    assert cut_short.left == across.missing > 0

    endpoint, whole = source_of(spare, "spare")
    rest = [Reading(across, leg, reader, endpoint, "k") for leg in across.legs([whole])]
    assert [reading.wait() for reading in rest] == [None] * len(rest)
    assert across.missing == 0
    assert across.progress.is_complete
    assert not target.wrong(right)
    assert all((one == other).all() for one, other in zip(target.outside(), before, strict=True)), "padding"
    arrived = sum(reading.read.received_bytes for reading in (*readings, *rest))
    assert wanted <= arrived <= 1.1 * wanted, "only batches that were under way came twice"
