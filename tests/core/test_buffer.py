"""Nothing can become of a buffer but what the table of transitions has."""

from collections.abc import Callable

import pytest

from tensorhub.protocol.errors import InvariantViolation
from tensorhub.protocol.messages import Buffer, Holding, Poisoned, Vacated, Withdrawing
from tensorhub.protocol.names import Digest, Number, Version
from tensorhub.worker.buffer import RegisteredMemory

from .kit import worker

ROOT = Digest("r")
ONE, TWO = Version(1), Version(2)


@pytest.mark.parametrize(
    ("trigger", "buffer"),
    [
        (lambda it: it.register(), Holding(ONE, ROOT)),
        (lambda it: it.publish(TWO, ROOT, Number(9)), Holding(ONE, ROOT)),
        (lambda it: it.begin_fill(TWO), Withdrawing(ONE, ROOT)),
        (lambda it: it.touch(TWO), Holding(ONE, ROOT)),
        (lambda it: it.complete(ROOT, Number(9)), Poisoned()),
        (lambda it: it.keep(), Vacated(ONE, ROOT)),
        (lambda it: it.take_back(), Poisoned()),
        (lambda it: it.let_go(), Holding(ONE, ROOT)),
    ],
)
def test_what_is_not_in_the_table_is_our_bug(trigger: Callable[[RegisteredMemory], object], buffer: Buffer) -> None:
    it = RegisteredMemory(worker("rollout"), buffer)
    with pytest.raises(InvariantViolation):
        trigger(it)
    assert it.buffer == buffer


@pytest.mark.parametrize("is_stopping", [True, False])
def test_only_what_is_being_stopped_may_have_stopped(is_stopping: bool) -> None:
    it = RegisteredMemory(worker("rollout"), Withdrawing(ONE, ROOT), serving=ONE, is_stopping=is_stopping)
    with pytest.raises(InvariantViolation, match="stopped, but it serves 1"):
        it.serving_stopped(TWO if is_stopping else ONE, is_leaving=False)
    assert (it.buffer, it.serving) == (Withdrawing(ONE, ROOT), ONE)
