"""A reference server in this process, and workers that are closed again."""

import contextlib
import signal
import threading

import numpy as np
import pytest

import tensorhub


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=2, report_s=0.2) as running:
        yield running


@pytest.fixture
def join(server):
    """`join(replica, value)` opens a worker with one registered array; returns both."""
    opened = []

    def joined(replica="t", value=0.0, *, model="m", size=50_000, tensors=None, boxes=None, **options):
        weights = tensorhub.open(model, replica=replica, server=server.address, **options)
        opened.append(weights)
        array = np.full(size, value, dtype=np.float32)
        weights.register({"w": array} if tensors is None else tensors, boxes=boxes)
        return weights, array

    yield joined
    for weights in reversed(opened):
        weights.close(timeout=3)


class Interrupt(BaseException):
    """As a Ctrl-C: no `except Exception` sees it."""


@pytest.fixture
def interrupting():
    """`with interrupting(work) as work:` the caller of such a coroutine is interrupted just when it ends."""
    caller = threading.get_ident()

    def interrupt(*_):
        raise Interrupt

    @contextlib.contextmanager
    def block(work):
        async def interrupted(*arguments, **options):
            result = await work(*arguments, **options)
            signal.pthread_kill(caller, signal.SIGUSR1)
            return result

        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            with pytest.raises(Interrupt):
                yield interrupted
        finally:
            signal.signal(signal.SIGUSR1, before)

    return block
