"""Bad input gets its own error, at once, with nothing changed, in words that name what was wrong."""

import socket
import threading

import numpy as np
import pytest

import tensorhub
from runtime.kit import in_threads, within

AT_ONCE_S = 1.0


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("model", ["", "a/b", "a@b", "-a", "a b", "ä", "x" * 300, None, 7, "a\n"]),
        ("replica", ["", "a/b", None, "x" * 300]),
        ("shard", [-1, 2, "0", None, 1.0, True]),
        ("shards", [0, -1, "2", 10**6, None]),
        ("server", ["http://", "nowhere:port", "x:1/path"]),
        ("timeout", [0, -1, float("nan"), "soon"]),
        ("call_timeout", [0, -1, float("inf")]),
        ("verify", ["maybe", 1]),
        ("chunk_bytes", [0, -1, "4 parsecs", 2**40]),
        ("host", ["203.0.113.7", "a\nb"]),
        ("token", ["a\nb"]),
        ("reliable", ["yes", None, 1]),
    ],
)
def test_a_bad_argument_of_open_is_named(server, argument, values):
    good = {"model": "m", "replica": "r", "shard": 0, "shards": 2, "server": server.address}
    for value in values:
        arguments = {**good, argument: value}
        with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError, match=argument):
            tensorhub.open(arguments.pop("model"), **arguments)
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


def test_something_else_at_the_servers_address_is_no_server():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with within(1.5), pytest.raises(tensorhub.ServerUnreachable):
            tensorhub.open("m", replica="r", server=address, timeout=0.5)


def test_a_shard_that_is_taken(join):
    join("t")
    with within(AT_ONCE_S), pytest.raises(tensorhub.ShardTaken, match=r"m/t\[0\]"):
        join("t")


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


@pytest.mark.parametrize("version", [-1, 2**63, "7", "latest", None, 1.0, True, b"7"])
def test_versions_that_are_none(join, version):
    weights, _ = join("t", 1.0)
    with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError):
        weights.publish(version)
    with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError), weights.mutating(version=version):
        pytest.fail("the block must not run")
    assert weights.version is None


@pytest.mark.parametrize("spec", [-1, "newest", "latest-", "latest--1", "", None, 1.5, "7"])
def test_specs_that_name_no_version(join, spec):
    weights, _ = join("t", 1.0)
    for call in (weights.replicate, weights.update, weights.wait_for):
        with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError):
            call(spec)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_timeouts_that_are_none(join, timeout):
    weights, _ = join("t", 1.0)
    for call in (weights.replicate, weights.unpublish, weights.wait_for, weights.check, weights.close):
        with within(AT_ONCE_S), pytest.raises(tensorhub.UsageError, match="timeout"):
            call(timeout=timeout)
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


def test_a_version_that_nobody_knows(join):
    trainer, _ = join("t", 1.0)
    trainer.publish(5)
    reader, array = join("r")
    with within(AT_ONCE_S), pytest.raises(tensorhub.VersionUnavailable, match="no version 6"):
        reader.replicate(6)
    assert not array.any()
    assert reader.replicate(5) == 5


BASE = {"first": np.zeros((4, 3), np.float32), "second": np.zeros(5, np.int64)}
OTHERS = {
    "dtype": ({"first": np.zeros((4, 3), np.float16), "second": np.zeros(5, np.int64)}, "'first'.*dtype"),
    "shape": ({"first": np.zeros((4, 3), np.float32), "second": np.zeros((5, 1), np.int64)}, "'second'.*shape"),
    "name": ({"first": np.zeros((4, 3), np.float32), "third": np.zeros(5, np.int64)}, "'third'|'second'"),
    "order": ({"second": np.zeros(5, np.int64), "first": np.zeros((4, 3), np.float32)}, "order"),
    "missing": ({"first": np.zeros((4, 3), np.float32)}, "'second'"),
    "strides": ({"first": np.zeros((3, 4), np.float32).T, "second": np.zeros(5, np.int64)}, "'first'.*strides"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_tensors_are_refused_by_name_and_nothing_is_written(join, what):
    trainer, _ = join("t", tensors={name: array + 1 for name, array in BASE.items()})
    trainer.publish(1)
    tensors, words = OTHERS[what]
    reader, _ = join("r", tensors=tensors)
    with within(AT_ONCE_S), pytest.raises(tensorhub.LayoutMismatch, match=words):
        reader.replicate("latest")
    assert not any(array.any() for array in tensors.values())


def test_shards_that_call_different_things(join):
    workers = [join("t", 1.0, shard=shard, shards=2)[0] for shard in range(2)]
    results = in_threads(lambda: workers[0].publish(1, timeout=5), lambda: workers[1].unpublish(timeout=5))
    assert [type(result) for result in results] == [tensorhub.GroupMismatch] * 2
    assert in_threads(*(lambda w=w: w.publish(1, timeout=5) for w in workers)) == [1, 1]


def test_a_shard_that_does_not_come(join):
    alone, _ = join("t", 1.0, shard=0, shards=2)
    with within(1.5), pytest.raises(tensorhub.DeadlineExceeded, match="shard 1 of 2"):
        alone.publish(1, timeout=0.5)
    other, _ = join("t", 1.0, shard=1, shards=2)
    assert in_threads(*(lambda w=w: w.publish(1, timeout=5) for w in (alone, other))) == [1, 1]


def test_a_shard_that_dies_fails_the_others_and_can_come_back(join, server):
    """Its place is free when its lease ends, and the group retries."""
    alive, _ = join("t", 1.0, shard=0, shards=2)
    dead, _ = join("t", 1.0, shard=1, shards=2)
    loop = dead._aio._thread.loop
    calling = threading.Thread(target=lambda: in_threads(lambda: dead.publish(1, timeout=5)))
    calling.start()
    loop.call_soon_threadsafe(dead._aio._client.driver._life.cancel)  # from now on it says nothing
    with within(6), pytest.raises(tensorhub.GroupIncomplete, match="shard 1"):
        alive.publish(1, timeout=5)
    calling.join(8)
    successor, _ = join("t", 1.0, shard=1, shards=2)
    assert in_threads(*(lambda w=w: w.publish(1, timeout=5) for w in (alive, successor))) == [1, 1]


def test_every_error_is_of_the_tree_and_names_the_worker(join):
    weights, _ = join("t", 1.0)
    with pytest.raises(tensorhub.TensorHubError, match="m") as caught:
        weights.replicate(3)
    assert caught.value.retryable
    assert caught.value.code == "version-unavailable"
