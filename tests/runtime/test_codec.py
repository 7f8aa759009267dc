"""Bytes from strangers become a message or a `Malformed`, and nothing else."""

import contextlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.core.manifest import Layout, TensorSpec
from tensorhub.core.messages import (
    MAX_REPORT_BYTES,
    CallReport,
    Filling,
    Holding,
    LayoutInfo,
    Orders,
    Poisoned,
    Refusal,
    Report,
)
from tensorhub.core.names import Digest, Number, Version
from tensorhub.runtime.codec import Malformed, decode_to_server, decode_to_worker, encode

from .kit import hello

LAYOUT = LayoutInfo.of(Layout((TensorSpec("w", "bfloat16", (2, 3), (3, 1), 0, 12),), 12))
TO_SERVER = [
    hello(token="s3cret"),
    LAYOUT,
    Report(1),
    Report(2, buffer=Filling(Version(3), 1, 4), call=CallReport(5, "update", "latest-2")),
    Report(3, buffer=Holding(Version(3), Digest("ab"), True), call=CallReport(6, "publish", 7, Digest("cd"))),
    Report(4, buffer=Poisoned(), received_bytes={"trainer": 2**40}),
]
TO_WORKER = [
    Orders(Number(2**60), Number(1), 4, 10.0, 9.0, 1.0),
    Refusal("shard-taken", "another one lives", retry_s=0.5),
]


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda m: type(m).__name__)
def test_what_a_worker_says_arrives_as_it_was(message):
    assert decode_to_server(encode(message)) == message


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_what_the_server_says_arrives_as_it_was(message):
    assert decode_to_worker(encode(message)) == message


def test_ten_thousand_random_frames_are_malformed():
    dice = random.Random(7)
    for _ in range(10_000):
        data = dice.randbytes(dice.randrange(200))
        for decode in (decode_to_server, decode_to_worker):
            with pytest.raises(Malformed):
                decode(data)


@given(st.sampled_from(TO_SERVER), st.integers(0, 400), st.integers(0, 255))
def test_a_bit_of_damage_gives_a_message_or_malformed(message, at, value):
    data = bytearray(encode(message))
    data[at % len(data)] = value
    with contextlib.suppress(Malformed):
        decode_to_server(bytes(data))


def test_every_truncation_is_malformed():
    for message in TO_SERVER:
        data = encode(message)
        for stop in range(len(data)):
            with pytest.raises(Malformed):
                decode_to_server(data[:stop])


def test_deep_nesting_is_malformed_and_does_not_exhaust_the_stack():
    with pytest.raises(Malformed):
        decode_to_server(b"\x91" * 1_000_000)


def test_only_a_layout_may_be_long_and_only_of_somebody_known():
    many = tuple(TensorSpec(f"tensor.{i}", "float32", (1,), (1,), 4 * i, 4) for i in range(5_000))
    layout = encode(LayoutInfo.of(Layout(many, 20_000)))
    assert len(layout) > MAX_REPORT_BYTES
    assert isinstance(decode_to_server(layout), LayoutInfo)
    with pytest.raises(Malformed, match="first message"):
        decode_to_server(layout, is_known=False)
    report = encode(Report(1, received_bytes={f"replica-{i}": i for i in range(10_000)}))
    with pytest.raises(Malformed, match="at most"):
        decode_to_server(report)


def test_a_message_for_the_other_side_is_malformed():
    with pytest.raises(Malformed):
        decode_to_server(encode(TO_WORKER[0]))
    with pytest.raises(Malformed):
        decode_to_worker(encode(TO_SERVER[0]))


def test_a_newer_peer_may_say_more():
    more = msgspec.msgpack.decode(encode(Report(1))) | {"of_a_later_release": [1, 2]}
    assert decode_to_server(msgspec.msgpack.encode(more)) == Report(1)
