"""What is printed of an error: the caller's frame and one of ours."""

import asyncio
import logging
import traceback
from pathlib import Path

import numpy as np
import pytest

import tensorhub

OURS = str(Path(tensorhub.__file__).parent)
LINES = 16  # the head, three frames, the error, its hint, and before it its cause in the same way


def printed(call):
    """What Python prints of the error of that call."""
    try:
        call()
    except tensorhub.TensorHubError as error:
        return error, "".join(traceback.format_exception(error))
    raise AssertionError("it raises nothing")


async def awaited(make):
    """The error of a coroutine, as its caller sees it."""
    try:
        await make()
    except tensorhub.TensorHubError as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("it raises nothing")


def check(text):
    assert text.count(f'\n  File "{OURS}') == 1, text
    assert len(text.splitlines()) <= LINES, text
    assert "asyncio" not in text, text


def test_ten_typical_errors(join, server):
    trainer, _ = join("t", 1.0)
    rollout, _ = join("r", size=7)
    other, _ = join("o", model="n")
    trainer.publish(2)
    closed, _ = join("c")
    closed.close()
    nowhere = tensorhub.connect(server="127.0.0.1:1", timeout=0.2)
    calls = (
        lambda: trainer.publish(1),
        lambda: trainer.mutating(version=1).__enter__(),
        lambda: rollout.replicate(2),
        lambda: rollout.replicate(9, timeout=1),
        lambda: other.replicate("latest", timeout=0.3),
        lambda: other.wait_for(3, timeout=0.3),
        lambda: closed.update(),
        lambda: tensorhub.open("m", replica="r", server=server.address, timeout=0.5),
        lambda: tensorhub.open("m", replica="x", server="127.0.0.1:1", timeout=0.3),
        lambda: nowhere.models(),
        lambda: tensorhub.load("m@9", server=server.address, timeout=1),
        lambda: trainer.register({"w": np.zeros(3)}),
        lambda: rollout.register({"w": "no tensor"}),
        lambda: tensorhub.open_group("m", replica="x", shards=0, server=server.address),
    )
    for call in calls:
        _, text = printed(call)
        check(text)


def test_the_same_in_a_coroutine(server):
    async def main():
        weights = await tensorhub.aio.open("m", replica="r", server=server.address)
        await weights.register({"w": np.zeros(3)})
        calls = (
            lambda: weights.replicate("latest", timeout=0.3),
            lambda: weights.publish(-1),
            lambda: tensorhub.aio.open("m", replica="r", server=server.address, timeout=0.5),
            lambda: tensorhub.aio.load("m@9", server=server.address, timeout=1),
        )
        found = [await awaited(make) for make in calls]
        await weights.close()
        return found

    for text in asyncio.run(main()):
        check(text)


def test_the_cause_stays_and_all_frames_can_be_had(monkeypatch, caplog):
    view = tensorhub.connect(server="127.0.0.1:1", timeout=0.2)
    with caplog.at_level(logging.DEBUG, "tensorhub.tracebacks"):
        error, _ = printed(view.models)
    assert error.__cause__ is not None
    assert error.__cause__.__traceback__ is None
    assert caplog.text.count(OURS) > 3, "the debug log has all frames"
    monkeypatch.setenv("TENSORHUB_TRACEBACK", "full")
    _, text = printed(view.models)
    assert text.count(OURS) > 3


def test_an_error_of_the_block_is_left_as_it_is(join):
    """Frames of the caller's own code are never cut."""
    weights, _ = join("t")

    def inner():
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours") as found, weights.mutating(version=1):
        inner()
    assert "inner" in "".join(traceback.format_exception(found.value))
