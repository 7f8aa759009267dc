"""Bad input gets its own error, at once, with nothing changed; numbers and names may come from numpy and enums."""

import enum
import socket
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tensorhub
from runtime.kit import within
from tensorhub import Box
from tensorhub.runtime.config import check_place, parse_fraction, server_settings, worker_options
from tensorhub.runtime.questions import plain_spec

AT_ONCE_S = 1.0


BAD = {
    "model": ["", "a/b", "a@b", "-a", "a b", "ä", "x" * 300, None, 7, "a\n"],
    "replica": ["", "a/b", None, "x" * 300],
    "shard": [-1, 2, "0", None, 1.0, True],
    "shards": [0, -1, "2", 10**6, None],
    "server": ["http://", "nowhere:port", "x:1/path"],
    "timeout": [0, -1, float("nan"), "soon"],
    "call_timeout": [0, -1, float("inf")],
    "verify": ["maybe", 1],
    "chunk_bytes": [0, -1, "4 parsecs", 2**40],
    "host": ["203.0.113.7", "a\nb"],
    "token": ["a\nb"],
    "reliable": ["yes", None, 1],
}


def test_a_bad_argument_of_open_is_named(server):
    good = {"model": "m", "replica": "r", "shard": 0, "shards": 2, "server": server.address}
    for argument, values in BAD.items():
        for value in values:
            with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError, match=argument):
                tensorhub.open(**{**good, argument: value})
    assert tensorhub.connect(server.address).models() == []


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            within(1.5),
            pytest.raises(tensorhub.ServerUnreachable, match=rf"m/r\[0\].*{address} within 0\.[45] s.*refused"),
        ):
            tensorhub.open("m", replica="r", server=address, timeout=0.5)
        with within(1.5), pytest.raises(tensorhub.ServerUnreachable, match=address):
            tensorhub.connect(address, timeout=0.5).models()


def test_replicas_with_other_numbers_of_shards(join):
    join("r", shards=3)
    with within(AT_ONCE_S), pytest.raises(tensorhub.LayoutMismatch, match="2 shards"):
        join("r", shard=1, shards=2)


def test_calls_before_register(server):
    with tensorhub.open("m", replica="t", server=server.address) as weights:
        for call in (lambda: weights.publish(1), weights.replicate, weights.update):
            with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError, match="before register"):
                call()
        with pytest.raises(tensorhub.UsageError, match="nothing to check"):
            weights.check()


def test_tensors_that_cannot_be_registered(join):
    weights, array = join("t", 1.0)
    for bad in ({}, [array], {"w": 1}, {"w": [1.0]}, {1: array}, {"w": array[::2]}, None):
        with pytest.raises(tensorhub.UsageError):
            weights.register(bad)
    assert weights.publish(1) == 1  # what was registered before still is


NO_VERSIONS = [-1, 2**63, "7", "latest", None, 1.0, True, b"7"]
NO_SPECS = [-1, "newest", "latest-", "latest--1", "", None, 1.5, "7"]
NO_TIMEOUTS = [0, -1, float("nan"), "soon"]


def test_arguments_that_are_none_are_refused_at_once(join):
    """Versions, specs that name no version, timeouts."""
    weights, _ = join("t", 1.0)
    claim = lambda version: weights.mutating(version=version).__enter__()  # noqa: E731
    takes_spec = (weights.replicate, weights.update, weights.wait_for)
    waits = (weights.replicate, weights.unpublish, weights.wait_for, weights.check, weights.close)
    calls = [(call, (value,), {}) for call in (weights.publish, claim) for value in NO_VERSIONS]
    calls += [(call, (value,), {}) for call in takes_spec for value in NO_SPECS]
    calls += [(call, (), {"timeout": value}) for call in waits for value in NO_TIMEOUTS]
    for call, arguments, options in calls:
        match = "timeout" if options else None
        with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError, match=match):
            call(*arguments, **options)
    assert weights.version is None
    assert weights.publish(1) == 1


def test_versions_that_go_backwards_or_change(join):
    trainer, array = join("t", 1.0)
    trainer.publish(5)
    with pytest.raises(tensorhub.NotDrained, match="still holds version 5"):
        trainer.publish(6)
    trainer.unpublish()
    with within(AT_ONCE_S), pytest.raises(tensorhub.VersionConflict, match="lower than the newest, 5"):
        trainer.publish(4)
    array += 1
    with within(AT_ONCE_S), pytest.raises(tensorhub.VersionConflict, match="other content"):
        trainer.publish(5)
    assert trainer.publish(6) == 6


BASE = {"first": np.zeros((4, 3), np.float32), "second": np.zeros(5, np.int64)}
OTHERS = {
    "dtype": ({"first": np.zeros((4, 3), np.float16), "second": np.zeros(5, np.int64)}, "'first'.*dtype"),
    "shape": ({"first": np.zeros((4, 3), np.float32), "second": np.zeros((5, 1), np.int64)}, "'second'.*shape"),
    "name": ({"first": np.zeros((4, 3), np.float32), "third": np.zeros(5, np.int64)}, "'third'|'second'"),
    "order": ({"second": np.zeros(5, np.int64), "first": np.zeros((4, 3), np.float32)}, "order"),
    "missing": ({"first": np.zeros((4, 3), np.float32)}, "'second'"),
    "strides": ({"first": np.zeros((3, 4), np.float32).T, "second": np.zeros(5, np.int64)}, "'first'.*strides"),
}


def test_other_tensors_are_refused_by_name_and_nothing_is_written(join):
    trainer, _ = join("t", tensors={name: array + 1 for name, array in BASE.items()})
    trainer.publish(1)
    for what, (tensors, words) in OTHERS.items():
        reader, _ = join(what, tensors=tensors)
        with within(AT_ONCE_S), pytest.raises(tensorhub.LayoutMismatch, match=words):
            reader.replicate("latest")
        assert not any(array.any() for array in tensors.values())


class Name(str, enum.Enum):  # noqa: UP042 - of a StrEnum str() is the text itself
    MODEL = "m"


def test_versions_names_and_places_by_any_name(server):
    version = np.int64(9)
    place = {"shard": np.int64(0), "shards": np.int64(1), "site": np.str_("here"), "prefetch": np.str_("never")}
    boxes = [{"w": [Box(np.str_("g"), (4, 4), (0, 0), (4, 4))]}]
    array = np.ones((4, 4), np.float32)
    with (
        tensorhub.open(Name.MODEL, replica=np.str_("t"), server=server.address, **place) as weights,
        tensorhub.open_group(Name.MODEL, replica="g", shards=np.int64(1), server=server.address) as group,
    ):
        weights.register({np.str_("w"): array}, boxes=boxes[0])
        group.register([{"w": np.zeros((4, 4), np.float32)}], boxes=boxes)
        assert weights.publish(version) == 9
        assert group.replicate(version) == 9
        group.pin(version)
        group.unpin(version)
        assert group.wait_for(version) == 9
        assert weights.wait_held(version) == ("g",)
        with weights.mutating(version=version + 1):
            array += 1
        assert group.update(version + 1) == 10
        assert tensorhub.connect(server.address).layout("m", version + 1).size_bytes == array.nbytes


SECONDS = [
    np.float32(5.5),
    np.float16(5.5),
    np.int64(5),
    np.array(5.5),
    torch.tensor(5.5),
    Fraction(11, 2),
    Decimal("5.5"),
]
NO_SECONDS = [np.float32("nan"), np.float64("inf"), Decimal("NaN"), Decimal("sNaN"), Fraction(10**400), np.bool_(True)]
NO_SECONDS += [np.array([5.5]), torch.tensor(True), 5j, np.complex64(5), np.int64(0), -np.float32(1), b"5", [5]]


def test_seconds_by_any_number(server):
    for seconds in SECONDS:
        with tensorhub.open("m", replica="t", server=server.address, timeout=seconds, call_timeout=seconds) as weights:
            weights.register({"w": np.ones(4)})
            assert weights.publish(1, timeout=seconds) == 1
        assert server_settings({}, lease_s=seconds).lease_s == float(seconds)
    for seconds in NO_SECONDS:
        with pytest.raises(tensorhub.UsageError, match=r"^timeout="):
            tensorhub.connect(server.address, timeout=seconds)


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2)], ids=repr)
def test_counts_by_any_integer(number):
    options = worker_options({}, retain=number, chunk_bytes=number, host_bytes=number)
    assert (options.retain, options.chunk_bytes, options.host_bytes) == (2, 2, 2)
    assert server_settings({}, max_workers=number).max_workers == 2
    assert check_place("m", "r", number - 1, number) == ("m", "r", 1, 2)
    assert plain_spec(number) == 2
    assert parse_fraction(number / 4, "fraction") == 0.5


@pytest.mark.parametrize(
    ("module", "question", "patched", "says"),
    [
        ("gevent.monkey", "is_module_patched", ("threading", "socket", "select", "os"), "threading, socket, select"),
        ("eventlet.patcher", "is_monkey_patched", ("thread",), "thread"),
    ],
)
def test_threads_that_are_none_are_blamed_by_name(server, monkeypatch, module, question, patched, says):
    weights = tensorhub.open("m", replica="t", server=server.address)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{question: lambda name: name in patched}))
    for ask in (
        lambda: tensorhub.open("m", replica="r", server=server.address),
        lambda: tensorhub.load("m@1", server=server.address),
        lambda: tensorhub.connect(server.address),
        tensorhub.serve,
    ):
        with pytest.raises(tensorhub.UsageError, match=f"has patched {says} in this process") as raised:
            ask()
        assert "process of its own" in raised.value.hint
    patched = ("os", "signal", "queue", "subprocess", "time")
    assert tensorhub.connect(server.address).models() == ["m"], "what else is patched does no harm"
    weights.close()
