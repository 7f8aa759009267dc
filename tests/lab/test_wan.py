"""The relay between sites, on made-up time: late, no faster than its rate, and a queue that ends."""

import socket
from collections.abc import Iterator

import pytest

from bench.lab.wan import Direction

RATE, DELAY_S, PACKET = 12_500.0, 0.5, bytes(100)  # a packet takes 8 ms


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    pairs = [*socket.socketpair(type=socket.SOCK_DGRAM), *socket.socketpair(type=socket.SOCK_DGRAM)]
    for each in pairs:
        each.setblocking(False)
    yield pairs
    for each in pairs:
        each.close()


def test_a_packet_comes_after_its_delay_and_those_before_it(ends: list[socket.socket]) -> None:
    way = Direction(ends[1].fileno(), ends[2].fileno(), RATE, DELAY_S)
    for _ in range(3):
        ends[0].send(PACKET)
    way.take(1.0)
    assert way.give(1.0) == pytest.approx(1.508)
    assert way.carried_bytes == 0
    assert way.give(1.51) == pytest.approx(1.516)
    assert way.carried_bytes == 100
    way.give(2.0)
    assert way.carried_bytes == 300
    assert [len(ends[3].recv(1000)) for _ in range(3)] == [100] * 3


def test_what_the_queue_cannot_hold_is_dropped(ends: list[socket.socket]) -> None:
    way = Direction(ends[1].fileno(), ends[2].fileno(), RATE, DELAY_S)
    for _ in range(15):  # the queue holds 100 ms, a packet takes 8
        ends[0].send(PACKET)
        way.take(1.0)
    way.give(10.0)
    assert (way.carried_bytes, way.dropped) == (1300, 2)
