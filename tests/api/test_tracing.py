"""Spans of calls, for a program that has OpenTelemetry; and no trace of it in one that has not."""

import asyncio
import sys

import numpy as np
import pytest

import tensorhub

trace = pytest.importorskip("opentelemetry.trace")


class Tracer:
    """Keeps the spans that were ended, and whose children they are."""

    def __init__(self):
        self.ended = []

    def start_span(self, name, *, attributes):
        return Span(self, name, dict(attributes), trace.get_current_span())


class Span(trace.NonRecordingSpan):
    def __init__(self, tracer, name, attributes, parent):
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.tracer, self.name, self.attributes, self.parent, self.error = tracer, name, attributes, parent, None

    def set_attribute(self, key, value):
        self.attributes[key] = value

    def record_exception(self, exception, *_, **__):
        self.error = exception

    def end(self, end_time=None):
        self.tracer.ended.append(self)


@pytest.fixture
def tracer(monkeypatch):
    found = Tracer()
    monkeypatch.setattr(trace, "get_tracer", lambda name: found)
    return found


def test_each_call_is_a_span_of_its_callers(join, server, tracer):
    (trainer, _), (rollout, _) = join("trainer", 1.0), join("rollout-0")
    above = Span(tracer, "step", {}, None)
    with trace.use_span(above):
        with trainer.mutating(version=7):
            pass
        rollout.replicate("latest")
        rollout.update()
    with pytest.raises(tensorhub.UsageError):
        rollout.update("nonsense")
    assert [span.name for span in tracer.ended] == [
        f"tensorhub.{name}" for name in ("mutating", "publish", "replicate", "update", "update")
    ]
    assert [span.parent is above for span in tracer.ended] == [True, True, True, True, False]
    place = {"tensorhub.model": "m", "tensorhub.replica": "rollout-0", "tensorhub.shard": 0}
    assert tracer.ended[2].attributes == {**place, "tensorhub.spec": "latest", "tensorhub.version": 7}
    assert isinstance(tracer.ended[-1].error, tensorhub.UsageError)


def test_coroutines_have_spans_too(join, server, tracer):
    trainer, _ = join("trainer", 1.0)

    async def publish():
        async with await tensorhub.aio.open("m", replica="r", server=server.address) as weights:
            await weights.register({"w": np.zeros(50_000, "float32")})
            return await weights.replicate("latest")

    trainer.publish(3)
    assert asyncio.run(publish()) == 3
    assert [span.name for span in tracer.ended] == ["tensorhub.publish", "tensorhub.replicate"]


def test_a_program_without_it_goes_without(join, tracer, monkeypatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    trainer, _ = join("trainer", 1.0)
    assert trainer.publish(1) == 1
    assert tracer.ended == []
