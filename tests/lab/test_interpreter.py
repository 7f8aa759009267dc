"""Computing: the interpreter is held without the processor, and what it takes longer is told."""

import itertools
import socket
import threading
import time

import pytest

from bench.lab.interpreter import MOVING_BYTES, SLICE_S, Interpreter, LinkCounter, Slices, hold


def test_nobody_else_runs_python_meanwhile() -> None:
    stamps: list[float] = []
    is_over = threading.Event()

    def count() -> None:
        while not is_over.is_set():
            stamps.append(time.monotonic())

    thread = threading.Thread(target=count)
    thread.start()
    try:
        began = time.monotonic()
        hold(0.2)
        ended = time.monotonic()
    finally:
        is_over.set()
        thread.join()
    assert ended - began >= 0.2
    assert not [stamp for stamp in stamps if began + 0.01 < stamp < began + 0.199]


def test_it_takes_no_processor() -> None:
    before = time.thread_time()
    hold(0.2)
    assert time.thread_time() - before < 0.05


def test_slices_in_which_bytes_moved_are_counted_apart() -> None:
    counts = itertools.accumulate(itertools.cycle([0, MOVING_BYTES, MOVING_BYTES - 1, 0]))
    found = Interpreter(0.5, lambda: next(counts)).compute(time.monotonic() + 0.5, lambda: False)
    assert found.moving >= 1
    assert found.still in range(3 * found.moving - 3, 3 * found.moving + 4)  # whichever slice comes first and last
    assert found.moving_s >= found.moving * SLICE_S
    assert found.still_s >= found.still * SLICE_S


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_it_is_held_for_no_more_than_its_share(share: float) -> None:
    found = Interpreter(share, lambda: 0).compute(time.monotonic() + 0.3, lambda: False)
    assert 1 <= found.still <= 0.3 * share / SLICE_S
    assert found.moving == 0


def test_an_idle_interpreter_holds_nothing() -> None:
    began = time.monotonic()
    assert Interpreter(0.0, lambda: 0).compute(began + 0.05, lambda: False) == Slices()
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_who_is_told_to_leave_computes_no_longer(share: float) -> None:
    looks = itertools.count()
    began = time.monotonic()
    Interpreter(share, lambda: 0).compute(began + 60, lambda: next(looks) >= 3)
    assert time.monotonic() - began < 30


def test_the_bytes_of_a_link_are_counted() -> None:
    counter = LinkCounter("lo")
    before = counter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(bytes(10_000), ("127.0.0.1", 9))
    assert counter() - before >= 10_000
    assert LinkCounter("no such link")() == 0
