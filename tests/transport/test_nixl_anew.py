"""A source that has other memory where memory of its own was: its readers' NIXL must neither lose nor mistake it."""

import gc
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.transport.base import Transport
from tensorhub.transport.nixl import agent as nixl_agent
from tensorhub.transport.nixl.agent import HOST, Place, do_overlap
from tensorhub.transport.nixl.transport import NixlTransport

from . import kit
from .conftest import Make
from .kit import Target, content, full, read_all

CHUNK = 256
MEMORY = 64 * CHUNK
PARTS = [(64, 100), (0, MEMORY), (0, MEMORY), (32, 7000), (0, 7032), (32, 100)]  # where it begins, how long it is
ALL_KINDS = pytest.mark.parametrize("kind", ["nixl-1", "nixl-3", "pretended-nixl-2"], indirect=True)


def offer(source: Transport, key: str, memory: bytearray, start: int, size: int) -> bytearray:
    """Export a part of it; returns what a reader must get."""
    part = cast(bytearray, memoryview(memory)[start : start + size])
    source.export(full(key, part, CHUNK))
    return bytearray(part)


def agents_of(transport: Transport) -> int:
    agents = cast(NixlTransport, transport)._agents
    return 1 + len(agents._further)


@ALL_KINDS
def test_it_is_read(make: Make) -> None:
    memory, source, reader = content(MEMORY), make(), make()
    for start, size in PARTS:
        right = offer(source, "k", memory, start, size)
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None, (start, size)
        assert source.withdraw("k", timeout_s=kit.DEADLINE_S)
        gc.collect()
    assert agents_of(source) <= 3, "what nobody needs any more has ended"


@ALL_KINDS
def test_what_was_there_before_and_is_still_offered_is_read_too(make: Make) -> None:
    memory, source, reader = content(MEMORY), make(), make()
    rights = [offer(source, f"k{number}", memory, *part) for number, part in enumerate(PARTS)]
    for _ in range(3):
        for number, right in enumerate(rights):
            assert read_all(reader, source.endpoint, f"k{number}", Target(right, CHUNK)) is None
    assert agents_of(source) == len(PARTS), "each overlaps the others, and each is introduced once"


@pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
def test_a_reader_is_not_told_of_more_and_more_that_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_GONE", 5)
    source, reader = make(), make()
    kept = []
    for number in range(20):
        kept.append(content(MEMORY))  # each in a place of its own
        right = offer(source, f"k{number}", kept[-1], 0, MEMORY)
        assert read_all(reader, source.endpoint, f"k{number}", Target(right, CHUNK)) is None
        assert source.withdraw(f"k{number}", timeout_s=kit.DEADLINE_S)
        gc.collect()
    agents = cast(NixlTransport, source)._agents
    assert all(agent._introductions <= 5 for agent in [agents.current(), *agents._further])
    assert agents_of(source) == 2


@pytest.mark.parametrize("kind", ["nixl-3"], indirect=True)
def test_nothing_is_left_of_former_agents_at_either_end(make: Make) -> None:
    memory, source, reader, chance = content(MEMORY), make(), make(), Random(1)
    files = []
    for _ in range(40):
        start = chance.randrange(MEMORY - 1)
        right = offer(source, "k", memory, start, chance.randrange(1, MEMORY - start))
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
        assert source.withdraw("k", timeout_s=kit.DEADLINE_S)
        gc.collect()
        files.append(kit.open_files())
    kit.until(lambda: kit.open_files() <= max(files[:10]), "descriptors are as many as at the beginning")


PLACES = st.lists(st.builds(Place, st.sampled_from([HOST, 1]), st.integers(0, 30), st.integers(1, 12)), max_size=6)


@given(PLACES, PLACES)
def test_what_overlaps(some: list[Place], others: list[Place]) -> None:
    def held(side: list[Place]) -> set[tuple[int, int]]:
        return {(place.device, place.address + offset) for place in side for offset in range(place.size_bytes)}

    assert do_overlap(some, others) == bool(held(some) & held(others))
